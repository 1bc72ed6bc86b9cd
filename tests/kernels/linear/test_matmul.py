"""Linears of a few rows on tensor cores: kernels, epilogues and sizes, and the independence of rows."""

from dataclasses import replace

import pytest
import torch
from linear_product import EPILOGUES, EPS, PLAIN, TOLERANCE, Product, dense, idle, kernel_of
from models_to_tune import H200, case
from util import CUDA, HOPPER, Case, assert_close, covering, poisoned, random

from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.project import Normed
from tridecode.tuning.rules import choose

DTYPE = torch.bfloat16 if CUDA else torch.float32  # The interpreter multiplies in fp32 for any dtype.
SMALL = {
    "registers": MatmulConfig(16, 2, 2, 1),
    "rows_shared": MatmulConfig(16, 2, 1, 32, programs=2),
    "tiles": TilesConfig(16, 32, 2),
    "wide": WideConfig(32, 32, 9, 1, num_warps=1),
    "split": WideConfig(16, 32, 3, 2, num_warps=1, split=3),
}
if HOPPER:
    SMALL |= {
        "hopper": HopperConfig(64, 128, 4, 4),
        "hopper_split": HopperConfig(64, 64, 7, 4, split=3, num_warps=8),
        "hopper_rows_shared": HopperConfig(128, 64, 5, 3, programs=3),
        "hopper_producer": HopperConfig(128, 128, 3, 2, lag=1, registers=80, producer=1),
    }
CASES = [
    Case("qwen2.5-0.5b_qkv", gpu=dict(n=1152, k=896), small=dict(n=27, k=96)),
    Case("qwen3-4b_down", gpu=dict(n=2560, k=9728), small=dict(n=32, k=352)),
    Case("llama-3.1-8b_qkv", gpu=dict(n=6144, k=4096), small=dict(n=48, k=128)),
    Case("odd_columns", gpu=dict(n=1001, k=4872), small=dict(n=37, k=104)),
    Case("vocabulary", gpu=dict(n=151936, k=1024), small=dict(n=101, k=64)),
]
FORM = covering(1, form=SMALL.keys())


def config_for(form: str, n: int, k: int, rows: int, gated: bool = False):
    """Return a config of a form. On a GPU it is the config that engines use for such a weight."""
    if not CUDA:
        return SMALL[form]
    if isinstance(SMALL[form], HopperConfig):
        return replace(SMALL[form], split=1) if gated else SMALL[form]
    if form == "rows_shared":  # Activations stay in registers if they fit. Otherwise the kernel loads them repeatedly.
        return MatmulConfig(16, 4, 4, 2 if rows > 8 or k > 2560 else 32, programs=60)
    if form == "registers":
        if rows > 16:
            return MatmulConfig(16, 4, 4, 2)
        ahead = (12, 8) if rows <= 8 else (8, 4)
        return MatmulConfig(16, 4, *ahead) if k < 6144 else MatmulConfig(32, 8, 5 if rows <= 8 else 8, 4)
    if form == "tiles":
        if rows <= 16:
            return TilesConfig(32, 256, 4) if n >= 2**16 else TilesConfig(32, 64, 4)
        return TilesConfig(32, 64, 4, block_m=64) if gated or n >= 2**16 else TilesConfig(64, 128, 6, block_m=64)
    if form == "split":
        return WideConfig(128, 64, 2, 1, 8, split=4)
    return WideConfig(64, 128, 3, 1, split=1 if k < 6144 else 4)  # The kernel unrolls its loop over tiles.


def product(epilogue, n, k, rows, **options) -> Product:
    return Product(epilogue, dense(2 * n if epilogue == "gated" else n, k, DTYPE), rows, DTYPE, **options)


@covering(2, form=SMALL.keys(), rows=[2, 3, 8, 16, 33, 64] if CUDA else [3, 8], case=CASES, epilogue=EPILOGUES)
def test_epilogues_match_the_reference(case, rows, form, epilogue):
    n, k, gated = case.sizes["n"], case.sizes["k"], epilogue == "gated"
    if gated and n > 2**16:
        n //= 8
    product(epilogue, n, k, rows).check(config_for(form, n, k, rows, gated))


@covering(1, rows=[8, 24, 64] if CUDA else [24], epilogue=EPILOGUES)
def test_weights_whose_rows_tma_cannot_read(epilogue, rows):
    """The rows begin at addresses that are not multiples of 16 bytes."""
    n, k = (1024, 2730) if CUDA else (37, 90)
    part = case(2 * n if epilogue == "gated" else n, k, "bfloat16", epilogue.partition("_")[0])
    choice = choose(part, rows, H200)
    assert choice.kernel.name == "matmul"
    product(epilogue, n, k, rows).check(choice.config)


