"""Products of 17 to 64 rows on Hopper, in the shapes that engines have; test_matmul.py has more forms and sizes."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from test_matmul import EPS, HOPPER, ROUNDED, TOLERANCE
from util import DEVICE, assert_close, meta_rows, norm_weight, random

from tridecode import layout
from tridecode.kernels.linear.gate_up import gate_up_ref
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import make_buffers
from tridecode.kernels.linear.matvec import matvec_normed_ref, matvec_residual_ref
from tridecode.kernels.linear.weight import Linear
from tridecode.models.presets import PRESETS
from tridecode.tuning.choose import (
    choose_shapes,
    few_rows_shape,
    hopper_shape,
    invariant_products,
    invariant_shapes,
    matrix_sizes,
    parts_of_columns,
)  # fmt: skip
from tridecode.tuning.products import products

hopper_only = pytest.mark.skipif(
    not HOPPER, reason="Gluon has no interpreter, and this kernel is for GPUs of compute capability 9.0"
)
SIZES = matrix_sizes(PRESETS["qwen3-4b"])
SHAPES = {
    (role, rows): few_rows_shape(*size, rows, role == "gate_up", 90)
    for role, size in SIZES.items()
    for rows in (32, 64)
}
ROLES = pytest.mark.parametrize("role", SIZES)
PARTIALS, SPARE = 20, 64  # partial sums of squares; columns of a buffer that a launch has no business with


class Product:
    """The arguments of one product, with poisoned outputs, and of the reference. Rows `idle` do not run. SPARE columns
    lie between the rows of every buffer where `strided`."""

    def __init__(self, role, n, k, rows, dtype=torch.bfloat16, bias=False, idle=(1,), strided=False):
        self.role, self.rows, self.n, self.dtype = role, rows, n, dtype
        self.gated, self.residual = role == "gate_up", role in ("o_proj", "down")
        self.between = SPARE if strided else 0
        weight = random(n * (2 if self.gated else 1), k, dtype=dtype, scale=k**-0.5)
        self.linear = Linear(weight, random(n, dtype=dtype) if bias else None)
        self.meta = meta_rows(*([0] * rows))
        self.meta[list(idle), layout.STATUS] = layout.STOP
        self.runs = self.meta[:, layout.STATUS] == layout.RUN
        self.x = self.buffer(k, dtype, 64)[:rows]
        self.x.copy_(random(rows, k, dtype=dtype, seed=1))
        self.partials = random(rows, PARTIALS, seed=2).abs() * k / 16
        self.hidden, self.norm = random(rows, n, seed=3), norm_weight(n, dtype)
        self.split = make_buffers(n, rows, DEVICE)
        self.split.sums.fill_(float("nan"))
        self.outputs = self.buffer(n, dtype if self.gated else torch.float32), self.buffer(n, dtype), self.buffer(n)
        self.poison()

    def buffer(self, columns, dtype=torch.float32, rows=None):
        whole = torch.full((rows or self.rows, columns + self.between), float("nan"), dtype=dtype, device=DEVICE)
        return whole[:, :columns]

    def poison(self):
        for output in self.outputs:
            output.fill_(float("nan"))
        if self.residual:
            self.outputs[0].copy_(self.hidden)

    def arguments(self, out, normed, sumsq):
        if self.residual:
            return self.meta, self.x, self.linear, out, self.norm, normed, sumsq, self.split
        return self.meta, self.x, self.linear, out, self.partials, PARTIALS, EPS, self.split

    def enqueue(self, shape, pdl=False):
        forms = products(shape)
        op = forms.residual if self.residual else forms.gate_up if self.gated else forms.normed
        op.launch(*self.arguments(*self.outputs), config=shape, pdl=pdl)

    def launch(self, shape):
        """The outputs, as they are after a launch."""
        self.poison()
        self.enqueue(shape)
        return [output.clone() for output in self.outputs]

    def check(self, shape):
        found = self.launch(shape)
        out, normed, sumsq = found
        wanted = [self.buffer(self.n) for _ in range(3)]
        if self.residual:
            wanted[0].copy_(self.hidden)
        ref = matvec_residual_ref if self.residual else gate_up_ref if self.gated else matvec_normed_ref
        ref(*self.arguments(*wanted))
        runs, idle = self.runs, ~self.runs
        assert_close(out[runs].float(), wanted[0][runs], ROUNDED if self.gated else TOLERANCE, "out")
        if self.residual:
            left = products(shape).partials(self.n, shape)
            assert_close(normed[runs].float(), wanted[1][runs], ROUNDED, "normed")
            assert_close(sumsq[runs, :left].sum(1), wanted[2][runs, 0], TOLERANCE, "sumsq")
            assert sumsq[runs, left:].isnan().all(), "sums beyond the last were written"
            assert torch.equal(out[idle], self.hidden[idle]), "a row that does not run was written"
        else:
            assert out[idle].isnan().all(), "a row that does not run was written"
        assert normed[idle].isnan().all() and sumsq[idle].isnan().all(), "a row that does not run was written"
        assert not self.split.counter.any(), "the next launch would miscount"
        for output in self.outputs if self.between else ():
            assert output.as_strided((self.rows, SPARE), output.stride(), self.n).isnan().all(), "between the rows"
        assert same(found, self.launch(shape)), "not the same twice"

    def check_idle(self, shape):
        """Nothing is written where no row runs, and the next launch is right."""
        kept = self.meta.clone()
        self.meta[:, layout.STATUS] = layout.STOP
        out, normed, sumsq = self.launch(shape)
        assert torch.equal(out, self.hidden) if self.residual else out.isnan().all()
        assert normed.isnan().all() and sumsq.isnan().all() and not self.split.counter.any()
        self.meta.copy_(kept)
        self.check(shape)


def check_captured(given, shapes):
    """Products launched one after the other, each while the one before it runs, have the bits that they have alone;
    those that share columns have the same counter and sums. shapes: one each."""
    largest = max((product.split for product in given), key=lambda split: split.sums.numel())
    for product in given:
        product.split = largest
    wanted = [product.launch(shape) for product, shape in zip(given, shapes)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for product in given:
            product.poison()
        for product, shape in zip(given, shapes):
            product.enqueue(shape, pdl=True)
    for _ in range(5):
        graph.replay()
        for product, expected in zip(given, wanted):
            assert same(product.outputs, expected), product.role


def check_alike(most, few, shapes):
    """A row has the same bits among any number of rows; few: makes a product of so many like `most`, that has 64."""
    wanted = most.launch(shapes[64])
    for rows in (1, 8, 16, 17, 32, 33):
        product = few(rows)
        product.linear, product.norm = most.linear, most.norm
        for name in ("x", "partials", "hidden"):
            getattr(product, name).copy_(getattr(most, name)[:rows])
        found = product.launch(shapes[min(size for size in shapes if size >= rows)])
        assert same(found, [output[:rows] for output in wanted]), f"{rows} rows"


def same(some, others) -> bool:
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(some, others, strict=True))


def sizes(role, preset="qwen3-4b") -> tuple[int, int]:
    """Outputs and columns, of a small vocabulary."""
    n, k = matrix_sizes(PRESETS[preset])[role]
    return {"gate_up": n // 2, "lm_head": 19456}.get(role, n), k


@hopper_only
@pytest.mark.parametrize("rows", [32, 64, 17, 63])
@ROLES
def test_shapes_of_engines_match_the_reference(role, rows):
    Product(role, *sizes(role), rows).check(SHAPES[role, 32 if rows <= 32 else 64])


@hopper_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("n, k", [(1000, 4872), (1001, 4872), (65, 1032)])
@pytest.mark.parametrize("rows", [32, 64])
@ROLES
def test_tiles_that_reach_beyond_the_matrix(role, rows, n, k, dtype):
    """Programs that share the rows have no, one or two tiles each."""
    shape = SHAPES[role, rows]
    shape = replace(shape, programs=min(shape.programs, 5))
    Product(role, n, k, rows - 3, dtype, bias=role in ("qkv", "lm_head")).check(shape)


@hopper_only
@pytest.mark.parametrize("rows", [32, 64])
@ROLES
def test_rows_that_lie_apart(role, rows):
    Product(role, 1024, 2560, rows, strided=True).check(SHAPES[role, rows])


@hopper_only
@pytest.mark.parametrize("rows", [32, 64])
@ROLES
def test_nothing_is_written_where_no_row_runs_and_the_next_launch_is_right(role, rows):
    Product(role, *sizes(role), rows).check_idle(SHAPES[role, rows])


@hopper_only
@pytest.mark.parametrize("rows", [32, 64])
def test_launches_that_depend_on_each_other_give_the_same_bits_captured(rows):
    check_captured([Product(role, *sizes(role), rows) for role in SIZES], [SHAPES[role, rows] for role in SIZES])


@hopper_only
@pytest.mark.parametrize("preset", ["qwen3-4b", "llama-3.1-8b"])
@ROLES
def test_a_row_has_the_same_bits_among_any_number_of_rows(role, preset):
    """In the shapes of the batch-invariant mode, whose instructions are as wide as there are rows."""
    shapes = invariant_products(*matrix_sizes(PRESETS[preset])[role], role, 90)
    few = partial(Product, role, *sizes(role, preset), idle=())
    check_alike(few(64), few, shapes)


@pytest.mark.parametrize("preset", ["qwen3-4b", "llama-3.1-8b", "qwen3-8b"])
def test_engines_on_hopper_have_these_products_for_more_than_sixteen_rows(preset):
    for capability, expected in ((90, {HopperConfig}), (80, {TilesConfig}), (120, {TilesConfig})):
        found = choose_shapes(PRESETS[preset], torch.bfloat16, capability)
        shapes = [getattr(found[32], role) for role in SIZES]
        assert set(map(type, shapes)) == expected
        few = [getattr(found[rows], role) for rows in (1, 8, 16) for role in SIZES]
        assert HopperConfig not in map(type, few)
    assert HopperConfig not in map(type, vars(choose_shapes(PRESETS[preset], torch.float32, 90)[2]).values())


@pytest.mark.parametrize("preset", PRESETS)
def test_rows_that_must_not_know_each_other_are_added_in_one_order(preset):
    """Tiles may differ, not which columns are added together, nor how many sums of squares there are."""
    found = invariant_shapes(PRESETS[preset], torch.bfloat16, 90).values()
    for op, (n, k) in matrix_sizes(PRESETS[preset]).items():
        shapes = [getattr(shapes, op) for shapes in found]
        assert (HopperConfig in map(type, shapes)) == (hopper_shape(n, k, op == "gate_up") is not None)
        if HopperConfig in map(type, shapes):
            assert len({(type(shape), shape.block_n, *parts_of_columns(shape, k)) for shape in shapes}) == 1
            assert op != "lm_head" or shapes[0].split == 1


@pytest.mark.parametrize("preset", PRESETS)
def test_programs_that_share_columns_are_enough_and_have_enough(preset):
    for role, (n, k) in matrix_sizes(PRESETS[preset]).items():
        if shape := hopper_shape(n, k, role == "gate_up"):
            tiles = -(-n // shape.block_n)
            assert (shape.programs or tiles * shape.split) >= 96
            assert k >= 1024 * shape.split and (shape.split == 1 or role not in ("gate_up", "lm_head"))
    assert hopper_shape(4096, 1024, False) is None, "of Qwen3-0.6B"
    assert hopper_shape(16384, 2048, True) is None, "of Llama-3.2-1B"
