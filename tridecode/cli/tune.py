"""`tridecode tune`: search launch shapes for one model on this GPU, judged by the time of the whole captured step."""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from statistics import mean, median

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from triton.errors import TritonError

from ..checkpoint.hub import resolve_model
from ..checkpoint.load import load_config
from ..engine import Engine
from ..errors import DeviceError
from ..layout import LIMIT_REACHED, STATUS
from ..models.presets import PRESETS
from ..step.compiling import compile_ahead, threads
from ..step.dispatch import BatchDescriptor, Dispatcher
from ..step.graphs import DecodePasses, launcher, list_of
from ..step.model import DecodeModel
from ..tuning.few_bits import packings
from ..tuning.shapes import StepShapes
from ..tuning.tuned import merged_table, searched, table_keys, table_path
from .bench.measure import GREEDY, bench_engine, model_facts, run_facts, time_decode
from .candidates import ORDER, candidates, candidates_of_several, packed_candidates
from .chat import session
from .terminal import Output

CONTEXTS = (128, 4096)  # the step is as fast as its mean over these
CONTEXTS_OF_SEVERAL = (128, 1024)  # rows
RUN_SECONDS, RUNS = 0.05, 5  # of a timing
AT_ONCE = 2 * threads()  # candidates that are compiled before they are timed
MARGIN = 0.001  # a candidate must be faster by this part of the step; below that timings do not agree
TOLERANCE = 0.05  # relative RMS between the logits of two shapes; only the order of sums differs
FEW_BITS_TOLERANCE = 0.2  # of random weights in fewer bits, of which that alone has made more than 0.05


@dataclass
class Search:
    """What a search has found so far. Times in seconds a step; tried: candidates, skipped: those that did not run."""

    shapes: StepShapes
    seconds: float
    tried: int = 0
    skipped: int = 0
    finished: bool = False


def run(args, output: Output) -> int:
    """Entry of `tune`: a line for each shape that changed, and one JSON line."""
    config = PRESETS[args.preset] if args.model is None else load_config(resolve_model(args.model))
    if not torch.cuda.is_available():
        raise DeviceError("tune needs an NVIDIA GPU and none is usable here")
    contexts = CONTEXTS if args.rows == 1 else CONTEXTS_OF_SEVERAL
    engine = bench_engine(args, min(contexts[-1] + 256, config.max_position), slots=args.rows)
    measure, before = StepTimer(engine, contexts), engine.model.shapes
    gpu, weights = torch.cuda.get_device_properties(engine.device), engine.model.weights
    packed = packings(weights, 10 * gpu.major + gpu.minor)
    tried = packed_candidates(weights, packed, engine.model.shapes_for, gpu)
    if args.rows == 1:
        choices = candidates(config, weights.dtype.itemsize, before, gpu.multi_processor_count, tried)
    else:
        choices = candidates_of_several(config, args.rows, before, gpu, tried)
    with progress(output) as report:
        found = search(before, choices, measure, time.monotonic() + 60 * args.minutes, report, measure.compile)
    # The search takes the luckiest of many timings; two more of both say what is true.
    before_us, after_us = (confirmed(measure, shapes) * 1e6 for shapes in (before, found.shapes))
    name = torch.cuda.get_device_name(engine.device)
    better = after_us < before_us * (1 - MARGIN)
    path = table_path(name) if better else None
    keys = table_keys(engine.config, weights.dtype, engine.model.shapes_for, packed)
    if better:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {key: searched(getattr(found.shapes, op)) for op, key in keys.items()}
        session.write(path, merged_table(path, name, entries))
    show(found, before, before_us, after_us, path, output)
    report = {
        "command": "tune",
        **model_facts(engine, args),
        "rows": args.rows,
        "contexts": measure.contexts,
        "us_before": round(before_us, 2),
        "us_after": round(after_us, 2),
        "tried": found.tried,
        "skipped": found.skipped,
        "finished": found.finished,
        "shapes": {op: searched(getattr(found.shapes if better else before, op)) for op in ORDER},
        "table": None if path is None else str(path),
        **run_facts(engine.device),
    }
    output.text(json.dumps(report) + "\n")
    return 0


def confirmed(measure: Callable[[StepShapes], float | None], shapes: StepShapes) -> float:
    """The shorter of two timings. Raises DeviceError where a step that ran before does not run any more."""
    times = [measure(shapes) for _ in range(2)]
    if None in times:
        raise DeviceError("the step gave other results when it was timed again; no table was written")
    return min(times)


def show(found: Search, before: StepShapes, before_us: float, after_us: float, path, output: Output) -> None:
    if path is None:
        output.text(f"nothing faster than the present shapes, {before_us:,.1f} µs a step\n")
    else:
        for op in ORDER:
            old, new = searched(getattr(before, op)), searched(getattr(found.shapes, op))
            if old != new:
                output.text(f"{op:<10} {words(old)}  ->  {words(new)}\n")
        output.text(f"{before_us:,.1f} -> {after_us:,.1f} µs a step; engines on this GPU use it from now on: {path}\n")
    if not found.finished:
        output.note("the time was up before every candidate was tried; --minutes gives more")


