"""bench batch: time of a decode pass of many requests, compared with a pass of one request in the same run."""

from dataclasses import dataclass
from statistics import median

from ...errors import ParameterError
from ...options import DEFAULT_RANK
from ..bench_options import contexts_of
from ..terminal import counted
from .decode import PassRow, pass_figures
from .measure import (
    SAMPLING,
    bench_engine,
    check_running,
    experts_of,
    make_row,
    random_adapters,
    read_bandwidth,
    reserved_positions,
    step_bytes,
    time_decode,
)
from .rows import Row, column

ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(kw_only=True)
class BatchRow(PassRow):
    """The figures of passes with one number of requests, or with one mix of contexts."""

    bench = "batch"
    header = "batch"
    adapters: int | None = column("adapters", default=None)
    rank: int | None = None
    plain_us: float | None = column("without", kept=2, default=None)
    ratio: float | None = column("ratio", 3, kept=4, default=None)
    ratio_of_bytes: float | None = column("ratio of bytes", 3, kept=4, default=None)

    def selectors(self):
        """Return the options that make the bench measure only this row: --rows, --context and --random-adapters."""
        rows = None if isinstance(self.context, str) else [self.rows]
        return {"rows": rows, "context": [self.context], "random_adapters": self.adapters and [self.adapters]}


def batch(args, output) -> list[Row]:
    """Return a row for each number of --rows at each --context, and one for each mix. One engine runs all.

    With --random-adapters, each has a row for each number of adapters that is not greater than its requests.
    """
    cases, counts, rank = cases_of(args), args.random_adapters or (0,), args.rank or DEFAULT_RANK
    engine = bench_engine(args, *sizes_of(args), **adapters_of(args))
    bandwidth, params = read_bandwidth(engine.device), SAMPLING[args.sampling]

    def times(contexts: list[int], adapters: int = 0) -> list[float]:
        seconds = time_decode(engine, contexts, args.steps, args.runs, params, len(contexts), adapters=adapters)
        check_running(engine, counted(len(contexts), "row"), len(contexts))
        return seconds

    one_row = {context: 1e6 * median(times([context])) for context in {max(contexts) for _, contexts in cases}}
    rows: list[Row] = []
    for name, contexts in cases:
        for adapters in counts:
            if adapters <= len(contexts):
                plain = median(times(contexts)) if adapters else None
                nbytes = step_bytes(engine, contexts, args.steps, adapters, rank)
                figures = pass_figures("us_per_step", times(contexts, adapters), nbytes, bandwidth, len(contexts))
                figures |= {"rows": len(contexts), "context": name, "one_row_us": one_row[max(contexts)]}
                figures["experts"] = experts_of(engine, len(contexts))
                if plain is not None:
                    figures |= {
                        "adapters": adapters,
                        "rank": rank,
                        "plain_us": 1e6 * plain,
                        "ratio": figures["us_per_step"] / plain / 1e6,
                        "ratio_of_bytes": nbytes / step_bytes(engine, contexts, args.steps),
                    }
                rows.append(make_row(BatchRow, engine, args, **figures))
    return rows


def sizes_of(args) -> tuple[int, int, int]:
    """Return the positions of the longest request, the number of requests, and the positions of all of them."""
    room = [[reserved_positions(context, args.steps) for context in contexts] for _, contexts in cases_of(args)]
    return max(map(max, room)), max(map(len, room)), max(map(sum, room))


def adapters_of(args) -> dict[str, int]:
    """Return the arguments of `bench_engine` for the adapters."""
    return random_adapters(max(args.random_adapters or (0,)), args.rank)


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
