"""Engine: streams, limits, prefix reuse, seeds and early ends, on the backend of this machine."""

from array import array

import numpy as np
import pytest
import torch
from checkpoints import write_tiny
from models import CUDA, DEVICE, tiny_engine

from tridecode import Engine, SamplingParams
from tridecode.blocks.shared_expert import SharedExpert
from tridecode.checkpoint.hub import BUNDLED
from tridecode.checkpoint.load import load_config, load_weights
from tridecode.errors import GenerationError, ParameterError, PromptError, TooLong
from tridecode.kernels.attention.prompt_attention import attend_masked
from tridecode.serve.request import Request
from tridecode.step.prompt import prefill
from tridecode.text.stop_strings import StopStrings
from tridecode.text.tokenizer import Tokenizer

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


def test_generation_ends_at_the_context(engine):
    ids = [i % 331 for i in range(engine.capacity - 3)]
    result = engine.generate(ids, SamplingParams(temperature=0.0))
    assert result.finish_reason == "length"
    assert result.usage.prompt_tokens + result.usage.completion_tokens == engine.capacity + 1
    full = engine.generate([i % 331 for i in range(engine.capacity)], SamplingParams(temperature=0.0))
    assert full.usage.completion_tokens == 1


def test_interrupt_in_prefill_leaves_the_engine_consistent(engine, monkeypatch):
    expected = engine.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids

    def interrupted(chunks, tokens, *rest):
        prefill(engine.model, 0, 2, chunks[0].slot)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.prompts, "read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([9] * 20, GREEDY)
    monkeypatch.undo()
    assert engine.generate(PROMPT, GREEDY).token_ids == expected


def test_an_interrupt_as_a_stream_ends_mixes_nothing_into_the_next(monkeypatch):
    engine = tiny_engine()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    expected = engine.generate([7, 8, 9], params).token_ids
    scheduler = engine.scheduler
    # On a GPU, a step is in flight when its stream is closed. This setting has the same effect on a CPU.
    monkeypatch.setattr(scheduler, "lookahead", 1)

    def interrupted(slot):
        raise KeyboardInterrupt

    stream = engine.stream([1, 2, 3], params)
    next(stream)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(scheduler.slots, "release", interrupted)
        stream.close()
    assert engine.generate([7, 8, 9], params).token_ids == expected


def test_logprobs_describe_the_raw_logits(engine):
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
    harsh = SamplingParams(temperature=0.0, max_tokens=10, repetition_penalty=3.0, frequency_penalty=1.0)
    expected = engine.generate(PROMPT, harsh, reuse_prefix=False).token_ids
    engine.generate([1, 2, 3] * 20, harsh)
    assert engine.generate(PROMPT, harsh, reuse_prefix=False).token_ids == expected
    biased = SamplingParams(temperature=0.7, seed=5, max_tokens=10, logit_bias={7: 100.0})
    assert set(engine.generate(PROMPT, biased).token_ids) == {7}
    other = SamplingParams(temperature=0.7, seed=5, max_tokens=10, logit_bias={9: 0.1})
    assert 7 not in engine.generate(PROMPT, other).token_ids


def test_the_repetition_penalty_counts_the_prompt(engine):
    exact = engine.score(PROMPT)[-1].double().cpu()
    seen = torch.tensor(sorted(set(PROMPT)))
    exact[seen] = torch.where(exact[seen] > 0, exact[seen] / 50, exact[seen] * 50)
    best = int(engine.score(PROMPT)[-1].argmax())
    params = SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=50.0)
    assert engine.generate(PROMPT, params).token_ids == (int(exact.argmax()),)
    penalized = engine.generate([*PROMPT, best], SamplingParams(temperature=0.0, max_tokens=1, repetition_penalty=50.0))
    assert penalized.token_ids[0] not in (*PROMPT, best)


def test_ignore_eos_disables_the_stop_ids_of_the_model(engine):
    free = engine.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids
    stopping = tiny_engine(stop_ids=(free[4],))
    result = stopping.generate(PROMPT, GREEDY)
    assert (result.finish_reason, result.token_ids) == ("stop", free[: free.index(free[4]) + 1])
    continued = stopping.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    assert (continued.finish_reason, continued.token_ids) == ("length", free)


