"""How many tokens a text has at least: what surely does not fit in a context is refused before it is tokenised."""

import json
import math
import unicodedata

import tokenizers

from .detokenizer import TokenBytes


def longest(tokenizer: tokenizers.Tokenizer, token_bytes: TokenBytes) -> float:
    """UTF-8 bytes of text that one token stands for at most; infinite where a tokenizer may leave text out."""
    parts = [part for part in (tokenizer.normalizer, tokenizer.pre_tokenizer) if part is not None]
    swallows = any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values())
    if swallows or not token_bytes.lossless or not all(map(_keeps, parts)):
        return math.inf
    return max(token_bytes.size(token) for token in tokenizer.get_vocab(with_added_tokens=True).values())


def fewest(text: str, longest: float) -> int:
    """Tokens of at most `longest` bytes that `text` has at least, whether or not it is normalised (NFC) before."""
    return math.ceil(min(len(form.encode()) for form in (text, unicodedata.normalize("NFC", text))) / longest)


def _keeps(part) -> bool:
    """Whether a normaliser or pre-tokenizer leaves every text as long as it was, but for NFC."""
    state = json.loads(part.__getstate__())
    steps = state.get("normalizers", state.get("pretokenizers")) if state["type"] == "Sequence" else [state]
    return all(map(_step_keeps, steps))


def _step_keeps(step: dict) -> bool:
    match step:
        case {"type": "NFC" | "ByteLevel" | "Metaspace" | "Prepend" | "Digits"}:
            return True
        case {"type": "Split", "behavior": behaviour}:
            return behaviour != "Removed"
        case {"type": "Replace", "pattern": {"String": old}, "content": new}:
            return len(new.encode()) >= len(old.encode())
    return False
