"""Products of 17 to 64 rows on Hopper in the configs of engines; test_matmul.py has more forms and sizes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from linear_product import Product, check_alike, check_captured, dense
from util import covering, hopper_only

from tridecode.kernels.linear.matmul_hopper import HopperConfig

EPILOGUES = {"qkv": "normed", "o_proj": "residual", "gate_up": "gated", "down": "residual", "lm_head": "normed"}
SIZES = {  # role: (n, k)
    "qwen3-4b": dict(
        qkv=(6144, 2560), o_proj=(2560, 4096), gate_up=(9728, 2560), down=(2560, 9728), lm_head=(19456, 2560)
    ),
    "llama-3.1-8b": dict(
        qkv=(6144, 4096), o_proj=(4096, 4096), gate_up=(14336, 4096), down=(4096, 14336), lm_head=(19456, 4096)
    ),
}
CONFIGS = {  # Launch configs of Qwen3-4B.
    ("qkv", 32): HopperConfig(64, 128, 4, 4),
    ("o_proj", 32): HopperConfig(64, 64, 8, 4, split=4),
    ("gate_up", 32): HopperConfig(128, 64, 4, 4, lag=1),
    ("down", 32): HopperConfig(64, 128, 4, 4, split=3),
    ("lm_head", 32): HopperConfig(128, 128, 5, 5, programs=132, producer=1, registers=80),
    ("qkv", 64): HopperConfig(64, 64, 8, 4, producer=1, registers=80),
    ("o_proj", 64): HopperConfig(64, 128, 4, 2, split=4, num_warps=8),
    ("gate_up", 64): HopperConfig(128, 64, 4, 4, num_warps=8, lag=1, producer=1, registers=80),
    ("down", 64): HopperConfig(64, 128, 4, 2, split=4, num_warps=8),
    ("lm_head", 64): HopperConfig(128, 64, 8, 6, num_warps=8, programs=132, producer=1, registers=88),
}
INVARIANT = {  # Two configs, one for up to 32 rows and one for up to 64, that add the sums of a row in the same order.
    ("qwen3-4b", "qkv"): (HopperConfig(64, 128, 4, 4), CONFIGS["qkv", 64]),
    ("qwen3-4b", "o_proj"): (CONFIGS["o_proj", 32], CONFIGS["o_proj", 64]),
    ("qwen3-4b", "gate_up"): (CONFIGS["gate_up", 32], CONFIGS["gate_up", 64]),
    ("qwen3-4b", "down"): (CONFIGS["down", 64], CONFIGS["down", 64]),
    ("qwen3-4b", "lm_head"): (CONFIGS["lm_head", 32], CONFIGS["lm_head", 64]),
    ("llama-3.1-8b", "qkv"): (HopperConfig(64, 128, 4, 4), HopperConfig(64, 128, 4, 2, num_warps=8)),
    ("llama-3.1-8b", "gate_up"): (
        HopperConfig(128, 64, 4, 4, lag=1), HopperConfig(128, 64, 4, 2, num_warps=8, lag=1)
    ),
    ("llama-3.1-8b", "lm_head"): (
        CONFIGS["lm_head", 32], HopperConfig(128, 128, 5, 2, num_warps=8, programs=132, producer=1, registers=88)
    ),
}  # fmt: skip
INVARIANT |= {
    ("llama-3.1-8b", role): (
        HopperConfig(64, 128, 4, 4, split=2), HopperConfig(64, 128, 4, 2, split=2, num_warps=8)
    )
    for role in ("o_proj", "down")
}  # fmt: skip
ROLES = pytest.mark.parametrize("role", EPILOGUES)


def product(role, n, k, rows, dtype=torch.bfloat16, bias=False, **options) -> Product:
    epilogue = EPILOGUES[role] + ("_bias" if bias else "")
    linear = dense(2 * n if role == "gate_up" else n, k, dtype)
    return Product(epilogue, linear, rows, dtype, partials=20, **options)


def engine_product(role, rows, **options) -> Product:
    return product(role, *SIZES["qwen3-4b"][role], rows, **options)


@hopper_only
@pytest.mark.parametrize("rows, odd_rows", [(32, 17), (64, 63)])
@ROLES
def test_configs_of_engines_match_the_reference(role, rows, odd_rows):
    """Rows that have stopped do not affect the next launch."""
    engine_product(role, rows).check_stopped(CONFIGS[role, rows])
    engine_product(role, odd_rows).check(CONFIGS[role, rows])


TIGHT = {"1000": (1000, 4872, False), "1001": (1001, 4872, False), "65": (65, 1032, False), "apart": (1024, 2560, True)}


@hopper_only
@covering(2, role=EPILOGUES.keys(), rows=[32, 64], size=TIGHT, dtype=[torch.bfloat16, torch.float16])
def test_tiles_may_exceed_the_weight_and_rows_may_lie_apart(role, rows, size, dtype):
    """Programs that share the rows have zero, one or two tiles each."""
    config = CONFIGS[role, rows]
    config, (n, k, strided) = replace(config, programs=min(config.programs, 5)), size
    bias = role in ("qkv", "lm_head")
    product(role, n, k, rows - 3, dtype, bias=bias, strided=strided).check(config)


@hopper_only
@pytest.mark.parametrize("rows", [32, 64])
def test_captured_dependent_launches_compute_the_same_bits(rows):
    check_captured([engine_product(role, rows) for role in EPILOGUES], [CONFIGS[role, rows] for role in EPILOGUES])


@hopper_only
@pytest.mark.parametrize("preset, role", INVARIANT)
def test_a_row_has_the_same_bits_among_any_number_of_rows(preset, role):
    """In the configs of batch-invariant mode, the width of an instruction depends on the number of rows."""
    few, most = INVARIANT[preset, role]
    for_rows = partial(product, role, *SIZES[preset][role], stopped=())
    check_alike(for_rows(64), for_rows, {16: few, 32: few, 64: most})
