"""Products: the operations of a pass that multiply by weights, in the form that a launch shape is made for."""

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.linear.gate_up import GATE_UP
from ..kernels.linear.matmul import MATMUL_GATE_UP, MATMUL_NORMED, MATMUL_RESIDUAL, matmul_partials
from ..kernels.linear.matmul_hopper import HOPPER_GATE_UP, HOPPER_NORMED, HOPPER_RESIDUAL, hopper_partials
from ..kernels.linear.matmul_ring import RING_GATE_UP, RING_NORMED, RING_RESIDUAL, ring_partials
from ..kernels.linear.matmul_tiles import TILES_GATE_UP, TILES_NORMED, TILES_RESIDUAL, tiles_partials
from ..kernels.linear.matmul_wide import WIDE_GATE_UP, WIDE_NORMED, WIDE_RESIDUAL, wide_partials
from ..kernels.linear.matvec import MATVEC_NORMED, MATVEC_RESIDUAL, residual_partials
from ..kernels.op import Op
from .shapes import HopperShape, MatmulShape, MatvecShape, RingShape, Shape, TilesShape, WideShape


@dataclass(frozen=True)
class Products:
    """normed: qkv and the LM head; residual: o_proj and down; gate_up. partials(N, shape): the partial sums of squares
    that residual leaves for N columns."""

    normed: Op
    residual: Op
    gate_up: Op
    partials: Callable[[int, Shape], int]


FORMS = {
    MatvecShape: Products(MATVEC_NORMED, MATVEC_RESIDUAL, GATE_UP, residual_partials),
    MatmulShape: Products(MATMUL_NORMED, MATMUL_RESIDUAL, MATMUL_GATE_UP, matmul_partials),
    TilesShape: Products(TILES_NORMED, TILES_RESIDUAL, TILES_GATE_UP, tiles_partials),
    WideShape: Products(WIDE_NORMED, WIDE_RESIDUAL, WIDE_GATE_UP, wide_partials),
    HopperShape: Products(HOPPER_NORMED, HOPPER_RESIDUAL, HOPPER_GATE_UP, hopper_partials),
    RingShape: Products(RING_NORMED, RING_RESIDUAL, RING_GATE_UP, ring_partials),
}


def products(shape: Shape) -> Products:
    return FORMS[type(shape)]
