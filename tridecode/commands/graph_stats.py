"""--graph-stats: how many passes of how many rows were run, and how."""

from rich import box
from rich.table import Table

from ..engine import Engine
from .terminal import Output

NUMBERS, WORDS = ("rows", "padded", "padding", "count"), ("mode", "kind")


def show_graph_stats(engine: Engine, output: Output) -> None:
    """A table on stderr with a line for each kind and size of pass: the rows that were wanted, those of the pass that
    ran, the difference, mode and kind, and how often. Nothing of it is cut where a terminal is narrow."""
    look = box.SIMPLE_HEAD if output.errors.is_terminal else None
    table = Table(box=look, pad_edge=False, padding=(0, 1, 0, 0))
    for name in (*NUMBERS, *WORDS):
        table.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
    for row in engine.graph_stats():
        table.add_row(*(f"{getattr(row, name):,}" for name in NUMBERS), *(getattr(row, name) for name in WORDS))
    output.errors.print(table)
