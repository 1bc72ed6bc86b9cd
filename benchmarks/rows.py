"""Rows of JSON files, their comparison, and shared parts of the scripts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tridecode.cli.bench.ablate import AblateRow
from tridecode.cli.bench.batch import BatchRow
from tridecode.cli.bench.decode import DecodeRow, PassRow
from tridecode.cli.bench.mix import MixRow
from tridecode.cli.bench.offload import OffloadRow, PromptRow, SwapRow, WeightsRow
from tridecode.cli.bench.prefill import PrefillRow
from tridecode.cli.bench.rows import Row, column, tables
from tridecode.cli.bench.run import publish
from tridecode.cli.bench.serve import ServeRow
from tridecode.cli.bench.speculate import DraftRow, PassesRow, TextRow
from tridecode.cli.bench.start import StartRow
from tridecode.cli.bench.stream import StreamRow
from tridecode.cli.bench_options import add_script
from tridecode.cli.command_line import Parser
from tridecode.cli.explain import explain
from tridecode.cli.inputs import loads, read_bytes
from tridecode.cli.terminal import Output, counted
from tridecode.errors import ParameterError, PromptError, TridecodeError


@dataclass(kw_only=True)
class PeersRow(PassRow):
    bench = "peers"
    header = "peers"
    variant: str = column("program")
    transformers: str


@dataclass(kw_only=True)
class AgentsRow(Row):
    bench = "agents"
    header = "model"
    task: str = column("task")
    turns: int = column("turns")
    prompt_tokens: int = column("prompt tokens")
    reused_tokens: int = column("reused", compared=True)
    share: float = column("reused %", 1, 100.0, kept=4)
    possible: float = column("possible %", 1, 100.0, kept=4)
    ttft: float | None = column("first token, ms", 1, 1e3, kept=6, compared=True, default=None)
    ttft_p99: float | None = column("p99, ms", 1, 1e3, kept=6, default=None)


TYPES: dict[str, type[Row]] = {
    kind.bench: kind
    for kind in (
        *(DecodeRow, AblateRow, BatchRow, PrefillRow, StreamRow, StartRow, ServeRow, MixRow, PeersRow, AgentsRow),
        *(OffloadRow, WeightsRow, PromptRow, SwapRow, PassesRow, DraftRow, TextRow),
    )
}


def read_rows(path: str) -> list[Row]:
    """Return the rows of a JSON file. Raises PromptError if it cannot be read, ParameterError for other content."""
    try:
        found = loads(read_bytes(path, None, "a JSON file that a bench wrote"))
        rows = [TYPES[row["bench"]].read({key: row[key] for key in row if key != "bench"}) for row in found]
        tables(rows)  # This call raises an error if a figure is not a number.
    except PromptError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        rows = []
    if not rows:
        raise ParameterError(f"{path}: expected a JSON list of results, as a bench writes with --format json")
    return rows


def deviations(rows: Sequence[Row], earlier: Sequence[Row]) -> list[tuple[str, str, float]]:
    """Return for each row that is also in `earlier`: command, the figure that changed most, and its change in %."""
    before = {(row.command, row.variant): row.compared() for row in earlier}
    found = []
    for row in rows:
        others = before.get((row.command, row.variant), {})
        changes = {name: 100 * (value / others[name] - 1) for name, value in row.compared().items() if others.get(name)}
        if changes:
            worst = max(changes, key=lambda name: abs(changes[name]))
            found.append((row.command, worst, changes[worst]))
    return found


def compare(rows: Sequence[Row], earlier: Sequence[Row], path: str, output) -> None:
    """Write a line to stderr for each result that `earlier` also contains, then the largest deviation."""
    found = deviations(rows, earlier)
    if not found:
        raise ParameterError(
            f"{path}: contains no earlier result to compare with; expected a result of the same command"
        )
    for command, figure, percent in found:
        output.note(f"{percent:+6.2f}%  {figure}  {command}")
    _, figure, percent = max(found, key=lambda row: abs(row[2]))
    output.note(f"largest deviation of {counted(len(found), 'result')} from {path}: {percent:+.2f}% ({figure})")


def options(script: str, about: str, **more) -> Parser:
    """Return the parser of a script with the options that all scripts have."""
    parser = Parser(prog=f"python -m benchmarks.{script}", description=about, **more)
    add_script(parser, "decode", ("format", "output"))
    parser.add_argument(
        "--compare", metavar="FILE", help="JSON file with earlier results; report the differences from them"
    )
    return parser


def run(args, measured: Callable[[Output], Sequence[Row]]) -> int:
    """Write the rows that `measured` returns, compare them if --compare is set, and return the exit code."""
    output = Output()
    try:
        earlier = read_rows(args.compare) if args.compare is not None else []
        rows = publish(args, output, lambda: measured(output))
        if earlier:
            compare(rows, earlier, args.compare, output)
    except (TridecodeError, OSError) as error:
        output.error(explain(error))
        return 1
    return 0
