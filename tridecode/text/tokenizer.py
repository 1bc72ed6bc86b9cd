"""Tokenizer: conversion of text and chats to token ids, and of token ids to text.

Control tokens (<|im_end|>, </s>, <think>, ...) mark the structure of a chat. Only the chat template may produce them.
In a user's text they are encoded as ordinary characters.
"""

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import tokenizers

from ..arguments import check_messages, shown
from ..errors import NO_CHAT, CheckpointError, PromptError, TooLong, brief
from ..models.files import present, read_file
from .chat_template import MAX_CHILDREN, ChatTemplate
from .detokenizer import Detokenizer, TokenBytes
from .encoder import Encoder, check_in_child
from .gguf_tokenizer import load_gguf_tokenizer
from .special_tokens import add_declared, read_settings, special_tokens
from .thinking import CLOSE, OPEN, last_tag
from .token_set import TokenSet
from .token_sizes import longest, min_token_count

MAX_DEPTH = 100  # Maximum nesting of lists and objects in messages and template variables.
_FILE_LIMIT = 128 << 20  # Maximum bytes of tokenizer.json.
_TEMPLATE_LIMIT = 1 << 20  # Maximum bytes of a chat template.
_MAX_CONTROL_CHARACTERS = 1000  # Maximum characters of a control token.
_ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_MARKUP = re.compile(r"\s*(<.*>|\[.*\])\s*", re.DOTALL)


class ChatPrompt(NamedTuple):
    """A chat, formatted by the chat template, up to the beginning of the answer.

    Attributes:
        ids: token ids.
        tag: the think tag, OPEN or CLOSE, with which the template ends the prompt, or "". After OPEN, the answer begins
            inside a think block. After CLOSE, the answer contains no think block.
    """

    ids: list[int]
    tag: str


