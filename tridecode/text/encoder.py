"""Text to token ids by the tokenizers library; in a child process if a tokenizer's own program might run away.

A tokenizer.json has regular expressions and replacements. The well-known ones read any text in time and memory that
grow with its length. Others may backtrack without end, double the text again and again, panic or abort.
"""

import json
from collections.abc import Callable
from math import ceil
from pathlib import Path

import tokenizers

from ..errors import PromptError, brief
from .sandbox import START_SECONDS, Program, Sandbox, SandboxError

MEMORY = 2 << 30  # bytes for a child
SECONDS, CHARACTERS_A_SECOND = 10, 50_000  # time for a child: SECONDS and the text's length over CHARACTERS_A_SECOND
LONGEST = 1 << 20  # characters read in this process: even a well-known expression backtracks over a run of spaces
MOST_STEPS = 4  # of a normalizer or a pre-tokenizer: each may lengthen the text

_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
KNOWN_PATTERNS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    # Qwen and Llama
    *(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{n}|" + _WORDS % "" for n in ("", "{1,3}")),
    # Mistral from Nemo on, o200k
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}|\p{{N}}{n}|"
        + _WORDS % "/"
        for end in ("", f"{_CONTRACTIONS}?")
        for n in ("", "{1,3}")
    ),
}
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Strip", "StripAccents"}
_PRE_TOKENIZERS = {"ByteLevel", "Metaspace", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit"}


class Encoder:
    """Encodes text by a tokenizer, which must not change later.

    Args:
        source: the tokenizer's file, for messages.

    Attributes:
        harmless: whether it needs no child process, but for very long texts.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, source: Path | str):
        self._tokenizer, self._name = tokenizer, f"the tokenizer in {source}"
        self.harmless = _harmless(tokenizer)
        self.sandbox = _sandbox(tokenizer.to_str)

    def __call__(self, text: str, around: bool = False) -> list[int]:
        """Return the token ids of `text`.

        Args:
            around: add the ids that the post-processor puts around a text.

        Raises:
            PromptError: the tokenizer fails on the text, or exceeds a limit.
        """
        if not self.harmless or len(text) > LONGEST:
            return self._in_child(text, around)
        try:
            return self._tokenizer.encode(text, add_special_tokens=around).ids
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # tokenizers raises Exception itself, or panics
            raise self._refusal(error) from None

    def _in_child(self, text: str, around: bool) -> list[int]:
        try:
            return self.sandbox.ask([text, around], ceil(SECONDS + len(text) / CHARACTERS_A_SECOND))
        except SandboxError as error:
            if error.kind:
                raise self._refusal(error) from None
            raise PromptError(
                f"{self._name}: {error}: this text takes it too long, or more than {MEMORY >> 30} GiB of memory; "
                "change the text, or check the tokenizer"
            ) from None

    def _refusal(self, error: BaseException) -> PromptError:
        return PromptError(f"{self._name} fails on this text ({brief(error)}); change the text, or check the tokenizer")


def check_in_child(data: str) -> str | None:
    """Return why the tokenizer.json `data` cannot be loaded, None if it can.

    For those that may panic: a panic writes a page to stderr.
    """
    sandbox = _sandbox(lambda: data)
    try:
        sandbox.ask(["", False], SECONDS)
    except SandboxError as error:
        return str(error)
    finally:
        sandbox.close()
    return None


def _sandbox(state: Callable[[], str]) -> Sandbox:
    return Sandbox(Program("tridecode.text.encoder:encoding", state, MEMORY, START_SECONDS, longest=1 << 30))


def encoding(state: str) -> Callable[[list], list[int]]:
    """Load a tokenizer in a child process."""
    tokenizer = tokenizers.Tokenizer.from_str(state)
    return lambda message: tokenizer.encode(message[0], add_special_tokens=message[1]).ids


def steps(part) -> list[dict]:
    """Return the steps of a normalizer or pre-tokenizer, those of nested sequences too; [] for None."""
    found, pending = [], [] if part is None else [json.loads(part.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step.get("normalizers") or step.get("pretokenizers") or []
        else:
            found.append(step)
    return found


def _harmless(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether its time and memory are known to be bounded for any text."""
    model = tokenizer.model
    if isinstance(model, tokenizers.models.BPE):
        if len(model.continuing_subword_prefix or "") + len(model.end_of_word_suffix or "") > 16:
            return False
    elif not isinstance(model, tokenizers.models.Unigram):
        return False
    normalizers, pre_tokenizers = steps(tokenizer.normalizer), steps(tokenizer.pre_tokenizer)
    return (
        max(len(normalizers), len(pre_tokenizers)) <= MOST_STEPS
        and all(map(_harmless_normalizer, normalizers))
        and all(map(_harmless_pre_tokenizer, pre_tokenizers))
    )


def _harmless_normalizer(step: dict) -> bool:
    match step:
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return 0 < len(old) >= len(new)
        case {"type": "Prepend", "prepend": text}:
            return len(text) <= 16
    return step["type"] in _NORMALIZERS


def _harmless_pre_tokenizer(step: dict) -> bool:
    match step:
        case {"type": "Split", "pattern": {"Regex": pattern}}:
            return pattern in KNOWN_PATTERNS
        case {"type": "Split", "pattern": {"String": text}}:
            return bool(text)
    return step["type"] in _PRE_TOKENIZERS
