"""Candidates: the launch configs that a search tries. They fit in the registers and the shared memory of the GPU."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product, zip_longest
from typing import Any

import torch

from ..kernels.attention.attention import AttentionConfig
from ..kernels.device import Device
from ..kernels.linear.matmul import MatmulConfig
from ..kernels.linear.matmul_groups import GroupsConfig
from ..kernels.linear.matmul_hopper import COLUMNS_OF, HopperConfig
from ..kernels.linear.matmul_ring import RingConfig
from ..kernels.linear.matmul_tiles import TilesConfig
from ..kernels.linear.matmul_wide import WideConfig
from ..kernels.linear.matvec import MatvecConfig
from ..kernels.linear.packed import Packed
from ..kernels.linear.project import Case
from ..kernels.linear.registry import LINEAR_KERNELS
from ..kernels.linear.split_sums import MAX_SPLIT
from .configs import AttentionCase, PassConfigs, is_head
from .rules import hopper_rule, packed_matmul_rule, programs_at_once, row_bytes
from .tables import VALUES

Part = Case | AttentionCase

# Programs of a multiprocessor that share the rows of a weight. 0 means one program for each block.
SHARES = (0, 1, 2, 3, 4, 6, 8)
# Registers of a matvec thread: the minimum for weights (not required if a program has one warp), the maximum for
# weights, and the number for everything else. A thread with few weights has few bytes in flight. A thread with many
# weights leaves room for few programs.
MIN_WEIGHTS, MAX_WEIGHTS, OTHER_REGISTERS = 16, 128, 40
BOUNDS = (0, 40, 56, 64, 80, 96, 128)  # Maximum registers of a thread. 0 means no limit.
# matmul: (tiles of the weights in flight, tiles of the activations in flight).
IN_FLIGHT = ((4, 4), (8, 4), (8, 8), (12, 4), (12, 8), (16, 4), (5, 4), (6, 32), (10, 32))
MAX_TILES = 40  # Maximum tiles of a wide program, which are unrolled. With more tiles, compilation takes a minute.
# wide: (columns of a tile, tiles of the weights in flight, tiles of the activations in flight).
WIDE = ((128, 2, 1), (128, 2, 2), (128, 3, 1), (128, 3, 2), (128, 4, 3), (64, 3, 1), (64, 4, 2), (64, 6, 3))
STAGES = (2, 3, 4, 6, 8)
# hopper: (rows of a tile, columns of a tile, tiles of the weights in flight, tiles of the activations in flight).
HOPPER = (
    (64, 128, 8, 8), (64, 128, 5, 5), (64, 128, 4, 4), (64, 128, 3, 3), (64, 128, 4, 2), (64, 64, 8, 6),
    (64, 64, 8, 4), (128, 64, 4, 4), (128, 64, 5, 3),
)  # fmt: skip
HOPPER_ONE = ((128, 128, 5, 5), (128, 64, 8, 6))  # Tiles for one program per multiprocessor.
# matmul of packed tensors: (block_n, num_warps, ahead, x_ahead, registers, programs per multiprocessor, fetch).
# The first configs are the most promising ones, and differ most from each other.
ALL = 1000  # No weight has this number of tiles of activations.
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
PACKED_MANY = (  # For more than 16 rows, whose sums leave few registers for tiles.
    (16, 8, 1, 1, 0, 0, 0), (16, 4, 1, 1, 0, 0, 0), (16, 8, 2, 1, 0, 0, 0), (16, 4, 2, 1, 0, 0, 0),
    (16, 8, 2, 2, 0, 0, 0), (16, 4, 2, 2, 0, 0, 0), (16, 8, 3, 1, 0, 0, 1), (32, 8, 1, 1, 0, 0, 0),
)  # fmt: skip
MAX_PACKED = 24  # Maximum candidates of matmul for one packed tensor.
MAX_PARTS = 80  # Maximum unrolled products of matmul with a packed tensor. With more, compilation takes minutes.
# hopper of packed tensors. Tiles: (rows, tiles of the weights in flight, tiles of the activations in flight). Ways, by
# the number of rows of the pass: (producer warps, registers).
HOPPER_PACKED = ((64, 4, 4), (64, 4, 2), (64, 3, 3), (64, 2, 2), (64, 6, 4), (128, 4, 4), (128, 4, 2))
HOPPER_WAYS = {
    16: ((1, 80), (1, 64), (0, 168), (0, 128)),
    32: ((1, 112), (1, 80), (0, 168), (0, 128)),
    64: ((1, 128), (1, 112), (0, 168)),
}
# ring: (warps of a program, tiles of a stage, stages of the ring). With 0 tiles, a stage is a whole row of the weight.
# RING_EACH is for one program for each 16 rows of the weight. RING_SHARED is for fewer programs, which share the rows.
RING_EACH = ((4, 0, 1), (8, 0, 1), (2, 0, 1), (8, 1, 3), (8, 1, 4), (8, 2, 3), (8, 2, 4), (8, 2, 5), (8, 4, 2))
RING_SHARED = ((4, 0, 1), (4, 0, 2), (4, 4, 5), (4, 4, 4), (8, 4, 3))
RING_X, RING_TILES = 128, 20  # Maximum registers of a thread for the activations, and maximum unrolled tiles.


def parts_of(configs: PassConfigs) -> list[Part]:
    """Return the parts to tune. The largest parts of a pass come first, since there may not be time for all."""
    linears = sorted(configs.linears, key=lambda case: -case.n * case.k)
    heads = [case for case in linears if is_head(case)]
    return [*(case for case in linears if not is_head(case)), *configs.attention, *heads]


def candidates(configs: PassConfigs, rows: int, device: Device) -> list[tuple[Part, list]]:
    """Return the candidates for passes of up to `rows` rows.

    Each entry is a part, and either configs to try or fields to change in its current config.
    """
    all_candidates: list[tuple[Part, list]] = []
    for part in parts_of(configs):
        if isinstance(part, AttentionCase):
            groups = attention_candidates(configs.attention[part], rows, device)
        else:
            groups = linear_candidates(part, rows, configs.linears[part].config, device)
        all_candidates += [(part, tried) for tried in groups if tried]
    return all_candidates


def attention_candidates(config: Any, rows: int, device: Device) -> list[list[dict]]:
    """Return groups of fields of a config of attention. The fields of a group are tried together."""
    if not isinstance(config, AttentionConfig):
        programs = [device.multiprocessors * share for share in (1, 2, 3, 4)]
        groups = {"stages": (1, 3, 5, 7), "programs": programs, "least": (1, 2, 4, 8, 16)}
        tiles = product((16, 32, 64), (4, 8))
    elif rows == 1:
        values = VALUES[AttentionConfig]
        groups = {"ahead": values["ahead"], "splits": values["splits"], "registers": BOUNDS}
        tiles = product(values["block_t"], values["num_warps"])
    else:
        groups = {"ahead": (1, 2), "short_splits": (1, 2, 3, 4, 6, 8, 12, 16), "short_iterations": (8, 16, 32, 64)}
        tiles = product((32, 64, 128), (4, 8))
    first = [{"block_t": block_t, "num_warps": warps, "registers": 0} for block_t, warps in tiles]
    return [first, *([{name: value} for value in values] for name, values in groups.items())]


def linear_candidates(case: Case, rows: int, config: Any, device: Device) -> list[list]:
    """Return groups of configs of a linear, or of fields to change in `config`, its current one."""
    if isinstance(config, MatvecConfig):
        # For several rows, the kernel reads the weight once for each row, exactly as for one row.
        return matvec_candidates(case, config.programs > 0, device) if rows == 1 else []
    configs: list[object] = []
    for kernel in LINEAR_KERNELS:
        if kernel.name in CANDIDATES and kernel.supports(case, rows, device):
            configs += CANDIDATES[kernel.name](case, rows, device)
    return [list(dict.fromkeys(configs))]


def matvec_candidates(case: Case, shared: bool, device: Device) -> list[list[dict]]:
    """Return tiles, numbers of programs, and limits on registers.

    Args:
        shared: whether programs share the rows. Each then also holds the next rows in registers, so it needs a config
            without a register limit.
    """
    assert isinstance(case.weight_type, torch.dtype)
    row = case.weight_type.itemsize * case.k * (2 if case.epilogue == "gated" else 1)
    tiles = []
    for block_n, warps in product(VALUES[MatvecConfig]["block_n"], VALUES[MatvecConfig]["num_warps"]):
        weights = -(-block_n * row // (128 * warps))
        if weights <= MAX_WEIGHTS and (weights >= MIN_WEIGHTS or warps == 1):
            registers = 0 if shared else -(-weights // 8) * 8 + OTHER_REGISTERS
            tiles.append({"block_n": block_n, "num_warps": warps, "registers": registers})
    programs = [{"programs": device.multiprocessors * share, "registers": 0} for share in SHARES]
    return [tiles, programs, [{"registers": bound} for bound in BOUNDS]]


def matmul_candidates(case: Case, rows: int, device: Device) -> Iterable[MatmulConfig]:
    """Yield configs whose tiles and sums fit in 200 registers, and the sums of all warps in 48 KiB.

    Programs share the rows of the weight if they keep all activations in registers.
    """
    if case.packed:
        yield from packed_matmul_candidates(case, case.packed, rows, device)
        return
    high = max(rows, 8)
    for block_n, warps, (ahead, x_ahead) in product((16, 32), (2, 4, 8), IN_FLIGHT):
        tiles = -(-case.k // (32 * warps))
        registers = block_n * min(ahead, tiles) // 2 + high * min(x_ahead, tiles) // 2 + block_n * high // 32
        if registers <= 200 and 4 * warps * block_n * high <= 48 * 1024 and tiles >= 4:
            for share in (1, 2, 3) if x_ahead >= tiles else (0,):
                yield MatmulConfig(block_n, warps, ahead, x_ahead, programs=share * device.multiprocessors)


def tiles_candidates(case: Case, rows: int, device: Device) -> Iterable[TilesConfig]:
    """Yield configs whose tiles fit in shared memory."""
    weights = 2 if case.epilogue == "gated" else 1
    for block_n, block_k, stages in product((16, 32, 64), (64, 128, 256), STAGES):
        for block_m in sorted({max(rows, 16), 64}):
            size = 2 * stages * block_k * (block_m + block_n * weights)
            if size <= device.shared_memory - 1024 and stages * block_k <= case.k:
                yield TilesConfig(block_n, block_k, stages, block_m=block_m)


def wide_candidates(case: Case, rows: int, device: Device) -> Iterable[WideConfig]:
    """Yield configs whose tiles and sums fit in 240 registers.

    If a config needs at most 128 or 168 registers, that is its limit, so that one more program fits on a
    multiprocessor.
    """
    high, k = max(rows, 8), case.k
    splits = (1,) if is_head(case) else (1, 2, 3, 4, 6, 8)
    for warps, (block_k, ahead, x_ahead), split in product((4, 8), WIDE, splits):
        x_registers = high * block_k // (64 * warps)
        registers = ahead * block_k // 4 + (x_ahead + 1) * x_registers + high // 2 + 32
        bound = next((limit for limit in ((128, 168) if warps == 4 else (128,)) if registers <= limit), 0)
        if registers <= 240 and ahead * block_k * split <= k <= MAX_TILES * block_k * split:
            yield WideConfig(16 * warps, block_k, ahead, x_ahead, warps, split, bound)


def hopper_candidates(case: Case, rows: int, device: Device) -> Iterable[HopperConfig]:
    """Yield configs with which all programs, or at least two, fit on a multiprocessor.

    With few outputs, programs share the columns.

    For an LM head, also yield configs with one program per multiprocessor, which computes several tiles in turn.
    """
    if case.packed:
        yield from packed_hopper_candidates(case, case.packed, rows, device)
    if case.packed or rows <= 16:
        return
    memory, head, warps = device.shared_memory, is_head(case), 8 if rows > 32 else 4
    ways = [(1, 0), (1, 1)] if head or case.epilogue == "gated" else [(split, 0) for split in (1, 2, 3, 4)]
    for tile, (split, lag) in product(HOPPER, ways):
        block_n, block_k, stages, _ = tile
        # Programs of a multiprocessor, and how many of them its shared memory holds.
        each = -(-case.n // block_n * split // device.multiprocessors)
        fit = device.shared_memory_each // (_hopper_bytes(*tile, rows) + 2048)
        if min(each, 2) <= fit and stages * block_k * split <= case.k:
            yield HopperConfig(*tile, split, num_warps=warps, lag=lag)
            few = 8 if block_n * rows > 64 * 64 else 4
            yield HopperConfig(*tile, split, num_warps=few, lag=lag, producer=1, registers=80)
    for tile in HOPPER_ONE if head else ():
        if _hopper_bytes(*tile, rows) + 2048 <= memory:
            programs = device.multiprocessors
            yield HopperConfig(*tile, num_warps=warps, programs=programs, producer=1, registers=88)


def _hopper_bytes(block_n: int, block_k: int, stages: int, x_stages: int, rows: int, row: int = 0) -> int:
    """Return the shared memory of all tiles. row is the number of bytes of a tile's row, for packed tensors."""
    return stages * block_n * (row or 2 * block_k) + 2 * block_k * x_stages * rows


