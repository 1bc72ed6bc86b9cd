"""Launch shapes of products whose weights have fewer bits: all by tensor cores, from one row on.

What bounds them is how fast words become numbers, and one row leaves the tensor cores' other columns empty: so a pass
of one row is a pass of few. Layers whose weight is left as it is, in a role where others have fewer bits, are
multiplied by the same kernel.
"""

from dataclasses import replace

from ..blocks.weights import Weights
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_hopper import HopperConfig, multiplies
from ..kernels.linear.matmul_hopper_parts import COLUMNS_OF
from ..kernels.linear.matmul_ring import RingConfig
from ..kernels.linear.matmul_wide import MAX_SPLIT
from .choose import TUNED_FOR
from .shapes import StepShapes
from .tuned import Packing

ROLES = ("qkv", "o_proj", "gate_up", "down", "lm_head")
UNSHARED = ("gate_up", "lm_head")  # no programs share the columns of these
ROWS = (1, 8, 16, 32, 64)
# Of the GPU that these were measured on, and bytes of shared memory and registers of each.
MULTIPROCESSORS, SHARED, REGISTERS = 132, 228 * 1024, 2**16
PROGRAMS = 2 * MULTIPROCESSORS  # of four warps, that share the rows of a matrix: two a multiprocessor
FEWEST = 640  # columns of a program among those that share them, for more than 16 rows
MOST_X = 20  # tiles of activations that a warp keeps, 4 registers each
# Rows of a pass -> (format, rows, columns) of a weight -> the shape that was fastest on an H200.
TUNED: dict[int, dict[tuple[str, int, int], MatmulConfig]] = {
    1: {("int4", 2560, 4096): MatmulConfig(16, 4, 8, 8)},  # Qwen3-4B
    8: {("int4", 2560, 4096): MatmulConfig(16, 4, 8, 8), ("int4", 2560, 9728): MatmulConfig(16, 4, 10, 8, fetch=1)},
}

# Of one row on Hopper alone: (format, rows, columns) of a weight -> the shape with which the whole step was fastest on
# an H200, where that is not what ring_rule says.
RINGS = {
    ("int4", 6144, 2560): RingConfig(4, 5, 1, registers=168),  # Qwen3-4B
    ("int4", 19456, 2560): RingConfig(4, 5, 2, programs=PROGRAMS),
    ("e4m3", 6144, 2560): RingConfig(4, 10, 1, x_shared=True),
    ("int4", 4096, 14336): RingConfig(8, 2, 4, x_shared=True, copier=1, registers=80),  # Llama-3.1-8B
    ("int4", 5120, 3072): RingConfig(4, 6, 1, x_shared=True),  # Llama-3.2-3B
    ("int4", 4096, 1024): RingConfig(8, 1, 1, x_shared=True),  # Qwen3-0.6B
    ("int4", 1024, 2048): RingConfig(4, 4, 1, x_shared=True),
    ("int4", 6144, 1024): RingConfig(2, 4, 1),
    ("int4", 1024, 3072): RingConfig(4, 6, 1, x_shared=True),
    ("e4m3", 4096, 1024): RingConfig(4, 4, 1, x_shared=True),
    ("e4m3", 1024, 2048): RingConfig(8, 2, 2, x_shared=True, registers=64),
    ("e4m3", 6144, 1024): RingConfig(4, 2, 2, x_shared=True, registers=64),
    ("e4m3", 1024, 3072): RingConfig(8, 2, 3, x_shared=True, registers=64),
    ("e4m3", 151936, 1024): RingConfig(4, 4, 4, x_shared=True, programs=PROGRAMS, copier=1, registers=64),
}


