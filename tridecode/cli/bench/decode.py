"""bench decode: the whole token step, LM head and sampling included, against the read bandwidth of the run."""

from .ablate import ladder
from .measure import (
    GREEDY,
    SAMPLING,
    bench_engine,
    model_facts,
    read_bandwidth,
    run_facts,
    spread,
    step_bytes,
    time_decode,
)


def decode(args, output) -> list[dict]:
    """One row, or with --ablate one for each rung of the ladder."""
    engine = bench_engine(args, capacity_of(args))
    where = model_facts(engine, args) | {"context": args.context, "steps": args.steps, "runs": args.runs}
    if args.ablate:
        rungs = ladder(engine, args.context, args.steps, args.runs, SAMPLING[args.sampling], output)
        return [{"bench": "ablate"} | where | rung | run_facts(engine.device) for rung in rungs]
    bandwidth = read_bandwidth(engine.device)
    times = time_decode(engine, args.context, args.steps, args.runs, SAMPLING[args.sampling])
    row = {"bench": "decode"} | where | {"capacity": engine.capacity, "sampling": args.sampling}
    row |= decode_figures(times, step_bytes(engine, args.context, args.steps), bandwidth)
    if args.sampling != "greedy":
        greedy = time_decode(engine, args.context, args.steps, args.runs, GREEDY)
        row["us_over_greedy"] = round(spread(times, 1e6)[0] - spread(greedy, 1e6)[0], 2)
    return [row | run_facts(engine.device)]


def capacity_of(args) -> int:
    """K/V positions to allocate: --capacity, or what the run needs."""
    return args.capacity or args.context + args.steps + 2


def decode_figures(times: list[float], nbytes: int, bandwidth: float) -> dict:
    """From seconds a token, bytes a step and bytes a second."""
    median, p5, p95 = spread(times, 1e6)
    return {
        "us_per_token": round(median, 2),
        "us_p5": round(p5, 2),
        "us_p95": round(p95, 2),
        "tokens_per_second": round(1e6 / median, 1),
        "bytes_per_step": nbytes,
        "read_bandwidth_gbs": round(bandwidth / 1e9, 1),
        "pct_bandwidth": round(100 * nbytes / (median / 1e6) / bandwidth, 1),
    }
