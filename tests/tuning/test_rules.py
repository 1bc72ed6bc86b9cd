"""The choice of kernels and launch configs: supported cases, limits of the GPU, and one order of sums."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from gpus import GPUS
from models_to_tune import BF16, H200, MODELS, WEIGHT_TYPES, attention_of, case, cases_of, device

from tridecode.kernels.device import Device
from tridecode.kernels.linear.matmul import MatmulConfig
from tridecode.kernels.linear.matmul_hopper import COLUMNS_OF, HopperConfig
from tridecode.kernels.linear.matmul_ring import RingConfig
from tridecode.kernels.linear.matmul_tiles import TilesConfig
from tridecode.kernels.linear.matmul_wide import WideConfig
from tridecode.kernels.linear.registry import kernel_named
from tridecode.kernels.linear.split_sums import MAX_SPLIT
from tridecode.tuning.configs import is_head
from tridecode.tuning.invariance import invariant_choices, order_of_sums
from tridecode.tuning.resolve import resolve_configs
from tridecode.tuning.rules import choose
from tridecode.tuning.tables import Table, entry_of, linear_key, package_tables

ROWS = (1, 4, 8, 16, 32, 64)
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
MEASURED = package_tables(H200)


def choices(model: str, weight_type: str, rows: int, gpu: Device = H200, tables=MEASURED):
    """Map the roles of a model's linears to their choices."""
    return {role: choose(part, rows, gpu, tables) for role, part in cases_of(model, weight_type).items()}


def kernels(*args, **options) -> dict[str, str]:
    """Map the roles of a model's linears to the names of their kernels."""
    return {role: choice.kernel.name for role, choice in choices(*args, **options).items()}


