"""Error messages of the command line: one line each, with options in place of the library's argument names."""

import re
from collections.abc import Iterable

from ..errors import NO_CHAT, TridecodeError
from ..options import OPTIONS
from .terminal import one_line

LOADING = ("model", *OPTIONS)  # Arguments of Engine.load that are options of the command line.


def explain(error: Exception, arguments: Iterable[str] | None = ()) -> str:
    """Return one line about any error. For an error of the program it mentions --verbose.

    arguments: Python arguments that were set by options, in addition to LOADING. The line names these options instead.
        None if all arguments are keys of a file.
    """
    if isinstance(error, TridecodeError):
        return one_line(str(error) if arguments is None else with_options(str(error), (*LOADING, *arguments)))
    if type(error).__name__ == "OutOfMemoryError":  # Torch raises this error on a GPU.
        return "out of memory; choose a smaller --max-seq-len or model"
    if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):
        return "out of memory on this machine; shorten the input or end other programs"
    if isinstance(error, OSError) and error.strerror:  # For example, the disk is full or a file is not readable.
        return one_line(f"{error.strerror}{f': {error.filename}' if error.filename else ''}")
    text = one_line(error)
    return f"{type(error).__name__}{': ' if text else ''}{text} (--verbose shows the traceback)"


def with_options(text: str, arguments: Iterable[str]) -> str:
    """Replace names of Python arguments in an error of the library by their command-line options.

    Some arguments are also ordinary words. These are replaced only at the beginning and in name="value". Arguments with
    an underscore are replaced everywhere.
    """
    names = "|".join(arguments)
    text = re.sub(rf'\b({names})="(\w+)"', lambda match: f"{option(match[1])} {match[2]}", text)
    text = re.sub(rf"^({names})(?= must |: )", lambda match: option(match[1]), text)
    text = re.sub(rf"(?<![\w-])({names})(?!\w)", lambda match: option(match[1]) if "_" in match[1] else match[1], text)
    return text.replace(NO_CHAT, "use --raw")


def option(argument: str) -> str:
    """Return the option of the command line for an argument of the Python API."""
    return "--" + argument.replace("_", "-")
