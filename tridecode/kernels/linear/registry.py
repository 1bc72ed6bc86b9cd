"""Stand-in for the ordered list of linear kernels."""

import torch

from ..device import Device
from .matmul import MATMUL_NORMED, MatmulConfig, matmul_partials
from .matmul_hopper import HOPPER_NORMED, HopperConfig, hopper_partials, multiplies
from .matmul_ring import RING_NORMED, RingConfig, ring_partials
from .matmul_tiles import TILES_NORMED, TilesConfig, tiles_partials
from .matmul_wide import WIDE_NORMED, WideConfig, wide_partials
from .matvec import MATVEC_NORMED, MatvecConfig, residual_partials
from .project import Case, LinearKernel


def _ring(case: Case, rows: int, device: Device) -> bool:
    form = case.packed
    reads = form and form.name in ("int4", "e4m3") and multiplies(form) and not form.zeros
    return bool(device.capability == 90 and rows == 1 and reads and case.n % 16 == 0)


def _hopper(case: Case, rows: int, device: Device) -> bool:
    reads = multiplies(case.packed) if case.packed else case.format != torch.float32
    return device.capability == 90 and rows <= 64 and reads


def _dense(case: Case, rows: int, device: Device) -> bool:
    return case.packed is None and rows <= 64


LINEAR_KERNELS = (
    LinearKernel("ring", RING_NORMED, RingConfig, _ring, ring_partials),
    LinearKernel("matvec", MATVEC_NORMED, MatvecConfig, _dense, residual_partials),
    LinearKernel("hopper", HOPPER_NORMED, HopperConfig, _hopper, hopper_partials),
    LinearKernel("matmul", MATMUL_NORMED, MatmulConfig, lambda case, rows, device: rows <= 64, matmul_partials),
    LinearKernel("wide", WIDE_NORMED, WideConfig, _dense, wide_partials),
    LinearKernel("tiles", TILES_NORMED, TilesConfig, _dense, tiles_partials),
    LinearKernel("torch", MATMUL_NORMED, type(None), lambda case, rows, device: True, lambda n, config: 1),
)


def kernel_named(name: str) -> LinearKernel:
    return next(kernel for kernel in LINEAR_KERNELS if kernel.name == name)
