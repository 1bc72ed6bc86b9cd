"""The configs that engines choose on this GPU, against the reference."""

from functools import partial

import pytest
import torch
from linear_product import CUDA, Product, check_alike, dense, kernel_of, packed
from test_matmul_hopper import EPILOGUES
from util import covering

from tridecode.kernels.device import device_of
from tridecode.kernels.linear.project import Case

rules = pytest.importorskip("tridecode.tuning.rules")
invariance = pytest.importorskip("tridecode.tuning.invariance")
tables = pytest.importorskip("tridecode.tuning.tables")
pytestmark = pytest.mark.skipif(not CUDA, reason="the tested launch configs are for a GPU")

SIZES = {  # Outputs and columns of the linear of each role. An LM head has more outputs.
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (3072, 1024), (1024, 3072), (151936, 1024)),
    "qwen3-4b": ((6144, 2560), (2560, 4096), (9728, 2560), (2560, 9728), (19456, 2560)),
    "llama-3.2-3b": ((5120, 3072), (3072, 3072), (8192, 3072), (3072, 8192), (28672, 3072)),
    "llama-3.1-8b": ((6144, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 4096)),
}
SCHEMES = {"int4": "int4_groups_of_128", "fp8": "e4m3"}
KINDS = "bfloat16", *SCHEMES


def weight(model, kind, role):
    """Return the case of a linear of a model, its weight, and its epilogue."""
    n, k = dict(zip(EPILOGUES, SIZES[model]))[role]
    n *= 2 if role == "gate_up" else 1
    linear = packed(SCHEMES[kind], n, k) if kind in SCHEMES else dense(n, k)
    return Case(n, k, linear.packed or torch.bfloat16, EPILOGUES[role]), linear, EPILOGUES[role]


@covering(
    2, role=EPILOGUES.keys(), passes=[(rows, kind) for rows in (1, 8, 16, 32, 64) for kind in KINDS], model=SIZES.keys()
)
def test_configs_in_use_match_the_reference(role, passes, model):
    rows, kind = passes
    case, linear, epilogue = weight(model, kind, role)
    device = device_of(torch.device("cuda"))
    choice = rules.choose(case, rows, device, tables.package_tables(device))
    assert kernel_of(choice.config) is choice.kernel
    Product(epilogue, linear, max(rows - 1, 1), partials=20).check(choice.config)


@covering(2, role=EPILOGUES.keys(), kind=KINDS)
def test_a_row_has_the_same_bits_among_any_number_of_rows(role, kind):
    """The launch configs are the ones that batch-invariant mode uses."""
    case, linear, epilogue = weight("qwen3-4b", kind, role)
    device = device_of(torch.device("cuda"))
    choices = invariance.invariant_choices(case, (16, 32, 64), device, tables.package_tables(device))
    for_rows = partial(Product, epilogue, linear, stopped=())
    check_alike(for_rows(64), for_rows, {rows: choice.config for rows, choice in choices.items()})
