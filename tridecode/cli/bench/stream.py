"""bench stream: the engine's own stream as its caller sees it, against the graph alone at the same positions."""

import time
from dataclasses import replace

import numpy as np

from ...engine import Engine
from ...errors import GenerationError
from .decode import capacity_of
from .measure import GREEDY, SAMPLING, WARM_UP, bench_engine, model_facts, run_facts, spread, time_decode
from .prefill import prompt_ids


def stream(args, output) -> list[dict]:
    """One row: wall time a token, its ratio to the graph's, and the times between tokens."""
    engine = bench_engine(args, capacity_of(args))
    params = SAMPLING[args.sampling]
    steps = max(args.steps, 2)  # one interval at least
    # The first piece comes from the step at position context - 1, so the graph's steps are those after it.
    graph = time_decode(engine, args.context, steps - 1, args.runs, params)
    runs = [time_stream(engine, args.context, steps, params) for _ in range(args.runs + WARM_UP)][WARM_UP:]
    row = {"bench": "stream"} | model_facts(engine, args)
    row |= {"context": args.context, "steps": steps, "runs": args.runs, "sampling": args.sampling}
    return [row | stream_figures(runs, graph) | run_facts(engine.device)]


def time_stream(engine: Engine, context: int, steps: int, params=GREEDY) -> tuple[float, list[float]]:
    """Seconds to the first token, and between each token and the next, of one cold stream."""
    params = replace(params, max_tokens=steps, ignore_eos=True)
    ids = prompt_ids(engine.config, context)
    arrivals = []
    started = time.perf_counter()
    for piece in engine.stream(ids, params, reuse_prefix=False):
        if piece.token_id is not None:
            arrivals.append(time.perf_counter())
    if piece.error:
        raise GenerationError(piece.error)
    return arrivals[0] - started, np.diff(arrivals).tolist()


def stream_figures(runs: list[tuple[float, list[float]]], graph: list[float]) -> dict:
    """Medians over the runs; the percentile of the times between tokens is over all of them together."""
    intervals = [seconds for _, run in runs for seconds in run]
    tpot, p5, p95 = spread([sum(run) / len(run) for _, run in runs], 1e6)
    alone = spread(graph, 1e6)[0]
    return {
        "us_per_token": round(tpot, 2),
        "us_p5": round(p5, 2),
        "us_p95": round(p95, 2),
        "graph_us_per_token": round(alone, 2),
        "ratio_to_graph": round(tpot / alone, 4),
        "ttft_ms": round(1e3 * spread([first for first, _ in runs])[0], 3),
        "tpot_ms": round(tpot / 1e3, 4),
        "itl_mean_us": round(1e6 * float(np.mean(intervals)), 2),
        "itl_median_us": round(1e6 * float(np.median(intervals)), 2),
        "itl_p99_us": round(1e6 * float(np.percentile(intervals, 99)), 2),
    }
