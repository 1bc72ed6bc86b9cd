"""Engine: streams, limits, prefix reuse, seeds, early ends. Runs on the backend that this machine has."""

import itertools

import pytest
import torch
from models import CUDA, tiny_engine

from tridecode import SamplingParams
from tridecode.errors import GenerationError, ParameterError, PromptError
from tridecode.prefill import prefill
from tridecode.text import StopStrings

PROMPT = [5, 17, 300, 42, 8, 8, 99]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=12)


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


def test_stream_yields_each_token_then_the_summary(engine):
    *pieces, last = engine.stream(PROMPT, GREEDY, reuse_prefix=False)
    assert len(pieces) == 12 and all(p.finish_reason is None for p in pieces)
    assert last.token_id is None and last.finish_reason == "length"
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.reused_tokens) == (7, 12, 0)
    assert 0 < last.timings.ttft < 60 and last.timings.tokens_per_second > 0
    assert tuple(p.token_id for p in pieces) == engine.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_same_seed_and_history_give_the_same_tokens(engine, params):
    first = engine.generate(PROMPT, params, reuse_prefix=False)
    engine.generate([1, 2, 3], params)
    assert engine.generate(PROMPT, params, reuse_prefix=False).token_ids == first.token_ids


def test_seeds_differ_and_are_reported(engine):
    free = SamplingParams(temperature=1.5, max_tokens=12)
    results = [engine.generate(PROMPT, free) for _ in range(4)]
    assert len({r.token_ids for r in results}) > 1
    again = engine.generate(PROMPT, SamplingParams(temperature=1.5, max_tokens=12, seed=results[0].seed))
    assert again.token_ids == results[0].token_ids


def test_the_longest_common_prefix_is_reused(engine):
    first = engine.generate(PROMPT, GREEDY, reuse_prefix=False)
    longer = PROMPT + list(first.token_ids[:5])
    reused = engine.generate(longer, GREEDY)
    assert reused.usage.reused_tokens == len(longer) - 1
    assert reused.token_ids[:7] == first.token_ids[5:]
    parted = engine.generate(PROMPT[:4] + [1, 2, 3], GREEDY)
    assert parted.usage.reused_tokens == 4
    assert parted.token_ids == engine.generate(PROMPT[:4] + [1, 2, 3], GREEDY, reuse_prefix=False).token_ids
    assert engine.generate(PROMPT, GREEDY, reuse_prefix=False).usage.reused_tokens == 0


def test_max_tokens_one_and_single_token_prompt(engine):
    assert len(engine.generate([3], SamplingParams(temperature=0.0, max_tokens=1)).token_ids) == 1


def test_generation_ends_at_the_context(engine):
    ids = [i % 331 for i in range(engine.capacity - 3)]
    result = engine.generate(ids, SamplingParams(temperature=0.0))
    assert result.finish_reason == "length"
    assert result.usage.prompt_tokens + result.usage.completion_tokens == engine.capacity + 1
    full = engine.generate([i % 331 for i in range(engine.capacity)], SamplingParams(temperature=0.0))
    assert full.usage.completion_tokens == 1


def test_stop_ids_end_the_generation(engine):
    free = engine.generate(PROMPT, GREEDY).token_ids
    stop = free[6]
    result = engine.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[stop]))
    assert result.finish_reason == "stop"
    assert result.token_ids == free[: free.index(stop) + 1]


def test_closing_a_stream_early_leaves_the_engine_consistent(engine):
    expected = engine.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids
    for taken in (1, 2, 5):
        stream = engine.stream(PROMPT, GREEDY)
        pieces = list(itertools.islice(stream, taken))
        stream.close()
        follow = engine.generate(PROMPT + [p.token_id for p in pieces], GREEDY)
        assert follow.usage.reused_tokens >= len(PROMPT)
        assert follow.token_ids[: 12 - taken] == expected[taken:]


