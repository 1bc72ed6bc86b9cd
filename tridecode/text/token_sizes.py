"""A lower bound on the number of tokens of a text.

With it, a prompt that is too long for the context is refused before it is tokenized.
"""

import math
import unicodedata

import tokenizers

from .detokenizer import TokenBytes
from .encoder import steps


def longest(tokenizer: tokenizers.Tokenizer, token_bytes: TokenBytes) -> float:
    """Return the maximum number of UTF-8 bytes that one token represents; infinite if the tokenizer may drop text."""
    strips = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    all_steps = [*steps(tokenizer.normalizer), *steps(tokenizer.pre_tokenizer)]
    if strips or not token_bytes.lossless or not all(map(_keeps, all_steps)):
        return math.inf
    return max(token_bytes.size(token) for token in tokenizer.get_vocab(with_added_tokens=True).values())


def min_token_count(text: str, longest: float) -> int:
    """Return a lower bound on the number of tokens of `text`, whether or not the tokenizer normalizes it (NFC).

    Args:
        longest: maximum number of UTF-8 bytes of one token.
    """
    return math.ceil(min(len(form.encode()) for form in (text, unicodedata.normalize("NFC", text))) / longest)


def _keeps(step: dict) -> bool:
    """Return whether a normalizer or pre-tokenizer never shortens a text, except by NFC (see `min_token_count`)."""
    match step:
        case {"type": "NFC" | "ByteLevel" | "Metaspace" | "Prepend" | "Digits"}:
            return True
        case {"type": "Split", "behavior": behavior}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
    return False
