"""How an answer is shown: as Markdown in a terminal, elsewhere and with --plain as plain text, token by token."""

import re
from collections.abc import Iterable

from ...text.thinking import THINKING, ThinkSplitter
from ..terminal import Output, counted
from ..wrapping import Wrapped


class PlainText:
    """The answer as it comes, and a newline after it; one that failed before its first character leaves nothing."""

    def __init__(self, output: Output):
        self._write = Wrapped(output.console, output.text) if output.tty else output.text
        self._wrote = self._ended = False

    def push(self, text: str) -> None:
        self._wrote = self._wrote or bool(text)
        self._write(text)

    def finish(self) -> None:
        self._end(newline=True)

    def abort(self) -> None:
        self._end(newline=self._wrote)

    def _end(self, newline: bool) -> None:
        if newline and not self._ended:
            self._write("\n")
        self._ended = True

    def pause(self) -> None:
        """What was shown stays."""

    def resume(self) -> None:
        """What comes goes on where the cursor is."""


class Display:
    """Shows one answer in `sink`, and the think block that it may begin with apart from it: dimmed, or with `hide` only
    its length. `push` takes pairs of kind and text from `splitter`."""

    def __init__(self, output: Output, sink, splitter: ThinkSplitter, hide: bool, unit: str = "token"):
        """unit: the unit of the stream, for the length of the block."""
        self._output, self._sink, self._splitter, self._hide, self._unit = output, sink, splitter, hide, unit
        self._dim = Wrapped(output.console, output.dim)
        self._open = self._ended = False  # the think block
        self.pause, self.resume = sink.pause, sink.resume

    def push(self, parts: Iterable[tuple[str, str]]) -> None:
        for kind, text in parts:
            if kind != THINKING:
                self._end()
                self._sink.push(text)
                continue
            self._open = True
            if not self._hide:
                self._dim(text)

    def finish(self) -> None:
        self._end()
        self._sink.finish()

    def abort(self) -> None:
        try:
            self._end()
        finally:
            self._sink.abort()

    def _end(self) -> None:
        if self._open and not self._ended:
            self._ended = True
            if not self._hide:
                self._dim("\n")
            length = counted(self._splitter.tokens, self._unit)
            self._output.note(f"thought for {length}, {self._splitter.seconds:.1f} s")


def open_fence(text: str) -> str:
    """The line that begins the block of code in which `text` ends; "" if it ends in none."""
    opened = ""
    for line in text.split("\n"):
        if mark := re.match(r" {0,3}(```|~~~)", line):
            opened = line + "\n" if not opened else "" if mark[1] in opened else opened
    return opened


def as_plain(output: Output, plain: bool) -> bool:
    """Return whether answers are plain text: `plain` is set, or stdout is not a terminal that can show Markdown."""
    return plain or not output.tty or output.console.is_dumb_terminal


def open_sink(output: Output, plain: bool):
    """Return the sink that shows the text of one answer. Its methods: push(text), then finish() or abort(), which may
    both be called twice; pause() leaves the terminal to another program until resume()."""
    if as_plain(output, plain):
        return PlainText(output)
    from .markdown import MarkdownStream

    return MarkdownStream(output.console)
