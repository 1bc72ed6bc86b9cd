"""Where and how a model will run: device, backend, dtype and context, decided before memory is spent."""

import logging
import re
from dataclasses import dataclass

import torch

from .arguments import choice, integer, shown
from .cache.kv import PAGE
from .errors import DeviceError, ParameterError
from .memory import MemoryPlan, plan_memory
from .model.config import ModelConfig
from .prompt import listed
from .step.choose import prompt_tiles_fit
from .step.dispatch import ATTENTION, MODES, PROMPT_ATTENTION, PROMPT_MOST, SIZES, lowered, prompt_sizes
from .step.dispatch import graph_sizes as graph_sizes_of
from .step.prefill import CHUNK

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LONGEST = 2**31 - 2  # positions are 32-bit integers
MAX_SLOTS = SIZES[-1]
TILES_NEED = "a GPU of compute capability 9.x, bfloat16 or float16, and heads of at most 128"  # see prompt_tiles_fit
log = logging.getLogger("tridecode")


def resolve_device(device: str, backend: str) -> tuple[torch.device, str]:
    """The device and backend that serve a request for `device` and `backend`. Raises DeviceError, ParameterError."""
    choice("backend", backend, ("auto", "triton", "torch"))
    if isinstance(device, torch.device):
        device = str(device)
    if not isinstance(device, str) or not re.fullmatch(r"auto|cpu|cuda(:[0-9]{1,4})?", device):
        raise ParameterError(f"device must be auto, cpu, cuda or cuda:N, got {shown(device)}")
    kind, _, index = device.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "cuda" and int(index or 0) >= count:
        raise DeviceError(f'device {device} was asked for, but {count} CUDA GPUs are usable here; use device="cpu"')
    if kind == "auto":
        usable = count and backend != "torch" and torch.cuda.get_device_capability(0) >= (8, 0)
        kind = "cuda" if usable else "cpu"
    place = torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device("cpu")
    if backend == "auto":
        backend = "triton" if kind == "cuda" else "torch"
    if backend == "triton" and kind != "cuda":
        raise DeviceError('backend triton needs an NVIDIA GPU and none is used here; use backend="torch"')
    if kind == "cuda" and torch.cuda.get_device_capability(place) < (8, 0):
        raise DeviceError(f'{place} has a compute capability below 8.0, which is not supported; use device="cpu"')
    return place, backend


def check_dtype(dtype: str | torch.dtype) -> str:
    """The name of a dtype that a model can run in, or auto. Raises ParameterError."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    return choice("dtype", name, ("auto", *DTYPES))


def resolve_dtype(dtype: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    dtype = check_dtype(dtype)
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if config.dtype == "float32" else DTYPES[config.dtype]
    return DTYPES[dtype]


def plan_capacity(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int | None,
    slots: int = 1,
    kv_tokens: int | None = None,
    chunk: int = CHUNK,
    one_piece: bool = True,
    speculate: bool = False,
) -> tuple[MemoryPlan, int, list[str]]:
    """The memory plan (see plan_memory), the context of a request to allocate, and notes for the user. Raises
    ParameterError, DeviceError. The pool of all slots is `plan.kv_tokens`."""
    limit = config.max_position
    if max_seq_len is not None:
        max_seq_len = integer("max_seq_len", max_seq_len, 1, limit, "the model's limit of ")
    if kv_tokens is not None:
        kv_tokens = integer("kv_tokens", kv_tokens, max_seq_len or 1, LONGEST)
    plan = plan_memory(config, dtype, device, slots, chunk, one_piece, speculate)
    capacity = plan.capacity(max_seq_len, str(device))
    why = f"that is what fits {device}"
    if capacity < min(max_seq_len or limit, plan.max_context):
        why = f"max_seq_len can ask for up to {plan.max_context:,} on this CPU"
    if kv_tokens is not None and kv_tokens < capacity:
        capacity, why = kv_tokens, "that is what kv_tokens asks for"
    if kv_tokens is not None and kv_tokens > slots * capacity:
        most = f"{slots:,} slots of {capacity:,} positions hold at most {slots * capacity:,}"
        raise ParameterError(f"kv_tokens: {most}, got {kv_tokens:,}")
    notes = []
    if capacity < (max_seq_len or limit):
        notes.append(f"context lowered to {capacity:,} of the model's {limit:,} positions: {why}")
        log.warning(notes[-1])
    pool = plan.kv_tokens(capacity, kv_tokens, str(device))
    if kv_tokens is None and pool < slots * capacity:
        notes.append(f"{slots:,} slots share {pool:,} K/V positions: that is what fits {device}")
        log.info(notes[-1])
    return plan, capacity, notes


@dataclass(frozen=True)
class GraphPlan:
    """How passes will run. graph: one of MODES; sizes, prompt_sizes: rows of decode passes and tokens of prompt passes
    to capture; attention, prompt_attention: their backends; note: what was changed, for the user; one_piece: as
    plan_memory takes it."""

    graph: str
    sizes: tuple[int, ...]
    attention: str
    prompt_sizes: tuple[int, ...]
    prompt_attention: str
    note: str | None = None
    one_piece: bool = True


def capture_support(backend: str, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[bool, bool]:
    """Whether passes can be captured there, and whether Triton's attention of prompts fits."""
    captured = backend != "torch" and device.type == "cuda"
    return captured, captured and prompt_tiles_fit(config.head_dim, dtype, device)


