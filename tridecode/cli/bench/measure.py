"""Shared parts of all benches: engines with random weights, times of passes, measured limits, and rows of figures."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import torch
import triton

from ...blocks.weights import bytes_read
from ...checkpoint.gguf.schemes import with_file_type
from ...checkpoint.load import random_weights
from ...engine import Engine
from ...errors import DeviceError, GenerationError, ParameterError
from ...kernels.linear.adapters import RANK_STEP
from ...layout import RUN, STATUS
from ...models.presets import PRESETS
from ...options import DEFAULT_RANK, EngineOptions
from ...plan.memory import GIB, free_memory
from ...plan.resolve import EnginePlan, resolve
from ...sampling import SamplingParams
from ...state.adapters import adapter_bytes
from ...state.kv import PAGE, kv_bytes_per_token
from ...state.offload import Offload
from ...step.dispatch import Dispatcher
from ...step.graphs import DecodePasses, make_passes
from ...step.prompt_graphs import PromptPasses, make_prompts
from ...tensors import aligned
from ...tuning.configs import PassConfigs
from ...version import __version__
from ..options import engine_options
from .passes import enqueue, rewind
from .read import measure_read_bandwidth
from .rows import Row
from .timing import time_runs

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
R = TypeVar("R", bound=Row)


# ---- engines


def need_gpu(command: str = "bench") -> torch.device:
    """Return the current GPU. Raises DeviceError if torch cannot use one."""
    if not torch.cuda.is_available():
        raise DeviceError(f"{command} needs an NVIDIA GPU; no usable GPU was found")
    return torch.device("cuda", torch.cuda.current_device())


def preset_engine(
    preset: str,
    capacity: int,
    configs: Mapping[int, PassConfigs] | None = None,
    pages: int | None = None,
    offload: Offload | None = None,
    gguf: str | None = None,
    adapters: int = 0,
    rank: int = DEFAULT_RANK,
    **options,
) -> Engine:
    """Build an engine with the shape of a public model, random weights, and a cache of random K/V.

    Args:
        preset: name of the shape
        capacity: K/V positions of a request
        configs: launch configs by number of rows
        pages: pages on the device, by default as the options require
        offload: pages in host memory
        gguf: type of the GGUF file whose types of tensors the weights have, by default none
        adapters: number of random adapters on the device
        rank: their rank
        options: further options of the engine; by default it is in bf16 and drafts are disabled

    Raises:
        ParameterError: the preset does not exist
        DeviceError: there is no GPU, or its memory is too small
    """
    if preset not in PRESETS:
        raise ParameterError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    device = need_gpu()
    plan = preset_plan(preset, device, gguf, adapters, rank, max_seq_len=capacity, **options)
    plan.check()
    weights = random_weights(plan.spec, device, plan.dtype, on_host=plan.host_layers)
    if pages is not None:
        plan = replace(plan, pages=pages, offload=offload)
    engine = Engine.build(plan, weights, name=preset, configs=configs)
    engine.model.kv.fill()
    if engine.model.pool is not None:
        engine.model.pool.fill(rank)
    return engine


def preset_plan(
    preset: str, device: torch.device, gguf: str | None = None, adapters: int = 0, rank: int = DEFAULT_RANK, **options
) -> EnginePlan:
    """Return the plan of an engine of `preset_engine`."""
    options = {"speculate": "off", "dtype": "bfloat16"} | options
    spec = PRESETS[preset] if gguf is None else with_file_type(PRESETS[preset], gguf)
    plan = resolve(EngineOptions(**options), spec, device)
    if not adapters:
        return plan
    each = adapter_bytes(plan.spec, plan.dtype, aligned(rank, RANK_STEP))
    pool = {"adapter_memory": (adapters + 0.5) * each / GIB, "max_rank": rank}
    return resolve(EngineOptions(**options | pool), spec, device)


def bench_engine(args, capacity: int, slots: int = 1, kv_tokens: int | None = None, **more) -> Engine:
    """Load --model, or build --preset, in bf16, for `slots` requests of at most `capacity` K/V positions.

    more: further options of the engine. Drafts are disabled unless `args` or `more` enable them.
    """
    # A bench lists several modes in --graph, so this option is not an option of one engine.
    chosen = {name: value for name, value in engine_options(args).items() if name != "graph"}
    options = {"speculate": "off"} | chosen | more | {"slots": slots, "kv_tokens": kv_tokens}
    if args.model is None:
        return preset_engine(args.preset, capacity, gguf=getattr(args, "gguf", None), **options)
    need_gpu()
    engine = Engine.load(args.model, device="cuda", dtype="bfloat16", max_seq_len=capacity, **options)
    engine.model.kv.fill()  # With random K/V, a pass can start at any position.
    return engine


def random_adapters(count: int | None, rank: int | None) -> dict[str, int]:
    """Return the arguments of `bench_engine` for --random-adapters and --rank."""
    return {"adapters": count, "rank": rank or DEFAULT_RANK} if count else {}


class Runners(NamedTuple):
    """The decode and prompt passes of an engine in one graph mode, with every size captured."""

    steps: DecodePasses
    prompts: PromptPasses


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
def running(engine: Engine, steps: DecodePasses, prompts: PromptPasses | None = None):
    """Replace the engine's decode passes, and with `prompts` its prompt passes, within a `with` block.

    Yields a function that returns the graph modes of the prompt passes that ran in the block, such as "full".
    """
    own = engine.steps, engine.prompts
    engine.steps, engine.prompts = steps, prompts or engine.prompts
    before = set(steps.dispatcher.stats())

    def prompt_modes() -> str:
        new = set(steps.dispatcher.stats()) - before
        return ", ".join(sorted({stat.mode for stat in new if stat.kind in ("prompt", "mixed")}))

    try:
        yield prompt_modes
    finally:
        engine.steps, engine.prompts = own


# ---- times and limits


def time_decode(
    engine: Engine,
    context: int | Sequence[int],
    steps: int,
    runs: int,
    params: SamplingParams = GREEDY,
    rows: int = 1,
    before: Callable[[], None] = lambda: None,
    adapters: int = 0,
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
        adapters: number of adapters that the rows use; 0 times passes without adapters
    """

    def prepare() -> None:
        rewind(engine, context, params, rows)
        if adapters and engine.model.pool is not None:
            engine.model.pool.assign(adapters)
        before()

    return time_runs(partial(enqueue, engine, params, rows, adapters=adapters > 0), runs, prepare, steps)


