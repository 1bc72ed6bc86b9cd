"""Products of a few rows: all forms against the references, and each row as if it were alone."""

from dataclasses import replace

import pytest
import torch
from util import CUDA, DEVICE, Case, assert_close, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.linear.gate_up import gate_up_ref
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig, make_buffers
from tridecode.kernels.linear.matvec import matvec_normed_ref, matvec_residual_ref
from tridecode.kernels.linear.weight import Linear
from tridecode.tuning.choose import columns_split, few_rows_shape, invariant_shape
from tridecode.tuning.products import products

EPS = 1e-6
DTYPE = torch.bfloat16 if CUDA else torch.float32  # the interpreter multiplies in fp32 anyway
TOLERANCE = 2e-5 if CUDA else 1e-5  # bf16 products are exact in fp32: left are the order of sums and what wgmma cuts
ROUNDED = 3e-3 if CUDA else 1e-5  # of outputs in bf16
SMALL = {
    "registers": MatmulConfig(16, 2, 2, 1),
    "rows_shared": MatmulConfig(16, 2, 1, 32, programs=2),
    "tiles": TilesConfig(16, 32, 2),
    "wide": WideConfig(32, 32, 9, 1, num_warps=1),
    "split": WideConfig(16, 32, 3, 2, num_warps=1, split=3),
}
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
if HOPPER:
    SMALL |= {
        "hopper": HopperConfig(64, 128, 4, 4),
        "hopper_split": HopperConfig(64, 64, 7, 4, split=3, num_warps=8),
        "hopper_rows_shared": HopperConfig(128, 64, 5, 3, programs=3),
        "hopper_copier": HopperConfig(128, 128, 3, 2, lag=1, registers=80, copier=1),
    }
CASES = cases(
    Case("qwen2.5-0.5b_qkv", gpu=dict(n=1152, k=896), small=dict(n=27, k=96)),
    Case("qwen3-4b_down", gpu=dict(n=2560, k=9728), small=dict(n=32, k=352)),
    Case("llama-3.1-8b_qkv", gpu=dict(n=6144, k=4096), small=dict(n=48, k=128)),
    Case("odd_columns", gpu=dict(n=1001, k=4872), small=dict(n=37, k=104)),
    Case("vocabulary", gpu=dict(n=151936, k=1024), small=dict(n=101, k=64)),
)
ROWS = pytest.mark.parametrize("rows", [2, 3, 8, 16, 33, 64] if CUDA else [3, 8])
FORM = pytest.mark.parametrize("form", SMALL)


def shape_for(form, n, k, rows, gated=False):
    """On a GPU those that engines use, where that form has one; else small ones."""
    if not CUDA:
        return SMALL[form]
    bucket = next(size for size in (8, 16, 32, 64) if rows <= size)
    if isinstance(SMALL[form], HopperConfig):
        return replace(SMALL[form], split=1) if gated else SMALL[form]
    if form == "rows_shared":  # the activations stay in registers, or pass through them, by what fits
        return MatmulConfig(16, 4, 4, 2 if rows > 8 or k > 2560 else 32, programs=60)
    chosen = few_rows_shape(2 * n if gated else n, k, bucket, gated)
    if isinstance(chosen, type(SMALL[form])):
        return chosen
    return {
        "registers": MatmulConfig(16, 4, 4, 2),
        "tiles": TilesConfig(32, 64, 4),
        "wide": WideConfig(64, 128, 3, 1, split=1 if k < 6144 else 4),  # its tiles are unrolled
        "split": WideConfig(128, 64, 2, 1, 8, split=4),
    }[form]


def split_buffers(n, rows):
    """Sums poisoned, the counter at zero."""
    buffers = make_buffers(n, rows, DEVICE)
    buffers.sums.fill_(float("nan"))
    return buffers


def factor(rows, k, seed=1):
    """x [rows, k], in a buffer of 64 rows whose others are poisoned."""
    buffer = poisoned(64, k, dtype=DTYPE)
    buffer[:rows] = random(rows, k, dtype=DTYPE, seed=seed)
    return buffer[:rows]


def idle(rows, *which):
    meta = meta_rows(*([0] * rows))
    meta[list(which), layout.STATUS] = layout.STOP
    return meta


def inputs(n, k, rows, bias=False, halves=1):
    linear = Linear(random(halves * n, k, dtype=DTYPE, scale=k**-0.5), random(n, dtype=DTYPE) if bias else None)
    return linear, factor(rows, k), random(rows, 5, seed=2).abs() * k / 3


