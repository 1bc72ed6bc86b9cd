import pytest
import torch
from util import BF16_ROUNDING, Case, assert_close, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.linear.gate_up import gate_up, gate_up_ref
from tridecode.kernels.linear.matvec import (
    MatvecConfig,
    matvec_normed,
    matvec_normed_ref,
    matvec_residual,
    matvec_residual_ref,
    residual_partials,
)
from tridecode.kernels.linear.weight import Linear
from tridecode.tuning.choose import matvec_shape

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
CASES = cases(
    Case("qwen2.5-0.5b_qkv", gpu=dict(n=1152, k=896), small=dict(n=27, k=896)),
    Case("qwen3-4b_down", gpu=dict(n=2560, k=9728), small=dict(n=10, k=1216)),
    Case("llama-3.1-8b_qkv", gpu=dict(n=6144, k=4096), small=dict(n=32, k=512)),
    Case("odd_rows", gpu=dict(n=1001, k=4864), small=dict(n=13, k=304)),
    Case("vocabulary", gpu=dict(n=151936, k=1024), small=dict(n=101, k=256)),
)
SMALL_SHAPE = MatvecConfig(8, 1, programs=3)  # few programs for the interpreter, and turns for each


def shape_for(n, k):
    return matvec_shape(n, k) if torch.cuda.is_available() else SMALL_SHAPE


