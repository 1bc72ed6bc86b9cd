"""Batch-invariant mode: a request's log-probabilities have the same bits with and without other requests.

The cases follow SGLang's deterministic test: the same prompt in batches of any size, prompts of several lengths mixed,
and prompts with a common prefix, in 50 trials each on a GPU. The tests compare exactly the log-probabilities of every
sampled token and of the most likely tokens, which depend on all logits.
"""

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import BOTH, CUDA, H100, tiny_config, tiny_engine

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.load import empty_weights
from tridecode.checkpoint.quantization.quantize import rules
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.layout import Chunk
from tridecode.options import EngineOptions
from tridecode.plan.resolve import chunk_of
from tridecode.step.model import choose_configs, linear_cases
from tridecode.tuning.configs import is_head
from tridecode.tuning.invariance import order_of_sums

PAGE = 64 if CUDA else 16
CHUNK = 128 if CUDA else 64
SLOTS = 64 if CUDA else 8
CAPACITY = 640 if CUDA else 256
TRIALS = 50 if CUDA else 20
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, logprobs=5),
    "sampled": SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=11, logprobs=5),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7, seed=5, logprobs=5
    ),
    "plain": SamplingParams(temperature=1.0, seed=3),  # Without logprobs, the request runs in another kind of pass.
}


def engine_of(slots=SLOTS, quantized=None, family="qwen3", **build) -> Engine:
    """Return an engine in batch-invariant mode."""
    build |= {"slots": slots, "page": PAGE, "chunk_tokens": CHUNK, "batch_invariant": True}
    engine = tiny_engine(
        capacity=CAPACITY, max_position=CAPACITY, tie_word_embeddings=False, build=build,
        **(quantized or {}) | BOTH[family],
    )  # fmt: skip
    engine.threads = 1
    return engine


@pytest.fixture(scope="module")
def many(request):
    return engine_of(family=getattr(request, "param", "qwen3"))


@pytest.fixture(scope="module")
def single(request):
    """Return a function that runs a request as the only one of an engine, without a cached prefix."""
    engine = engine_of(1, family=getattr(request, "param", "qwen3"))

    @cache
    def single(ids, kind="greedy", tokens=8):
        return bits(engine.generate(ids, params_of(kind, tokens), reuse_prefix=False))

    return single


def params_of(kind: str, tokens: int = 8) -> SamplingParams:
    return replace(PARAMS[kind], max_tokens=tokens, ignore_eos=True)


def bits(result):
    assert result.finish_reason == "length"
    return result.token_ids, result.logprobs


@cache
def prompt_of(base: int, length: int) -> tuple[int, ...]:
    """Return one of a few texts, cut to a length, so that many have a common prefix."""
    return tuple((base * 97 + i * (13 + base)) % 300 for i in range(length))


def run(engine: Engine, submitted, steps) -> list:
    """Return the results of requests.

    Args:
        submitted: (prompt, kind, tokens) of each request.
        steps: number of passes after the submission of each request.
    """
    requests = []
    for (prompt, *rest), count in zip(submitted, steps):
        requests.append(engine.submit(prompt, params_of(*rest)))
        for _ in range(count):
            engine.step()
    results = [bits(request.result()) for request in requests]
    engine.scheduler.assert_consistent()
    return results


WITH_EXPERTS = pytest.mark.parametrize("many, single", [*zip(BOTH, BOTH)], indirect=True, ids=BOTH)


# ---- SGLang's three cases


def test_single(many, single):
    """Run the same prompt in each row, in passes of every size."""
    draw, prompt = random.Random(0), prompt_of(0, 40)
    for trial in range(TRIALS):
        count = draw.randint(1, SLOTS)
        many.scheduler.slots.cache.clear()
        results = run(many, [(prompt, "greedy", 8)] * count, [0] * count)
        assert set(results) == {single(prompt)}, (
            f"trial {trial}: results in a pass of {count} rows differ from those of the request alone"
        )


