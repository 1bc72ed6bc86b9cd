"""Products with packed tensors against the same weights in fp32: schemes, groups, zero points, orders, rows."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from check import check_op
from linear_product import EPILOGUES, GGUF_SCHEMES, PLAIN, SCHEMES, Product, dense, packed, width_of
from util import BF16_ROUNDING, CUDA, Case, assert_close, covering, poisoned, random

from tridecode.kernels.linear import register_tiles
from tridecode.kernels.linear.dequantize import DEQUANTIZE
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_groups import GroupsConfig
from tridecode.kernels.linear.project import Plain
from tridecode.kernels.linear.torch_linear import TORCH, PromptScratch, piece_rows

CASES = [
    Case("qwen3-4b_o_proj", gpu=dict(n=2560, k=4096), small=dict(n=24, k=384)),
    Case("odd_rows", gpu=dict(n=1001, k=2432), small=dict(n=21, k=192)),
    Case("qwen3-0.6b_o_proj", gpu=dict(n=1024, k=2048), small=dict(n=32, k=128)),
]
ALL = [*SCHEMES, *GGUF_SCHEMES]
SCHEME = covering(1, scheme=ALL)


def config_for(scheme: str, rows: int) -> MatmulConfig:
    if not CUDA:
        return MatmulConfig(16, 2, 1, 1)
    if rows > 16:
        return MatmulConfig(16, 8 if rows > 32 else 4, 1, 1, rounds=scheme in GGUF_SCHEMES)
    if rows > 8:
        return MatmulConfig(16, 4, 10, 8, fetch=1)
    return MatmulConfig(16, 4, 6 if scheme.startswith("int8") else 10, 8)


def tolerances(config: MatmulConfig) -> dict[str, float]:
    """Return the tolerances of `Product.check`. A config may round the weights to bf16."""
    return {"tolerance": 5e-3, "rounded": BF16_ROUNDING + 7e-3} if config.rounds else {}


def product(epilogue, scheme, n, k, rows, **options) -> Product:
    return Product(epilogue, packed(scheme, 2 * n if epilogue == "gated" else n, k), rows, **options)


@covering(
    2, scheme=ALL, rows=(1, 8, 16, 64) if CUDA else (1, 3), case=CASES,
    epilogue=("normed_bias", "gated", "residual", *PLAIN),
)  # fmt: skip
def test_schemes_and_epilogues_match_the_reference(scheme, rows, case, epilogue):
    config = config_for(scheme, rows)
    n, k = case.sizes["n"], width_of(scheme, case.sizes["k"])
    product(epilogue, scheme, n, k, rows).check(config, **tolerances(config))


CONFIGS = {
    "32_rows": MatmulConfig(32, 4, 2, 3),
    "64_rows": MatmulConfig(64, 2, 4, 8),
    "rows_shared": MatmulConfig(16, 2, 3, 32, programs=2),
    "rows_shared_streamed": MatmulConfig(16, 4, 2, 3, programs=1),
    "32_rows_shared": MatmulConfig(32, 2, 3, 32, programs=1),
    "fetched": MatmulConfig(16, 2, 2, 3, fetch=1),
    "rows_shared_fetched": MatmulConfig(16, 2, 3, 32, programs=2, fetch=2),
    "weights_rounded": MatmulConfig(16, 2, 2, 3, rounds=True),
    "weights_rounded_shared": MatmulConfig(32, 2, 3, 32, programs=1, rounds=True),
}


@covering(
    2,
    config=CONFIGS,
    scheme=["int4", "int4_ordered", "int8_zeros", "e4m3", "e4m3_blocks", *GGUF_SCHEMES],
    epilogue=EPILOGUES,
)
def test_configs_match_the_reference(epilogue, scheme, config):
    product(epilogue, scheme, 44, 640, 2).check(config, **tolerances(config))


@covering(
    2, scheme=[*GGUF_SCHEMES, "int4_groups_of_32", "int8"], epilogue=EPILOGUES, warps=[1, 2, 4],
    k=[1280, 3072] if CUDA else [768], ahead=[1, 16],
)  # fmt: skip
def test_eight_groups_use_the_columns_of_one_row(scheme, epilogue, warps, k, ahead):
    product(epilogue, scheme, 44, k, 1).check(GroupsConfig(warps, ahead))


@triton.jit
def _fetch_kernel(
    weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr, N: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, MINIMUMS: tl.constexpr, OVER: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = register_tiles.tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER, ROUNDS=False, GATED=False,
        BLOCK_N=16, WARPS=2, X_AHEAD=1,
    )  # fmt: skip
    w = register_tiles.Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
    for block in range((N + 15) // 16):
        register_tiles.fetch_block(T, w, tl.program_id(0) + block)


@pytest.mark.skipif(CUDA, reason="only the interpreter shows the addresses that are copied to the L2 cache")
@SCHEME
def test_all_bytes_of_a_weight_are_copied_to_the_l2_cache(scheme, monkeypatch):
    copied = {}

    def fetch(ptr, size):
        copied[int(ptr.handle.data.item())] = int(getattr(size, "handle", size).data.item())

    monkeypatch.setattr(register_tiles, "_fetch", fetch)
    linear = packed(scheme, 40, width_of(scheme, 640))
    arguments = linear.arguments(linear.weight)
    del arguments["order_ptr"], arguments["ORDERED"]
    _fetch_kernel[(1,)](**arguments, N=40)
    tensors = [linear.weight, linear.zero, linear.minimum, linear.over]
    if linear.packed.group < linear.packed.k and linear.packed.rows == 1:
        tensors.append(linear.scale)
    expected = [(each.data_ptr(), each.nbytes) for each in tensors if each is not None]
    merged: list[list[int]] = []  # [address, bytes] of adjacent copies together
    for begin, size in sorted(copied.items()):
        assert begin % 16 == size % 16 == 0
        if merged and sum(merged[-1]) == begin:
            merged[-1][1] += size
        else:
            merged.append([begin, size])
    assert sorted(map(tuple, merged)) == sorted(expected)


@SCHEME
def test_dequantize_matches_the_reference(scheme):
    n, k = (1001, 4864) if CUDA else (40, width_of(scheme, 320))
    check_op(DEQUANTIZE, (packed(scheme, n, k), 3, n - 2, poisoned(n - 5, k)), tolerance=1e-6)


@pytest.mark.skipif(not CUDA, reason="torch multiplies bf16 differently on a CPU and on a GPU")
@SCHEME
def test_torch_multiplies_many_rows_by_parts_of_the_weight(scheme):
    linear, x = packed(scheme, 1001, 2560), random(128, 2560, dtype=torch.bfloat16, seed=1)
    out, buffer = poisoned(128, 1001, dtype=torch.bfloat16), poisoned(300 * 2560, dtype=torch.bfloat16)
    TORCH.op.launch(None, x, linear, out, Plain(), PromptScratch(buffer, None))
    assert_close(out.float(), x.float() @ linear.matrix().T, 6e-3)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(
    "linear", [dense(40, 256, torch.float32), packed("int4_zeros", 40, 256)], ids=["dense", "packed"]
)
def test_torch_multiplies_in_fp32(linear, bias):
    """A packed tensor is dequantized in parts of 16 rows."""
    linear, x, out = replace(linear, bias=random(40) if bias else None), random(3, 256), poisoned(3, 40)
    TORCH.op.launch(None, x, linear, out, Plain(), PromptScratch(poisoned(16 * 256), None), pdl=True)
    expected = x @ linear.matrix().T
    assert_close(out, expected + linear.bias if bias else expected, 1e-5)


def test_parts_of_a_weight_have_equal_sizes_of_whole_tiles():
    assert piece_rows(19456, 2**25 // 2560) == 9728 and piece_rows(6144, 2**25 // 2560) == 6144
    assert piece_rows(1001, 300) == 256 and piece_rows(28672, 2**25 // 4096) == 7168
    assert piece_rows(40, 16) == 16 and piece_rows(1000, 200) == 128
