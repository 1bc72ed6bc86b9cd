"""Adapters in the kernels of linears: shrink, the epilogues that add B y, expand, and the adapters of rows."""

from dataclasses import replace

import pytest
import torch
from adapters_util import make_adapters, unsorted
from check import check_op
from linear_product import EPILOGUES, GGUF_SCHEMES, TOLERANCE, Product, dense, packed
from util import CUDA, Case, covering, hopper_only, meta_rows, poisoned, random

from tridecode import layout
from tridecode.kernels.adapter_rows import ADAPTER_ROWS
from tridecode.kernels.linear.expand import EXPAND
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.matvec import MatvecConfig
from tridecode.kernels.linear.shrink import SHRINK, ShrinkConfig

DTYPE = torch.bfloat16 if CUDA else torch.float32  # The interpreter multiplies in fp32 for any dtype.
ROUNDED = 3e-3 if CUDA else 1e-5  # Tensor cores multiply y in bf16.
FORMS = {
    "matvec": (MatvecConfig(2, 4), MatvecConfig(8, 1, programs=3)),
    "matmul": (MatmulConfig(16, 4, 12, 8), MatmulConfig(16, 2, 2, 1)),
    "matmul_shared": (MatmulConfig(16, 4, 4, 2, programs=60), MatmulConfig(16, 2, 1, 32, programs=2)),
    "tiles": (TilesConfig(32, 64, 4), TilesConfig(16, 32, 2)),
    "wide": (WideConfig(64, 64, 3, 1), WideConfig(32, 32, 9, 1, num_warps=1)),
    "split": (WideConfig(64, 64, 2, 1, split=4), WideConfig(16, 32, 3, 2, num_warps=1, split=3)),
}
CASES = [
    Case("qwen3-0.6b_qkv", gpu=dict(ends=(2048, 3072, 4096), k=1024), small=dict(ends=(32, 48, 64), k=64)),
    # Blocks of rows contain rows of several parts.
    Case("odd_parts", gpu=dict(ends=(1001, 1009, 2018), k=1032), small=dict(ends=(13, 21, 44), k=72)),
    Case("one_part", gpu=dict(ends=(1024,), k=3072), small=dict(ends=(37,), k=104)),
]
RANKS = [16, 48, 0, 32, 16, 64]


def config_of(form: str):
    return FORMS[form][0 if CUDA else 1]


def indices(rows: int) -> list[int]:
    """Return the adapters of rows, in an irregular order: 0 (none), 3 (of rank 0), and others in two groups."""
    return [(2, 0, 4, 5, 3, 1, 6, 2, 1, 0, 5)[row % 11] for row in range(rows)] if rows > 1 else [2]


def with_adapters(epilogue, case, rows, dtype=DTYPE, linear=None, splits=2, ranks=RANKS, numbers=None) -> Product:
    """Return a product whose row 1 is stopped. A stopped row has no adapter."""
    ends, k = case.sizes["ends"], case.sizes["k"]
    gated = epilogue == "gated"
    if gated:
        ends = ends[-1], 2 * ends[-1]
    if epilogue == "residual":
        ends = ends[-1:]
    product = Product(epilogue, linear or dense(ends[-1], k, dtype), rows, dtype)
    product.adapters = make_adapters(ends, k, ranks, numbers or indices(rows), dtype, splits)
    return product


@covering(2, form=FORMS.keys(), rows=[1, 3, 8, 33, 64] if CUDA else [1, 3, 8], case=CASES, epilogue=EPILOGUES)
def test_epilogues_add_the_adapters(case, rows, form, epilogue):
    with_adapters(epilogue, case, rows).check(config_of(form), max(TOLERANCE, ROUNDED), ROUNDED + 3e-3)


@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_matvec_adds_ranks_that_need_several_tiles(epilogue):
    product = with_adapters(epilogue, CASES[1], 3, splits=8, ranks=[16, 80, 144], numbers=[3, 0, 2])
    product.check(config_of("matvec"), max(TOLERANCE, ROUNDED), ROUNDED + 3e-3)


