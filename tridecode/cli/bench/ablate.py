"""bench decode --ablate: what each idea of the step is worth, on the same kernels with the same launch shapes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ...engine import Engine
from ...sampling import SamplingParams
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses
from ...step.run import Allocating, launch, run_reference
from .measure import check_running, spread, time_decode
from .passes import enqueue, rewind

PROFILED_STEPS = 16


def variants(engine: Engine) -> Iterator[tuple[str, DecodePasses]]:
    """The rungs by name, from the slowest; all share the engine's weights, cache and workspace."""
    model, run = engine.model, launch if engine.backend == "triton" else run_reference
    yield "eager, an allocation per output", DecodePasses(model, Allocating(run))
    yield "eager, into the workspace", DecodePasses(model, run)
    whole = Dispatcher("full", (model.rows,))
    yield "graph", DecodePasses(model, run, whole) if engine.graph == "full" else engine.steps
    if model.pdl:
        yield "graph, dependent launch", engine.steps


@contextmanager
def stepping(engine: Engine, steps: DecodePasses):
    """The engine with other steps."""
    own, engine.steps = engine.steps, steps
    try:
        yield engine
    finally:
        engine.steps = own


def ladder(engine: Engine, context: int, steps: int, runs: int, params: SamplingParams, output) -> list[dict]:
    """The figures of each rung, in µs a step: wall by CUDA events, the others from the GPU's activity records."""
    rungs, rows = list(variants(engine)), []
    for name, variant in rungs:
        with stepping(engine, variant):
            times = time_decode(engine, context, steps, runs, params)
        wall, p5, p95 = (round(value, 1) for value in spread(times, 1e6))
        check_running(engine, name)
        output.note(f"{name}: {wall:,.1f} µs a step")
        rows.append({"variant": name, "wall_us": wall, "wall_p5": p5, "wall_p95": p95})
    events = record(engine, rungs, context, params)  # after every timer: a profiler slows what follows it
    for row, (name, _) in zip(rows, rungs):
        intervals = kernels_within(events, name)
        if intervals:
            row |= device_figures(intervals, PROFILED_STEPS)
        else:
            output.note(f"{name}: the profiler recorded no kernel; compute and gap are left out")
    return rows


def record(engine: Engine, rungs: list, context: int, params: SamplingParams):
    """The profiler's events of PROFILED_STEPS steps of each rung, within a range of its name. One session for all:
    what was captured before a session is recorded in it, but not surely in a second one."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for name, variant in [("warm-up", rungs[-1][1]), *rungs]:
            rewind(engine, context, params)
            torch.cuda.synchronize(engine.device)
            with record_function(name), stepping(engine, variant):
                for _ in range(PROFILED_STEPS):
                    enqueue(engine, params)
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