def test_an_interrupt_in_prefill_leaves_the_engine_consistent(engine, monkeypatch):
    expected = engine.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids

    def interrupted(model, ids, start):
        prefill(model, ids[:2], start)
        raise KeyboardInterrupt

    monkeypatch.setattr("tridecode.engine.prefill", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([9] * 20, GREEDY)
    monkeypatch.undo()
    assert engine.generate(PROMPT, GREEDY).token_ids == expected


def test_a_newer_stream_ends_the_older_one(engine):
    old = engine.stream(PROMPT, GREEDY)
    next(old)
    engine.generate([1, 2], GREEDY)
    with pytest.raises(GenerationError, match="newer"):
        next(old)


def test_logprobs_are_those_of_the_raw_logits(engine):
    params = SamplingParams(temperature=0.5, top_k=5, seed=3, logprobs=4, max_tokens=6)
    result = engine.generate(PROMPT, params, reuse_prefix=False)
    exact = engine.score([*PROMPT, *result.token_ids]).double().log_softmax(-1).cpu()
    for i, (token, entry) in enumerate(zip(result.token_ids, result.logprobs)):
        row = exact[len(PROMPT) - 1 + i]
        assert abs(entry.logprob - row[token].item()) < 2e-2
        assert len(entry.top) == 4
        for got, best in zip(entry.top, row.topk(4).values.tolist()):
            assert abs(got[1] - best) < 2e-2 and abs(row[got[0]].item() - got[1]) < 2e-2


def test_penalties_and_bias_are_reset_between_requests(engine):
    plain = SamplingParams(temperature=0.7, seed=5, max_tokens=10)
    expected = engine.generate(PROMPT, plain, reuse_prefix=False).token_ids
    biased = SamplingParams(temperature=0.7, seed=5, max_tokens=10, logit_bias={7: 100.0}, presence_penalty=0.0)
    assert set(engine.generate(PROMPT, biased).token_ids) == {7}
    harsh = SamplingParams(temperature=0.7, seed=5, max_tokens=10, repetition_penalty=5.0)
    engine.generate(PROMPT, harsh)
    assert engine.generate(PROMPT, plain, reuse_prefix=False).token_ids == expected


def test_nan_logits_end_with_an_error_that_names_the_step():
    engine = tiny_engine(seed=3)
    engine.model.weights.final_norm[1] = float("nan")
    result = engine.generate(PROMPT, GREEDY)
    assert result.finish_reason == "error" and result.token_ids == ()
    assert "step 1" in result.error and "NaN or Inf" in result.error
    with pytest.raises(GenerationError, match="step 1"):
        engine.score(PROMPT)


@pytest.mark.parametrize(
    "prompt, message",
    [([], "empty"), ([331], "token id 331"), ([-1], "token id -1"), ([True], "token id True"), ([1] * 257, "257")],
    ids=["empty", "above", "negative", "bool", "too_long"],
)
def test_bad_prompts_are_refused_by_name(engine, prompt, message):
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt, GREEDY)


def test_ids_outside_the_vocabulary_are_refused(engine):
    for field in (dict(logit_bias={331: 1.0}), dict(stop_token_ids=[400])):
        with pytest.raises(ParameterError, match=next(iter(field))):
            engine.generate(PROMPT, SamplingParams(**field))
    with pytest.raises(ParameterError, match="at most 16"):
        engine.generate(PROMPT, SamplingParams(stop_token_ids=list(range(17))))


def test_chunks_of_any_size_prefill_the_same(engine):
    ids = [(i * 13) % 331 for i in range(70)]
    caches = []
    for chunk in (70, 64, 33, 1):
        prefill(engine.model, ids, 0, chunk=chunk)
        caches.append(torch.stack([t[..., :70, :].double() for t in (*engine.model.kv.k, *engine.model.kv.v)]))
    for other in caches[1:]:
        assert ((other - caches[0]).norm() / caches[0].norm()).item() < (1e-2 if CUDA else 1e-5)
    engine.generate([1], GREEDY, reuse_prefix=False)


@pytest.mark.skipif(not CUDA, reason="measures GPU memory")
@pytest.mark.parametrize("window", [None, 4096], ids=["full", "sliding"])
def test_prefill_memory_is_bounded_at_32000_tokens(window):
    layers = ("sliding_attention" if window else "full_attention",) * 2
    sizes = dict(hidden_size=2560, intermediate_size=9728, num_heads=32, num_kv_heads=8, head_dim=128)
    engine = tiny_engine(
        capacity=32256, max_position=32768, sliding_window=window, layer_types=layers, vocab_size=1000, **sizes
    )
    ids = [i % 1000 for i in range(32000)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = engine.generate(ids, GREEDY)
    assert result.finish_reason == "length" and len(result.token_ids) == 12
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    assert peak < 1.0, f"prefill took {peak:.2f} GiB beside the cache"


CUT = "abcabxabcd--stop here"


@pytest.mark.parametrize("stops", [["abcd"], ["stop", "x"], ["bxab", "abx"], ["zzz"], ["--stop here!", "here"]])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_stop_strings_do_not_depend_on_the_pieces(stops, size):
    filter = StopStrings(stops)
    shown = "".join(filter.push(CUT[i : i + size]) for i in range(0, len(CUT), size)) + filter.flush()
    ends = [(CUT.find(s) + len(s), CUT.find(s)) for s in stops if s in CUT]
    assert shown == (CUT[: min(ends)[1]] if ends else CUT)
    assert filter.hit == bool(ends)
