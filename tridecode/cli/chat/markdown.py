"""Streaming of Markdown to a terminal. Finished blocks do not change; only rows of the unfinished block are redrawn."""

import re
import time
from collections import deque
from itertools import starmap
from threading import Event, Lock, Thread

from rich.segment import ControlType, Segment, Segments

from ..terminal import visible
from ..wrapping import MARKS, cell_len
from .blocks import render_rows
from .markup import split, unnamed_table_head

FRAME = 1 / 30  # Minimum seconds between frames.
SHARE = 1 / 32  # Maximum share of a core for drawing. Therefore a long unfinished block is drawn less often.
# In an unfinished code block with more lines, only the last lines are highlighted again for each frame.
LONG_CODE = 100
FENCE = re.compile(r"\s*(?:```+|~~~+)[ \t]*[^\s`~]*")  # The mark and the language, without the title.
# This line may become a list item, or may make a heading of the line before it. It is shown when more text has arrived.
AMBIGUOUS = re.compile(r"\n[ \t]*[-=]+[ \t]*\Z")

# Characters whose columns differ between terminals: marks of Asian scripts, and parts of emoji.
UNCERTAIN = re.compile(f"[{''.join(MARKS)}\u200d\ufe0f\U0001f1e6-\U0001f1ff\U0001f3fb-\U0001f3ff]")

Row = tuple[Segment, ...]


class Painter:
    """A renderer of a growing Markdown text. The caller decides when a frame is drawn.

    After a frame the cursor is at the end of the last row. Text is appended to rows if possible. Otherwise the rows are
    redrawn from the first difference. The cursor cannot reach rows above the screen. It cannot cross rows that are
    wider than the window either, because the number of rows into which the terminal wraps them is unknown. In these
    cases the drawn part of the block is left unchanged, and later text is drawn as a new block below it.
    """

    def __init__(self, console):
        self.console = console
        self._rest, self._fence = "", False
        self._rows: list[Row] = []  # Rows of the unfinished block on the screen.
        self._gap = False  # Whether a blank row precedes the next block.
        self._started = False  # Whether a row was drawn.
        self._left = False  # Whether the part of the current block on the screen is final.
        self._until: str | None = None  # A pattern that `leave` sets. Text before its match is appended at the cursor.

    def frame(self, text: str, final: bool = False) -> None:
        """Append `text`; draw the blocks that it finishes and the unfinished block."""
        if self._until:
            text = self._continue(self._until, text)
            if self._until and not final:
                return
            self._rest = "" if self._until else self._rest  # The text ended before the pattern matched.
        blocks, rest, fence = split(self._rest + text, final)
        rows: list[Row] = []
        gap = self._gap
        for block in blocks:
            shown = self._spaced(block, gap, finished=bool(rows) or not self._left)
            rows, gap = rows + shown, gap or bool(shown)
        finished = len(rows)
        if self.console.is_terminal:
            rows += self._spaced(AMBIGUOUS.sub("", rest) if not fence else rest, gap, finished=False)
            if self._rows and not rows:
                rows.append(())  # Text on the screen became markup, such as the first line of a fence.
        if not self._draw(rows):
            self.leave()
            self.frame(text, final)
            return
        self._rest, self._fence, self._gap, self._left = rest, fence, gap, self._left and not blocks
        self._rows = rows[finished:] if self.console.is_terminal else []
        self._shorten()

    def leave(self) -> None:
        """Make the rows on the screen final; later text is drawn below them."""
        if not self._rows:
            return
        last_line, head = self._rest.rpartition("\n")[2], unnamed_table_head(self._rest)
        if self._fence or head:
            self._rest = self._opener() if self._fence else head
        else:
            # A line that may become markup is not on the screen yet.
            self._rest = last_line if FENCE.match(last_line) or AMBIGUOUS.match("\n" + last_line) else ""
        if not ((self._fence or head) and not last_line or last_line[-1:].isspace() or self._rest == last_line):
            # The rest of the current word or line is appended to it.
            self._until = r"\n" if self._fence or head else r"\s"
        self._rows, self._gap, self._left = [], False, True

    def close(self) -> None:
        """Restore the terminal and show the cursor."""
        if self._started:
            self._started = False
            self._write([Segment.line()])
            self.console.show_cursor(True)

    def _continue(self, until: str, text: str) -> str:
        """Write the rest of the word or line that `leave` interrupted, and return the text after it."""
        end = re.search(until, text)
        if head := text[: end.start()] if end else text:
            self._start()
            self._write([Segment(head)])
        if not end:
            return ""
        self._until = None
        tail = text[end.start() :]
        self._gap = not self._rest and re.match(r"[ \t]*\n[ \t]*\n", tail) is not None
        return tail[1:] if self._rest else tail.lstrip()

    def _spaced(self, source: str, gap: bool, finished: bool) -> list[Row]:
        rows = render_rows(self.console, source, finished)
        return [(), *rows] if rows and gap else rows

    def _draw(self, rows: list[Row]) -> bool:
        """Replace the rows of the unfinished block by `rows`. Return False if the cursor cannot reach a change."""
        old, (width, height) = self._rows, self.console.size
        # The first row that the cursor can reach. The styles of the rows above it cannot change.
        top = len(old) - height
        same = 0
        while same < min(len(old), len(rows)) and (
            old[same] == rows[same] or (same < top and _text(old[same]) == _text(rows[same]))
        ):
            same += 1
        out = []
        if same < len(old):
            same = min(same, len(rows) - 1)
            up = len(old) - 1 - same
            longest = max(cell_len(_text(row)) for row in old[same:])
            back, added = _change(old[same], rows[same])
            if (up or back) and (same < top or longest >= width):
                return False
            if up or back and UNCERTAIN.search(_text(old[same])):
                move, added = "\r" + f"\x1b[{up}A" * (up > 0), [*rows[same]]
            else:  # A move relative to the cursor is correct even if the new width of the window is not known yet.
                move = f"\x1b[{back}D" if back else ""
            if move:
                out.append(Segment(f"{move}\x1b[J", None, [(ControlType.CURSOR_UP, up)]))
            out += added
            same += 1
        started = self._started
        for row in rows[same:]:
            out += [Segment.line(), *row] if started else row
            started = True
        if rows:
            self._start()
        if out:
            self._write(out)
        return True

    def _start(self) -> None:
        if not self._started:
            self._started = True
            self.console.show_cursor(False)

    def _write(self, segments: list[Segment]) -> None:
        self.console.print(Segments(segments), end="", crop=False)

    def _opener(self) -> str:
        """Return the opening line of the unfinished code block, without its title."""
        mark = FENCE.match(self._rest)
        assert mark is not None
        return mark[0].strip("\n") + "\n"

    def _shorten(self) -> None:
        """Drop the first lines of a long unfinished code block, which are on the screen, to save highlighting time."""
        lines = self._rest.split("\n")
        if not self._fence or len(lines) <= LONG_CODE:
            return
        # Cut before an unindented line that follows an empty one. This avoids a cut within a long string or comment.
        starts = (i for i in range(len(lines) - 1, 1, -1) if lines[i][:1].strip() and not lines[i - 1].strip())
        start = next(starts, len(lines) - LONG_CODE // 2 if len(lines) > 4 * LONG_CODE else 0)
        if not start:
            return
        rest = self._opener() + "\n".join(lines[start:])
        rows = render_rows(self.console, rest)
        if [*map(_text, rows)] == [*map(_text, self._rows[-len(rows) :])]:
            self._rest, self._rows, self._gap = rest, self._rows[-len(rows) :], False


def _text(row: Row) -> str:
    return "".join(segment.text for segment in row)


def _change(old: Row, new: Row) -> tuple[int, list[Segment]]:
    """Return the number of columns to remove from the end of row `old`, and the segments to write there for `new`."""
    before, after = ([(char, segment.style) for segment in row for char in segment.text] for row in (old, new))
    same = next((i for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1]), min(len(before), len(after)))
    return cell_len("".join(char for char, _ in before[same:])), [*Segment.simplify(starmap(Segment, after[same:]))]