@WITH_EXPERTS
def test_mixed(many, single):
    """Run short and long prompts with all kinds of sampling, which start and end at different times."""
    draw = random.Random(1)
    for trial in range(TRIALS):
        submitted = [
            (prompt_of(draw.randint(0, 9), draw.choice([1, 2, 17, PAGE, PAGE + 1, CHUNK, CHUNK + 1, 200])), kind, 8)
            for kind in draw.choices(sorted(PARAMS), k=draw.randint(2, SLOTS // (1 if CUDA else 2)))
        ]
        results = run(many, submitted, [draw.randint(0, 3) for _ in submitted])
        assert results == [single(*each) for each in submitted], f"trial {trial}"


@WITH_EXPERTS
def test_prefix(many, single):
    """Run prompts with a common prefix of any length, which may be cached."""
    draw = random.Random(2)
    for trial in range(TRIALS):
        if draw.random() < 0.3:
            many.scheduler.slots.cache.clear()
        common = prompt_of(20 + draw.randint(0, 2), draw.choice([1, PAGE - 1, PAGE, 3 * PAGE, CHUNK + 5, 200]))
        submitted = [(common + prompt_of(draw.randint(0, 9), draw.randint(1, 40)), "sampled", 8) for _ in range(4)]
        results = run(many, submitted, [draw.choice([0, 0, 5]) for _ in submitted])
        assert results == [single(*each) for each in submitted], f"trial {trial}"


# ---- Other influences on a result


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64] if CUDA else [1, 2, 4, 8])
def test_every_captured_size_has_the_same_logits(many, rows):
    """Compare the logits of the last row at positions with one split and with many. All pages have equal contents."""
    page = torch.randn_like(many.model.kv.pool[0])
    for position in (0, 5, PAGE, CAPACITY - 20):
        results = []
        for count in (1, rows):
            many.model.kv.pool.copy_(page.expand_as(many.model.kv.pool))
            rewind(many, [position] * count, SamplingParams(temperature=0.0, seed=1), count)
            many.model.workspace.tokens.zero_()  # All rows have the same tokens.
            for _ in range(3):
                enqueue(many, SamplingParams(temperature=0.0, seed=1), count)
            many.synchronize()
            results.append(many.model.workspace.logits[count - 1].clone())
        assert torch.equal(*results), f"position {position}"


@pytest.mark.parametrize(
    "quantized",
    [
        dict(load_quantization=rules("int4", "fp8")),
        dict(load_quantization=rules("fp8", "fp8"), fp8_kv=True),
        dict(load_quantization=rules("int4", "fp8")) | BOTH["experts"],
    ],
    ids=["int4", "fp8", "int4 experts"],
)
def test_quantized_weights_and_kv(quantized):
    single, several = engine_of(1, quantized), engine_of(quantized=quantized)
    lengths = (1, 17, PAGE + 1, CHUNK + 1, 40, 3, 64, 9)
    submitted = [(prompt_of(base, length), "sampled", 6) for base, length in enumerate(lengths)]
    expected = [bits(single.generate(ids, params_of(*rest), reuse_prefix=False)) for ids, *rest in submitted]
    assert run(several, submitted, [1] * len(submitted)) == expected
    assert run(several, submitted[::-1], [0] * len(submitted)) == expected[::-1], (
        "the results changed when cached prefixes were reused"
    )


