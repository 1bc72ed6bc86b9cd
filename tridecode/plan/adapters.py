"""Plan of adapters: how many the device holds, and their largest rank."""

from dataclasses import dataclass, replace

import torch

from ..blocks.spec import ModelSpec
from ..checkpoint.adapters import adapter_rank
from ..errors import DeviceError, ParameterError, conflict
from ..kernels.linear.adapters import RANK_STEP
from ..options import DEFAULT_RANK, EngineOptions
from ..state.adapters import adapter_bytes, make_adapters
from ..tensors import aligned
from .memory import GIB, MemoryPlan

MAX_ADAPTERS = 1024  # Maximum number of adapters on the device.


@dataclass(frozen=True)
class AdapterPlan:
    """The pool of adapters on the device.

    Args:
        count: number of adapters. 0: the engine has no adapters.
        max_rank: largest rank of an adapter.
    """

    count: int = 0
    max_rank: int = 0


NO_ADAPTERS = AdapterPlan()


def plan_adapters(options: EngineOptions, spec: ModelSpec, dtype: torch.dtype) -> AdapterPlan:
    """Plan the pool of adapters. The configurations of the adapters are read, and downloaded if necessary.

    Raises:
        ParameterError: options contradict each other.
        CheckpointError: an adapter cannot be used.
    """
    sources = options.adapters or {}
    if not sources and options.adapter_memory is None:
        if options.max_rank is not None:
            raise conflict("max_rank", ": the engine has no adapters; use it with adapters or adapter_memory")
        return NO_ADAPTERS
    ranks = {name: adapter_rank(path) for name, path in sources.items()}
    largest = max(ranks.values(), default=DEFAULT_RANK)
    max_rank = largest if options.max_rank is None else aligned(options.max_rank, RANK_STEP)
    if largest > max_rank and ranks:
        name = max(ranks, key=lambda name: ranks[name])
        raise conflict("max_rank", f" is {options.max_rank}, and the adapter {name} has rank {largest}; raise it")
    if options.adapter_memory is None:
        return AdapterPlan(len(ranks), max_rank)
    each = adapter_bytes(spec, dtype, max_rank)
    count = min(int(options.adapter_memory * GIB) // each, MAX_ADAPTERS)
    if not count:
        least = f"must be at least {each / GIB:.3f} GiB, the size of an adapter of rank {max_rank}"
        raise ParameterError(f"adapter_memory {least}, got {options.adapter_memory:g}", "adapter_memory", "range")
    return AdapterPlan(count, max_rank)


def with_adapters(
    plan: MemoryPlan, adapters: AdapterPlan, spec: ModelSpec, dtype: torch.dtype, device: torch.device, rows: int,
    prompt_rows: int,
) -> MemoryPlan:  # fmt: skip
    """Return the memory plan with the bytes of the pool added.

    Args:
        rows, prompt_rows: rows of the largest decode pass and prompt pass.

    Raises:
        DeviceError: the adapters do not fit.
    """
    if not adapters.count:
        return plan
    pool = make_adapters(spec, "meta", dtype, adapters.count, adapters.max_rank, plan.slots, rows, prompt_rows)
    size, left = sum(tensor.nbytes for tensor in pool.tensors().values()), plan.usable - plan.needed(1)
    if 0 < left < size:  # If the model itself does not fit, the plan of its context reports that.
        why = f"adapters need {size / GIB:,.2f} GiB; at most {left / GIB:,.2f} GiB fit"
        raise DeviceError(f"not enough memory on {device}: {why}; lower adapter_memory or max_rank")
    return replace(plan, fixed=plan.fixed + size, adapters=size)
