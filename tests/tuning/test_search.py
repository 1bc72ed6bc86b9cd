"""The search over the choices of a pass, and its candidates."""

from dataclasses import dataclass, replace

import pytest
import torch
from gpus import GPUS
from models_to_tune import BF16, H200, MODELS, attention_of, case, cases_of

from tridecode.errors import DeviceError
from tridecode.kernels.device import Device
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import HopperConfig
from tridecode.kernels.linear.matmul_ring import RingConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.tuning.candidates import candidates, linear_candidates, matvec_candidates, parts_of
from tridecode.tuning.configs import PassConfigs, is_head
from tridecode.tuning.resolve import resolve_configs
from tridecode.tuning.search import MARGIN, config_of, search, with_config
from tridecode.tuning.tables import Table, attention_key, entry_of, linear_key


@dataclass(frozen=True)
class Part:
    n: int = 1
    w: int = 1
    other: str = "kept"


def step(a: Part = Part(), b: Part = Part()) -> PassConfigs:
    """Return the choices of a pass with two parts."""
    return PassConfigs({}, {"a": a, "b": b})


def numbers(configs: PassConfigs) -> tuple[int, ...]:
    return tuple(getattr(configs.attention[part], name) for part in "ab" for name in "nw")


CANDIDATES = [(part, [{"n": n, "w": w} for n in (1, 2, 4) for w in (1, 2, 4)]) for part in "ab"]
BEST = step(Part(4, 2), Part(2, 4))


def distance(configs: PassConfigs) -> float:
    """Return the seconds of a pass, which are lowest at BEST."""
    return 1 + sum(abs(one - other) for one, other in zip(numbers(configs), numbers(BEST)))


def run(start=None, tried=CANDIDATES, measure=distance, **options):
    """Run a search whose clock does not advance."""
    return search(start or step(), tried, measure, **{"deadline": 1, "clock": lambda: 0} | options)


def test_search_finds_the_best_and_ends_after_an_unchanged_round():
    timed = []
    state = run(measure=lambda configs: timed.append(numbers(configs)) or distance(configs))
    assert state.configs == BEST and state.seconds == 1 and state.finished
    assert len(timed) == len(set(timed)) == state.tried + 1, "a pass was timed twice"


def test_parts_that_depend_on_each_other_need_a_second_round():
    # a = 4 is faster only if b = 4.
    seconds = {(1, 1): 9, (1, 4): 8, (4, 4): 1, (4, 1): 10}
    tried = [(part, [{"n": 1}, {"n": 4}]) for part in "ab"]
    state = run(tried=tried, measure=lambda configs: seconds[numbers(configs)[::2]])
    assert (numbers(state.configs)[::2], state.seconds) == ((4, 4), 1)


def test_search_stops_at_its_deadline():
    now, timed = iter(range(100)), []
    state = run(measure=lambda c: timed.append(distance(c)) or distance(c), deadline=5, clock=lambda: next(now))
    assert state.tried == 5 and len(timed) == 6 and not state.finished
    assert state.seconds == min(timed) and distance(state.configs) == state.seconds


def test_configs_that_do_not_run_are_skipped():
    def measure(configs):
        return None if numbers(configs)[0] == 4 else distance(configs)

    state = run(measure=measure)
    assert state.configs == step(Part(2, 2), Part(2, 4)) and state.finished
    assert state.skipped >= 3
    with pytest.raises(DeviceError):
        run(step(Part(4)), measure=measure)


def test_gains_within_the_noise_change_nothing():
    state = run(measure=lambda configs: 1 if configs == step() else 1 - MARGIN / 2)
    assert state.configs == step() and state.tried == 16


def test_candidates_are_compiled_in_groups_before_they_are_timed():
    compiled, timed = [], []

    def measure(configs):
        assert not timed or configs in compiled[-1], "the search timed a config that was not compiled in the last group"
        timed.append(configs)
        return distance(configs)

    run(measure=measure, prepare=compiled.append, at_once=5)
    assert [configs for several in compiled for configs in several] == timed[1:]
    assert [len(several) for several in compiled[:4]] == [5, 3, 5, 3], "the groups have wrong sizes"


def test_config_selects_its_kernel():
    configs = current("qwen3-4b", "bfloat16", 16)
    part = cases_of("qwen3-4b")["qkv"]
    changed = with_config(configs, part, TilesConfig())
    assert changed.linears[part].kernel.name == "tiles" and config_of(changed, part) == TilesConfig()
    assert {other: choice for other, choice in changed.linears.items() if other != part} == {
        other: choice for other, choice in configs.linears.items() if other != part
    }


