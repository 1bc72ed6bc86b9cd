"""bench decode --ablate: what each idea of the step is worth, on the same kernels with the same launch shapes."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

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
    rungs, rows = list(variants(engine)), []
    for name, variant in rungs:
        wall, p5, p95 = (round(value, 1) for value in spread(time_decode(variant, context, steps, runs, params), 1e6))
        check_running(variant, name)
        output.note(f"{name}: {wall:,.1f} µs a step")
        rows.append({"variant": name, "wall_us": wall, "wall_p5": p5, "wall_p95": p95})
    events = record(rungs, context, params)  # after every timer: a profiler slows what follows it
    for row in rows:
        intervals = kernels_within(events, row["variant"])
        if intervals:
            row |= device_figures(intervals, PROFILED_STEPS)
        else:
            output.note(f"{row['variant']}: the profiler recorded no kernel; compute and gap are left out")
    return rows


def check_running(engine: Engine, name: str) -> None:
    """Steps that have ended do nothing, quickly: their time would be no figure."""
    status = int(engine.model.workspace.meta[0, STATUS])
    if status != RUN:
        raise GenerationError(f"{name}: the steps ended early (status {status}); no time was measured")


def record(rungs: list[tuple[str, Engine]], context: int, params: SamplingParams):
    """The profiler's events of PROFILED_STEPS steps of each rung, within a range of its name. One session for all:
    what was captured before a session is recorded in it, but not surely in a second one."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for name, engine in [("warm-up", rungs[-1][1]), *rungs]:
            engine.rewind(context, params)
            torch.cuda.synchronize(engine.device)
            with record_function(name):
                for _ in range(PROFILED_STEPS):
                    engine.enqueue(params)
                torch.cuda.synchronize(engine.device)
    return recorded.events()


def kernels_within(events, name: str) -> list[tuple[float, float]]:
    """Start and end in µs of what the GPU ran within the host's range `name`."""
    ranges = [e.time_range for e in events if e.name == name and e.device_type == DeviceType.CPU]
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and any(within.start <= event.time_range.start and event.time_range.end <= within.end for within in ranges)
    ]


def device_figures(intervals: list[tuple[float, float]], steps: int) -> dict:
    """µs a step from the first kernel's start to the last one's end, and of those the ones with a kernel on."""
    span, busy = (value / steps for value in span_and_union(intervals))
    return {
        "span_us": round(span, 1),
        "compute_us": round(busy, 1),
        "gap_us": round(span - busy, 1),
        "gap_pct": round(100 * (span - busy) / span, 1),
    }


def span_and_union(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Length from the first start to the last end, and of the union of the intervals."""
    union, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        union += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return reached - min(start for start, _ in intervals), union
