"""Entry of `tridecode bench`: measure, and write the rows."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from ...errors import GenerationError, ParameterError
from ..outputs import text_sink
from ..terminal import Output
from .batch import batch
from .decode import decode
from .offload import offload
from .prefill import prefill
from .rows import FORMATS, Row, render, show
from .serve import serve
from .speculate import speculate
from .start import start
from .stream import stream

BENCHES = {
    "decode": decode,
    "batch": batch,
    "prefill": prefill,
    "stream": stream,
    "start": start,
    "offload": offload,
    "speculate": speculate,
    "serve": serve,
}
UNSAID = ("command", "what", "verbose", "format", "output", "compare", "api_key_file")  # no part of a row's command


def run(args) -> int:
    output = Output()
    publish(args, output, lambda: measure(args, output))
    return 0


def measure(args, output: Output) -> list[Row]:
    """The rows of one bench, with their commands."""
    return with_commands(f"python cli.py bench {args.what}", args, BENCHES[args.what](args, output))


def with_commands(program: str, args, rows: list[Row]) -> list[Row]:
    """Set the command of each row: the command line that measures only this row. Returns the rows."""
    for row in rows:
        row.command = command_of(program, args, **row.selectors())
    return rows


def publish(args, output: Output, measured: Callable[[], Sequence[Row]]) -> Sequence[Row]:
    """Write the rows that `measured` returns as --format and --output say, which are checked before it is called."""
    form = file_format(args) if args.output is not None else args.format
    with text_sink(args.output, output) if args.output is not None else nullcontext() as write:
        rows = measured()
        if not rows:
            raise GenerationError("every row failed")
        if write:
            write(render(rows, form))
    if args.output is None and form != "table":
        output.text(render(rows, form))
    else:
        show(rows, output)
    return rows


def file_format(args) -> str:
    """--format, or what the suffix of --output says; JSON where it has none. Raises ParameterError for another."""
    suffix = Path(args.output).suffix[1:].lower() or "json"
    if args.format == "table" and suffix not in FORMATS[1:]:
        known = ", ".join(f".{form}" for form in FORMATS[1:])
        raise ParameterError(f"--output {args.output}: the suffix must be one of {known}, or give --format")
    return suffix if args.format == "table" else args.format


def command_of(program: str, args, **changes) -> str:
    """The command line of a program, every option that counts named."""
    words = program.split()
    for name, value in (vars(args) | changes).items():
        if name in UNSAID or value is None or value is False or (name == "preset" and getattr(args, "model", None)):
            continue
        option = "--" + name.replace("_", "-")
        words += [option] if value is True else [option, value if isinstance(value, str) else numbers(value)]
    return shlex.join(words)


def numbers(value: float | list | tuple) -> str:
    """As its option reads it: numbers of a list are separated by commas, those of a pair like 4:2 by a colon."""
    if isinstance(value, list | tuple):
        return (":" if isinstance(value, tuple) else ",").join(map(str, value))
    return str(value)
