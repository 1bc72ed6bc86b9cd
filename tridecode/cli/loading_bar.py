"""The progress bar of an engine that loads its weights, then compiles its kernels."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, Task, TextColumn, TransferSpeedColumn
from rich.text import Text


class Amount(DownloadColumn):
    """The progress of a task: bytes and speed, or a count in the unit of the task."""

    def render(self, task: Task) -> Text:
        if unit := task.fields["unit"]:
            return Text(f"{task.completed:,.0f}/{task.total or 0:,.0f} {unit}")
        return Text.assemble(super().render(task), " ", TransferSpeedColumn().render(task))


class Loading(Progress):
    """The bar of an engine that loads its weights, then compiles its kernels."""

    def __init__(self, console: Console, disable: bool):
        columns = TextColumn("{task.description}"), BarColumn(), Amount()
        super().__init__(*columns, console=console, transient=True, disable=disable)
        self._weights = self.add_task("loading", total=None, visible=False, unit="")
        self._kernels = self.add_task("compiling", total=None, visible=False, unit="kernels")

    def weights(self, done: int, total: int) -> None:
        self.update(self._weights, completed=done, total=total, visible=True)

    def kernels(self, done: int, total: int) -> None:
        self.update(self._weights, visible=False)
        self.update(self._kernels, completed=done, total=total, visible=True)
