"""Products of 9 to 64 rows on Hopper by packed tensors: schemes and launch configs."""

from functools import partial

import pytest
from linear_product import GGUF_SCHEMES, Product, check_alike, check_captured, packed, same
from util import BF16_ROUNDING, assert_close, covering, hopper_only

from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.project import project_ref
from tridecode.kernels.linear.weight import LoadedLinear

SCHEMES = {
    "int4": ["int4_groups_of_128", "int4", "int4_zeros", "int4_a_row"],
    "int8": ["int8_a_row", "int8_zeros"],
    "e4m3": ["e4m3", "e4m3_blocks"],
}
CONFIGS = {
    "one": HopperConfig(64, 256, 4, 4, registers=168),
    "producer": HopperConfig(64, 256, 4, 4, producer=1, registers=112),
    "high": HopperConfig(128, 256, 3, 3, num_warps=8, registers=240),
    "high_few_warps": HopperConfig(128, 256, 2, 2, registers=248),
    "two_pieces": HopperConfig(64, 512, 2, 2, num_warps=8, registers=240),
    "stages_apart": HopperConfig(64, 256, 4, 2, registers=168),
    "iterations": HopperConfig(64, 256, 4, 4, programs=3, registers=168),
    "iterations_producer": HopperConfig(128, 256, 3, 2, num_warps=8, programs=2, producer=1, registers=120),
    "split": HopperConfig(64, 256, 4, 4, split=3, registers=168),
}
OF_ENGINES = {"int4": "int4_groups_of_128", "fp8": "e4m3"}  # --quantize: scheme of the packed weights.
SIZES = {"normed": (6144, 2560), "residual": (2560, 4096), "gated": (9728, 2560)}  # role: (n, k) of Qwen3-4B.


def product(epilogue, scheme, n, k, rows, **options) -> Product:
    return Product(epilogue, packed(scheme, 2 * n if epilogue == "gated" else n, k), rows, partials=20, **options)


@hopper_only
@pytest.mark.parametrize("name, scheme", [
    (name, schemes[i % len(schemes)]) for i, name in enumerate(CONFIGS) for schemes in SCHEMES.values()
])  # fmt: skip
def test_configs_match_the_reference(name, scheme):
    """The tiles have more rows than the weight."""
    product("normed_bias", scheme, 208, 2560, 33).check(CONFIGS[name])


@hopper_only
@covering(2, epilogue=["residual", "gated", "plain"], scheme=sum(SCHEMES.values(), []), rows=[5, 16, 64])
def test_schemes_match_the_reference(epilogue, scheme, rows):
    config = CONFIGS["one" if epilogue == "gated" else "split"]
    product(epilogue, scheme, 208, 2560, rows, strided=True).check(config)


@hopper_only
@covering(
    2, config=[name for name in CONFIGS if name != "two_pieces"], scheme=[*GGUF_SCHEMES, "int8"], rows=[5, 16, 33, 64]
)
def test_scaled_weights_match_the_reference(config, scheme, rows):
    """Weights of small groups are rounded to bf16. A tile has one factor at most, which is for 256 columns."""
    product("normed_bias", scheme, 208, 2560, rows).check(CONFIGS[config], 5e-3, BF16_ROUNDING + 7e-3)


@hopper_only
@covering(2, scheme=[*GGUF_SCHEMES], epilogue=["residual", "gated", "plain"], rows=[16, 64])
def test_scaled_weights_match_the_reference_with_epilogues(scheme, epilogue, rows):
    config = CONFIGS["producer" if epilogue == "gated" else "split"]
    product(epilogue, scheme, 208, 2560, rows, strided=True).check(config, 5e-3, BF16_ROUNDING + 7e-3)


@hopper_only
@pytest.mark.parametrize("scheme", ["int4_minimums_over", "int6_over"])
def test_scaled_weights_are_multiplied_as_the_dequantized_matrix(scheme):
    """With bf16 weights in the reference, only the order of sums differs."""
    one = product("normed", scheme, 208, 2560, 33)
    out = one.launch(CONFIGS["producer"])[0]
    one.linear = LoadedLinear(one.linear.matrix().bfloat16())
    expected = one.buffer(one.n)
    project_ref(*one.arguments(expected, expected, expected))
    assert_close(out[one.runs], expected[one.runs], 5e-4)


@hopper_only
@pytest.mark.parametrize("scheme", OF_ENGINES.values())
@pytest.mark.parametrize("epilogue, config", [("normed", "producer"), ("residual", "split")])
def test_stopped_rows_do_not_disturb_the_next_launch(epilogue, config, scheme):
    product(epilogue, scheme, 320, 2560, 16).check_stopped(CONFIGS[config])


@hopper_only
@pytest.mark.parametrize("scheme", [*OF_ENGINES.values(), "int8_zeros"])
def test_configs_with_one_order_of_sums_give_the_same_bits(scheme):
    one = product("normed", scheme, 320, 2560, 20)
    alike = ("one", "producer", "high", "high_few_warps", "stages_apart", "iterations", "iterations_producer")
    first, *others = (one.launch(CONFIGS[name]) for name in alike)
    assert not first[0][one.runs].isnan().any()
    for name, other in zip(alike[1:], others):
        assert same(first, other), name


@hopper_only
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("scheme", OF_ENGINES.values())
def test_captured_dependent_launches_give_the_same_bits(scheme, rows):
    columns = 256 if scheme.startswith("int4") else 128
    config = HopperConfig(64, columns, 3, 3, producer=1, registers=128)
    split = HopperConfig(64, columns, 3, 3, split=4, producer=1, registers=128)
    products = [product(epilogue, scheme, *size, rows) for epilogue, size in SIZES.items()]
    check_captured(products, [split if one.epilogue == "residual" else config for one in products])


@hopper_only
@pytest.mark.parametrize("epilogue", SIZES)
@pytest.mark.parametrize("scheme", [*OF_ENGINES.values(), "int4_zeros"])
def test_a_row_has_the_same_bits_among_any_number_of_rows(scheme, epilogue):
    """The number of programs that share columns is the same for any number of rows."""
    split = 4 if epilogue == "residual" else 1
    columns = 256 if scheme.startswith("int4") else 128
    few = HopperConfig(64, columns, 4, 4, split=split, producer=1, registers=112)
    most = HopperConfig(64, columns, 4, 512 // columns, split=split, producer=1, registers=128)
    for_rows = partial(product, epilogue, scheme, *SIZES[epilogue], stopped=())
    check_alike(for_rows(64), for_rows, {16: few, 32: few, 64: most})


@pytest.mark.parametrize("scheme", ["int4_groups_of_32_zeros", "int4_ordered"])
def test_launch_rejects_unsupported_weights(scheme):
    with pytest.raises(ValueError):
        product("normed", scheme, 64, 512, 16).enqueue(CONFIGS["one"])
