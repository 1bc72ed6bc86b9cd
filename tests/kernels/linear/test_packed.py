"""Products of weights in fewer bits, against the same numbers in fp32: formats, groups, zero points, orders, rows."""

import pytest
import torch
from util import BF16_ROUNDING, CUDA, DEVICE, Case, assert_close, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.linear.dequantize import dequantise
from tridecode.kernels.linear.gate_up import gate_up_ref
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matvec import matvec_normed_ref, matvec_residual_ref
from tridecode.kernels.linear.packed import Codes, Packed
from tridecode.kernels.linear.weight import Linear
from tridecode.kernels.torch_ops import LINEAR, piece_rows
from tridecode.tuning.few_bits import few_bits_shape
from tridecode.tuning.products import products

PDL = CUDA and torch.cuda.get_device_capability() >= (9, 0)
EPS, DTYPE, TOLERANCE, ROUNDED = 1e-6, torch.bfloat16, 2e-5, BF16_ROUNDING + 2e-3
CASES = cases(
    Case("qwen3-4b_down", gpu=dict(n=2560, k=9728), small=dict(n=24, k=384)),
    Case("odd_rows", gpu=dict(n=1001, k=4864), small=dict(n=21, k=192)),
    Case("qwen3-0.6b_o_proj", gpu=dict(n=1024, k=2048), small=dict(n=32, k=128)),
)
FORMS = {  # name -> bits, columns and rows of a scale (0: all), zero points, an order of columns
    "int4": (4, 64, 1, False, False),
    "int4_groups_of_128": (4, 128, 1, False, False),
    "int4_groups_of_32": (4, 32, 1, True, False),
    "int4_zeros": (4, 128, 1, True, False),
    "int4_a_row": (4, 0, 1, False, False),
    "int4_ordered": (4, 64, 1, True, True),
    "int8": (8, 32, 1, False, False),
    "int8_zeros": (8, 64, 1, True, False),
    "int8_a_row": (8, 0, 1, False, False),
    "e4m3": (8, 0, 1, False, False),
    "e4m3_blocks": (8, 128, 16, False, False),
}
FORM = pytest.mark.parametrize("form", FORMS)
ROWS = pytest.mark.parametrize("rows", (1, 8, 16, 64) if CUDA else (1, 3))