HOPPER_FORMS = {
    "few_rows": HopperConfig(64, 128, 4, 4),
    "lag": HopperConfig(128, 64, 4, 4, lag=1),
    "producer": HopperConfig(64, 64, 8, 4, producer=1, registers=80),
    "gated": HopperConfig(128, 64, 4, 4, num_warps=8, lag=1, producer=1, registers=80),
    "split": HopperConfig(64, 64, 8, 4, split=4),
    "eight_warps": HopperConfig(64, 128, 4, 2, split=4, num_warps=8),
}


@hopper_only
@covering(2, form=HOPPER_FORMS.keys(), rows=[1, 17, 32, 64], case=CASES, epilogue=EPILOGUES)
def test_epilogues_on_hopper_add_the_adapters(case, rows, form, epilogue):
    config = HOPPER_FORMS[form]
    if epilogue == "gated":
        config = replace(config, split=1)
    with_adapters(epilogue, case, rows, torch.bfloat16).check(config, max(TOLERANCE, ROUNDED), ROUNDED + 3e-3)


@hopper_only
@covering(1, form=HOPPER_FORMS.keys(), case=CASES, epilogue=EPILOGUES)
def test_every_row_has_an_adapter_of_its_own_on_hopper(case, form, epilogue):
    """The kernel copies 16 groups of adapters, which is more than are in shared memory at a time."""
    config = HOPPER_FORMS[form]
    if epilogue == "gated":
        config = replace(config, split=1)
    numbers = [0 if row == 1 else row + 1 for row in range(64)]
    product = with_adapters(epilogue, case, 64, torch.bfloat16, ranks=[16, 48, 32, 16] * 16, numbers=numbers)
    product.check(config, max(TOLERANCE, ROUNDED), ROUNDED + 3e-3)


@hopper_only
@covering(1, scheme=["int4_groups_of_128", "int8_zeros", "e4m3"], epilogue=EPILOGUES, rows=[17, 64])
def test_quantized_weights_on_hopper_have_adapters(scheme, epilogue, rows):
    case = Case("quantized", gpu=dict(ends=(512, 640, 768), k=1024), small={})
    n = case.sizes["ends"][-1] * (2 if epilogue == "gated" else 1)
    product = with_adapters(epilogue, case, rows, linear=packed(scheme, n, case.sizes["k"]))
    product.check(HopperConfig(64, 256, 3, 2), max(TOLERANCE, ROUNDED), ROUNDED + 3e-3)


@covering(1, scheme=["int4", "int8_zeros", "e4m3", *GGUF_SCHEMES], epilogue=EPILOGUES)
def test_quantized_weights_have_adapters(scheme, epilogue):
    k = 256 if scheme in GGUF_SCHEMES else 128
    case = Case("quantized", gpu=dict(ends=(512, 640, 768), k=1024), small=dict(ends=(16, 32, 48), k=k))
    n = case.sizes["ends"][-1] * (2 if epilogue == "gated" else 1)
    product = with_adapters(epilogue, case, 5, linear=packed(scheme, n, case.sizes["k"]))
    product.check(config_of("matmul"), max(TOLERANCE, ROUNDED), ROUNDED + 3e-3)


@covering(1, form=FORMS.keys())
def test_adapters_change_only_their_rows(form):
    """Rows without adapters, or with one of rank 0, have the bits of a pass without adapters of these rows."""
    product = with_adapters("normed", CASES[0], 8)
    out, *_ = product.launch(config_of(form))
    product.adapters = product.adapters._replace(numbers=torch.zeros_like(product.adapters.numbers))
    without, *_ = product.launch(config_of(form))
    for row, number in enumerate(indices(8)):
        if product.runs[row]:
            assert torch.equal(out[row], without[row]) == (number in (0, 3)), f"row {row} with adapter {number}"


