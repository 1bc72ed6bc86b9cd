"""Rules that choose the launch config of a linear kernel for a case that no table lists.

A rule returns None if another kernel is the better choice. The rules generalize measurements on an H200. They read the
properties of a GPU from the device.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

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
from .configs import HOPPER, MAX_ROWS, Choice, is_head
from .tables import Table, listed

LARGE = 2**16  # With this number of outputs, each multiprocessor has many tiles.


def choose(
    case: Case, rows: int, device: Device, tables: Sequence[Table] = (), batch_invariant: bool = False,
    adapters: bool = False,
) -> Choice:  # fmt: skip
    """Choose the kernel and launch config of a linear.

    The choice is the entry of the first table that has one. Otherwise it is the first kernel that supports the case and
    whose rule returns a config.

    Args:
        rows: rows of the largest pass that the choice is for.
        batch_invariant: the rules add the sums of a row in one order for 16, 32 and 64 rows.
        adapters: choose only kernels whose epilogues add adapters.
    """
    if entry := listed(tables, case, rows, device, adapters):
        return entry
    for kernel in LINEAR_KERNELS:
        if kernel.supports(case, rows, device):
            ruled = kernel.name in RULES
            config = RULES[kernel.name](case, rows, device, batch_invariant) if ruled else kernel.config()
            if (config or not ruled) and (not adapters or kernel.adapts(config)):
                return Choice(kernel, config)
    raise ValueError(f"no kernel supports {rows} rows with {case}")


def ring_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> RingConfig | None:
    """Choose for one row, in the sizes of models with a hidden size from 2,048 to 5,120."""
    packed, k, hidden = case.packed, case.k, case.hidden
    measured = 2048 <= hidden <= 5120 and k <= 17408
    if packed is None or batch_invariant or not measured:
        return None
    if hidden > 4096:
        # Three programs fit on a multiprocessor, together with the first programs of the next launch.
        if is_head(case):
            return None
        stages, registers = (2 if case.epilogue == "residual" else 3), (64 if case.epilogue == "normed" else 80)
        return RingConfig(8, 2 if k > 8192 else 1, stages, x_shared=True, registers=registers)
    tiles = -(-k // (4 * packed.tile))  # Tiles of a row for each of four warps.
    programs = 2 * device.multiprocessors
    if packed.number_type == "int4":
        if case.epilogue == "gated":
            wide = hidden > 2560
            return RingConfig(4, tiles, 1 if wide else 2, x_shared=wide, programs=programs)
        if case.epilogue == "residual":
            return RingConfig(8, 1, 4, x_shared=True, registers=96) if hidden >= 2560 and k <= 4096 else None
        return None if is_head(case) or hidden > 2560 else RingConfig(4, tiles, 1, registers=168)
    if is_head(case) or (case.epilogue == "gated" and hidden >= 2560):
        return RingConfig(4, 4, 5, x_shared=True, programs=programs, producer=1, registers=64)
    if hidden < 2560:
        return None
    if case.epilogue != "residual":
        return RingConfig(4, tiles, 1, registers=168)
    if k <= 4096 and case.n < 4096:
        return RingConfig(8, -(-tiles // 2), 1, x_shared=True)
    return RingConfig(8, 2, 5 if k > 4096 else 3, x_shared=True, producer=1, registers=64)


def groups_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> GroupsConfig | None:
    """Choose for one row. Few tiles are in flight if registers limit the number of programs."""
    assert case.packed is not None
    if batch_invariant:
        return None
    wide, bits = case.k > 8192, case.packed.bits
    if not wide and case.n <= 16 * device.multiprocessors:  # A multiprocessor has at most one program.
        return GroupsConfig(4, 2 if bits == 6 else 2 * bits)
    ahead = 1 if bits == 6 else (3 if wide else 4) * bits // 4
    return GroupsConfig(8 if wide else 4, ahead, 128)


def matvec_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> MatvecConfig | None:
    """Choose for one row in bf16, and for any number of rows in other dtypes.

    The kernel reads the weight once for each row.
    """
    if rows > MAX_ROWS or (rows > 1 and case.weight_type == torch.bfloat16):
        return None
    if device.capability == HOPPER and case.k >= 8192:  # Long rows are shared by few programs.
        return MatvecConfig(2 if case.k <= 20480 else 1, 16, programs=device.multiprocessors)
    columns = case.k * (2 if case.epilogue == "gated" else 1)
    # The smallest number of warps whose threads hold two rows of the weight in 64 registers each.
    return MatvecConfig(2, next((warps for warps in (1, 2, 4, 8) if columns <= 2048 * warps), 16))


def hopper_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> HopperConfig | None:
    """Return a config for 17 to 64 rows of a dense weight with n and k of at least 2,048, or for many packed rows."""
    if packed := case.packed:
        # The kernel is slower for small models.
        if rows <= 8 or (rows <= 16 and case.hidden < 2560 and not batch_invariant):
            return None
        config = _packed_hopper(case, packed, rows, device)
        if batch_invariant and rows <= 32:  # The number of programs that share columns determines the order of sums.
            config = replace(config, split=_packed_hopper(case, packed, MAX_ROWS, device).split)
        return config
    n, k = case.n, case.k
    if min(n, k) < (2560 if batch_invariant else 2048) or not (rows > 16 or batch_invariant):
        return None
    if n >= LARGE:
        config = HopperConfig(128, 128, 5, 5, programs=device.multiprocessors, producer=1, registers=80)
    elif case.epilogue == "gated":
        config = HopperConfig(128, 64, 4, 4, lag=1)
    else:
        split = -(-(device.multiprocessors * 8 // 11) * 64 // n)  # Three of four multiprocessors get a program.
        if k < 1024 * split:
            return None
        stages = 4
        if case.epilogue == "residual" and -(-n // 64) * split <= device.multiprocessors:
            # A program occupies more than half of the shared memory, so that no multiprocessor runs two of them.
            stages = 8 if k > 8192 else 5
        config = HopperConfig(64, 128, stages, stages, split=split)
    if rows <= 32:
        return config
    if batch_invariant and (config.programs or case.epilogue == "gated"):
        return replace(config, x_stages=2, num_warps=8, registers=88 if config.producer else config.registers)
    if config.programs:
        return replace(config, block_k=64, stages=8, x_stages=6, num_warps=8, registers=88)
    if case.epilogue == "gated":
        return replace(config, num_warps=8, producer=1, registers=80)
    return _hopper_of_many_rows(case, device, config.split if batch_invariant else 0)


def _hopper_of_many_rows(case: Case, device: Device, split: int) -> HopperConfig:
    """Return a config for 33 to 64 rows.

    A tile of the activations is as large as a tile of the weight, so as many of them are in flight.

    Args:
        split: number of programs that share the columns; 0 chooses it.
    """
    tiles, programs = -(-case.n // 64), device.multiprocessors
    if not split:
        most = max(case.k // 1536, 1)
        split = min(max(programs // tiles, 1), most)
        if 10 * tiles * split < 7 * programs:  # Too few multiprocessors have a program, so some get two.
            split = min(2 * programs // tiles, most)
    if tiles * split <= programs:
        stages = 5 if case.epilogue == "residual" else 4
        return HopperConfig(64, 128, stages, stages, split, num_warps=8, producer=1, registers=80)
    if split > 1:
        return HopperConfig(64, 128, 3, 3, split, num_warps=8)
    return HopperConfig(64, 64, 8, 4, producer=1, registers=80)


def _packed_hopper(case: Case, packed: Packed, rows: int, device: Device) -> HopperConfig:
    """Return a config in which all programs that can run at a time share the columns.

    If the tiles of the activations are larger than the tiles of the weights, fewer tiles are in flight.
    """
    gated, head = case.epilogue == "gated", is_head(case)
    columns = COLUMNS_OF[packed.number_type]
    # Number of scales and zero points of a row of a tile.
    scales = columns // packed.group * (2 if packed.zeros else 1)
    if rows > 32:
        config = HopperConfig(64, columns, 4, 512 // columns, producer=1, registers=128)
    elif rows * columns > 4096:
        config = HopperConfig(64, columns, 3, 3, producer=1, registers=112)
    else:
        config = HopperConfig(64, columns, 4, 4, producer=1, registers=112 if scales > 4 else 80)
    nbytes = row_bytes(packed)
    tiles, fit = -(-case.n // config.block_n), programs_at_once(config, rows, device, nbytes)
    if gated and fit < tiles and rows <= 32:
        config = _in_one_wave(config, case.n, rows, device, nbytes)
    elif not gated and not head:
        least = 640 if rows > 16 else columns  # Minimum columns of a program.
        config = replace(config, split=max(min(fit // tiles, MAX_SPLIT, case.k // least), 1))
    # Each multiprocessor runs at most one program.
    if rows > 32 and not head and tiles * config.split <= device.multiprocessors:
        return replace(config, stages=768 // columns, x_stages=768 // columns)
    if rows <= 16 and columns == 256 and not gated and not head:  # A program should not have more stages than tiles.
        stages = min(max(case.k // columns // config.split, 2), 4)
        return replace(config, stages=stages, x_stages=stages)
    return config


def _in_one_wave(config: HopperConfig, n: int, rows: int, device: Device, nbytes: int) -> HopperConfig:
    """Return a config with which all programs run at a time, for at most 32 rows, or `config` if there is none."""
    if config.block_k == 256:  # A multiprocessor runs three programs.
        other = replace(config, stages=4, x_stages=2, producer=0, registers=168)
    elif rows <= 16:  # A multiprocessor runs four programs.
        other = replace(config, registers=64)
    else:  # The number of programs is halved.
        other = HopperConfig(128, config.block_k, 4, 4, num_warps=8, producer=1, registers=80)
    return other if programs_at_once(other, rows, device, nbytes) * other.block_n >= n else config


def row_bytes(packed: Packed) -> int:
    """Return the bytes of a row of COLUMNS_OF columns."""
    return 192 if packed.bits == 6 else 128


def programs_at_once(config: HopperConfig, rows: int, device: Device, nbytes: int) -> int:
    """Return how many programs with a packed tensor run on the device at a time. nbytes: see `row_bytes`."""
    tiles = config.stages * nbytes * config.block_n + config.x_stages * 2 * config.block_k * max(rows, 16)
    warps = config.num_warps + 4 * config.producer  # The producer warp takes the registers of four warps.
    by_registers = device.registers // (32 * warps * config.registers)
    return device.multiprocessors * min(device.shared_memory_each // (tiles + 2048), by_registers)


def matmul_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> MatmulConfig | None:
    """Choose for up to 16 rows of dense weights, whose sums stay in registers, and for packed tensors."""
    if case.packed:
        return packed_matmul_rule(case, case.packed, rows, device, batch_invariant)
    if (
        rows > 16 and case.k % 8 and not batch_invariant
    ):  # The kernels for many rows use TMA, which cannot copy these rows.
        return MatmulConfig(16, 8 if rows > 32 else 4, 1, 1)
    if batch_invariant or rows > 16 or (rows > 8 and case.n >= LARGE and device.capability == HOPPER):
        return None
    if case.k < 6144:
        return MatmulConfig(16, 4, 12, 8) if rows <= 8 else MatmulConfig(16, 4, 8, 4)
    return MatmulConfig(32, 8, 5 if rows <= 8 else 8, 4)


def packed_matmul_rule(case: Case, packed: Packed, rows: int, device: Device, batch_invariant: bool) -> MatmulConfig:
    """Choose few warps, because each repeats some work, but enough warps to occupy all multiprocessors."""
    if batch_invariant:  # Warps determine the order of sums. Tiles of 16 rows add all sums of squares in one order.
        ahead = 4 if rows <= 16 else 2 if rows <= 32 else 1
        return MatmulConfig(16, 8, ahead, ahead, registers=128 if rows <= 16 else 0, block_m=16)
    number_type, k, blocks = packed.number_type, case.k, -(-case.n // 16)
    programs = 2 * device.multiprocessors
    if rows > 16:  # The sums leave few registers for tiles in flight.
        return MatmulConfig(16, 8 if rows > 32 else 4, 1, 1, rounds=rows > 32 and packed.group < 64)
    if rows > 8 and packed.group < 64:  # The scales of many groups are in flight with each tile.
        return MatmulConfig(16, 4, 4, 4, 168, fetch=1)
    if rows > 8:  # If there are enough blocks, a multiprocessor runs four programs.
        return MatmulConfig(16, 4, 10, 8, fetch=1) if blocks < programs else MatmulConfig(16, 4, 4, 4, 128, fetch=1)
    # Programs take several blocks. Use the smallest number of warps that keeps the activations in 20 tiles each.
    tile = packed.tile
    warps = next((warps for warps in (2, 4) if -(-k // (tile * warps)) * tile // 32 <= 20), 0)
    if warps and number_type != "int8" and packed.group >= 64 and blocks >= 2 * programs * 4 // warps:
        return MatmulConfig(16, warps, 10, 20, programs=programs * 4 // warps)
    tiles = k // tile
    warps = 2 if k <= 3072 else 4 if k <= 8192 else 8
    while warps < 8 and blocks * warps < 4 * programs and tiles > 2 * warps:
        warps *= 2
    if packed.group < 64:
        ahead, x_ahead = (2, 4) if number_type == "int6" else (3, 6)  # A tile of six bits has more columns.
        return MatmulConfig(16, warps, ahead, x_ahead, registers=168 if number_type == "int6" and warps < 8 else 128)
    ahead = 10 if warps < 8 else 4 if number_type == "int4" else 8  # The scales of groups are in flight too.
    ahead, x_ahead = min(ahead, 6) if number_type == "int8" else ahead, 8
    if warps == 8 and device.capability > HOPPER:  # The compiler spills more on newer GPUs.
        ahead, x_ahead = (3, 4) if number_type == "int4" else (ahead, 6)
    # Two programs of eight warps fit on a multiprocessor, so that weights with few rows are multiplied in one wave.
    return MatmulConfig(16, warps, ahead, x_ahead, registers=128 if warps == 8 else 0)


def wide_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> WideConfig | None:
    """Choose for batch-invariant mode. In other modes only tables choose this kernel.

    Tiles have at least 16 rows, because tiles of eight are multiplied by another instruction.
    """
    if not batch_invariant:
        return None
    # Two programs run on a multiprocessor, each with all its tiles in flight. At most 40 tiles compile in seconds.
    programs = 2 * device.multiprocessors // -(-case.n // 64)
    max_split = 1 if case.epilogue == "gated" else min(programs, case.k // (4 * 128))
    split = 1 if is_head(case) else min(max(max_split, -(-case.k // (40 * 128)), 1), MAX_SPLIT)
    if split > 3 and rows <= 32:
        return WideConfig(64, 128, 4, 3, split=split, block_m=16)
    ahead = 3 if rows <= 32 else 2  # Some versions of Triton spill more.
    return WideConfig(64, 128, ahead, 1, split=split, registers=168 if rows <= 16 else 0, block_m=16)


def tiles_rule(case: Case, rows: int, device: Device, batch_invariant: bool) -> TilesConfig:
    """Choose the largest tiles that fit the shared memory of most GPUs."""
    hopper = device.capability == HOPPER
    if hopper and rows <= 16:
        return TilesConfig(32, 256, 4)
    if case.epilogue == "gated" or case.n >= LARGE:
        return TilesConfig(32, 64, 4, num_warps=4 if hopper else 8, block_m=64)
    return TilesConfig(64, 128, 6, block_m=64) if hopper else TilesConfig(32, 128, 3, block_m=64)


RULES = {
    "ring": ring_rule,
    "groups": groups_rule,
    "matvec": matvec_rule,
    "hopper": hopper_rule,
    "matmul": matmul_rule,
    "wide": wide_rule,
    "tiles": tiles_rule,
}
