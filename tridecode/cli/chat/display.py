"""How an answer is shown: as Markdown in a terminal, elsewhere and with --plain as plain text, token by token."""

import re

from ...errors import PromptError
from ...text.thinking import THINKING, ThinkSplitter, ends_inside
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


class Thinking:
    """Shows the think block that an answer may begin with apart from it: dimmed, or with `hide` only its length."""

    def __init__(self, output: Output, answer, opened: bool, hide: bool, unit: str = "token"):
        """unit: what a push is."""
        self._output, self._answer, self._hide, self._unit = output, answer, hide, unit
        self._splitter = ThinkSplitter(opened)
        self._dim = Wrapped(output.console, output.dim)
        self._open = self._said = False  # whether a block was begun, and whether its length was said

    def push(self, text: str) -> None:
        for kind, piece in self._splitter.feed(text):
            self._show(kind, piece)

    def finish(self) -> None:
        self._rest()
        self._answer.finish()

    def abort(self) -> None:
        try:
            self._rest()
        finally:
            self._answer.abort()

    def pause(self) -> None:
        self._answer.pause()

    def resume(self) -> None:
        self._answer.resume()

    def _show(self, kind: str, text: str) -> None:
        if kind == THINKING:
            self._open = True
            if not self._hide:
                self._dim(text)
        else:
            self._end()
            self._answer.push(text)

    def _rest(self) -> None:
        for kind, piece in self._splitter.finish():
            self._show(kind, piece)
        self._end()

    def _end(self) -> None:
        if self._open and not self._said:
            self._said = True
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


def opens_thinking(tokenizer, variables: dict | None = None) -> bool:
    """Whether the template itself begins the think block, so that answers start inside it."""
    try:
        ids = tokenizer.encode_chat([{"role": "user", "content": "?"}], **variables or {})
    except PromptError:  # no template, or one that wants other messages
        return False
    return ends_inside(tokenizer.decode(ids[-4:], skip_special=False))


def answer_display(output: Output, plain: bool, opened: bool = False, hide: bool = False, unit: str = "token"):
    """What shows one answer: push(text), then finish() or abort(), which may both be called twice. pause() leaves
    the terminal to another program until resume().

    opened: the prompt ended inside a think block. hide: of thinking only its length is shown, in pushes, which `unit`
    says what they are. Plain text has the think block as the model wrote it.
    """
    if plain or not output.tty or output.console.is_dumb_terminal:
        return Thinking(output, PlainText(output), opened, hide, unit) if hide else PlainText(output)
    from .markdown import MarkdownStream

    return Thinking(output, MarkdownStream(output.console), opened, hide, unit)
