"""Choices of a model as a printed table."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..kernels.linear.project import Case
from .configs import PassConfigs
from .tables import VALUES, entry_of, scheme_name


class KernelRow(NamedTuple):
    """The kernel of a linear in passes of up to `rows` rows.

    Args:
        n, k: rows and columns of the weight.
        format: the scheme of the weight, or the dtype of a dense weight.
        config: the launch config.
    """

    role: str
    n: int
    k: int
    format: str
    rows: int
    kernel: str
    config: dict[str, int]
    source: str


def kernel_rows(cases: Mapping[str, Case], configs_by_rows: Mapping[int, PassConfigs]) -> list[KernelRow]:
    """Return a row for each linear and each size of a pass. cases maps the role of a linear to its case."""
    table = []
    for role, case in cases.items():
        for rows, configs in sorted(configs_by_rows.items()):
            choice = configs.linears[case]
            fields = entry_of(choice.config) if type(choice.config) in VALUES else {}
            fields.pop("kernel", None)
            columns = role, case.n, case.k, scheme_name(case)
            table.append(KernelRow(*columns, rows, choice.kernel.name, fields, choice.source))
    return table


def render(rows: list[KernelRow]) -> str:
    """Return the rows in aligned columns, below a header. Fields of a config that are 0 are omitted."""
    lines: list[Sequence[str]] = [KernelRow._fields]
    for row in rows:
        config = " ".join(f"{name}={value}" for name, value in row.config.items() if value)
        lines.append([*map(str, row[:-2]), config, row.source])
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "".join("  ".join(map(str.ljust, line, widths)).rstrip() + "\n" for line in lines)