@FORM
@ROWS
@CASES
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_normed_matches_reference(case, rows, form, bias):
    n, k = case.sizes["n"], case.sizes["k"]
    linear, x, partials = inputs(n, k, rows, bias)
    out, ref, meta = poisoned(rows, n), poisoned(rows, n), idle(rows, 1)
    shape = shape_for(form, n, k, rows)
    split = split_buffers(n, rows)
    products(shape).normed.launch(meta, x, linear, out, partials, 5, EPS, split, config=shape)
    matvec_normed_ref(meta, x, linear, ref, partials, 5, EPS)
    runs = torch.arange(rows) != 1
    assert_close(out[runs], ref[runs], TOLERANCE)
    assert out[1].isnan().all(), "a row that does not run was written"
    assert not split.counter.any(), "the next launch would miscount"


@FORM
@ROWS
@CASES
def test_residual_matches_reference(case, rows, form):
    n, k = case.sizes["n"], case.sizes["k"]
    linear, x, _ = inputs(n, k, rows)
    hidden, norm, meta = random(rows, n, seed=3), norm_weight(n, DTYPE), idle(rows, 1)
    expected = hidden.clone()
    normed, expected_normed = poisoned(rows, n, dtype=DTYPE), poisoned(rows, n)
    sumsq, expected_sumsq = poisoned(rows, n), poisoned(rows, n)
    shape = shape_for(form, n, k, rows)
    products(shape).residual.launch(meta, x, linear, hidden, norm, normed, sumsq, split_buffers(n, rows), config=shape)
    matvec_residual_ref(meta, x, linear, expected, norm, expected_normed, expected_sumsq)
    runs = torch.arange(rows) != 1
    assert_close(hidden, expected, TOLERANCE, "hidden")
    assert_close(normed[runs].float(), expected_normed[runs], ROUNDED, "normed")
    left = products(shape).partials(n, shape)
    assert_close(sumsq[runs, :left].sum(1), expected_sumsq[runs, 0], TOLERANCE, "sumsq")
    assert normed[1].isnan().all() and sumsq[1].isnan().all(), "a row that does not run was written"


@FORM
@ROWS
@CASES
def test_gate_up_matches_reference(case, rows, form):
    n, k = case.sizes["n"], case.sizes["k"]
    if n > 2**16:
        n //= 8  # two halves
    linear, x, partials = inputs(n, k, rows, halves=2)
    out, ref, meta = poisoned(rows, n, dtype=DTYPE), poisoned(rows, n), idle(rows, 1)
    shape = shape_for(form, n, k, rows, gated=True)
    products(shape).gate_up.launch(meta, x, linear, out, partials, 5, EPS, split_buffers(2 * n, rows), config=shape)
    gate_up_ref(meta, x, linear, ref, partials, 5, EPS)
    runs = torch.arange(rows) != 1
    assert_close(out[runs].float(), ref[runs], ROUNDED)
    assert out[1].isnan().all(), "a row that does not run was written"


