"""bench decode --ablate: the gain of each optimization of the decode pass. Kernels and launch configs stay the same."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.profiler import record_function

from ...engine import Engine
from ...sampling import SamplingParams
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses
from ...step.run import Allocating, launch, run_reference
from ..profile.records import attribute, read_records, record_on_gpu, wall
from .measure import SAMPLING, check_running, make_row, running, time_decode
from .passes import enqueue, rewind
from .rows import Row, column
from .timing import spread

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


def ladder(engine: Engine, args, output) -> list[Row]:
    """Return a row for each variant, in µs per pass.

    The wall time is measured by CUDA events; the other figures are from the profiler's records of GPU activity.
    """
    rungs, params = list(variants(engine)), SAMPLING[args.sampling]
    walls = []
    for name, variant in rungs:
        with running(engine, variant):
            times = time_decode(engine, args.context, args.steps, args.runs, params)
        walls.append(spread("wall_us", times, 1e6, "wall"))
        check_running(engine, name)
        output.note(f"{name}: {walls[-1]['wall_us']:,.1f} µs a step")
    # This step is the last one, because code runs slower after a profiler session.
    trace = record_on_gpu(lambda: run_in_ranges(engine, rungs, args.context, params), host=True)
    rows: list[Row] = []
    for (name, _), figures in zip(rungs, walls):
        recorded = recorded_figures(trace, name)
        if not recorded:
            output.note(f"{name}: the profiler recorded no kernel; compute and gap are left out")
        rows.append(make_row(AblateRow, engine, args, variant=name, **figures, **recorded))
    return rows


def run_in_ranges(engine: Engine, rungs: Sequence[tuple[str, DecodePasses]], context: int, params: SamplingParams):
    """Run PROFILED_STEPS passes of each variant, within a range of the profiler that is named after the variant.

    One profiler session records all variants. A second session may lack the records of graphs that were captured before
    it.
    """
    for name, variant in [("warm-up", rungs[-1][1]), *rungs]:
        rewind(engine, context, params)
        torch.cuda.synchronize(engine.device)
        with record_function(name), running(engine, variant):
            for _ in range(PROFILED_STEPS):
                enqueue(engine, params)
            torch.cuda.synchronize(engine.device)


def recorded_figures(trace: dict, name: str, steps: int = PROFILED_STEPS) -> dict:
    """Return µs per pass: from the start of the first kernel to the end of the last, and the part in which kernels ran.

    Only kernels within the range `name` of the host count. Without kernels, the result is empty.
    """
    (within,) = (each for each in read_records(trace, ["user_annotation"]) if each.name == name)
    inside = [each for each in read_records(trace) if within.start <= each.start and each.end <= within.end]
    if not inside:
        return {}
    spans = attribute(inside, [record.name for record in inside], inside[0].start)
    span, gap = wall(spans) / steps, sum(each.gap for each in spans) / steps
    return {"span_us": span, "compute_us": span - gap, "gap_us": gap, "gap_pct": 100 * gap / span}
