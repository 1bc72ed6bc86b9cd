"""Products with packed weights of experts against the references of dense weights."""

from functools import cache

import pytest
import torch
from check import check_op
from linear_product import GGUF_SCHEMES, SCHEMES, packed, width_of
from moe_util import EPS, empty_tiles, meta_of, partial_sums, random_routes
from util import BF16_ROUNDING, CUDA, DEVICE, covering, hopper_only, norm_weight, poisoned, random

from tridecode.kernels.device import device_of
from tridecode.kernels.linear.project import AddResidual, Gated, Normed
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.kernels.moe.arguments import ExpertSizes
from tridecode.kernels.moe.config import OPS, AnyRows, AnyTiles
from tridecode.kernels.moe.expert_groups import ExpertGroupsConfig
from tridecode.kernels.moe.expert_packed import PackedTilesConfig
from tridecode.kernels.moe.expert_ring import RingTilesConfig
from tridecode.kernels.moe.expert_weight import PackedRowsConfig
from tridecode.kernels.moe.prompt_packed import PackedPromptConfig
from tridecode.kernels.sort_pairs import SORT_PAIRS
from tridecode.tuning.experts import experts_config

EVERY_SCHEME = pytest.mark.parametrize("scheme", [*SCHEMES, *GGUF_SCHEMES])
SIZES = {
    "two of three, shared": (ExpertSizes(3, 2, 64, shared=True), 144),
    "one of two": (ExpertSizes(2, 1, 48), 96),
}
SMALL = next(iter(SIZES))
MODELS = {  # These have fewer experts than the models, so that several test processes fit on one GPU.
    "Qwen3-30B-A3B": (ExpertSizes(16, 8, 768), 2048),
    "Qwen3.6-35B-A3B": (ExpertSizes(16, 8, 512, shared=True), 2048),
    "704 columns": (ExpertSizes(16, 4, 704), 2816),
}
RING_SIZES = {  # Eight warps cannot share some of their tiles equally.
    "ring, shared": (ExpertSizes(3, 2, 768, shared=True), 1536),
    "ring, wide": (ExpertSizes(2, 1, 768), 2304),
}
GROUPS_SIZES = {  # Two and four warps cannot share three experts equally.
    "groups, shared": (ExpertSizes(3, 2, 256, shared=True), 256),
    "groups, wide": (ExpertSizes(2, 1, 512), 256),
}
RINGS = {
    "two warps": RingTilesConfig(2, 1, 2, 3),
    "four warps": RingTilesConfig(4, 3, 2, 264, 168),
    "eight warps": RingTilesConfig(8, 1, 5, 7, 128),
}
ROWS = {
    "one warp": PackedRowsConfig(16, 1, 2),
    "two warps": PackedRowsConfig(32, 2, 64),
    "four warps": PackedRowsConfig(16, 4, 16),
}
TILES = {
    "tiles of 16": PackedTilesConfig(16, 32, x_ahead=64, stages=64, num_warps=2, programs=3),
    "tiles of 8": PackedTilesConfig(8, 16, x_ahead=1, stages=2, num_warps=1, programs=2),
    "prompt": PackedPromptConfig(16, 32, 2, 4, 3),
}
PROMPTS = {"tiles of 16": PackedPromptConfig(16, 32, 2, 4, 3)}
if CUDA:
    TILES |= {"tiles of 32": PackedTilesConfig(32, 64, x_ahead=4, stages=64, num_warps=4, programs=264)}
    PROMPTS |= {"tiles of 128": PackedPromptConfig(128, 128, 3, 8, 132)}
TOLERANCE = BF16_ROUNDING + 2e-3
# Rounding weights to bf16 changes outputs by up to 0.5% before they are rounded themselves. The interpreter truncates.
ROUNDED = TOLERANCE + (5e-3 if CUDA else 8e-3)


def sizes_of(scheme: str, name: str) -> tuple[ExpertSizes, int]:
    """Return sizes of SIZES, RING_SIZES or MODELS, with widths that the scheme can have."""
    sizes, hidden = (SIZES | RING_SIZES | GROUPS_SIZES | MODELS)[name]
    return sizes._replace(intermediate=width_of(scheme, sizes.intermediate)), width_of(scheme, hidden)


@cache
def weights(scheme: str, name: str) -> tuple[LoadedLinear, LoadedLinear]:
    sizes, hidden = sizes_of(scheme, name)
    n = sizes.stored * sizes.intermediate
    return packed(scheme, 2 * n, hidden), packed(scheme, sizes.stored * hidden, sizes.intermediate)


def tolerance_of(linear: LoadedLinear, config) -> float:
    """Return the tolerance of a product, which depends on whether weights are rounded."""
    description = linear.packed
    if isinstance(config, ExpertGroupsConfig):
        return TOLERANCE
    grouped = description.group < description.k
    if isinstance(config, PackedPromptConfig):
        return ROUNDED if grouped else TOLERANCE
    rounded = grouped and description.number_type != "e4m3" and (description.minimums or description.group < 32)
    return ROUNDED if rounded else TOLERANCE


