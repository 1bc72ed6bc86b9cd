"""--graph-stats: how many passes of how many rows were run, and how."""

from rich import box
from rich.table import Table

from ..engine import Engine
from .terminal import Output

COLUMNS = {"unpadded rows": "rows", "padded rows": "padded", "paddings": "padding", "mode": "mode", "kind": "kind"}


def show_graph_stats(engine: Engine, output: Output) -> None:
    """A table on stderr with a line for each kind and size of pass; plain where that is no terminal."""
    table = Table(box=box.ROUNDED if output.errors.is_terminal else None)
    for name in (*COLUMNS, "count"):
        table.add_column(name, justify="left" if name in ("mode", "kind") else "right")
    for row in engine.graph_stats():
        table.add_row(*(str(getattr(row, name)) for name in COLUMNS.values()), f"{row.count:,}")
    output.errors.print(table)