def activations(dtype):
    """Their dtype beside weights of `dtype`."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def inputs(n, k, dtype, bias):
    weight = random(n, k, dtype=dtype, scale=k**-0.5)
    linear = Linear(weight, random(n, dtype=dtype) if bias else None)
    x = random(2, k, dtype=activations(dtype), seed=1)
    partials = random(2, 5, seed=2).abs() * k / 3
    return linear, x, partials


def check_normed(n, k, dtype, bias, shape):
    linear, x, partials = inputs(n, k, dtype, bias)
    out, ref = poisoned(2, n), poisoned(2, n)
    matvec_normed(meta_rows(0, 0), x, linear, out, partials, 5, EPS, config=shape)
    matvec_normed_ref(meta_rows(0, 0), x, linear, ref, partials, 5, EPS)
    assert_close(out, ref, 1e-5)


def check_residual(n, k, dtype, norm, normed_dtype, tolerance, shape):
    linear, x, _ = inputs(n, k, dtype, bias=False)
    hidden = random(2, n, seed=3)
    ref_hidden = hidden.clone()
    normed, sumsq = poisoned(2, n, dtype=normed_dtype), poisoned(2, n)
    ref_normed, ref_sumsq = poisoned(2, n, dtype=normed_dtype), poisoned(2, n)
    matvec_residual(meta_rows(0, 0), x, linear, hidden, norm, normed, sumsq, config=shape)
    matvec_residual_ref(meta_rows(0, 0), x, linear, ref_hidden, norm, ref_normed, ref_sumsq)
    assert_close(hidden, ref_hidden, 1e-5, "hidden")
    assert_close(normed, ref_normed, tolerance, "normed")
    partials = residual_partials(n, shape)
    assert_close(sumsq[:, :partials].sum(1), ref_sumsq.sum(1), 1e-5, "sumsq")
    assert sumsq[:, partials:].isnan().all()


def check_gate_up(n, k, dtype, out_dtype, tolerance, shape):
    linear, x, partials = inputs(2 * n, k, dtype, bias=False)
    out, ref = poisoned(2, n, dtype=out_dtype), poisoned(2, n)
    gate_up(meta_rows(0, 0), x, linear, out, partials, 5, EPS, config=shape)
    gate_up_ref(meta_rows(0, 0), x, linear, ref, partials, 5, EPS)
    assert_close(out, ref, tolerance)


@CASES
@DTYPES
@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_matvec_normed_matches_reference(case, dtype, bias):
    n, k = case.sizes["n"], case.sizes["k"]
    check_normed(n, k, dtype, bias, shape_for(n, k))


@CASES
@DTYPES
def test_matvec_residual_matches_reference(case, dtype):
    n, k = case.sizes["n"], case.sizes["k"]
    if n > 4096 * 2:
        n = 8192
    act = activations(dtype)
    tolerance = BF16_ROUNDING if act == torch.bfloat16 else 1e-5
    check_residual(n, k, dtype, norm_weight(n, dtype), act, tolerance, shape_for(n, k))


@CASES
@DTYPES
def test_gate_up_matches_reference(case, dtype):
    n, k = min(case.sizes["n"], 16384), case.sizes["k"]
    act = activations(dtype)
    check_gate_up(n, k, dtype, act, BF16_ROUNDING + 2e-3 if act == torch.bfloat16 else 1e-5, shape_for(n, k))


SHAPES = pytest.mark.parametrize(
    "shape",
    [
        MatvecConfig(1, 4),
        MatvecConfig(2, 2, registers=96),
        MatvecConfig(16, 1),
        MatvecConfig(2, 8),  # a tile has more columns than the matrix
        MatvecConfig(4, 1, programs=4),
        MatvecConfig(1, 2, programs=5, registers=128),  # five turns, the last for one program
        MatvecConfig(2, 1, programs=132),  # more programs than rows
    ],
    ids=["rows_1", "registers_96", "rows_16", "wide_tile", "programs_4", "programs_5", "programs_132"],
)


def test_blocks_and_programs_of_a_shape():
    assert MatvecConfig(4, 1).grid(21) == (6, 6)
    assert MatvecConfig(4, 1, programs=4).grid(21) == (6, 4)
    assert MatvecConfig(4, 1, programs=132).grid(21) == (6, 6)
    assert residual_partials(21, MatvecConfig(4, 1, programs=4)) == 4


@SHAPES
def test_every_launch_shape_gives_the_same_answer(shape):
    check_normed(21, 1100, torch.bfloat16, True, shape)


@SHAPES
def test_every_launch_shape_of_gate_up_gives_the_same_answer(shape):
    check_gate_up(21, 1100, torch.bfloat16, torch.float32, 1e-5, shape)


@SHAPES
def test_every_launch_shape_prepares_the_next_norm(shape):
    check_residual(21, 1100, torch.bfloat16, norm_weight(21), torch.float32, 1e-5, shape)


def test_a_dead_step_writes_nothing():
    linear, x, partials = inputs(16, 256, torch.bfloat16, bias=False)
    dead = meta_rows(0, 0, status=layout.LIMIT_REACHED)
    out, hidden = poisoned(2, 16), poisoned(2, 16)
    normed, sumsq, act = poisoned(2, 16), poisoned(2, 64), poisoned(2, 8)
    matvec_normed(dead, x, linear, out, partials, 5, EPS, config=SMALL_SHAPE)
    matvec_residual(dead, x, linear, hidden, norm_weight(16), normed, sumsq, config=SMALL_SHAPE)
    gate_up(dead, x, linear, act, partials, 5, EPS, config=SMALL_SHAPE)
    assert all(t.isnan().all() for t in (out, hidden, normed, sumsq, act))


@pytest.mark.parametrize("dead", [0, 1])
def test_rows_with_different_status_are_independent(dead):
    alive, n = 1 - dead, 33
    linear, x, partials = inputs(2 * n, 256, torch.bfloat16, bias=False)
    half = Linear(linear.weight[:n])
    state = meta_rows(0, 0)
    state[dead, layout.STATUS] = layout.STOP
    out, act, hidden = poisoned(2, n), poisoned(2, n), random(2, n, seed=3)
    normed, sumsq, before = poisoned(2, n), poisoned(2, n), hidden.clone()
    matvec_normed(state, x, half, out, partials, 5, EPS, config=SMALL_SHAPE)
    gate_up(state, x, linear, act, partials, 5, EPS, config=SMALL_SHAPE)
    matvec_residual(state, x, half, hidden, norm_weight(n), normed, sumsq, config=SMALL_SHAPE)
    for written in (out, act, normed):
        assert written[dead].isnan().all() and written[alive].isfinite().all()
    assert sumsq[dead].isnan().all() and torch.equal(hidden[dead], before[dead])
    ref = before.clone()
    matvec_residual_ref(state, x, half, ref, norm_weight(n), poisoned(2, n), poisoned(2, n))
    assert_close(hidden, ref, 1e-5)
