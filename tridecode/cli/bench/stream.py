"""bench stream: token times of `Engine.stream`, compared with replays of the graph at the same positions."""

import time
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from ...engine import Engine
from ...errors import GenerationError
from .decode import capacity_of
from .measure import GREEDY, SAMPLING, bench_engine, make_row, time_decode
from .prefill import prompt_ids
from .rows import Row, column
from .timing import WARM_UP, spread


@dataclass(kw_only=True)
class StreamRow(Row):
    """The figures of streams of one request."""

    bench = "stream"
    header = "stream"
    context: int = column("context")
    steps: int
    runs: int
    sampling: str
    us_per_token: float = column("µs per token", kept=2, compared=True)
    us_p5: float = column(kept=2)
    us_p95: float = column(kept=2)
    graph_us_per_token: float = column("graph alone", kept=2, compared=True)
    ratio_to_graph: float = column("ratio", 3, kept=4)
    ttft_ms: float = column("ms to first token", 2, kept=3)
    tpot_ms: float = column(kept=4)
    itl_mean_us: float = column("between tokens: mean", kept=2)
    itl_median_us: float = column("median", kept=2)
    itl_p99_us: float = column("p99", kept=2)


def stream(args, output) -> list[Row]:
    """Return one row: wall time per token, its ratio to the graph's time, and the times between tokens."""
    engine = bench_engine(args, capacity_of(args))
    params = SAMPLING[args.sampling]
    steps = max(args.steps, 2)  # A measurement needs at least one interval.
    # The step at position context - 1 produces the first chunk, so the timed steps of the graph follow it.
    graph = time_decode(engine, args.context, steps - 1, args.runs, params)
    runs = [time_stream(engine, args.context, steps, params) for _ in range(WARM_UP + args.runs)][WARM_UP:]
    return [make_row(StreamRow, engine, args, **stream_figures(runs, graph) | {"steps": steps})]


def time_stream(engine: Engine, context: int, steps: int, params=GREEDY) -> tuple[float, list[float]]:
    """Return the seconds to the first token and between successive tokens of a stream without a cached prefix."""
    params = replace(params, max_tokens=steps, ignore_eos=True)
    ids = prompt_ids(engine.config, context)
    arrivals = []
    started = time.perf_counter()
    for chunk in engine.stream(ids, params, reuse_prefix=False):
        if chunk.token_id is not None:
            arrivals.append(time.perf_counter())
    if chunk.error:
        raise GenerationError(chunk.error)
    return arrivals[0] - started, np.diff(arrivals).tolist()


def stream_figures(runs: list[tuple[float, list[float]]], graph: list[float]) -> dict:
    """Return medians over the runs. The statistics of the times between tokens cover the tokens of all runs."""
    intervals = np.array([seconds for _, run in runs for seconds in run])
    times = [sum(run) / len(run) for _, run in runs]
    return spread("us_per_token", times, 1e6, "us") | {
        "graph_us_per_token": 1e6 * median(graph),
        "ratio_to_graph": median(times) / median(graph),
        "ttft_ms": 1e3 * median(first for first, _ in runs),
        "tpot_ms": 1e3 * median(times),
        "itl_mean_us": 1e6 * float(intervals.mean()),
        "itl_median_us": 1e6 * float(np.median(intervals)),
        "itl_p99_us": 1e6 * float(np.percentile(intervals, 99)),
    }
