"""Products with packed weights of experts against the references of dense weights."""

from functools import cache

import pytest
import torch
from check import check_op
from linear_product import GGUF_SCHEMES, SCHEMES, packed, width_of
from moe_util import EPS, empty_tiles, meta_of, partial_sums, random_routes
from util import BF16_ROUNDING, CUDA, covering, norm_weight, poisoned, random

from tridecode.kernels.linear.project import AddResidual, Gated, Normed
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.kernels.moe.arguments import Experts
from tridecode.kernels.moe.down_packed import DOWN_PACKED_ROWS
from tridecode.kernels.moe.expert_packed import (
    DOWN_PACKED_TILES,
    GATE_UP_PACKED_ROWS,
    GATE_UP_PACKED_TILES,
    PackedTilesConfig,
)
from tridecode.kernels.moe.expert_weight import PackedRowsConfig
from tridecode.kernels.moe.prompt_packed import DOWN_PACKED_PROMPT, GATE_UP_PACKED_PROMPT, PackedPromptConfig
from tridecode.kernels.moe.sort_pairs import SORT_PAIRS

EVERY_SCHEME = pytest.mark.parametrize("scheme", [*SCHEMES, *GGUF_SCHEMES])
SIZES = {
    "two of three, shared": (Experts(3, 2, 64, shared=True), 144),
    "one of two": (Experts(2, 1, 48), 96),
}
if CUDA:  # The widths of these models, with fewer experts, so that several test processes fit on one GPU.
    SIZES |= {
        "Qwen3-30B-A3B": (Experts(16, 8, 768), 2048),
        "Qwen3.6-35B-A3B": (Experts(16, 8, 512, shared=True), 2048),
        "704 columns": (Experts(16, 4, 704), 2816),
    }
SMALL = next(iter(SIZES))
ROWS = {
    "one warp, shared": PackedRowsConfig(16, 1, 2, max_programs=3),
    "two warps": PackedRowsConfig(32, 2, 64),
    "four warps, rounded, shared": PackedRowsConfig(16, 4, 16, max_programs=5, rounds=True),
}
TILES = {
    "tiles of 16": PackedTilesConfig(32, 2, 64, block_m=16, max_programs=3),
    "tiles of 8, rounded": PackedTilesConfig(16, 1, 1, rounds=True, block_m=8, max_programs=2),
    "prompt": PackedPromptConfig(16, 32, 2, 4, 3),
}
PROMPTS = {"tiles of 16": PackedPromptConfig(16, 32, 2, 4, 3)}
if CUDA:
    TILES |= {"tiles of 32": PackedTilesConfig(64, 4, 4, block_m=32, max_programs=264)}
    PROMPTS |= {"tiles of 128": PackedPromptConfig(128, 128, 3, 8, 132)}
TOLERANCE = BF16_ROUNDING + 2e-3
ROUNDED = TOLERANCE + (2e-3 if CUDA else 8e-3)  # Weights are rounded to bf16. The interpreter truncates them.
OPS = {
    PackedTilesConfig: (GATE_UP_PACKED_TILES, DOWN_PACKED_TILES),
    PackedPromptConfig: (GATE_UP_PACKED_PROMPT, DOWN_PACKED_PROMPT),
}


def sizes_of(scheme: str, name: str) -> tuple[Experts, int]:
    """Return sizes of SIZES, with widths that the scheme can have."""
    sizes, hidden = SIZES[name]
    return sizes._replace(intermediate=width_of(scheme, sizes.intermediate)), width_of(scheme, hidden)


@cache
def weights(scheme: str, name: str) -> tuple[LoadedLinear, LoadedLinear]:
    sizes, hidden = sizes_of(scheme, name)
    n = sizes.stored * sizes.intermediate
    return packed(scheme, 2 * n, hidden), packed(scheme, sizes.stored * hidden, sizes.intermediate)


def tolerance_of(linear: LoadedLinear, config) -> float:
    """Return the tolerance of a product, which depends on whether weights are rounded."""
    description = linear.packed
    grouped = description.group < description.k
    if isinstance(config, PackedPromptConfig):
        return ROUNDED if grouped else TOLERANCE
    integers = grouped and description.number_type != "e4m3"
    return ROUNDED if integers and (config.rounds or description.minimums or description.group < 32) else TOLERANCE


