"""Device: the properties of a GPU that launch configs depend on."""

from typing import NamedTuple

import torch


class Device(NamedTuple):
    """Properties of one device; of a CPU all numbers are 0.

    name: as the driver reports it. capability: 10 * major + minor, for example 90. multiprocessors: their number.
    shared_memory: bytes that one program may use. shared_memory_each: bytes of a multiprocessor. registers: 32-bit
    registers of a multiprocessor.
    """

    name: str = "cpu"
    capability: int = 0
    multiprocessors: int = 0
    shared_memory: int = 0
    shared_memory_each: int = 0
    registers: int = 0


def device_of(device: torch.device) -> Device:
    """Read the properties of `device` from its driver; without a driver they are those of a CPU."""
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
    )
