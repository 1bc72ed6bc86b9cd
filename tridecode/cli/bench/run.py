"""Entry of `tridecode bench`: run what was asked for, write it, compare it."""

from contextlib import nullcontext
from pathlib import Path

from ...errors import GenerationError, ParameterError
from ..outputs import text_sink
from ..terminal import Output, counted
from .batch import batch
from .decode import decode
from .offload import offload
from .peers import peers
from .prefill import prefill
from .report import FORMATS, deviations, read_rows, render, show
from .serve import serve
from .serve_mix import serve_mix
from .speculate import speculate
from .start import start
from .stream import stream
from .suite import command_of, suite

BENCHES = {
    "decode": decode,
    "batch": batch,
    "prefill": prefill,
    "stream": stream,
    "start": start,
    "offload": offload,
    "speculate": speculate,
    "peers": peers,
    "serve": serve,
    "serve-mix": serve_mix,
}


def run(args) -> int:
    """Exit code 1 when a row of a suite failed; the others are written all the same."""
    output = Output()
    form = file_format(args) if args.output is not None else args.format
    earlier = read_rows(args.compare) if args.compare is not None else None
    failed: list[str] = []
    with text_sink(args.output, output) if args.output is not None else nullcontext() as write:
        if args.what == "report":
            rows = read_rows(args.file)
        elif args.what == "suite":
            rows, failed = suite(args, output, lambda row_args: measure(row_args, output))
        else:
            rows = measure(args, output)
        if not rows:
            raise GenerationError(f"bench {args.what}: every row failed")
        if write:
            write(render(rows, form))
    if args.output is None and form != "table":
        output.text(render(rows, form))
    else:
        show(rows, output)
    if earlier is not None:
        compare(rows, earlier, args.compare, output)
    return int(bool(failed))


def measure(args, output: Output) -> list[dict]:
    """The rows of one bench, each with the command that makes it alone."""
    return [{"command": command_of(args, **alone(row))} | row for row in BENCHES[args.what](args, output)]


def alone(row: dict) -> dict:
    """The options that name a row among those of its command."""
    found: dict[str, list | None] = {key: [row[key]] for key in ("prompt_tokens", "graph", "host") if key in row}
    if row["bench"] == "batch":
        mixed = isinstance(row["context"], str)
        found = {"rows": None if mixed else [row["rows"]], "context": [row["context"]]}
    return found


def file_format(args) -> str:
    """--format, or what the suffix of --output says; JSON where it has none. Raises ParameterError for another."""
    suffix = Path(args.output).suffix[1:].lower() or "json"
    if args.format == "table" and suffix not in FORMATS[1:]:
        known = ", ".join(f".{form}" for form in FORMATS[1:])
        raise ParameterError(f"--output {args.output}: the suffix must be one of {known}, or give --format")
    return suffix if args.format == "table" else args.format


def compare(rows: list[dict], earlier: list[dict], path: str, output: Output) -> None:
    """A line on stderr for each row that the earlier file has too, then the largest deviation of all."""
    found = deviations(rows, earlier)
    if not found:
        raise ParameterError(f"{path}: holds none of these rows; expected one with the same command")
    for command, figure, percent in found:
        output.note(f"{percent:+6.2f}%  {figure}  {command}")
    _, figure, percent = max(found, key=lambda row: abs(row[2]))
    output.note(f"largest deviation of {counted(len(found), 'row')} from {path}: {percent:+.2f}% ({figure})")
