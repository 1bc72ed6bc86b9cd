"""Where and how a model will run: device, backend, dtype and context, decided before memory is spent."""

import logging
import re
from dataclasses import dataclass, replace

import torch

from ..arguments import choice, integer, real, shown
from ..blocks.host_layers import LAYER_BUFFERS
from ..blocks.spec import ModelSpec
from ..checkpoint.quantization.quantize import HEADS, SCHEMES, rules
from ..checkpoint.slices import host_layer_bytes
from ..errors import DeviceError, ParameterError, counted
from ..kernels.device import device_of
from ..state.kv import PAGE
from ..state.offload import BUFFERS, Offload, least_pages, page_bytes
from ..step.dispatch import (
    ATTENTION,
    COSTS,
    MODES,
    PROMPT_ATTENTION,
    PROMPT_MOST,
    SIZES,
    Support,
    lowered,
    most_queries,
    prompt_sizes,
)
from ..step.dispatch import graph_sizes as graph_sizes_of
from ..step.prompt import CHUNK
from ..text.prompt import listed
from ..tuning.attention import prompt_tiles_fit
from . import memory
from .memory import GIB, MemoryPlan, plan_memory

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KV_DTYPES = ("auto", "fp8")
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
        usable = f"{counted(count, 'CUDA GPU')} {'is' if count == 1 else 'are'} usable here"
        raise DeviceError(f'device {device} was asked for, but {usable}; use device="cpu"')
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


def to_quantize(spec: ModelSpec, quantize: str | None, head: str | None = None, kv_dtype: str = "auto") -> ModelSpec:
    """The configuration of a checkpoint whose projections will be quantized while they are loaded, its LM head to
    `head`, by default fp8, and its K/V while they are written. Raises ParameterError."""
    if head is not None and quantize is None:
        raise ParameterError('quantize_head: nothing is quantized; use it with quantize="int4"')
    head = choice("quantize_head", head or "fp8", HEADS)
    spec = replace(spec, fp8_kv=choice("kv_dtype", kv_dtype, KV_DTYPES) == "fp8")
    if quantize is None:
        return spec
    choice("quantize", quantize, tuple(SCHEMES))
    if spec.quantization is not None:
        raise ParameterError(f"quantize {quantize}: the checkpoint is quantized already ({spec.quantization.name})")
    return replace(spec, load_quantization=rules(quantize, head))


def resolve_dtype(dtype: str, spec: ModelSpec, device: torch.device) -> torch.dtype:
    """Return the dtype of tensors that are not quantized: bf16 on a GPU if weights or K/V are quantized."""
    dtype = check_dtype(dtype)
    if (spec.quantization or spec.fp8_kv) and device.type == "cuda":
        if dtype not in ("auto", "bfloat16"):
            what = "quantized weights" if spec.quantization else "kv_dtype fp8"
            raise ParameterError(f"dtype must be bfloat16 on a GPU beside {what}, got {dtype}")
        return torch.bfloat16
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if spec.dtype == "float32" else DTYPES[spec.dtype]
    return DTYPES[dtype]


def plan_capacity(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_seq_len: int | None,
    slots: int = 1,
    kv_tokens: int | None = None,
    chunk: int = CHUNK,
    one_piece: bool = True,
    on_host: int = 0,
    speculate: bool = False,
    batch_invariant: bool = False,
) -> tuple[MemoryPlan, int, list[str]]:
    """The memory plan (see plan_memory), the context of a request to allocate, and notes for the user. Raises
    ParameterError, DeviceError. The pool of all slots is `plan.kv_tokens`."""
    limit = spec.max_position
    if max_seq_len is not None:
        max_seq_len = integer("max_seq_len", max_seq_len, 1, limit, "the model's limit of ")
    if kv_tokens is not None:
        kv_tokens = integer("kv_tokens", kv_tokens, max_seq_len or 1, LONGEST)
    plan = plan_memory(spec, dtype, device, slots, chunk, one_piece, on_host, speculate, batch_invariant)
    capacity = plan.capacity(max_seq_len, str(device))
    why = f"that is what fits {device}"
    if capacity < min(max_seq_len or limit, plan.max_context):
        why = f"max_seq_len can ask for up to {plan.max_context:,} on this CPU"
    if kv_tokens is not None and kv_tokens < capacity:
        capacity, why = kv_tokens, "that is what kv_tokens asks for"
    if kv_tokens is not None and kv_tokens > slots * capacity:
        most = f"{counted(slots, 'slot')} of {counted(capacity, 'position')} can have at most {slots * capacity:,}"
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
class KVPlan:
    """What K/V will have. capacity: positions of a request; kv_tokens: of the device; page: positions in a page, None
    for one of a whole context; pages: of the device, None for all that the slots can have; notes: for the user."""

    memory: MemoryPlan
    capacity: int
    kv_tokens: int
    page: int | None
    pages: int | None
    offload: Offload | None
    notes: list[str]