def few_bits(
    shapes: dict[int, StepShapes], weights: Weights, capability: int, batch_invariant: bool = False
) -> dict[int, StepShapes]:
    """`shapes` by rows, changed where weights have fewer bits; batch_invariant: so that sums stay in one order."""
    formats = packed_linears(weights)
    if not formats:
        return shapes
    by_rows, choose = {}, invariant_bits_shape if batch_invariant else few_bits_shape
    for rows in shapes if batch_invariant else ROWS:
        base = shapes[min((at for at in shapes if at >= rows), default=max(shapes))]
        by_rows[rows] = replace(base, **{role: choose(linear, rows) for role, linear in formats.items()})
    if capability == TUNED_FOR:
        linears = {role: linears_of(weights, role) for role in ROLES}
        if not batch_invariant:
            by_rows[1] = replace(by_rows[1], **ring_shapes(linears))
        for rows in by_rows.keys() & set(ROWS[2:]):
            by_rows[rows] = replace(by_rows[rows], **hopper_shapes(linears, rows, batch_invariant))
    return by_rows


def linears_of(weights: Weights, role: str) -> list[Linear]:
    """Of all layers, or the LM head."""
    return [weights.lm_head] if role == "lm_head" else [getattr(layer, role) for layer in weights.layers]


def packed_linears(weights: Weights) -> dict[str, Linear]:
    """Of each role that has weights in fewer bits the first of these."""
    packed = {role: [linear for linear in linears_of(weights, role) if linear.packed] for role in ROLES}
    return {role: found[0] for role, found in packed.items() if found}


def ring_shapes(linears: dict[str, list[Linear]]) -> dict[str, RingConfig]:
    """Of those of the roles that go by the ring. e4m3 layers do so in all roles or in none: with more than 48 KiB of
    shared memory a kernel takes the L1 cache from those beside it, through which others have their tiles. The LM head
    goes along with layers."""
    hidden, layers = linears["qkv"][0].in_features, [role for role in ROLES if role != "lm_head"]
    found = {role: shape for role, alike in linears.items() if (shape := ring_shape(alike, role, hidden))}
    if not all(role in found for role in layers):
        found = {role: shape for role, shape in found.items() if role == "lm_head" or not has_e4m3(linears[role])}
    return found if any(role in found for role in layers) else {}


def hopper_shapes(
    linears: dict[str, list[Linear]], rows: int, batch_invariant: bool = False
) -> dict[str, HopperConfig]:
    """Those of the roles that go by wgmma. Of 16 rows all roles of the layers do, or none, see `ring_shapes`, and none
    of small models: those of Qwen3-0.6B took a fifth longer so, of Qwen3-4B a seventh less."""
    carried = {role: alike[0] for role, alike in linears.items() if hopper_carries(alike)}
    if batch_invariant:
        return {role: invariant_hopper_shape(linear, role, rows) for role, linear in carried.items()}
    large = linears["qkv"][0].in_features >= 2560
    if rows <= 16 and not (large and all(role in carried for role in ROLES if role != "lm_head")):
        return {}
    return {role: hopper_bits_shape(linear, role, rows) for role, linear in carried.items()}


def hopper_carries(linears: list[Linear]) -> bool:
    """Whether matmul_hopper multiplies all of these, by one launch shape."""
    alike = len({(linear.format, linear.out_features, linear.in_features) for linear in linears}) == 1
    return alike and all(linear.packed and multiplies(linear.packed) for linear in linears)


