"""matvec: epilogues, dtypes and launch configs against the reference."""

import pytest
import torch
from linear_product import EPILOGUES, PLAIN, Product, dense
from util import CUDA, Case, covering

from tridecode.kernels.linear.matvec import MATVEC, MatvecConfig

TOLERANCE = 1e-5
SMALL = MatvecConfig(8, 1, programs=3)  # Few programs with several iterations each, because the interpreter is slow.
CASES = [
    Case("qwen2.5-0.5b_qkv", gpu=dict(n=1152, k=896, config=MatvecConfig(2, 1)), small=dict(n=27, k=896)),
    Case("qwen3-4b_down", gpu=dict(n=2560, k=9728, config=MatvecConfig(2, 16, programs=132)), small=dict(n=10, k=1216)),
    Case("llama-3.1-8b_qkv", gpu=dict(n=6144, k=4096, config=MatvecConfig(1, 4)), small=dict(n=32, k=512)),
    Case("odd_rows", gpu=dict(n=1001, k=4864, config=MatvecConfig(2, 4)), small=dict(n=13, k=304)),
    Case("vocabulary", gpu=dict(n=151936, k=1024, config=MatvecConfig(4, 4)), small=dict(n=101, k=256)),
]
MAX_OUTPUTS = {"gated": 16384, "residual": 8192}  # Maximum number of outputs of each role in a test.


def product(epilogue, n, k, dtype=torch.bfloat16, rows=2, stopped=(), **options) -> Product:
    """Return a Product. For fp16 weights, activations are fp32."""
    act = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    linear = dense(2 * n if epilogue == "gated" else n, k, dtype)
    return Product(epilogue, linear, rows, act, stopped=stopped, **options)


@covering(2, case=CASES, dtype=[torch.bfloat16, torch.float16], epilogue=EPILOGUES + PLAIN)
def test_epilogues_match_the_reference(case, dtype, epilogue):
    n = min(case.sizes["n"], MAX_OUTPUTS.get(epilogue, case.sizes["n"]))
    product(epilogue, n, case.sizes["k"], dtype).check(case.sizes.get("config", SMALL), TOLERANCE)


CONFIGS = {
    "rows_1": MatvecConfig(1, 4),
    "registers_96": MatvecConfig(2, 2, registers=96),
    "rows_16": MatvecConfig(16, 1),
    "wide_tile": MatvecConfig(2, 8),  # The tile has more columns than the matrix.
    "programs_4": MatvecConfig(4, 1, programs=4),
    # The programs do five iterations, and only one program has work in the last one.
    "programs_5": MatvecConfig(1, 2, programs=5, registers=128),
    "programs_132": MatvecConfig(2, 1, programs=132),  # There are more programs than rows of the weight.
}


@covering(2, config=CONFIGS, epilogue=["normed_bias", "gated", "residual"])
def test_configs_match_the_reference(config, epilogue):
    product(epilogue, 21, 1100, short=torch.float32).check(config, TOLERANCE)


@covering(1, epilogue=["normed", "gated"], partials=[1, 4, 8, 12, 13])
def test_any_number_of_partial_sums_is_added(epilogue, partials):
    product(epilogue, 21, 128, short=torch.float32, partials=partials).check(SMALL, TOLERANCE)


def test_blocks_and_programs_of_a_config():
    assert MatvecConfig(4, 1).grid(21) == (6, 6)
    assert MatvecConfig(4, 1, programs=4).grid(21) == (6, 4)
    assert MatvecConfig(4, 1, programs=132).grid(21) == (6, 6)
    assert MATVEC.partials(21, MatvecConfig(4, 1, programs=4)) == 4


@covering(1, row=[0, 1], epilogue=EPILOGUES + PLAIN)
def test_stopped_rows_are_not_written_and_do_not_affect_the_other(row, epilogue):
    product(epilogue, 33, 256, stopped=(row,)).check_stopped(SMALL)


@pytest.mark.skipif(not CUDA, reason="the interpreter is too slow for this test")
def test_many_rows_are_read_one_after_the_other():
    product("normed_bias", 1001, 896, rows=70, stopped=(3, 69)).check(MatvecConfig(2, 1), TOLERANCE)
