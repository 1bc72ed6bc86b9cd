"""Products: the operations of a pass that multiply by weights, in the form that a launch shape is made for."""

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.linear.gate_up import GATE_UP
from ..kernels.linear.matmul import MATMUL_GATE_UP, MATMUL_NORMED, MATMUL_RESIDUAL, MatmulConfig, matmul_partials
from ..kernels.linear.matmul_hopper import HOPPER_GATE_UP, HOPPER_NORMED, HOPPER_RESIDUAL, HopperConfig, hopper_partials
from ..kernels.linear.matmul_ring import RING_GATE_UP, RING_NORMED, RING_RESIDUAL, RingConfig, ring_partials
from ..kernels.linear.matmul_tiles import TILES_GATE_UP, TILES_NORMED, TILES_RESIDUAL, TilesConfig, tiles_partials
from ..kernels.linear.matmul_wide import WIDE_GATE_UP, WIDE_NORMED, WIDE_RESIDUAL, WideConfig, wide_partials
from ..kernels.linear.matvec import MATVEC_NORMED, MATVEC_RESIDUAL, MatvecConfig, residual_partials
from ..kernels.op import Op
from .shapes import Shape


@dataclass(frozen=True)
class Products:
    """normed: qkv and the LM head; residual: o_proj and down; gate_up. partials(N, shape): the partial sums of squares
    that residual leaves for N columns."""

    normed: Op
    residual: Op
    gate_up: Op
    partials: Callable[[int, Shape], int]


FORMS = {
    MatvecConfig: Products(MATVEC_NORMED, MATVEC_RESIDUAL, GATE_UP, residual_partials),
    MatmulConfig: Products(MATMUL_NORMED, MATMUL_RESIDUAL, MATMUL_GATE_UP, matmul_partials),
    TilesConfig: Products(TILES_NORMED, TILES_RESIDUAL, TILES_GATE_UP, tiles_partials),
    WideConfig: Products(WIDE_NORMED, WIDE_RESIDUAL, WIDE_GATE_UP, wide_partials),
    HopperConfig: Products(HOPPER_NORMED, HOPPER_RESIDUAL, HOPPER_GATE_UP, hopper_partials),
    RingConfig: Products(RING_NORMED, RING_RESIDUAL, RING_GATE_UP, ring_partials),
}


def products(shape: Shape) -> Products:
    return FORMS[type(shape)]