def hopper_bits_shape(linear: Linear, role: str, rows: int) -> HopperConfig:
    """What was fastest for Qwen3-4B, Llama-3.1-8B and, of more than 16 rows, Qwen3-0.6B, or nearly so: columns shared
    by as many programs as fit the GPU at once. Tiles of the activations, where they are the larger ones, are fewer."""
    columns, high, packed = COLUMNS_OF[linear.format], max(rows, 16), linear.packed
    scales = columns // packed.group * (2 if packed.zeros else 1)  # and zero points of a row that are in registers
    if rows > 32:
        shape = HopperConfig(64, columns, 4, 512 // columns, copier=1, registers=128)
    elif high * columns > 4096:
        shape = HopperConfig(64, columns, 3, 3, copier=1, registers=112)
    else:
        shape = HopperConfig(64, columns, 4, 4, copier=1, registers=112 if scales > 4 else 80)
    tiles, fit = -(-linear.out_features // shape.block_n), at_once(shape, high)
    if role == "gate_up":
        turns = of_one_turn(shape, high) if fit < tiles and rows <= 32 else ()
        shape = next((one for one in turns if at_once(one, high) * one.block_n >= linear.out_features), shape)
    elif role != "lm_head":
        least = FEWEST if rows > 16 else columns
        shape = replace(shape, split=max(min(fit // tiles, MAX_SPLIT, linear.in_features // least), 1))
    if rows > 32 and role != "lm_head" and tiles * shape.split <= MULTIPROCESSORS:  # each has one to itself
        return replace(shape, stages=768 // columns, x_stages=768 // columns)
    if rows <= 16 and columns == 256 and role not in UNSHARED:  # no more stages than a program has tiles
        stages = min(max(linear.in_features // columns // shape.split, 2), 4)
        return replace(shape, stages=stages, x_stages=stages)
    return shape


def of_one_turn(shape: HopperConfig, rows: int) -> tuple[HopperConfig, ...]:
    """Shapes of gate and up for at most 32 rows of which more programs fit the GPU, or fewer are needed."""
    if shape.block_k == 256:  # three a multiprocessor
        return (replace(shape, stages=4, x_stages=2, copier=0, registers=168),)
    if rows <= 16:  # four
        return (replace(shape, registers=64),)
    return (HopperConfig(128, shape.block_k, 4, 4, num_warps=8, copier=1, registers=80),)


def at_once(shape: HopperConfig, rows: int) -> int:
    """Programs of weights in fewer bits that run on the GPU at a time."""
    tiles = shape.stages * 128 * shape.block_n + shape.x_stages * 2 * shape.block_k * rows
    warps = shape.num_warps + 4 * shape.copier  # a warp that copies is given the registers of four
    return MULTIPROCESSORS * min(SHARED // (tiles + 2048), REGISTERS // (32 * warps * shape.registers))


def invariant_hopper_shape(linear: Linear, role: str, rows: int) -> HopperConfig:
    """The programs that share columns decide the order of sums: they are for any number of rows those of 64."""
    most = hopper_bits_shape(linear, role, 64)
    return most if rows > 32 else replace(hopper_bits_shape(linear, role, rows), split=most.split)


def has_e4m3(linears: list[Linear]) -> bool:
    return any(linear.format == "e4m3" for linear in linears)


def ring_shape(linears: list[Linear], role: str, hidden: int) -> RingConfig | None:
    """The shape with which matmul_ring multiplies all of these by one row, None where none was faster or the kernel
    does not carry them."""
    if not ring_carries(linears):
        return None
    one = linears[0]
    size = one.format, one.out_features, one.in_features
    return RINGS.get(size) or ring_rule(*size, role, hidden)


def ring_carries(linears: list[Linear]) -> bool:
    """Whether matmul_ring multiplies all of these: it has no zero points, and of each format one size of groups. Of
    e4m3 scales of groups would take registers that its shapes leave nobody."""
    if not hopper_carries(linears) or linears[0].out_features % 16:
        return False
    groups = {"int4": 128, "e4m3": linears[0].in_features}
    return all(one.packed.group == groups.get(one.format) and not one.packed.zeros for one in linears)


def packings(weights: Weights, capability: int) -> dict[str, Packing]:
    """Of the roles that have weights in fewer bits: what a table of launch shapes says of them."""
    found = {}
    for role, linear in packed_linears(weights).items():
        packed = linear.packed
        more = [word for word, there in (("zeros", packed.zeros), ("ordered", packed.ordered)) if there]
        group = "row" if packed.group == linear.in_features else packed.group
        kind = " ".join([f"{packed.name}/{group}", *more])
        ours, alike = capability == TUNED_FOR, linears_of(weights, role)
        found[role] = Packing(kind, ours and ring_carries(alike), ours and hopper_carries(alike))
    return found


def ring_rule(form: str, N: int, K: int, role: str, hidden: int) -> RingConfig | None:
    """What was fastest in the steps of models with a hidden size from 2,048 (Qwen3-1.7B) to 4,096 (Llama-3.1-8B,
    Qwen3-8B), or nearly so. None where a role was no faster by the ring there, and for other sizes."""
    if not 2048 <= hidden <= 4096 or K > 14336:
        return None
    row = -(-K // (512 if form == "int4" else 256))  # tiles that each of four warps has of one
    if form == "int4":
        match role:
            case "gate_up":
                wide = hidden > 2560
                return RingConfig(4, row, 1 if wide else 2, x_shared=wide, programs=PROGRAMS)
            case "qkv" if hidden <= 2560:
                return RingConfig(4, row, 1, registers=168)
            case "o_proj" if 2560 <= hidden and K <= 4096:
                return RingConfig(8, 1, 4, x_shared=True, registers=96)
        return None
    if role == "lm_head" or (role == "gate_up" and hidden >= 2560):
        return RingConfig(4, 4, 5, x_shared=True, programs=PROGRAMS, copier=1, registers=64)
    if hidden < 2560:
        return None
    if role == "qkv":
        return RingConfig(4, row, 1, registers=168)
    if role == "o_proj" and N < 4096:
        return RingConfig(8, -(-row // 2), 1, x_shared=True) if K <= 4096 else None
    return RingConfig(8, 2, 5 if role == "down" else 3, x_shared=True, copier=1, registers=64)


def few_bits_shape(linear, rows: int) -> MatmulConfig:
    """The tuned shape; or programs that share the rows of the weights; or few warps, since each has the work before and
    after its sums to do, but enough for all multiprocessors. Programs of 16 rows of the weights have their scales where
    they are wanted."""
    N, K = linear.out_features, linear.in_features
    blocks = -(-N // 16)
    if found := TUNED.get(rows, {}).get((linear.format, N, K)):
        return found
    if rows > 16:  # sums of so many rows leave few registers for what is in flight
        return MatmulConfig(16, 8 if rows > 32 else 4, 1, 1)
    if rows > 8:  # four programs a multiprocessor, if there are so many
        return MatmulConfig(16, 4, 10, 8, fetch=1) if blocks < PROGRAMS else MatmulConfig(16, 4, 4, 4, 128, fetch=1)
    if found := programs_shape(linear):
        return found
    tiles = K // linear.packed.tile  # 16 bytes of a row for each of four lanes
    warps = 2 if K <= 3072 else 4 if K <= 8192 else 8
    while warps < 8 and blocks * warps < 4 * PROGRAMS and tiles > 2 * warps:
        warps *= 2
    ahead = 10 if warps < 8 else 4 if linear.format == "int4" else 8  # scales of groups are in flight too
    ahead = min(ahead, 6) if linear.format == "int8" else ahead
    # Two of eight warps fit a multiprocessor: few rows of weights are all multiplied at a time.
    return MatmulConfig(16, warps, ahead, 8, registers=128 if warps == 8 else 0)


def programs_shape(linear) -> MatmulConfig | None:
    """Of up to 8 rows, for matrices with rows enough that each program takes several blocks, by as few warps as keep
    the activations in registers. None for others."""
    N, K = linear.out_features, linear.in_features
    tile = linear.packed.tile
    # Eight leave too few registers.
    warps = next((warps for warps in (2, 4) if -(-K // (tile * warps)) * tile // 32 <= MOST_X), 0)
    programs = PROGRAMS * 4 // max(warps, 1)
    if not warps or linear.format == "int8" or -(-N // 16) < 2 * programs:
        return None
    return MatmulConfig(16, warps, 10, MOST_X, programs=programs)


def invariant_bits_shape(linear, rows: int) -> MatmulConfig:
    """The warps decide the order of the sums: as many for any number of rows, in tiles of as many that the sums of
    squares are added alike."""
    ahead = 4 if rows <= 16 else 2 if rows <= 32 else 1
    return MatmulConfig(16, 8, ahead, ahead, registers=128 if rows <= 16 else 0, block_m=16)
