"""Search for control tokens in text, in time that does not grow with their number: some models have 30,000."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from functools import cached_property

import tokenizers


class TokenSet:
    """Strings that are searched in text."""

    def __init__(self, tokens: Iterable[str]):
        self._sorted = sorted(tokens)
        self.longest = max(map(len, self._sorted), default=0)
        self.first_chars = frozenset(token[0] for token in self._sorted)
        # A text that begins with a token begins with the shortest token that begins that token. Among those, only the
        # last one that does not sort after the text can begin it.
        self._shortest: list[str] = []
        for token in self._sorted:
            if not self._shortest or not token.startswith(self._shortest[-1]):
                self._shortest.append(token)

    def __iter__(self):
        return iter(self._sorted)

    def starts_at(self, text: str, i: int) -> bool:
        """Whether a token begins at character i of `text`."""
        found = bisect_right(self._shortest, text[i : i + self.longest])
        return found > 0 and text.startswith(self._shortest[found - 1], i)

    def begins(self, start: str) -> bool:
        """Whether a token begins with `start`."""
        found = bisect_left(self._sorted, start)
        return found < len(self._sorted) and self._sorted[found].startswith(start)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return first and last character (exclusive) of each token in `text`, the longest at each place."""
        if self.first_chars.isdisjoint(text):  # as for most short texts
            return []
        found = self._finder.encode(text, add_special_tokens=False)
        return [span for span, token in zip(found.offsets, found.ids) if token]

    def replace(self, text: str, by: Callable[[str], str]) -> str:
        """Replace each token of `spans`."""
        pieces: list[str] = []
        end = 0
        for start, stop in self.spans(text):
            pieces += text[end:start], by(text[start:stop])
            end = stop
        return "".join(pieces) + text[end:]

    @cached_property
    def _finder(self) -> tokenizers.Tokenizer:
        """The search of tokenizers for added tokens; all other text is token 0."""
        finder = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
        finder.add_special_tokens([tokenizers.AddedToken(t, normalized=False, special=True) for t in self._sorted])
        return finder
