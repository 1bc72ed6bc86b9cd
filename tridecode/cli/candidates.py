"""What `tridecode tune` tries: launch shapes for each part of a step, as the GPU's registers and memory hold them."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product, zip_longest
from types import MappingProxyType

from ..blocks.weights import Weights
from ..kernels.attention.attention import AttentionConfig
from ..kernels.attention.attention_rows import AttentionRowsConfig
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_hopper import HopperConfig
from ..kernels.linear.matmul_hopper_parts import COLUMNS_OF
from ..kernels.linear.matmul_ring import RingConfig
from ..kernels.linear.matmul_tiles import TilesConfig
from ..kernels.linear.matmul_wide import MAX_SPLIT, WideConfig
from ..kernels.linear.matvec import MatvecConfig
from ..kernels.linear.weight import LoadedLinear
from ..models.config import ModelConfig
from ..tuning.few_bits import UNSHARED, at_once, few_bits_shape, hopper_bits_shape, packed_linears
from ..tuning.shapes import StepShapes
from ..tuning.tuned import VALUES, Packing

# The largest parts of the step first: the time may not be enough for all.
ORDER = ("gate_up", "down", "qkv", "o_proj", "attention", "lm_head")
# Fields tried with each other.
GROUPS = (("block_n", "num_warps"), ("programs",), ("block_t", "num_warps"), ("ahead",), ("splits",), ("registers",))
SHARES = (1, 2, 3, 4, 6, 8)  # programs of a multiprocessor that share the rows of a matrix, beside one a few rows
# Registers of a thread: for weights at least (with more than one warp) and at most, and for all else. A thread with few
# weights has few bytes in flight; one with many makes room for few programs.
FEWEST, MOST, OTHERS = 16, 128, 40
BOUNDS = (0, 40, 56, 64, 80, 96, 128)  # tried where a shape bounds its registers; 0 is no bound
# Of products of several rows: tiles in flight of weights and activations, and stages of tiles in shared memory.
IN_FLIGHT = ((4, 4), (8, 4), (8, 8), (12, 4), (12, 8), (16, 4), (5, 4))
# Columns of a wide tile, tiles in flight of weights and activations.
MOST_TILES = 40  # of a program, which are unrolled: beyond, compiling takes a minute
WIDE = ((128, 2, 1), (128, 2, 2), (128, 3, 1), (128, 3, 2), (128, 4, 3), (64, 3, 1), (64, 4, 2), (64, 6, 3))
STAGES = (2, 3, 4, 6, 8)
# Of the kernel for Hopper: rows and columns of a tile, tiles in flight of weights and activations.
HOPPER = ((64, 128, 4, 4), (64, 128, 4, 2), (64, 64, 8, 4), (128, 64, 4, 4), (128, 64, 5, 3))
HOPPER_ALONE = ((128, 128, 5, 5), (128, 64, 8, 6))  # on a multiprocessor, program after program
# Of weights in fewer bits: block_n, num_warps, ahead, x_ahead, registers, programs of a multiprocessor, fetch; first
# what is hoped most of and differs most.
ALL = 1000  # tiles
PACKED_SHARED = (
    (16, 4, 10, ALL, 0, 2, 0), (16, 4, 10, ALL, 0, 2, 2), (16, 4, 3, 4, 128, 4, 2), (16, 4, 4, 4, 128, 0, 1),
    (32, 4, 10, ALL, 0, 2, 0), (16, 4, 4, 4, 168, 3, 2), (16, 8, 3, ALL, 0, 1, 0), (16, 4, 10, 8, 0, 0, 1),
    (32, 4, 10, ALL, 0, 2, 2), (16, 4, 5, 8, 128, 4, 0), (16, 8, 10, ALL, 0, 1, 2), (32, 4, 3, 4, 128, 4, 2),
    (16, 4, 6, ALL, 0, 2, 0), (32, 8, 3, ALL, 0, 1, 2), (16, 2, 10, ALL, 0, 4, 0), (16, 4, 5, 4, 128, 4, 0),
)  # fmt: skip
PACKED_EACH = (
    (16, 4, 10, 8, 0, 0, 1), (16, 4, 8, 8, 0, 0, 0), (16, 8, 4, 8, 128, 0, 1), (16, 8, 3, 4, 128, 0, 1),
    (16, 16, 3, 2, 64, 0, 1), (16, 8, 10, 8, 0, 0, 1), (32, 8, 3, 4, 0, 0, 1), (16, 4, 4, 4, 128, 0, 1),
    (16, 8, 4, 4, 128, 0, 0), (64, 8, 2, 2, 0, 0, 1), (16, 8, 3, 4, 80, 0, 1), (32, 4, 4, 4, 0, 0, 1),
    (16, 8, 2, 8, 128, 0, 1), (16, 16, 3, 4, 128, 0, 0), (64, 4, 2, 4, 0, 0, 1), (16, 2, 10, 8, 0, 0, 0),
    (16, 2, 5, 8, 128, 0, 1), (32, 8, 5, 4, 0, 0, 0), (16, 8, 8, 16, 0, 0, 1), (32, 16, 3, 4, 128, 0, 1),
)  # fmt: skip
PACKED_MANY = (  # of more than 16 rows, whose sums leave few registers
    (16, 8, 1, 1, 0, 0, 0), (16, 4, 1, 1, 0, 0, 0), (16, 8, 2, 1, 0, 0, 0), (16, 4, 2, 1, 0, 0, 0),
    (16, 8, 2, 2, 0, 0, 0), (16, 4, 2, 2, 0, 0, 0), (16, 8, 3, 1, 0, 0, 1), (32, 8, 1, 1, 0, 0, 0),
)  # fmt: skip
MOST_PACKED = 24  # of these for a matrix
# And by wgmma: rows of the weights, tiles in flight of these and of the activations; of so many rows: whether a warp
# copies, registers.
HOPPER_PACKED = ((64, 4, 4), (64, 4, 2), (64, 3, 3), (64, 2, 2), (64, 6, 4), (128, 4, 4), (128, 4, 2))
HOPPER_WAYS = {
    16: ((1, 80), (1, 64), (0, 168), (0, 128)),
    32: ((1, 112), (1, 80), (0, 168), (0, 128)),
    64: ((1, 128), (1, 112), (0, 168)),
}
# And by the ring: warps, tiles and stages of one program for each 16 rows of the weights, and of programs that share
# them; 0 tiles are a whole row.
RING_EACH = ((4, 0, 1), (8, 0, 1), (2, 0, 1), (8, 1, 4), (8, 2, 3), (8, 2, 4), (8, 2, 5), (8, 4, 2))
RING_SHARED = ((4, 0, 1), (4, 0, 2), (4, 4, 5), (4, 4, 4), (8, 4, 3))
RING_X, RING_TILES = 128, 20  # registers of a thread for the activations at most, and tiles that are unrolled


def candidates(
    config: ModelConfig,
    itemsize: int,
    shapes: StepShapes,
    multiprocessors: int,
    packed: Mapping[str, list] = MappingProxyType({}),
) -> list[tuple[str, list]]:
    """What to try for each part of the step, but for tiles of weights that cannot be the best. packed: that of the
    parts whose weights have fewer bits."""
    columns = {"o_proj": config.q_size, "down": config.intermediate_size}
    found = []
    for op in ORDER:
        if op in packed:
            found.append((op, packed[op]))
            continue
        values_of = VALUES[type(getattr(shapes, op))]
        names = set(values_of)
        row = itemsize * columns.get(op, config.hidden_size) * (2 if op == "gate_up" else 1)
        for group in GROUPS:
            if group == ("programs",) and "programs" in names:
                shared = [multiprocessors * share for share in SHARES]
                found.append((op, [{"programs": programs, "registers": 0} for programs in (0, *shared)]))
            elif set(group) <= names:
                values = product(*(BOUNDS if name == "registers" else values_of[name] for name in group))
                tried = [dict(zip(group, combination)) for combination in values]
                if "block_n" in group:
                    shared = getattr(getattr(shapes, op), "programs", 0) > 0
                    tried = with_registers(tried, row, "registers" in names, shared)
                elif "block_t" in group and "registers" in names:
                    tried = [tile | {"registers": 0} for tile in tried]
                found.append((op, tried))
    return found


def candidates_of_several(
    config: ModelConfig, rows: int, shapes: StepShapes, gpu, packed: Mapping[str, list] = MappingProxyType({})
) -> list[tuple[str, list]]:
    """What to try for each part of a step of `rows` rows: what registers, or the GPU's shared memory, hold; packed: as
    in candidates."""
    high = max(1 << (rows - 1).bit_length(), 8)  # rows of a tile
    columns = {"o_proj": config.q_size, "down": config.intermediate_size}
    found = []
    for op in ORDER:
        if op in packed:
            found.append((op, packed[op]))
        elif isinstance(shapes.attention, AttentionConfig) and op == "attention":
            tiles = product((32, 64, 128), (4, 8))
            found.append((op, [{"block_t": t, "num_warps": warps, "registers": 0} for t, warps in tiles]))
            found.append((op, [{"ahead": ahead} for ahead in VALUES[AttentionConfig]["ahead"]]))
            found.append((op, [{"few": few} for few in (1, 2, 3, 4, 6, 8, 12, 16)]))
            found.append((op, [{"turns": turns} for turns in (8, 16, 32, 64)]))
        elif op == "attention":
            programs = [gpu.multi_processor_count * share for share in (1, 2, 3, 4)]
            tiles = product(VALUES[AttentionRowsConfig]["block_t"], VALUES[AttentionRowsConfig]["num_warps"])
            found.append((op, [{"block_t": t, "num_warps": warps, "registers": 0} for t, warps in tiles]))
            found.append((op, [{"stages": stages} for stages in VALUES[AttentionRowsConfig]["stages"]]))
            found.append((op, [{"programs": count} for count in programs]))
            found.append((op, [{"least": least} for least in (1, 2, 4, 8, 16)]))
        elif isinstance(getattr(shapes, op), MatvecConfig):
            continue  # of a dtype whose weights are read once a row: as for one
        else:
            whole = columns.get(op, config.hidden_size)
            wide = wide_of(high, whole, op != "lm_head")
            hopper = hopper_of(high, whole, op, gpu) if gpu.major == 9 and high > 16 else []
            tiles = tiles_of(high, whole, op == "gate_up", gpu)
            found.append((op, [*hopper, *matmuls(high, whole, gpu), *tiles, *wide]))
    return found


def matmuls(high: int, K: int, gpu) -> list[MatmulConfig]:
    """Shapes for K columns whose tiles and sums fit in 200 registers, and the sums of all warps in 48 KiB; and of those
    that keep all activations in registers, the ones whose programs share the rows of the weights."""
    found = []
    for block_n, warps, (ahead, x_ahead) in product((16, 32), (2, 4, 8), (*IN_FLIGHT, (6, 32), (10, 32))):
        tiles = -(-K // (32 * warps))
        registers = block_n * min(ahead, tiles) // 2 + high * min(x_ahead, tiles) // 2 + block_n * high // 32
        if registers <= 200 and 4 * warps * block_n * high <= 48 * 1024 and tiles >= 4:
            kept = x_ahead >= tiles
            shares = [gpu.multi_processor_count * share for share in (1, 2, 3)] if kept else [0]
            found += [MatmulConfig(block_n, warps, ahead, x_ahead, programs=programs) for programs in shares]
    return found


def tiles_of(high: int, K: int, gated: bool, gpu) -> list[TilesConfig]:
    found = []
    for block_n, block_k, stages in product((16, 32, 64), (64, 128, 256), STAGES):
        for block_m in sorted({max(high, 16), 64}):
            size = 2 * stages * block_k * (block_m + block_n * (2 if gated else 1))
            if size <= gpu.shared_memory_per_block_optin - 1024 and stages * block_k <= K:
                found.append(TilesConfig(block_n, block_k, stages, block_m=block_m))
    return found


def wide_of(high: int, K: int, shared: bool) -> list[WideConfig]:
    """Shapes whose tiles and sums fit in 240 registers, bounded where that leaves room for one more program; `shared`
    where programs may share the columns."""
    found = []
    for warps, (block_k, ahead, x_ahead), split in product((4, 8), WIDE, (1, 2, 3, 4, 6, 8) if shared else (1,)):
        of_x = high * block_k // (64 * warps)
        registers = ahead * block_k // 4 + (x_ahead + 1) * of_x + high // 2 + 32
        bound = next((most for most in ((128, 168) if warps == 4 else (128,)) if registers <= most), 0)
        if registers <= 240 and ahead * block_k * split <= K <= MOST_TILES * block_k * split:
            found.append(WideConfig(16 * warps, block_k, ahead, x_ahead, warps, split, bound))
    return found


def hopper_of(high: int, K: int, op: str, gpu) -> list[HopperConfig]:
    """Shapes of which two programs fit a multiprocessor, that share the columns where there are few outputs; and of one
    each, for what has more rows than all of them take at a time."""
    memory, found = gpu.shared_memory_per_block_optin, []
    ways = [(split, 0) for split in (1, 2, 3, 4)] if op in ("qkv", "o_proj", "down") else [(1, 0), (1, 1)]
    for tile, (split, lag) in product(HOPPER, ways):
        block_n, block_k, stages, _ = tile
        if 2 * (hopper_bytes(*tile, high) + 2048) <= memory and stages * block_k * split <= K:
            found.append(HopperConfig(*tile, split, num_warps=8 if high > 32 else 4, lag=lag))
            warps = 8 if block_n * high > 64 * 64 else 4
            found.append(HopperConfig(*tile, split, num_warps=warps, lag=lag, copier=1, registers=80))
    for tile in HOPPER_ALONE if op == "lm_head" else ():
        if hopper_bytes(*tile, high) + 2048 <= memory:
            warps, programs = 8 if high > 32 else 4, gpu.multi_processor_count
            found.append(HopperConfig(*tile, num_warps=warps, programs=programs, copier=1, registers=88))
    return found


def hopper_bytes(block_n: int, block_k: int, stages: int, x_stages: int, high: int, row: int = 0) -> int:
    """Of shared memory for tiles; row: bytes of a row of one of the weights, if it is not of 16 bits."""
    return stages * block_n * (row or 2 * block_k) + 2 * block_k * x_stages * high


def with_registers(tiles: list[dict], row: int, bounded: bool, shared: bool = False) -> list[dict]:
    """The tiles of rows of `row` bytes that a program can hold and is kept busy by; with the registers that it needs
    for them where a shape bounds these. Programs that share the rows hold the next ones too: no bound for them."""
    found = []
    for tile in tiles:
        weights = -(-tile["block_n"] * row // (128 * tile["num_warps"]))
        if weights <= MOST and (weights >= FEWEST or tile["num_warps"] == 1):
            registers = 0 if shared else -(-weights // 8) * 8 + OTHERS
            found.append(tile | ({"registers": registers} if bounded else {}))
    return found


def packed_candidates(weights: Weights, packed: Mapping[str, Packing], rows: int, gpu) -> dict[str, list]:
    """What to try for each part of a step whose weights have fewer bits."""
    found, linears = {}, packed_linears(weights)
    for op, packing in packed.items():
        linear = linears[op]
        found[op] = packed_products(linear, rows, few_bits_shape(linear, rows), gpu.multi_processor_count)
        if packing.ring and rows == 1:
            found[op] += ring_products(linear, gpu)
        elif packing.hopper and rows > 8:
            found[op] = hopper_packed(linear, rows, op, gpu) + found[op]
    return found


def hopper_packed(linear: LoadedLinear, rows: int, op: str, gpu) -> list[HopperConfig]:
    """Shapes for weights in fewer bits whose tiles fit in shared memory, the one in use first."""
    columns, high = COLUMNS_OF[linear.format], max(1 << (rows - 1).bit_length(), 16)
    found = [hopper_bits_shape(linear, op, rows)]
    for (block_n, stages, x_stages), (copier, registers) in product(HOPPER_PACKED, HOPPER_WAYS[high]):
        if hopper_bytes(block_n, columns, stages, x_stages, high, 128) + 2048 > gpu.shared_memory_per_block_optin:
            continue
        how = dict(num_warps=block_n // 16, copier=copier, registers=registers)
        shape = HopperConfig(block_n, columns, stages, x_stages, **how)
        fit = at_once(shape, high) // -(-linear.out_features // block_n)
        most = 1 if op in UNSHARED else max(min(fit, MAX_SPLIT, linear.in_features // columns), 1)
        found += [replace(shape, split=split) for split in (most, most - 1, most // 2) if split > 0]
    return list(dict.fromkeys(found))


def packed_products(linear: LoadedLinear, rows: int, used: MatmulConfig, multiprocessors: int = 132) -> list[MatmulConfig]:
    """Those for weights in fewer bits that registers may hold, the shape in use first, then by what is hoped of them;
    for those in 16 bits too."""
    N, K, packed = linear.out_features, linear.in_features, linear.packed
    parts, found = 1 if packed is None else packed.tile // 32, [used]
    in_turn = [values for pair in zip_longest(PACKED_EACH, PACKED_SHARED) for values in pair if values]
    lists = PACKED_EACH + PACKED_SHARED if K > 2560 else PACKED_SHARED + PACKED_EACH if N > 16384 else in_turn
    for values in PACKED_MANY if rows > 16 else lists:
        wanted = MatmulConfig(*values[:5], 8, values[5] * multiprocessors, values[6])
        tiles = -(-K // (32 * parts * wanted.num_warps))
        shape = replace(wanted, ahead=min(wanted.ahead, tiles), x_ahead=min(wanted.x_ahead, tiles * parts))
        # Registers of a thread: tiles of the weights and of the activations, sums, and all else.
        needed = shape.block_n // 2 * shape.ahead + max(rows, 8) // 2 * shape.x_ahead
        sums, kept = shape.block_n * max(rows, 8) // 32, shape.x_ahead == tiles * parts and shape.programs
        needed += 2 * sums + 32 + (sums * tiles if kept and linear.format == "int4" else 0)
        most = shape.registers or min(65536 // (32 * shape.num_warps), 255)
        takes_turns = not shape.programs or shape.programs < shape.grid(N)[0]
        wide = shape.block_n == 16 or rows > 8 or N > 16384
        if needed <= most and takes_turns and wide and (packed is not None or not shape.fetch) and shape not in found:
            found.append(shape)
    return found[:MOST_PACKED]


def ring_products(linear: LoadedLinear, gpu) -> list[RingConfig]:
    """Shapes of the ring whose stages, and activations where they are there too, fit in shared memory; else these in
    registers. A warp that copies is for rings that are filled again."""
    K, tile, found = linear.in_features, linear.packed.tile, []
    shared = 2 * gpu.multi_processor_count
    ways = [(0, RING_EACH)] + ([(shared, RING_SHARED)] if linear.out_features // 16 > shared else [])
    for programs, forms in ways:
        for warps, tiles, stages in forms:
            row = -(-K // (tile * warps))  # tiles that a warp has of one
            tiles = tiles or row
            if tiles > min(row, RING_TILES):
                continue
            again = programs > 0 or -(-row // tiles) > stages
            kinds = [(True, 1, 64), (True, 1, 80)] if again else []
            kinds += [(True, 0, 0), (True, 0, 96), (False, 0, 0)] + ([(False, 0, 168)] if warps < 8 else [])
            for x_shared, copier, registers in kinds:
                memory = 1024 * warps * (tiles * stages + 1) + (2 * K if x_shared else 0)
                kept = x_shared or row * tile // 8 <= RING_X
                if kept and memory + 2048 <= gpu.shared_memory_per_block_optin:
                    found.append(RingConfig(warps, tiles, stages, x_shared, programs, copier, registers))
    return found
