"""bench batch: the token step of many requests at once, beside that of one, in the same engine and run."""

from ...errors import ParameterError
from ...state.kv import PAGE
from ..terminal import counted
from ..values import mix
from .measure import (
    SAMPLING,
    bench_engine,
    check_running,
    model_facts,
    read_bandwidth,
    run_facts,
    spread,
    step_bytes,
    time_decode,
)

ROWS = (1, 2, 4, 8, 16, 32, 64)


def batch(args, output) -> list[dict]:
    """A row for each number of --rows at each --context, and one for each mix; all on one engine."""
    cases = cases_of(args)
    room = [[room_of(context, args.steps) for context in contexts] for _, contexts in cases]
    engine = bench_engine(args, max(map(max, room)), max(map(len, room)), max(map(sum, room)))
    bandwidth, params = read_bandwidth(engine.device), SAMPLING[args.sampling]

    def times(contexts: list[int]) -> list[float]:
        found = time_decode(engine, contexts, args.steps, args.runs, params, len(contexts))
        check_running(engine, counted(len(contexts), "row"), len(contexts))
        return found

    alone = {context: spread(times([context]), 1e6)[0] for context in {max(contexts) for _, contexts in cases}}
    rows = []
    for name, contexts in cases:
        where = {"rows": len(contexts), "context": name, "steps": args.steps, "runs": args.runs}
        row = {"bench": "batch"} | model_facts(engine, args) | where | {"sampling": args.sampling}
        nbytes = step_bytes(engine, contexts, args.steps)
        row |= batch_figures(times(contexts), alone[max(contexts)], len(contexts), nbytes, bandwidth)
        rows.append(row | run_facts(engine.device))
    return rows


def room_of(context: int, steps: int) -> int:
    """K/V positions of a request in whole pages, with one to spare: all that a run needs comes before it begins."""
    return (-(-(context + steps + 2) // PAGE) + 1) * PAGE


def cases_of(args) -> list[tuple[int | str, list[int]]]:
    """What a row says of its contexts, and the context of each of its requests. Raises ParameterError."""
    if args.rows is not None and all(not context.isdecimal() for context in args.context):
        raise ParameterError(f"--rows: a mix like {args.context[0]} says itself how many; leave out --rows")
    found: list[tuple[int | str, list[int]]] = []
    for context in args.context:
        if context.isdecimal():
            found += [(int(context), [int(context)] * rows) for rows in args.rows or ROWS]
        else:
            found.append((context, mix(context)))
    return found


def batch_figures(times: list[float], alone: float, rows: int, nbytes: int, bandwidth: float) -> dict:
    """From seconds a step of `rows` requests, µs of a step of one of them (the one of the longest context), bytes a
    step and bytes a second."""
    median, p5, p95 = spread(times, 1e6)
    return {
        "us_per_step": round(median, 2),
        "us_p5": round(p5, 2),
        "us_p95": round(p95, 2),
        "one_row_us": round(alone, 2),
        "tokens_per_second": round(1e6 * rows / median, 1),
        "bytes_per_step": nbytes,
        "read_bandwidth_gbs": round(bandwidth / 1e9, 1),
        "pct_bandwidth": round(100 * nbytes / (median / 1e6) / bandwidth, 1),
    }
