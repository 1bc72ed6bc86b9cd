"""Launch configs of mixtures of experts."""

from dataclasses import replace
from functools import cache

from ..kernels.device import Device
from ..kernels.linear.matmul_groups import multiplies
from ..kernels.linear.packed import Packed
from ..kernels.moe.arguments import ExpertSizes
from ..kernels.moe.config import AnyRows, AnyTiles, ExpertsConfig
from ..kernels.moe.expert_groups import ExpertGroupsConfig, down_multiplies
from ..kernels.moe.expert_packed import PackedTilesConfig
from ..kernels.moe.expert_ring import RING_PAIRS, RingTilesConfig, activation_bytes, ring_supports
from ..kernels.moe.expert_rows import RowsConfig
from ..kernels.moe.expert_tiles import TilesConfig
from ..kernels.moe.expert_weight import PackedRowsConfig
from ..kernels.moe.prompt_packed import PackedPromptConfig
from ..kernels.moe.route import RouteConfig
from .configs import PROGRAMS

MAX_UNSORTED_ROWS = 2  # Rows of the largest decode pass whose pairs are not sorted. They rarely share an expert.
MAX_LOGITS = 4096  # Logits of a pass, up to which the router computes each row separately.
FEW = 6  # Expected number of pairs of an expert, up to which a tile of 16 pairs rarely overflows.
FULL = 4  # Expected number of pairs of an expert, up to which a tile of eight pairs rarely overflows.
RING_REGISTERS = 168  # Minimum number of registers of a thread of expert_ring: with fewer, it stores data in memory.
MAX_STEPS = 24  # Steps of two rows of dense weights that the registers of a program hold.
DOWN_WARPS = 8  # Warps of a program of expert_groups for down. Each multiplies whole rows of an expert.
MAX_BITS = 9216  # Bits of a row of all experts of such a warp, up to which its registers hold 16 rows.
RESERVED = 2**12  # Bytes of shared memory that a program needs besides its stages.


@cache
def experts_config(
    sizes: ExpertSizes, rows: int, gpu: Device, batch_invariant: bool, prompt: bool = False, itemsize: int = 2,
    packed: tuple[Packed | None, Packed | None] = (None, None),
) -> ExpertsConfig:  # fmt: skip
    """Choose the launch configs for passes of `rows` rows. They were measured on an H100 and an H200.

    In batch-invariant mode they do not depend on the number of rows.

    Args:
        sizes: numbers and widths of the experts.
        rows: rows of the pass.
        gpu: the GPU, or a device without multiprocessors for the CPU.
        batch_invariant: the order of the sums of a row does not depend on the number of rows.
        prompt: whether the pass is a prompt pass.
        itemsize: bytes of an element of the weights.
        packed: the descriptions of the packed weights of gate_up and down, None for dense weights.
    """
    expected = 0 if batch_invariant else rows * sizes.top_k / sizes.experts  # Expected number of pairs of an expert.
    tiles: tuple[AnyTiles, AnyTiles]
    if any(packed):
        tiles = _packed_tiles(packed, sizes.intermediate, expected, prompt, gpu, itemsize)
    else:
        tiles = gate_up, down = _dense_tiles(expected, gpu, itemsize)
        if batch_invariant and not gpu.capability:  # Products of torch on a CPU depend on their number of rows.
            tiles = replace(gate_up, block_m=1), replace(down, block_m=1)
    route = _route(sizes, rows, batch_invariant, prompt)
    if prompt and not batch_invariant:
        return ExpertsConfig(route, tiles)
    configs = ExpertsConfig(route, tiles)
    down_rows = _down_rows(packed[1], sizes)
    if batch_invariant or rows > MAX_UNSORTED_ROWS or down_rows is None:
        return configs
    return configs._replace(rows=(_gate_up_rows(packed[0]), down_rows))


def _route(sizes: ExpertSizes, rows: int, batch_invariant: bool, prompt: bool) -> RouteConfig:
    """Choose the launch config of the router."""
    if not batch_invariant and rows * sizes.stored <= MAX_LOGITS:
        # A program of one warp adds a logit, or chooses experts, without waiting for other warps.
        return RouteConfig(block_n=1, num_warps=1)
    if not batch_invariant and prompt:
        return RouteConfig(64, 64, 64, stages=4) if rows >= 1024 else RouteConfig(16, 32, 128)
    return RouteConfig(16, 16, 128, stages=4)


