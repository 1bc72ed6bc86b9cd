"""How an answer is shown: as Markdown in a terminal, elsewhere and with --plain as plain text, token by token."""

from .terminal import Output


class PlainText:
    """The answer as it comes, and a newline after it."""

    def __init__(self, output: Output):
        self._output, self._open = output, False

    def push(self, text: str) -> None:
        self._open = True
        self._output.text(text)

    def finish(self) -> None:
        if self._open:
            self._open = False
            self._output.text("\n")

    abort = finish


def answer_display(output: Output, plain: bool):
    """What shows one answer: push(text), then finish() or abort(), which may both be called twice."""
    if plain or not output.tty or output.console.is_dumb_terminal:
        return PlainText(output)
    from .markdown import MarkdownStream

    return MarkdownStream(output.console)
