"""Engines with fp8 K/V: accuracy, shared prefixes, pages, memory and refused options."""

from dataclasses import replace

import pytest
import torch
from checkpoints import write_tiny
from models import CUDA, EXPERTS, tiny_config, tiny_engine, use_h100
from util import relative_rms

from tridecode.checkpoint.load import empty_weights
from tridecode.engine import Engine
from tridecode.errors import ParameterError
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan import memory
from tridecode.plan.device import quantized, resolve_dtype
from tridecode.plan.memory import plan_memory
from tridecode.sampling import SamplingParams
from tridecode.state.kv import PAGE, kv_bytes_per_token, make_kv_cache
from tridecode.step.model import make_model

IDS = [i * 37 % 331 for i in range(150 if CUDA else 80)]
# Rows use every expert. Otherwise rounding makes some rows choose others, which changes their logits more.
ALL_EXPERTS = dict(experts=EXPERTS | dict(top_k=EXPERTS["experts"]))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "slots, family",
    [(1, {}), (4, dict(sliding_window=24, layer_types=("sliding_attention",) * 2)), (4, ALL_EXPERTS)],
)
def test_scores_are_close_to_unquantized_kv(family, slots):
    build = {"slots": slots}
    exact = tiny_engine(build=build, **family).score(IDS)
    found = tiny_engine(build=build, fp8_kv=True, **family).score(IDS)
    assert 0 < relative_rms(found, exact) < (0.08 if CUDA else 0.05)


def test_prompt_pass_and_decode_passes_agree():
    """Read K/V that a prompt pass wrote, and K/V written token by token."""
    engine = tiny_engine(fp8_kv=True)
    by_steps = engine.score(IDS)[-1]
    engine.generate(IDS, replace(GREEDY, max_tokens=1))
    assert relative_rms(engine.model.workspace.logits[0], by_steps) < (0.05 if CUDA else 2e-3)


def test_requests_that_share_pages_return_the_same_tokens():
    alone = tiny_engine(fp8_kv=True)
    common = len(IDS) // 64 * 64
    prompts = [IDS[: common + 2] + [i, i + 1] for i in range(4)]
    expected = [alone.generate(prompt, GREEDY, reuse_prefix=False).token_ids for prompt in prompts]
    several = tiny_engine(fp8_kv=True, build={"slots": 4, "page": 16 if not CUDA else PAGE})
    first = several.generate(prompts[0], GREEDY)
    results = [several.generate(prompt, GREEDY) for prompt in prompts]
    assert all(result.usage.reused_tokens >= common for result in results) and not first.usage.reused_tokens
    if not CUDA:  # GPU kernels add in another order for another number of rows.
        assert [result.token_ids for result in results] == expected
    several.scheduler.assert_consistent()


def test_cache_returns_and_fills_dequantized_kv():
    engine = tiny_engine(fp8_kv=True)
    engine.score(IDS)
    held = engine.model.kv.gather(0, len(IDS))
    assert held.shape == (2, 2, 2, len(IDS), 64) and held.any(-1).all() and not held.isnan().any()
    engine.model.kv.fill()
    assert engine.model.kv.gather(0, 9).abs().max() < 2


@pytest.mark.parametrize("preset", ["qwen3-4b", "qwen3-0.6b", "llama-3.1-8b", "llama-3.2-1b"])
def test_fp8_nearly_doubles_the_positions(preset):
    configs = PRESETS[preset], replace(PRESETS[preset], fp8_kv=True)
    whole, fp8 = (kv_bytes_per_token(config, torch.bfloat16) for config in configs)
    assert 1.9 < whole / fp8 < 2
    pool = make_kv_cache(configs[1], 640, "meta", torch.bfloat16, page=PAGE).pool
    assert pool.nbytes == 640 * fp8, "the plan counts other bytes than the pool has"
    plans = [plan_memory(config, torch.bfloat16, torch.device("cpu")) for config in configs]
    assert plans[1].kv_per_token == fp8 and plans[1].per_token < plans[0].per_token


@pytest.mark.parametrize(
    "options",
    [{}, {"torch_prompt_attention": True}, {"batch_invariant": True}],
    ids=["triton", "torch", "batch-invariant"],
)
def test_plan_counts_expanded_kv(monkeypatch, options):
    """Hopper's prompt attention expands one layer's K/V to bf16.

    Torch's attention gathers the K/V of a request instead, and batch-invariant prompt attention reads fp8.
    """
    use_h100(monkeypatch)
    monkeypatch.setattr(memory, "free_memory", lambda device: 0)
    config, slots = replace(PRESETS["qwen3-4b"], fp8_kv=True), 4
    weights = empty_weights(config, "meta", torch.bfloat16)
    model = make_model(config, weights, 640, slots, page=PAGE, **options)
    plan = plan_memory(
        config, torch.bfloat16, torch.device("cuda"), slots, **{"torch_prompt_attention": False} | options
    )
    assert model.kv.pool.nbytes + model.prompt.kv.nbytes == slots * 640 * plan.kv_per_token
    assert (model.prompt.kv.nbytes > 0) is not any(options.values())


@pytest.mark.parametrize("slots", [1, 3])
def test_load_with_fp8_kv(slots, tmp_path):
    path = write_tiny(tmp_path, "qwen3")
    engine = Engine.load(path, device="cpu", kv_dtype="fp8", slots=slots)
    assert engine.model.kv.fp8 and engine.config.fp8_kv
    assert len(engine.generate([3, 40, 5], GREEDY).token_ids) == 12
    assert not Engine.load(path, device="cpu").model.kv.fp8


def test_fp8_kv_needs_bfloat16_on_a_gpu():
    config = quantized(EngineOptions(kv_dtype="fp8"), tiny_config())
    with pytest.raises(ParameterError, match="dtype must be bfloat16 on a GPU with kv_dtype fp8, got float16"):
        resolve_dtype("float16", config, torch.device("cuda", 0))