def linear_of(form: str, n: int, k: int, bias=None) -> Linear:
    """Random codes of that format, packed; products with them have about unit size."""
    bits, group, rows, zeros, ordered = FORMS[form]
    name, generator = form.split("_")[0], torch.Generator().manual_seed(n + k)
    group, blocks = group or k, -(-n // rows)
    size = (2**-0.5 if name == "e4m3" else 2.0 ** (2 - bits)) * k**-0.5
    scale = (torch.rand(blocks, -(-k // group), generator=generator) + 0.5) * size
    values, zero = torch.randint(0, 2**bits, (n, k), generator=generator).to(torch.uint8), None
    if name == "e4m3":  # all of the codes but NaN, also the subnormal ones; the smaller ones more often
        values = (values & 0xBF).view(torch.float8_e4m3fn)
    elif zeros:
        half = 2 ** (bits - 1)
        zero = torch.randint(half - 3, half + 4, (n, -(-k // group)), generator=generator).to(torch.uint8)
    order = torch.randperm(k, generator=generator) if ordered else None
    form = Packed(name, bits, k, group, rows, zeros, ordered, torch.float32 if name == "e4m3" else torch.float16)
    codes = Codes(values, scale.to(form.scale_dtype), rows, group, bits, zero, order)
    tensors = {part: torch.empty(shape, dtype=dtype) for part, (shape, dtype) in form.shapes(n).items()}
    form.write(tensors, 0, codes)
    linear = Linear(**{part: tensor.to(DEVICE) for part, tensor in tensors.items()}, bias=bias, packed=form)
    assert torch.equal(linear.matrix().cpu(), codes.dequantised())
    return linear


def shape_for(linear, rows):
    return few_bits_shape(linear, rows) if CUDA else MatmulConfig(16, 2, 1, 1)


def idle(rows, *which):
    meta = meta_rows(*([0] * rows))
    meta[list(which), layout.STATUS] = layout.STOP
    return meta


def activations(rows, k):
    return random(rows, k, dtype=DTYPE, seed=1), random(rows, 5, seed=2).abs() * k / 3


@FORM
@ROWS
@CASES
def test_normed_matches_reference(case, rows, form):
    n, k = case.sizes["n"], case.sizes["k"]
    linear = linear_of(form, n, k, bias=random(n, dtype=DTYPE))
    x, partials = activations(rows, k)
    out, ref, meta = poisoned(rows, n), poisoned(rows, n), idle(rows, *([1] if rows > 1 else []))
    shape = shape_for(linear, rows)
    products(shape).normed.launch(meta, x, linear, out, partials, 5, EPS, config=shape)
    matvec_normed_ref(meta, x, linear, ref, partials, 5, EPS)
    runs = torch.arange(rows) != 1
    assert_close(out[runs], ref[runs], TOLERANCE)
    assert rows == 1 or out[1].isnan().all(), "a row that does not run was written"


@FORM
def test_residual_matches_reference(form):
    n, k, rows = (2560, 4096, 8) if CUDA else (24, 256, 2)
    linear, (x, _) = linear_of(form, n, k), activations(rows, k)
    hidden, norm, meta = random(rows, n, seed=3), norm_weight(n, DTYPE), idle(rows)
    expected, shape = hidden.clone(), shape_for(linear, rows)
    normed, expected_normed = poisoned(rows, n, dtype=DTYPE), poisoned(rows, n)
    sumsq, expected_sumsq = poisoned(rows, n), poisoned(rows, n)
    products(shape).residual.launch(meta, x, linear, hidden, norm, normed, sumsq, config=shape)
    matvec_residual_ref(meta, x, linear, expected, norm, expected_normed, expected_sumsq)
    assert_close(hidden, expected, TOLERANCE, "hidden")
    assert_close(normed.float(), expected_normed, ROUNDED, "normed")
    left = products(shape).partials(n, shape)
    assert_close(sumsq[:, :left].sum(1), expected_sumsq[:, 0], TOLERANCE, "sumsq")


@FORM
def test_gate_up_matches_reference(form):
    n, k, rows = (9728, 2560, 8) if CUDA else (20, 256, 2)
    linear, (x, partials) = linear_of(form, 2 * n, k), activations(rows, k)
    out, ref, shape = poisoned(rows, n, dtype=DTYPE), poisoned(rows, n), shape_for(linear, rows)
    products(shape).gate_up.launch(idle(rows), x, linear, out, partials, 5, EPS, config=shape)
    gate_up_ref(idle(rows), x, linear, ref, partials, 5, EPS)
    assert_close(out.float(), ref, ROUNDED)


SHAPES = {
    "32_rows": MatmulConfig(32, 4, 2, 3),
    "64_rows": MatmulConfig(64, 2, 4, 8),
    "rows_shared": MatmulConfig(16, 2, 3, 32, programs=2),
    "rows_shared_streamed": MatmulConfig(16, 4, 2, 3, programs=1),
    "32_rows_shared": MatmulConfig(32, 2, 3, 32, programs=1),
    "fetched": MatmulConfig(16, 2, 2, 3, fetch=1),
    "rows_shared_fetched": MatmulConfig(16, 2, 3, 32, programs=2, fetch=2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", ["int4", "int4_ordered", "int8_zeros", "e4m3", "e4m3_blocks"])
def test_every_launch_shape_gives_the_same_answer(form, shape):
    shape, n, rows = SHAPES[shape], 44, 2
    linear, (x, partials) = linear_of(form, n, 640), activations(rows, 640)
    out, ref = poisoned(rows, n), poisoned(rows, n)
    products(shape).normed.launch(idle(rows), x, linear, out, partials, 5, EPS, config=shape, pdl=PDL)
    matvec_normed_ref(idle(rows), x, linear, ref, partials, 5, EPS)
    assert_close(out, ref, TOLERANCE)
    hidden, norm = random(rows, n, seed=3), norm_weight(n, DTYPE)
    expected, normed, sumsq = hidden.clone(), poisoned(rows, n, dtype=DTYPE), poisoned(rows, n)
    products(shape).residual.launch(idle(rows), x, linear, hidden, norm, normed, sumsq, config=shape, pdl=PDL)
    matvec_residual_ref(idle(rows), x, linear, expected, norm, poisoned(rows, n), poisoned(rows, n))
    assert_close(hidden, expected, TOLERANCE)
    left = products(shape).partials(n, shape)
    assert_close(sumsq[:, :left].sum(1), expected.square().sum(1), TOLERANCE, "sumsq")


@FORM
def test_dequantise_matches_reference(form):
    n, k = (1001, 4864) if CUDA else (40, 320)
    linear = linear_of(form, n, k)
    out = poisoned(n - 5, k, dtype=torch.float32)
    dequantise(linear, 3, n - 2, out)
    assert_close(out, linear.matrix()[3 : n - 2], 1e-6)


@pytest.mark.skipif(not CUDA, reason="torch's products of bf16 on a CPU are not the GPU's")
@FORM
def test_a_product_of_many_rows_by_pieces_of_the_weight(form):
    linear, x = linear_of(form, 1001, 2560), random(128, 2560, dtype=DTYPE, seed=1)
    out, scratch = poisoned(128, 1001, dtype=DTYPE), poisoned(300 * 2560, dtype=DTYPE)
    LINEAR.launch(x, linear, out, scratch)
    assert_close(out.float(), x.float() @ linear.matrix().T, 6e-3)


def test_pieces_of_a_weight_are_alike_and_begin_at_whole_tiles():
    assert piece_rows(19456, 2**25 // 2560) == 9728 and piece_rows(6144, 2**25 // 2560) == 6144
    assert piece_rows(1001, 300) == 256 and piece_rows(28672, 2**25 // 4096) == 7168
    assert piece_rows(40, 16) == 16 and piece_rows(1000, 200) == 128
