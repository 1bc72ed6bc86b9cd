"""Tokenizer: text and chats to token ids, and back.

Control tokens (<|im_end|>, </s>, <think>, ...) steer a model. Only the chat template may write them: in a user's text
they are ordinary characters.
"""

import json
import re
import secrets
from collections.abc import Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path

import tokenizers

from ..arguments import check_messages, shown
from ..errors import NO_CHAT, CheckpointError, PromptError, TooLong, brief
from ..models.files import present, read_file
from ..models.reader import read_json
from .chat_template import CHILDREN, ChatTemplate
from .detokenizer import Detokenizer, TokenBytes
from .encoder import Encoder, check_in_child
from .thinking import CLOSE
from .token_set import TokenSet
from .token_sizes import fewest, longest

_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEEPEST = 100  # lists and objects within each other, in messages and template variables
_FILE_LIMIT = 128 << 20  # bytes of tokenizer.json
_TEMPLATE_LIMIT = 1 << 20  # bytes of a chat template
_LONGEST_CONTROL = 1000  # characters of a control token
_MARKUP = re.compile(r"\s*(<.*>|\[.*\])\s*", re.DOTALL)


class Tokenizer:
    """The tokenizer of a checkpoint: tokenizer.json, the names of its special tokens and its chat template.

    Args:
        special_tokens: text by name (bos_token, ...), for templates.
        template: Jinja.
        source: its file, for messages.

    Attributes:
        vocab_size: tokens, added ones included; a model's own vocabulary is often padded beyond it.
        bos_id, eos_id: None if there is no such token.
        special_ids: the tokens that no text shows.
        directory: that of its files.
        thinks: whether the chat template knows think blocks, so that an answer may begin with one.
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
        self.thinks, self.directory = CLOSE in self.template_source, Path(source).parent
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        self.bos_id, self.eos_id = (
            tokenizer.token_to_id(special_tokens[name]) if name in special_tokens else None
            for name in ("bos_token", "eos_token")
        )
        added = {i: token for i, token in tokenizer.get_added_tokens_decoder().items() if token.content}
        self.special_ids = self._token_bytes.special
        self._special = TokenSet(token.content for token in added.values() if token.special)
        # Tokens added as vocabulary (words, runs of spaces) are text like any other; markup is not.
        control = {i: t.content for i, t in added.items() if t.special or _MARKUP.fullmatch(t.content)}
        self._control, self._control_ids = TokenSet(control.values()), frozenset(control)
        if self._control.longest > _LONGEST_CONTROL:
            longest = max(control.values(), key=len)
            raise CheckpointError(
                f"{source}: the added token {shown(longest)} has {len(longest):,} characters; at most "
                f"{_LONGEST_CONTROL:,} are supported"
            )

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load the tokenizer of a checkpoint's directory. Raises CheckpointError."""
        path = Path(path)
        file = path / "tokenizer.json"
        if not present(file):
            raise CheckpointError(
                f"{path}: no tokenizer.json; make one with transformers' AutoTokenizer and its save_pretrained"
            )
        tokenizer = _load(file)
        settings = _read(path / "special_tokens_map.json") | _read(path / "tokenizer_config.json")
        special_tokens = _special_tokens(settings)
        return cls(tokenizer, special_tokens, _template(path, settings, special_tokens), file)

    def start(self, callers: int = 1) -> None:
        """Start its child processes in the background, for `callers` requests at a time."""
        if self._template:
            self._template.sandbox.start(min(callers, CHILDREN))
        if not self._encode.harmless:
            self._encode.sandbox.start()

    def wait(self) -> None:
        """Wait until the processes that `start` starts are ready."""
        self._encode.sandbox.wait()
        if self._template:
            self._template.sandbox.wait()

    def token_bytes(self, token: int) -> bytes:
        """Return the token's part of a text; that of a special token is its name."""
        return self._token_bytes(token)

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """The variables of the chat template that `encode_chat` takes (tools, enable_thinking, ...)."""
        return frozenset() if self._template is None else self._template.variables()

    def encode(self, text: str, allow_special: bool = False, context: int | None = None) -> list[int]:
        """Return the token ids of a raw text, with those that the tokenizer puts around a text (bos, for most).

        Lone surrogates become U+FFFD.

        Args:
            allow_special: read control tokens in the text as such.
            context: raise TooLong, at once, for a text that surely has more tokens.
        """
        if not isinstance(text, str):
            raise PromptError(f"a prompt must be text, got {type(text).__name__}")
        text = _clean(text)
        self._check_size(text, context)
        ids = self._encode(text, around=True)
        if not allow_special and self._count_control(ids) > self._control_around:
            ids = self._neutral(text, around=True)
        return ids

    def encode_within(self, text: str) -> list[int]:
        """Return the token ids of a part of a text, with nothing around it."""
        return self._encode(_clean(text))

    def _count_control(self, ids: list[int]) -> int:
        return sum(token in self._control_ids for token in ids) if self._control_ids.intersection(ids) else 0

    @cached_property
    def _control_around(self) -> int:
        """The number of control tokens that the post-processor puts around any text."""
        return self._count_control(self._encode("", around=True))

    def encode_chat(self, messages: Sequence[dict], context: int | None = None, /, **template_variables) -> list[int]:
        """Return the token ids of a conversation, through the chat template, up to where the answer begins.

        Only the template writes control tokens. In the assistant's own messages those that are not special count too:
        its <think> was one token, and templates look for </think>.

        Args:
            messages: dicts with the strings "role" and "content". Other keys reach the template as plain JSON values.
            context: as for `encode`.
            template_variables: plain JSON values (enable_thinking, tools, ...).

        Raises:
            PromptError: the messages are malformed, there is no template, or it refuses them.
        """
        if self._template is None:
            raise PromptError(f"this model has no chat template (it may be a base model); {NO_CHAT}")
        messages, variables = _plain(messages, template_variables)
        text = self._template.render(messages, variables)
        self._check_size(text, context)
        marks = self._marks(messages, variables)
        marked_messages = [
            self._mark(message, marks, self._special if message["role"] == "assistant" else self._control)
            for message in messages
        ]
        marked_variables = self._mark(variables, marks, self._control)
        changed = (marked_messages, marked_variables) != (messages, variables)
        marked = self._template.render(marked_messages, marked_variables) if changed else text
        if _restore(marked, marks) == text:
            ids = self._encode(text)
            if self._count_control(ids) == len(self._control.spans(marked)):
                return ids  # no control token in it is a user's
        renamed = self._control.replace(marked, self._names.__getitem__)
        return self._neutral(_restore(renamed, marks))

    def _check_size(self, text: str, context: int | None) -> None:
        # Counting takes time, and nearly no text is so long.
        if context is not None and len(text) > 4 * context and (least := fewest(text, self._longest)) > context:
            raise TooLong(least, context, or_more=True)

    @cached_property
    def _longest(self) -> float:
        return longest(self._tokenizer, self._token_bytes)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of `ids`, with U+FFFD for ids that the tokenizer lacks."""
        detokenizer = Detokenizer(self._token_bytes, (), skip_special)
        return "".join(map(detokenizer.push, ids)) + detokenizer.flush()

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special: bool = True) -> Detokenizer:
        """Return a Detokenizer for one stream of tokens. With `prompt_ids` its text continues that of the prompt."""
        return Detokenizer(self._token_bytes, prompt_ids, skip_special)

    # Nearly always a user's text has no control tokens, and the tokenizer reads the prompt as it is. Otherwise a twin
    # reads it, which knows the control tokens by unguessable names only: those that the template wrote are renamed, a
    # user's are text. To tell them apart, the first character of each control token in a message is replaced by a
    # private-use character before the template sees it.

    @cached_property
    def _names(self) -> dict[str, str]:
        # Lower case, letters and digits: nothing that a normaliser would change.
        nonce = secrets.token_hex(16)
        return {token: f"x{nonce}x{i}x" for i, token in enumerate(self._control)}

    @cached_property
    def _neutral(self) -> Encoder:
        """The twin: the same tokenizer and ids, each control token under its name in `_names`."""
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
        twin = tokenizers.Tokenizer.from_str(json.dumps(state))
        if any(twin.token_to_id(name) != self._tokenizer.token_to_id(token) for token, name in names.items()):
            raise PromptError("this tokenizer cannot read control tokens as text; remove them from the prompt")
        return Encoder(twin, self._source)

    @cached_property
    def _template_chars(self) -> frozenset[str]:
        return frozenset(self.template_source)

    @cached_property
    def _beginnings(self) -> re.Pattern[str]:
        return re.compile(f"[{re.escape(''.join(self._control.first_chars))}]")

    def _marks(self, *values) -> dict[str, str]:
        """Return, for each character that begins a control token, a private-use character that occurs nowhere."""
        used = self._template_chars.union(json.dumps(values, ensure_ascii=False))
        begins = sorted(self._control.first_chars)
        private = map(chr, chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE)))
        free = list(islice((char for char in private if char not in used), len(begins)))
        if len(free) < len(begins):
            raise PromptError("the messages use nearly all private-use characters of Unicode; remove some")
        return dict(zip(begins, free))

    def _mark(self, value, marks: dict[str, str], tokens: TokenSet):
        """Replace the first character of each of `tokens` in strings, and of each of `_control` in keys.

        Templates look up keys by name: those without a whole control token stay as they are.
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
        places = [i for i in map(re.Match.start, self._beginnings.finditer(value)) if tokens.starts_at(value, i)]
        # The template's next characters may complete a control token that begins at the end of a text.
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
    return text.translate({ord(mark): char for char, mark in marks.items()})


