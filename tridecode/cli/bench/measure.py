"""Shared parts of all benches: engines with random weights, timers, and measured limits of the hardware."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np
import torch
import triton

from ...checkpoint.load import random_weights
from ...engine import Engine
from ...errors import DeviceError, GenerationError, ParameterError
from ...layout import RUN, STATUS
from ...models.presets import PRESETS
from ...options import EngineOptions
from ...plan.memory import free_memory
from ...plan.resolve import resolve
from ...sampling import SamplingParams
from ...state.kv import kv_bytes_per_token
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses, make_passes
from ...step.prompt_graphs import PromptPasses, make_prompts
from ...tuning.configs import PassConfigs
from ...version import __version__
from ..options import engine_options
from .passes import enqueue, rewind
from .read import measure_read_bandwidth
from .rows import Row

ALL_FILTERS = SamplingParams(
    temperature=0.8,
    top_k=200,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias={7: 1.0},
    seed=1,
)
GREEDY = SamplingParams(temperature=0.0, seed=1)
SAMPLING = {"greedy": GREEDY, "temperature": SamplingParams(temperature=0.8, seed=1), "all": ALL_FILTERS}
WARM_UP = 2  # Number of runs before the measurement.
R = TypeVar("R", bound=Row)


def need_gpu() -> None:
    """Raise DeviceError if torch cannot use a GPU."""
    if not torch.cuda.is_available():
        raise DeviceError("bench needs an NVIDIA GPU; no usable GPU was found")


def preset_engine(
    preset: str,
    capacity: int,
    configs: Mapping[int, PassConfigs] | None = None,
    **options,
) -> Engine:
    """Build an engine with the shape of a public model, random weights, and a cache of random K/V.

    Raises ParameterError for an unknown preset, DeviceError without a GPU or with too little memory.
    """
    if preset not in PRESETS:
        raise ParameterError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    need_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    options = {"speculate": "off", "dtype": "bfloat16"} | options
    plan = resolve(EngineOptions(max_seq_len=capacity, **options), PRESETS[preset], device)
    plan.check()
    weights = random_weights(plan.spec, device, plan.dtype)
    engine = Engine.build(plan, weights, name=preset, configs=configs)
    fill_cache(engine)
    return engine


def bench_engine(args, capacity: int, slots: int = 1, kv_tokens: int | None = None, **more) -> Engine:
    """Load --model, or build --preset, in bf16, for `slots` requests of at most `capacity` K/V positions.

    more: further options of the engine. Drafts are disabled unless `args` or `more` enable them.
    """
    # A bench lists several modes in --graph, so this option is not an option of one engine.
    chosen = {name: value for name, value in engine_options(args).items() if name != "graph"}
    options = {"speculate": "off"} | chosen | more | {"slots": slots, "kv_tokens": kv_tokens}
    if args.model is None:
        return preset_engine(args.preset, capacity, **options)
    need_gpu()
    engine = Engine.load(args.model, device="cuda", dtype="bfloat16", max_seq_len=capacity, **options)
    fill_cache(engine)
    return engine


def fill_cache(engine: Engine) -> None:
    """Fill the K/V cache with random values, so that a pass can start at any position."""
    engine.model.kv.fill()


@dataclass(frozen=True)
class Runners:
    """The decode and prompt passes of an engine in one graph mode, with every size captured."""

    steps: DecodePasses
    prompts: PromptPasses

    def reads(self) -> dict[tuple, int]:
        """Return the number of prompt passes so far, by kind, rows, padded rows and mode."""
        stats = self.steps.dispatcher.stats()
        return {(s.kind, s.rows, s.padded, s.mode): s.count for s in stats if s.kind in ("prompt", "mixed")}


def make_runners(engine: Engine, modes: Sequence[str]) -> dict[str, Runners]:
    """Return the runners of each graph mode. All use the engine's weights, cache and buffers."""
    runners, graphs = {}, engine.graphs
    for mode in modes:
        steps, prompts = engine.steps, engine.prompts
        if mode != engine.graph:
            dispatcher = Dispatcher(mode, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention)
            steps = make_passes(engine.model, engine.backend, dispatcher, graphs.attention)
            prompts = make_prompts(engine.model, steps, engine.backend, graphs.prompt_attention)
        while prompts.capture_next():
            pass
        runners[mode] = Runners(steps, prompts)
    return runners


@contextmanager
def running(engine: Engine, runners: Runners):
    """Replace the engine's runners within a `with` block."""
    own = engine.steps, engine.prompts
    engine.steps, engine.prompts = runners.steps, runners.prompts
    try:
        yield engine
    finally:
        engine.steps, engine.prompts = own


def read_modes(before: dict[tuple, int], after: dict[tuple, int]) -> str:
    """Return the graph modes of the prompt passes that ran between two results of `reads`, such as "full"."""
    return ", ".join(sorted({key[-1] for key, count in after.items() if count > before.get(key, 0)}))


