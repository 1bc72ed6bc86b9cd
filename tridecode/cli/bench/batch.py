"""bench batch: time of a decode pass of many requests, compared with a pass of one request in the same run."""

from dataclasses import dataclass
from statistics import median

from ...errors import ParameterError
from ..bench_options import contexts_of
from ..terminal import counted
from .decode import PassRow, pass_figures
from .measure import (
    SAMPLING,
    bench_engine,
    check_running,
    make_row,
    read_bandwidth,
    reserved_positions,
    step_bytes,
    time_decode,
)
from .rows import Row

ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(kw_only=True)
class BatchRow(PassRow):
    """The figures of passes with one number of requests, or with one mix of contexts."""

    bench = "batch"
    header = "batch"

    def selectors(self):
        """Return the options that make the bench measure only this row: --rows and --context."""
        return {"rows": None if isinstance(self.context, str) else [self.rows], "context": [self.context]}


def batch(args, output) -> list[Row]:
    """Return a row for each number of --rows at each --context, and one for each mix. One engine runs all."""
    cases = cases_of(args)
    room = [[reserved_positions(context, args.steps) for context in contexts] for _, contexts in cases]
    engine = bench_engine(args, max(map(max, room)), max(map(len, room)), max(map(sum, room)))
    bandwidth, params = read_bandwidth(engine.device), SAMPLING[args.sampling]

    def times(contexts: list[int]) -> list[float]:
        seconds = time_decode(engine, contexts, args.steps, args.runs, params, len(contexts))
        check_running(engine, counted(len(contexts), "row"), len(contexts))
        return seconds

    one_row = {context: 1e6 * median(times([context])) for context in {max(contexts) for _, contexts in cases}}
    rows: list[Row] = []
    for name, contexts in cases:
        nbytes = step_bytes(engine, contexts, args.steps)
        figures = pass_figures("us_per_step", times(contexts), nbytes, bandwidth, len(contexts))
        figures |= {"rows": len(contexts), "context": name, "one_row_us": one_row[max(contexts)]}
        rows.append(make_row(BatchRow, engine, args, **figures))
    return rows


def cases_of(args) -> list[tuple[int | str, list[int]]]:
    """Return for each row its value of `context` and the context length of each of its requests.

    Raises:
        ParameterError: --rows is set although each --context is a mix
    """
    if args.rows is not None and all(not context.isdecimal() for context in args.context):
        raise ParameterError(f"--rows: a mix like {args.context[0]} sets the number of requests; omit --rows")
    cases: list[tuple[int | str, list[int]]] = []
    for context in args.context:
        if context.isdecimal():
            cases += [(int(context), [int(context)] * rows) for rows in args.rows or ROWS]
        else:
            cases.append((context, contexts_of(context)))
    return cases
