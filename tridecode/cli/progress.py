"""The bar of many requests: those that are done, tokens a second, and the time that is left."""

from collections.abc import Callable

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from .terminal import Output

WIDE = 60  # columns; in a narrower terminal the bar has the room of the word


class Rate(ProgressColumn):
    """Tokens a second."""

    def __init__(self, rate: Callable[[], float]):
        self._rate = rate
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        return Text(f"{self._rate():,.0f} tok/s")


def progress(word: str, output: Output, rate: Callable[[], float], shows: bool = True) -> Progress:
    """A bar on stderr if that is a terminal and `shows`."""
    words = [TextColumn(word)] if output.errors.width >= WIDE else []
    return Progress(
        *words,
        BarColumn(bar_width=None, table_column=Column(ratio=1)),
        TextColumn("{task.completed:,}/{task.total:,}", table_column=Column(no_wrap=True)),
        Rate(rate),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        console=output.errors,
        expand=True,
        transient=True,
        disable=output.quiet or not (shows and output.errors.is_terminal),
        redirect_stdout=False,
        redirect_stderr=False,
        refresh_per_second=4,  # the thread that draws takes its time from the requests
    )
