"""Search for control tokens in text.

The time of a search does not grow with the number of tokens, because some models have 30,000 control tokens.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property

import tokenizers


class TokenSet:
    """A set of strings that can be searched for in text.

    Attributes:
        longest: characters of the longest string; 0 for an empty set.
        first_chars: the first characters of all strings.
    """

    def __init__(self, tokens: Iterable[str]):
        self._sorted = sorted(tokens)
        self.longest = max(map(len, self._sorted), default=0)
        self.first_chars = frozenset(token[0] for token in self._sorted)
        # Tokens that have no other token as a prefix. A text that begins with any token begins with one of these. In
        # sorted
        # order, it can only be the last one that is not greater than the text. So a binary search finds it.
        self._shortest: list[str] = []
        for token in self._sorted:
            if not self._shortest or not token.startswith(self._shortest[-1]):
                self._shortest.append(token)

    def __iter__(self):
        return iter(self._sorted)

    def starts_at(self, text: str, i: int) -> bool:
        """Return whether a token begins at character i of `text`."""
        index = bisect_right(self._shortest, text[i : i + self.longest])
        return index > 0 and text.startswith(self._shortest[index - 1], i)

    def begins(self, start: str) -> bool:
        """Return whether `start` is a prefix of a token."""
        index = bisect_left(self._sorted, start)
        return index < len(self._sorted) and self._sorted[index].startswith(start)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the span [start, stop) of each token in `text`. At each position the longest token is chosen."""
        if self.first_chars.isdisjoint(text):  # This is a fast path for most short texts.
            return []
        encoding = self._finder.encode(text, add_special_tokens=False)
        return [span for span, token in zip(encoding.offsets, encoding.ids) if token]

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """Return `text` with `by(token)` in place of each token that `spans` finds."""
        pieces: list[str] = []
        end = 0
        for start, stop in self.spans(text):
            pieces += text[end:start], by(text[start:stop])
            end = stop
        return "".join(pieces) + text[end:]

    @cached_property
    def _finder(self) -> tokenizers.Tokenizer:
        """A tokenizer whose added tokens are the strings of this set. All other text is token 0."""
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        finder.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in self._sorted])
        return finder
