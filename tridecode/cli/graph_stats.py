"""--graph-stats: the passes that ran, by rows and mode."""

from rich import box
from rich.measure import Measurement
from rich.table import Table

from ..engine import Engine
from .terminal import Output

NUMBERS, WORDS = ("rows", "padded", "padding", "count"), ("mode", "kind")
OPTIONAL = ("padding", "padded", "mode")  # Columns that a narrow terminal omits, in this order.


def show_graph_stats(engine: Engine, output: Output) -> None:
    """Print a table on stderr with a line for each kind and size of pass.

    Its columns are the rows that were needed, the rows of the pass, their difference, the number of passes, mode and
    kind. In a narrow terminal, some columns are omitted so that no word is broken.
    """
    console, stats = output.errors, engine.graph_stats()
    look = box.SIMPLE_HEAD if console.is_terminal else None
    for omitted in range(len(OPTIONAL) + 1):
        table = table_of(stats, OPTIONAL[:omitted], look)
        if Measurement.get(console, console.options.update(width=1000), table).minimum <= console.width:
            break
    console.print(table)


def table_of(stats: list, omitted: tuple[str, ...], look: box.Box | None) -> Table:
    """Return the table without the columns in `omitted`."""
    table = Table(box=look, pad_edge=False, padding=(0, 1, 0, 0))
    numbers, words = ([name for name in names if name not in omitted] for names in (NUMBERS, WORDS))
    for name in (*numbers, *words):
        table.add_column(name, justify="left" if name in words else "right", overflow="fold")
    for row in stats:
        table.add_row(*(f"{getattr(row, name):,}" for name in numbers), *(getattr(row, name) for name in words))
    return table