@pytest.mark.skipif(not CUDA, reason="the interpreter's products are numpy's: their sums depend on a row's place")
@FORM
@pytest.mark.parametrize("rows", [16, 64])
def test_a_row_is_bit_equal_wherever_it_stands_and_beside_whatever(rows, form):
    n, k = 2560, 4096
    linear, x, partials = inputs(n, k, rows)
    shape, found = shape_for(form, n, k, rows), []
    for place in (0, rows // 2, rows - 1):
        others, others_partials = factor(rows, k, seed=10 + place), random(rows, 5, seed=place).abs() * k / 3
        others[place], others_partials[place] = x[0], partials[0]
        if place:
            others[0] = float("nan")
        out = poisoned(rows, n)
        products(shape).normed.launch(
            idle(rows), others, linear, out, others_partials, 5, EPS, split_buffers(n, rows), config=shape
        )
        assert place == 0 or out[0].isnan().all()
        found.append(out[place])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@FORM
def test_nothing_is_written_where_no_row_runs(form):
    linear, x, partials = inputs(32, 64, 4)
    out, shape = poisoned(4, 32), SMALL[form]
    products(shape).normed.launch(
        idle(4, 0, 1, 2, 3), x, linear, out, partials, 5, EPS, split_buffers(32, 4), config=shape
    )
    assert out.isnan().all()


def test_tiles_refuse_a_buffer_without_room_for_their_rows():
    linear, _, partials = inputs(32, 64, 3)
    x = random(3, 64, dtype=DTYPE)
    with pytest.raises(RuntimeError, match="out of bounds"):
        products(SMALL["tiles"]).normed.launch(
            idle(3), x, linear, poisoned(3, 32), partials, 5, EPS, config=SMALL["tiles"]
        )


def run_all(n, k, rows, shape, linears, x, partials):
    """What the three products leave of the first `rows` rows: outputs, the next norm's, and its sums of squares."""
    halves, whole = linears
    meta, split, hidden = meta_rows(*([0] * rows)), split_buffers(2 * n, rows), random(64, n, seed=3)[:rows].clone()
    normed_out, gated_out = poisoned(rows, n), poisoned(rows, n, dtype=DTYPE)
    normed, sumsq, op = poisoned(rows, n, dtype=DTYPE), poisoned(rows, n), products(shape)
    op.normed.launch(meta, x[:rows], whole, normed_out, partials[:rows], 5, EPS, split, config=shape)
    op.gate_up.launch(meta, x[:rows], halves, gated_out, partials[:rows], 5, EPS, split, config=shape)
    op.residual.launch(meta, x[:rows], whole, hidden, norm_weight(n, DTYPE), normed, sumsq, split, config=shape)
    return normed_out, gated_out, hidden, normed, sumsq[:, : op.partials(n, shape)]


@pytest.mark.parametrize("x_ahead", [1, 32], ids=["streamed", "kept"])
@pytest.mark.parametrize("programs", [1, 2, 3, 7])
def test_any_number_of_programs_leaves_the_same(programs, x_ahead):
    """One turn or several, the last one whole or not, with fewer blocks than programs, and tiles beyond the columns."""
    n, k, rows = 88, 320, 3
    linears, x, partials = invariant_inputs(n, k)
    shape = MatmulConfig(16, 2, 3, x_ahead)
    alone = run_all(n, k, rows, shape, linears, x, partials)
    shared = run_all(n, k, rows, replace(shape, programs=programs), linears, x, partials)
    assert shared[-1].shape == (rows, min(programs, 6))
    for name, one, other in zip(("normed", "gated", "hidden", "norm"), alone, shared):
        assert torch.equal(one, other), name
    assert_close(shared[-1].sum(1), alone[-1].sum(1), TOLERANCE)


def invariant_inputs(n, k):
    linears = [Linear(random(halves * n, k, dtype=DTYPE, scale=k**-0.5), None) for halves in (2, 1)]
    return linears, factor(64, k), random(64, 5, seed=2).abs() * k / 3


@pytest.mark.skipif(not CUDA, reason="the order of a tensor core's sums; the interpreter's are numpy's")
@pytest.mark.parametrize("n, k", [(2560, 4096), (2560, 9728), (6144, 2560), (1024, 3072), (1001, 4872)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(n, k):
    """In the shapes of the batch-invariant mode, whose tiles are as high as there are rows."""
    given = invariant_inputs(n, k)
    found = {rows: run_all(n, k, rows, invariant_shape(rows, columns_split(n, k)), *given) for rows in (1, 8, 16, 33)}
    most = run_all(n, k, 64, invariant_shape(64, columns_split(n, k)), *given)
    for rows, outputs in found.items():
        for name, few, many in zip(("normed", "gated", "hidden", "norm", "sumsq"), outputs, most):
            assert torch.equal(few, many[:rows]), f"{name} of {rows} rows"


def test_tiles_may_be_higher_than_a_pass_has_rows():
    n, k = 32, 96
    shape = WideConfig(32, 32, 2, 1, num_warps=1, split=2, block_m=16)
    (halves, whole), x, partials = invariant_inputs(n, k)
    normed, gated, hidden, _, sumsq = run_all(n, k, 1, shape, (halves, whole), x, partials)
    expected = [poisoned(1, n), poisoned(1, n), random(64, n, seed=3)[:1].clone()]
    matvec_normed_ref(meta_rows(0), x, whole, expected[0], partials, 5, EPS)
    gate_up_ref(meta_rows(0), x, halves, expected[1], partials, 5, EPS)
    matvec_residual_ref(meta_rows(0), x, whole, expected[2], norm_weight(n, DTYPE), poisoned(1, n), poisoned(1, n))
    for got, wanted in zip((normed, gated, hidden), expected):
        assert_close(got.float(), wanted, ROUNDED)
    assert_close(sumsq.sum(1), expected[2].square().sum(1), TOLERANCE)
