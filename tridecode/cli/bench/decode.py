"""bench decode: time of a whole decode pass, with LM head and sampling, against the measured read bandwidth."""

from dataclasses import dataclass

from .ablate import ladder
from .measure import (
    GREEDY,
    SAMPLING,
    bench_engine,
    make_row,
    median_p5_p95,
    read_bandwidth,
    step_bytes,
    step_figures,
    time_decode,
)
from .rows import Row, column


@dataclass(kw_only=True)
class DecodeRow(Row):
    """The figures of decode passes of one request."""

    bench = "decode"
    header = "decode"
    context: int = column("context")
    steps: int
    runs: int
    capacity: int | None = None
    sampling: str | None = None
    us_per_token: float = column("µs per token", kept=2, compared=True)
    us_p5: float = column("p5", kept=2)
    us_p95: float = column("p95", kept=2)
    tokens_per_second: float = column("tokens per second", kept=1)
    bytes_per_step: int = column("GB per step", 3, 1e-9)
    read_bandwidth_gbs: float = column("read GB/s", kept=1)
    pct_bandwidth: float = column("% of bandwidth", 1, kept=1)
    us_over_greedy: float | None = column("µs over greedy", 1, kept=2, default=None)


def decode(args, output) -> list[Row]:
    """Return one row, or with --ablate a row for each variant of the pass."""
    engine = bench_engine(args, capacity_of(args))
    if args.ablate:
        return ladder(engine, args, output)
    bandwidth = read_bandwidth(engine.device)
    times = time_decode(engine, args.context, args.steps, args.runs, SAMPLING[args.sampling])
    figures = step_figures("us_per_token", times, step_bytes(engine, args.context, args.steps), bandwidth)
    if args.sampling != "greedy":
        greedy = time_decode(engine, args.context, args.steps, args.runs, GREEDY)
        figures["us_over_greedy"] = median_p5_p95(times, 1e6)[0] - median_p5_p95(greedy, 1e6)[0]
    return [make_row(DecodeRow, engine, args, capacity=engine.capacity, **figures)]


def capacity_of(args) -> int:
    """Return the K/V positions to allocate: --capacity, or the number that the run needs."""
    return args.capacity or args.context + args.steps + 2