def test_a_stop_string_ends_the_generation():
    # The test compares texts of different batches, in bf16 on a GPU.
    engine = Engine.load(device=str(DEVICE), speculate="off")
    params = SamplingParams(temperature=0.0, max_tokens=40)
    messages = [{"role": "user", "content": "Hello"}]
    whole = engine.generate(messages, params)
    word = whole.text.split()[1]
    cut = engine.generate(messages, SamplingParams(temperature=0.0, max_tokens=40, stop=[word]))
    assert cut.finish_reason == "stop" and cut.text == whole.text[: whole.text.index(word)]
    assert len(cut.token_ids) < len(whole.token_ids)


def test_score_waits_for_an_open_stream_and_can_be_written_to(engine):
    expected = engine.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids
    stream = engine.stream(PROMPT, GREEDY, reuse_prefix=False)
    next(stream)
    logits = engine.score([11, 12, 13])
    logits[:, 5] = -1e9
    assert tuple(piece.token_id for piece in stream)[:-1] == expected[1:]
    assert engine.generate(PROMPT, GREEDY).token_ids == expected


def test_nan_logits_end_with_an_error_that_names_the_step():
    for dtype, value in ((None, "nan"), (torch.float16, "inf")):
        engine = tiny_engine(dtype=dtype, seed=3)
        engine.model.weights.final_norm[1] = float(value)
        result = engine.generate(PROMPT, GREEDY)
        assert result.finish_reason == "error" and result.token_ids == ()
        assert "step 1" in result.error and "NaN or Inf" in result.error
        assert ("float16 overflows" in result.error) == (dtype is torch.float16)
        with pytest.raises(GenerationError, match="step 1"):
            engine.score(PROMPT)


POISON = 301  # The embedding of this token is NaN.


@pytest.fixture(scope="module")
def poisoned():
    """Return an engine with a token whose embedding is NaN.

    A decode pass reads only earlier positions. A prompt pass also multiplies masked positions, and 0 * NaN is NaN.
    """
    engine = tiny_engine(seed=3, tie_word_embeddings=False)
    engine.model.weights.embed[POISON] = float("nan")
    return engine


@pytest.mark.parametrize("prompt", [[*PROMPT, POISON, 7, 8], [*PROMPT, POISON], [POISON]], ids=["middle", "end", "all"])
def test_failed_request_leaves_nothing_in_the_cache(poisoned, prompt):
    for before in ([1], PROMPT):  # The cache contains no part of the prompt, or a part of it.
        poisoned.generate(before, GREEDY, reuse_prefix=False)
        failed = poisoned.generate(prompt, GREEDY)
        assert failed.finish_reason == "error" and "the checkpoint may be damaged: download it again" in failed.error
        after = poisoned.generate(PROMPT, GREEDY)
        assert after.finish_reason == "length"
        assert after.usage.reused_tokens == 0 or prompt[0] == POISON, (
            "the failed request left pages in the cache, or removed pages that it had not used"
        )
        assert after.token_ids == poisoned.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids


@pytest.mark.parametrize("shared", [dict(shared=True), dict(apart=SharedExpert(hidden=96, intermediate=112))], ids=str)
def test_a_router_with_nan_ends_only_its_request(shared):
    """The router chooses the experts of a row whose logits are NaN too, and rows of other requests use them."""
    experts = dict(experts=6, top_k=2, intermediate=48) | shared
    engine = tiny_engine(seed=3, tie_word_embeddings=False, experts=experts, build=dict(slots=4))
    prompts = [PROMPT, [11, 12, 13] * 9, [200, 201, 202, 7]]
    expected = [engine.generate(prompt, GREEDY, reuse_prefix=False).token_ids for prompt in prompts]
    engine.model.weights.embed[POISON] = float("nan")
    others = {token for tokens in (*prompts, *expected[1:], expected[0][:1]) for token in tokens}
    # The first request fails in the decode pass after this token.
    steps, late = next((i, token) for i, token in enumerate(expected[0], 1) if token not in others)
    engine.model.weights.embed[late] = float("nan")
    prompts.insert(2, [*PROMPT[:3], POISON, 7])
    with engine:
        requests = [engine.submit(prompt, GREEDY, reuse_prefix=False) for prompt in prompts]
        results = [request.result() for request in requests]
    assert [result.finish_reason for result in results] == ["error", "length", "error", "length"]
    assert results[0].token_ids == expected[0][:steps] and f"step {steps + 1} " in results[0].error
    assert "NaN" in results[2].error and results[2].token_ids == ()
    assert [results[1].token_ids, results[3].token_ids] == expected[1:]


