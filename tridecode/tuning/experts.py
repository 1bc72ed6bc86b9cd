"""Launch configs of mixtures of experts."""

from dataclasses import replace
from functools import cache

from ..kernels.device import Device
from ..kernels.linear.packed import Packed
from ..kernels.moe.arguments import Experts
from ..kernels.moe.config import AnyRows, AnyTiles, ExpertsConfig
from ..kernels.moe.expert_packed import PackedPromptConfig, PackedRowsConfig, PackedTilesConfig
from ..kernels.moe.expert_rows import RowsConfig
from ..kernels.moe.expert_tiles import TilesConfig
from ..kernels.moe.route import RouteConfig

MAX_ROWS = 2  # Rows of a decode pass that are computed separately. They rarely share an expert.
PROGRAMS = 4  # Number of programs without a GPU, because the interpreter runs one program after the other.
FEW = 6  # Expected number of pairs of an expert, up to which a tile of 16 pairs rarely overflows.


@cache
def experts_config(
    sizes: Experts, rows: int, gpu: Device, batch_invariant: bool, prompt: bool = False, itemsize: int = 2,
    packed: tuple[Packed | None, Packed | None] = (None, None),
) -> ExpertsConfig:  # fmt: skip
    """Choose the launch configs for passes of `rows` rows. They were measured on an H100.

    Args:
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass.
        itemsize: bytes of an element of the weights.
        packed: the descriptions of the packed weights of gate_up and down, None for dense weights.
    """
    programs = gpu.multiprocessors or PROGRAMS
    expected = 0 if batch_invariant else rows * sizes.top_k / sizes.experts
    if expected <= FEW:
        gate_up = TilesConfig(16, 64, 256, 3, 4, 4 * programs)
        down = TilesConfig(16, 64, 128, 3, 4, 2 * programs)
    elif expected <= 2.5 * FEW:
        gate_up = down = TilesConfig(32, 64, 128, 3, 4, 2 * programs)
    elif expected <= 8 * FEW:
        gate_up, down = TilesConfig(64, 64, 128, 3, 4, 2 * programs), TilesConfig(64, 128, 64, 4, 8, 2 * programs)
    else:
        gate_up = TilesConfig(128, 128, 64, 4, 8, 2 * programs, extra_m=32)
        down = TilesConfig(128, 64, 64, 4, 4, 2 * programs, extra_m=32)
    tiles: tuple[AnyTiles, AnyTiles] = fitted(gate_up, 2, gpu, itemsize), fitted(down, 1, gpu, itemsize)
    if batch_invariant and not gpu.capability:  # Products of torch on a CPU depend on their number of rows.
        tiles = TilesConfig(1, 64, 128, 3, 4, programs), TilesConfig(1, 64, 128, 3, 4, programs)
    if any(packed):
        tiles = _packed_tiles(packed, expected, prompt, programs, gpu, itemsize)
    if prompt and not batch_invariant:
        return ExpertsConfig(RouteConfig(16, 128 if rows >= 1024 else 16, 128, 4), tiles)
    configs = ExpertsConfig(RouteConfig(16, 16, 64, 4, stages=6), tiles)
    if batch_invariant or rows > MAX_ROWS:
        return configs
    each = packed_rows(packed[0], True), packed_rows(packed[1], False)
    return configs._replace(route=RouteConfig(1, 4, 1024, 4), rows=each)


def packed_rows(packed: Packed | None, gate_up: bool) -> AnyRows:
    """Choose the launch config of gate_up or down for one row. packed: its packed weight, or None."""
    if packed is None:
        return RowsConfig(2, 4 if gate_up else 1)
    return PackedRowsConfig(32 if gate_up else 16, 8, 8)


def _packed_tiles(
    packed: tuple[Packed | None, Packed | None], expected: float, prompt: bool, programs: int, gpu: Device,
    itemsize: int,
) -> tuple[AnyTiles, AnyTiles]:  # fmt: skip
    """Choose the launch configs of gate_up and down, at least one of which has packed weights."""
    if prompt:
        block_m = 16 if expected <= FEW else 32 if expected <= 2.5 * FEW else 64 if expected <= 8 * FEW else 128
        own: AnyTiles = PackedPromptConfig(block_m, 128, 3, 8, programs)
    else:
        own = PackedTilesConfig(32, 4, 4, block_m=16, max_programs=4 * programs)
    dense = TilesConfig(own.tile, 64, 64, 3, 4, 2 * programs)
    gate_up = own if packed[0] else fitted(dense, 2, gpu, itemsize)
    return gate_up, own if packed[1] else fitted(dense, 1, gpu, itemsize)


def fitted(config: TilesConfig, weights: int, gpu: Device, itemsize: int) -> TilesConfig:
    """Return the config with fewer stages and columns, until its steps fit into the shared memory of a program.

    Args:
        weights: number of tiles of the weight of a step.
    """
    while gpu.shared_memory and config.block_k > 32:
        step = (weights * config.block_n + config.tile) * config.block_k * itemsize
        if config.stages * step <= gpu.shared_memory - 2**12:
            break
        smaller = dict(stages=config.stages - 1) if config.stages > 2 else dict(block_k=config.block_k // 2)
        config = replace(config, **smaller)
    return config