def time_decode(
    engine: Engine,
    context: int | Sequence[int],
    steps: int,
    runs: int,
    params: SamplingParams = GREEDY,
    rows: int = 1,
    before: Callable[[], None] | None = None,
) -> list[float]:
    """Return the seconds per decode pass of each run.

    Args:
        engine: the engine to time
        context: tokens before the first pass: one number for all rows, or one for each row
        steps: passes in a run
        runs: number of timed runs
        params: sampling parameters
        rows: number of requests
        before: called before each run, after the state was reset and outside the timed region
    """
    times = []
    for run in range(runs + WARM_UP):
        rewind(engine, context, params, rows)
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(steps):
            enqueue(engine, params, rows)
        end.record()
        end.synchronize()
        if run >= WARM_UP:
            times.append(start.elapsed_time(end) / 1e3 / steps)
    return times


def check_running(engine: Engine, name: str, rows: int = 1) -> None:
    """Raise GenerationError if a row has ended, because its passes then return early and their times mean nothing."""
    for status in engine.model.workspace.meta[:rows, STATUS].tolist():
        if status != RUN:
            raise GenerationError(f"{name}: the steps ended early (status {status}); no time was measured")


def step_bytes(engine: Engine, context: int | Sequence[int], steps: int) -> int:
    """Return the bytes that a decode pass must move: the weights, the K/V of the requests, and their state in and out.

    The embedding counts only if it is also the LM head, because a pass reads one row of it per token.

    Args:
        engine: the engine whose passes are counted
        context: tokens before the first pass, of one request or of each request
        steps: number of passes; K/V is counted at their mean position, in all layers
    """
    weights = engine.model.weights
    embed = 0 if weights.tied else weights.embed.numel() * weights.dtype.itemsize
    contexts = [context] if isinstance(context, int) else context
    positions = sum(contexts) + len(contexts) * (steps - 1) / 2
    recurrent = engine.model.recurrent
    state = sum(layer.state[0].nbytes for layer in recurrent.layers) if recurrent else 0
    kv = positions * kv_bytes_per_token(engine.config, weights.dtype)
    return int(weights.nbytes() - embed + kv + 2 * len(contexts) * state)


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which a kernel that only reads runs over at most 8.6 GB."""
    return measure_read_bandwidth(device, min(2**33, free_memory(device) // 2))


def matmul_rate(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """Return FLOP per second of torch's bf16 matmul of two [size, size] matrices, the median of `repeats`."""
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    times = [gpu_seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats + WARM_UP)][WARM_UP:]
    return 2 * size**3 / float(np.median(times))


def gpu_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that the GPU takes for the work that `work()` enqueues, measured by CUDA events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def median_p5_p95(values: list[float], scale: float = 1.0) -> tuple[float, float, float]:
    """Return the median, 5th and 95th percentile of `values`, each multiplied by `scale`."""
    p5, median, p95 = (float(value) * scale for value in np.percentile(values, (5, 50, 95)))
    return median, p5, p95


def step_figures(name: str, times: list[float], nbytes: int, bandwidth: float, rows: int = 1) -> dict[str, Any]:
    """Return the figures of decode passes.

    Args:
        name: name of the median, which is in µs
        times: seconds per pass
        nbytes: bytes that a pass must read
        bandwidth: measured bytes per second
        rows: number of requests
    """
    median, p5, p95 = median_p5_p95(times, 1e6)
    return {
        name: median,
        "us_p5": p5,
        "us_p95": p95,
        "tokens_per_second": 1e6 * rows / median,
        "bytes_per_step": nbytes,
        "read_bandwidth_gbs": bandwidth / 1e9,
        "pct_bandwidth": 100 * nbytes / (median / 1e6) / bandwidth,
    }


def make_row(kind: type[R], engine: Engine, args, **figures) -> R:
    """Build a row from figures, the engine's model and GPU, and the options in `args` that are fields of the row."""
    names = {each.name for each in fields(kind)} - {each.name for each in fields(Row)}
    options = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return kind(**options | model_facts(engine, args) | run_facts(engine.device) | figures)


def model_facts(engine: Engine, args) -> dict:
    """Return the preset or model of a measurement, and its number formats."""
    facts = {"preset": args.preset} if args.model is None else {"model": engine.name}
    if quantization := engine.config.quantization:
        facts |= {"quantize": quantization.name, "head": engine.model.weights.lm_head.number_type}
    return facts | ({"kv_dtype": "fp8"} if engine.config.fp8_kv else {})


def run_facts(device: torch.device) -> dict:
    """Return the GPU and the versions of a measurement."""
    return {
        "dtype": "bfloat16",
        "gpu": torch.cuda.get_device_name(device),
        "tridecode": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