class Tokenizer:
    """The tokenizer of a checkpoint: tokenizer.json, the names of its special tokens and its chat template.

    Args:
        special_tokens: text by name (bos_token, eos_token, ...). The chat template can read them as variables.
        template: chat template, in Jinja or as an object.
        source: path of tokenizer.json, for error messages.

    Attributes:
        vocab_size: number of tokens, including added tokens. A model's vocabulary is often padded to a larger size.
        bos_id, eos_id: token ids; None if there is no such token.
        special_ids: ids of the special tokens, which are omitted from text by default.
        directory: directory of the tokenizer's files.
        has_template: whether there is a chat template.
        template_source: the chat template in Jinja; "" if there is none.
        supports_thinking: whether the chat template contains think blocks, so that an answer may begin with one.
    """

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        special_tokens: dict[str, str],
        template: str | ChatTemplate | None = None,
        source: Path | str = "tokenizer.json",
    ):
        self._tokenizer, self._source = tokenizer, source
        tokenizer.no_padding()
        tokenizer.no_truncation()
        self._encode, self._token_bytes = Encoder(tokenizer, source), TokenBytes(tokenizer, source)
        self._template = ChatTemplate(template, special_tokens) if isinstance(template, str) else template
        self.has_template = self._template is not None
        self.template_source = self._template.source if self._template else ""
        self.supports_thinking = OPEN in self.template_source or CLOSE in self.template_source
        self.directory = Path(source).parent
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_id = (
            tokenizer.token_to_id(special_tokens[name]) if name in special_tokens else None
            for name in ("bos_token", "eos_token")
        )
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if token.content}
        self.special_ids = self._token_bytes.special
        self._added = {token.content: i for i, token in added.items()}
        self._special = TokenSet(token.content for token in added.values() if token.special)
        # Added tokens that look like markup are control tokens. Other added tokens (words, runs of spaces) are text.
        control = {i: t.content for i, t in added.items() if t.special or _MARKUP.fullmatch(t.content)}
        self._control, self._control_ids = TokenSet(control.values()), frozenset(control)
        # In messages of users, think tags are text, whether or not they are tokens.
        self._user = TokenSet({*control.values(), OPEN, CLOSE})
        if self._control.longest > _MAX_CONTROL_CHARACTERS:
            token = max(control.values(), key=len)
            raise CheckpointError(
                f"{source}: the added token {shown(token)} has {len(token):,} characters; at most "
                f"{_MAX_CONTROL_CHARACTERS:,} are supported"
            )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint, a directory or a GGUF file. Raises CheckpointError."""
        path = Path(path)
        if path.is_file():
            stored = load_gguf_tokenizer(path)
            template = _checked_template(stored.template, path, "tokenizer.chat_template", stored.special_tokens)
            return cls(stored.tokenizer, stored.special_tokens, template, path)
        file = path / "tokenizer.json"
        if not present(file):
            raise CheckpointError(
                f"{path}: no tokenizer.json; make one with transformers' AutoTokenizer and its save_pretrained"
            )
        tokenizer = _load(file)
        settings = read_settings(path)
        add_declared(tokenizer, path, settings)
        named = special_tokens(settings)
        return cls(tokenizer, named, _template(path, settings, named), file)

    def start(self, callers: int = 1) -> None:
        """Start the child processes of the chat template and the encoder in the background.

        Args:
            callers: number of requests that may be encoded at the same time.
        """
        if self._template:
            self._template.sandbox.start(min(callers, MAX_CHILDREN))
        if not self._encode.harmless:
            self._encode.sandbox.start()

    def wait(self) -> None:
        """Wait until the child processes that `start` is starting are ready."""
        self._encode.sandbox.wait()
        if self._template:
            self._template.sandbox.wait()

    def close(self) -> None:
        """End the child processes. The next use starts new ones."""
        if self._template:
            self._template.sandbox.close()
        self._encode.sandbox.close()
        if "_text_encoder" in self.__dict__:  # A cached property, which is made when a text needs it.
            self._text_encoder.sandbox.close()

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that the token adds to a text; for a special token, its name."""
        return self._token_bytes(token)

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Names of the variables that the chat template reads and `encode_chat` accepts (tools, ...)."""
        return frozenset() if self._template is None else self._template.variables()

    def encode(
        self, text: str, allow_special: bool = False, context: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the token ids of a text.

        Lone surrogates become U+FFFD.

        Args:
            allow_special: encode control tokens in the text as control tokens, instead of as ordinary characters.
            context: context length. If a lower bound of the number of tokens exceeds it, raise TooLong before
                tokenization.
            add_special_tokens: add the tokens that the post-processor adds to a whole text, usually bos.

        Raises:
            PromptError: `text` is not a string, or cannot be encoded.
            TooLong: the text cannot fit in `context` tokens.
        """
        if not isinstance(text, str):
            raise PromptError(f"a prompt must be text, got {type(text).__name__}")
        text = _clean(text)
        self._check_size(text, context)
        ids = self._encode(text, add_special_tokens)
        if not allow_special and self._count_control(ids) > (self._added_control if add_special_tokens else 0):
            ids = self._text_encoder(text, add_special_tokens)
        return ids

    def encode_within(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, without the tokens that the post-processor adds to a whole text.

        Control tokens in the text are encoded as control tokens.
        """
        return self._encode(_clean(text))

    def _count_control(self, ids: list[int]) -> int:
        """Return the number of control tokens in `ids`."""
        return sum(token in self._control_ids for token in ids) if self._control_ids.intersection(ids) else 0

    @cached_property
    def _added_control(self) -> int:
        """The number of control tokens that the post-processor adds to each text."""
        return self._count_control(self._encode("", add_special_tokens=True))

    def encode_chat(self, messages: Sequence[dict], context: int | None = None, /, **template_variables) -> list[int]:
        """Return the token ids of `prepare_chat`."""
        return self.prepare_chat(messages, context, **template_variables).ids

    def prepare_chat(
        self,
        messages: Sequence[dict],
        context: int | None = None,
        continued: bool = False,
        add_special_tokens: bool = False,
        /,
        **template_variables,
    ) -> ChatPrompt:
        """Return a chat, formatted by the chat template, up to the beginning of the answer.

        Control tokens in messages are encoded as ordinary characters. In messages of the assistant, this applies only
        to special tokens. Its <think> was sampled as one token, and templates search for </think>.

        Args:
            messages: dicts with the strings "role" and "content". Other keys are plain JSON values for the template.
            context: as for `encode`.
            continued: end the prompt with the content of the last message, which the answer continues.
            add_special_tokens: as for `encode`. Most chat templates write these tokens themselves.
            template_variables: plain JSON values (enable_thinking, tools, ...).

        Raises:
            PromptError: the messages are malformed, there is no template, or the template refuses the messages.
            TooLong: the chat cannot fit in `context` tokens.
        """
        if self._template is None:
            raise PromptError(f"this model has no chat template (it may be a base model); {NO_CHAT}")
        messages, variables = _plain(messages, template_variables)
        end = ""  # A private-use character that marks the end of the last message.
        if continued:
            end = self._free_chars(1, messages, variables)[0]
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + end}]
            variables = variables | {"add_generation_prompt": False}
        text = self._render(messages, variables, end)
        self._check_size(text, context)
        marks = self._marks(messages, variables)
        marked_messages = [
            self._mark(message, marks, self._special if message["role"] == "assistant" else self._user)
            for message in messages
        ]
        marked_variables = self._mark(variables, marks, self._user)
        changed = (marked_messages, marked_variables) != (messages, variables)
        marked = self._render(marked_messages, marked_variables, end) if changed else text
        tag = last_tag(marked)
        if _restore(marked, marks) == text:
            ids = self._encode(text, add_special_tokens)
            added = self._added_control if add_special_tokens else 0
            if self._count_control(ids) == len(self._control.spans(marked)) + added:
                return ChatPrompt(ids, tag)  # The template wrote all control tokens of this prompt.
        renamed = self._control.replace(marked, self._names.__getitem__)
        return ChatPrompt(self._text_encoder(_restore(renamed, marks), add_special_tokens), tag)

    def _render(self, messages: list[dict], variables: dict, end: str) -> str:
        """Return the text of the chat template, up to the character `end` if it is not empty."""
        assert self._template is not None
        text = self._template.render(messages, variables)
        if end and end not in text:
            raise PromptError("the chat template omits the last message, so that an answer cannot continue it")
        return text[: text.rindex(end)] if end else text

    def _check_size(self, text: str, context: int | None) -> None:
        """Raise TooLong if a text cannot fit in `context` tokens."""
        # The bound takes time to compute. So only texts of more than 4 characters per position are checked.
        if context is None or len(text) <= 4 * context:
            return
        if (tokens := min_token_count(text, self.longest_token)) > context:
            raise TooLong(tokens, context, is_lower_bound=True)

    @cached_property
    def longest_token(self) -> float:
        """Maximum number of UTF-8 bytes of one token."""
        return longest(self._tokenizer, self._token_bytes)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`. An id that is not in the tokenizer becomes U+FFFD."""
        detokenizer = Detokenizer(self._token_bytes, (), skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """Return a Detokenizer for one stream of tokens, which continues the text of `prompt_ids`."""
        return Detokenizer(self._token_bytes, prompt_ids, skip_special)

    def token_id(self, text: str) -> int | None:
        """Return the id of the added token with this text; None if there is none."""
        return self._added.get(text)

    def special_tokens_in(self, texts: Sequence[str]) -> dict[int, str]:
        """Return the special tokens that occur in `texts`: text by id."""
        names = {text[start:stop] for text in texts for start, stop in self._special.spans(text)}
        ids = self._tokenizer.get_added_tokens_decoder().items() if names else ()
        return {i: token.content for i, token in ids if token.content in names}

    # A user's text rarely contains control tokens. If it does, a second encoder encodes the prompt. In it, each control
    # token has an unguessable name instead of its text. The control tokens that the template wrote are replaced by
    # these names. The user's control tokens remain text, which the second encoder does not recognize. To distinguish
    # the two, the first character of each control token in a message is replaced by a private-use character before
    # rendering.

    @cached_property
    def _names(self) -> dict[str, str]:
        """The unguessable name of each control token. A normalizer does not change lower-case letters and digits."""
        nonce = secrets.token_hex(16)
        return {token: f"x{nonce}x{i}x" for i, token in enumerate(self._control)}

    @cached_property
    def _text_encoder(self) -> Encoder:
        """The second encoder: the same tokenizer and ids, with each control token renamed as in `_names`."""
        state, names = json.loads(self._tokenizer.to_str()), self._names
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = state["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
        if "merges" in model:
            pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"])
            model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        renamed = tokenizers.Tokenizer.from_str(json.dumps(state))
        if any(renamed.token_to_id(name) != self._tokenizer.token_to_id(token) for token, name in names.items()):
            raise PromptError("this tokenizer cannot encode control tokens as text; remove them from the prompt")
        return Encoder(renamed, self._source)

    @cached_property
    def _template_chars(self) -> frozenset[str]:
        """The characters of the chat template."""
        return frozenset(self.template_source)

    @cached_property
    def _first_char_pattern(self) -> re.Pattern[str]:
        """A pattern of one character that begins a control token or a think tag."""
        return re.compile(f"[{re.escape(''.join(self._user.first_chars))}]")

    def _marks(self, *values) -> dict[str, str]:
        """Return a private-use character for each first character of a control token or a think tag.

        The private-use characters occur neither in the template nor in `values`.
        """
        begins = sorted(self._user.first_chars)
        return dict(zip(begins, self._free_chars(len(begins), *values)))

    def _free_chars(self, count: int, *values) -> list[str]:
        """Return private-use characters that occur neither in the template nor in `values`."""
        used = self._template_chars.union(json.dumps(values, ensure_ascii=False))
        private = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
        free = list(islice((char for char in private if char not in used), count))
        if len(free) < count:
            raise PromptError("the messages use nearly all private-use characters of Unicode; remove some")
        return free

    def _mark(self, value, marks: dict[str, str], tokens: TokenSet):
        """Replace the first character of each control token by its private-use character.

        Keys are only changed if they contain a whole control token, because templates look up keys by name. In other
        strings, an incomplete control token at the end is also marked.

        Args:
            value: a JSON value.
            marks: private-use character by first character.
            tokens: the control tokens to mark in strings. In keys, all control tokens are marked.
        """
        if isinstance(value, dict):
            return {
                self._control.replace(key, lambda token: marks[token[0]] + token[1:]): self._mark(item, marks, tokens)
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._mark(item, marks, tokens) for item in value]
        if not isinstance(value, str) or marks.keys().isdisjoint(value):
            return value
        places = [
            i for i in map(re.Match.start, self._first_char_pattern.finditer(value)) if tokens.starts_at(value, i)
        ]
        # The template's text after this string may complete a control token that begins at its end.
        end = len(value.rstrip())
        tail = range(max(end - tokens.longest, 0), end)
        places += [i for i in tail if value[i] in marks and tokens.begins(value[i:end])]
        if not places:
            return value
        chars = list(value)
        for i in set(places):
            chars[i] = marks[chars[i]]
        return "".join(chars)


def _restore(text: str, marks: dict[str, str]) -> str:
    """Replace private-use characters by the original characters."""
    return text.translate({ord(mark): char for char, mark in marks.items()})


def _clean(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD. Tokenizers accept valid Unicode only."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _plain(messages, variables: dict) -> tuple[list[dict], dict]:
    """Validate messages and variables, and rebuild them from JSON, so that a template gets only plain values."""
    check_messages(messages, roles=())  # Any role is allowed. The template may refuse it.
    try:
        text = json.dumps([[{k: v for k, v in m.items() if v is not None} for m in messages], variables])
        messages, variables = _clean_value(json.loads(text), MAX_DEPTH)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"messages and template variables must be plain JSON values: {error}") from None
    return messages, variables


def _clean_value(value, depth: int):
    """Apply `_clean` to all strings of a JSON value. Raises ValueError if it is nested more than `depth` deep."""
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, (dict, list)) and depth == 0:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {_clean(key): _clean_value(item, depth - 1) for key, item in value.items()}
    return [_clean_value(item, depth - 1) for item in value] if isinstance(value, list) else value


def _load(file: Path) -> tokenizers.Tokenizer:
    data = read_file(file, _FILE_LIMIT)
    try:
        # Loading a Precompiled normalizer may panic and write a page to stderr, so a child process tries it first.
        if b'"Precompiled"' in data and (reason := check_in_child(data.decode())):
            raise ValueError(reason)
        tokenizer = tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises plain Exceptions. A panic in Rust is a BaseException.
        raise CheckpointError(f"{file}: not a tokenizer ({brief(error)}); download the file again") from None
    _check_ids(file, tokenizer, data.decode())
    return tokenizer


def _check_ids(file: Path, tokenizer: tokenizers.Tokenizer, data: str) -> None:
    """Raise CheckpointError if two tokens of a tokenizer.json have the same id.

    The library would use one of the two texts, and another one in each process, or give an added token another id.
    """
    texts: dict[int, str] = {}
    place = _ADDED_TOKENS.search(data)
    added = json.JSONDecoder().raw_decode(data, place.end())[0] if place else []
    own = tokenizer.get_vocab(with_added_tokens=False)
    for text, token in chain(own.items(), ((entry["content"], entry["id"]) for entry in added)):
        if (other := texts.setdefault(token, text)) != text:
            first, second = sorted((other, text))
            raise CheckpointError(
                f"{file}: the tokens {shown(first)} and {shown(second)} have the same id {token:,}; change one id"
            )


def _template(path: Path, settings: dict, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """Return the chat template of chat_template.jinja, or else that of tokenizer_config.json; None if there is none."""
    file = path / "chat_template.jinja"
    if present(file):
        try:
            return ChatTemplate(read_file(file, _TEMPLATE_LIMIT).decode("utf-8"), special_tokens, file)
        except ValueError as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); download the file again") from None
    file, value = path / "tokenizer_config.json", settings.get("chat_template")
    if isinstance(value, list):
        named = {str(entry.get("name")): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default", next(iter(named.values()), None))
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{file}: chat_template must be a string or a list of named templates")
    return _checked_template(value, file, "chat_template", special_tokens)


def _checked_template(source: str | None, file: Path, key: str, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """Return the chat template with this source, None if there is none. Raises CheckpointError if it is too long."""
    if source is not None and len(source) > _TEMPLATE_LIMIT:
        raise CheckpointError(
            f"{file}: {key} has {len(source):,} characters; at most {_TEMPLATE_LIMIT:,} are supported"
        )
    return None if source is None else ChatTemplate(source, special_tokens, file)
