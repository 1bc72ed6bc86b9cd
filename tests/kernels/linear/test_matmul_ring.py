"""Products of one row on Hopper by a ring in shared memory: forms and launch shapes, against the references."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from test_matmul import HOPPER
from test_packed import EPS, PDL, ROUNDED, TOLERANCE, activations, idle, linear_of
from util import assert_close, norm_weight, poisoned, random

from tridecode.checkpoint.formats.quantize import rules
from tridecode.checkpoint.load import empty_weights
from tridecode.kernels.linear.gate_up import gate_up_ref
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_ring import RingConfig
from tridecode.kernels.linear.matvec import matvec_normed_ref, matvec_residual_ref
from tridecode.models.presets import PRESETS
from tridecode.step.model import shapes_of
from tridecode.tuning.few_bits import RINGS, ROLES, few_bits_shape, ring_shape, ring_shapes
from tridecode.tuning.products import products

on_hopper = pytest.mark.skipif(not HOPPER, reason="Gluon has no interpreter")
SHAPES = {
    "whole_rows": RingConfig(4, 5, 1),
    "rows_shared": RingConfig(4, 5, 2, programs=7),
    "rows_shared_copier": RingConfig(4, 5, 2, programs=7, copier=1, registers=168),
    "more_stages_than_rows": RingConfig(4, 5, 6, programs=20),
    "rows_and_x_shared": RingConfig(4, 5, 3, x_shared=True, programs=7),
    "x_shared": RingConfig(8, 1, 4, x_shared=True, registers=128),
    "x_shared_copier": RingConfig(4, 2, 3, x_shared=True, programs=6, copier=1, registers=112),
    "two_warps": RingConfig(2, 3, 3, x_shared=True, registers=255),
}
FORMS = {"int4": "int4_groups_of_128", "int4_a_row": "int4_a_row", "e4m3": "e4m3", "e4m3_blocks": "e4m3_blocks"}
FORM = pytest.mark.parametrize("form", FORMS)
SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def gate_up(shape, linear, out, x, partials):
    products(shape).gate_up.launch(idle(1), x, linear, out, partials, 5, EPS, config=shape, pdl=PDL)


def normed(shape, linear, out, x, partials, meta=None):
    meta = idle(1) if meta is None else meta
    products(shape).normed.launch(meta, x, linear, out, partials, 5, EPS, config=shape, pdl=PDL)


@on_hopper
@SHAPE
@FORM
def test_normed_matches_reference(form, shape):
    """Of columns that leave some warps' last tiles empty."""
    n, k = 400, 2304
    linear, (x, partials) = linear_of(FORMS[form], n, k, random(n, dtype=torch.bfloat16)), activations(1, k)
    out, ref = poisoned(1, n), poisoned(1, n)
    normed(shape, linear, out, x, partials)
    matvec_normed_ref(idle(1), x, linear, ref, partials, 5, EPS)
    assert_close(out, ref, TOLERANCE)


@on_hopper
@SHAPE
@pytest.mark.parametrize("form", ["int4", "e4m3"])
def test_gate_up_matches_reference(form, shape):
    n, k = 408, 2560
    linear, (x, partials) = linear_of(FORMS[form], 2 * n, k), activations(1, k)
    out, ref = poisoned(1, n, dtype=torch.bfloat16), poisoned(1, n)
    gate_up(shape, linear, out, x, partials)
    gate_up_ref(idle(1), x, linear, ref, partials, 5, EPS)
    assert_close(out.float(), ref, ROUNDED)


def assert_residual_close(linear, shape):
    n, (x, _) = linear.out_features, activations(1, linear.in_features)
    hidden, norm = random(1, n, seed=3), norm_weight(n, torch.bfloat16)
    expected = hidden.clone()
    found, expected_normed = poisoned(1, n, dtype=torch.bfloat16), poisoned(1, n)
    sumsq, expected_sumsq = poisoned(1, n), poisoned(1, n)
    products(shape).residual.launch(idle(1), x, linear, hidden, norm, found, sumsq, config=shape, pdl=PDL)
    matvec_residual_ref(idle(1), x, linear, expected, norm, expected_normed, expected_sumsq)
    assert_close(hidden, expected, TOLERANCE, "hidden")
    assert_close(found.float(), expected_normed, ROUNDED, "normed")
    left = products(shape).partials(n, shape)
    assert_close(sumsq[:, :left].sum(1), expected_sumsq[:, 0], TOLERANCE, "sumsq")


