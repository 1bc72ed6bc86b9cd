"""Products of few rows on Hopper by a ring in shared memory: forms, launch shapes and rows, against the references."""

from dataclasses import replace

import pytest
import torch
from test_bits import EPS, PDL, ROUNDED, TOLERANCE, activations, idle, linear_of
from test_matmul import HOPPER
from util import assert_close, norm_weight, poisoned, random

from tridecode.kernels.gate_up import gate_up_ref
from tridecode.kernels.matvec import matvec_normed_ref, matvec_residual_ref
from tridecode.model.presets import PRESETS
from tridecode.model.weights import Linear
from tridecode.step.few_bits import ring_shape
from tridecode.step.products import products
from tridecode.step.shapes import RingShape

on_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter")
SHAPES = {
    "whole_rows": RingShape(4, 5, 1, 5),
    "rows_shared": RingShape(4, 5, 2, 5, programs=7),
    "rows_shared_copier": RingShape(4, 5, 2, 5, programs=7, copier=1, registers=128),
    "x_streamed": RingShape(8, 2, 2, 2, registers=128),
    "x_streamed_copier": RingShape(8, 1, 3, 1, programs=5, copier=1, registers=112),
    "x_shared": RingShape(8, 1, 5, 0, registers=128),
    "x_shared_copier": RingShape(4, 2, 3, 0, programs=6, copier=1, registers=112),
    "two_warps": RingShape(2, 3, 3, 4, registers=255),
}
FORMS = {"int4": 128, "int4_a_row": 0, "e4m3": 0, "e4m3_blocks": 128, "dense": 0}
FORM = pytest.mark.parametrize("form", FORMS)
ROWS_AND_SHAPE = pytest.mark.parametrize(
    "rows, shape",
    [
        pytest.param(rows, shape, id=f"{rows}-{name}")
        for rows in (1, 3, 8, 16)
        for name, shape in SHAPES.items()
        if rows <= 8 or shape.x_ahead
    ],
)


def weight(form, n, k, bias=None):
    if form == "dense":
        return Linear(random(n, k, dtype=torch.bfloat16, scale=k**-0.5), bias)
    return linear_of("int4_groups_of_128" if form == "int4" else form, n, k, bias)


@on_hopper
@FORM
@ROWS_AND_SHAPE
def test_normed_matches_reference(form, rows, shape):
    n, k = 400, 2560
    linear = weight(form, n, k, random(n, dtype=torch.bfloat16))
    x, partials = activations(rows, k)
    out, ref, meta = poisoned(rows, n), poisoned(rows, n), idle(rows, *([1] if rows > 1 else []))
    products(shape).normed.launch(meta, x, linear, out, partials, 5, EPS, shape=shape, pdl=PDL)
    matvec_normed_ref(meta, x, linear, ref, partials, 5, EPS)
    runs = torch.arange(rows) != 1
    assert_close(out[runs], ref[runs], TOLERANCE)
    assert rows == 1 or out[1].isnan().all(), "a row that does not run was written"


@on_hopper
@pytest.mark.parametrize("n, k", [(2560, 4096), (2560, 9728), (1024, 3072), (2048, 8192), (4096, 14336)])
@pytest.mark.parametrize("form", ["int4", "e4m3", "dense"])
@pytest.mark.parametrize("rows", [1, 8])
def test_residual_matches_reference(form, rows, n, k):
    linear, (x, _) = weight(form, n, k), activations(rows, k)
    for shape in (ring_shape(linear, rows), RingShape(8, 2, 2, 2, copier=1, registers=96)):
        hidden, norm, meta = random(rows, n, seed=3), norm_weight(n, torch.bfloat16), idle(rows)
        expected = hidden.clone()
        normed, expected_normed = poisoned(rows, n, dtype=torch.bfloat16), poisoned(rows, n)
        sumsq, expected_sumsq = poisoned(rows, n), poisoned(rows, n)
        products(shape).residual.launch(meta, x, linear, hidden, norm, normed, sumsq, shape=shape, pdl=PDL)
        matvec_residual_ref(meta, x, linear, expected, norm, expected_normed, expected_sumsq)
        assert_close(hidden, expected, TOLERANCE, "hidden")
        assert_close(normed.float(), expected_normed, ROUNDED, "normed")
        left = products(shape).partials(n, shape)
        assert_close(sumsq[:, :left].sum(1), expected_sumsq[:, 0], TOLERANCE, "sumsq")


