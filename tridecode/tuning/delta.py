"""Launch configs of gated delta net layers."""

from ..kernels.delta.delta_chunks import DeltaChunksConfig
from ..kernels.delta.delta_decode import DeltaConfig
from ..kernels.device import Device
from .configs import HOPPER, PROGRAMS


def delta_config(queries: int) -> DeltaConfig:
    """Return the launch config of a decode pass with `queries` rows of each request."""
    return DeltaConfig(queries, batch=queries if queries <= 4 else 1)  # more rows at once spill


def delta_prompt_configs(gpu: Device) -> tuple[DeltaChunksConfig, DeltaChunksConfig]:
    """Return the launch configs of delta_chunks and delta_scan."""
    programs = gpu.multiprocessors or PROGRAMS
    warps = 4 if gpu.capability == HOPPER else 8  # With 4 warps, other GPUs spill more.
    return DeltaChunksConfig(2 * programs, warps), DeltaChunksConfig(programs, num_warps=8)
