"""bench decode: time of a whole decode pass, with LM head and sampling, against the measured read bandwidth."""

from dataclasses import dataclass
from statistics import median

from .ablate import ladder
from .measure import GREEDY, SAMPLING, bench_engine, experts_of, make_row, read_bandwidth, step_bytes, time_decode
from .rows import Row, column
from .timing import spread


@dataclass(kw_only=True)
class PassRow(Row):
    """The figures of decode passes: of one request, or of the requests in `rows`."""

    rows: int | None = column("rows", default=None)
    context: int | str = column("context")  # Context length of each request, or a mix such as 32000x1+64x31.
    steps: int
    runs: int
    capacity: int | None = None
    sampling: str | None = None
    us_per_token: float | None = column("µs per token", kept=2, compared=True, default=None)
    us_per_step: float | None = column("µs per step", kept=2, compared=True, default=None)
    us_p5: float = column("p5", kept=2)
    us_p95: float = column("p95", kept=2)
    one_row_us: float | None = column("one row", kept=2, default=None)
    tokens_per_second: float = column("tokens per second", kept=1)
    experts: float | None = column("experts of a layer", 1, kept=1, default=None)
    bytes_per_step: int = column("GB per step", 3, 1e-9)
    read_bandwidth_gbs: float = column("read GB/s", kept=1)
    pct_bandwidth: float = column("% of bandwidth", 1, kept=1)


@dataclass(kw_only=True)
class DecodeRow(PassRow):
    """The figures of decode passes of one request."""

    bench = "decode"
    header = "decode"
    us_over_greedy: float | None = column("µs over greedy", 1, kept=2, default=None)


def decode(args, output) -> list[Row]:
    """Return one row, or with --ablate a row for each variant of the pass."""
    engine = bench_engine(args, capacity_of(args))
    if args.ablate:
        return ladder(engine, args, output)
    bandwidth = read_bandwidth(engine.device)
    times = time_decode(engine, args.context, args.steps, args.runs, SAMPLING[args.sampling])
    figures = pass_figures("us_per_token", times, step_bytes(engine, args.context, args.steps), bandwidth)
    figures["experts"] = experts_of(engine, 1)
    if args.sampling != "greedy":
        greedy = time_decode(engine, args.context, args.steps, args.runs, GREEDY)
        figures["us_over_greedy"] = 1e6 * (median(times) - median(greedy))
    return [make_row(DecodeRow, engine, args, capacity=engine.capacity, **figures)]


def capacity_of(args) -> int:
    """Return the K/V positions to allocate: --capacity, or the number that the run needs."""
    return args.capacity or args.context + args.steps + 2


def pass_figures(name: str, times: list[float], nbytes: int, bandwidth: float, rows: int = 1) -> dict:
    """Return the figures of a PassRow.

    Args:
        name: name of the median, which is in µs
        times: seconds per pass
        nbytes: bytes that a pass must read
        bandwidth: measured bytes per second
        rows: number of requests
    """
    seconds = median(times)
    return spread(name, times, 1e6, "us") | {
        "tokens_per_second": rows / seconds,
        "bytes_per_step": nbytes,
        "read_bandwidth_gbs": bandwidth / 1e9,
        "pct_bandwidth": 100 * nbytes / seconds / bandwidth,
    }
