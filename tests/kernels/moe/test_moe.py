"""Ops of mixtures of experts against their references."""

from dataclasses import replace

import pytest
import torch
from check import check_op
from moe_util import EPS, chunk_table, dense, empty_routes, empty_tiles, meta_of, partial_sums, random_routes
from util import BF16_ROUNDING, CUDA, DEVICE, norm_weight, poisoned, random

from tridecode.kernels.linear.project import AddResidual, Gated, Normed
from tridecode.kernels.moe.add_experts import ADD_EXPERTS
from tridecode.kernels.moe.arguments import ExpertSizes, Router
from tridecode.kernels.moe.expert_rows import DOWN_ROWS, GATE_UP_ROWS, RowsConfig
from tridecode.kernels.moe.expert_tiles import DOWN_TILES, GATE_UP_TILES, TilesConfig
from tridecode.kernels.moe.route import ROUTE, RouteConfig
from tridecode.kernels.sort_pairs import SORT_PAIRS
from tridecode.layout import Chunk

SIZES = {
    "two of six": (ExpertSizes(6, 2, 48), 96),
    "not normalized, shared": (ExpertSizes(5, 3, 40, normalize=False, shared=True), 80),
    "one of four, shared": (ExpertSizes(4, 1, 32, shared=True), 64),
}
if CUDA:
    SIZES |= {
        "Qwen3-30B-A3B": (ExpertSizes(128, 8, 768), 2048),
        "Qwen3.6-35B-A3B": (ExpertSizes(256, 8, 512, shared=True), 2048),
        "Qwen3-Next-80B-A3B": (ExpertSizes(512, 10, 512, shared=True), 2048),
        "Qwen1.5-MoE-A2.7B": (ExpertSizes(60, 4, 1408, normalize=False), 2048),
    }
EVERY_SIZE = pytest.mark.parametrize("sizes, hidden", SIZES.values(), ids=SIZES)
# Fewer experts, so that the weights of several test processes fit on one GPU.
FEWER = [(sizes._replace(experts=min(sizes.experts, 24)), hidden) for sizes, hidden in SIZES.values()]
EVERY_PRODUCT = pytest.mark.parametrize("sizes, hidden", FEWER, ids=SIZES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
ROUTE_CONFIGS = {"row by row": RouteConfig(1, 4, 64, 1), "tiles": RouteConfig(16, 16, 32, 4)}
TILES = TilesConfig(16, 32, 32, 2, 4, 3)
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: BF16_ROUNDING + 1e-3}


def route_args(sizes, hidden, rows, dtype=torch.float32, chunks=None, decoding=None, idle=(), normed=True):
    x = random(rows, hidden, dtype=dtype)
    router = Router(
        random(sizes.experts, hidden, dtype=dtype, scale=2 * hidden**-0.5, seed=1),
        random(1, hidden, dtype=dtype, scale=hidden**-0.5, seed=2) if sizes.shared else None,
    )
    meta = meta_of(rows if decoding is None else decoding, idle) if decoding != 0 else None
    counter = torch.zeros(rows, 1, dtype=torch.int32, device=DEVICE)
    epilogue = Normed(partial_sums(x), 3, EPS) if normed else None
    return meta, chunks, x, router, epilogue, empty_routes(rows, sizes), counter, sizes


@EVERY_SIZE
@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 19])
@pytest.mark.parametrize("config", ROUTE_CONFIGS.values(), ids=ROUTE_CONFIGS)
def test_route_matches_reference(sizes, hidden, dtype, rows, config):
    args = route_args(sizes, hidden, rows, dtype)
    check_op(ROUTE, args, dict(config=config), {"routes.logits": 5e-6, "routes.ids": 0.0, "routes.weights": 2e-5})


@pytest.mark.parametrize("config", ROUTE_CONFIGS.values(), ids=ROUTE_CONFIGS)
def test_idle_rows_get_no_routes(config):
    sizes, hidden = SIZES["not normalized, shared"]
    args = route_args(sizes, hidden, 5, idle=(0, 3))
    check_op(ROUTE, args, dict(config=config), {"routes.logits": 5e-6, "routes.ids": 0.0, "routes.weights": 2e-5})


