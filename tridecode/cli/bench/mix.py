"""bench serve --mix: token times of decoding requests while a prompt is read, and the prompt's time to first token."""

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from ...engine import Engine
from ...errors import GenerationError, ParameterError
from ...options import MAX_SLOTS
from ..terminal import counted
from .measure import GREEDY, bench_engine, make_row, make_runners, reserved_positions, running
from .prefill import prompt_ids
from .rows import Row, column
from .timing import WARM_UP, spread

PHASES = ("before", "during", "after")


@dataclass(frozen=True)
class Mix:
    """The times of one run.

    Attributes:
        gaps: phase -> seconds between two successive tokens of a request, for all decoding requests
        ttft: seconds from the prompt's submission to its first token
        lost: requested tokens that were not produced
    """

    gaps: dict[str, list[float]]
    ttft: float
    lost: int


@dataclass(kw_only=True)
class MixRow(Row):
    """The figures of decoding requests and one prompt in one graph mode."""

    bench = "serve-mix"
    header = "serve --mix"
    requests: int = column("requests")
    context: int
    prompt_tokens: int = column("prompt tokens")
    steps: int
    prompt_ms: float
    graph: str = column("graph", selects=True)
    runs: int
    reads: str = column("read by")
    before_median_ms: float = column("before: median", 2, kept=3, compared=True)
    before_p99_ms: float = column("before: p99", 2, kept=3)
    before_max_ms: float = column("before: max", 2, kept=3)
    during_median_ms: float = column("during: median", 2, kept=3)
    during_p99_ms: float = column("during: p99", 2, kept=3, compared=True)
    during_max_ms: float = column("during: max", 2, kept=3)
    after_median_ms: float = column("after: median", 2, kept=3, compared=True)
    after_p99_ms: float = column("after: p99", 2, kept=3)
    after_max_ms: float = column("after: max", 2, kept=3)
    lost: int = column("lost")
    ttft_ms: float = column("ms to first token", 2, kept=3, compared=True)
    ttft_ms_p5: float = column(kept=3)
    ttft_ms_p95: float = column(kept=3)


def mix(args, output) -> list[Row]:
    """Return a row for each mode of --graph.

    The same engine runs every mode. It has one slot for each request, and one for the prompt that arrives later.
    """
    if args.requests >= MAX_SLOTS:
        raise ParameterError(
            f"--requests must be at most {MAX_SLOTS - 1}, since the later prompt needs a slot too, got {args.requests}"
        )
    tokens, slots = args.prompt_tokens, args.requests + 1
    rooms = reserved_positions(args.context, 3 * args.steps), reserved_positions(tokens, args.steps)
    pool = args.requests * rooms[0] + rooms[1]
    engine = bench_engine(args, max(rooms), slots, min(pool, slots * max(rooms)))
    rows: list[Row] = []
    for mode, runners in make_runners(engine, args.graph).items():
        with running(engine, *runners) as prompt_modes:
            runs = [
                time_mix(engine, args.requests, args.context, tokens, args.steps) for _ in range(WARM_UP + args.runs)
            ]
        figures = {"graph": mode, "reads": prompt_modes()} | mix_figures(runs[WARM_UP:])
        rows.append(make_row(MixRow, engine, args, **figures))
    return rows


def time_mix(engine: Engine, requests: int, context: int, tokens: int, steps: int) -> Mix:
    """Run decoding requests, submit a prompt among them, and return the times.

    The prompt is submitted when each decoding request has sampled more than `steps` tokens. Decoding requests sample
    3 * steps tokens, so that they still run while the prompt is read and afterwards.

    Args:
        engine: an engine with `requests + 1` slots
        requests: number of decoding requests
        context: prompt length of each decoding request, in tokens
        tokens: length of the prompt that is submitted among them
        steps: tokens that follow this prompt

    Raises:
        GenerationError: a request failed, or `steps` is so small that the requests ended before the prompt was read
    """
    vocab = engine.config.vocab_size

    def submit(number: int, length: int, max_tokens: int):
        ids = [(token + 31 * number) % vocab for token in prompt_ids(engine.config, length)]
        return engine.submit(ids, replace(GREEDY, max_tokens=max_tokens, ignore_eos=True), reuse_prefix=False)

    under_way = [submit(number, context, 3 * steps) for number in range(requests)]
    # The times of each request's tokens. The last list belongs to the prompt.
    arrivals: list[list[float]] = [[] for _ in range(requests + 1)]
    submitted, busy = math.inf, True
    while busy:
        busy = engine.step()
        now = time.perf_counter()
        for request, seen in zip(under_way, arrivals):
            seen += [now] * (request.completion_tokens - len(seen))
        if submitted == math.inf and all(len(seen) > steps for seen in arrivals[:-1]):
            submitted = time.perf_counter()
            under_way.append(submit(requests, tokens, steps))
            busy = True
    expected = [3 * steps] * requests + [steps]
    lost = sum(number - len(result_of(request).token_ids) for number, request in zip(expected, under_way))
    *decoding, new = arrivals
    # The time at which the last request began to decode, and the time of the first token after the prompt.
    all_decode, first = max(seen[0] for seen in decoding), new[0]
    gaps: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for seen in decoding:
        for start, end in zip(seen, seen[1:]):
            if start >= all_decode:
                gaps["before" if end <= submitted else "during" if end <= first else "after"].append(end - start)
    if min(map(len, gaps.values())) == 0 or min(seen[-1] for seen in decoding) <= first:
        few = counted(steps, "step")
        raise GenerationError(f"the requests ended before the prompt was read, after {few}; give more --steps")
    return Mix(gaps, first - submitted, lost)


def result_of(request):
    """Return the result of a request. Raises GenerationError if the request failed."""
    if (result := request.result()).error:
        raise GenerationError(result.error)
    return result


def mix_figures(runs: list[Mix]) -> dict:
    """Return figures in ms: percentiles over the gaps of all runs, and of the time to first token over the runs."""
    figures: dict[str, float] = {}
    for phase in PHASES:
        gaps = [1e3 * gap for run in runs for gap in run.gaps[phase]]
        median, p99 = np.percentile(gaps, (50, 99)).tolist()
        figures |= {f"{phase}_median_ms": median, f"{phase}_p99_ms": p99, f"{phase}_max_ms": max(gaps)}
    return figures | spread("ttft_ms", [run.ttft for run in runs], 1e3) | {"lost": sum(run.lost for run in runs)}