def test_tokens_before_a_failed_step_are_not_cached(poisoned):
    first, second, third = poisoned.generate(PROMPT, GREEDY, reuse_prefix=False).token_ids[:3]
    good = poisoned.model.weights.embed[second].clone()
    poisoned.model.weights.embed[second] = float("nan")
    failed = poisoned.generate(PROMPT, GREEDY)
    assert failed.token_ids == (first, second) and "step 3 (position 8)" in failed.error
    poisoned.model.weights.embed[second] = good
    after = poisoned.generate([*PROMPT, first, second, third], GREEDY)
    assert after.finish_reason == "length" and after.usage.reused_tokens == 0


def test_interrupted_prompt_is_not_cached(poisoned, monkeypatch):
    """The interrupt comes before the host has seen that the logits are NaN."""
    finish = poisoned.prompts.finish

    def interrupted(*args):
        finish(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(poisoned.prompts, "finish", interrupted)
    with pytest.raises(KeyboardInterrupt):
        poisoned.generate([*PROMPT, POISON, 7], GREEDY, reuse_prefix=False)
    monkeypatch.undo()
    assert poisoned.generate(PROMPT, GREEDY).finish_reason == "length"


def test_tokens_beyond_the_vocabulary_of_the_model_are_rejected():
    engine = tiny_engine()
    engine.tokenizer = Tokenizer.load(BUNDLED)
    for prompt in ("Hello there", [{"role": "user", "content": "Hello"}]):
        with pytest.raises(PromptError, match=r"token id \d+ is not in the vocabulary \(0 to 330\)"):
            engine.generate(prompt, GREEDY)


def test_prompt_prepared_by_another_engine_is_checked(engine):
    other = tiny_engine(vocab_size=engine.config.vocab_size + 8, capacity=engine.capacity + 8)
    with pytest.raises(PromptError, match=f"token id {engine.config.vocab_size + 7} is not in the vocabulary"):
        engine.submit(other.prepare([1, engine.config.vocab_size + 7]))
    with pytest.raises(TooLong):
        engine.submit(other.prepare([1] * (engine.capacity + 1)))
    prepared = other.prepare([1, 2, 3])
    assert engine.prepare(prepared) == prepared


def test_ids_of_any_integer_type_are_accepted(engine):
    assert engine.encode(torch.tensor([3, 4])) == engine.encode(iter([3, 4])) == [3, 4]
    for ids in (array("q", [3, 4]), np.array([3, 4], np.uint16), torch.tensor([3, 4], dtype=torch.int8)):
        assert engine.encode(ids) == [3, 4]


def test_ids_outside_the_vocabulary_are_rejected(engine):
    for field in (dict(logit_bias={331: 1.0}), dict(stop_token_ids=[400])):
        with pytest.raises(ParameterError, match=next(iter(field))):
            engine.generate(PROMPT, SamplingParams(**field))
    with pytest.raises(ParameterError, match="at most 16"):
        engine.generate(PROMPT, SamplingParams(stop_token_ids=list(range(17))))


@pytest.mark.skipif(CUDA, reason="the test is for the CPU backend")
@pytest.mark.parametrize("window", [0, 24])
def test_cpu_attention_in_blocks_of_rows(window, monkeypatch):
    q, k, v = torch.randn(1, 4, 50, 64), torch.randn(1, 2, 90, 64), torch.randn(1, 2, 90, 64)
    whole, parts = torch.full((2, 4, 50, 64), float("nan"))
    attend_masked(q, k, v, whole, window, 0.125)
    monkeypatch.setattr("tridecode.kernels.attention.prompt_attention.MASK_LIMIT", 90 * 7)
    attend_masked(q, k, v, parts, window, 0.125)
    assert torch.allclose(parts, whole, rtol=0, atol=1e-6)


@pytest.mark.skipif(not CUDA, reason="the test measures GPU memory")
def test_loading_needs_little_more_memory_than_the_weights(tmp_path, monkeypatch):
    total = torch.cuda.mem_get_info()[1]  # The test ignores the memory of other programs.
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (total - torch.cuda.memory_reserved(), total))
    path = write_tiny(tmp_path / "m", "llama", dtype=torch.bfloat16, hidden_size=1280, vocab_size=65536)
    config = load_config(path)
    for _ in range(2):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        weights = load_weights(path, config, DEVICE, torch.bfloat16)
        assert torch.cuda.max_memory_allocated() - before <= 1.05 * weights.nbytes()
        del weights
    plans = []
    for _ in range(2):
        engine = Engine.load(path)
        plans.append(engine.plan.memory.free)
        del engine
    assert plans[1] > 0.98 * plans[0]