class MarkdownStream:
    """A sink that draws one answer as Markdown while it streams.

    `push` only queues the text; a thread draws at most 30 frames a second. Other code must not write to the terminal
    between the first `push` and `finish` or `abort`.
    """

    def __init__(self, console):
        self._painter = Painter(console)
        self._queue: deque[str] = deque()
        # A carriage return at the end of the text. It is a control character unless a newline follows.
        self._pending = ""
        self._done, self._drawing = Event(), Lock()
        self._thread = None
        self._error = None
        self._closed = self._paused = False

    def push(self, text: str) -> None:
        """Queue text of the answer. Has no effect after the end."""
        self._queue.append(text)
        if self._thread is None and not self._closed:
            self._thread = Thread(target=self._run, name="markdown", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Draw the remaining text. Raises the first error that occurred when text was written to the terminal."""
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
        """Draw the text of a stopped or failed answer, as `finish` does, but never raise."""
        try:
            self.finish()
        except Exception:  # For example, the terminal is closed. The caller must still save the answer.
            pass

    def pause(self) -> None:
        """Stop drawing until `resume`, which continues below, and show the cursor."""
        if not self._closed:  # A second call of close may interrupt the last frame.
            self._drawing.acquire()
            self._paused = True
            self._painter.leave()
            self._try(self._painter.close)

    def resume(self) -> None:
        """Continue to draw after `pause`."""
        if self._paused:
            self._paused = False
            self._drawing.release()

    def _run(self) -> None:
        pause = FRAME
        while not self._done.wait(pause) and self._error is None:
            if not self._queue:
                pause = FRAME
                continue
            # CPU time does not include the time in which the thread waits for the token loop.
            started = time.thread_time()
            with self._drawing:
                self._try(lambda: self._painter.frame(self._take()))
            pause = max(FRAME, (time.thread_time() - started) / SHARE)

    def _try(self, draw, always: bool = False) -> None:
        """Call `draw` unless the terminal has failed before. The first error is stored, and `finish` raises it."""
        if self._error is not None and not always:
            return
        try:
            draw()
        except SystemExit:  # rich raises SystemExit for a broken pipe, but only the caller may end the program.
            self._error = self._error or BrokenPipeError("the terminal is gone")
        except Exception as error:
            self._error = self._error or error

    def _take(self, final: bool = False) -> str:
        """Return the text pushed since the last frame, without control characters."""
        parts = [self._pending]
        while self._queue:
            parts.append(self._queue.popleft())
        text = "".join(parts)
        self._pending = "\r" if text.endswith("\r") and not final else ""
        text = text[: len(text) - len(self._pending)]
        # A lone surrogate cannot be encoded for the terminal.
        return visible(text.encode("utf-8", "replace").decode("utf-8"))
