"""`tridecode tune`: search launch configs for one model on this GPU. The time of a whole captured pass decides."""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import replace
from statistics import mean, median

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from triton.errors import TritonError

from ..checkpoint.hub import resolve_model
from ..checkpoint.load import load_config
from ..engine import Engine
from ..errors import DeviceError
from ..kernels.device import device_of
from ..layout import LIMIT_REACHED, STATUS
from ..models.presets import PRESETS
from ..step.compiling import compile_lists, workers
from ..step.dispatch import BatchDescriptor, Dispatcher
from ..step.graphs import DecodePasses, decode_list, launcher
from ..step.model import DecodeModel
from ..tuning.candidates import Part, candidates, parts_of
from ..tuning.configs import PassConfigs
from ..tuning.search import MARGIN, Search, config_of, search
from ..tuning.tables import entry_of, merged_text, table_path
from .bench.measure import GREEDY, bench_engine, model_facts, need_gpu, run_facts, time_decode
from .bench.passes import enqueue, rewind
from .chat import session
from .terminal import Output

CONTEXTS = (128, 4096)  # The time of a pass is the mean over these contexts.
CONTEXTS_OF_SEVERAL = (128, 1024)  # For a pass of several rows, the time is the mean over these contexts.
RUN_SECONDS, RUNS = 0.05, 5  # Seconds of a run, and number of runs. A timing is the median of the runs.
AT_ONCE = 2 * workers()  # Number of candidates that are compiled together before they are timed.
# Maximum relative RMS difference between the logits of two configs, which differ only by the order of sums.
TOLERANCE = 0.05
# The limit for quantized weights. With random weights, the order of sums alone has caused more than 0.05.
PACKED_TOLERANCE = 0.2


def run(args, output: Output) -> int:
    """Run `tune`: search, print a line for each launch config that changed, and print one JSON line."""
    need_gpu("tune")
    config = PRESETS[args.preset] if args.model is None else load_config(resolve_model(args.model))
    contexts = CONTEXTS if args.rows == 1 else CONTEXTS_OF_SEVERAL
    engine = bench_engine(args, min(contexts[-1] + 256, config.max_position), slots=args.rows)
    measure, model, device = StepTimer(engine, contexts), engine.model, device_of(engine.device)
    before, rows = model.configs, model.configs_for
    names = part_names(model.cases, before)
    tried = candidates(before, rows, device)
    deadline = time.monotonic() + 60 * args.minutes
    with progress(output, names) as report:
        result = search(before, tried, measure, deadline, report, measure.compile, AT_ONCE)
    # The search keeps the shortest of many noisy timings. Two further timings of both configs confirm the gain.
    before_us, after_us = (confirmed(measure, configs) * 1e6 for configs in (before, result.configs))
    path = table_path(device.name) if after_us < before_us * (1 - MARGIN) else None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        session.write(path, merged_text(path, device, rows, result.configs))
    changes = {name: (entry_of(config_of(before, part)), entry_of(config_of(result.configs, part)))
               for part, name in names.items()}  # fmt: skip
    show(result, changes, before_us, after_us, path, output)
    report = {
        "command": "tune",
        **model_facts(engine, args),
        "rows": args.rows,
        "contexts": measure.contexts,
        "us_before": round(before_us, 2),
        "us_after": round(after_us, 2),
        "tried": result.tried,
        "skipped": result.skipped,
        "finished": result.finished,
        "shapes": {role: pair[path is not None] for name, pair in changes.items() for role in name.split(", ")},
        "table": None if path is None else str(path),
        **run_facts(engine.device),
    }
    output.text(json.dumps(report) + "\n")
    return 0


def part_names(cases: dict, configs: PassConfigs) -> dict[Part, str]:
    """Return the name of each part that is searched, the largest first: the roles of a linear, or attention."""
    sizes = {part: f" {part.heads}/{part.kv_heads}x{part.head_dim}" for part in configs.attention}
    roles: dict[Part, str] = {part: "attention" + (size if len(sizes) > 1 else "") for part, size in sizes.items()}
    for role, case in cases.items():
        roles[case] = f"{roles[case]}, {role}" if case in roles else role
    return {part: roles[part] for part in parts_of(configs)}


def confirmed(measure: Callable[[PassConfigs], float | None], configs: PassConfigs) -> float:
    """Return the shorter of two timings in seconds. Raises DeviceError if a pass fails although it ran before."""
    first, second = measure(configs), measure(configs)
    if first is None or second is None:
        raise DeviceError("the pass gave different logits when it was timed again; no table was written")
    return min(first, second)