def check_rows(scheme: str, name: str, rows: int, *configs: AnyRows) -> None:
    """Check both products of a few rows. configs: those of gate_up and of down, or one for both."""
    config, down_config = configs[0], configs[-1]
    sizes, hidden = sizes_of(scheme, name)
    gate_up, down = weights(scheme, name)
    x, meta = random(rows, hidden, dtype=torch.bfloat16), meta_of(rows, (1,)[: rows // 2])
    routes, gated = random_routes(rows, sizes), Gated(partial_sums(x), 3, EPS)
    act = poisoned(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16)
    tolerance = tolerance_of(gate_up, config)
    check_op(OPS[type(config)].gate_up, (meta, x, gate_up, routes, act, gated, sizes), dict(config=config), tolerance)

    act = random(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16, seed=3)
    out = random(rows, hidden, seed=5)
    normed = poisoned(rows, hidden, dtype=torch.bfloat16)
    epilogue = AddResidual(norm_weight(hidden, torch.bfloat16), normed, poisoned(rows, hidden))
    programs, tolerance = down_config.programs(hidden), tolerance_of(down, down_config)
    check_op(
        OPS[type(down_config)].down, (meta, act, down, routes, out, epilogue, sizes), dict(config=down_config),
        {"out": tolerance, "epilogue.normed": tolerance, "epilogue.sumsq": tolerance},
        accumulates=("out", "epilogue.sumsq"),
        views={"epilogue.sumsq": lambda sums: sums[:, :programs].nan_to_num(0.0).sum(1)},
    )  # fmt: skip


def check_tiles(scheme: str, name: str, rows: int, prompt: bool, *configs: AnyTiles) -> None:
    """Check both products of tiles of pairs. configs: those of gate_up and of down, or one for both."""
    config, down_config = configs[0], configs[-1]
    sizes, hidden = sizes_of(scheme, name)
    gate_up, down = weights(scheme, name)
    routes, tiles = random_routes(rows, sizes, (2,)[: rows // 3]), empty_tiles(rows, sizes)
    SORT_PAIRS.ref(None, routes.ids, tiles, sizes.stored, config.tile)
    x = random(rows, hidden, dtype=torch.bfloat16)
    normed = None if prompt else Normed(partial_sums(x), 3, EPS)
    act = poisoned(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16)
    tolerance = tolerance_of(gate_up, config)
    check_op(OPS[type(config)].gate_up, (x, gate_up, tiles, routes, act, normed, sizes), dict(config=config), tolerance)

    act = random(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16, seed=3)
    out = poisoned(rows, sizes.used * hidden, dtype=torch.bfloat16 if prompt else torch.float32)
    tolerance = tolerance_of(down, down_config)
    check_op(OPS[type(down_config)].down, (act, down, tiles, routes, out, sizes), dict(config=down_config), tolerance)


@pytest.mark.parametrize("scheme", GGUF_SCHEMES)
@pytest.mark.parametrize(
    "name, rows, warps", [("groups, shared", 3, 2), ("groups, wide", 1, 4), ("groups, shared", 1, 1)]
)
def test_groups_match_the_reference(scheme, name, rows, warps):
    check_rows(scheme, name, rows, ExpertGroupsConfig(warps))


@EVERY_SCHEME
def test_one_row_matches_the_reference(scheme):
    check_rows(scheme, SMALL, 1, ROWS["two warps"])


@covering(
    2, scheme=["int4", "int4_a_row", "e4m3_blocks", "int4_minimums_over"], name=list(SIZES), rows=[1, 2, 3], config=ROWS
)
def test_rows_match_the_reference(scheme, name, rows, config):
    check_rows(scheme, name, rows, config)


@EVERY_SCHEME
def test_tiles_match_the_reference(scheme):
    check_tiles(scheme, SMALL, 5, False, TILES["tiles of 16"])


@covering(
    2, scheme=["int4", "int8_zeros", "e4m3", "int8_minimums_over"], name=list(SIZES), rows=[1, 7, 40], config=TILES
)
def test_tiles_of_several_rows_match_the_reference(scheme, name, rows, config):
    check_tiles(scheme, name, rows, False, config)


@hopper_only
@covering(
    2,
    scheme=["int4_groups_of_128", "int4_a_row", "e4m3", "e4m3_blocks"],
    name=list(RING_SIZES),
    rows=[1, 7, 40],
    config=RINGS,
)
def test_rings_match_the_reference(scheme, name, rows, config):
    check_tiles(scheme, name, rows, False, config)


@EVERY_SCHEME
def test_prompt_matches_the_reference(scheme):
    check_tiles(scheme, SMALL, 9, True, PROMPTS["tiles of 16"])


@covering(
    2,
    scheme=["int4", "int4_ordered", "e4m3_blocks", "int4_minimums_over"],
    name=list(SIZES),
    rows=[19, 70],
    config=PROMPTS,
)
def test_prompts_of_many_rows_match_the_reference(scheme, name, rows, config):
    check_tiles(scheme, name, rows, True, config)


@pytest.mark.skipif(not CUDA, reason="the launch configs of a GPU, at widths for which the interpreter takes minutes")
@covering(
    2,
    scheme=[
        "int4",
        "int4_groups_of_128",
        "int4_a_row",
        "int8_zeros",
        "e4m3",
        "e4m3_blocks",
        "int6_over",
        "int8_minimums_over",
    ],
    name=list(MODELS),
    passes=["1", "2", "7", "40", "prompt of 19", "prompt of 300"],
)
def test_configs_in_use_match_the_reference(scheme, name, passes):
    """A pass is named by its number of rows."""
    rows, prompt, linears = int(passes.split()[-1]), passes.startswith("prompt"), weights(scheme, name)
    gpu = device_of(torch.device(DEVICE))
    config = experts_config(
        sizes_of(scheme, name)[0], rows, gpu, False, prompt, packed=tuple(each.packed for each in linears)
    )
    if config.rows is not None:
        check_rows(scheme, name, rows, *config.rows)
    else:
        check_tiles(scheme, name, rows, prompt, *config.tiles)