def check_fits(part, rows: int, config, gpu: Device) -> None:
    """Check that the programs fit the registers and shared memory of a multiprocessor, and may share columns."""
    warps = config.num_warps + 4 * getattr(config, "producer", 0)
    assert 32 * warps * (getattr(config, "registers", 0) or 32) <= 65536
    split = getattr(config, "split", 1)
    assert 1 <= split <= MAX_SPLIT
    assert split == 1 or not is_head(part)
    high = max(rows, 16)
    if isinstance(config, HopperConfig):
        assert split == 1 or (part.epilogue != "gated" and not config.programs)
        columns = COLUMNS_OF[part.packed.number_type] if part.packed else 64
        assert config.block_k % columns == 0 and split * config.block_k <= part.k
        tiles = config.stages * config.block_n * 128 * (config.block_k // columns)
        assert tiles + 2 * config.x_stages * config.block_k * high + 4096 < gpu.shared_memory
    if isinstance(config, TilesConfig):
        weights = config.block_n * (2 if part.epilogue == "gated" else 1)
        size = 2 * config.stages * config.block_k * (max(config.block_m, high) + weights)
        assert size < (gpu.shared_memory or 101376)
    if isinstance(config, RingConfig):
        assert 1024 * config.num_warps * config.tiles * config.stages + 2 * part.k * config.x_shared < gpu.shared_memory


@EVERY_MODEL
@pytest.mark.parametrize("name", ["cpu", *GPUS])
def test_choices_are_supported_and_fit_the_gpu(model, name):
    gpu = GPUS.get(name, Device())
    every = [(role, part) for weight_type in WEIGHT_TYPES for role, part in cases_of(model, weight_type).items()]
    for rows, (role, part) in product(ROWS, every):
        choice = choose(part, rows, gpu, package_tables(gpu))
        assert choice.kernel.supports(part, rows, gpu), (role, rows)
        check_fits(part, rows, choice.config, gpu)
        table = Table({linear_key(part, rows): entry_of(choice.config)}, {})
        assert table.linear(part, rows, gpu) == replace(choice, source="table"), "a table cannot represent the choice"


def test_dense_weights_have_kernels_by_the_number_of_rows():
    for model in MODELS:
        assert set(kernels(model, "bfloat16", 1).values()) == {"matvec"}
        assert set(kernels(model, "bfloat16", 8).values()) == {"matmul"}
    assert kernels("qwen3-4b", "bfloat16", 16) == {
        "qkv": "matmul", "o_proj": "wide", "gate_up": "wide", "down": "wide", "lm_head": "tiles"
    }  # fmt: skip
    for model in ("qwen3-4b", "llama-3.1-8b", "qwen3-8b"):
        assert set(kernels(model, "bfloat16", 32).values()) == {"hopper"}
        for capability in (80, 120):
            assert set(kernels(model, "bfloat16", 32, device(capability), []).values()) == {"tiles"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_multiplied_row_by_row_without_register_limits(dtype):
    parts = [part._replace(weight_type=dtype) for part in cases_of("qwen3-4b").values()]
    configs_by_rows = resolve_configs(parts, [], dtype, H200)
    assert sorted(configs_by_rows) == [1, 2]
    for part in parts:
        one, two = (configs_by_rows[rows].linears[part] for rows in (1, 2))
        known = choose(part._replace(weight_type=BF16), 1, H200, MEASURED)
        assert one == two == replace(known, config=replace(known.config, registers=0))


def test_torch_multiplies_many_rows():
    for weight_type in ("bfloat16", "float16", "int4"):
        assert choose(case(6144, 2560, weight_type, "plain"), 2048, H200, MEASURED).kernel.name == "torch"


# Packed weights and more than eight rows


@pytest.mark.parametrize("weight_type", ["int4", "int8", "fp8"])
def test_more_than_eight_rows_of_packed_weights_are_multiplied_by_hopper(weight_type):
    for rows in (16, 32, 64):
        assert set(kernels("qwen3-4b", weight_type, rows).values()) == {"hopper"}
        assert set(kernels("qwen3-0.6b", weight_type, rows).values()) == ({"matmul"} if rows == 16 else {"hopper"})
        for capability in (80, 89, 100, 120):
            gpu = device(capability)
            assert set(kernels("qwen3-4b", weight_type, rows, gpu, []).values()) == {"matmul"}, capability
    assert set(kernels("qwen3-4b", weight_type, 8).values()) == {"matmul"}


def test_each_linear_is_chosen_for_its_own_format():
    """The layers of a model may have different schemes."""
    mixed = [case(6144, 2560, weight_type, "normed") for weight_type in WEIGHT_TYPES]
    configs_by_rows = resolve_configs(mixed, [], BF16, H200)
    assert sorted(configs_by_rows) == [1, 8, 16, 32, 64], "the configs are for wrong numbers of rows"
    names = [configs_by_rows[1].linears[part].kernel.name for part in mixed]
    assert names == ["matvec", "ring", "matmul", "ring"]
    assert {choose(part, 1, H200, MEASURED).source for part in mixed} == {"table", "rule"}


@pytest.mark.parametrize("weight_type", ["int4", "fp8"])
def test_one_row_of_a_large_model_passes_through_the_ring(weight_type):
    chosen = kernels("qwen3-14b", weight_type, 1)
    assert {role for role, name in chosen.items() if name != "ring"} == {"lm_head"}


@EVERY_MODEL
def test_programs_that_share_columns_fill_the_gpu(model):
    for part in cases_of(model).values():
        config = choose(part, 32, device(90)).config
        if isinstance(config, HopperConfig) and config.split > 1:
            programs = -(-part.n // config.block_n) * config.split
            assert programs >= 96 and part.k >= 8 * config.block_k * config.split


@EVERY_MODEL
def test_programs_of_64_rows_that_share_columns_run_at_the_same_time(model):
    for part in cases_of(model).values():
        config = choose(part, 64, H200).config
        if isinstance(config, HopperConfig) and part.epilogue == "residual":
            programs = -(-part.n // config.block_n) * config.split
            nbytes = 2 * config.block_k * (config.stages * config.block_n + config.x_stages * 64)
            assert config.x_stages == config.stages
            assert 64 <= programs <= H200.multiprocessors * (H200.shared_memory_each // (nbytes + 2048))


@EVERY_MODEL
def test_few_programs_of_32_rows_do_not_share_multiprocessors(model):
    for part in cases_of(model).values():
        config = choose(part, 32, H200).config
        programs = -(-part.n // 64) * getattr(config, "split", 1)
        if isinstance(config, HopperConfig) and part.epilogue == "residual" and programs <= H200.multiprocessors:
            nbytes = 2 * config.block_k * (config.stages * config.block_n + config.x_stages * 32)
            assert H200.shared_memory_each // 2 < nbytes < H200.shared_memory - 2048


# LM heads


def test_lm_heads_are_detected_by_their_outputs():
    for model in MODELS:
        assert [role for role, part in cases_of(model).items() if is_head(part)] == ["lm_head"]
    assert not is_head(case(2**16, 2560, "bfloat16", "gated"))


@pytest.mark.parametrize("hidden, inter, vocab", [(96, 160, 331), (256, 768, 4096)])
def test_small_models_share_no_columns(hidden, inter, vocab):
    parts = [case(2 * inter, hidden, "bfloat16", "gated"), case(vocab, hidden, "bfloat16", "normed")]
    for invariant in (False, True):
        for configs in resolve_configs(parts, [], BF16, H200, invariant).values():
            assert all(getattr(choice.config, "split", 1) == 1 for choice in configs.linears.values())


# The device


def test_rules_read_the_multiprocessors():
    gpu, heads = device(90, 78), cases_of("qwen3-4b")
    assert choose(heads["lm_head"], 32, gpu).config.programs == 78
    assert choose(case(4096, 14336, "bfloat16", "residual"), 1, gpu).config.programs == 78
    assert choose(cases_of("qwen3-4b", "fp8")["lm_head"], 1, gpu).config.programs == 2 * 78
    down = cases_of("qwen3-4b", "int4")["down"]
    assert choose(down, 32, device(90, 40)).config.split < choose(down, 32, device(90)).config.split
    less = device(90)._replace(shared_memory_each=102400)
    assert choose(down, 32, less).config.split < choose(down, 32, device(90)).config.split


# Batch-invariant mode


@EVERY_MODEL
@pytest.mark.parametrize("weight_type", WEIGHT_TYPES)
@pytest.mark.parametrize("capability", [0, 80, 90, 120])
def test_batch_invariant_choices_add_in_one_order(model, weight_type, capability):
    gpu = H200 if capability == 90 else device(capability)
    parts, attention = cases_of(model, weight_type), attention_of(model)
    configs_by_rows = resolve_configs(parts.values(), [attention], BF16, gpu, batch_invariant=True)
    assert sorted(configs_by_rows) == [16, 32, 64]
    assert len({configs.attention[attention] for configs in configs_by_rows.values()}) == 1
    for role, part in parts.items():
        chosen = [configs.linears[part] for configs in configs_by_rows.values()]
        assert len({order_of_sums(part, choice) for choice in chosen}) == 1, role
        for choice, rows in zip(chosen, configs_by_rows):
            assert choice.kernel.supports(part, rows, gpu)
            check_fits(part, rows, choice.config, gpu)
            assert getattr(choice.config, "block_m", 16) >= 16, (
                "a tile of eight rows was chosen, which uses another instruction"
            )
        large = "float" not in weight_type or min(part.n, part.k) >= 2560
        expected = "hopper" if capability == 90 and large else "matmul" if part.packed else "wide"
        if part.packed and not kernel_named("hopper").supports(part, 64, gpu):
            expected = "matmul"
        assert {choice.kernel.name for choice in chosen} == {expected}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_batch_invariant_passes_of_other_dtypes_have_the_choices_of_one_row(dtype):
    parts, attention = cases_of("qwen3-0.6b", str(dtype)[6:]).values(), attention_of("qwen3-0.6b", dtype)
    configs_by_rows = resolve_configs(parts, [attention], dtype, H200, batch_invariant=True)
    assert configs_by_rows == {1: resolve_configs(parts, [attention], dtype, H200)[2]}


def test_orders_differ_if_the_sums_differ():
    part = cases_of("qwen3-4b")["down"]
    hopper, wide, matmul = map(kernel_named, ("hopper", "wide", "matmul"))

    def order(kernel, config, part=part):
        return order_of_sums(part, replace(choose(part, 8, H200), kernel=kernel, config=config))

    split = HopperConfig(64, 128, 4, 4, split=4)
    assert order(hopper, split) == order(hopper, HopperConfig(64, 64, 8, 2, split=4, num_warps=8, producer=1))
    assert order(hopper, split) != order(hopper, replace(split, split=3))
    assert order(hopper, split) != order(hopper, replace(split, block_n=128)), (
        "configs with different sums of squares have the same order"
    )
    four = cases_of("qwen3-4b", "int4")["qkv"]
    assert order(hopper, HopperConfig(64, 256), four) != order(hopper, HopperConfig(64, 512), four), "scales"
    gated = cases_of("qwen3-4b")["gate_up"]
    one = replace(split, split=1)
    assert order(hopper, one, gated) == order(hopper, replace(one, block_n=128), gated), (
        "configs without sums of squares have different orders"
    )
    assert order(wide, WideConfig(block_m=16)) == order(wide, WideConfig(block_m=32, ahead=2, registers=128))
    assert order(wide, WideConfig(block_m=16)) != order(wide, WideConfig())
    assert order(wide, WideConfig(block_m=16)) != order(wide, WideConfig(block_m=16, block_k=128))
    assert order(matmul, MatmulConfig(block_m=16)) == order(matmul, MatmulConfig(block_m=16, x_ahead=2, ahead=1))
    for other in (dict(num_warps=4), dict(programs=9), dict(block_m=8)):
        assert order(matmul, MatmulConfig(block_m=16), four) != order(
            matmul, MatmulConfig(**{"block_m": 16} | other), four
        )


def test_batch_invariant_choices_use_entries_of_one_order():
    part = cases_of("qwen3-4b")["down"]
    rule = {rows: choose(part, rows, H200, batch_invariant=True).config for rows in (16, 32, 64)}

    def chosen_with(**entries):
        table = Table({linear_key(part, int(rows[1:])): entry_of(config) for rows, config in entries.items()}, {})
        chosen = invariant_choices(part, (16, 32, 64), H200, [table])
        assert len({order_of_sums(part, choice) for choice in chosen.values()}) == 1
        return {rows: choice.config for rows, choice in chosen.items()}

    assert chosen_with() == rule
    most, fewer = HopperConfig(64, 128, 4, 2, split=4, num_warps=8), HopperConfig(64, 64, 8, 4, split=4)
    assert chosen_with(_64=most, _32=fewer) == {64: most, 32: fewer, 16: fewer}
    assert chosen_with(_64=most, _32=replace(fewer, split=2)) == {64: most, 32: most, 16: most}, (
        "an entry with another order of sums was chosen"
    )
    assert chosen_with(_64=TilesConfig(), _16=WideConfig()) == rule, (
        "entries of kernels with another order of sums were chosen"
    )
    assert chosen_with(_32=replace(fewer, split=2))[64] == replace(rule[64], split=2)


@pytest.mark.parametrize("epilogue", ["normed", "gated", "residual"])
def test_rows_that_tma_cannot_read_have_a_kernel_of_each_size(epilogue):
    part = case(1024, 2730, "bfloat16", epilogue)
    for rows in (1, 4, 8, 16, 32, 64):
        for batch_invariant in (False, True) if rows >= 16 else (False,):
            choice = choose(part, rows, H200, package_tables(H200), batch_invariant)
            assert choice.kernel.supports(part, rows, H200)