@pytest.mark.parametrize("decoding", [0, 3])
def test_rows_of_a_prompt_pass_without_a_token_have_no_experts(decoding):
    sizes, hidden = SIZES["one of four, shared"]
    chunks = chunk_table(Chunk(4, 5, 2, 0), Chunk(5, 8, 9, 64))
    args = route_args(sizes, hidden, 23, chunks=chunks, decoding=decoding, idle=(1,)[:decoding], normed=False)
    config = dict(config=ROUTE_CONFIGS["tiles"])
    routes = check_op(ROUTE, args, config, {"routes.logits": 5e-6, "routes.weights": 2e-5}, idle=False).launched[
        "routes"
    ]
    tokens = (set(range(decoding)) - {1}) | {5, 6} | set(range(8, 17))
    assert {row for row, ids in enumerate(routes.ids.tolist()) if ids[0] >= 0} == tokens


@pytest.mark.parametrize("config", ROUTE_CONFIGS.values(), ids=ROUTE_CONFIGS)
def test_equal_logits_choose_the_lowest_expert(config):
    sizes, hidden = ExpertSizes(7, 4, 32), 64
    args = route_args(sizes, hidden, 2)
    args[3].weight[:] = args[3].weight[:1]
    args[3].weight[5] *= 2  # The first row prefers it or likes it least.
    routes = args[5]
    ROUTE.launch(*args, config=config)
    best = [[5, 0, 1, 2] if logits[5] > logits[0] else [0, 1, 2, 3] for logits in routes.logits.tolist()]
    assert routes.ids.tolist() == best


@pytest.mark.parametrize("config", ROUTE_CONFIGS.values(), ids=ROUTE_CONFIGS)
def test_a_row_with_nan_chooses_valid_experts(config):
    sizes, hidden = SIZES["two of six"]
    meta, chunks, x, router, normed, routes, counter, _ = route_args(sizes, hidden, 3)
    x[1, 7] = float("nan")
    ROUTE.launch(meta, chunks, x, router, normed, routes, counter, sizes, config=config)
    assert sorted(set(routes.ids[1].tolist())) == sorted(routes.ids[1].tolist())
    assert all(0 <= expert < sizes.experts for expert in routes.ids[1].tolist())
    assert routes.weights[1].isnan().all() and routes.weights[[0, 2]].isfinite().all()


