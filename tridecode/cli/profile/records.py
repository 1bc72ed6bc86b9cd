"""Activity records of the GPU, and their cost. Times are in microseconds."""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import torch
from torch.profiler import ProfilerActivity

from ...errors import TridecodeError

ACTIVITIES = ("kernel", "gpu_memcpy", "gpu_memset")  # Categories of a Chrome trace in which the GPU is busy.
GAPS = (("<1", 1.0), ("1-5", 5.0), ("5-10", 10.0), ("10-50", 50.0), (">50", float("inf")))


class ProfileError(TridecodeError):
    """The records do not match the profiled work."""


@dataclass(frozen=True)
class Record:
    """One kernel, copy or fill on the GPU."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Span:
    """A record with its role. Its cost begins at `before`, the latest end of all earlier records."""

    op: str
    start: float
    end: float
    before: float

    @property
    def cost(self) -> float:
        """The time that it adds to the pass: from `before` to its end, or 0 if an earlier record ended later."""
        return max(self.end - self.before, 0.0)

    @property
    def gap(self) -> float:
        """The part of the cost in which no kernel ran."""
        return max(self.start - self.before, 0.0)


def record_on_gpu(work: Callable[[], object], host: bool = False) -> dict:
    """Return the Chrome trace of the GPU's activities during `work`, without the name of the machine.

    host: also record the host, and with it the ranges of torch.profiler.record_function.
    """
    torch.cuda.synchronize()
    activities = [ProfilerActivity.CUDA, *([ProfilerActivity.CPU] if host else [])]
    # Without acc_events, PyTorch warns that it clears events after a cycle.
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        trace = json.loads(file.read_text(encoding="utf-8", errors="replace"), strict=False)
    trace.pop("host_name", None)
    trace.pop("traceName", None)  # This key contains the name of the temporary file.
    return trace


def read_records(trace: dict, categories: Sequence[str] = ACTIVITIES) -> list[Record]:
    """Return the records of these categories in a Chrome trace, in the order of their starts."""
    records = [
        Record(event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"]))
        for event in trace.get("traceEvents", ())
        if event.get("cat") in categories
    ]
    return sorted(records, key=lambda record: (record.start, record.end))


def split_steps(records: Sequence[Record], steps: int) -> list[list[Record]]:
    """Split records into `steps` equal steps. Raises ProfileError if that is not possible."""
    size, rest = divmod(len(records), steps)
    if rest or not size:
        raise ProfileError(
            f"the GPU recorded {len(records)} activities in {steps} steps, expected a multiple of {steps}"
        )
    return [list(records[at : at + size]) for at in range(0, len(records), size)]


def roles_of(step: Sequence[Record], launches: Sequence[tuple[str, Sequence[str]]]) -> list[str]:
    """Return the role of each record of a step.

    Args:
        launches: the role of each launch, and the kernels that it may run, in order. It runs at least one of them.

    Raises:
        ProfileError: the step has other kernels.
    """
    roles: list[str] = []
    for role, kernels in launches:
        place = len(roles)
        for kernel in kernels:
            if len(roles) < len(step) and step[len(roles)].name.startswith(kernel):
                roles.append(role)
        if len(roles) == place:
            name, expected = repr(step[place].name) if place < len(step) else "missing", " or ".join(kernels)
            raise ProfileError(f"activity {place + 1} of a step is {name}, expected {expected} for {role}")
    if len(roles) < len(step):
        raise ProfileError(f"the GPU recorded {len(step)} activities in a step, expected {len(roles)}")
    return roles


def attribute(step: Sequence[Record], ops: Sequence[str], before: float) -> list[Span]:
    """Return the spans of a step.

    With programmatic dependent launch, a kernel starts before its predecessor ends, so its duration includes a wait.
    The cost of a span therefore begins at the latest earlier end; the costs add up to the time of the step.
    """
    spans = []
    for record, op in zip(step, ops, strict=True):
        spans.append(Span(op, record.start, record.end, before))
        before = max(before, record.end)
    return spans


def chained(steps: Sequence[Sequence[Record]], ops: Sequence[str], drop: int) -> list[list[Span]]:
    """Return the spans of consecutive steps. A step begins at the end of its predecessor.

    drop: number of first steps to omit, at least one.
    """
    ends = [max(record.end for record in step) for step in steps]
    return [attribute(step, ops, before) for step, before in zip(steps[drop:], ends[drop - 1 :])]


def separate_spans(steps: Sequence[Sequence[Record]], drop: int) -> list[list[Span]]:
    """Return the spans of steps between which the host waits. The names of the records are used as roles."""
    return [attribute(step, [short_name(r.name) for r in step], step[0].start) for step in steps[drop:]]


def wall(step: Sequence[Span]) -> float:
    """Return the time of a step, from the end of its predecessor to its own end."""
    return sum(span.cost for span in step)


def typical(steps: Sequence[Sequence[Span]]) -> Sequence[Span]:
    """Return the step of median wall time. For an even number of steps, it is the shorter of the middle two."""
    return sorted(steps, key=wall)[(len(steps) - 1) // 2]


def summarize(steps: Sequence[Sequence[Span]]) -> dict:
    """Return the medians over steps of wall, compute and gap time, the roles, and the gaps by length."""
    gaps = Counter(next(name for name, limit in GAPS if span.gap < limit) for step in steps for span in step)
    walls, idle = [wall(step) for step in steps], [sum(span.gap for span in step) for step in steps]
    roles = [summarize_op(op, steps) for op in dict.fromkeys(span.op for span in steps[0])]
    total = sum(role["us_per_step"] for role in roles)
    for role in roles:
        role["share_pct"] = 100 * role["us_per_step"] / total if total else 0.0
    return {
        "steps": len(steps),
        "wall_us": median(walls),
        "compute_us": median(w - i for w, i in zip(walls, idle)),
        "gap_us": median(idle),
        "gap_pct": 100 * median(idle) / median(walls) if median(walls) else 0.0,
        "launches": len(steps[0]),
        "kernels": sorted(roles, key=lambda role: -role["us_per_step"]),
        "gaps": {name: gaps[name] for name, _ in GAPS},
    }


def summarize_op(op: str, steps: Sequence[Sequence[Span]]) -> dict:
    """Return the figures of a role. `mean_us` is the cost of a launch, and `recorded_us` its duration with waits."""
    op_spans = [[span for span in step if span.op == op] for step in steps]
    launches = len(op_spans[0])
    cost = median(sum(span.cost for span in spans) for spans in op_spans)
    recorded = median(mean(span.end - span.start for span in spans) for spans in op_spans)
    return {
        "op": op,
        "launches": launches,
        "us_per_step": cost,
        "mean_us": cost / launches,
        "recorded_us": recorded,
    }


def short_name(name: str) -> str:
    """Return the name of a library kernel without return type, template arguments, parameters and namespaces."""
    plain = re.sub(r"\(anonymous namespace\)::", "", name.removeprefix("void "))
    plain = re.split(r"[<(]", plain, maxsplit=1)[0].strip()
    return plain.rsplit("::", 1)[-1] or name