def packed_hopper_candidates(case: Case, packed: Packed, rows: int, device: Device) -> Iterable[HopperConfig]:
    """Yield the config of the rule, then others whose tiles fit in shared memory."""
    if rows <= 8:
        return
    columns, high, nbytes = COLUMNS_OF[packed.number_type], max(rows, 16), row_bytes(packed)
    yield from filter(None, [hopper_rule(case, rows, device, False)])
    for (block_n, stages, x_stages), (producer, registers) in product(HOPPER_PACKED, HOPPER_WAYS[high]):
        if _hopper_bytes(block_n, columns, stages, x_stages, high, nbytes) + 2048 > device.shared_memory:
            continue
        warps = dict(num_warps=block_n // 16, producer=producer, registers=registers)
        config = HopperConfig(block_n, columns, stages, x_stages, **warps)
        limit = 1
        if case.epilogue != "gated" and not is_head(case):
            fit = programs_at_once(config, high, device, nbytes) // -(-case.n // block_n)
            limit = max(min(fit, MAX_SPLIT, case.k // columns), 1)
        yield from (replace(config, split=split) for split in (limit, limit - 1, limit // 2) if split > 0)


def packed_matmul_candidates(case: Case, packed: Packed, rows: int, device: Device) -> list[MatmulConfig]:
    """Return the config of the rule, then configs that may fit in registers. The most promising come first."""
    n, k, high = case.n, case.k, max(rows, 8)
    chunks, configs = packed.tile // 32, [packed_matmul_rule(case, packed, rows, device, False)]
    mixed = [values for pair in zip_longest(PACKED_EACH, PACKED_SHARED) for values in pair if values]
    lists = PACKED_EACH + PACKED_SHARED if k > 2560 else PACKED_SHARED + PACKED_EACH if n > 16384 else mixed
    for block_n, warps, ahead, x_ahead, registers, share, fetch in PACKED_MANY if rows > 16 else lists:
        tiles = -(-k // (32 * chunks * warps))
        ahead, x_ahead, programs = min(ahead, tiles), min(x_ahead, tiles * chunks), share * device.multiprocessors
        config = MatmulConfig(block_n, warps, ahead, x_ahead, registers, 8, programs, fetch)
        # Registers of a thread: tiles of the weights and of the activations, sums, and everything else.
        sums, kept = config.block_n * high // 32, config.x_ahead == tiles * chunks and config.programs
        needed = config.block_n // 2 * config.ahead + high // 2 * config.x_ahead + 2 * sums + 32
        needed += sums * tiles if kept and packed.number_type == "int4" else 0
        limit = config.registers or min(device.registers // (32 * config.num_warps), 255)
        several = not config.programs or config.programs < config.grid(n)[0]
        wide = config.block_n == 16 or rows > 8 or n > 16384
        short = tiles * chunks <= MAX_PARTS
        if needed <= limit and several and wide and short and config not in configs:
            configs.append(config)
    return configs[:MAX_PACKED]


def ring_candidates(case: Case, rows: int, device: Device) -> Iterable[RingConfig]:
    """Yield configs whose stages fit in shared memory, and whose activations fit there or in registers.

    Rings that are filled more than once also have a producer warp.
    """
    if case.packed is None:
        return
    k, tile, shared = case.k, case.packed.tile, 2 * device.multiprocessors
    rings = [(0, RING_EACH)] + ([(shared, RING_SHARED)] if case.n // 16 > shared else [])
    for programs, (warps, tiles, stages) in [(programs, way) for programs, ways in rings for way in ways]:
        row = -(-k // (tile * warps))  # Tiles of a row for each warp.
        tiles = tiles or row
        if tiles > min(row, RING_TILES):
            continue
        kinds = [(True, 1, 64), (True, 1, 80)] if programs > 0 or -(-row // tiles) > stages else []
        kinds += [(True, 0, bound) for bound in (0, 64, 80, 96)]
        kinds += [(False, 0, 0)] + ([(False, 0, 168)] if warps < 8 else [])
        for x_shared, producer, registers in kinds:
            memory = 1024 * warps * (tiles * stages + 1) + (2 * k if x_shared else 0)
            if (x_shared or row * tile // 8 <= RING_X) and memory + 2048 <= device.shared_memory:
                yield RingConfig(warps, tiles, stages, x_shared, programs, producer, registers)


def groups_candidates(case: Case, rows: int, device: Device) -> Iterable[GroupsConfig]:
    """Yield configs whose tiles in flight fit in the registers of a thread."""
    if case.packed is None:
        return
    words = 12 if case.packed.bits == 6 else 4  # Registers of a tile.
    for warps, ahead, registers in product((2, 4, 8), (2, 4, 6, 8, 12), (0, 96, 128, 168)):
        tiles = -(-case.k // (case.packed.tile * warps))
        if ahead <= tiles and words * ahead + 64 <= (registers or 255):
            yield GroupsConfig(warps, ahead, registers)


CANDIDATES = {
    "ring": ring_candidates,
    "groups": groups_candidates,
    "hopper": hopper_candidates,
    "matmul": matmul_candidates,
    "wide": wide_candidates,
    "tiles": tiles_candidates,
}
