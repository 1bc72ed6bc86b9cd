"""bench decode --ablate: what each idea of the step is worth, on the same kernels with the same launch shapes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from ...engine import Engine
from ...errors import GenerationError
from ...meta import RUN, STATUS
from ...sampling import SamplingParams
from .measure import spread, time_decode

PROFILED_STEPS = 16
# Buffers of the workspace by how often a step reaches for them for each time that it writes them.
REACHES = {"normed": 2, "sumsq": 2, "qkv": 2, "attn_out": 2, "act": 2, "logits": 2}  # a writer, then a reader
REACHES |= {"hidden": 1, "attn_partial": 1, "attn_lse": 1}  # every op that reaches for them writes them


class FreshOutputs:
    """A workspace that allocates a tensor of the output's shape and dtype for every output of every op.

    The tensor is held until the next one of its name, as a variable of a plain engine holds it. The values themselves
    stay in the workspace, since the kernels add to the residual stream in place: what is added is the allocation.
    """

    def __init__(self, workspace):
        self._workspace = workspace
        self._reached = Counter()
        self._held = {}

    def __getattr__(self, name: str):
        buffer = getattr(self._workspace, name)
        if name in REACHES:
            if self._reached[name] % REACHES[name] == 0:
                self._held[name] = torch.empty_like(buffer)
            self._reached[name] += 1
        return buffer


def variants(engine: Engine) -> Iterator[tuple[str, Engine]]:
    """The rungs by name, from the slowest; all share the engine's weights, cache and workspace."""
    plain = replace(engine.model, pdl=False)
    fresh = replace(plain, workspace=FreshOutputs(plain.workspace))
    yield "eager, an allocation per output", replace(engine, model=fresh, graph="none")
    yield "eager, into the workspace", replace(engine, model=plain, graph="none")
    yield "graph", replace(engine, model=plain)
    if engine.model.pdl:
        yield "graph, dependent launch", engine


def ladder(engine: Engine, context: int, steps: int, runs: int, params: SamplingParams, output) -> list[dict]:
    """The figures of each rung, in µs a step: wall by CUDA events, the others from the GPU's activity records."""
    rungs = list(variants(engine))
    walls = []
    for name, variant in rungs:
        output.note(f"{name} ...")
        walls.append(spread(time_decode(variant, context, steps, runs, params), 1e6))
        check_running(variant, name)
    rows = []
    device_time(engine, context, params)  # the first profile of a process starts slowly
    for (name, variant), (wall, p5, p95) in zip(rungs, walls):  # after every timer: a profiler slows what follows it
        span, busy = (1e6 * seconds for seconds in device_time(variant, context, params))
        rows.append(
            {
                "variant": name,
                "wall_us": round(wall, 1),
                "wall_p5": round(p5, 1),
                "wall_p95": round(p95, 1),
                "span_us": round(span, 1),
                "compute_us": round(busy, 1),
                "gap_us": round(span - busy, 1),
                "gap_pct": round(100 * (span - busy) / span, 1),
            }
        )
    return rows


def check_running(engine: Engine, name: str) -> None:
    """Steps that have ended do nothing, quickly: their time would be no figure."""
    status = int(engine.model.workspace.meta[0, STATUS])
    if status != RUN:
        raise GenerationError(f"{name}: the steps ended early (status {status}); no time was measured")


def device_time(engine: Engine, context: int, params: SamplingParams, steps: int = PROFILED_STEPS):
    """Seconds a step from the first kernel's start to the last one's end, and of those the ones with a kernel on."""
    engine.rewind(context, params)
    torch.cuda.synchronize(engine.device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            engine.enqueue(params)
        torch.cuda.synchronize(engine.device)
    times = [event.time_range for event in recorded.events() if event.device_type == DeviceType.CUDA]
    if not times:
        raise GenerationError("the profiler recorded no kernel; another profiler may hold the GPU's activity records")
    span, busy = span_and_union([(time.start, time.end) for time in times])
    return span / 1e6 / steps, busy / 1e6 / steps


def span_and_union(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Length from the first start to the last end, and of the union of the intervals."""
    union, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        union += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return reached - min(start for start, _ in intervals), union