def test_preempted_request_continues_with_the_same_bits(single):
    """Two requests need more pages than there are. The younger one recomputes its sampled tokens, pass by pass."""
    engine = engine_of(3, pages=CAPACITY // PAGE + 1)
    for kind in ("greedy", "penalties") if CUDA else ("penalties",):
        submitted = [(prompt_of(base, PAGE + 1), kind, CAPACITY // 2) for base in (0, 1)]
        assert run(engine, submitted, [0, 0]) == [single(*each) for each in submitted]
    assert engine.scheduler.preemptions


def test_a_score_has_the_same_bits(many):
    ids = prompt_of(3, 40)
    expected = many.score(ids)
    request = many.submit(prompt_of(0, 70), params_of("sampled", 60))
    next(pieces := iter(request))
    assert torch.equal(many.score(ids), expected)
    assert len(list(pieces)) == 60


def test_only_whole_pages_of_prompt_passes_are_reused(many, single):
    many.scheduler.slots.cache.clear()
    text = prompt_of(4, PAGE + 5)
    answer = many.generate(text, params_of("greedy", PAGE + 8)).token_ids
    result = many.generate(text + answer + (7,), params_of("greedy"))
    assert result.usage.reused_tokens == PAGE, (
        f"{result.usage.reused_tokens} tokens were reused, but the prompt pass wrote one whole page of {PAGE}"
    )
    assert bits(result) == single(text + answer + (7,))
    assert many.generate(prompt_of(4, PAGE), params_of("greedy")).usage.reused_tokens == 0, (
        "a page was reused that contains the last token of the prompt"
    )


def test_position_always_has_the_same_row(monkeypatch):
    """The row is `position % CHUNK`, because a pass reads one prompt and ends at a multiple of CHUNK."""
    engine, log = engine_of(4), []
    read = engine.prompts.read
    monkeypatch.setattr(engine.prompts, "read", lambda *args: log.append(args) or read(*args))
    long = prompt_of(0, CHUNK + PAGE + 3)
    run(engine, [(long, "greedy", 20), (long[: PAGE + 2], "greedy", 20)], [4, 0])
    engine.generate(long[: CHUNK + PAGE + 2], params_of("greedy"))
    assert [args[:3] for args in log] == [
        ([Chunk(0, 0, CHUNK, 0)], CHUNK, 0),
        ([Chunk(0, 0, PAGE + 2, CHUNK)], PAGE + 2, 0),
        ([Chunk(1, PAGE % CHUNK, 1, PAGE)], 1, 0),
        ([Chunk(0, PAGE, 1, CHUNK + PAGE)], 1, 0),
    ]


@settings(max_examples=60 if CUDA else 30, deadline=None)
@given(
    submitted=st.lists(
        st.tuples(
            st.integers(0, 2), st.sampled_from([1, 5, PAGE, PAGE + 1, 70, 150]), st.sampled_from(sorted(PARAMS)),
            st.sampled_from([1, 8, 30]), st.integers(0, 9),
        ),
        min_size=1, max_size=10,
    ),
)  # fmt: skip
def test_any_schedule_of_equal_prefixes_in_few_pages(tight, single, submitted):
    prompts = [(prompt_of(base, length), kind, tokens) for base, length, kind, tokens, _ in submitted]
    assert run(tight, prompts, [steps for *_, steps in submitted]) == [single(*each) for each in prompts]


@pytest.fixture(scope="module")
def tight():
    return engine_of(3, pages=CAPACITY // PAGE + 2)


# ---- Errors


def test_default_chunks_are_small():
    assert EngineOptions().chunk == 2048 and EngineOptions(batch_invariant=True).chunk == 256
    options = [EngineOptions(chunk_tokens=512, batch_invariant=True, slots=slots) for slots in (1, 9)]
    assert [chunk_of(each, 100, 64) for each in options] == [128, 128]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden, inter", [(96, 160), (2048, 8192)])
def test_choices_add_the_columns_in_one_order_for_all_rows(dtype, hidden, inter):
    """The fields that decide the order of sums are equal for all rows. The number of tiles in flight may differ."""
    spec = tiny_config(hidden_size=hidden, intermediate_size=inter)
    weights = empty_weights(spec, "meta", dtype)
    results = choose_configs(spec, weights, H100, batch_invariant=True).values()
    cases = linear_cases(spec, weights)
    assert list(cases) == ["qkv", "o_proj", "gate_up", "down", "lm_head"]
    for name, case in cases.items():
        assert len({order_of_sums(case, configs.linears[case]) for configs in results}) == 1, name
    assert len({config for configs in results for config in configs.attention.values()}) == 1
    room = max(case.n for case in cases.values() if not is_head(case))  # See make_workspace.
    for case in cases.values():
        assert case.n <= room or all(getattr(configs.linears[case].config, "split", 1) == 1 for configs in results)
