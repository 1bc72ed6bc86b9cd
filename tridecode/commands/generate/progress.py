"""The bar of a batch: lines that are done, tokens a second, and the time that is left."""

from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..terminal import Output


class Rate(ProgressColumn):
    """Tokens a second."""

    def __init__(self, rate: Callable[[], float]):
        self._rate = rate
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(f"{self._rate():,.0f} tok/s", no_wrap=True)


def progress(args, output: Output, rate: Callable[[], float]) -> Progress:
    """A bar on stderr; none where it would stand between the lines of stdout."""
    shows = output.errors.is_terminal and not (output.tty and args.output is None)
    return Progress(
        TextColumn("answering"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        Rate(rate),
        TimeRemainingColumn(compact=True),
        console=output.errors,
        expand=True,
        transient=True,
        disable=not shows,
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=4,  # between two of them the thread that draws takes no time from the passes
    )