def words(fields: dict[str, int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def search(
    start: StepShapes,
    choices: list[tuple[str, list[dict]]],
    measure: Callable[[StepShapes], float | None],
    deadline: float,
    report: Callable[[Search, int, str], None] = lambda found, total, op: None,
    prepare: Callable[[list[StepShapes]], None] = lambda several: None,
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Greedy coordinate search: for one part of the step after the other the best of its choices, all else as it is,
    until a round changes nothing or `deadline` of `clock` has passed.

    choices: (field of StepShapes, fields of its shape to try, or whole shapes). measure: seconds a step, None where
    they do not run. report(found, candidates of a round, part) is called before each measurement, prepare before those
    of so many of a part.
    """
    first = measure(start)
    if first is None:
        raise DeviceError("the step does not run with the shapes that it has now")
    found = Search(start, first)
    known, total = {start}, sum(len(tried) for _, tried in choices)
    at_start = None
    while at_start != found.shapes:
        at_start = found.shapes
        for op, tried in choices:
            base = found.shapes
            shapes = [replace(getattr(base, op), **v) if isinstance(v, dict) else v for v in tried]
            new = dict.fromkeys(replace(base, **{op: shape}) for shape in shapes)
            new = [candidate for candidate in new if candidate not in known]
            known.update(new)
            for i, candidate in enumerate(new):
                if clock() >= deadline:
                    return found
                report(found, total, op)
                if i % AT_ONCE == 0:
                    prepare(new[i : i + AT_ONCE])
                seconds = measure(candidate)
                found.tried += 1
                if seconds is None:
                    found.skipped += 1
                elif seconds < found.seconds * (1 - MARGIN):
                    found.seconds, found.shapes = seconds, candidate
    found.finished = True
    return found


class StepTimer:
    """Seconds a greedy step takes with given shapes, the mean over `contexts`; None where they do not compile, do not
    launch or compute something else than the first shapes did."""

    def __init__(self, engine: Engine, contexts: tuple[int, ...] = CONTEXTS):
        self.engine, self._rows = engine, engine.model.rows
        room = engine.capacity - 66  # positions that a timing may need
        self.contexts = [min(context, room) for context in contexts if context <= room] or [max(room, 1)]
        self._logits = None
        self._tolerance = FEW_BITS_TOLERANCE if engine.config.few_bits else TOLERANCE
        self._steps = 16

    def __call__(self, shapes: StepShapes) -> float | None:
        engine = self.engine
        try:
            dispatcher = Dispatcher("full", (self._rows,))
            engine.steps = DecodePasses(self._model(shapes), dispatcher=dispatcher, kinds=("greedy",))
            if not self._same():
                return None
            return mean(self._time(context) for context in self.contexts)
        except (TritonError, RuntimeError):
            torch.cuda.synchronize(engine.device)  # raises if the GPU itself has failed: nothing can follow that
            return None

    def _model(self, shapes: StepShapes) -> DecodeModel:
        return replace(self.engine.model, shapes_by_rows={self._rows: shapes})

    def compile(self, several: list[StepShapes]) -> None:
        """What steps with these shapes launch, many kernels at a time. What fails here will when it is timed."""
        model, greedy = self.engine.model, BatchDescriptor("greedy", self._rows)
        model.workspace.meta[:, STATUS] = LIMIT_REACHED  # no row may run
        with suppress(TritonError, RuntimeError):
            compile_ahead([list_of(self._model(shapes), greedy) for shapes in several], launcher(model), model.device)

    def _same(self) -> bool:
        """Whether the logits are those of the first shapes, over the same K/V: timings leave theirs in the cache."""
        generator = torch.Generator(self.engine.device).manual_seed(0)
        self.engine.model.kv.fill(generator)
        self.engine.rewind(self.contexts[-1], GREEDY, self._rows)
        self.engine.enqueue(GREEDY, self._rows)
        logits = self.engine.model.workspace.logits.clone()
        if self._logits is None:
            self._logits = logits
        error = (logits - self._logits).square().mean().sqrt() / self._logits.square().mean().sqrt()
        return bool(error <= self._tolerance)  # False for NaN

    def _time(self, context: int) -> float:
        seconds = median(time_decode(self.engine, context, self._steps, RUNS, rows=self._rows))
        self._steps = max(min(int(RUN_SECONDS / seconds), 64), 8)
        return seconds


@contextmanager
def progress(output: Output):
    """A bar on stderr, on a terminal; yields the function that `search` reports to."""
    columns = (
        TextColumn("tuning {task.fields[op]}"),
        BarColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=output.errors, transient=True, disable=not output.errors.is_terminal) as bar:
        task = bar.add_task("tuning", total=None, op="", best="")

        def report(found: Search, total: int, op: str) -> None:
            best = f"{found.seconds * 1e6:,.1f} µs a step"
            bar.update(task, completed=found.tried % total, total=total, op=op, best=best)

        yield report