def check_running(engine: Engine, name: str, rows: int = 1) -> None:
    """Raise GenerationError if a row is no longer active. Passes then return early, so their times are wrong."""
    for status in engine.model.workspace.meta[:rows, STATUS].tolist():
        if status != RUN:
            raise GenerationError(
                f"{name}: a row ended during the passes (status {status}), so their times are wrong; use fewer --steps"
            )


def reserved_positions(context: int, steps: int) -> int:
    """Return the K/V positions to reserve for a request: whole pages and a spare one, so that runs allocate none."""
    return (-(-(context + steps + 2) // PAGE) + 1) * PAGE


def step_bytes(
    engine: Engine, context: int | Sequence[int], steps: int, adapters: int = 0, rank: int = DEFAULT_RANK
) -> int:
    """Return the bytes that a decode pass must move: the weights, the K/V of the requests, and their state in and out.

    The embedding counts only if it is also the LM head, because a pass reads one row of it per token. Experts count by
    the expected number of distinct ones. An adapter counts once.

    Args:
        engine: the engine whose passes are counted
        context: tokens before the first pass, of one request or of each request
        steps: number of passes; K/V is counted at their mean position, in all layers
        adapters: number of adapters that the requests use
        rank: their rank
    """
    weights = engine.model.weights
    contexts = [context] if isinstance(context, int) else context
    positions = sum(contexts) + len(contexts) * (steps - 1) / 2
    recurrent = engine.model.recurrent
    state = sum(layer.state[0].nbytes for layer in recurrent.layers) if recurrent else 0
    kv = positions * kv_bytes_per_token(engine.config, weights.dtype)
    lora = adapters * adapter_bytes(engine.model.spec, weights.dtype, rank)
    return int(bytes_read(engine.model.spec, weights, len(contexts)) + kv + 2 * len(contexts) * state + lora)


def experts_of(engine: Engine, rows: int) -> float | None:
    """Return the expected number of distinct experts that a pass of `rows` rows uses in a layer with experts.

    It is None for a model without experts.
    """
    # Two linears of a layer have the same experts.
    counts = [linear.experts_of(rows) for linear in engine.config.linears() if linear.experts]
    return fmean(counts) if counts else None


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes per second at which a kernel that only reads runs over at most 8.6 GB."""
    return measure_read_bandwidth(device, min(2**33, free_memory(device) // 2))


def matmul_rate(device: torch.device, size: int = 8192, runs: int = 20) -> float:
    """Return FLOP per second of torch's bf16 matmul of two [size, size] matrices, the median of the runs."""
    a, b = (torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * size**3 / median(time_runs(lambda: torch.mm(a, b, out=out), runs))


# ---- rows


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
    facts |= {"kv_dtype": "fp8"} if engine.config.fp8_kv else {}
    return facts | ({"state_dtype": "float16"} if engine.config.fp16_state else {})


def run_facts(device: torch.device) -> dict:
    """Return the GPU and the versions of a measurement."""
    return {
        "dtype": "bfloat16",
        "gpu": torch.cuda.get_device_name(device),
        "tridecode": __version__,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
