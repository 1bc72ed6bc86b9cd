"""Markdown that streams into a terminal: what stands there stays, only rows of the unfinished block are drawn again."""

import re
import time
from collections import deque
from itertools import starmap
from threading import Event, Lock, Thread

from rich.cells import cell_len
from rich.segment import ControlType, Segment, Segments

from ..terminal import visible
from .blocks import rows_of
from .markup import nameless_head, split

FRAME = 1 / 30  # seconds between frames, at least
SHARE = 1 / 32  # of a core that may go into frames: a long unfinished block is redrawn less often, not at any cost
LONG = 100  # lines of code; of a longer unfinished block only the last ones are highlighted again for each frame
FENCE = re.compile(r"\s*(?:```+|~~~+)[ \t]*[^\s`~]*")  # with the language, but not what is shown of its line
# A line that may become a list, or makes a heading of the line before. It is shown when more of it has arrived.
HELD = re.compile(r"\n[ \t]*[-=]+[ \t]*\Z")

Row = tuple[Segment, ...]


class Painter:
    """Text in, frames out; no thread and no clock of its own.

    After a frame the cursor is at the end of the last row. Rows are only added to where that is enough. Others are
    drawn again, from the first one that is different, if the cursor can go there: not above the screen, and not over
    rows that no longer fit in the window, of which nobody knows how many the terminal has made. There the block is
    left as it stands and what comes next begins a new one.
    """

    def __init__(self, console):
        self.console = console
        self._rest, self._fence = "", False
        self._rows: list[Row] = []  # of the unfinished block, as they are on the screen
        self._gap = False  # whether a blank row belongs before the next block
        self._begun = False  # whether anything was drawn
        self._left = False  # whether the beginning of the present block was left as it stands
        self._until: str | None = None  # after that: a pattern up to which text goes on where the cursor is

    def frame(self, text: str, final: bool = False) -> None:
        """Add `text`; draw the blocks that it finishes, and the unfinished one."""
        if self._until:
            text = self._go_on(self._until, text)
            if self._until and not final:
                return
            self._rest = "" if self._until else self._rest  # at the end nothing comes to go on with
        blocks, rest, fence = split(self._rest + text, final)
        rows: list[Row] = []
        gap = self._gap
        for block in blocks:
            shown = self._spaced(block, gap, finished=bool(rows) or not self._left)
            rows, gap = rows + shown, gap or bool(shown)
        finished = len(rows)
        if self.console.is_terminal:
            rows += self._spaced(HELD.sub("", rest) if not fence else rest, gap, finished=False)
            if self._rows and not rows:
                rows.append(())  # what was drawn is no text any more, such as a fence's first line
        if not self._draw(rows):
            self.leave()
            self.frame(text, final)
            return
        self._rest, self._fence, self._gap, self._left = rest, fence, gap, self._left and not blocks
        self._rows = rows[finished:] if self.console.is_terminal else []
        self._shorten()

    def leave(self) -> None:
        """Never touch again what is on the screen; what comes next is drawn below it."""
        if not self._rows:
            return
        begun, head = self._rest.rpartition("\n")[2], nameless_head(self._rest)
        if self._fence or head:
            self._rest = self._opener() if self._fence else head
        else:
            self._rest = begun if FENCE.match(begun) or HELD.match("\n" + begun) else ""  # it is not on the screen
        if not ((self._fence or head) and not begun or begun[-1:].isspace() or self._rest == begun):
            # The word or line that is begun goes on where it stands.
            self._until = r"\n" if self._fence or head else r"\s"
        self._rows, self._gap, self._left = [], False, True

    def close(self) -> None:
        """Leave the terminal as it was found, the cursor included."""
        if self._begun:
            self._begun = False
            self._write([Segment.line()])
            self.console.show_cursor(True)

    def _go_on(self, until: str, text: str) -> str:
        """Write what belongs to the word or line that was left; returns what comes after that."""
        found = re.search(until, text)
        if head := text[: found.start()] if found else text:
            self._begin()
            self._write([Segment(head)])
        if not found:
            return ""
        self._until = None
        tail = text[found.start() :]
        self._gap = not self._rest and re.match(r"[ \t]*\n[ \t]*\n", tail) is not None
        return tail[1:] if self._rest else tail.lstrip()

    def _spaced(self, source: str, gap: bool, finished: bool) -> list[Row]:
        rows = rows_of(self.console, source, finished)
        return [(), *rows] if rows and gap else rows

    def _draw(self, rows: list[Row]) -> bool:
        """Put `rows` in the place of the unfinished block's; False where the cursor cannot go to what is different."""
        old, (width, height) = self._rows, self.console.size
        top = len(old) - height  # the first row that the cursor can reach; above it looks do not matter any more
        same = 0
        while same < min(len(old), len(rows)) and (
            old[same] == rows[same] or (same < top and _text(old[same]) == _text(rows[same]))
        ):
            same += 1
        out = []
        if same < len(old):
            same = min(same, len(rows) - 1)
            up = len(old) - 1 - same
            longest = max(Segment.get_line_length([*row]) for row in old[same:])
            back, added = _change(old[same], rows[same])
            if (up or back) and (same < top or longest >= width):
                return False
            if up:
                move, added = f"\r\x1b[{up}A", [*rows[same]]
            else:  # from where the cursor is, which is right even before the new width of a window is known
                move = f"\x1b[{back}D" if back else ""
            if move:
                out.append(Segment(f"{move}\x1b[J", None, [(ControlType.CURSOR_UP, up)]))
            out += added
            same += 1
        begun = self._begun
        for row in rows[same:]:
            out += [Segment.line(), *row] if begun else row
            begun = True
        if rows:
            self._begin()
        if out:
            self._write(out)
        return True

    def _begin(self) -> None:
        if not self._begun:
            self._begun = True
            self.console.show_cursor(False)

    def _write(self, segments: list[Segment]) -> None:
        self.console.print(Segments(segments), end="", crop=False)

    def _opener(self) -> str:
        """The line that begins the unfinished code block, without what is shown of it."""
        found = FENCE.match(self._rest)
        assert found is not None
        return found[0].strip("\n") + "\n"

    def _shorten(self) -> None:
        """Forget lines of a long unfinished code block: they are on the screen, and highlighting them takes time."""
        lines = self._rest.split("\n")
        if not self._fence or len(lines) <= LONG:
            return
        # Not inside of a long string or comment, if possible: where a line after an empty one is not indented.
        starts = (i for i in range(len(lines) - 1, 1, -1) if lines[i][:1].strip() and not lines[i - 1].strip())
        start = next(starts, len(lines) - LONG // 2 if len(lines) > 4 * LONG else 0)
        if not start:
            return
        rest = self._opener() + "\n".join(lines[start:])
        rows = rows_of(self.console, rest)
        if [*map(_text, rows)] == [*map(_text, self._rows[-len(rows) :])]:
            self._rest, self._rows, self._gap = rest, self._rows[-len(rows) :], False


def _text(row: Row) -> str:
    return "".join(segment.text for segment in row)


def _change(old: Row, new: Row) -> tuple[int, list[Segment]]:
    """Return how many columns to remove from the end of row `old`, and what to write there to make it `new`."""
    had, has = ([(char, segment.style) for segment in row for char in segment.text] for row in (old, new))
    same = next((i for i, pair in enumerate(zip(had, has)) if pair[0] != pair[1]), min(len(had), len(has)))
    return cell_len("".join(char for char, _ in had[same:])), [*Segment.simplify(starmap(Segment, has[same:]))]


class MarkdownStream:
    """One answer, shown as Markdown while it comes. Make a new one for each answer.

    `push` only queues: all the work happens in a thread that draws at most 30 frames a second. Nothing else may write
    to the terminal between the first `push` and `finish` or `abort`.
    """

    def __init__(self, console):
        self._painter = Painter(console)
        self._queue: deque[str] = deque()
        self._held = ""  # a carriage return: alone a control character, before a newline nothing
        self._done, self._drawing = Event(), Lock()
        self._thread = None
        self._error = None
        self._closed = self._paused = False

    def push(self, text: str) -> None:
        """Add text of the answer; costs the caller next to nothing. After the end it does nothing."""
        self._queue.append(text)
        if self._thread is None and not self._closed:
            self._thread = Thread(target=self._run, name="markdown", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Show what is left; raises what writing to the terminal raised, if anything did."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            return
        self._done.set()
        try:
            self._thread.join()
            self._try(lambda: self._painter.frame(self._take(final=True), final=True))
        finally:
            self._try(self._painter.close, always=True)
        if self._error is not None:
            raise self._error

    def abort(self) -> None:
        """As `finish`, but never raises: for an answer that was stopped or failed. What came is shown."""
        try:
            self.finish()
        except Exception:  # such as a terminal that is gone: what was said must still be kept
            pass

    def pause(self) -> None:
        """Leave what is on the screen and show the cursor; no frame is drawn until `resume`, and then below."""
        if not self._closed:  # else the frame that this call interrupts may be the last one
            self._drawing.acquire()
            self._paused = True
            self._painter.leave()
            self._try(self._painter.close)

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._drawing.release()

    def _run(self) -> None:
        pause = FRAME
        while not self._done.wait(pause) and self._error is None:
            if not self._queue:
                pause = FRAME
                continue
            started = time.thread_time()  # not the clock: waiting for the token loop costs it nothing
            with self._drawing:
                self._try(lambda: self._painter.frame(self._take()))
            pause = max(FRAME, (time.thread_time() - started) / SHARE)

    def _try(self, draw, always: bool = False) -> None:
        """Draw, unless the terminal has failed already; keep the first error for `finish`."""
        if self._error is not None and not always:
            return
        try:
            draw()
        except SystemExit:  # what rich makes of a broken pipe; only the caller may end the program
            self._error = self._error or BrokenPipeError("the terminal is gone")
        except Exception as error:
            self._error = self._error or error

    def _take(self, final: bool = False) -> str:
        """What was pushed since the last frame, without control characters."""
        pieces = [self._held]
        while self._queue:
            pieces.append(self._queue.popleft())
        text = "".join(pieces)
        self._held = "\r" if text.endswith("\r") and not final else ""
        text = text[: len(text) - len(self._held)]
        # Half a surrogate pair cannot be written to any terminal.
        return visible(text.encode("utf-8", "replace").decode("utf-8"))
