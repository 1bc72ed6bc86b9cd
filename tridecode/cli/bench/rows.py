"""Result rows of a bench, and their output as a table, Markdown, CSV, JSON or JSON lines.

The type of a row declares its figures: header, decimals and unit of each column, and the decimals that JSON keeps.
"""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar

from rich.table import Table

from ..terminal import Output, visible

FORMATS = ("table", "md", "csv", "json", "jsonl")
# Fields of run_facts that describe the machine and the program.
MACHINE = ("gpu", "dtype", "tridecode", "torch", "triton", "transformers")


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
    """Declare a field of a row.

    Tables omit fields without a header, and fields that are None or the default in all rows.

    Args:
        header: column header, with the unit
        digits: decimals in tables
        scale: factor from the value to the unit of tables
        kept: decimals of the stored value, and therefore of JSON; None keeps all
        compared: whether a comparison of two runs includes this field
        selects: whether the command-line option with this name selects the row
        label: label in the text block of a single row
        default: default value; JSON omits a field whose value and default are None
    """
    facts = dict(header=header, digits=digits, scale=scale, kept=kept, compared=compared, selects=selects, label=label)
    return field(default=default, metadata=facts)


@dataclass(kw_only=True)
class Row:
    """The figures of one measurement, with its command, model and machine."""

    bench: ClassVar[str]  # The kind of row, which JSON contains.
    header: ClassVar[str]  # Header of the first column, which shows the model.

    command: str = ""
    preset: str | None = None
    model: str | None = None
    quantize: str | None = None
    head: str | None = None
    kv_dtype: str | None = None
    state_dtype: str | None = None
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
        """The model, its quantization and its sampling filters as display text."""
        filters = {"all": "all sampling filters", "temperature": "temperature"}
        cache = "K/V in fp8" if self.kv_dtype == "fp8" else None
        state = "state in fp16" if self.state_dtype == "float16" else None
        parts = (self.preset or self.model, self.quantize, cache, state, filters.get(getattr(self, "sampling", "")))
        return ", ".join(filter(None, parts))

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of the row."""
        every = {each.name: (getattr(self, each.name), each.default) for each in fields(self)}
        values = {name: value for name, (value, default) in every.items() if value is not None or default is not None}
        machine = {name: values.pop(name) for name in MACHINE if name in values}
        return {"command": values.pop("command"), "bench": self.bench} | values | machine

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Row":
        """Build a row from a JSON object without its `bench`. Raises TypeError for a key that is not a field."""
        return cls(**values)

    def selectors(self) -> dict[str, list | None]:
        """Return the command-line options with which the command measures only this row."""
        return {each.name: [getattr(self, each.name)] for each in fields(self) if each.metadata.get("selects")}

    def compared(self) -> dict[str, float]:
        """Return the figures that a comparison of two runs includes."""
        names = (each.name for each in fields(self) if each.metadata.get("compared"))
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def block(self, width: int) -> str | None:
        """Return text that replaces the table if there is only this row, for a terminal of `width` columns, or None."""
        return None


def tables(rows: Sequence[Row]) -> list[tuple[list[str], list[list[str]]]]:
    """Return headers and cells for each type of row."""
    result = []
    kinds: list[type[Row]] = [*dict.fromkeys(type(row) for row in rows)]
    for kind in kinds:
        same = [row for row in rows if type(row) is kind]
        columns = [
            each
            for each in fields(kind)
            if each.metadata.get("header") and any(getattr(row, each.name) not in (None, each.default) for row in same)
        ]
        headers = [kind.header, *(each.metadata["header"] for each in columns)]
        cells = [[row.name, *(cell(getattr(row, each.name), each.metadata) for each in columns)] for row in same]
        first = 0 if any(row.name for row in same) else 1
        result.append((headers[first:], [line[first:] for line in cells]))
    return result


def cell(value, column) -> str:
    """Return a value as text with the scale and the digits of its column; "" for None."""
    if value is None or isinstance(value, str):
        return value or ""
    return f"{value * column['scale']:,.{column['digits']}f}"


def caption(rows: Sequence[Row]) -> str:
    """Return the distinct GPUs and versions of the rows."""

    def line(row: dict) -> str:
        return ", ".join(f"{'' if key in MACHINE[:2] else f'{key} '}{row[key]}" for key in MACHINE if key in row)

    return "; ".join(dict.fromkeys(line(row.as_dict()) for row in rows))


def render(rows: Sequence[Row], form: str) -> str:
    """Return the rows as text that ends with a newline. `form` is one of FORMATS except "table"."""
    if form == "md":
        return "\n".join(markdown_table(*table) for table in tables(rows))
    objects = [row.as_dict() for row in rows]
    if form == "csv":
        names = list(dict.fromkeys(key for row in objects for key in row))
        sink = io.StringIO()
        writer = csv.DictWriter(sink, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(objects)
        return sink.getvalue()
    if form == "json":
        return json.dumps(objects, indent=1) + "\n"
    return "".join(json.dumps(row) + "\n" for row in objects)


def markdown_table(headers: list[str], cells: list[list[str]]) -> str:
    """Return a Markdown table. A | in a cell is escaped."""
    lines = [headers, ["---"] * len(headers), *([cell.replace("|", "\\|") for cell in line] for line in cells)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def print_table(headers: Sequence[str], cells: Sequence[Sequence[str]], output: Output) -> None:
    """Print a table. The first column is aligned to the left."""
    table = Table()
    for i, header in enumerate(headers):
        table.add_column(header, justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in cells:
        table.add_row(*map(visible, line))
    if not output.tty:
        output.console.width = 160  # A pipe has no width.
    output.console.print(table)


def show(rows: Sequence[Row], output: Output) -> None:
    """Print tables, then one JSON object as the last line of stdout: the row, or {"rows": [...]} for several rows."""
    if block := rows[0].block(output.console.width) if len(rows) == 1 else None:
        output.text(block)
    else:
        for headers, cells in tables(rows):
            print_table(headers, cells, output)
    output.console.print(visible(caption(rows)), soft_wrap=True)
    objects = [row.as_dict() for row in rows]
    output.text(json.dumps(objects[0] if len(objects) == 1 else {"rows": objects}) + "\n")