@pytest.mark.skipif(not CUDA, reason="the test measures GPU memory")
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
    assert peak < 1.0, f"prefill took {peak:.2f} GiB in addition to the cache"


SPECIAL_STOPS = {
    # name: (stop strings, the tokens that the model writes, text, the stop string that ends it)
    "a special token": (["<|im_start|>"], ["a", "<|im_start|>", "b"], "a", "<|im_start|>"),
    "begins with one": (["<|im_start|>b"], ["a", "<|im_start|>", "b"], "a", "<|im_start|>b"),
    "ends with one": (["a<|im_start|>"], ["x", "a", "<|im_start|>", "b"], "x", "a<|im_start|>"),
    "one inside": (["a<|im_start|>b"], ["x", "a", "<|im_start|>", "b"], "x", "a<|im_start|>b"),
    "two": (["<|im_start|><|im_start|>"], ["a", *["<|im_start|>"] * 2], "a", "<|im_start|><|im_start|>"),
    "begins but does not match": (["<|im_start|>c"], ["a", "<|im_start|>", "b"], "ab", None),
    "ends with the end of the turn": (["a<|im_end|>"], ["x", "a", "<|im_end|>"], "x", "a<|im_end|>"),
    "the end of the turn": (["<|im_end|>"], ["x", "<|im_end|>"], "x", "<|im_end|>"),
    "another special token": (["ab"], ["x", "a", "<|im_start|>", "b"], "x", "ab"),
}


@pytest.mark.parametrize("case", SPECIAL_STOPS)
def test_stop_string_with_special_tokens(case, tiny):
    stops, written, text, stop = SPECIAL_STOPS[case]
    tokenizer = Tokenizer.load(tiny)
    params = SamplingParams(stop=stops, seed=0)
    request = Request(array("i", [5]), params, (2,), 100, 0.0)
    request.resume(tokenizer)
    for token in [token for part in written for token in tokenizer.encode(part, allow_special=True)]:
        if not request.ended:
            request.push(token, None)
    if not request.ended:
        request.end("length")
    last = request.chunks[-1]
    assert "".join(chunk.text for chunk in request.chunks) == text
    assert (last.stop_string, last.finish_reason) == (stop, "stop" if stop else "length")


def test_special_token_in_stop_string_ends_a_generation(tiny):
    with Engine.load(tiny, device="cpu") as engine:
        params = SamplingParams(temperature=0, max_tokens=5, logit_bias={1: 1e30}, stop=["<|im_start|><|im_start|>"])
        result = engine.generate("Hi", params)
    assert (result.finish_reason, result.token_ids, result.text) == ("stop", (1, 1), "")


CUT = "abcabxabcd--stop here"


@pytest.mark.parametrize("stops", [["abcd"], ["stop", "x"], ["bxab", "abx"], ["zzz"], ["--stop here!", "here"]])
def test_stop_strings_do_not_depend_on_the_division_of_the_text(stops):
    ends = [(CUT.find(s) + len(s), CUT.find(s), s) for s in stops if s in CUT]
    for size in (1, 2, 3, 7, 100):
        filter = StopStrings(stops)
        shown = "".join(filter.push(CUT[i : i + size]) for i in range(0, len(CUT), size)) + filter.flush()
        assert shown == (CUT[: min(ends)[1]] if ends else CUT)
        assert filter.hit == (min(ends)[2] if ends else None)
