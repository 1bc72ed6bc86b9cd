"""Markdown that streams into a terminal: finished blocks are printed once, only the unfinished last one is redrawn."""

import time
from collections import deque
from threading import Event, Lock, Thread

from markdown_it import MarkdownIt
from rich import box
from rich.console import Group
from rich.live import Live
from rich.markdown import CodeBlock, HorizontalRule, Markdown, TableElement
from rich.padding import Padding
from rich.rule import Rule
from rich.segment import Segment
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .terminal import visible

FRAME = 1 / 30  # seconds between frames, at least
SHARE = 1 / 32  # of a core that may go into frames: a long unfinished block is redrawn less often, not at any cost
DEEPEST = 15  # nested blocks; deeper ones would have no columns left, and are shown as plain text

# Nothing that a model writes may vanish: without these rules HTML, images and link definitions are text. Entities stay
# as written because they can stand for control characters.
PARSER = MarkdownIt("commonmark", {"html": False, "maxNesting": 100}).enable(["table", "strikethrough"])
PARSER.disable(["html_block", "html_inline", "image", "reference", "autolink", "entity"])


class Code(CodeBlock):
    """Highlighted in the terminal's own colours, and without blank lines of its own."""

    def __rich_console__(self, console, options):
        code = str(self.text).rstrip()
        text = Syntax(code, self.lexer_name, theme=self.theme, word_wrap=True, tab_size=8).highlight(code)
        text.rstrip()
        yield Padding(text, (0, 2))


class Rows(TableElement):
    """A table with its columns' alignment, whose long words are folded instead of cut."""

    def __rich_console__(self, console, options):
        table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, style="markdown.table.border")
        for cell in self.header.row.cells:
            heading = cell.content.copy()
            heading.stylize("markdown.table.header")
            table.add_column(heading, justify=cell.justify, overflow="fold")
        for row in self.body.rows if self.body else ():
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class Line(HorizontalRule):
    """A rule without the blank line below it."""

    def __rich_console__(self, console, options):
        yield Rule(style=console.get_style("markdown.hr", default="none"))


class Block(Markdown):
    """One block of Markdown. Links show their address: a link must not hide where it leads."""

    elements = Markdown.elements | {"fence": Code, "code_block": Code, "table_open": Rows, "hr": Line}

    def __init__(self, source: str):
        # Not rich's own __init__, which builds a parser every time: a quarter of a frame.
        self.markup, self.parsed = source, []
        self.style, self.justify, self.code_theme, self.hyperlinks = "none", None, "ansi_dark", False
        self.inline_code_lexer = self.inline_code_theme = None

    def __rich_console__(self, console, options):
        try:
            self.parsed = PARSER.parse(self.markup)
            deepest = max((token.level for token in self.parsed), default=0)
            if deepest > DEEPEST or 4 * deepest > options.max_width - 8:
                raise ValueError("nested too deeply")
            rendered = list(super().__rich_console__(console, options))
            if rendered and rendered[0] == Segment.line():  # above nested blocks; the space between blocks is ours
                rendered.pop(0)
        except Exception:  # of a parser or renderer that met text it cannot show: no answer may fail for its looks
            rendered = [Text(self.markup.rstrip("\n"))]
        yield from rendered


class Tail:
    """The unfinished block: its last lines, as many as the terminal has room for."""

    def __init__(self, source: str, fence: bool):
        self.source, self.fence = source, fence

    def __rich_console__(self, console, options):
        height = max(options.size.height - 2, 1)
        source = self.source
        if self.fence:  # only what will be seen is highlighted
            first, *lines = source.lstrip().split("\n")
            source = "\n".join([first, *lines[-height:]])
        lines = console.render_lines(Block(source), options, pad=False)[-height:]
        for line in lines:
            yield from line
            yield Segment.line()