def _gate_up_rows(packed: Packed | None) -> AnyRows:
    """Choose the launch config of gate_up without sorted pairs. All its loads are in flight at a time."""
    if packed is None:
        return RowsConfig(2, num_warps=4)
    if multiplies(packed):
        # With 80 registers, six programs of four warps run on a multiprocessor.
        return ExpertGroupsConfig(4 if packed.k <= 2560 else 8, registers=80 if packed.k <= 2048 else 0)
    if packed.k > 2560:
        return PackedRowsConfig(16, num_warps=8)
    block_n = 32 if _loads(packed, 4) <= 4 and _is_simple(packed) else 16
    return PackedRowsConfig(block_n, num_warps=4, registers=168)


def _down_rows(packed: Packed | None, sizes: ExpertSizes) -> AnyRows | None:
    """Choose the launch config of down without sorted pairs.

    None: the weights of the experts of a row do not fit into the registers of a program. Then the pairs are sorted, and
    tiles of pairs are computed.
    """
    if packed is None:  # A lane holds eight registers for each of MAX_STEPS steps.
        steps = {warps: sizes.used * -(-sizes.intermediate // (256 * warps)) for warps in (1, 2, 4, 8)}
        warps = next((warps for warps in steps if steps[warps] <= MAX_STEPS), None)
        return None if warps is None else RowsConfig(2, warps)
    if down_multiplies(packed) and -(-sizes.used // DOWN_WARPS) * packed.k * packed.bits <= MAX_BITS:
        return ExpertGroupsConfig(DOWN_WARPS)
    warps = next((warps for warps in (8, 16) if _loads(packed, warps, sizes.used) <= 96 // warps), None)
    if warps is None:
        return None
    registers = 168 if warps == 8 and _has_row_scales(packed) else 0
    return PackedRowsConfig(16, warps, x_ahead=8, registers=registers)


def _loads(packed: Packed, warps: int, experts: int = 1) -> int:
    """Return the number of loads of each lane for eight rows of the weights of some experts, which the warps share.

    A load has 16 bytes. A tile of codes of six bits needs three.
    """
    return -(-experts * -(-packed.k // packed.tile) // warps) * (3 if packed.bits == 6 else 1)


def _has_row_scales(packed: Packed) -> bool:
    """Return whether a row of the weight has one scale, and no zero point."""
    return packed.group >= packed.k and not packed.zeros


def _is_simple(packed: Packed) -> bool:
    """Return whether only scales are loaded with the codes, at most one for each 64 columns."""
    return packed.plain and not packed.zeros and packed.group >= 64


def _dense_tiles(expected: float, gpu: Device, itemsize: int) -> tuple[TilesConfig, TilesConfig]:
    """Choose the launch configs of gate_up and down with dense weights, for the expected number of pairs."""
    programs = gpu.multiprocessors or PROGRAMS
    if expected <= FEW:
        gate_up = TilesConfig(16, 64, 256, stages=3, num_warps=4, programs=4 * programs)
        down = TilesConfig(16, 64, 128, stages=3, num_warps=4, programs=2 * programs)
    elif expected <= 2.5 * FEW:
        gate_up = down = TilesConfig(32, 64, 128, stages=3, num_warps=4, programs=2 * programs)
    elif expected <= 8 * FEW:
        gate_up = TilesConfig(64, 64, 128, stages=3, num_warps=4, programs=2 * programs)
        down = TilesConfig(64, 128, 64, stages=4, num_warps=8, programs=2 * programs)
    else:
        gate_up = TilesConfig(128, 128, 64, stages=4, num_warps=8, programs=2 * programs, extra_m=32)
        down = TilesConfig(128, 64, 64, stages=4, num_warps=4, programs=2 * programs, extra_m=32)
    return _fitted(gate_up, 2, gpu, itemsize), _fitted(down, 1, gpu, itemsize)


def _packed_tiles(
    packed: tuple[Packed | None, Packed | None], intermediate: int, expected: float, prompt: bool, gpu: Device,
    itemsize: int,
) -> tuple[AnyTiles, AnyTiles]:  # fmt: skip
    """Choose the launch configs of gate_up and down, at least one of which has packed weights."""
    programs = gpu.multiprocessors or PROGRAMS
    if prompt:
        block_m = 16 if expected <= FEW else 32 if expected <= 2.5 * FEW else 64 if expected <= 8 * FEW else 128
        prompts = [_prompt(each, block_m, gpu, programs) if each else None for each in packed]
        tile = min(config.block_m for config in prompts if config)
        own: list[AnyTiles | None] = [replace(config, block_m=tile) if config else None for config in prompts]
    else:
        # A dense product needs tiles of at least 16 pairs.
        tile = RING_PAIRS if expected <= FULL and all(packed) else 16
        own = [_decode_tiles(each, tile, gpu) if each else None for each in packed]
        gate_up, down = packed
        if gate_up and down and tile == RING_PAIRS and gpu.capability == 90 and expected > 0:
            own = [_ring(gate_up, intermediate, True, gpu) or own[0], _ring(down, gate_up.k, False, gpu) or own[1]]
    dense = _fitted(TilesConfig(tile, 64, 64, stages=3, num_warps=4, programs=2 * programs), 2, gpu, itemsize)
    return own[0] or dense, own[1] or dense


def _ring(packed: Packed, outputs: int, gated: bool, gpu: Device) -> RingTilesConfig | None:
    """Choose the launch config of a product of expert_ring, whose programs fill the shared memory.

    A stage has up to four units of 128 bytes of a row, because its warps wait for each other once a stage.

    None: expert_ring does not support the weight, or two stages do not fit.
    """
    warps = next((warps for warps in (4, 2) if ring_supports(packed, outputs, gated, warps)), None)
    if warps is None:
        return None
    columns = next(columns for columns in (4, 3, 2, 1) if packed.k // (2 * packed.tile) % columns == 0)
    stage, room = RingTilesConfig(warps, columns, 2, 0).stage_bytes, gpu.shared_memory - RESERVED
    own = activation_bytes(packed, warps) + RESERVED
    fit = min(gpu.registers // (32 * warps * RING_REGISTERS), room // (2 * stage + own))
    if not fit:
        return None
    stages, registers = min(8, (room // fit - own) // stage), gpu.registers // (32 * warps * fit)
    return RingTilesConfig(
        warps, columns, stages, gpu.multiprocessors * fit, RING_REGISTERS if registers < 255 else 0
    )  # fmt: skip


def _decode_tiles(packed: Packed, block_m: int, gpu: Device) -> PackedTilesConfig:
    """Choose the smallest number of warps whose registers hold a block, and as many programs as run at a time."""
    warps = 2 if _loads(packed, 2) <= 4 else 4 if _loads(packed, 4) <= 8 else 8
    registers = 0
    if _loads(packed, warps) <= 4 and _is_simple(packed) and block_m == 8:
        registers = 128 if _has_row_scales(packed) else 168
    fit = gpu.registers // (32 * warps * (registers or 255))
    stages = 2 if packed.bits == 6 else 8
    block_n = 32 if _is_simple(packed) or block_m == 8 else 16
    programs = gpu.multiprocessors * fit or PROGRAMS
    return PackedTilesConfig(
        block_m, block_n, x_ahead=4, stages=stages, num_warps=warps, programs=programs, registers=registers
    )


def _prompt(packed: Packed, block_m: int, gpu: Device, programs: int) -> PackedPromptConfig:
    """Reduce the stages from 3 to 2, then halve the tiles of `block_m` pairs, until they fit into shared memory."""
    block_n = 128 if gpu.capability in (90, 100) else 64  # Without wgmma the sums leave fewer registers.
    config = PackedPromptConfig(block_m, block_n, stages=3, num_warps=8, programs=2 * programs)
    # Bytes of a row of the activations and of the weight in a stage.
    x_bytes, weight_bytes = packed.tile * 2, packed.tile * packed.bits // 8
    available = gpu.shared_memory - RESERVED
    while gpu.shared_memory and config.stages * (config.block_m * x_bytes + block_n * weight_bytes) > available:
        smaller = dict(stages=2) if config.stages > 2 else dict(block_m=config.block_m // 2)
        config = replace(config, **smaller)
    return config


def _fitted(config: TilesConfig, weights: int, gpu: Device, itemsize: int) -> TilesConfig:
    """Return the config with fewer stages and columns, until its steps fit into the shared memory of a program.

    Args:
        weights: number of tiles of the weight of a step.
    """
    while gpu.shared_memory and config.block_k > 32:
        step = (weights * config.block_n + config.tile) * config.block_k * itemsize
        if config.stages * step <= gpu.shared_memory - RESERVED:
            break
        smaller = dict(stages=config.stages - 1) if config.stages > 2 else dict(block_k=config.block_k // 2)
        config = replace(config, **smaller)
    return config
