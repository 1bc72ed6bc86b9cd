"""Launch configs of attention: for decode passes, for passes that verify drafts, and for prompt passes."""

import pytest
import torch
from gpus import GPUS
from models_to_tune import BF16, H200, MODELS, attention_of, device

from tridecode.kernels.attention.arguments import MAX_SPLITS
from tridecode.kernels.attention.prompt_attention import PromptAttentionConfig
from tridecode.kernels.device import Device
from tridecode.tuning.attention import (
    attention_config,
    attention_rows_config,
    fp8_config,
    prompt_attention_config,
    prompt_tiles_fit,
    queries_config,
)
from tridecode.tuning.configs import AttentionCase
from tridecode.tuning.tables import VALUES, entry_of

CASES = [
    attention_of(model, dtype, fp8) for model in MODELS for dtype in (BF16, torch.float32) for fp8 in (False, True)
] + [AttentionCase(8, 1, 256, BF16), AttentionCase(32, 2, 128, BF16)]
FOUR = attention_of("qwen3-4b")


@pytest.mark.parametrize("name", ["cpu", *GPUS])
def test_configs_are_valid_for_every_model(name):
    gpu = GPUS.get(name, Device())
    for case in CASES:
        for rows in (1, 2, 4, 8, 16, 32, 64):
            for config in (attention_config(case, rows, gpu), attention_config(case, rows, gpu, True)):
                assert 1 <= config.splits <= MAX_SPLITS and getattr(config, "short_splits", 0) <= config.splits
                assert getattr(config, "programs", 1) >= 1
                if gpu.capability:
                    allowed = VALUES[type(config)]
                    fields = {name: value for name, value in entry_of(config).items() if name != "kernel"}
                    assert all(value in allowed[name] for name, value in fields.items()), (
                        "a field of the config has a value that is not allowed in a table of tuned configs"
                    )


def test_two_programs_of_many_rows_fit_the_shared_memory_of_a_multiprocessor():
    """Each program has two tiles of K and V, of 64 or of 32 positions."""
    for name, gpu in GPUS.items():
        for case in (FOUR, FOUR._replace(head_dim=96), attention_of("llama-3.2-1b"), attention_of("qwen2.5-0.5b")):
            config, width = attention_rows_config(case, 64, gpu), 64 if case.head_dim == 64 else 128
            assert 2 * 2 * 2 * 2 * config.block_t * width <= gpu.shared_memory_each - 2048, name
            assert config.block_t == (64 if width == 64 or gpu.shared_memory_each > 2**17 else 32)
            assert config.programs == 2 * gpu.multiprocessors and config.stages == 5


def test_programs_follow_the_multiprocessors():
    assert attention_config(FOUR, 64, device(90, 78)).programs == 156
    assert attention_config(FOUR, 8, device(90, 78)).short_splits == 2
    assert attention_config(FOUR._replace(fp8=True), 64, device(90, 78)).programs == 156


@pytest.mark.parametrize("head_dim, kv_heads, splits", [(256, 2, 64), (256, 4, 32), (128, 4, 32), (128, 8, 16)])
def test_splits_of_one_row_fill_the_multiprocessors(head_dim, kv_heads, splits):
    assert attention_config(FOUR._replace(head_dim=head_dim, kv_heads=kv_heads), 1, H200).splits == splits


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_batch_invariant_configs_are_the_same_for_all_rows(dtype):
    case = attention_of("qwen3-4b", dtype)
    found = {attention_config(case, rows, H200, batch_invariant=True) for rows in (1, 8, 16, 32, 64)}
    assert found == {attention_rows_config(case, 64, H200)}


@pytest.mark.parametrize("capability", [80, 89, 90])
def test_attention_to_fp8_keeps_the_next_positions_in_registers(capability):
    gpu = device(capability)
    for rows in (1, 64):
        config = attention_config(FOUR._replace(fp8=True), rows, gpu)
        assert config == fp8_config(attention_config(FOUR, rows, gpu), FOUR, gpu)
        assert config.block_t == config.num_warps * (32 if capability >= 90 else 16)
        assert config.converts == (capability >= 89), "config.converts does not agree with the instructions of the GPU"
        assert config.stages == 1 if rows > 1 else config.ahead == 1


@pytest.mark.parametrize("multiprocessors", [132, 114, 78, 7])
def test_programs_that_wait_for_each_other_all_run_at_once(multiprocessors):
    """Each multiprocessor runs at most one program.

    Otherwise programs would wait for others that cannot begin before they end.
    """
    alone, gpu = set(), device(90, multiprocessors)
    for model in MODELS:
        case = attention_of(model)
        for requests, queries in ((1, 2), (1, 8), (2, 2), (8, 2), (16, 2)):
            config = queries_config(case, requests, queries, gpu)
            programs = requests * case.kv_heads * config.short_splits
            assert config.queries == queries and (not config.together or programs <= multiprocessors)
            if requests == 1:
                alone.add(config.together)
    assert alone == ({True} if multiprocessors > 7 else {False, True})


def test_prompt_passes_use_the_hopper_kernel_on_one_capability():
    assert prompt_attention_config(device(90, 114), False).hopper == 114
    assert prompt_attention_config(device(90, 114), True).hopper == 0
    assert prompt_attention_config(device(100, 148), False).hopper == 0


def test_batch_invariant_prompt_passes_split_nothing():
    assert prompt_attention_config(H200, True) == PromptAttentionConfig(programs=264, splits=1)
    assert prompt_attention_config(H200, True, fp8=True) == PromptAttentionConfig(programs=264, splits=1, stages=4)
    assert prompt_attention_config(H200, False) == PromptAttentionConfig(
        programs=264, heads=16, separate_combine=True, dependent=True, hopper=132
    )
    assert prompt_attention_config(H200, True, head_dim=256) == PromptAttentionConfig(
        num_warps=8, stages=2, programs=132, splits=1
    )
    assert prompt_attention_config(H200, False, head_dim=256).hopper == 132
    assert prompt_attention_config(device(80, 108), False).programs == 216
    assert prompt_attention_config(device(0), False).programs > 0


def test_prompt_tiles_fit_hopper_only():
    assert prompt_tiles_fit(128, BF16, H200)
    assert prompt_tiles_fit(256, BF16, H200) and not prompt_tiles_fit(512, BF16, H200)
    assert not prompt_tiles_fit(128, torch.float32, H200)
    assert not prompt_tiles_fit(128, BF16, device(80)) and not prompt_tiles_fit(64, BF16, device(120))
