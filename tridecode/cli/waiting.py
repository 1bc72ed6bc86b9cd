"""Signs of life while a prompt is read: what of it is done, and how fast."""

import threading
import time
from collections.abc import Callable

from .terminal import Output, counted

DELAY, PAUSE = 0.3, 0.2  # seconds until something is shown, and between two looks
LINE_START = "\x1b[G"  # rich keeps a carriage return for itself
WIDE = 60  # columns; a narrower terminal gets the numbers alone

Reading = Callable[[], tuple[int, int, int] | None]


class Waiting:
    """Within, until `end`, a line on stderr if that is a terminal and `shows`; it goes when the first token comes.

    reading: as Scheduler.reading; called from a thread of its own. redraws: whether the line may change; without, as
    where a screen reader would say it again and again, it is said once and stays.
    """

    def __init__(self, output: Output, reading: Reading, redraws: bool = True, shows: bool = True):
        self._output, self._reading = output, reading
        self._redraws = redraws and not output.errors.is_dumb_terminal
        self._shows = shows and output.errors.is_terminal and not output.quiet
        self._done, self._drawing = threading.Event(), threading.Lock()
        self._paused = self._drawn = False
        self._seen: tuple[int, int, int] | None = None

    def __enter__(self) -> "Waiting":
        self._began = time.monotonic()
        if self._shows:
            threading.Thread(target=self._run, name="waiting", daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def end(self) -> None:
        """Take the line away; after that nothing is written."""
        if not self._done.is_set():
            self._done.set()
            with self._drawing:
                self._erase()

    def pause(self) -> None:
        """Leave the terminal to another program until `resume`."""
        with self._drawing:
            self._paused = True
            self._erase()

    def resume(self) -> None:
        self._paused = False

    def _run(self) -> None:
        pause = DELAY
        while not self._done.wait(pause):
            pause = PAUSE
            found = self._reading()
            if self._seen and not found:  # its last pass is under way
                found = self._seen[0], self._seen[2], self._seen[2]
            self._seen = found
            with self._drawing:
                if self._done.is_set():
                    return
                if not self._redraws and found:
                    self._output.note(f"reading a prompt of {counted(found[2], 'token')}")
                    return
                if self._redraws and not self._paused:
                    self._draw(self._line(found, time.monotonic() - self._began))

    def _line(self, found: tuple[int, int, int] | None, seconds: float) -> str:
        if found is None:
            return f"waiting for the first token, {seconds:.0f} s"
        there, done, all_of_it = found
        pace = f"{(done - there) / seconds:,.0f} tok/s" if done > there else f"{seconds:.0f} s"
        words = "reading the prompt: " if self._output.errors.width >= WIDE else ""
        return f"{words}{done:,} of {counted(all_of_it, 'token')}, {pace}"

    def _draw(self, line: str) -> None:
        self._drawn = True
        self._write(f"{LINE_START}{line[: self._output.errors.width - 1]}\x1b[K")

    def _erase(self) -> None:
        if self._drawn:
            self._drawn = False
            self._write(f"{LINE_START}\x1b[K")

    def _write(self, text: str) -> None:
        self._output.errors.out(text, end="", style="dim", highlight=False)
