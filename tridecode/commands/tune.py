"""`tridecode tune`: search launch shapes for one model on this GPU, judged by the time of the whole captured step."""

import json
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from statistics import mean, median

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from triton.errors import TritonError

from ..engine import Engine
from ..errors import DeviceError, ParameterError
from ..model.checkpoint import load_config
from ..model.config import ModelConfig
from ..model.hub import resolve_model
from ..model.presets import PRESETS
from ..step.graphs import StepGraphs
from ..step.shapes import (
    AttentionRowsShape,
    AttentionShape,
    HopperShape,
    MatmulShape,
    MatvecShape,
    StepShapes,
    TilesShape,
    WideShape,
)
from ..step.tuned import VALUES, merged_table, searched, table_keys, table_path
from .bench.measure import GREEDY, bench_engine, model_facts, run_facts, time_decode
from .chat import session
from .terminal import Output

# The largest parts of the step first: the time may not be enough for all.
ORDER = ("gate_up", "down", "qkv", "o_proj", "attention", "lm_head")
# Fields tried with each other.
GROUPS = (("block_n", "num_warps"), ("programs",), ("block_t", "num_warps"), ("ahead",), ("splits",), ("registers",))
SHARES = (1, 2, 3, 4, 6, 8)  # programs of a multiprocessor that share the rows of a matrix, beside one a few rows
CONTEXTS = (128, 4096)  # the step is as fast as its mean over these
CONTEXTS_OF_SEVERAL = (128, 1024)  # rows
RUN_SECONDS, RUNS = 0.05, 5  # of a timing
MARGIN = 0.001  # a candidate must be faster by this part of the step; below that timings do not agree
TOLERANCE = 0.05  # relative RMS between the logits of two shapes; only the order of sums differs
# Registers of a thread: for weights at least (with more than one warp) and at most, and for all else. A thread with few
# weights has few bytes in flight; one with many makes room for few programs.
FEWEST, MOST, OTHERS = 16, 128, 40
BOUNDS = (0, 40, 56, 64, 80, 96, 128)  # tried where a shape bounds its registers; 0 is no bound
# Of products of several rows: tiles in flight of weights and activations, and stages of tiles in shared memory.
IN_FLIGHT = ((4, 4), (8, 4), (8, 8), (12, 4), (12, 8), (16, 4), (5, 4))
# Columns of a wide tile, tiles in flight of weights and activations.
MOST_TILES = 40  # of a program, which are unrolled: beyond, compiling takes a minute
WIDE = ((128, 2, 1), (128, 2, 2), (128, 3, 1), (128, 3, 2), (128, 4, 3), (64, 3, 1), (64, 4, 2), (64, 6, 3))
STAGES = (2, 3, 4, 6, 8)
# Of the kernel for Hopper: rows and columns of a tile, tiles in flight of weights and activations.
HOPPER = ((64, 128, 4, 4), (64, 128, 4, 2), (64, 64, 8, 4), (128, 64, 4, 4), (128, 64, 5, 3))
HOPPER_ALONE = ((128, 128, 5, 5), (128, 64, 8, 6))  # on a multiprocessor, program after program


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
    if config.few_bits:
        raise ParameterError("model: tune searches launch shapes of bf16 weights; these have fewer bits")
    if not torch.cuda.is_available():
        raise DeviceError("tune needs an NVIDIA GPU and none is usable here")
    contexts = CONTEXTS if args.rows == 1 else CONTEXTS_OF_SEVERAL
    engine = bench_engine(args, min(contexts[-1] + 256, config.max_position), slots=args.rows)
    measure, before = StepTimer(engine, contexts), engine.model.shapes
    properties, itemsize = torch.cuda.get_device_properties(engine.device), engine.model.weights.dtype.itemsize
    if args.rows == 1:
        choices = candidates(config, itemsize, before, properties.multi_processor_count)
    else:
        choices = candidates_of_several(config, args.rows, before, properties)
    with progress(output) as report:
        found = search(before, choices, measure, time.monotonic() + 60 * args.minutes, report)
    # The search takes the luckiest of many timings; two more of both say what is true.
    before_us, after_us = (confirmed(measure, shapes) * 1e6 for shapes in (before, found.shapes))
    gpu = torch.cuda.get_device_name(engine.device)
    better = after_us < before_us * (1 - MARGIN)
    path = table_path(gpu) if better else None
    keys = table_keys(engine.config, engine.model.weights.dtype, engine.model.shapes_for)
    if better:
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {key: searched(getattr(found.shapes, op)) for op, key in keys.items()}
        session.write(path, merged_table(path, gpu, entries))
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
    clock: Callable[[], float] = time.monotonic,
) -> Search:
    """Greedy coordinate search: for one part of the step after the other the best of its choices, all else as it is,
    until a round changes nothing or `deadline` of `clock` has passed.

    choices: (field of StepShapes, fields of its shape to try, or whole shapes). measure: seconds a step, None where
    they do not run. report(found, candidates of a round, part) is called before each measurement.
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
            for values in tried:
                shape = replace(getattr(base, op), **values) if isinstance(values, dict) else values
                candidate = replace(base, **{op: shape})
                if candidate in known:
                    continue
                if clock() >= deadline:
                    return found
                known.add(candidate)
                report(found, total, op)
                seconds = measure(candidate)
                found.tried += 1
                if seconds is None:
                    found.skipped += 1
                elif seconds < found.seconds * (1 - MARGIN):
                    found.seconds, found.shapes = seconds, candidate
    found.finished = True
    return found


def candidates(
    config: ModelConfig, itemsize: int, shapes: StepShapes, multiprocessors: int
) -> list[tuple[str, list[dict]]]:
    """What to try for each part of the step, but for tiles of weights that cannot be the best."""
    columns = {"o_proj": config.q_size, "down": config.intermediate_size}
    found = []
    for op in ORDER:
        values_of = VALUES[type(getattr(shapes, op))]
        names = set(values_of)
        row = itemsize * columns.get(op, config.hidden_size) * (2 if op == "gate_up" else 1)
        for group in GROUPS:
            if group == ("programs",) and "programs" in names:
                shared = [multiprocessors * share for share in SHARES]
                found.append((op, [{"programs": programs, "registers": 0} for programs in (0, *shared)]))
            elif set(group) <= names:
                values = product(*(BOUNDS if name == "registers" else values_of[name] for name in group))
                tried = [dict(zip(group, combination)) for combination in values]
                if "block_n" in group:
                    shared = getattr(getattr(shapes, op), "programs", 0) > 0
                    tried = with_registers(tried, row, "registers" in names, shared)
                elif "block_t" in group and "registers" in names:
                    tried = [tile | {"registers": 0} for tile in tried]
                found.append((op, tried))
    return found


def candidates_of_several(config: ModelConfig, rows: int, shapes: StepShapes, gpu) -> list[tuple[str, list]]:
    """What to try for each part of a step of `rows` rows: what registers, or the GPU's shared memory, hold."""
    high = max(1 << (rows - 1).bit_length(), 8)  # rows of a tile
    columns = {"o_proj": config.q_size, "down": config.intermediate_size}
    found = []
    for op in ORDER:
        if isinstance(shapes.attention, AttentionShape) and op == "attention":
            tiles = product((32, 64, 128), (4, 8))
            found.append((op, [{"block_t": t, "num_warps": warps, "registers": 0} for t, warps in tiles]))
            found.append((op, [{"ahead": ahead} for ahead in VALUES[AttentionShape]["ahead"]]))
            found.append((op, [{"few": few} for few in (1, 2, 3, 4, 6, 8, 12, 16)]))
            found.append((op, [{"turns": turns} for turns in (8, 16, 32, 64)]))
        elif op == "attention":
            programs = [gpu.multi_processor_count * share for share in (1, 2, 3, 4)]
            tiles = product(VALUES[AttentionRowsShape]["block_t"], VALUES[AttentionRowsShape]["num_warps"])
            found.append((op, [{"block_t": t, "num_warps": warps, "registers": 0} for t, warps in tiles]))
            found.append((op, [{"stages": stages} for stages in VALUES[AttentionRowsShape]["stages"]]))
            found.append((op, [{"programs": count} for count in programs]))
            found.append((op, [{"least": least} for least in (1, 2, 4, 8, 16)]))
        elif isinstance(getattr(shapes, op), MatvecShape):
            continue  # of a dtype whose weights are read once a row: as for one
        else:
            whole = columns.get(op, config.hidden_size)
            wide = wide_of(high, whole, op != "lm_head")
            hopper = hopper_of(high, whole, op, gpu) if gpu.major == 9 and high > 16 else []
            tiles = tiles_of(high, whole, op == "gate_up", gpu)
            found.append((op, [*hopper, *matmuls(high, whole, gpu), *tiles, *wide]))
    return found


