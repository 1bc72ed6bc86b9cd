"""Display of an answer: Markdown in a terminal; plain text, token by token, with --plain or in a pipe."""

import re
from collections.abc import Iterable

from ...text.thinking import ANSWER, THINKING, ThinkSplitter
from ..terminal import Output, both, counted
from ..wrapping import Wrapped


class PlainText:
    """A sink that prints an answer without formatting. A newline follows, unless the answer failed without text."""

    def __init__(self, output: Output):
        self._write = Wrapped(output.console, output.text) if output.tty else output.text
        self._wrote = self._ended = False

    def push(self, text: str) -> None:
        """Write text at once."""
        self._wrote = self._wrote or bool(text)
        self._write(text)

    def finish(self) -> None:
        """End the last line."""
        self._end(newline=True)

    def abort(self) -> None:
        """End the last line if text was written."""
        self._end(newline=self._wrote)

    def _end(self, newline: bool) -> None:
        if newline and not self._ended:
            self._write("\n")
        self._ended = True

    def pause(self) -> None:
        """Do nothing: the printed text stays on the screen."""

    def resume(self) -> None:
        """Continue in a new row."""
        if isinstance(self._write, Wrapped):
            self._write.continue_line()


class Display:
    """The display of one answer. A leading think block is dimmed. If it is hidden, its length replaces it."""

    def __init__(self, output: Output, sink, splitter: ThinkSplitter, hide: bool, tags: bool, unit: str = "token"):
        """Create the display of an answer.

        Args:
            sink: See open_sink.
            splitter: Splits the answer into thinking and the rest.
            hide: Show only the length of the think block.
            tags: Show the think block as text, with its tags.
            unit: The unit of the stream, in which the length of the think block is counted.
        """
        self._output, self._sink, self._splitter, self._unit = output, sink, splitter, unit
        self._hide, self._tags = hide, tags
        self._dim = Wrapped(output.console, output.dim)
        self._open = self._ended = False  # Whether the think block has begun, and whether it has ended.
        self.pause, self.resume = sink.pause, both(sink.resume, self._dim.continue_line)

    def push(self, text: str) -> None:
        """Show the next text of the answer."""
        parts = self._splitter.feed(text)
        self._show([(ANSWER, text)] if self._tags else parts)

    def flush(self) -> None:
        """Show text that is still held back, because it could have been the beginning of a tag."""
        parts = self._splitter.finish()
        if not self._tags:
            self._show(parts)

    def finish(self) -> None:
        """End the think block and the text."""
        self._end_thinking()
        self._sink.finish()

    def abort(self) -> None:
        """End the output of an answer that failed or was stopped."""
        try:
            self.flush()
            self._end_thinking()
        finally:
            self._sink.abort()

    def _show(self, parts: Iterable[tuple[str, str]]) -> None:
        for kind, text in parts:
            if kind != THINKING:
                self._end_thinking()
                self._sink.push(text)
                continue
            self._open = True
            if not self._hide:
                self._dim(text)

    def _end_thinking(self) -> None:
        if self._open and not self._ended:
            self._ended = True
            if not self._hide:
                self._dim("\n")
            length = counted(self._splitter.tokens, self._unit)
            self._output.note(f"thought for {length}, {self._splitter.seconds:.1f} s")


def open_display(chat, splitter: ThinkSplitter, prefix: str) -> Display:
    """Return the display of an answer in a talk.Chat, or of the rest of an answer after `prefix`."""
    output, hide, plain = chat.output, chat.think == "hide", as_plain(chat.output, chat.plain)
    sink = open_sink(output, chat.plain)
    if prefix and not plain:
        sink.push(open_fence(prefix))
    return Display(output, sink, splitter, hide, plain and not hide, chat.model.unit)


def open_fence(text: str) -> str:
    """Return the opening line of the code block in which `text` ends; "" if it does not end in one."""
    opened = ""
    for line in text.split("\n"):
        if mark := re.match(r" {0,3}(```|~~~)", line):
            opened = line + "\n" if not opened else "" if mark[1] in opened else opened
    return opened


def as_plain(output: Output, plain: bool) -> bool:
    """Return whether answers are plain text: `plain` is set, or stdout is not a terminal that can show Markdown."""
    return plain or not output.tty or output.console.is_dumb_terminal


def open_sink(output: Output, plain: bool):
    """Return the sink that shows the text of one answer.

    The sink has the methods push(text), and then finish() or abort(), which may both be called twice. pause() leaves
    the terminal to another program until resume().
    """
    if as_plain(output, plain):
        return PlainText(output)
    from .markdown import MarkdownStream

    return MarkdownStream(output.console)