def check_rows(scheme: str, name: str, rows: int, config: PackedRowsConfig) -> None:
    sizes, hidden = sizes_of(scheme, name)
    gate_up, down = weights(scheme, name)
    x, meta = random(rows, hidden, dtype=torch.bfloat16), meta_of(rows, (1,)[: rows // 2])
    routes, gated = random_routes(rows, sizes), Gated(partial_sums(x), 3, EPS)
    act = poisoned(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16)
    tolerance = tolerance_of(gate_up, config)
    check_op(GATE_UP_PACKED_ROWS, (meta, x, gate_up, routes, act, gated, sizes), dict(config=config), tolerance)

    act = random(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16, seed=3)
    out = random(rows, hidden, seed=5)
    normed = poisoned(rows, hidden, dtype=torch.bfloat16)
    epilogue = AddResidual(norm_weight(hidden, torch.bfloat16), normed, poisoned(rows, hidden))
    programs, tolerance = config.programs(hidden), tolerance_of(down, config)
    check_op(
        DOWN_PACKED_ROWS, (meta, act, down, routes, out, epilogue, sizes), dict(config=config),
        {"out": tolerance, "epilogue.normed": tolerance, "epilogue.sumsq": tolerance},
        accumulates=("out", "epilogue.sumsq"),
        views={"epilogue.sumsq": lambda sums: sums[:, :programs].nan_to_num(0.0).sum(1)},
    )  # fmt: skip


def check_tiles(
    scheme: str, name: str, rows: int, config: PackedTilesConfig | PackedPromptConfig, prompt: bool
) -> None:
    sizes, hidden = sizes_of(scheme, name)
    gate_up, down = weights(scheme, name)
    gate_up_op, down_op = OPS[type(config)]
    routes, tiles = random_routes(rows, sizes, (2,)[: rows // 3]), empty_tiles(rows, sizes)
    SORT_PAIRS.ref(None, routes.ids, tiles, sizes, config.tile)
    x = random(rows, hidden, dtype=torch.bfloat16)
    normed = None if prompt else Normed(partial_sums(x), 3, EPS)
    act = poisoned(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16)
    tolerance = tolerance_of(gate_up, config)
    check_op(gate_up_op, (x, gate_up, tiles, routes, act, normed, sizes), dict(config=config), tolerance)

    act = random(rows, sizes.used * sizes.intermediate, dtype=torch.bfloat16, seed=3)
    out = poisoned(rows, sizes.used * hidden, dtype=torch.bfloat16 if prompt else torch.float32)
    tolerance = tolerance_of(down, config)
    check_op(down_op, (act, down, tiles, routes, out, sizes), dict(config=config), tolerance)


@EVERY_SCHEME
def test_one_row_matches_the_reference(scheme):
    check_rows(scheme, SMALL, 1, ROWS["two warps"])


@covering(2, scheme=["int4", "int4_a_row", "e4m3_blocks", "int6_over"], name=list(SIZES), rows=[1, 2, 3], config=ROWS)
def test_rows_match_the_reference(scheme, name, rows, config):
    check_rows(scheme, name, rows, config)


@EVERY_SCHEME
def test_tiles_match_the_reference(scheme):
    check_tiles(scheme, SMALL, 5, TILES["tiles of 16"], False)


@covering(
    2, scheme=["int4", "int8_zeros", "e4m3", "int8_minimums_over"], name=list(SIZES), rows=[1, 7, 40], config=TILES
)
def test_tiles_of_several_rows_match_the_reference(scheme, name, rows, config):
    check_tiles(scheme, name, rows, config, False)


@EVERY_SCHEME
def test_prompt_matches_the_reference(scheme):
    check_tiles(scheme, SMALL, 9, PROMPTS["tiles of 16"], True)


@covering(
    2,
    scheme=["int4", "int4_ordered", "e4m3_blocks", "int4_minimums_over"],
    name=list(SIZES),
    rows=[19, 70],
    config=PROMPTS,
)
def test_prompts_of_many_rows_match_the_reference(scheme, name, rows, config):
    check_tiles(scheme, name, rows, config, True)
