"""bench decode --ablate: the gain of each optimization of the decode pass. Kernels and launch configs stay the same."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ...engine import Engine
from ...sampling import SamplingParams
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses
from ...step.run import Allocating, launch, run_reference
from .measure import SAMPLING, check_running, make_row, median_p5_p95, time_decode
from .passes import enqueue, rewind
from .rows import Row, column

PROFILED_STEPS = 16


@dataclass(kw_only=True)
class AblateRow(Row):
    """The figures of one variant of the decode pass."""

    bench = "ablate"
    header = "decode --ablate"
    variant: str = column("step")
    context: int = column("context")
    steps: int
    runs: int
    wall_us: float = column("µs per step", kept=1, compared=True)
    wall_p5: float = column(kept=1)
    wall_p95: float = column(kept=1)
    span_us: float | None = column("profiled", kept=1, default=None)
    compute_us: float | None = column("GPU compute", kept=1, default=None)
    gap_us: float | None = column("gap", kept=1, default=None)
    gap_pct: float | None = column("gap %", 1, kept=1, default=None)


def variants(engine: Engine) -> Iterator[tuple[str, DecodePasses]]:
    """Yield the variants and their names, from the slowest. All share the engine's weights, cache and workspace."""
    model, run = engine.model, launch if engine.backend == "triton" else run_reference
    yield "eager, an allocation per output", DecodePasses(model, Allocating(run))
    yield "eager, into the workspace", DecodePasses(model, run)
    whole = Dispatcher("full", (model.rows,))
    yield "graph", DecodePasses(model, run, whole) if engine.graph == "full" else engine.steps
    if model.pdl:
        yield "graph, dependent launch", engine.steps


@contextmanager
def stepping(engine: Engine, steps: DecodePasses):
    """Replace the engine's decode passes within the context."""
    own, engine.steps = engine.steps, steps
    try:
        yield engine
    finally:
        engine.steps = own


def ladder(engine: Engine, args, output) -> list[Row]:
    """Return a row for each variant, in µs per pass.

    The wall time is measured by CUDA events; the other figures are from the profiler's records of GPU activity.
    """
    rungs, params = list(variants(engine)), SAMPLING[args.sampling]
    walls = []
    for name, variant in rungs:
        with stepping(engine, variant):
            walls.append(median_p5_p95(time_decode(engine, args.context, args.steps, args.runs, params), 1e6))
        check_running(engine, name)
        output.note(f"{name}: {walls[-1][0]:,.1f} µs a step")
    # This step is the last one, because code runs slower after a profiler session.
    events = record(engine, rungs, args.context, params)
    rows: list[Row] = []
    for (name, _), (wall, p5, p95) in zip(rungs, walls):
        figures = device_figures(kernels_within(events, name), PROFILED_STEPS)
        if not figures:
            output.note(f"{name}: the profiler recorded no kernel; compute and gap are left out")
        wall_figures = dict(wall_us=wall, wall_p5=p5, wall_p95=p95)
        rows.append(make_row(AblateRow, engine, args, variant=name, **wall_figures, **figures))
    return rows


def record(engine: Engine, rungs: list, context: int, params: SamplingParams):
    """Return the profiler's events of PROFILED_STEPS passes of each variant, within a range named after the variant.

    One profiler session records all variants. A second session may lack the records of graphs that were captured before
    it.
    """
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
    """Return (start, end) in µs of the GPU activities that ran within the profiler range `name` of the host."""
    ranges = [e.time_range for e in events if e.name == name and e.device_type == DeviceType.CPU]
    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation
        and any(within.start <= event.time_range.start and event.time_range.end <= within.end for within in ranges)
    ]


def device_figures(intervals: list[tuple[float, float]], steps: int) -> dict:
    """Return µs per pass: from the start of the first kernel to the end of the last, and the part in which kernels ran.

    Without kernels, the result is empty.
    """
    if not intervals:
        return {}
    span, busy = (value / steps for value in span_and_union(intervals))
    return {"span_us": span, "compute_us": busy, "gap_us": span - busy, "gap_pct": 100 * (span - busy) / span}


def span_and_union(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the length from the first start to the last end, and the length of the union of the intervals."""
    union, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        union += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return reached - min(start for start, _ in intervals), union