def plan_kv(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, backend: str, max_seq_len: int | None = None,
    slots: int = 1, kv_tokens: int | None = None, chunk: int = CHUNK, one_piece: bool = True,
    kv_offload: float | str | None = None, kv_ring: int | None = None, batch_invariant: bool = False,
    on_host: int = 0, speculate: bool = False,
) -> KVPlan:  # fmt: skip
    """As plan_capacity, and with kv_offload GiB of the host's memory for K/V ("auto": half of what is free), through
    kv_ring buffers, by default BUFFERS; 0: none, only what waits goes there. on_host: layers whose weights are in the
    host's memory; speculate: passes can verify drafts. Raises ParameterError, DeviceError."""
    if kv_ring is not None and kv_offload is None:
        raise ParameterError("kv_ring: nothing lies on the host; use it with kv_offload")
    buffers = BUFFERS if kv_ring is None else integer("kv_ring", kv_ring, 0, 16)
    page, where = page_size(backend, slots, batch_invariant), str(device)
    if kv_offload is None:
        asked = max_seq_len, slots, kv_tokens, chunk, one_piece, on_host, speculate, batch_invariant
        plan, capacity, notes = plan_capacity(spec, dtype, device, *asked)
        pool = plan.kv_tokens(capacity, kv_tokens, where, page or capacity)
        pages, whole = -(-pool // (page or capacity)), slots * -(-capacity // (page or capacity))
        pages = None if kv_tokens == slots * capacity or pages >= whole else pages
        return KVPlan(plan, capacity, pool, page, pages, None, notes)
    if spec.fp8_kv:
        raise ParameterError("kv_offload: K/V in kv_dtype fp8 are kept on the device; use kv_dtype auto beside it")
    limit, page = spec.max_position, page or PAGE
    if max_seq_len is not None:
        max_seq_len = integer("max_seq_len", max_seq_len, 1, limit, "the model's limit of ")
    longest = max_seq_len or limit
    least = least_pages(slots, page, min(chunk, longest) if batch_invariant else 1)
    if kv_tokens is not None:
        which = f"what {counted(slots, 'slot')} of {counted(longest, 'position')} can have, "
        kv_tokens = integer("kv_tokens", kv_tokens, least * page, max(slots * longest, least * page), which)
    each = page_bytes(spec.page_layers, spec.pages.width, page, dtype)
    free = memory.free_memory(torch.device("cpu")) - on_host * host_layer_bytes(spec, dtype)
    if kv_offload == "auto":
        host = min(free // 2 // each, slots * -(-longest // page))
    else:
        host = int(real("kv_offload", kv_offload, 1e-3, 1e6, ' or "auto"') * GIB) // each
        if host * each > free:
            raise DeviceError(f"kv_offload: {host * each / GIB:,.1f} GiB are asked for, the host has {free / GIB:,.1f}")
    if host == 0:
        raise DeviceError(f"kv_offload: a page takes {each / GIB:,.4f} GiB of the host's memory, and there are less")
    plan = plan_memory(spec, dtype, device, slots, chunk, one_piece, on_host)
    if device.type == "cpu":  # the same memory
        plan = replace(plan, free=plan.free - host * each)
    of_ring = host - 1 if buffers else 0  # one is left, through which pages change places
    asked = max_seq_len, kv_tokens, of_ring, max(buffers, 1)
    capacity, pages, ring = plan.offloaded(spec, page, least, *asked, where)
    offload = Offload(host, ring, max(buffers, 1))
    held = f"{pages * page:,} K/V positions on {where}, {host * page:,} on the host"
    notes = [f"{held}, of which {ring * page:,} can run"]
    return KVPlan(plan.with_offload(spec, offload, page), capacity, pages * page, page, pages, offload, notes)


def plan_weights(spec: ModelSpec, dtype: torch.dtype, weights_offload: float | None) -> int:
    """Of how many of the last layers the weights are in the host's memory, which has weights_offload GiB for them.
    Raises ParameterError, DeviceError."""
    if weights_offload is None:
        return 0
    if spec.quantization:
        raise ParameterError(
            f"weights_offload: quantized weights ({spec.quantization.name}) are kept on the device; use weights of 16 "
            "bits, or leave weights_offload out"
        )
    each, least = host_layer_bytes(spec, dtype), LAYER_BUFFERS + 1
    layers = min(int(real("weights_offload", weights_offload, 1e-3, 1e6) * GIB) // each, spec.num_layers)
    if layers < least:
        raise DeviceError(
            f"weights_offload: {least} layers or more, {least * each / GIB:,.3f} GiB, must go to the host, since the "
            f"device keeps buffers for {LAYER_BUFFERS}; the model has {spec.num_layers}, {layers} fit what is asked"
        )
    if layers * each > (free := memory.free_memory(torch.device("cpu"))):
        asked = f"{layers:,} layers take {layers * each / GIB:,.1f} GiB of the host's memory"
        raise DeviceError(f"weights_offload: {asked}, {free / GIB:,.1f} are free")
    return layers


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


def capture_support(backend: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[bool, bool]:
    """Whether passes can be captured there, and whether Triton's attention of prompts fits."""
    captured = backend != "torch" and device.type == "cuda"
    return captured, captured and prompt_tiles_fit(spec.pages.head_dim, dtype, device_of(device))


def plan_graphs(
    slots: int,
    chunk_tokens: int,
    captured: bool,
    prompt_tiles: bool,
    *,
    graph: str = "full",
    graph_sizes=None,
    attention: str = "triton",
    prompt_graph_max_tokens: int | None = None,
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
    largest = PROMPT_MOST if prompt_graph_max_tokens is None else prompt_graph_max_tokens
    most = integer("prompt_graph_max_tokens", largest, 1, LONGEST)
    prompts = prompt_sizes(chunk_tokens, most, _ascending("prompt_graph_sizes", prompt_graph_sizes, LONGEST))
    asked = {"prompt_graph_sizes": prompt_graph_sizes, "prompt_graph_max_tokens": prompt_graph_max_tokens}
    given = [name for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise ParameterError("prompt_graph_sizes: does not go with prompt_graph_max_tokens; leave one of them out")
    if given and MODES[graph][0] == "none":
        raise ParameterError(f'{given[0]}: no prompt pass is captured with graph="{graph}"; leave one of them out')
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


def resolve_speculation(
    asked: str, graphs: GraphPlan, fp8_kv: bool, kv_offload: bool, weights_offload: bool, ngram: bool = False
) -> tuple[str, str | None]:
    """What speculate=`asked` comes to for passes that run so: ngram or off, and if auto is off, why: what follows
    "it". fp8_kv: K/V are in 8 bits; kv_offload, weights_offload: some lie on the host; ngram:
    speculate_ngram is given, which asks for it beside auto. Raises ParameterError where ngram is asked for and cannot
    be."""
    given = {'kv_dtype="fp8"': fp8_kv, "kv_offload": kv_offload, "weights_offload": weights_offload}
    smallest, why = graphs.sizes[0], None
    if beside := [name for name, is_given in given.items() if is_given]:
        why = f"does not work beside {' or '.join(beside)}"
    elif most_queries(smallest) == 1:
        why = f"verifies in passes of at most {max(COSTS)} requests, and the smallest of graph_sizes is {smallest}"
    if asked == "ngram" and why:
        raise ParameterError(f'speculate="ngram" {why}; use speculate="off"')
    if asked == "auto" and ngram and why:
        raise ParameterError(f"speculate_ngram {why}; leave it out")
    if asked != "auto":
        return asked, None
    if ngram:
        return "ngram", None
    if MODES[graphs.graph][1] == "none" or ATTENTION[graphs.attention] < Support.UNIFORM_BATCH:
        why = "pays on a GPU only, where decode passes are captured and attention is Triton's"
    return ("off", why) if why else ("ngram", None)


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


def check_pages(
    pages: int | None, page: int, capacity: int, slots: int, offload: Offload | None, chunk: int = 1
) -> None:
    """Whether so many pages of the device, and those of the ring, hold a request, and with offload the device's alone
    a pass that reads `chunk` tokens. Raises ParameterError."""
    if pages is None:
        return
    if (pages + (offload.ring if offload else 0)) * page < capacity:
        raise ParameterError(f"pages: {pages:,} hold fewer positions than a request's {capacity:,}")
    if offload and pages < (least := least_pages(slots, page, chunk)):
        raise ParameterError(f"pages must be at least {least:,} for {counted(slots, 'slot')}, got {pages:,}")


def check_limits(slots, max_seq_len=None) -> int:
    """The slots as Python's integer. Raises ParameterError."""
    if max_seq_len is not None:
        integer("max_seq_len", max_seq_len, 1, LONGEST)
    return integer("slots", slots, 1, MAX_SLOTS)
