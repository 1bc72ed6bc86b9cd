"""Plan of K/V: the positions that fit on the device and in host memory, and the layers with weights in host memory."""

import logging
from dataclasses import dataclass, replace

import torch

from ..arguments import Integer
from ..blocks.host_layers import LAYER_BUFFERS
from ..blocks.spec import ModelSpec
from ..checkpoint.slices import host_layer_bytes
from ..errors import DeviceError, ParameterError, conflict, counted
from ..options import EngineOptions
from ..state.kv import PAGE
from ..state.offload import BUFFERS, Offload, min_pages, page_bytes
from ..state.records import snapshot_bytes
from ..step.model import verify_rows
from . import memory
from .adapters import NO_ADAPTERS, AdapterPlan, with_adapters
from .graphs import GraphPlan
from .memory import GIB, MemoryPlan, plan_memory

SNAPSHOT_SHARE = 8  # by default, snapshots get 1 / SNAPSHOT_SHARE of the memory that the rest of the engine leaves
MAX_SLOT_SNAPSHOTS = 32  # default limit of snapshots for each slot
log = logging.getLogger("tridecode")


@dataclass(frozen=True)
class KVPlan:
    """The plan for the K/V of all requests.

    Args:
        memory: bytes of the device.
        capacity: positions of one request.
        kv_tokens: positions on the device.
        page: positions in a page, or None for one page that stores a whole context.
        pages: pages on the device, or None for as many as the slots can use.
        offload: pages in host memory.
        notes: messages for the user.
        snapshots: number of snapshots of recurrent state.
    """

    memory: MemoryPlan
    capacity: int
    kv_tokens: int
    page: int | None
    pages: int | None
    offload: Offload | None
    notes: tuple[str, ...] = ()
    snapshots: int = 0


def page_size(backend: str, options: EngineOptions) -> int | None:
    """Return the positions in a K/V page.

    An engine with one slot on the CPU has one page for its whole context (None), unless only whole pages are shared.
    """
    return PAGE if backend == "triton" or options.slots > 1 or options.batch_invariant else None


