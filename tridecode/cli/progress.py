"""Progress bars of a loading engine and of many requests."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

if TYPE_CHECKING:  # The imported module imports Loading.
    from .terminal import Output

WIDE = 60  # In a terminal with fewer columns, the bar has no title.


class Rate(ProgressColumn):
    """Column of a progress bar with tokens per second."""

    def __init__(self, rate: Callable[[], float]):
        self._rate = rate
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the current rate in tokens per second."""
        return Text(f"{self._rate():,.0f} tok/s")


def progress(word: str, output: "Output", rate: Callable[[], float], shows: bool = True) -> Progress:
    """Return a progress bar on stderr. It is visible only if stderr is a terminal and `shows` is true."""
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
        refresh_per_second=4,  # Each refresh takes CPU time from the requests.
    )


class Amount(DownloadColumn):
    """Column of a progress bar that shows bytes and speed, or a count in the unit of the task."""

    def render(self, task: Task) -> Text:
        """Return the done and total amounts in the task's unit, or in bytes with the transfer rate."""
        if unit := task.fields["unit"]:
            return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f} {unit}")
        return Text.assemble(super().render(task), " ", TransferSpeedColumn().render(task))


class Loading(Progress):
    """Progress bar of an engine that loads its weights and then compiles its kernels."""

    def __init__(self, console: Console, disable: bool):
        columns = TextColumn("{task.description}"), BarColumn(), Amount()
        super().__init__(*columns, console=console, transient=True, disable=disable)
        self._weights = self.add_task("loading", total=None, visible=False, unit="")
        self._kernels = self.add_task("compiling", total=None, visible=False, unit="kernels")

    def weights(self, done: int, total: int) -> None:
        """Show that `done` of `total` bytes of weights are loaded."""
        self.update(self._weights, completed=done, total=total, visible=True)

    def kernels(self, done: int, total: int) -> None:
        """Show that `done` of `total` kernels are compiled, in place of the weights."""
        self.update(self._weights, visible=False)
        self.update(self._kernels, completed=done, total=total, visible=True)
