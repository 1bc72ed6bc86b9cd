"""Values of the blocks of GGUF files, against the gguf package to the bit."""

import warnings

import numpy as np
import pytest
import torch

from tridecode.checkpoint.gguf.dequantize import NAMES, dequantize
from tridecode.checkpoint.gguf.schemes import SCHEMES
from tridecode.models.gguf import TYPES

gguf = pytest.importorskip("gguf")
SIZES = {kind.name: (kind.columns, kind.nbytes) for kind in TYPES.values()}
# Type -> bytes of a block at which an fp16 scale begins. Types without an entry have no fp16 number.
HALVES = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
EDGES = (0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF)  # zeros, denormals, 1, the largest


def blocks_of(name: str, count: int, halves=None) -> np.ndarray:
    """Random blocks, with random finite fp16 numbers or with `halves`."""
    rng = np.random.default_rng(sum(map(ord, name)))
    blocks = rng.integers(0, 256, (count, SIZES[name][1]), dtype=np.uint8)
    if name == "MXFP4":
        blocks[:, 0] %= 251  # Larger exponents give infinite values.
    for at in HALVES.get(name, ()):
        values = (rng.standard_normal(count) * 0.02).astype(np.float16).view(np.uint16)
        if halves is not None:
            values = np.resize(np.array(halves, dtype=np.uint16), count)
        blocks[:, at : at + 2] = values.astype("<u2").view(np.uint8).reshape(count, 2)
    return blocks


def assert_equal_bits(name: str, blocks: np.ndarray) -> None:
    kind = gguf.GGMLQuantizationType[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = gguf.quants.dequantize(blocks.reshape(4, -1), kind)
    got = dequantize(torch.from_numpy(blocks.reshape(4, -1)), name, SIZES[name][1])
    assert got.dtype == torch.float32
    np.testing.assert_array_equal(got.numpy().view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", NAMES)
def test_random_blocks(name):
    assert_equal_bits(name, blocks_of(name, 512))


@pytest.mark.parametrize("name", HALVES)
def test_edges_of_scales(name):
    assert_equal_bits(name, blocks_of(name, 4 * len(EDGES), EDGES))


@pytest.mark.parametrize("fill", [0, 255, 0x0F, 0xF0, 0x80])
@pytest.mark.parametrize("name", NAMES)
def test_constant_codes(name, fill):
    blocks = blocks_of(name, 8)
    keep = blocks.copy()
    blocks[:, name == "MXFP4" :] = fill
    for at in HALVES.get(name, ()):
        blocks[:, at : at + 2] = keep[:, at : at + 2]
    assert_equal_bits(name, blocks)


@pytest.mark.parametrize("bits", [0x7E00, 0x7C00, 0xFC00], ids=["nan", "inf", "minus inf"])
@pytest.mark.parametrize("name", HALVES)
def test_scales_must_be_finite(name, bits):
    for at in HALVES[name]:
        blocks = blocks_of(name, 4)
        blocks[2] = 255  # No code is 0, which an infinite scale would turn into NaN only there.
        for other in HALVES[name]:
            blocks[2, other : other + 2] = (0, 60)
        blocks[2, at : at + 2] = np.array([bits], dtype="<u2").view(np.uint8)
        with pytest.raises(ValueError, match="not finite"):
            dequantize(torch.from_numpy(blocks), name, SIZES[name][1])


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_blocks_are_lossless(name):
    scheme, rows, k = SCHEMES[name], 24, 512
    data = torch.from_numpy(blocks_of(name, rows * k // scheme.columns)).reshape(rows, -1)
    expected = dequantize(data, name, scheme.nbytes)
    weight = scheme.read({"weight": data}, rows, k)
    packed = scheme.packed(k, [0], torch.float16)
    tensors = {part: torch.empty(shape, dtype=dtype) for part, (shape, dtype) in packed.shapes(rows).items()}
    packed.pack(tensors, 0, weight)
    for each in (weight, packed.unpack(tensors)):
        assert torch.equal(each.dequantize().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("names", [
    ("Q4_K", "Q6_K"), ("Q6_K", "Q5_K"), ("Q5_0", "Q8_0"), ("Q4_0", "Q4_1"), ("Q5_1", "Q4_0"), ("Q8_0", "Q4_1", "Q5_0"),
])  # fmt: skip
def test_parts_of_several_types_are_lossless(names):
    rows, k = 24, 512
    packed = SCHEMES[names[0]].common({SCHEMES[name] for name in names}, k)
    shapes = packed.shapes(rows * len(names))
    tensors = {part: torch.empty(shape, dtype=dtype) for part, (shape, dtype) in shapes.items()}
    expected = []
    for i, name in enumerate(names):
        data = torch.from_numpy(blocks_of(name, rows * k // SCHEMES[name].columns)).reshape(rows, -1)
        packed.pack(tensors, i * rows, SCHEMES[name].read({"weight": data}, rows, k))
        expected.append(dequantize(data, name, SCHEMES[name].nbytes))
    assert torch.equal(packed.unpack(tensors).dequantize().view(torch.int32), torch.cat(expected).view(torch.int32))


def test_types_with_and_without_factors_of_scales_have_no_common_packed_tensor():
    assert SCHEMES["Q4_K"].common({SCHEMES["Q4_K"], SCHEMES["Q8_0"]}, 512) is None


@pytest.mark.parametrize("name", SCHEMES)
def test_packed_scales_must_be_finite(name):
    scheme = SCHEMES[name]
    for at in HALVES[name]:
        blocks = blocks_of(name, 4)
        blocks[1, at : at + 2] = (0, 126)
        with pytest.raises(ValueError, match="not finite"):
            scheme.read({"weight": torch.from_numpy(blocks.reshape(2, -1))}, 2, 2 * scheme.columns)
