"""Checks of what a Python program passes: a ParameterError that names the argument, before anything is done."""

import operator
import reprlib
from collections.abc import Mapping

from .errors import ParameterError

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def shown(value) -> str:
    """A value in a message: its repr on one line, cut to some 60 characters."""
    try:
        return " ".join(_repr.repr(value).split())
    except ValueError:  # an integer of more digits than Python writes
        return f"an {type(value).__name__} of thousands of digits"


def choice(name: str, value, choices: tuple[str, ...]) -> str:
    """`value` if it is one of `choices`."""
    if not isinstance(value, str) or value not in choices:
        *most, last = choices
        raise ParameterError(f"{name} must be {', '.join(most)} or {last}, got {shown(value)}")
    return value


def integer(name: str, value, low: int, high: int, which: str = "") -> int:
    """`value`, an integer of Python, numpy or torch, as an int from `low` to `high`, which `which` describes."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise ParameterError(f"{name} must be an integer from {low:,} to {which}{high:,}, got {shown(value)}")
    return number


def real(name: str, value, low: float, high: float, other: str = "") -> float:
    """`value`, a number from `low` to `high`; other: what else the error names."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise ParameterError(f"{name} must be a number from {low:,g} to {high:,g}{other}, got {shown(value)}")
    return float(value)


def flag(name: str, value) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be True or False, got {shown(value)}")
    return value


def string(name: str, value) -> str:
    if not isinstance(value, str):
        raise ParameterError(f"{name} must be a string, got {shown(value)}")
    return value


def mapping(name: str, value) -> dict:
    """`value`, None being empty, as a dict with strings as keys."""
    if not isinstance(value, Mapping | None) or not all(isinstance(key, str) for key in value or ()):
        raise ParameterError(f"{name} must be a dict with strings as keys, got {shown(value)}")
    return dict(value or {})


def function(name: str, value) -> None:
    if value is not None and not callable(value):
        raise ParameterError(f"{name} must be a function or None, got {shown(value)}")