def plan_graphs(
    slots: int,
    chunk_tokens: int,
    captured: bool,
    prompt_tiles: bool,
    *,
    graph: str = "full",
    graph_sizes=None,
    attention: str = "triton",
    prompt_graph_max_tokens: int = PROMPT_MOST,
    prompt_graph_sizes=None,
    prompt_attention: str = "auto",
    batch_invariant: bool = False,
) -> GraphPlan:
    """For so many slots and chunks of so many tokens; captured: whether the device can capture, prompt_tiles: whether
    Triton's attention of prompts fits it; batch_invariant: all prompt passes have a chunk's rows. Raises
    ParameterError."""
    choice("graph", graph, tuple(MODES))
    choice("attention", attention, tuple(ATTENTION))
    choice("prompt_attention", prompt_attention, ("auto", *PROMPT_ATTENTION))
    sizes = graph_sizes_of(slots, _ascending("graph_sizes", graph_sizes, SIZES[-1]))
    most = integer("prompt_graph_max_tokens", prompt_graph_max_tokens, 1, LONGEST)
    prompts = prompt_sizes(chunk_tokens, most, _ascending("prompt_graph_sizes", prompt_graph_sizes, LONGEST))
    if batch_invariant:
        if prompt_graph_sizes is not None:
            raise ParameterError("prompt_graph_sizes: with batch_invariant the only size is chunk_tokens")
        prompts = (chunk_tokens,) if chunk_tokens <= most else ()
        if prompt_attention not in ("auto", "triton") or captured and not prompt_tiles:
            raise ParameterError(f"batch_invariant needs prompt_attention triton, and that {TILES_NEED}; or the CPU")
    if not captured:
        graph = "none"
    if prompt_attention == "auto":
        prompt_attention = "triton" if prompt_tiles or not captured else "flash"
    if prompt_attention == "triton" and captured and not prompt_tiles:
        raise ParameterError(f"prompt_attention triton needs {TILES_NEED}; use flash")
    below, note = lowered(graph, ATTENTION[attention]), None
    if below != graph:
        note = f"graph {graph} becomes {below}: {attention} attention cannot be captured"
    one_piece = prompt_attention != "triton" or not captured
    return GraphPlan(below, sizes, attention, prompts, prompt_attention, note, one_piece)


def _ascending(name: str, sizes, most: int) -> list[int] | None:
    if sizes is None:
        return None
    if not (items := listed(sizes)):
        raise ParameterError(f"{name} must be a list of numbers, got {shown(sizes)}")
    found = [integer(name, size, 1, most) for size in items]
    if found != sorted(set(found)):
        raise ParameterError(f"{name} must ascend, got {', '.join(map(str, found))[:60]}")
    return found


def page_size(backend: str, slots: int, batch_invariant: bool = False) -> int | None:
    """Positions in a K/V page; None: the CPU's one conversation has a page for the whole of its context, unless only
    whole pages are shared."""
    return PAGE if backend == "triton" or slots > 1 or batch_invariant else None


def check_limits(slots, max_seq_len=None) -> int:
    """The slots as Python's integer. Raises ParameterError."""
    if max_seq_len is not None:
        integer("max_seq_len", max_seq_len, 1, LONGEST)
    return integer("slots", slots, 1, MAX_SLOTS)