@on_hopper
@FORM
@ROWS_AND_SHAPE
def test_gate_up_matches_reference(form, rows, shape):
    n, k = 408, 2560
    linear, (x, partials) = weight(form, 2 * n, k), activations(rows, k)
    out, ref = poisoned(rows, n, dtype=torch.bfloat16), poisoned(rows, n)
    products(shape).gate_up.launch(idle(rows), x, linear, out, partials, 5, EPS, shape=shape, pdl=PDL)
    gate_up_ref(idle(rows), x, linear, ref, partials, 5, EPS)
    assert_close(out.float(), ref, ROUNDED)


@on_hopper
@pytest.mark.parametrize("form", ["int4", "e4m3", "dense"])
def test_a_row_is_bit_equal_beside_whatever_and_in_any_number_of_programs(form):
    n, k = 816, 2560
    linear, (x, partials) = weight(form, n, k), activations(16, k)
    found = {}
    for name in ("whole_rows", "rows_shared", "rows_shared_copier", "x_shared_same"):
        shape = SHAPES.get(name, replace(SHAPES["rows_shared"], x_ahead=0))
        for rows, place in ((1, 0), (8, 7), (16, 9)) if shape.x_ahead else ((1, 0), (8, 7)):
            others = random(rows, k, dtype=torch.bfloat16, seed=place + 20)
            others_partials = random(rows, 5, seed=place).abs() * k / 3
            others[place], others_partials[place] = x[0], partials[0]
            if place:
                others[0] = float("nan")
            out = poisoned(rows, n)
            products(shape).normed.launch(
                idle(rows), others, linear, out, others_partials, 5, EPS, shape=shape, pdl=PDL
            )
            found[name, rows] = out[place]
    first = found.pop(("whole_rows", 1))
    assert not first.isnan().any()
    for name, other in found.items():
        assert torch.equal(first, other), name


@on_hopper
@pytest.mark.parametrize("copier", [0, 1])
def test_nothing_is_written_where_no_row_runs(copier):
    shape = RingShape(4, 2, 3, 1, programs=2, copier=copier, registers=128)
    linear, (x, partials) = weight("int4", 80, 2560), activations(4, 2560)
    out = poisoned(4, 80)
    for _ in range(3):  # what one launch left behind would trouble the next
        products(shape).normed.launch(idle(4, 0, 1, 2, 3), x, linear, out, partials, 5, EPS, shape=shape, pdl=PDL)
    assert out.isnan().all()
    products(shape).normed.launch(idle(4), x, linear, out, partials, 5, EPS, shape=shape, pdl=PDL)
    assert not out.isnan().any()


def test_shapes_are_for_what_the_kernel_carries():
    for form, bits in (("int4", 4), ("e4m3", 8)):
        for config in PRESETS.values():
            for k in (config.hidden_size, config.intermediate_size):
                linear = linear_of("int4_groups_of_128" if bits == 4 else form, 32, k) if k % 256 == 0 else None
                assert linear is None or isinstance(ring_shape(linear, 1), RingShape)
    for form in ("int4", "int4_ordered", "int8", "int8_zeros"):  # groups of 64, orders, zero points, other codes
        assert ring_shape(linear_of(form, 32, 512), 1) is None, form
    assert ring_shape(linear_of("int4_groups_of_128", 24, 512), 1) is None, "rows that fill no block"
    assert ring_shape(linear_of("e4m3", 32, 192), 1) is None, "columns that fill no pair of tiles"
    assert ring_shape(linear_of("e4m3", 32, 512), 32) is None, "more rows than the kernel has sums for"
    assert replace(ring_shape(linear_of("e4m3", 32, 512), 16), programs=5).grid(32) == (2, 2)
