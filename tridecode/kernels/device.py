"""Device: the properties of a GPU that launch configs depend on."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


class Device(NamedTuple):
    """Properties of one device. All numbers of a CPU are 0.

    Attributes:
        name: Name that the driver reports.
        capability: 10 * major + minor, for example 90.
        multiprocessors: Number of multiprocessors.
        shared_memory: Bytes that one program may use.
        shared_memory_each: Bytes of a multiprocessor.
        registers: 32-bit registers of a multiprocessor.
        memory: Bytes of the GPU.
    """

    name: str = "cpu"
    capability: int = 0
    multiprocessors: int = 0
    shared_memory: int = 0
    shared_memory_each: int = 0
    registers: int = 0
    memory: int = 0


def _gpu(name: str, capability: int, multiprocessors: int, shared_kib: int, memory_gib: int) -> Device:
    """Return a GPU with 65,536 registers per multiprocessor."""
    return Device(
        name, capability, multiprocessors, shared_kib * 2**10, (shared_kib + 1) * 2**10, 65536, memory_gib * 2**30
    )


# GPUs for which kernels can be compiled on another machine. Source: CUDA's table of compute capabilities, and the data
# sheets of the GPUs.
GPUS = {
    key: _gpu(**values)
    for key, values in json.loads(Path(__file__).with_name("gpus.json").read_text(encoding="utf-8")).items()
}
_simulated: ContextVar[Device | None] = ContextVar("_simulated", default=None)


@contextmanager
def simulated(gpu: Device) -> Iterator[None]:
    """Replace CUDA and meta devices by `gpu` within a `with` block, to plan for a GPU of another machine."""
    token = _simulated.set(gpu)
    try:
        yield
    finally:
        _simulated.reset(token)


def simulated_gpu(device: "torch.device") -> Device | None:
    """Return the GPU that replaces `device`, or None."""
    return _simulated.get() if device.type in ("cuda", "meta") else None


def device_of(device: "torch.device") -> Device:
    """Return the properties of `device`, read from its driver. Without a driver, return those of a CPU."""
    if gpu := simulated_gpu(device):
        return gpu
    import torch  # `tridecode --help` lists GPUS and must not load torch, so this import is local.

    if device.type != "cuda" or not torch.cuda.is_available():
        return Device()
    facts = torch.cuda.get_device_properties(device)
    return Device(
        facts.name,
        10 * facts.major + facts.minor,
        facts.multi_processor_count,
        facts.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        facts.shared_memory_per_multiprocessor,
        facts.regs_per_multiprocessor,  # type: ignore[attr-defined]
        facts.total_memory,
    )