@covering(1, form=FORMS.keys())
def test_nan_of_one_row_stays_in_the_row(form):
    """Adapters have finite numbers, but A x of another request may be NaN."""
    product = with_adapters("normed", CASES[0], 8)
    product.adapters.y[:, [row for row in range(8) if indices(8)[row] == 4]] = float("nan")
    out, *_ = product.launch(config_of(form))
    nan = [row for row in range(8) if product.runs[row] and out[row].isnan().any()]
    assert nan == [row for row, number in enumerate(indices(8)) if number == 4 and product.runs[row]]


@covering(
    2, rows=[1, 3, 64, 200] if CUDA else [1, 3, 70], case=CASES, split=[1, 3], steps=[1, 2], tile=[8, 16],
    dtype=[DTYPE, torch.float32],
)  # fmt: skip
def test_shrink_matches_the_reference(case, rows, split, steps, tile, dtype):
    ends, k = case.sizes["ends"], case.sizes["k"]
    if dtype == torch.float32:
        k = min(k, 1024)  # The limit of a program in a decode pass. The loop is unrolled, and fp32 compiles slowly.
    adapters = make_adapters(ends, k, RANKS, indices(rows), dtype, split, tile)
    x = random(rows, k, dtype=dtype)
    config = ShrinkConfig(split, steps, 4 if CUDA else 2)
    # The reference stores the whole sum as the first of the sums.
    tolerance = 1e-5 if dtype == torch.float32 else 2 * ROUNDED  # Each sum is rounded.
    check_op(SHRINK, (x, adapters), {"config": config}, tolerance, views={"adapters.y": lambda y: y.sum(0)})


@covering(1, rows=[70, 300] if CUDA else [70], case=CASES, dtype=[DTYPE, torch.float32])
def test_expand_adds_to_the_rows_of_adapters(case, rows, dtype):
    ends, k = case.sizes["ends"], case.sizes["k"]
    adapters = make_adapters(ends, k, RANKS, indices(rows), dtype)
    out = random(rows, ends[-1], dtype=dtype)
    check_op(EXPAND, (out, adapters), {}, ROUNDED + 1e-3, outputs=(), accumulates=("out",))


SLOTS = [0, 5, 0, 7, 5, 9, 0, 1]  # The adapter of each slot.


def chunks(*entries) -> torch.Tensor:
    """Return a table of chunks (slot, first row, number of rows)."""
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32)
    for place, (slot, first, count) in enumerate(entries):
        table[place] = torch.tensor((slot, first, count, 0))
    return table.to(poisoned(1).device)


@pytest.mark.parametrize(
    "decoding, prompts",
    [(1, ()), (8, ()), (5, ()), (0, ((3, 0, 200), (0, 200, 3), (5, 203, 1))), (6, ((7, 6, 150), (6, 160, 9)))],
)
def test_rows_find_their_adapters(decoding, prompts):
    slots = torch.tensor(SLOTS, dtype=torch.int32).to(poisoned(1).device)
    meta = meta_rows(*range(decoding)) if decoding else None
    if decoding > 4:
        meta[3, layout.STATUS] = layout.WAIT
    table = chunks(*prompts) if prompts else None
    numbers = torch.zeros(max([decoding, *(first + count for _, first, count in prompts)]), dtype=torch.int32)
    listed = torch.zeros(1 + len(SLOTS), dtype=torch.int32)
    ordered = unsorted(len(numbers))
    args = meta, table, slots, numbers.to(slots.device), listed.to(slots.device), ordered, max(SLOTS), 8
    launched = check_op(ADAPTER_ROWS, args, idle=False).launched
    count = int(launched["listed"][0])
    adapters = set(launched["listed"][1 : 1 + count].tolist())
    assert adapters == set(launched["numbers"].tolist()) - {0} and len(adapters) == count
