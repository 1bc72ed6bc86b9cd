"""The registry of linear kernels, their support of cases, and the outputs of their ops."""

from dataclasses import replace

import pytest
import torch
from linear_product import Product, dense

from tridecode.kernels.device import Device
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.matvec import MatvecConfig
from tridecode.kernels.linear.packed import Packed
from tridecode.kernels.linear.project import NAMES, Case
from tridecode.kernels.linear.registry import LINEAR_KERNELS, kernel_named

H200 = Device("NVIDIA H200", 90, 132, 232448, 233472, 65536)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INT4, FP8 = Packed("int4", 4, 2560, 128), Packed("e4m3", 8, 2560, 2560)
DENSE = Case(6144, 2560, BF16, "normed")


def supporting(case: Case, rows: int, capability: int = 90) -> set[str]:
    device = H200._replace(capability=capability) if capability else Device()
    return {kernel.name for kernel in LINEAR_KERNELS if kernel.supports(case, rows, device)}


def test_kernels_have_distinct_names_and_configs():
    names = [kernel.name for kernel in LINEAR_KERNELS]
    assert names == ["ring", "groups", "matvec", "hopper", "matmul", "wide", "tiles", "torch"]
    assert len({kernel.config for kernel in LINEAR_KERNELS}) == len(names)
    assert [kernel_named(name) for name in names] == list(LINEAR_KERNELS)
    with pytest.raises(KeyError):
        kernel_named("none")


@pytest.mark.parametrize("epilogue", ["normed", "gated", "residual"])
def test_dense_weights_are_supported_by_rows_and_dtype(epilogue):
    case = DENSE._replace(epilogue=epilogue)
    for rows in (1, 16, 64):
        assert supporting(case, rows) == {"matvec", "hopper", "matmul", "wide", "tiles"}
    assert supporting(case, 65) == {"matvec"}
    assert supporting(case._replace(weight_type=FP16), 16) == {"matvec", "matmul", "wide", "tiles"}
    assert supporting(case._replace(weight_type=FP32), 16) == {"matvec"}
    assert supporting(case._replace(k=2564), 16) == {"matvec", "matmul", "wide"}, (
        "a kernel with TMA accepts rows that are not a multiple of 16 bytes"
    )


def test_plain_products_are_supported_by_few_kernels():
    assert supporting(DENSE._replace(epilogue="plain"), 16) == {"matvec", "matmul", "torch"}
    assert supporting(DENSE._replace(epilogue="plain"), 2048) == {"matvec", "torch"}
    assert supporting(DENSE._replace(epilogue="plain", weight_type=INT4), 2048) == {"torch"}
    assert supporting(DENSE._replace(epilogue="plain", weight_type=INT4), 64) == {"hopper", "matmul", "torch"}


@pytest.mark.parametrize("capability", [0, 75, 80, 89, 100, 120])
def test_other_devices_have_fewer_kernels(capability):
    tensor_cores = {"matmul", "wide", "tiles"} if capability != 75 else set()
    assert supporting(DENSE, 16, capability) == {"matvec"} | tensor_cores
    assert supporting(DENSE._replace(weight_type=INT4), 1, capability) == tensor_cores & {"matmul"}


def test_the_ring_supports_one_row_of_two_schemes():
    for packed in (INT4, FP8):
        case = DENSE._replace(weight_type=packed)
        assert supporting(case, 1) == {"ring", "hopper", "matmul"}
        assert supporting(case, 2) == {"hopper", "matmul"}
        assert supporting(case._replace(n=6136), 1) == {"hopper", "matmul"}, (
            "the ring kernel accepts an n that is not a multiple of 16"
        )


def name_of(value) -> str:
    """Return the id of a case. Sets are sorted, because their order differs between processes."""
    return f"{value.number_type}, {value.k}/{value.group}" if isinstance(value, Packed) else "-".join(sorted(value))


@pytest.mark.parametrize("packed, kernels", [
    (replace(INT4, ordered=True), {"matmul"}),
    (replace(INT4, group=32), {"matmul"}),
    (replace(INT4, k=2432), {"matmul"}),  # k is not a multiple of 256. 256 columns of int4 fill 128 bytes.
    (Packed("int8", 8, 2560, 32), {"matmul"}),
    (Packed("int8", 8, 2560, 32, scale_dtype=BF16), {"groups", "matmul"}),
    (Packed("int4", 4, 2560, 32, 1, False, False, torch.int8, True, 256), {"groups", "hopper", "matmul"}),
    (Packed("int6", 6, 2560, 16, 1, False, False, torch.int8, False, 256), {"groups", "hopper", "matmul"}),
    (replace(INT4, zeros=True), {"hopper", "matmul"}),
    (replace(INT4, group=64), {"hopper", "matmul"}),
    (replace(INT4, group=2560), {"hopper", "matmul"}),
    (replace(FP8, group=128, rows=128), {"hopper", "matmul"}),
    (Packed("int8", 8, 2560, 2560), {"hopper", "matmul"}),
], ids=name_of)  # fmt: skip
def test_other_schemes_are_supported_by_fewer_kernels(packed, kernels):
    assert supporting(DENSE._replace(k=packed.k, weight_type=packed), 1) == kernels


@pytest.mark.parametrize("epilogue", NAMES.values())
def test_outputs_of_an_epilogue_are_the_tensors_that_it_writes(epilogue):
    """The sums of squares are an input of the norm and an output of the residual stream."""
    args = Product(epilogue, dense(32, 64), 2).arguments("out", "normed", "sumsq")
    next_norm = {"epilogue.normed": "normed", "epilogue.sumsq": "sumsq"} if epilogue == "residual" else {}
    for kernel in LINEAR_KERNELS:
        assert kernel.op.output_tensors(args) == {"out": "out"} | (next_norm if kernel.name != "torch" else {})


@pytest.mark.parametrize("config", [MatvecConfig(2, 1), MatmulConfig(), TilesConfig(), WideConfig()])
@pytest.mark.parametrize("epilogue", ["gated_bias", "residual_bias"])
def test_epilogues_without_a_bias_reject_one(epilogue, config):
    with pytest.raises(ValueError):
        Product(epilogue, dense(32, 64), 1).enqueue(config)
