"""Host memory that kernels on a GPU read, and the repr of objects with tensors."""

import logging
import mmap
import time
import weakref
from contextlib import suppress

import torch

from .errors import DeviceError

REGISTERED_BYTES = 2**30  # Bytes that are registered together.
ALIGNED = 4096  # Bytes of a page of host memory.
log = logging.getLogger("tridecode")


def aligned(size: int, to: int = ALIGNED) -> int:
    """Return the smallest multiple of `to` that is at least `size`."""
    return -(-size // to) * to


def host_memory(count: int, stride: int, device: torch.device, option: str) -> torch.Tensor:
    """Allocate zeros [count, stride] uint8 in host memory that kernels of `device` can read.

    The memory is released when the tensor is no longer used. For a CPU it is plain memory.
    It is one range of addresses. It is registered in parts of whole rows, because the driver limits the size of a part
    and a copy must not cross two parts. torch would round the size of a pinned tensor up to a power of two.

    Args:
        stride: bytes of a row, a multiple of ALIGNED.
        option: name of the option for messages.

    Raises:
        DeviceError: the host has too little memory, or the driver cannot pin it.
    """
    if device.type != "cuda":
        return torch.zeros(count, stride, dtype=torch.uint8, device=device)
    size, started, runtime = count * stride, time.perf_counter(), torch.cuda.cudart()
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DeviceError(f"{option}: the host has no {size / 2**30:,.1f} GiB: {error.strerror}") from None
    with suppress(AttributeError, OSError):  # Some systems do not support large pages.
        memory.madvise(mmap.MADV_HUGEPAGE)  # Large pages take a fraction of the time to register.
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    address, part = whole.data_ptr(), max(REGISTERED_BYTES // stride, 1) * stride
    registered: list[int] = []
    weakref.finalize(memory, _unregister, runtime, registered)
    for first in range(0, size, part):
        code = runtime.cudaHostRegister(address + first, min(part, size - first), 3)  # 3 means portable and mapped.
        if int(code):
            if torch.cuda.is_available():
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)  # CUDA reports the error once more at the next launch. Discard it.
            raise DeviceError(
                f"{option}: the driver refuses to pin more than {first / 2**30:,.1f} of {size / 2**30:,.1f} GiB "
                f"(CUDA error {int(code)}); request less, or raise the limit of locked memory"
            )
        registered.append(address + first)
    log.info("%s: pinned %.1f GiB of host memory in %.1f s", option, size / 2**30, time.perf_counter() - started)
    return whole.view(count, stride)


def _unregister(runtime, addresses: list[int]) -> None:
    """Unpin memory."""
    for address in addresses:
        runtime.cudaHostUnregister(address)


def short_repr(owner, tensor: torch.Tensor, **facts) -> str:
    """Return a one-line repr of an object with tensors: the facts, and the dtype and device of `tensor`."""
    facts |= {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
    return f"{type(owner).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"
