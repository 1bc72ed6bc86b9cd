"""The progress line that is shown while a prompt is processed."""

import threading
import time
from collections.abc import Callable

from .terminal import Output, counted

DELAY, PAUSE = 0.3, 0.2  # Seconds before the line appears, and seconds between updates.
LINE_START = "\x1b[G"  # This replaces a carriage return, which rich removes.
WIDE = 60  # In a terminal with fewer columns, only the numbers are shown.

Reading = Callable[[], tuple[int, int, int] | None]


class Waiting:
    """A context manager that shows a progress line on stderr until `end`, if stderr is a terminal."""

    def __init__(self, output: Output, reading: Reading, redraws: bool = True, shows: bool = True):
        """Create the line, which appears within a `with` block.

        Args:
            reading: Returns the progress as Scheduler.reading does. Another thread calls it.
            redraws: Update the line. If False, for example for a screen reader, it is printed once and stays.
            shows: Show the line.
        """
        self._output, self._reading = output, reading
        self._redraws = redraws and not output.errors.is_dumb_terminal
        self._shows = shows and output.errors.is_terminal and not output.quiet
        self._done, self._drawing = threading.Event(), threading.Lock()
        self._paused = self._visible = False
        self._seen: tuple[int, int, int] | None = None

    def __enter__(self) -> "Waiting":
        self._began = time.monotonic()
        if self._shows:
            threading.Thread(target=self._run, name="waiting", daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self.end()

    def end(self) -> None:
        """Erase the line and stop."""
        if not self._done.is_set():
            self._done.set()
            with self._drawing:
                self._erase()

    def pause(self) -> None:
        """Erase the line, and do not write to the terminal until `resume`."""
        with self._drawing:
            self._paused = True
            self._erase()

    def resume(self) -> None:
        """Continue after `pause`."""
        self._paused = False

    def _run(self) -> None:
        pause = DELAY
        while not self._done.wait(pause):
            pause = PAUSE
            progress = self._reading()
            if self._seen and not progress:  # The last pass of the prompt is running.
                progress = self._seen[0], self._seen[2], self._seen[2]
            self._seen = progress
            with self._drawing:
                if self._done.is_set():
                    return
                if not self._redraws and progress:
                    self._output.note(f"reading a prompt of {counted(progress[2], 'token')}")
                    return
                if self._redraws and not self._paused:
                    self._draw(self._line(progress, time.monotonic() - self._began))

    def _line(self, progress: tuple[int, int, int] | None, seconds: float) -> str:
        if progress is None:
            return f"waiting for the first token, {seconds:.0f} s"
        reused, done, total = progress
        pace = f"{(done - reused) / seconds:,.0f} tok/s" if done > reused else f"{seconds:.0f} s"
        words = "reading the prompt: " if self._output.errors.width >= WIDE else ""
        return f"{words}{done:,} of {counted(total, 'token')}, {pace}"

    def _draw(self, line: str) -> None:
        self._visible = True
        self._write(f"{LINE_START}{line[: self._output.errors.width - 1]}\x1b[K")

    def _erase(self) -> None:
        if self._visible:
            self._visible = False
            self._write(f"{LINE_START}\x1b[K")

    def _write(self, text: str) -> None:
        self._output.errors.out(text, end="", style="dim", highlight=False)
