"""Products: the operations of a pass that multiply by weights, in the forms that its number of rows asks for."""

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.gate_up import GATE_UP
from ..kernels.matmul import MATMUL_GATE_UP, MATMUL_NORMED, MATMUL_RESIDUAL, matmul_partials
from ..kernels.matvec import MATVEC_NORMED, MATVEC_RESIDUAL, residual_partials
from ..kernels.op import Op
from .shapes import MatmulShape, StepShapes


@dataclass(frozen=True)
class Products:
    """normed: qkv and the LM head; residual: o_proj and down; gate_up. partials(N, shape): the partial sums of squares
    that residual leaves for N columns."""

    normed: Op
    residual: Op
    gate_up: Op
    partials: Callable[[int, object], int]


ONE_ROW = Products(MATVEC_NORMED, MATVEC_RESIDUAL, GATE_UP, residual_partials)  # of several, a grid of them
FEW_ROWS = Products(MATMUL_NORMED, MATMUL_RESIDUAL, MATMUL_GATE_UP, matmul_partials)


def products_of(shapes: StepShapes) -> Products:
    """The forms that launch with such shapes."""
    return FEW_ROWS if isinstance(shapes.qkv, MatmulShape) else ONE_ROW
