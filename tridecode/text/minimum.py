"""Masks that exclude stop tokens until an answer has its minimum length."""

from collections.abc import Sequence

import numpy as np

from .grammar import Grammar, Matcher


class MinimumLength(Grammar):
    """A grammar that allows every text, but no stop token before `min_tokens` tokens.

    Args:
        stop_ids: ids of the tokens that end the answer.
    """

    def __init__(self, min_tokens: int, stop_ids: Sequence[int], vocab_size: int):
        bits = np.ones(-(-vocab_size // 32) * 32, bool)
        bits[vocab_size:] = False
        self.all = pack(bits)
        bits[list(stop_ids)] = False
        self.first, self.min_tokens = pack(bits), min_tokens

    def matcher(self, sampled: Sequence[int]) -> "MinimumMatcher":
        """Return a new matcher for a request that has these output tokens so far."""
        return MinimumMatcher(self, len(sampled))


class MinimumMatcher(Matcher):
    """The number of tokens of one answer."""

    def __init__(self, grammar: MinimumLength, count: int):
        self._grammar, self._count = grammar, count

    def accept(self, token: int) -> bool:
        """Append a token to the answer. The mask never ends the answer."""
        self._count += 1
        return False

    def allowed(self) -> np.ndarray:
        """Return the mask of the next token, int32 [words]."""
        return self._grammar.first if self._count < self._grammar.min_tokens else self._grammar.all


def pack(bits: np.ndarray) -> np.ndarray:
    """Return bits as a mask, int32 [words]; bit i of word w is for token 32 w + i."""
    return np.packbits(bits, bitorder="little").view(np.int32)
