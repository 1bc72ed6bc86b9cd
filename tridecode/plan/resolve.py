"""resolve: computes the plan of an engine from options, a model and a device, before memory is allocated."""

from dataclasses import dataclass, replace

import torch

from ..blocks.spec import ModelSpec
from ..checkpoint.slices import weight_bytes
from ..errors import DeviceError, ParameterError, counted
from ..kernels.device import device_of
from ..options import QUANTIZE, EngineOptions
from ..state.offload import Offload, min_pages
from ..state.records import snapshot_bytes
from ..step.model import rope_keys
from .adapters import NO_ADAPTERS, AdapterPlan, plan_adapters
from .device import quantized, resolve_dtype
from .graphs import GraphPlan, plan_drafts, plan_graphs, prompt_pass_sizes
from .kv import KVPlan, page_size, plan_host_layers, plan_kv
from .memory import GIB, MemoryPlan, plan_memory


@dataclass(frozen=True)
class EnginePlan:
    """How an engine runs a model.

    Args:
        options: the requested options.
        spec: the model, with the quantization that is applied while it is loaded.
        device: the device that runs the passes.
        backend: "triton" or "torch", the kernels that run the passes.
        dtype: dtype of activations.
        graphs: which passes are captured, and their attention kernels.
        ngram: maximum and minimum number of tokens that must match for a draft, or None for no drafts.
        why_no_drafts: reason why there are no drafts; completes a sentence that begins with "it", such as
            "pays on a GPU only".
        memory: bytes of the device.
        host_layers: number of last layers with weights in host memory.
        chunk: maximum number of prompt tokens in one pass.
        capacity: as in KVPlan, or 0 if there is a problem.
        kv_tokens, page, pages, offload, snapshots: as in KVPlan.
        adapters: the pool of adapters on the device.
        notes: messages for the user.
        problem: reason why the plan does not fit the device, with advice; None if it fits.
    """

    options: EngineOptions
    spec: ModelSpec
    device: torch.device
    backend: str
    dtype: torch.dtype
    graphs: GraphPlan
    ngram: tuple[int, int] | None
    why_no_drafts: str | None
    memory: MemoryPlan
    host_layers: int
    chunk: int
    capacity: int
    kv_tokens: int
    page: int | None
    pages: int | None = None
    offload: Offload | None = None
    snapshots: int = 0
    adapters: AdapterPlan = NO_ADAPTERS
    notes: tuple[str, ...] = ()
    problem: str | None = None

    def __post_init__(self) -> None:
        if self.pages is None or self.problem:
            return
        page, slots = self.page or self.capacity, self.options.slots
        if (self.pages + (self.offload.ring if self.offload else 0)) * page < self.capacity:
            message = f"pages: {self.pages:,} hold fewer positions than a request's {self.capacity:,}"
            raise ParameterError(message, "pages", "range")
        least = min_pages(slots, page, self.chunk if self.options.batch_invariant else 1)
        if self.offload and self.pages < least:
            message = f"pages must be at least {least:,} for {counted(slots, 'slot')}, got {self.pages:,}"
            raise ParameterError(message, "pages", "range")

    @property
    def slots(self) -> int:
        """Number of requests that run at a time."""
        return self.options.slots

    @property
    def prefix_sharing(self) -> bool:
        """Whether requests share equal prefixes. For models with recurrent state this needs memory for snapshots."""
        return self.options.prefix_sharing and (self.snapshots > 0 or not self.spec.recurrent)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of a snapshot of recurrent state."""
        return snapshot_bytes(self.spec, self.dtype)

    @property
    def rows(self) -> int:
        """Rows of the largest decode pass without drafts."""
        return max(self.slots, *self.graphs.sizes)

    @property
    def dependent_launch(self) -> bool:
        """Whether captured passes use programmatic dependent launch."""
        return self.graphs.captured and device_of(self.device).capability >= 90

    @property
    def pools(self) -> dict[str, int]:
        """Bytes of the device by pool.

        The pools are weights, kv, snapshots (if the model has recurrent state), adapters (if there are any), workspace,
        prompts (buffers of prompt passes), and graphs (with allocations of libraries).
        """
        return self.memory.pools(self.capacity, self.kv_tokens)

    def check(self) -> None:
        """Raise DeviceError if the plan does not fit the device."""
        if self.problem:
            raise DeviceError(self.problem)


def resolve(options: EngineOptions, spec: ModelSpec, device: torch.device) -> EnginePlan:
    """Decide how an engine runs a model on a device. This allocates no memory.

    A plan that does not fit has a `problem`. Raises ParameterError if options contradict the model or the device.
    """
    backend = ("triton" if device.type == "cuda" else "torch") if options.backend == "auto" else options.backend
    spec = quantized(options, spec)
    dtype = resolve_dtype(options.dtype, spec, device)
    graphs = plan_graphs(options, backend, spec, dtype, device)
    weights = weight_bytes(spec, dtype, device.type == "cuda", 0)
    ngram, why = plan_drafts(options, graphs, int(weights * spec.active_share))
    page, host_layers, problem = page_size(backend, options), 0, None
    adapters = plan_adapters(options, spec, dtype)
    try:
        host_layers = plan_host_layers(options, spec, dtype)
        kv = plan_kv(options, spec, dtype, device, page, graphs, host_layers, ngram is not None, adapters)
    except DeviceError as error:
        how = (
            options.slots,
            options.chunk,
            graphs.torch_prompt_attention,
            host_layers,
            ngram is not None,
            options.batch_invariant,
        )
        memory = plan_memory(spec, dtype, device, *how, max(graphs.sizes))
        kv = KVPlan(memory, capacity=0, kv_tokens=0, page=page, pages=None, offload=None)
        problem = f"{error}{smaller_weights(spec, dtype, device, memory, host_layers)}"
    notes = [*spec.notes, *kv.notes]
    if host_layers:
        notes.append(f"the weights of the last {counted(host_layers, 'layer')} come from the host in every pass")
    if graphs.note:
        notes.append(graphs.note)
    if rope := next((rope for rope, _ in rope_keys(spec) if rope.depends_on(kv.capacity)), None):
        notes.append(
            f"rope type dynamic: all texts use the frequencies for {kv.capacity:,} positions; "
            f"max_seq_len {rope.original_max_position} keeps the original ones"
        )
    chunk = chunk_of(options, kv.capacity or options.chunk, page)
    return EnginePlan(
        options=options,
        spec=spec,
        device=device,
        backend=backend,
        dtype=dtype,
        graphs=replace(graphs, prompt_sizes=prompt_pass_sizes(options, chunk)),
        ngram=ngram,
        why_no_drafts=why,
        memory=kv.memory,
        host_layers=host_layers,
        chunk=chunk,
        capacity=kv.capacity,
        kv_tokens=kv.kv_tokens,
        page=kv.page,
        pages=kv.pages,
        offload=kv.offload,
        snapshots=kv.snapshots,
        adapters=adapters,
        notes=tuple(notes),
        problem=problem,
    )


def chunk_of(options: EngineOptions, capacity: int, page: int | None) -> int:
    """Return the maximum number of prompt tokens in one pass, for contexts of `capacity` positions.

    In batch-invariant mode it is a number of whole pages, and does not depend on the slots.
    """
    page = page or capacity
    limit = -(-capacity // page) * page if options.batch_invariant else options.slots * capacity
    return min(options.chunk, limit)


def smaller_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, memory: MemoryPlan, host_layers: int
) -> str:
    """Return advice for an error message: the first quantization with which the weights fit, or ""."""
    if memory.max_context or spec.quantization or host_layers or dtype == torch.float16:
        return ""
    for scheme in QUANTIZE:
        smaller = quantized(EngineOptions(quantize=scheme), spec)
        weights = weight_bytes(smaller, dtype, device.type == "cuda", 0)
        if replace(memory, weights=weights).max_context:
            return f"; with quantize={scheme} the weights take {weights / GIB:,.2f} GiB and fit"
    return ""
