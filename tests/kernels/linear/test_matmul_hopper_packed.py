"""Products of 9 to 64 rows on Hopper, of weights in fewer bits: forms, launch shapes, those in use."""

from dataclasses import replace
from functools import partial

import pytest
from test_matmul_hopper import Product, check_alike, check_captured, hopper_only, same
from test_matmul_ring import not_carried, shapes_for
from test_packed import linear_of

from tridecode.kernels.linear.matmul_hopper import HOPPER_NORMED, HopperConfig
from tridecode.kernels.linear.matmul_wide import MAX_SPLIT
from tridecode.kernels.linear.wgmma_operand import COLUMNS_OF
from tridecode.tuning.few_bits import ROLES, UNSHARED, hopper_carries, hopper_shapes, invariant_hopper_shape

FORMS = (
    "int4_groups_of_128", "int4", "int4_zeros", "int4_a_row", "int8_a_row", "int8_zeros", "e4m3", "e4m3_blocks"
)  # fmt: skip
FORM = pytest.mark.parametrize("form", FORMS)
SHAPES = {
    "one": HopperConfig(64, 256, 4, 4, registers=168),
    "copier": HopperConfig(64, 256, 4, 4, copier=1, registers=112),
    "high": HopperConfig(128, 256, 3, 3, num_warps=8, registers=240),
    "high_few_warps": HopperConfig(128, 256, 2, 2, registers=248),
    "two_pieces": HopperConfig(64, 512, 2, 2, num_warps=8, registers=240),
    "stages_apart": HopperConfig(64, 256, 4, 2, registers=168),
    "turns": HopperConfig(64, 256, 4, 4, programs=3, registers=168),
    "turns_copier": HopperConfig(128, 256, 3, 2, num_warps=8, programs=2, copier=1, registers=120),
    "split": HopperConfig(64, 256, 4, 4, split=3, registers=168),
}
MADE = {"int4": "int4_groups_of_128", "fp8": "e4m3"}  # by --quantize
CARRIED = pytest.mark.parametrize("kind", MADE)


class PackedProduct(Product):
    """Of weights of one of FORMS."""

    def __init__(self, form, role, n, k, rows, **how):
        super().__init__(role, n, k, rows, **how)
        self.linear = replace(linear_of(form, n * (2 if self.gated else 1), k), bias=self.linear.bias)


@hopper_only
@FORM
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_match_the_reference(shape, form):
    """Of tiles that reach beyond the rows."""
    PackedProduct(form, "qkv", 208, 2560, 33, bias=True).check(shape)


@hopper_only
@pytest.mark.parametrize("rows", [5, 16, 64])
@FORM
@pytest.mark.parametrize("role", ["o_proj", "gate_up"])
def test_forms_match_the_reference(role, form, rows):
    PackedProduct(form, role, 208, 2560, rows, strided=True).check(SHAPES["one" if role == "gate_up" else "split"])


def in_use():
    """(kind, format, role, rows of a pass, rows, columns), and shape, of every product that goes this way."""
    found = {}
    for preset in ("qwen3-0.6b", "qwen3-4b", "llama-3.1-8b"):
        for kind in ("int4", "fp8"):
            shapes, weights = shapes_for(kind, preset=preset)
            for rows in (16, 32, 64):
                for role in ROLES:
                    shape = getattr(shapes[rows], role)
                    linear = weights.lm_head if role == "lm_head" else getattr(weights.layers[0], role)
                    if isinstance(shape, HopperConfig):
                        found[linear.format, role, rows, linear.out_features, linear.in_features] = shape
    return found


IN_USE = in_use()


@hopper_only
@pytest.mark.parametrize("form, role, rows, n, k", IN_USE)
def test_shapes_in_use_match_the_reference(form, role, rows, n, k):
    outputs = n // 2 if role == "gate_up" else min(n, 19456)  # an LM head has more of the same
    PackedProduct(MADE.get(form, form), role, outputs, k, rows - 1).check(IN_USE[form, role, rows, n, k])


@hopper_only
@CARRIED
@pytest.mark.parametrize("role, shape", [("qkv", "copier"), ("o_proj", "split")])
def test_nothing_is_written_where_no_row_runs_and_the_next_launch_is_right(role, shape, kind):
    PackedProduct(MADE[kind], role, 320, 2560, 16).check_idle(SHAPES[shape])


@hopper_only
@FORM
def test_a_copier_turns_stages_and_the_rows_of_a_tile_leave_the_bits_alone(form):
    product = PackedProduct(form, "qkv", 320, 2560, 20)
    alike = ("one", "copier", "high", "high_few_warps", "stages_apart", "turns", "turns_copier")
    first, *others = (product.launch(SHAPES[name]) for name in alike)
    assert not first[0][product.runs].isnan().any()
    for name, found in zip(alike[1:], others):
        assert same(first, found), name


