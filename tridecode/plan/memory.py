"""Memory plan of a device: the bytes of a model, and the largest context that fits."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from ..blocks.spec import ModelSpec
from ..checkpoint.slices import host_layer_bytes, weight_bytes
from ..errors import DeviceError, counted
from ..kernels.device import device_of, simulated_gpu
from ..state.kv import kv_bytes_per_token
from ..state.offload import Offload
from ..state.records import slot_record_bytes
from ..step.model import expands_kv, rope_keys, verify_rows
from ..step.prompt import CHUNK
from ..step.workspace import make_prompt_buffers, make_workspace, named_tensors
from ..tuning.attention import prompt_attention_config
from . import cgroup

GIB = 2**30
HEADROOM = {
    "cuda": 0.03,
    "cpu": 0.25,
}  # Share of the free memory that stays unused for cuBLAS, kernels and other programs.
# Bytes for cuBLAS workspaces and captured graphs on a GPU, and for temporary tensors of the references on a CPU.
SCRATCH = {"cuda": 2**27, "cpu": 2**25}
TOKEN = 4  # Bytes of a token id. Each slot stores one id per position.
CPU_CONTEXT = 8192  # Default limit of K/V positions on a CPU, where other programs use the same memory.


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one device.

    Args:
        free: bytes that can be allocated now.
        weights: bytes of the weights on the device.
        per_token: bytes of each position of a context, including K/V.
        fixed: bytes of the workspace of one slot, of the buffers of prompt passes, and of graphs and libraries.
        model_limit: positions of a context that the model supports.
        headroom: share of `free` that stays unused.
        default_limit: maximum number of positions of a context if no number is requested.
        kv_per_token: bytes of K/V of one position.
        per_slot: bytes of each slot after the first.
        slots: requests that run at a time.
        buffers: bytes within `fixed` for prompt passes.
        scratch: bytes within `fixed` that CUDA graphs and libraries allocate.
        snapshots: bytes within `fixed` for snapshots of recurrent state.
        adapters: bytes within `fixed` for adapters.
    """

    free: int
    weights: int
    per_token: int
    fixed: int
    model_limit: int
    headroom: float = 0.0
    default_limit: int = 2**31
    kv_per_token: int = 0
    per_slot: int = 0
    slots: int = 1
    buffers: int = 0
    scratch: int = 0
    snapshots: int = 0
    adapters: int = 0

    def pools(self, capacity: int, kv_tokens: int) -> dict[str, int]:
        """Return the bytes of each pool.

        Args:
            capacity: positions of a context.
            kv_tokens: K/V positions on the device.
        """
        pools = {"weights": self.weights, "kv": kv_tokens * self.kv_per_token}
        others = {"prompts": self.buffers, "graphs": self.scratch}
        pools |= {name: size for name in ("snapshots", "adapters") if (size := getattr(self, name))}
        rest = self.needed(capacity, kv_tokens) - sum(pools.values()) - sum(others.values())
        return pools | {"workspace": rest} | others

    @property
    def usable(self) -> int:
        """Bytes that the plan may use: the free bytes without the headroom."""
        return int(self.free * (1 - self.headroom))

    @property
    def max_context(self) -> int:
        """Number of positions that fit, at most the model's limit; 0 if the weights do not fit."""
        left = self.usable - self.weights - self.fixed - (self.slots - 1) * self.per_slot
        return max(min(left // (self.per_token + (self.slots - 1) * TOKEN), self.model_limit), 0)

    def needed(self, capacity: int, kv_tokens: int | None = None) -> int:
        """Return the bytes for contexts of `capacity` positions and `kv_tokens` positions in the pool.

        By default the pool has the positions of one context.
        """
        extra = 0 if kv_tokens is None else (kv_tokens - capacity) * self.kv_per_token
        per_slot = self.per_slot + capacity * TOKEN
        return self.weights + self.fixed + (self.slots - 1) * per_slot + capacity * self.per_token + extra

    def capacity(self, requested: int | None, where: str) -> int:
        """Return the number of positions of a context. Raises DeviceError if `requested` positions do not fit."""
        fits, positions = self.max_context, requested or 1
        if fits < positions:
            left = self.usable - replace(self, slots=1).needed(positions)
            limit = 1 + left // max(self.per_slot + positions * TOKEN, 1)
            if self.slots > 1 and limit >= 1:
                what, advice = f" {self.slots:,} slots with", f"at most {counted(limit, 'slot')} fit"
            else:
                what = ""
                advice = f"at most {counted(fits, 'position')} fit" if fits else "choose a smaller model or free memory"
            raise DeviceError(f"not enough memory on {where}:{what}{self._shortage(positions, positions)}; {advice}")
        return requested or min(fits, self.default_limit)

    def kv_tokens(self, capacity: int, requested: int | None, where: str, page: int = 1) -> int:
        """Return the number of positions in the pool of all slots.

        By default it is the number that the slots can fill, in whole pages, or the number that fits. Raises DeviceError
        if `requested` positions do not fit.
        """
        if self.slots == 1:
            return capacity
        left = self.usable - self.needed(capacity)
        fits = capacity + left // max(self.kv_per_token, 1)
        if (requested or 0) > fits:
            shortage = self._shortage(capacity, requested or 0)
            raise DeviceError(f"not enough memory on {where}: kv_tokens:{shortage}; at most {fits:,} fit")
        return requested or max(min(fits, self.slots * -(-capacity // page) * page), capacity)

    def offloaded(
        self, spec: ModelSpec, page: int, least: int, capacity: int | None, kv_tokens: int | None, host: int,
        buffers: int, where: str,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Divide the memory between device pages and the ring, with `host` pages in host memory.

        Args:
            least: minimum number of device pages.
            capacity, kv_tokens: requested numbers of positions, or None.
            buffers: buffers of the ring.

        Returns:
            Positions of a context, pages on the device, and pages of one layer in each buffer of the ring.

        Raises:
            DeviceError: the requested numbers do not fit.
        """
        positions = capacity or min(self.model_limit, self.default_limit)
        pages, ring = self._places(spec.page_layers, page, least, positions, kv_tokens, host, buffers)
        if pages < least or ring < 0:
            needs = f"kv_offload needs {least * page:,}" if kv_tokens is None else f"kv_tokens requests {kv_tokens:,}"
            raise DeviceError(
                f"not enough memory on {where}: {needs} positions there, in addition to the ring; "
                f"{self.usable / GIB:,.2f} GiB are usable, and the weights take {self.weights / GIB:,.2f} of them"
            )
        if capacity is not None and (pages + ring) * page < capacity:
            raise DeviceError(
                f"kv_offload: {capacity:,} positions are requested, {pages * page:,} fit {where} and {ring * page:,} "
                "can be on the host; request more host memory, or a shorter context"
            )
        return min(positions, (pages + ring) * page), pages, ring

    def _places(
        self, layers: int, page: int, least: int, capacity: int, kv_tokens: int | None, host: int, buffers: int
    ) -> tuple[int, int]:
        """Return the pages on the device and in the ring, for contexts of `capacity` positions.

        The numbers are negative if they do not fit.
        """
        limit = max(self.slots * -(-capacity // page), least)
        # The memory that is left, without the tables of all layers.
        left = self.usable - self.needed(capacity, 0) - 4 * limit * layers
        cells = left * layers // (self.kv_per_token * page)  # A cell is a page of one layer.
        if kv_tokens is not None:
            pages = -(-kv_tokens // page)
            return pages, min(host, max(limit - pages, 0), (cells - pages * layers) // buffers)
        pages = min(cells // layers, limit)
        ring = min(host, -(-(limit - pages) * layers // max(layers - buffers, 1)))
        return min((cells - buffers * ring) // layers, limit), ring

    def with_snapshots(self, size: int) -> "MemoryPlan":
        """Return the plan with the bytes of snapshots added."""
        return replace(self, fixed=self.fixed + size, snapshots=size)

    def with_offload(self, spec: ModelSpec, offload: Offload, page: int) -> "MemoryPlan":
        """Return the plan with the bytes of the ring added."""
        ring = offload.buffers * offload.ring * page * self.kv_per_token // spec.page_layers
        return replace(self, fixed=self.fixed + ring)

    def _shortage(self, capacity: int, kv_tokens: int) -> str:
        """Return the part of an error message that compares needed and available bytes."""
        return (
            f" {counted(kv_tokens, 'position')} need{'s' * (kv_tokens == 1)} "
            f"{self.needed(capacity, kv_tokens) / GIB:,.2f} GiB ({self.weights / GIB:,.2f} GiB of weights), "
            + (f"{self.usable / GIB:,.2f} GiB are usable, " if self.headroom else "")
            + f"{self.free / GIB:,.2f} GiB are free"
        )


@contextmanager
def allocating(capacity: int, device: torch.device) -> Iterator[None]:
    """Convert out-of-memory errors to DeviceError within a `with` block.

    It allocates the state for `capacity` positions.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise DeviceError(
            f"not enough memory on {device} for a context of {counted(capacity, 'position')}; "
            "choose a smaller max_seq_len"
        ) from None


def plan_memory(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    slots: int = 1,
    chunk: int = CHUNK,
    torch_prompt_attention: bool = True,
    on_host: int = 0,
    speculate: bool = False,
    batch_invariant: bool = False,
    rows: int = 0,
) -> MemoryPlan:
    """Count the bytes of a model on a device.

    Args:
        slots: requests that run at a time.
        chunk: maximum number of prompt tokens in one pass.
        torch_prompt_attention: whether prompts use torch's attention, which needs the K/V of a slot in one
            contiguous tensor per layer.
        on_host: layers with linears in host memory.
        speculate: whether passes can verify drafts.
        batch_invariant: prompts use one kernel on every GPU.
        rows: rows of the largest captured decode pass, by default the slots.
    """
    rope = sum(4 * rope.columns(head_dim) for rope, head_dim in rope_keys(spec))
    kv, layer = kv_bytes_per_token(spec, dtype), 2 * spec.pages.width * dtype.itemsize
    gathered = layer if torch_prompt_attention else 0
    if expands_kv(spec, device, batch_invariant, torch_prompt_attention):
        kv += layer
    weights = weight_bytes(spec, dtype, device.type == "cuda", on_host)
    largest = max(slots, rows)
    rows, scratch = min(chunk, slots * spec.max_position) + largest, SCRATCH[device.type]
    if device.type == "cpu":  # Temporary tensors of the references, for each row.
        layers = ((linear for linear in layer.linears() if linear.epilogue == "residual") for layer in spec.layers)
        inner = max(sum(linear.k * max(linear.active, 1) for linear in linears) for linears in layers)
        scratch += 16 * rows * (inner + spec.pages.width)
        weights += on_host * host_layer_bytes(spec, dtype)
    buffers = prompt_bytes(spec, dtype, rows, device)
    records = slot_record_bytes(spec, dtype, speculate)
    fixed = workspace_bytes(spec, dtype, 1) + records + buffers + scratch
    if speculate:
        largest = max(largest, verify_rows(slots))
    if largest > slots:
        fixed += workspace_bytes(spec, dtype, slots, largest) - workspace_bytes(spec, dtype, slots)
    return MemoryPlan(
        free=free_memory(device),
        weights=weights,
        per_token=kv + gathered + rope + TOKEN,
        fixed=fixed,
        model_limit=spec.max_position,
        headroom=HEADROOM[device.type],
        default_limit=CPU_CONTEXT if device.type == "cpu" else spec.max_position,
        kv_per_token=kv,
        per_slot=slot_bytes(spec, dtype, slots) + (records if slots > 1 else 0),
        slots=slots,
        buffers=buffers,
        scratch=scratch,
    )


def slot_bytes(spec: ModelSpec, dtype: torch.dtype, slots: int) -> int:
    """Return the workspace bytes of each slot after the first, without its tokens. This allocates no memory."""
    if slots == 1:
        return 0
    return -(-(workspace_bytes(spec, dtype, slots) - workspace_bytes(spec, dtype, 1)) // (slots - 1))


def workspace_bytes(spec: ModelSpec, dtype: torch.dtype, slots: int, rows: int | None = None) -> int:
    """Return the bytes of the workspace on the device, without tokens and without the rings in host memory."""
    tensors = named_tensors(make_workspace(spec, 0, "meta", dtype, slots, rows)).values()
    return sum(tensor.nbytes for tensor in tensors if tensor.is_meta)


def prompt_bytes(spec: ModelSpec, dtype: torch.dtype, rows: int, device: torch.device) -> int:
    """Return the bytes of the buffers of prompt passes of up to `rows` rows."""
    config = prompt_attention_config(device_of(device), False, spec.fp8_kv, spec.pages.head_dim)
    buffers = make_prompt_buffers(spec, rows, "meta", dtype, config)
    return sum(tensor.nbytes for tensor in named_tensors(buffers).values())


def free_memory(device: torch.device) -> int:
    """Return the bytes that can be allocated now; for a simulated GPU all of its memory."""
    if gpu := simulated_gpu(device):
        return gpu.memory
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # Free the memory that an earlier engine left in the allocator's cache.
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":", 1) for line in f)
    return int(min(int(fields["MemAvailable"].split()[0]) * 1024, cgroup.free_memory()))