# Candidates


def current(model: str, kind: str, rows: int, gpu: Device = H200) -> PassConfigs:
    return resolve_configs(cases_of(model, kind).values(), [attention_of(model)], BF16, gpu)[rows]


def check_valid(part, config, rows: int, gpu: Device) -> None:
    """Check that a table may contain the config."""
    if part == attention_of("qwen3-4b"):
        assert Table({}, {attention_key(part, rows): entry_of(config)}).attention_config(part, rows, gpu) == config
    else:
        assert Table({linear_key(part, rows): entry_of(config)}, {}).linear(part, rows, gpu).config == config


@pytest.mark.parametrize("gpu", ["h100", "a100", "rtx-4090", "l4", "h100-pcie", "b200"])
@pytest.mark.parametrize("kind", ["bfloat16", "int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_candidates_are_valid_and_fit_the_gpu(kind, rows, gpu):
    gpu = GPUS[gpu]
    configs = current("qwen3-4b", kind, rows, gpu)
    state = candidates(configs, rows, gpu)
    assert {part for part, _ in state} == {*configs.linears, *configs.attention}
    for part, tried in state:
        new = [replace(config_of(configs, part), **v) if isinstance(v, dict) else v for v in tried]
        assert len(new) > 1 and len(set(new)) == len(new)
        for config in new:
            check_valid(part, config, rows, gpu)
            if isinstance(config, TilesConfig):
                weights = config.block_n * (2 if part.epilogue == "gated" else 1)
                assert 2 * config.stages * config.block_k * (max(config.block_m, rows) + weights) < gpu.shared_memory
            if isinstance(config, WideConfig | HopperConfig):
                assert not is_head(part) or config.split == 1, (
                    "an LM head was split, but the scratch has no room for its sums"
                )
            if isinstance(config, RingConfig):
                assert 1024 * config.num_warps * config.tiles * config.stages < gpu.shared_memory


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
def test_several_rows_of_dense_weights_are_tried_with_several_kernels(rows):
    part = cases_of("qwen3-4b")["o_proj"]
    (tried,) = linear_candidates(part, rows, MatmulConfig(), H200)
    expected = {MatmulConfig, TilesConfig, WideConfig} | ({HopperConfig} if rows > 16 else set())
    assert {type(config) for config in tried} == expected


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_packed_weights_are_tried_with_the_kernels_that_read_them(kind, rows):
    configs = current("qwen3-4b", kind, rows)
    for part, choice in configs.linears.items():
        (tried,) = linear_candidates(part, rows, choice.config, H200)
        kinds = {type(config) for config in tried}
        expected = {MatmulConfig} | ({HopperConfig} if rows > 8 else set())
        if rows == 1 and part.packed.number_type != "int8":
            expected |= {RingConfig}
        assert kinds == expected and len(tried) > 4


def test_the_tiles_of_one_row_are_limited_by_registers():
    part = case(2560, 9728, "bfloat16", "residual")
    tiles, programs, bounds = matvec_candidates(part, False, H200)
    sizes = {(tile["block_n"], tile["num_warps"]) for tile in tiles}
    assert {(1, 2), (2, 4), (4, 8), (8, 16)} <= sizes
    assert not {(1, 1), (8, 8), (1, 16)} & sizes, "a tile has too many or too few bytes per thread"
    assert {"block_n": 2, "num_warps": 4, "registers": 80 + 40} in tiles
    shared = matvec_candidates(part, True, H200)[0]
    assert all(tile["registers"] == 0 for tile in shared), (
        "a register limit was set for rows that share registers with the next rows"
    )
    assert {"programs": 132, "registers": 0} in programs and {"registers": 0} in bounds


def test_matvec_has_no_candidates_for_several_rows():
    part = case(512, 512, "float16", "normed")
    configs = resolve_configs([part], [], torch.float16, H200)
    assert {group[0] for group in candidates(configs[1], 1, H200)} == {part}
    assert candidates(configs[2], 2, H200) == []


@pytest.mark.parametrize("model", MODELS)
def test_large_parts_are_first_and_the_head_is_last(model):
    parts = parts_of(current(model, "bfloat16", 8))
    *linears, attention, head = parts
    assert is_head(head) and attention == attention_of(model)
    sizes = [part.n * part.k for part in linears]
    assert sizes == sorted(sizes, reverse=True) and linears[0].epilogue == "gated"
