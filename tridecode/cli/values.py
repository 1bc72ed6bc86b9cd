"""Functions with which argparse parses values of undeclared options. This module must not import torch."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from ..arguments import Choice, Constraint, Integer, Number, Several
from ..errors import ParameterError
from ..options import GRAPHS, MAX_SLOTS

MAX_ROWS = MAX_SLOTS  # Maximum number of rows of a pass.


def reader(constraint: Constraint) -> Callable[[str], Any]:
    """Return a function with which argparse parses a value that must satisfy the constraint."""

    def read(text: str) -> Any:
        try:
            return constraint.parse(text)
        except ParameterError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def list_reader(each: Constraint) -> Callable[[str], list[Any]]:
    """Return the function with which argparse reads values that are separated by commas."""
    read = reader(Several(each))
    return lambda text: list(read(text))


positive = reader(Integer(1))
positives = list_reader(Integer(1))
whole = reader(Integer(0, 2**64 - 1))
row_count = reader(Integer(1, MAX_ROWS))
row_counts = list_reader(Integer(1, MAX_ROWS))
amount = reader(Number(0, 1e12, above=True))
request_rate = reader(Number(0, math.inf, above=True))
temperature = reader(Number(0, 100))
minutes = reader(Number(0, 24 * 60, above=True))
shares_of_one = list_reader(Number(0, 1))
_modes, _percentiles = list_reader(Choice(GRAPHS)), list_reader(Number(0, 100))


def graph_modes(text: str) -> list[str]:
    """Parse a list of distinct graph modes."""
    if len(set(modes := _modes(text))) < len(modes):
        raise argparse.ArgumentTypeError(f"every mode can be listed only once, got {text!r}")
    return modes


def contexts(text: str) -> list[str]:
    """Parse a list of numbers of tokens and mixes like 32000x1+64x31."""
    parts = text.split(",")
    for part in parts:
        mix(part)
    return parts


def mix(context: str) -> list[int]:
    """Return the context of each row of a mix such as 32000x1+64x31. A single number is one row."""
    rows: list[int] = []
    for part in context.split("+"):
        tokens, times, count = part.partition("x")
        rows += [positive(tokens)] * min(positive(count) if times else 1, MAX_ROWS + 1)
    if len(rows) > MAX_ROWS:
        raise argparse.ArgumentTypeError(f"expected at most {MAX_ROWS} rows, got {context!r}")
    return rows


def percentiles(text: str) -> list[float]:
    """Parse a list of percentiles. Whole numbers become integers, as in the name of a figure like p99_ttft_ms."""
    return sorted({int(value) if value.is_integer() else value for value in _percentiles(text)})
