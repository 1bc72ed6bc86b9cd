"""The launch configs of expert_ring fit the shared memory and the registers of the GPU."""

import pytest
from models_to_tune import device

from tridecode.kernels.linear.packed import Packed
from tridecode.kernels.moe.arguments import ExpertSizes
from tridecode.kernels.moe.expert_packed import PackedTilesConfig
from tridecode.kernels.moe.expert_ring import RING_PAIRS, RingTilesConfig, activation_bytes
from tridecode.tuning.experts import experts_config

H100 = device(90)
SIZES = ExpertSizes(experts=128, top_k=8, intermediate=768)
FORMS = {"int4": (4, 128), "e4m3": (8, 128), "int4 a row": (4, 0), "e4m3 a row": (8, 0)}


def packed(form: str, k: int) -> Packed:
    bits, group = FORMS[form]
    return Packed(form.split()[0], bits, k, group or k)


def tiles(form: str, hidden: int, intermediate: int, rows: int) -> tuple:
    """Return the configs of gate_up and down."""
    sizes = SIZES._replace(intermediate=intermediate)
    return experts_config(sizes, rows, H100, False, packed=(packed(form, hidden), packed(form, intermediate))).tiles


def bytes_of(form: str, k: int, config: RingTilesConfig) -> int:
    """Return the shared memory of a program: stages, their barriers, and the activations."""
    return config.stages * (config.stage_bytes + 8) + activation_bytes(packed(form, k), config.num_warps)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [3, 8, 16, 32, 64])
def test_programs_fit_a_multiprocessor(form, rows):
    rings = 0
    for k in range(256, 12288 + 1, 256):
        for config in tiles(form, k, k, rows):
            assert isinstance(config, RingTilesConfig | PackedTilesConfig)
            assert config.tile == RING_PAIRS
            if isinstance(config, RingTilesConfig):
                rings += 1
                used, programs = bytes_of(form, k, config), config.programs // H100.multiprocessors
                assert used <= H100.shared_memory and programs * (used + 1024) <= H100.shared_memory_each, k
                assert programs * config.num_warps * 32 * (config.registers or 255) <= H100.registers, k
                assert config.stages >= 2, k
    assert rings, "no width uses the ring"


@pytest.mark.parametrize("form, columns", [("int4", (4, 3)), ("e4m3", (4, 3)), ("int4 a row", (4, 3))])
def test_stages_divide_the_rows(form, columns):
    assert tuple(config.columns for config in tiles(form, 2048, 768, 8)) == columns


def test_very_wide_rows_do_not_use_the_ring():
    assert isinstance(tiles("e4m3", 8192, 768, 16)[0], RingTilesConfig)
    gate_up, down = tiles("e4m3", 12288, 768, 16)
    assert isinstance(gate_up, PackedTilesConfig) and isinstance(down, RingTilesConfig)


@pytest.mark.parametrize(
    "used, width, warps", [(8, 768, 1), (9, 512, 1), (11, 512, 1), (9, 1024, 2), (16, 768, 4), (8, 2560, 4)]
)
def test_warps_of_dense_down_increase_with_the_width(used, width, warps):
    sizes = ExpertSizes(experts=128, top_k=used, intermediate=width)
    assert experts_config(sizes, 1, H100, False).rows[1].num_warps == warps


def test_very_wide_dense_experts_use_sorted_pairs():
    sizes = ExpertSizes(experts=128, top_k=16, intermediate=4096)
    assert experts_config(sizes, 1, H100, False).rows is None
