"""Stop strings in streamed text."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through up to a stop string, and holds back text that may begin one.

    Attributes:
        hit: the stop string that ended the text.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> str:
        """Return the text that can be shown; "" after a hit."""
        if self.hit or not self._stops:
            return "" if self.hit else text
        self._held += text
        # The stop string that is complete first ends the text, however the text was divided.
        found = [(at + len(s), at, s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if found:
            _, at, self.hit = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max(self._partial(s) for s in self._stops)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """Return the text that is held back when the text ends."""
        held, self._held = self._held, ""
        return held

    def _partial(self, stop: str) -> int:
        """Return the length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