@on_hopper
@SHAPE
@pytest.mark.parametrize("form", ["int4", "e4m3_blocks"])
def test_residual_matches_reference(form, shape):
    assert_residual_close(linear_of(FORMS[form], 400, 2560), shape)


def shapes_for(kind, capability=90, preset="qwen3-4b", **how):
    """Launch shapes by rows, and the weights that they are for."""
    config = replace(PRESETS[preset], quantise=rules(kind, "fp8"), num_layers=2)
    weights = empty_weights(config, "meta", torch.bfloat16, packs=True)
    return shapes_of(config, weights, capability, **how), weights


def rings(shapes):
    """Roles whose products go by the ring."""
    return {role for role, shape in vars(shapes).items() if isinstance(shape, RingConfig)}


def in_use():
    """(format, role, rows, columns), and shape, of every product that goes by the ring."""
    found = {}
    for preset, kind in product(PRESETS, ("int4", "fp8")):
        shapes, weights = shapes_for(kind, preset=preset)
        for role in sorted(rings(shapes[1])):
            linear = weights.lm_head if role == "lm_head" else getattr(weights.layers[0], role)
            size = linear.format, role, linear.out_features, linear.in_features
            assert found.setdefault(size, shape := getattr(shapes[1], role)) == shape
    return found


IN_USE = in_use()


