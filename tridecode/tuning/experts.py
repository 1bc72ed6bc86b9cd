"""Launch configs of mixtures of experts."""

from dataclasses import replace
from functools import cache

from ..kernels.device import Device
from ..kernels.moe.arguments import Experts
from ..kernels.moe.config import ExpertsConfig
from ..kernels.moe.expert_rows import RowsConfig
from ..kernels.moe.expert_tiles import TilesConfig
from ..kernels.moe.route import RouteConfig

MAX_ROWS = 2  # Rows of a decode pass that are computed separately. They rarely share an expert.
PROGRAMS = 4  # Number of programs without a GPU, because the interpreter runs one program after the other.
FEW = 6  # Expected number of pairs of an expert, up to which a tile of 16 pairs rarely overflows.


@cache
def experts_config(
    sizes: Experts, rows: int, gpu: Device, batch_invariant: bool, prompt: bool = False, itemsize: int = 2
) -> ExpertsConfig:
    """Choose the launch configs for passes of `rows` rows. They were measured on an H100.

    Args:
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass.
        itemsize: bytes of an element of the weights.
    """
    programs = gpu.multiprocessors or PROGRAMS
    expected = 0 if batch_invariant else rows * sizes.top_k / sizes.count
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
    tiles = fitted(gate_up, 2, gpu, itemsize), fitted(down, 1, gpu, itemsize)
    if prompt and not batch_invariant:
        return ExpertsConfig(RouteConfig(16, 128 if rows >= 1024 else 16, 128, 4), tiles)
    configs = ExpertsConfig(RouteConfig(16, 16, 64, 4, stages=6), tiles)
    if batch_invariant or rows > MAX_ROWS:
        return configs
    return configs._replace(route=RouteConfig(1, 4, 1024, 4), rows=(RowsConfig(2, 4), RowsConfig(2, 1)))


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
