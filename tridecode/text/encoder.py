"""Encoding of text by the tokenizers library, in a child process if time and memory may be unbounded.

A tokenizer.json contains regular expressions and replacements. The well-known ones take time and memory proportional to
the length of the text. Others may backtrack exponentially, double the text repeatedly, panic or abort the process.
"""

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path

import tokenizers

from ..errors import PromptError, brief
from .sandbox import START_SECONDS, Program, Sandbox, SandboxError

MEMORY = 2 << 30  # Bytes of address space of a child process.
# Time limit of a child process in seconds: SECONDS + characters / CHARACTERS_A_SECOND.
SECONDS, CHARACTERS_A_SECOND = 10, 50_000
# Longer texts are encoded in a child process, because even well-known expressions backtrack over a long run of spaces.
MAX_LOCAL_CHARACTERS = 1 << 20
MAX_STEPS = 4  # Maximum steps of a normalizer or a pre-tokenizer. Each step may lengthen the text.

_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _letters(n: str) -> str:
    """Return the pattern of Qwen and Llama, with runs of digits as in `n`."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{n}|" + _WORDS % ""


def _cases(end: str, n: str) -> str:
    """Return the pattern of Mistral since Nemo and of o200k, with `end` after a word and runs of digits as in `n`."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{_UPPER}*{_LOWER}+{end}|{start}{_UPPER}+{_LOWER}*{end}|\p{{N}}{n}|" + _WORDS % "/"


QWEN2, LLAMA3 = _letters(""), _letters("{1,3}")
QWEN35 = QWEN2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r" ?[^\s\p{L}\p{N}]", r" ?[^\s\p{L}\p{M}\p{N}]")
TEKKEN, O200K = _cases("", ""), _cases(f"{_CONTRACTIONS}?", "{1,3}")
KNOWN_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    QWEN2, LLAMA3, QWEN35, TEKKEN, O200K, _cases("", "{1,3}"), _cases(f"{_CONTRACTIONS}?", ""),
}  # fmt: skip
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}


class Encoder:
    """An encoder of text for one tokenizer, which must not change afterwards.

    Args:
        source: path of the tokenizer's file, for error messages.

    Attributes:
        harmless: whether the tokenizer's time and memory are bounded. If so, only very long texts are encoded in a
            child process.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: Path | str):
        self._tokenizer, self._name = tokenizer, f"the tokenizer in {source}"
        self.harmless = _has_linear_cost(tokenizer)
        self.sandbox = _sandbox(tokenizer.to_str)

    def __call__(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`.

        Args:
            add_special_tokens: add the ids that the post-processor adds, such as bos.

        Raises:
            PromptError: the tokenizer cannot encode the text, or needs more time or memory than allowed.
        """
        if not self.harmless or len(text) > MAX_LOCAL_CHARACTERS:
            return self._in_child(text, add_special_tokens)
        try:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # tokenizers raises plain Exceptions. A panic in Rust is a BaseException.
            raise self._refusal(error) from None

    def _in_child(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self.sandbox.call([text, add_special_tokens], ceil(SECONDS + len(text) / CHARACTERS_A_SECOND))
        except SandboxError as error:
            if error.kind:
                raise self._refusal(error) from None
            raise PromptError(
                f"{self._name}: {error}: this text takes too long, or more than {MEMORY >> 30} GiB of memory; "
                "change the text, or check the tokenizer"
            ) from None

    def _refusal(self, error: BaseException) -> PromptError:
        return PromptError(f"{self._name} fails on this text ({brief(error)}); change the text, or check the tokenizer")


def check_in_child(data: str) -> str | None:
    """Load a tokenizer in a child process; return the error, or None if it can be loaded.

    This is for a tokenizer that may panic when it is loaded. In this process, a panic would write a page to stderr.

    Args:
        data: content of a tokenizer.json.
    """
    sandbox = _sandbox(lambda: data)
    try:
        sandbox.call(["", False], SECONDS)
    except SandboxError as error:
        return str(error)
    finally:
        sandbox.close()
    return None


def _sandbox(state: Callable[[], str]) -> Sandbox:
    return Sandbox(Program("tridecode.text.encoder:encoding", state, MEMORY, START_SECONDS, max_answer_bytes=1 << 30))


def encoding(state: str) -> Callable[[list], list[int]]:
    """Load a tokenizer from its JSON, in a child process; return a function of [text, add_special_tokens]."""
    tokenizer = tokenizers.Tokenizer.from_str(state)
    return lambda message: tokenizer.encode(message[0], add_special_tokens=message[1]).ids


def steps(part) -> list[dict]:
    """Return the steps of a normalizer, pre-tokenizer or decoder in order, with nested sequences flattened.

    None has no steps.
    """
    flat, pending = [], [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            keys = ("normalizers", "pretokenizers", "decoders")
            pending += reversed(next((step[key] for key in keys if key in step), []))
        else:
            flat.append(step)
    return flat


def _has_linear_cost(tokenizer: tokenizers.Tokenizer) -> bool:
    """Return whether the tokenizer's time and memory are known to be proportional to the length of the text."""
    model = tokenizer.model
    if isinstance(model, tokenizers.models.BPE):
        if len(model.continuing_subword_prefix or "") + len(model.end_of_word_suffix or "") > 16:
            return False
    elif not isinstance(model, tokenizers.models.Unigram):
        return False
    normalizers, pre_tokenizers = steps(tokenizer.normalizer), steps(tokenizer.pre_tokenizer)
    return (
        max(len(normalizers), len(pre_tokenizers)) <= MAX_STEPS
        and all(map(_is_linear_normalizer, normalizers))
        and all(map(_is_linear_pre_tokenizer, pre_tokenizers))
    )


def _is_linear_normalizer(step: dict) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return 0 < len(old) >= len(new)
        case {"type": "Prepend", "prepend": text}:
            return len(text) <= 16
    return step["type"] in _NORMALIZERS


def _is_linear_pre_tokenizer(step: dict) -> bool:
    match step:
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return pattern in KNOWN_PATTERNS
        case {"type": "Split", "pattern": {"String": text}}:
            return bool(text)
    return step["type"] in _PRE_TOKENIZERS
