"""Launch shapes of products whose weights have fewer bits: all by tensor cores, from one row on.

What bounds them is how fast words become numbers, and one row leaves the tensor cores' other columns empty: so a pass
of one row is a pass of few. Layers whose weight is left as it is, in a role where others have fewer bits, are
multiplied by the same kernel.
"""

from dataclasses import replace

from ..model.weights import Weights
from .shapes import MatmulShape, RingShape, StepShapes

ROLES = ("qkv", "o_proj", "gate_up", "down", "lm_head")
ROWS = (1, 8, 16, 32, 64)
PROGRAMS = 2 * 132  # of four warps, that share the rows of a matrix: two a multiprocessor
MOST_X = 20  # tiles of activations that a warp keeps, 4 registers each
# Rows of a pass -> (format, rows, columns) of a weight -> the shape that was fastest on an H200.
TUNED: dict[int, dict[tuple[str, int, int], MatmulShape]] = {
    1: {("int4", 2560, 4096): MatmulShape(16, 4, 8, 8)},  # Qwen3-4B
    8: {("int4", 2560, 4096): MatmulShape(16, 4, 8, 8), ("int4", 2560, 9728): MatmulShape(16, 4, 10, 8, fetch=1)},
}


def few_bits(
    shapes: dict[int, StepShapes], weights: Weights, batch_invariant: bool = False
) -> dict[int, StepShapes]:
    """`shapes` by rows, changed where weights have fewer bits; batch_invariant: so that sums stay in one order."""
    formats = {role: linear for role in ROLES if (linear := _packed(weights, role)) is not None}
    if not formats:
        return shapes
    by_rows, choose = {}, invariant_shape if batch_invariant else few_bits_shape
    for rows in shapes if batch_invariant else ROWS:
        base = shapes[min((at for at in shapes if at >= rows), default=max(shapes))]
        by_rows[rows] = replace(base, **{role: choose(linear, rows) for role, linear in formats.items()})
    return by_rows


def _packed(weights: Weights, role: str):
    linears = [weights.lm_head] if role == "lm_head" else [getattr(layer, role) for layer in weights.layers]
    return next((linear for linear in linears if linear.packed is not None), None)


def few_bits_shape(linear, rows: int) -> MatmulShape:
    """The tuned shape; or programs that share the rows of the weights; or few warps, since each has the work before and
    after its sums to do, but enough for all multiprocessors. Programs of 16 rows of the weights have their scales where
    they are wanted."""
    N, K = linear.out_features, linear.in_features
    blocks = -(-N // 16)
    if found := TUNED.get(rows, {}).get((linear.format, N, K)):
        return found
    if rows > 16:  # sums of so many rows leave few registers for what is in flight
        return MatmulShape(16, 8 if rows > 32 else 4, 1, 1)
    if rows > 8:  # four programs a multiprocessor, if there are so many
        return MatmulShape(16, 4, 10, 8, fetch=1) if blocks < PROGRAMS else MatmulShape(16, 4, 4, 4, 128, fetch=1)
    if found := programs_shape(linear):
        return found
    tiles = K // linear.packed.tile  # 16 bytes of a row for each of four lanes
    warps = 2 if K <= 3072 else 4 if K <= 8192 else 8
    while warps < 8 and blocks * warps < 4 * PROGRAMS and tiles > 2 * warps:
        warps *= 2
    ahead = 10 if warps < 8 else 4 if linear.format == "int4" else 8  # scales of groups are in flight too
    ahead = min(ahead, 6) if linear.format == "int8" else ahead
    # Two of eight warps fit a multiprocessor: few rows of weights are all multiplied at a time.
    return MatmulShape(16, warps, ahead, 8, registers=128 if warps == 8 else 0)


def programs_shape(linear) -> MatmulShape | None:
    """Of up to 8 rows, for matrices with rows enough that each program takes several blocks, by as few warps as keep
    the activations in registers. None for others."""
    N, K = linear.out_features, linear.in_features
    tile = linear.packed.tile
    # Eight leave too few registers.
    warps = next((warps for warps in (2, 4) if -(-K // (tile * warps)) * tile // 32 <= MOST_X), 0)
    programs = PROGRAMS * 4 // max(warps, 1)
    if not warps or linear.format == "int8" or -(-N // 16) < 2 * programs:
        return None
    return MatmulShape(16, warps, 10, MOST_X, programs=programs)


def ring_shape(linear, rows: int) -> RingShape | None:
    """Of up to 16 rows on Hopper, whose weights pass through a ring: as many programs as there are multiprocessors for
    matrices of several blocks for each, else one a block. None for what that kernel does not carry."""
    N, K, packed = linear.out_features, linear.in_features, linear.packed
    tile = 32 if packed is None else packed.tile
    if rows > 16 or N % 16 or K % (2 * tile):
        return None
    if packed is not None:
        whole = packed.group == K or packed.group % tile == 0
        if packed.zeros or packed.ordered or packed.name == "int8" or not whole:
            return None
    several = N // 16 >= PROGRAMS
    warps = 4 if several else 8
    tiles = -(-K // (warps * tile))  # that each warp has of a row
    stages = min(tiles, 40 // warps)
    copier, ahead = several or tiles > stages, 0 if rows == 1 else 2 if rows <= 8 else 1
    return RingShape(warps, 1, stages, ahead, PROGRAMS // 2 * several, int(copier), 96 if copier and several else 128)


def invariant_shape(linear, rows: int) -> MatmulShape:
    """The warps decide the order of the sums: as many for any number of rows, in tiles of as many that the sums of
    squares are added alike."""
    ahead = 4 if rows <= 16 else 2 if rows <= 32 else 1
    return MatmulShape(16, 8, ahead, ahead, registers=128 if rows <= 16 else 0, block_m=16)