def plan_kv(
    options: EngineOptions,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    page: int | None,
    graphs: GraphPlan,
    host_layers: int = 0,
    drafts: bool = False,
    adapters: AdapterPlan = NO_ADAPTERS,
) -> KVPlan:
    """Plan the K/V of a model.

    Args:
        host_layers: number of last layers with weights in host memory.
        drafts: whether passes can verify drafts.
        adapters: the pool of adapters.

    Raises:
        ParameterError: options contradict the model.
        DeviceError: the memory does not suffice.
    """
    how = options.slots, options.chunk, graphs.torch_prompt_attention, host_layers
    rows, invariant = max(graphs.sizes), options.batch_invariant
    own = max(options.slots, rows)
    largest = max(own, verify_rows(own) if drafts else 0), min(options.chunk, options.slots * spec.max_position) + own
    if options.max_seq_len is not None:
        Integer(1, spec.max_position, "the model's limit of ").check("max_seq_len", options.max_seq_len)
    if options.kv_offload is not None:
        plan = plan_memory(spec, dtype, device, *how, batch_invariant=invariant, rows=rows)
        plan = with_adapters(plan, adapters, spec, dtype, device, *largest)
        plan, snapshots = plan_snapshots(options, spec, dtype, plan, device)
        kv = _offloaded(options, spec, dtype, device, page or PAGE, plan, host_layers)
        return replace(kv, snapshots=snapshots)
    plan = plan_memory(spec, dtype, device, *how, drafts, invariant, rows)
    plan = with_adapters(plan, adapters, spec, dtype, device, *largest)
    plan, snapshots = plan_snapshots(options, spec, dtype, plan, device)
    capacity, notes = plan_capacity(options, plan, device)
    slots = options.slots
    pool = plan.kv_tokens(capacity, options.kv_tokens, str(device), page or capacity)
    pages, needed = -(-pool // (page or capacity)), slots * -(-capacity // (page or capacity))
    limited = options.kv_tokens != slots * capacity and pages < needed
    return KVPlan(plan, capacity, pool, page, pages if limited else None, None, notes, snapshots)


def plan_snapshots(
    options: EngineOptions, spec: ModelSpec, dtype: torch.dtype, plan: MemoryPlan, device: torch.device
) -> tuple[MemoryPlan, int]:
    """Return the plan with snapshots of recurrent state, and their number.

    Raises:
        ParameterError: the model has no recurrent state, or the requested memory is smaller than a snapshot.
        DeviceError: the requested memory does not fit.
    """
    each, requested = snapshot_bytes(spec, dtype), options.snapshot_memory
    if not each:
        if requested is not None:
            raise conflict("snapshot_memory", ": the model has no recurrent state and needs no snapshots; leave it out")
        return plan, 0
    left = max(plan.usable - plan.needed(options.max_seq_len or 1, options.kv_tokens), 0)
    if not options.prefix_sharing:
        count = 0
    elif requested is None:
        count = min(left // SNAPSHOT_SHARE // each, MAX_SLOT_SNAPSHOTS * options.slots)
    else:
        count = int(requested * GIB) // each
        if requested and not count:
            least = f"must be 0 or at least {each / GIB:.3f} GiB, the size of a snapshot, got {requested:g}"
            raise ParameterError(f"snapshot_memory {least}", "snapshot_memory", "range")
        if 0 < left < count * each:  # otherwise the context itself does not fit, which `plan_capacity` reports
            asks = f"snapshot_memory requests {requested:,.2f} GiB; at most {left / GIB:,.2f} GiB fit"
            raise DeviceError(f"not enough memory on {device}: {asks}")
    return plan.with_snapshots(count * each), count


def plan_capacity(options: EngineOptions, plan: MemoryPlan, device: torch.device) -> tuple[int, tuple[str, ...]]:
    """Return the positions of one request, and notes for the user. Raises ParameterError, DeviceError."""
    requested, slots, kv_tokens = options.max_seq_len, options.slots, options.kv_tokens
    limit, where = plan.model_limit, str(device)
    if kv_tokens is not None:
        Integer(requested or 1).check("kv_tokens", kv_tokens)
    capacity = plan.capacity(requested, where)
    why = f"that is what fits {where}"
    if capacity < min(requested or limit, plan.max_context):
        why = f"max_seq_len accepts up to {plan.max_context:,} on this CPU"
    if kv_tokens is not None and kv_tokens < capacity:
        capacity, why = kv_tokens, "that is what kv_tokens requests"
    if kv_tokens is not None and kv_tokens > slots * capacity:
        most = f"{counted(slots, 'slot')} of {counted(capacity, 'position')} can have at most {slots * capacity:,}"
        raise ParameterError(f"kv_tokens: {most}, got {kv_tokens:,}", "kv_tokens", "range")
    notes = []
    if capacity < (requested or limit):
        notes.append(f"context lowered to {capacity:,} of the model's {limit:,} positions: {why}")
        log.warning(notes[-1])
    pool = plan.kv_tokens(capacity, kv_tokens, where)
    if kv_tokens is None and pool < slots * capacity:
        notes.append(f"{slots:,} slots share {pool:,} K/V positions: that is what fits {where}")
        log.info(notes[-1])
    return capacity, tuple(notes)


def _offloaded(
    options: EngineOptions,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    page: int,
    plan: MemoryPlan,
    host_layers: int,
) -> KVPlan:
    """Plan K/V on the device and in `kv_offload` GiB of host memory ("auto": half of the free memory).

    The ring has kv_ring buffers. Without a ring, host memory stores K/V of waiting requests only.
    """
    slots, where, kv_tokens = options.slots, str(device), options.kv_tokens
    buffers = BUFFERS if options.kv_ring is None else options.kv_ring
    longest = options.max_seq_len or spec.max_position
    least = min_pages(slots, page, min(options.chunk, longest) if options.batch_invariant else 1)
    if kv_tokens is not None:
        which = f"what {counted(slots, 'slot')} of {counted(longest, 'position')} can have, "
        Integer(least * page, max(slots * longest, least * page), which).check("kv_tokens", kv_tokens)
    each = page_bytes(spec.page_layers, spec.pages.width, page, dtype)
    free = memory.free_memory(torch.device("cpu")) - host_layers * host_layer_bytes(spec, dtype)
    if options.kv_offload == "auto":
        host = min(free // 2 // each, slots * -(-longest // page))
    else:
        assert isinstance(options.kv_offload, float | int)
        host = int(options.kv_offload * GIB) // each
        if host * each > free:
            raise DeviceError(
                f"kv_offload: {host * each / GIB:,.1f} GiB are requested, but the host has {free / GIB:,.1f}"
            )
    if host == 0:
        raise DeviceError(
            f"kv_offload: a page takes {each / GIB:,.4f} GiB of host memory, more than requested or free; request more"
        )
    if device.type == "cpu":  # The CPU is the device, so both share one memory.
        plan = replace(plan, free=plan.free - host * each)
    ring_limit = host - 1 if buffers else 0  # One host page stays free, so that pages can be exchanged.
    limits = options.max_seq_len, kv_tokens, ring_limit, max(buffers, 1)
    capacity, pages, ring = plan.offloaded(spec, page, least, *limits, where)
    offload = Offload(host, ring, max(buffers, 1))
    positions = f"{pages * page:,} K/V positions on {where}, {host * page:,} on the host"
    notes = (f"{positions}, of which {ring * page:,} can run",)
    return KVPlan(plan.with_offload(spec, offload, page), capacity, pages * page, page, pages, offload, notes)


def plan_host_layers(options: EngineOptions, spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the number of last layers that have their weights in host memory. Raises ParameterError, DeviceError."""
    if options.weights_offload is None:
        return 0
    if spec.quantization:
        raise conflict(
            "weights_offload",
            f": quantized weights ({spec.quantization.name}) are kept on the device; use weights of 16 bits, or leave "
            "weights_offload out",
        )
    each, least = host_layer_bytes(spec, dtype), LAYER_BUFFERS + 1
    layers = min(int(options.weights_offload * GIB) // each, spec.num_layers)
    if layers < least:
        raise DeviceError(
            f"weights_offload: at least {least} layers ({least * each / GIB:,.3f} GiB) must be offloaded, because the "
            f"device has buffers for {LAYER_BUFFERS} layers; the model has {spec.num_layers} layers, and the requested "
            f"size holds {layers}"
        )
    if layers * each > (free := memory.free_memory(torch.device("cpu"))):
        takes = f"{layers:,} layers take {layers * each / GIB:,.1f} GiB of the host's memory"
        raise DeviceError(f"weights_offload: {takes}, but only {free / GIB:,.1f} are free; request less")
    return layers