@on_hopper
@pytest.mark.parametrize("form, role, n, k", IN_USE)
def test_shapes_in_use_match_the_reference(form, role, n, k):
    shape, n = IN_USE[form, role, n, k], min(n, 28672)  # an LM head has more of the same
    linear = linear_of(FORMS[form], n, k)
    if role in ("o_proj", "down"):
        return assert_residual_close(linear, shape)
    x, partials = activations(1, k)
    if role == "gate_up":
        out, ref = poisoned(1, n // 2, dtype=torch.bfloat16), poisoned(1, n // 2)
        gate_up(shape, linear, out, x, partials)
        gate_up_ref(idle(1), x, linear, ref, partials, 5, EPS)
        return assert_close(out.float(), ref, ROUNDED)
    out, ref = poisoned(1, n), poisoned(1, n)
    normed(shape, linear, out, x, partials)
    matvec_normed_ref(idle(1), x, linear, ref, partials, 5, EPS)
    assert_close(out, ref, TOLERANCE)


@on_hopper
@pytest.mark.parametrize("form", ["int4", "e4m3"])
def test_programs_copier_and_place_of_the_activations_leave_the_bits_alone(form):
    linear, (x, partials) = linear_of(FORMS[form], 816, 2560), activations(1, 2560)
    alike = ("whole_rows", "rows_shared", "rows_shared_copier", "more_stages_than_rows", "rows_and_x_shared")
    shapes = {name: SHAPES[name] for name in alike}
    found = {}
    for name, shape in shapes.items():
        found[name] = poisoned(1, 816)
        normed(shape, linear, found[name], x, partials)
    first = found.pop("whole_rows")
    assert not first.isnan().any()
    for name, other in found.items():
        assert torch.equal(first, other), name


@on_hopper
@pytest.mark.parametrize("copier", [0, 1])
def test_nothing_is_written_where_the_row_does_not_run(copier):
    shape = RingConfig(4, 2, 3, x_shared=True, programs=2, copier=copier, registers=128)
    linear, (x, partials) = linear_of(FORMS["int4"], 80, 2560), activations(1, 2560)
    out = poisoned(1, 80)
    for _ in range(3):  # what one launch left behind would trouble the next
        normed(shape, linear, out, x, partials, idle(1, 0))
    assert out.isnan().all()
    normed(shape, linear, out, x, partials)
    assert not out.isnan().any()


def test_what_the_kernel_does_not_carry_is_not_launched():
    x, partials = activations(2, 512)
    for form, rows in (("int4_groups_of_32", 1), ("int4_ordered", 1), ("int8", 1), ("int4_groups_of_128", 2)):
        with pytest.raises(AssertionError, match="not what the kernel multiplies"):
            normed(RingConfig(), linear_of(form, 32, 512), poisoned(rows, 32), x[:rows], partials, idle(rows))


def test_one_row_goes_by_the_ring_on_hopper_where_it_was_measured():
    layers = {"qkv", "o_proj", "gate_up", "down"}
    found = {kind: shapes_for(kind)[0] for kind in ("int4", "fp8", "int8")}
    assert rings(found["int4"][1]) == {"qkv", "o_proj", "gate_up", "lm_head"}
    assert rings(found["fp8"][1]) == layers | {"lm_head"}
    assert rings(found["int8"][1]) == set()
    assert rings(shapes_for("int4", preset="qwen3-0.6b")[0][1]) == layers | {"lm_head"}
    for shapes in found.values():
        assert not set.union(*(rings(shapes[rows]) for rows in shapes if rows > 1)), "more rows than the kernel takes"
    for capability in (80, 89, 100, 120):
        assert not rings(shapes_for("int4", capability)[0][1]), capability
    for preset in ("qwen3-14b", "qwen2.5-0.5b"):
        assert not rings(shapes_for("int4", preset=preset)[0][1]), "sizes that nobody measured"
    assert not rings(shapes_for("fp8", batch_invariant=True)[0][16])


def not_carried(layer):
    """What neither kernel of Gluon takes in the place of a layer's int4 qkv."""
    return {
        "an order": replace(layer.qkv, packed=replace(layer.qkv.packed, ordered=True)),
        "16 bits": replace(layer.qkv, weight=torch.empty(6144, 2560, device="meta"), packed=None),
        "another size": layer.o_proj,
    }


def test_a_role_goes_by_the_ring_if_the_kernel_carries_all_of_its_layers():
    shapes, weights = shapes_for("int4")
    layer = weights.layers[0]
    assert ring_shape([layer.qkv, layer.qkv], "qkv", 2560) == shapes[1].qkv == RINGS["int4", 6144, 2560]
    packed = layer.qkv.packed
    other = not_carried(layer) | {
        "groups of 64": replace(layer.qkv, packed=replace(packed, group=64)),
        "zero points": replace(layer.qkv, packed=replace(packed, zeros=True)),
        "rows that 16 do not divide": replace(layer.qkv, weight=layer.qkv.weight[:-8]),
    }
    for name, linear in other.items():
        assert ring_shape([layer.qkv, linear], "qkv", 2560) is None, name
    fp8 = shapes_for("fp8")[1].layers[0].qkv
    assert ring_shape([fp8], "qkv", 2560) == RINGS["e4m3", 6144, 2560]
    grouped = replace(fp8, packed=replace(fp8.packed, group=128, rows=128))
    assert ring_shape([grouped], "qkv", 2560) is None, "scales of groups"
    int8 = shapes_for("int8")[1].layers[0].qkv
    assert ring_shape([replace(int8, packed=replace(int8.packed, group=2560))], "qkv", 2560) is None, "8 bits a row"
    mixed = replace(weights, layers=[replace(layer, qkv=other["zero points"]), *weights.layers[1:]])
    config = replace(PRESETS["qwen3-4b"], quantise=rules("int4", "fp8"), num_layers=2)
    one = shapes_of(config, mixed, 90)[1]
    assert one.qkv == few_bits_shape(layer.qkv, 1) and isinstance(one.qkv, MatmulConfig)
    assert rings(one) == {"o_proj", "gate_up", "lm_head"}


def test_e4m3_goes_by_the_ring_in_all_roles_of_the_layers_or_in_none():
    """One alone has taken longer than none."""
    weights = shapes_for("fp8")[1]
    linears = {role: [getattr(layer, role) for layer in weights.layers] for role in ROLES if role != "lm_head"}
    linears |= {"lm_head": [weights.lm_head]}
    assert set(ring_shapes(linears)) == set(ROLES)
    dense = [replace(each, weight=torch.empty(2560, 9728, device="meta"), packed=None) for each in linears["down"]]
    assert not ring_shapes(linears | {"down": dense})
    few = shapes_for("int4")[1].layers
    assert set(ring_shapes(linears | {"qkv": [layer.qkv for layer in few], "down": dense})) == {"qkv", "lm_head"}


def test_a_grid_has_no_more_programs_than_blocks():
    assert RingConfig(programs=5).grid(32) == (2, 2) and RingConfig().grid(160) == (10, 10)
    for (_, _, n, _), shape in IN_USE.items():
        assert shape.grid(n) == (n // 16, shape.programs or n // 16)
