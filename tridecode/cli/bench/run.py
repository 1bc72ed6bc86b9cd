"""Entry point of `tridecode bench`: run one bench and write its rows."""

import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path

from ...errors import GenerationError, ParameterError
from ..bench_options import BENCH_OPTIONS
from ..explain import option
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
AUTOMATIC = frozenset(each.name for each in BENCH_OPTIONS if each.default == "auto")
# Options that do not change the measured figures.
OMITTED = ("command", "what", "verbose", "format", "output", "compare", "api_key_file")


def run(args, output: Output) -> int:
    """Run `tridecode bench`: measure, print and store the rows. Return the exit code."""
    publish(args, output, lambda: measure(args, output))
    return 0


def measure(args, output: Output) -> list[Row]:
    """Run one bench and return its rows with their commands."""
    return with_commands(f"python cli.py bench {args.what}", args, BENCHES[args.what](args, output))


def with_commands(program: str, args, rows: list[Row]) -> list[Row]:
    """Set the `command` of each row to a command line that measures only this row, and return the rows."""
    for row in rows:
        row.command = command_of(program, args, **row.selectors())
    return rows


def publish(args, output: Output, measured: Callable[[], Sequence[Row]]) -> Sequence[Row]:
    """Check --format and --output, call `measured`, and write the rows that it returns."""
    form = file_format(args) if args.output is not None else args.format
    with text_sink(args.output, output) if args.output is not None else nullcontext() as write:
        rows = measured()
        if not rows:
            raise GenerationError("no result: every measurement failed; see the errors above")
        if write:
            write(render(rows, form))
    if args.output is None and form != "table":
        output.text(render(rows, form))
    else:
        show(rows, output)
    return rows


def file_format(args) -> str:
    """Return the format of the file: --format, or else the format of the suffix of --output. No suffix means JSON.

    Raises:
        ParameterError: the suffix names no format and --format is not set
    """
    suffix = Path(args.output).suffix[1:].lower() or "json"
    if args.format == "table" and suffix not in FORMATS[1:]:
        known = ", ".join(f".{form}" for form in FORMATS[1:])
        raise ParameterError(f"--output {args.output}: the suffix must be one of {known}, or give --format")
    return suffix if args.format == "table" else args.format


def command_of(program: str, args, **changes) -> str:
    """Return the command line of a program with every option that affects the figures, without automatic choices."""
    words = program.split()
    for name, value in (vars(args) | changes).items():
        is_set = value is not None and value is not False and not (value == "auto" and name in AUTOMATIC)
        if name in OMITTED or not is_set or (name == "preset" and getattr(args, "model", None)):
            continue
        words += [option(name)] if value is True else [option(name), typed(value)]
    return shlex.join(words)


def typed(value: object) -> str:
    """Return the value of an option as it is typed: a list with commas."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