SIZES = {"qkv": (6144, 2560), "o_proj": (2560, 4096), "gate_up": (9728, 2560), "down": (2560, 9728)}  # Qwen3-4B


@hopper_only
@pytest.mark.parametrize("rows", [16, 32, 64])
@CARRIED
def test_launches_that_depend_on_each_other_give_the_same_bits_captured(kind, rows):
    shapes = shapes_for(kind)[0][rows]
    given = [PackedProduct(MADE[kind], role, *size, rows) for role, size in SIZES.items()]
    check_captured(given, [getattr(shapes, role) for role in SIZES])


@hopper_only
@pytest.mark.parametrize("role", SIZES)
@pytest.mark.parametrize("form", [*MADE.values(), "int4_zeros"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(form, role):
    """In the shapes of the batch-invariant mode."""
    few = partial(PackedProduct, form, role, *SIZES[role], idle=())
    most = few(64)
    check_alike(most, few, {rows: invariant_hopper_shape(most.linear, role, rows) for rows in (16, 32, 64)})


def roles_of(shapes):
    return {role for role in ROLES if isinstance(getattr(shapes, role), HopperConfig)}


@CARRIED
def test_more_than_eight_rows_go_this_way_on_hopper(kind):
    shapes, weights = shapes_for(kind)
    assert [roles_of(shapes[rows]) for rows in (1, 8)] == [set(), set()]
    for rows in (16, 32, 64):
        assert roles_of(shapes[rows]) == set(ROLES)
        for role in ROLES:
            shape = getattr(shapes[rows], role)
            linear = weights.lm_head if role == "lm_head" else getattr(weights.layers[0], role)
            assert shape.block_k % COLUMNS_OF[linear.format] == 0
            assert 1 <= shape.split <= min(MAX_SPLIT, linear.in_features // shape.block_k)
            assert shape.split == 1 or role not in ("gate_up", "lm_head")
            tiles = shape.stages * 128 * shape.block_n * (shape.block_k // COLUMNS_OF[linear.format])
            assert tiles + 2 * shape.x_stages * shape.block_k * max(rows, 16) + 4096 < 232448
    small = shapes_for(kind, preset="qwen3-0.6b")[0]
    assert not roles_of(small[16]) and roles_of(small[32]) == roles_of(small[64]) == set(ROLES)
    for capability in (80, 89, 100, 120):
        assert not roles_of(shapes_for(kind, capability)[0][64]), capability


@pytest.mark.parametrize("preset", ["qwen3-0.6b", "qwen3-4b", "llama-3.1-8b"])
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_rows_that_must_not_know_each_other_are_added_in_one_order(kind, preset):
    """What differs is how many rows of the weights a program has, where these leave no sums of squares."""
    found = shapes_for(kind, preset=preset, batch_invariant=True)[0]
    assert sorted(found) == [16, 32, 64]
    for role in ROLES:
        shapes = [getattr(found[rows], role) for rows in found]
        assert {type(shape) for shape in shapes} == {HopperConfig}
        alike = {(shape.split, shape.block_k) + (() if role in UNSHARED else (shape.block_n,)) for shape in shapes}
        assert len(alike) == 1, role


def test_a_role_goes_this_way_if_the_kernel_carries_all_of_its_layers():
    _, weights = shapes_for("int4")
    layer = weights.layers[0]
    packed = layer.qkv.packed
    assert hopper_carries([layer.qkv, layer.qkv])
    for how in (dict(group=64), dict(zeros=True), dict(group=2560, name="int8", bits=8)):
        assert hopper_carries([replace(layer.qkv, packed=replace(packed, **how))]), how
    other = not_carried(layer) | {
        "groups of 32": replace(layer.qkv, packed=replace(packed, group=32)),
        "columns that 256 do not divide": replace(layer.qkv, packed=replace(packed, k=2432)),
    }
    for name, linear in other.items():
        assert not hopper_carries([layer.qkv, linear]), name
    fp8 = shapes_for("fp8")[1].layers[0].qkv
    assert hopper_carries([replace(fp8, packed=replace(fp8.packed, group=128, rows=128))]), "blocks"
    linears = {role: [getattr(layer, role)] for role in ROLES if role != "lm_head"} | {"lm_head": [weights.lm_head]}
    linears["down"] = [other["16 bits"]]
    assert not hopper_shapes(linears, 16), "of 16 rows all or none"
    assert set(hopper_shapes(linears, 32)) == set(ROLES) - {"down"}


def test_what_the_kernel_does_not_carry_is_not_launched():
    for form in ("int4_groups_of_32", "int4_ordered", "int8"):  # in groups of 32
        product = Product("qkv", 64, 512, 16)
        product.linear = linear_of(form, 64, 512)
        with pytest.raises(AssertionError, match="not what the kernel multiplies"):
            HOPPER_NORMED.launch(*product.arguments(*product.outputs), config=SHAPES["one"])
