"""Rows of a bench, and their forms: a table, Markdown, CSV, JSON and JSON lines.

The type of a row declares its figures: header, decimals and unit of each column, and the decimals that JSON keeps.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from rich.table import Table

from ..terminal import visible

FORMATS = ("table", "md", "csv", "json", "jsonl")
MACHINE = ("gpu", "dtype", "tridecode", "torch", "triton", "transformers")  # fields with the place of a measurement


def column(
    header: str = "",
    digits: int = 0,
    scale: float = 1.0,
    *,
    kept: int | None = None,
    compared: bool = False,
    selects: bool = False,
    label: str = "",
    default: Any = MISSING,
) -> Any:
    """Declare a field of a row. Tables leave it out without a `header`, or if it is None or its default in every row.

    Args:
        header: of its column, with the unit
        digits: decimals in tables
        scale: factor from the value to the unit of tables
        kept: decimals of the value itself, and so of JSON; None keeps all
        compared: whether two runs are compared by it
        selects: whether the option of this name selects the row among the rows of its command
        label: in the block of a single row
        default: a field whose default is None is left out of JSON while it is None
    """
    facts = dict(header=header, digits=digits, scale=scale, kept=kept, compared=compared, selects=selects, label=label)
    return field(default=default, metadata=facts)


@dataclass(kw_only=True)
class Row:
    """The figures of one measurement, with its command, model and machine."""

    bench: ClassVar[str]  # the kind of row in JSON
    header: ClassVar[str]  # header of the first column, which names the model

    command: str = ""
    preset: str | None = None
    model: str | None = None
    quantize: str | None = None
    head: str | None = None
    kv_dtype: str | None = None
    variant: str | None = column("variant", default=None)
    dtype: str | None = None
    gpu: str | None = None
    tridecode: str | None = None
    torch: str | None = None
    triton: str | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value, kept = getattr(self, each.name), each.metadata.get("kept")
            if kept is not None and value is not None:
                setattr(self, each.name, round(value, kept or None))

    @property
    def name(self) -> str:
        filters = {"all": "all sampling filters", "temperature": "temperature"}
        parts = (self.preset or self.model, self.quantize, "K/V in fp8" if self.kv_dtype == "fp8" else None)
        return ", ".join(filter(None, (*parts, filters.get(getattr(self, "sampling", "")))))

    def as_dict(self) -> dict[str, Any]:
        """The JSON object of the row."""
        every = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        given = {name: value for name, (value, default) in every.items() if value is not None or default is not None}
        machine = {name: given.pop(name) for name in MACHINE if name in given}
        return {"command": given.pop("command"), "bench": self.bench} | given | machine

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Row":
        """The row of a JSON object without its `bench`. Raises TypeError for other keys than those of its type."""
        return cls(**values)

    def selectors(self) -> dict[str, list | None]:
        """The options that select this row among the rows of its command."""
        return {each.name: [getattr(self, each.name)] for each in fields(self) if each.metadata.get("selects")}

    def compared(self) -> dict[str, float]:
        """The figures of the row by which two runs are compared."""
        names = (each.name for each in fields(self) if each.metadata.get("compared"))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def block(self, width: int) -> str | None:
        """Text for a terminal of that width in place of a table, if this is the only row; None for a table."""
        return None


def tables(rows: Sequence[Row]) -> list[tuple[list[str], list[list[str]]]]:
    """Headers and cells of each type of row."""
    found = []
    kinds: list[type[Row]] = [*dict.fromkeys(type(row) for row in rows)]
    for kind in kinds:
        mine = [row for row in rows if type(row) is kind]
        columns = [
            each
            for each in fields(kind)
            if each.metadata.get("header") and any(getattr(row, each.name) not in (None, each.default) for row in mine)
        ]
        headers = [kind.header, *(each.metadata["header"] for each in columns)]
        cells = [[row.name, *(cell(getattr(row, each.name), each.metadata) for each in columns)] for row in mine]
        first = 0 if any(row.name for row in mine) else 1
        found.append((headers[first:], [line[first:] for line in cells]))
    return found


def cell(value, column) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value * column['scale']:,.{column['digits']}f}"


def caption(rows: Sequence[Row]) -> str:
    """The GPUs and versions of the rows, each once."""

    def line(found: dict) -> str:
        return ", ".join(f"{'' if key in MACHINE[:2] else f'{key} '}{found[key]}" for key in MACHINE if key in found)

    return "; ".join(dict.fromkeys(line(row.as_dict()) for row in rows))


def render(rows: Sequence[Row], form: str) -> str:
    """The rows as text in one of FORMATS but table; ends with a newline."""
    if form == "md":
        return "\n".join(markdown_table(*table) for table in tables(rows))
    found = [row.as_dict() for row in rows]
    if form == "csv":
        names = list(dict.fromkeys(key for row in found for key in row))
        sink = io.StringIO()
        writer = csv.DictWriter(sink, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(found)
        return sink.getvalue()
    if form == "json":
        return json.dumps(found, indent=1) + "\n"
    return "".join(json.dumps(row) + "\n" for row in found)


def markdown_table(headers: list[str], cells: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in line] for line in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(rows: Sequence[Row], output) -> None:
    """Print tables for people, then one JSON object as the last line of stdout: the row, or all of them as `rows`."""
    if not output.tty:
        output.console.width = 160  # a pipe has none of its own
    block = rows[0].block(output.console.width) if len(rows) == 1 else None
    output.text(block or "")
    for headers, cells in [] if block else tables(rows):
        table = Table()
        for i, header in enumerate(headers):
            table.add_column(header, justify="left" if i == 0 else "right", no_wrap=i == 0)
        for line in cells:
            table.add_row(*map(visible, line))
        output.console.print(table)
    output.console.print(visible(caption(rows)), soft_wrap=True)
    found = [row.as_dict() for row in rows]
    output.text(json.dumps(found[0] if len(found) == 1 else {"rows": found}) + "\n")
