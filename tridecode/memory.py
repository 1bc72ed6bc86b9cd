"""What a model needs on its device, and the largest context that fits."""

import gc
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from . import cgroup
from .cache.kv import kv_bytes_per_token
from .errors import DeviceError
from .model.checkpoint import weight_bytes
from .model.config import ModelConfig
from .step.prefill import CHUNK

GIB = 2**30
HEADROOM = {"cuda": 0.03, "cpu": 0.25}  # of the free memory, left to cuBLAS and kernels, or to other programs
CPU_CONTEXT = 8192  # positions, unless more are asked for: a host's memory is not the engine's alone


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one device; `fixed` is the workspace and the activations of one prefill chunk.

    default_limit: positions to allocate at most where no number is asked for.
    """

    free: int
    weights: int
    per_token: int
    fixed: int
    model_limit: int
    headroom: float = 0.0
    default_limit: int = 2**31

    @property
    def max_context(self) -> int:
        """Positions that fit, at most the model's limit; 0 when not even the weights fit."""
        left = int(self.free * (1 - self.headroom)) - self.weights - self.fixed
        return max(min(left // self.per_token, self.model_limit), 0)

    def needed(self, capacity: int) -> int:
        return self.weights + self.fixed + capacity * self.per_token

    def capacity(self, requested: int | None, where: str) -> int:
        """The number of K/V positions to allocate; DeviceError when what is asked for does not fit."""
        fits = self.max_context
        if fits < 1 or (requested or 0) > fits:
            wanted = requested or 1
            advice = f"at most {fits:,} positions fit" if fits else "choose a smaller model or free memory"
            raise DeviceError(
                f"not enough memory on {where}: {wanted:,} positions need {self.needed(wanted) / GIB:,.2f} GiB "
                f"({self.weights / GIB:,.2f} GiB of weights), {self.free / GIB:,.2f} GiB are free; {advice}"
            )
        return requested or min(fits, self.default_limit)


@contextmanager
def allocating(capacity: int, device: torch.device):
    """Within, where the state of a context of `capacity` positions is allocated, a lack of memory is a DeviceError."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise DeviceError(
            f"not enough memory on {device} for a context of {capacity:,} positions; choose a smaller max_seq_len"
        ) from None


def plan_memory(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> MemoryPlan:
    """Plan for loading `config` in `dtype` on `device` as it is now."""
    rope_and_tokens = 4 * config.head_dim + 4
    one_piece = 2 * config.kv_size * dtype.itemsize  # a layer's K/V as a prompt's attention reads them
    # A row of a prefill chunk: the residual stream and its norm, q and k rotated in fp32, gate | up, their product.
    row = 4 * (5 * config.hidden_size + 6 * config.q_size + 4 * config.kv_size)
    row += 4 * dtype.itemsize * config.intermediate_size
    workspace = 64 * config.vocab_size + 2**25
    return MemoryPlan(
        free=free_memory(device),
        weights=weight_bytes(config, dtype),
        per_token=kv_bytes_per_token(config, dtype) + one_piece + rope_and_tokens,
        fixed=min(CHUNK, config.max_position) * row + workspace,
        model_limit=config.max_position,
        headroom=HEADROOM[device.type],
        default_limit=CPU_CONTEXT if device.type == "cpu" else config.max_position,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated now."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()  # what an engine before this one left in the allocator's cache is free
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as f:
        fields = dict(line.split(":", 1) for line in f)
    return min(int(fields["MemAvailable"].split()[0]) * 1024, cgroup.free_memory())