def show(result: Search, changes: dict, before_us: float, after_us: float, path, output: Output) -> None:
    """Print the changed launch configs, the time of a step before and after, and the path of the table."""
    if path is None:
        output.text(f"no launch configs are faster than the current ones, {before_us:,.1f} µs a step\n")
    else:
        width = max(10, *map(len, changes))
        for name, (old, new) in changes.items():
            if old != new:
                output.text(f"{name:<{width}} {words(old)}  ->  {words(new)}\n")
        output.text(f"{before_us:,.1f} -> {after_us:,.1f} µs a step; engines on this GPU use it from now on: {path}\n")
    if not result.finished:
        output.note("the time ended before every candidate was tried; raise --minutes")


def words(fields: dict[str, int]) -> str:
    """Return the fields of a launch config as text."""
    return ", ".join(f"{name} {value}" for name, value in fields.items())


class StepTimer:
    """Timer of a greedy pass with given launch configs. The result is the mean over `contexts` in seconds.

    The result is None if the configs do not compile, do not launch, or change the logits of the first call.
    """

    def __init__(self, engine: Engine, contexts: tuple[int, ...] = CONTEXTS):
        self.engine, self._rows = engine, engine.model.rows
        room = engine.capacity - 66  # Number of positions that a timing may need.
        self.contexts = [context for context in contexts if context <= room] or [max(room, 1)]
        self._logits: torch.Tensor | None = None
        packed = any(case.packed for case in engine.model.cases.values())
        self._tolerance = PACKED_TOLERANCE if packed else TOLERANCE
        self._steps = 16

    def __call__(self, configs: PassConfigs) -> float | None:
        """Return the seconds of a step with these configs, or None if they fail or change the logits."""
        engine = self.engine
        try:
            dispatcher, greedy = Dispatcher("full", (self._rows,)), BatchDescriptor("greedy", self._rows)
            engine.steps = DecodePasses(self._model(configs), dispatcher=dispatcher, batches=[greedy])
            if not self.same_logits():
                return None
            return mean(self._time(context) for context in self.contexts)
        except (TritonError, RuntimeError):
            # This call raises an error if the GPU itself has failed. Then the search cannot continue.
            torch.cuda.synchronize(engine.device)
            return None

    def _model(self, configs: PassConfigs) -> DecodeModel:
        return replace(self.engine.model, configs_by_rows={self._rows: configs})

    def compile(self, several: list[PassConfigs]) -> None:
        """Compile the kernels of passes with these configs in parallel.

        Errors are ignored here, because they occur again when a pass is timed.
        """
        model, greedy = self.engine.model, BatchDescriptor("greedy", self._rows)
        model.workspace.meta[:, STATUS] = LIMIT_REACHED  # Without active rows, launches write nothing.
        with suppress(TritonError, RuntimeError):
            compile_lists(
                [decode_list(self._model(configs), greedy) for configs in several], launcher(model), model.device
            )

    def same_logits(self) -> bool:
        """Return whether the logits of a pass agree with those of the first call.

        Timings change K/V and recurrent state, so both are filled with the same numbers before each comparison.
        """
        generator, model = torch.Generator(self.engine.device).manual_seed(0), self.engine.model
        model.kv.fill(generator)
        if model.recurrent is not None:
            model.recurrent.fill(generator)
        rewind(self.engine, self.contexts[-1], GREEDY, self._rows)
        enqueue(self.engine, GREEDY, self._rows)
        logits = model.workspace.logits.clone()
        if self._logits is None:
            self._logits = logits
        error = (logits - self._logits).square().mean().sqrt() / self._logits.square().mean().sqrt()
        return bool(error <= self._tolerance)  # The result is False for NaN.

    def _time(self, context: int) -> float:
        seconds = median(time_decode(self.engine, context, self._steps, RUNS, rows=self._rows))
        self._steps = max(min(int(RUN_SECONDS / seconds), 64), 8)
        return seconds


@contextmanager
def progress(output: Output, names: dict[Part, str]):
    """Show a progress bar on stderr if it is a terminal. Yield the function to which `search` reports."""
    columns = (
        TextColumn("tuning {task.fields[name]}"),
        BarColumn(),
        TextColumn("{task.fields[best]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=output.errors, transient=True, disable=not output.errors.is_terminal) as bar:
        task = bar.add_task("tuning", total=None, name="", best="")

        def report(result: Search, total: int, part: Part) -> None:
            best = f"{result.seconds * 1e6:,.1f} µs a step"
            bar.update(task, completed=result.tried % total, total=total, name=names[part], best=best)

        yield report