def matmuls(high: int, K: int, gpu) -> list[MatmulShape]:
    """Shapes for K columns whose tiles and sums fit in 200 registers, and the sums of all warps in 48 KiB; and of those
    that keep all activations in registers, the ones whose programs share the rows of the weights."""
    found = []
    for block_n, warps, (ahead, x_ahead) in product((16, 32), (2, 4, 8), (*IN_FLIGHT, (6, 32), (10, 32))):
        tiles = -(-K // (32 * warps))
        registers = block_n * min(ahead, tiles) // 2 + high * min(x_ahead, tiles) // 2 + block_n * high // 32
        if registers <= 200 and 4 * warps * block_n * high <= 48 * 1024 and tiles >= 4:
            kept = x_ahead >= tiles
            shares = [gpu.multi_processor_count * share for share in (1, 2, 3)] if kept else [0]
            found += [MatmulShape(block_n, warps, ahead, x_ahead, programs=programs) for programs in shares]
    return found


def tiles_of(high: int, K: int, gated: bool, gpu) -> list[TilesShape]:
    found = []
    for block_n, block_k, stages in product((16, 32, 64), (64, 128, 256), STAGES):
        for block_m in sorted({max(high, 16), 64}):
            size = 2 * stages * block_k * (block_m + block_n * (2 if gated else 1))
            if size <= gpu.shared_memory_per_block_optin - 1024 and stages * block_k <= K:
                found.append(TilesShape(block_n, block_k, stages, block_m=block_m))
    return found


def wide_of(high: int, K: int, shared: bool) -> list[WideShape]:
    """Shapes whose tiles and sums fit in 240 registers, bounded where that leaves room for one more program; `shared`
    where programs may share the columns."""
    found = []
    for warps, (block_k, ahead, x_ahead), split in product((4, 8), WIDE, (1, 2, 3, 4, 6, 8) if shared else (1,)):
        of_x = high * block_k // (64 * warps)
        registers = ahead * block_k // 4 + (x_ahead + 1) * of_x + high // 2 + 32
        bound = next((most for most in ((128, 168) if warps == 4 else (128,)) if registers <= most), 0)
        if registers <= 240 and ahead * block_k * split <= K <= MOST_TILES * block_k * split:
            found.append(WideShape(16 * warps, block_k, ahead, x_ahead, warps, split, bound))
    return found


def hopper_of(high: int, K: int, op: str, gpu) -> list[HopperShape]:
    """Shapes of which two programs fit a multiprocessor, that share the columns where there are few outputs; and of one
    each, for what has more rows than all of them take at a time."""
    memory, found = gpu.shared_memory_per_block_optin, []
    ways = [(split, 0) for split in (1, 2, 3, 4)] if op in ("qkv", "o_proj", "down") else [(1, 0), (1, 1)]
    for tile, (split, lag) in product(HOPPER, ways):
        block_n, block_k, stages, _ = tile
        if 2 * (hopper_bytes(*tile, high) + 2048) <= memory and stages * block_k * split <= K:
            found.append(HopperShape(*tile, split, num_warps=8 if high > 32 else 4, lag=lag))
            warps = 8 if block_n * high > 64 * 64 else 4
            found.append(HopperShape(*tile, split, num_warps=warps, lag=lag, copier=1, registers=80))
    for tile in HOPPER_ALONE if op == "lm_head" else ():
        if hopper_bytes(*tile, high) + 2048 <= memory:
            warps, programs = 8 if high > 32 else 4, gpu.multi_processor_count
            found.append(HopperShape(*tile, num_warps=warps, programs=programs, copier=1, registers=88))
    return found


def hopper_bytes(block_n: int, block_k: int, stages: int, x_stages: int, high: int) -> int:
    """Of shared memory for tiles."""
    return 2 * block_k * (stages * block_n + x_stages * high)


def with_registers(tiles: list[dict], row: int, bounded: bool, shared: bool = False) -> list[dict]:
    """The tiles of rows of `row` bytes that a program can hold and is kept busy by; with the registers that it needs
    for them where a shape bounds these. Programs that share the rows hold the next ones too: no bound for them."""
    found = []
    for tile in tiles:
        weights = -(-tile["block_n"] * row // (128 * tile["num_warps"]))
        if weights <= MOST and (weights >= FEWEST or tile["num_warps"] == 1):
            registers = 0 if shared else -(-weights // 8) * 8 + OTHERS
            found.append(tile | ({"registers": registers} if bounded else {}))
    return found


class StepTimer:
    """Seconds a greedy step takes with given shapes, the mean over `contexts`; None where they do not compile, do not
    launch or compute something else than the first shapes did."""

    def __init__(self, engine: Engine, contexts: tuple[int, ...] = CONTEXTS):
        self.engine, self._rows = engine, engine.model.rows
        room = engine.capacity - 66  # positions that a timing may need
        self.contexts = [min(context, room) for context in contexts if context <= room] or [max(room, 1)]
        self._logits = None
        self._steps = 16

    def __call__(self, shapes: StepShapes) -> float | None:
        engine = self.engine
        try:
            engine.steps = StepGraphs(replace(engine.model, shapes_by_rows={self._rows: shapes}), kinds=("greedy",))
            if not self._same():
                return None
            return mean(self._time(context) for context in self.contexts)
        except (TritonError, RuntimeError):
            torch.cuda.synchronize(engine.device)  # raises if the GPU itself has failed: nothing can follow that
            return None

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
        return bool(error <= TOLERANCE)  # False for NaN

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