def split(text: str, final: bool = False) -> tuple[list[str], str, bool]:
    """The finished blocks of `text`, its unfinished rest, and whether that is inside a code fence.

    Whether a block is finished depends on the line after it. While that line is only begun, it is taken for what it
    is when it starts with a letter, as no list marker does; otherwise an "x" in its place asks which blocks would go
    on. Lists and indented code can go on after such a line too.
    """
    if not text.strip():
        return [], "" if final else text, False
    whole, newline, begun = text.rpartition("\n")
    whole += newline
    decided = _decided(begun)
    probe = text if final else whole + (begun if decided else "x")
    tokens = []
    PARSER.block.parse(probe, PARSER, {}, tokens)
    tops = [token for token in tokens if token.level == 0 and token.nesting >= 0]
    lines = text.split("\n")
    starts = [token.map[0] for token in tops]
    starts[0] = 0
    if final:
        finished = len(starts)
    else:
        finished = len(starts) - 1
        if starts[-1] == len(lines) - 1 and not decided and finished and _goes_on(tops[-2].type, lines[-2]):
            finished -= 1
    starts.append(len(lines))
    blocks = [_trimmed(lines[start:end]) for start, end in zip(starts[:finished], starts[1:])]
    rest = "\n".join(lines[starts[finished] :])
    return blocks, rest, finished < len(tops) and tops[finished].type == "fence"


def _trimmed(lines: list[str]) -> str:
    """The lines as one text, without blank ones before and after."""
    filled = [i for i, line in enumerate(lines) if line.strip()]
    return "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""


def _decided(line: str) -> bool:
    return line.lstrip()[:1].isalpha()


def _goes_on(kind: str, last_line: str) -> bool:
    """Whether another line than an "x" could still belong to a block of this kind."""
    if kind == "blockquote_open":
        return bool(last_line.strip())
    if kind == "heading_open":
        return "|" in last_line  # the head of a table, if its rule comes next
    return kind in ("bullet_list_open", "ordered_list_open", "code_block")


class Painter:
    """Text in, frames out; no thread and no clock of its own."""

    def __init__(self, console):
        self.console = console
        self._live, self._drawn = None, []
        self._rest, self._fence = "", False
        self._gap = False  # whether a blank line belongs before the next block

    def frame(self, text: str, final: bool = False) -> None:
        """Add `text`; print the blocks that it finishes, and draw the unfinished one."""
        settled = not final and self._settled(text)
        self._rest += text
        blocks = []
        if not settled:
            blocks, self._rest, self._fence = split(self._rest, final)
        shown = []
        for block in blocks:
            shown += self._spaced(block, Block(block))
            self._gap = True
        self._drawn = [] if final else self._spaced(self._rest, Tail(self._rest, self._fence))
        if self._live is None and self._drawn:
            # Nothing else writes meanwhile, so no stream is redirected.
            self._live = Live(
                self,
                console=self.console,
                auto_refresh=False,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
        if shown:
            self.console.print(Group(*shown))  # the live part moves below it in the same write
        elif self._live is not None:
            self._live.refresh()

    def __rich_console__(self, console, options):
        """What Live draws. One object for ever: a new one would not be seen before the next refresh."""
        yield from self._drawn

    def close(self) -> None:
        """Leave the terminal as it was found, the cursor included."""
        live, self._live, self._drawn = self._live, None, []
        if live is not None:
            live.stop()

    def _settled(self, text: str) -> bool:
        """Whether `text` surely finishes no block: a long one must not be split again for every frame."""
        line = self._rest[self._rest.rfind("\n") + 1 :]
        if self._fence and self._rest.count("\n"):
            return self._rest.lstrip()[0] * 3 not in line + text
        return "\n" not in text and _decided(line) == _decided(line + text)

    def _spaced(self, source: str, renderable) -> list:
        if not source.strip():
            return []
        return [Text(""), renderable] if self._gap else [renderable]


class MarkdownStream:
    """One answer, shown as Markdown while it comes. Make a new one for each answer.

    `push` only queues: all the work happens in a thread that draws at most 30 frames a second. Nothing else may write
    to the terminal between the first `push` and `finish` or `abort`.
    """

    def __init__(self, console):
        self._painter = Painter(console)
        self._queue = deque()
        self._held = ""  # a carriage return: alone a control character, before a newline nothing
        self._done, self._drawing = Event(), Lock()
        self._thread = None
        self._error = None
        self._closed = False

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
        """Take away the unfinished block and show the cursor; the next frame draws both anew."""
        if not self._closed:  # else the frame that this call interrupts may be the last one
            with self._drawing:
                self._try(self._painter.close)

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
