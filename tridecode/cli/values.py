"""The values of options: functions with which argparse reads them. Nothing here imports torch."""

import argparse
import math

from ..options import GRAPHS, MAX_SLOTS

MOST_ROWS = MAX_SLOTS  # of a pass


def positive(text: str) -> int:
    value = int(text) if text.isdecimal() and len(text) < 40 else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a positive integer, got {text!r}")
    return value


def positives(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def shares_of_one(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 <= value <= 1 for value in values):
        raise argparse.ArgumentTypeError(f"expected shares from 0 to 1, like 1,0.5, got {text!r}")
    return values


def row_count(text: str) -> int:
    if (value := positive(text)) > MOST_ROWS:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {MOST_ROWS}, got {text!r}")
    return value


def row_counts(text: str) -> list[int]:
    return [row_count(part) for part in text.split(",")]


def graph_modes(text: str) -> list[str]:
    """Some of GRAPHS, each once."""
    modes = text.split(",")
    if not set(modes) <= set(GRAPHS) or len(set(modes)) < len(modes):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(GRAPHS)}, each once, got {text!r}")
    return modes


def contexts(text: str) -> list[str]:
    """Numbers of tokens, and mixes like 32000x1+64x31."""
    parts = text.split(",")
    for part in parts:
        mix(part)
    return parts


def mix(context: str) -> list[int]:
    """The context of each row that 32000x1+64x31 says; of a number alone that of one row."""
    rows = []
    for part in context.split("+"):
        tokens, times, count = part.partition("x")
        rows += [positive(tokens)] * min(positive(count) if times else 1, MOST_ROWS + 1)
    if len(rows) > MOST_ROWS:
        raise argparse.ArgumentTypeError(f"expected at most {MOST_ROWS} rows, got {context!r}")
    return rows


def minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 24 * 60:
        raise argparse.ArgumentTypeError(f"expected minutes, more than 0 and at most a day, got {text!r}")
    return value


def request_rate(text: str) -> float:
    return math.inf if text == "inf" else amount(text, "a number of requests a second, or inf")


def temperature(text: str) -> float:
    return amount(text, "a number", zero=True)


def amount(text: str, what: str = "a number", zero: bool = False) -> float:
    """A finite number above 0, or 0 itself if `zero`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < math.inf and not (zero and value == 0):
        raise argparse.ArgumentTypeError(f"expected {what}, {'0 or more' if zero else 'more than 0'}, got {text!r}")
    return value


def percentiles(text: str) -> list[float]:
    """Numbers from 0 to 100; whole ones as integers, as they are named in a figure like p99_ttft_ms."""
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 100:
            raise argparse.ArgumentTypeError(f"expected percentiles from 0 to 100, like 50,90,99, got {text!r}")
        values.append(int(value) if value.is_integer() else value)
    return sorted(set(values))


def whole(text: str) -> int:
    if not (text.isdecimal() and len(text) < 40):
        raise argparse.ArgumentTypeError(f"expected 0 or a positive integer, got {text!r}")
    return int(text)
