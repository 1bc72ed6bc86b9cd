"""Search for stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """A filter for streamed text that ends at the first stop string.

    Text that may be the beginning of a stop string is held back until that is decided.

    Attributes:
        hit: the stop string that ended the text; None before that.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._pending = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Add text; return the text that can be shown now. It is "" after a stop string."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        self._pending += text
        # The stop string that is complete first ends the text. So the result does not depend on how the text is
        # divided.
        hits = [(at + len(s), at, s) for s in self._stops if (at := self._pending.find(s)) >= 0]
        if hits:
            _, at, self.hit = min(hits)
            shown, self._pending = self._pending[:at], ""
            return shown
        keep = max(self._partial(s) for s in self._stops)
        shown, self._pending = self._pending[: len(self._pending) - keep], self._pending[len(self._pending) - keep :]
        return shown

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the stream."""
        rest, self._pending = self._pending, ""
        return rest

    def _partial(self, stop: str) -> int:
        """Return the length of the longest suffix of the pending text that is a proper prefix of `stop`."""
        longest = min(len(stop) - 1, len(self._pending))
        return next((n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n])), 0)
