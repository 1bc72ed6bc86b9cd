"""Search for stop strings in streamed text."""

from collections.abc import Sequence
from itertools import compress
from typing import Protocol


class Reader(Protocol):
    """A reader of an answer, which knows where stop strings apply."""

    @property
    def hit(self) -> str | None:
        """The stop string that ended the text; None before that."""

    def feed(self, token: int, text: str) -> object:
        """Add the text that a token completes."""


class StopStrings:
    """A filter for streamed text that ends at the first stop string.

    Text that may be the beginning of a stop string is held back until that is decided.

    Attributes:
        hit: the stop string that ended the text; None before that.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._pending, self._visible = "", b""  # For each pending character, 1 if it is shown and 0 if not.
        self.hit: str | None = None

    def push(self, text: str, visible: bool = True) -> str:
        """Add `text` and return the text that can be shown now. After a stop string, the result is always empty.

        Args:
            visible: whether the text is shown. The text of a special token is not, but stop strings may contain it.
        """
        if self.hit or not self._stops:
            return text if visible and not self.hit else ""
        self._pending += text
        self._visible += bytes([visible]) * len(text)
        # If several stop strings occur, the one whose last character comes first ends the text. Then the result does
        # not depend on how the text is divided into calls.
        hits = [(at + len(s), at, s) for s in self._stops if (at := self._pending.find(s)) >= 0]
        if hits:
            _, at, self.hit = min(hits)
            shown = self._take(at)
            self._take(len(self._pending))
            return shown
        return self._take(len(self._pending) - max(map(self._partial, self._stops)))

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream."""
        return self._take(len(self._pending))

    def _take(self, count: int) -> str:
        """Remove `count` pending characters and return those that are shown."""
        shown = "".join(compress(self._pending[:count], self._visible))
        self._pending, self._visible = self._pending[count:], self._visible[count:]
        return shown

    def _partial(self, stop: str) -> int:
        """Return the length of the longest suffix of the pending text that is a proper prefix of `stop`."""
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)