@EVERY_SIZE
@pytest.mark.parametrize("rows, tile", [(1, 16), (7, 2), (64, 16)])
@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
def test_pairs_are_sorted(sizes, hidden, rows, tile, prompt):
    without = (0, 4)[: rows // 4]
    meta = None if prompt else meta_of(rows, without)
    routes = random_routes(rows, sizes, without if prompt else ())
    check_op(SORT_PAIRS, (meta, routes.ids, empty_tiles(rows, sizes), sizes.stored, tile), idle=False)


def test_idle_rows_have_no_tiles():
    sizes, tiles = ExpertSizes(6, 2, 48), empty_tiles(3, ExpertSizes(6, 2, 48))
    SORT_PAIRS.launch(meta_of(3, (0, 1, 2)), random_routes(3, sizes).ids, tiles, sizes.stored, 16)
    assert tiles.number[0].item() == 0


@pytest.mark.parametrize("counted", [False, True])
def test_pairs_of_one_expert_fill_several_blocks(counted):
    sizes = ExpertSizes(3, 1, 32)
    routes = random_routes(1500, sizes)
    routes.ids[routes.ids == 1] = 0
    counts = torch.zeros(3000, dtype=torch.int32, device=DEVICE) if counted else None
    args = None, routes.ids, empty_tiles(1500, sizes), sizes.stored, 128, counts
    check_op(SORT_PAIRS, args, scratch=("counts",))


@EVERY_SIZE
@pytest.mark.parametrize("rows, tile", [(1025, 16), (2500, 160)])
@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
def test_many_pairs_are_counted_first(sizes, hidden, rows, tile, prompt):
    without = (0, 4, 700)
    meta = None if prompt else meta_of(rows, without)
    routes = random_routes(rows, sizes, without if prompt else ())
    counts = torch.zeros(2 * rows * sizes.used, dtype=torch.int32, device=DEVICE)
    args = meta, routes.ids, empty_tiles(rows, sizes), sizes.stored, tile, counts
    check_op(SORT_PAIRS, args, idle=False, scratch=("counts",))


@EVERY_PRODUCT
@DTYPES
@pytest.mark.parametrize("rows, config", [(1, RowsConfig(2, 1)), (3, RowsConfig(1, 2))])
def test_rows_match_reference(sizes, hidden, dtype, rows, config):
    x, meta = random(rows, hidden, dtype=dtype), meta_of(rows, (1,)[: rows // 2])
    routes, gated = random_routes(rows, sizes), Gated(partial_sums(x), 3, EPS)
    linear = dense(sizes.stored * 2 * sizes.intermediate, hidden, dtype)
    act = poisoned(rows, sizes.used * sizes.intermediate, dtype=dtype)
    args = meta, x, linear, routes, act, gated, sizes
    check_op(GATE_UP_ROWS, args, dict(config=config), TOLERANCE[dtype])

    act = random(rows, sizes.used * sizes.intermediate, dtype=dtype, seed=3)
    linear = dense(sizes.stored * hidden, sizes.intermediate, dtype, seed=4)
    out = random(rows, hidden, seed=5)
    epilogue = AddResidual(norm_weight(hidden, dtype), poisoned(rows, hidden, dtype=dtype), poisoned(rows, hidden))
    programs = config.programs(hidden)
    check_op(
        DOWN_ROWS, (meta, act, linear, routes, out, epilogue, sizes), dict(config=config),
        {"out": 2e-6, "epilogue.normed": TOLERANCE[dtype], "epilogue.sumsq": 2e-5},
        accumulates=("out", "epilogue.sumsq"),
        views={"epilogue.sumsq": lambda sums: sums[:, :programs].nan_to_num(0.0).sum(1)},
    )  # fmt: skip


@EVERY_PRODUCT
@DTYPES
@pytest.mark.parametrize("rows", [1, 5, 40])
@pytest.mark.parametrize("prompt", [False, True], ids=["decode", "prompt"])
@pytest.mark.parametrize("extra", [0, 16])
def test_tiles_match_reference(sizes, hidden, dtype, rows, prompt, extra):
    without = (2,)[: rows // 3]
    routes, tiles = random_routes(rows, sizes, without), empty_tiles(rows, sizes)
    config = replace(TILES, extra_m=extra)
    SORT_PAIRS.ref(None, routes.ids, tiles, sizes.stored, config.tile)
    x = random(rows, hidden, dtype=dtype)
    normed = None if prompt else Normed(partial_sums(x), 3, EPS)
    linear = dense(sizes.stored * 2 * sizes.intermediate, hidden, dtype)
    act = poisoned(rows, sizes.used * sizes.intermediate, dtype=dtype)
    args = x, linear, tiles, routes, act, normed, sizes
    check_op(GATE_UP_TILES, args, dict(config=config), TOLERANCE[dtype])

    act = random(rows, sizes.used * sizes.intermediate, dtype=dtype, seed=3)
    linear = dense(sizes.stored * hidden, sizes.intermediate, dtype, seed=4)
    out = poisoned(rows, sizes.used * hidden, dtype=dtype if prompt else torch.float32)
    tolerance = TOLERANCE[dtype] if prompt else 2e-5
    check_op(DOWN_TILES, (act, linear, tiles, routes, out, sizes), dict(config=config), tolerance)


@EVERY_SIZE
@DTYPES
def test_experts_are_added(sizes, hidden, dtype):
    rows = 5
    x, routes = random(rows, sizes.used * hidden, dtype=dtype), random_routes(rows, sizes, (3,))
    x[3] = float("nan")
    for shared in (None, random(rows, hidden, dtype=dtype, seed=6)):
        args = None, x, routes, poisoned(rows, hidden, dtype=dtype), None, sizes, shared
        check_op(ADD_EXPERTS, args, tolerance=TOLERANCE[dtype])
    ADD_EXPERTS.launch(*args)
    expected = args[3].clone()
    args[3].copy_(shared)
    ADD_EXPERTS.launch(*args[:6], args[3])
    assert torch.equal(args[3], expected), "the output differs if it is also the input"
    out = random(rows, hidden, seed=5)
    epilogue = AddResidual(norm_weight(hidden, dtype), poisoned(rows, hidden, dtype=dtype), poisoned(rows, hidden))
    check_op(
        ADD_EXPERTS, (meta_of(rows, (3,)), x, routes, out, epilogue, sizes), tolerance={
            "out": 2e-6, "epilogue.normed": TOLERANCE[dtype], "epilogue.sumsq": 2e-5
        }, accumulates=("out", "epilogue.sumsq"), views={"epilogue.sumsq": lambda sums: sums[:, :1]},
    )  # fmt: skip
