"""Launch shapes of products whose weights have fewer bits: all by tensor cores, from one row on.

What bounds them is how fast words become numbers, and one row leaves the tensor cores' other columns empty: so a pass
of one row is a pass of few. Layers whose weight is left as it is, in a role where others have fewer bits, are
multiplied by the same kernel.
"""

from dataclasses import replace

from ..model.weights import Weights
from .shapes import MatmulShape, StepShapes

ROLES = ("qkv", "o_proj", "gate_up", "down", "lm_head")
ROWS = (1, 8, 16, 32, 64)
# Rows of a pass -> (format, rows, columns) of a weight -> the shape that was fastest in the whole step.
TUNED: dict[int, dict[tuple[str, int, int], MatmulShape]] = {rows: {} for rows in ROWS}


def few_bits(shapes: dict[int, StepShapes], weights: Weights) -> dict[int, StepShapes]:
    """`shapes` by rows, changed where weights have fewer bits."""
    formats = {role: linear for role in ROLES if (linear := _packed(weights, role)) is not None}
    if not formats:
        return shapes
    by_rows = {}
    for rows in ROWS:
        base = shapes[min((at for at in shapes if at >= rows), default=max(shapes))]
        found = {role: few_bits_shape(linear, rows) for role, linear in formats.items()}
        by_rows[rows] = replace(base, **found)
    return by_rows


def _packed(weights: Weights, role: str):
    linears = [weights.lm_head] if role == "lm_head" else [getattr(layer, role) for layer in weights.layers]
    return next((linear for linear in linears if linear.packed is not None), None)


def few_bits_shape(linear, rows: int) -> MatmulShape:
    """The tuned shape, or as many warps as have two tiles or more of a row each; the more rows of activations, the more
    of the weights a program takes, since it reads all of them."""
    N, K = linear.out_features, linear.in_features
    if found := TUNED[rows].get((linear.format, N, K)):
        return found
    tile = linear.packed.tile
    warps = 8
    while warps > 2 and warps * tile * 2 > K:
        warps //= 2
    block_n = 16 if rows <= 8 and N < 8192 else 32 if rows <= 16 else 64
    warps = min(warps, 4) if block_n > 16 else warps
    ahead = {16: 8, 32: 4, 64: 2}[block_n]
    return MatmulShape(block_n, warps, ahead, 8 if rows <= 8 else 4 if rows <= 16 else 2)
