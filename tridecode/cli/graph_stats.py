"""--graph-stats: how many passes of how many rows were run, and how."""

from rich import box
from rich.measure import Measurement
from rich.table import Table

from ..engine import Engine
from .terminal import Output

NUMBERS, WORDS = ("rows", "padded", "padding", "count"), ("mode", "kind")
SPARED = ("padding", "padded", "mode")  # where a terminal is narrow, the first first


def show_graph_stats(engine: Engine, output: Output) -> None:
    """A table on stderr with a line for each kind and size of pass: the rows that were wanted, those of the pass that
    ran, the difference, mode and kind, and how often. Where a terminal is narrow columns are left out: no word is
    broken."""
    console, stats = output.errors, engine.graph_stats()
    look = box.SIMPLE_HEAD if console.is_terminal else None
    for spared in range(len(SPARED) + 1):
        table = table_of(stats, SPARED[:spared], look)
        if Measurement.get(console, console.options.update(width=1000), table).minimum <= console.width:
            break
    console.print(table)


def table_of(stats: list, spared: tuple[str, ...], look: box.Box | None) -> Table:
    """All columns but those of the names `spared`."""
    table = Table(box=look, pad_edge=False, padding=(0, 1, 0, 0))
    numbers, words = ([name for name in names if name not in spared] for names in (NUMBERS, WORDS))
    for name in (*numbers, *words):
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    for row in stats:
        table.add_row(*(f"{getattr(row, name):,}" for name in numbers), *(getattr(row, name) for name in words))
    return table