@pytest.mark.parametrize("form", ["registers", "rows_shared"])
@pytest.mark.parametrize("epilogue", PLAIN)
def test_products_without_a_norm_match_the_reference(epilogue, form):
    product(epilogue, 37, 104, 3).check(SMALL[form])


@pytest.mark.skipif(not CUDA, reason="the interpreter multiplies with numpy, whose sums depend on the row index")
@FORM
@pytest.mark.parametrize("rows", [16, 64])
def test_a_row_has_the_same_bits_at_any_place_with_any_neighbors(rows, form):
    n, k = 2560, 4096
    config, first, outs = config_for(form, n, k, rows), product("normed", n, k, rows, stopped=()), []
    for place in (0, rows // 2, rows - 1):
        other = product("normed", n, k, rows, stopped=())
        other.linear = first.linear
        other.x.copy_(random(rows, k, dtype=DTYPE, seed=10 + place))
        other.partials = random(rows, 5, seed=place).abs() * k / 3
        other.x[place], other.partials[place] = first.x[0], first.partials[0]
        if place:
            other.x[0] = float("nan")
        out, _, _ = other.launch(config)
        assert place == 0 or out[0].isnan().all()
        outs.append(out[place])
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])


@covering(1, form=SMALL.keys(), epilogue=EPILOGUES)
def test_stopped_rows_are_not_written(epilogue, form):
    config = SMALL[form]
    if epilogue == "gated" and isinstance(config, HopperConfig):
        config = replace(config, split=1)
    product(epilogue, 32, 64, 4).check_stopped(config)


def test_tiles_reject_a_buffer_with_too_few_rows():
    linear, x = dense(32, 64, DTYPE), random(3, 64, dtype=DTYPE)
    epilogue = Normed(random(3, 5).abs(), 5, EPS)
    with pytest.raises(RuntimeError, match="out of bounds"):
        kernel_of(SMALL["tiles"]).op.launch(idle(3), x, linear, poisoned(3, 32), epilogue, config=SMALL["tiles"])


def outputs(n, k, rows, config):
    """Return the outputs of all epilogues for the first `rows` of 64 rows, by name."""
    left = {}
    for epilogue in ("normed", "gated", "residual"):
        one = product(epilogue, n, k, 64, stopped=())
        one.rows, one.meta, one.x, one.partials = rows, one.meta[:rows], one.x[:rows], one.partials[:rows]
        one.outputs = [output[:rows] for output in one.outputs]
        one.hidden = one.hidden[:rows]
        out, normed, sumsq = one.launch(config)
        left[epilogue] = out
    return left | {"norm": normed, "sumsq": sumsq[:, : one.partial_sums(config)]}


@covering(1, programs=[1, 2, 3, 7], x_ahead={"streamed": 1, "kept": 32})
def test_number_of_programs_does_not_change_the_outputs(programs, x_ahead):
    """Programs have one iteration or several, complete or not. There may be fewer blocks than programs."""
    n, k, rows = 88, 320, 3
    config = MatmulConfig(16, 2, 3, x_ahead)
    alone, shared = outputs(n, k, rows, config), outputs(n, k, rows, replace(config, programs=programs))
    assert shared["sumsq"].shape == (rows, min(programs, 6))
    assert_close(shared.pop("sumsq").sum(1), alone.pop("sumsq").sum(1), TOLERANCE)
    for name, one in alone.items():
        assert torch.equal(one, shared[name]), name


def invariant_config(rows: int, split: int) -> WideConfig:
    """Return a config of batch-invariant mode: tiles of at least 16 rows, all with the same instruction."""
    if split > 3 and rows <= 32:
        return WideConfig(64, 128, 4, 3, split=split, block_m=16)
    ahead = 3 if rows <= 32 else 2
    return WideConfig(64, 128, ahead, 1, split=split, registers=168 if rows <= 16 else 0, block_m=16)


@pytest.mark.skipif(
    not CUDA, reason="the test compares the order of sums on tensor cores, which the interpreter does not use"
)
@pytest.mark.parametrize(
    "n, k, split", [(2560, 4096, 6), (2560, 9728, 4), (6144, 2560, 2), (1024, 3072, 6), (1001, 4872, 8)]
)
def test_a_row_has_the_same_bits_among_any_number_of_rows(n, k, split):
    """In the configs of batch-invariant mode, the height of a tile depends on the number of rows."""
    most = outputs(n, k, 64, invariant_config(64, split))
    for rows in (1, 8, 16, 33):
        for name, few in outputs(n, k, rows, invariant_config(rows, split)).items():
            assert torch.equal(few, most[name][:rows]), (
                f"{name}: the sums of {rows} rows differ from those of more rows"
            )


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_tiles_may_be_higher_than_a_pass_has_rows(epilogue):
    product(epilogue, 32, 96, 1).check(WideConfig(32, 32, 2, 1, num_warps=1, split=2, block_m=16))