def _clean(text: str) -> str:
    """Join surrogate pairs and replace lone surrogates by U+FFFD: tokenizers take valid Unicode only."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _plain(messages, variables: dict) -> tuple[list[dict], dict]:
    """Check messages and variables, and rebuild them from JSON: a template must see no object with other methods."""
    check_messages(messages, roles=())  # a template may know others
    try:
        given = json.dumps([[{k: v for k, v in m.items() if v is not None} for m in messages], variables])
        messages, variables = _clean_value(json.loads(given), DEEPEST)
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(f"messages and template variables must be plain JSON values: {error}") from None
    return messages, variables


def _clean_value(value, depth: int):
    if isinstance(value, str):
        return _clean(value)
    if isinstance(value, (dict, list)) and depth == 0:
        raise ValueError(f"nested more than {DEEPEST} deep")
    if isinstance(value, dict):
        return {_clean(key): _clean_value(item, depth - 1) for key, item in value.items()}
    return [_clean_value(item, depth - 1) for item in value] if isinstance(value, list) else value


def _load(file: Path) -> tokenizers.Tokenizer:
    data = read_file(file, _FILE_LIMIT)
    try:
        # Loading this part may panic, which writes a page to stderr: a child tries first.
        if b'"Precompiled"' in data and (reason := check_in_child(data.decode())):
            raise ValueError(reason)
        return tokenizers.Tokenizer.from_buffer(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers raises Exception itself, or panics
        raise CheckpointError(f"{file}: not a tokenizer ({brief(error)}); download the file again") from None


def _read(path: Path) -> dict:
    return read_json(path) if present(path) else {}


def _special_tokens(settings: dict) -> dict[str, str]:
    """Return the special tokens by name. Each is a string, or an object with its "content"."""
    found = {}
    for name in _TOKEN_NAMES:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def _template(path: Path, settings: dict, special_tokens: dict[str, str]) -> ChatTemplate | None:
    """Return the chat template of its own file, else of tokenizer_config.json, which may have several by name."""
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
        raise CheckpointError(f"{file}: chat_template must be text or a list of named ones")
    if value is not None and len(value) > _TEMPLATE_LIMIT:
        raise CheckpointError(
            f"{file}: chat_template has {len(value):,} characters; at most {_TEMPLATE_LIMIT:,} are supported"
        )
    return None if value is None else ChatTemplate(value, special_tokens, file)
