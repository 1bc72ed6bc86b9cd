"""The fewest tokens that a text can have: a text that cannot fit in a context is refused before it is tokenized."""

import math
import unicodedata

import tokenizers

from .detokenizer import TokenBytes
from .encoder import steps


def longest(tokenizer: tokenizers.Tokenizer, token_bytes: TokenBytes) -> float:
    """Return the UTF-8 bytes of text that one token stands for at most; infinite if a tokenizer may leave text out."""
    swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    every = [*steps(tokenizer.normalizer), *steps(tokenizer.pre_tokenizer)]
    if swallows or not token_bytes.lossless or not all(map(_keeps, every)):
        return math.inf
    return max(token_bytes.size(token) for token in tokenizer.get_vocab(with_added_tokens=True).values())


def fewest(text: str, longest: float) -> int:
    """Return how many tokens of `longest` bytes `text` has at least, whether it is normalized (NFC) or not."""
    return math.ceil(min(len(form.encode()) for form in (text, unicodedata.normalize("NFC", text))) / longest)


def _keeps(step: dict) -> bool:
    """Whether a step of a normalizer or pre-tokenizer shortens no text, but for NFC."""
    match step:
        case {"type": "NFC" | "ByteLevel" | "Metaspace" | "Prepend" | "Digits"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
    return False
