"""Host memory that the kernels of a GPU read."""

import logging
import mmap
import time
import weakref
from contextlib import suppress

import torch

from .errors import DeviceError

PIECE = 2**30  # bytes registered at a time
ALIGNED = 4096  # bytes: of a page of the host's memory
log = logging.getLogger("tridecode")


def aligned(size: int, to: int = ALIGNED) -> int:
    """The next multiple."""
    return -(-size // to) * to


def host_memory(count: int, stride: int, device: torch.device, option: str) -> torch.Tensor:
    """Zeros, [count, stride] uint8, which kernels of `device` can read, given back when nobody holds it; plain memory
    for a CPU. stride: a multiple of ALIGNED; option: who asks. Raises DeviceError.

    One range of addresses, registered in pieces of whole rows: a copy must not cross two, and the driver takes no more
    at a time. (torch would round a pinned tensor up to a power of two.)
    """
    if device.type != "cuda":
        return torch.zeros(count, stride, dtype=torch.uint8, device=device)
    size, started, runtime = count * stride, time.perf_counter(), torch.cuda.cudart()
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DeviceError(f"{option}: the host has no {size / 2**30:,.1f} GiB: {error.strerror}") from None
    with suppress(AttributeError, OSError):  # where the system has no large pages
        memory.madvise(mmap.MADV_HUGEPAGE)  # a fraction of the time to register
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    address, piece = whole.data_ptr(), max(PIECE // stride, 1) * stride
    registered: list[int] = []
    weakref.finalize(memory, _unregister, runtime, registered)
    for first in range(0, size, piece):
        code = runtime.cudaHostRegister(address + first, min(piece, size - first), 3)  # portable | mapped
        if int(code):
            if torch.cuda.is_available():
                with suppress(RuntimeError):
                    torch.zeros(1, device=device)  # the next launch tells of the error too, and then it is forgotten
            raise DeviceError(
                f"{option}: the driver refuses to pin more than {first / 2**30:,.1f} of {size / 2**30:,.1f} GiB "
                f"(CUDA error {int(code)}); ask for less, or raise the limit of locked memory"
            )
        registered.append(address + first)
    log.info("%s: pinned %.1f GiB of host memory in %.1f s", option, size / 2**30, time.perf_counter() - started)
    return whole.view(count, stride)


def _unregister(runtime, addresses: list[int]) -> None:
    for address in addresses:
        runtime.cudaHostUnregister(address)


def short_repr(holder, tensor: torch.Tensor, **facts) -> str:
    """The repr of what holds tensors: a short line of facts, with dtype and device of `tensor`, one of them."""
    facts |= {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
    return f"{type(holder).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"
