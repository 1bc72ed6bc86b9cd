"""Prefix sharing: common prefixes are computed once and change no tokens."""

import pytest
import torch
from models import BOTH, tiny_engine

from tridecode import SamplingParams
from tridecode.errors import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SYSTEM = [(11 * i) % 300 for i in range(70)]


def engine_of(slots=4, family="qwen3", **build):
    build |= {"slots": slots, "page": 16}
    engine = tiny_engine(dtype=torch.float32, capacity=256, tie_word_embeddings=False, build=build, **BOTH[family])
    # A second thread would cost more time than it saves, because the operations of a tiny model are short.
    engine.threads = 1
    return engine


@pytest.fixture
def engine():
    return engine_of()


@pytest.fixture(scope="module")
def run_alone(request):
    engine = engine_of(1, getattr(request, "param", "qwen3"))
    return lambda ids, params=GREEDY: engine.generate(ids, params, reuse_prefix=False).token_ids


def computed(engine) -> int:
    """Return the number of prompt tokens that prompt passes have read so far."""
    return sum(stat.rows * stat.count for stat in engine.graph_stats() if stat.kind in ("prompt", "mixed"))


WITH_EXPERTS = pytest.mark.parametrize("family, run_alone", [*zip(BOTH, BOTH)], indirect=["run_alone"], ids=BOTH)


@WITH_EXPERTS
def test_common_prefix_of_concurrent_requests_is_computed_once(family, run_alone):
    engine = engine_of(family=family)
    prompts = [[*SYSTEM, 200 + i, 7, 9] for i in range(6)]
    results = engine.generate_many(prompts, GREEDY)
    assert [result.token_ids for result in results] == [run_alone(prompt) for prompt in prompts]
    reused = [result.usage.reused_tokens for result in results]
    assert reused == [0, 64, 64, 64, 70, 70], "the requests reused a wrong number of tokens"
    assert computed(engine) == 73 + 3 * 9 + 2 * 3


def test_side_requests_do_not_evict_a_conversation(engine, run_alone):
    """Title and tag requests follow each turn; the next turn of the conversation still reuses all its tokens."""
    text = list(SYSTEM)
    for turn in range(4):
        text += [30 + turn, 31, 32]
        result = engine.generate(text, GREEDY)
        assert result.token_ids == run_alone(text)
        assert result.usage.reused_tokens == (0 if turn == 0 else len(text) - 4)
        text += result.token_ids
        for side in (100, 150):
            prompt = [side, side + 1, *text[-40:]]
            assert engine.generate(prompt, GREEDY).token_ids == run_alone(prompt)


def test_side_requests_do_not_evict_a_conversation_from_a_small_pool(run_alone):
    """Between two turns there are more side requests than the pool can store."""
    engine = engine_of(2, pages=24)
    text, side = list(SYSTEM), 0
    for turn in range(5):
        before = len(text)
        text += [30 + turn, 31, 32]
        result = engine.generate(text, GREEDY)
        assert result.token_ids == run_alone(text)
        assert result.usage.reused_tokens == (before - 1 if turn else 0)
        text += result.token_ids
        # In the first turn the pages of the conversation have not been reused, so side requests may evict them.
        for _ in range(8 if turn else 0):
            side += 1
            prompt = [side, *SYSTEM[:63]]
            assert engine.generate(prompt, GREEDY).token_ids == run_alone(prompt)
    engine.scheduler.assert_consistent()


@WITH_EXPERTS
def test_preempted_request_reuses_its_remaining_pages(family, run_alone, monkeypatch):
    """Two requests need more pages than the pool has. The younger one recomputes only the evicted pages."""
    engine, log = engine_of(2, family, pages=17), []
    slots, admit = engine.scheduler.slots, engine.scheduler.slots.admit

    def logged(ids, *rest):
        if (slot := admit(ids, *rest)) is not None:
            log.append((len(ids), slot.filled))
        return slot

    monkeypatch.setattr(slots, "admit", logged)
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompts = [SYSTEM, [5, *SYSTEM]]
    requests = [engine.submit(prompt, params) for prompt in prompts]
    for request, prompt in zip(requests, prompts):
        assert request.result().token_ids == run_alone(prompt, params)
    assert engine.scheduler.preemptions
    assert log[:2] == [(69, 0), (70, 0)]
    assert all(length > 70 and read >= 64 for length, read in log[2:]), log
    engine.scheduler.assert_consistent()


def test_cancelled_prompt_leaves_its_pages_in_the_cache(run_alone):
    """The prompt continues within a page and beyond it, and is cancelled before its first token."""
    engine = engine_of(chunk_tokens=20)
    engine.generate(SYSTEM[:21], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    request = engine.submit(SYSTEM, GREEDY)
    engine.step()
    request.cancel()
    engine.scheduler.assert_consistent()
    result = engine.generate(SYSTEM, GREEDY)
    assert result.token_ids == run_alone(SYSTEM) and result.usage.reused_tokens >= 32


def test_whole_pages_are_shared_while_their_prompt_is_read(run_alone):
    engine = engine_of(chunk_tokens=40)
    first = engine.submit([*SYSTEM, *SYSTEM, *SYSTEM, 1, 2], GREEDY)
    while computed(engine) < 40:
        engine.step()
    second = engine.submit([*SYSTEM[:32], 5, 6], GREEDY)
    assert second.result().token_ids == run_alone([*SYSTEM[:32], 5, 6])
    assert second.result().usage.reused_tokens == 32
    assert first.result().token_ids == run_alone([*SYSTEM, *SYSTEM, *SYSTEM, 1, 2])


def test_waiting_request_computes_a_prefix_whose_reader_was_cancelled(run_alone):
    engine = engine_of(chunk_tokens=20)
    first = engine.submit([*SYSTEM, 1, 2], GREEDY)
    engine.step()
    second = engine.submit([*SYSTEM, 5, 6], GREEDY)
    engine.step()
    first.cancel()
    assert second.result().token_ids == run_alone([*SYSTEM, 5, 6])
    engine.scheduler.assert_consistent()


def test_cancelled_prompt_leaves_each_page_once(run_alone):
    """The prompt reuses a part of a page. A whole page of the prompt starts with that part."""
    engine = engine_of(chunk_tokens=20)
    engine.generate(SYSTEM, GREEDY)
    second = engine.submit([*SYSTEM, *SYSTEM, 1, 2], GREEDY)
    engine.step()
    second.cancel()
    engine.scheduler.assert_consistent()
    assert engine.generate([*SYSTEM, *SYSTEM], GREEDY).token_ids == run_alone([*SYSTEM, *SYSTEM])


def test_pages_with_nonfinite_logits_are_not_reused(engine, run_alone):
    engine.model.weights.embed[301] = float("nan")
    bad = [*SYSTEM[:40], 301, *SYSTEM[40:]]
    assert engine.generate(bad, GREEDY).finish_reason == "error"
    assert engine.scheduler.slots.cache.match(bad).tokens(16) == 0
    assert engine.generate(SYSTEM, GREEDY).token_ids == run_alone(SYSTEM)
    assert engine.generate(bad, GREEDY).finish_reason == "error"
    engine.scheduler.assert_consistent()


def test_request_recomputes_a_prefix_with_nonfinite_logits(run_alone):
    engine = engine_of(chunk_tokens=40)
    engine.model.weights.embed[301] = float("nan")
    bad = engine.submit([*SYSTEM[:64], 301, 5], GREEDY)
    good = [engine.submit([*SYSTEM[:64], i, 5], GREEDY) for i in range(3)]
    assert bad.result().finish_reason == "error"
    for i, request in enumerate(good):
        assert request.result().token_ids == run_alone([*SYSTEM[:64], i, 5])
    engine.scheduler.assert_consistent()


@pytest.mark.parametrize("length", [8, 24, 40])
def test_request_does_not_report_reused_kv_that_it_recomputes(engine, run_alone, length):
    """The cached K/V contain NaN, in a part of a page or in whole pages."""
    ids = SYSTEM[:length]
    engine.generate(ids, GREEDY)
    engine.model.kv.pool.fill_(float("nan"))
    result = engine.generate([*ids, 300, 5], GREEDY)
    assert result.token_ids == run_alone([*ids, 300, 5])
    assert result.usage.reused_tokens == 0
    engine.scheduler.assert_consistent()


def test_page_in_which_two_prompts_diverge_is_copied(engine, run_alone):
    """The page of the first prompt does not change: a third request that continues it gets the expected tokens."""
    first, second = SYSTEM[:24], [*SYSTEM[:20], 3, 4, 5, 6]
    for ids in (first, second, [*first, 8], [*second, 8]):
        assert engine.generate(ids, GREEDY).token_ids == run_alone(ids)
    assert engine.generate([*first, 8], GREEDY).usage.reused_tokens == 24
    engine.scheduler.assert_consistent()


def test_prompt_that_needs_every_page_owns_its_partial_page(run_alone):
    """The request takes the partly matching page without a copy, because the pool has no page left for the copy.

    The descendants of that page are evicted.
    """
    engine = engine_of(1, pages=16)
    first, second = (SYSTEM * 3)[:200], [*SYSTEM[:40], *range(210)]
    engine.generate(first, GREEDY)
    request = engine.submit(second, GREEDY)
    for _ in range(40):
        engine.step()
        engine.scheduler.assert_consistent()
    assert request.finish_reason and request.result().token_ids == run_alone(second)
    assert request.result().usage.reused_tokens == 40


def test_requests_of_different_salts_share_no_pages(engine, run_alone):
    texts = [[*SYSTEM, 4], [*SYSTEM, 4], [*SYSTEM, 5]]
    requests = [engine.submit(text, GREEDY, cache_salt=salt) for text, salt in zip(texts, ("a", "b", "a"))]
    assert [request.result().token_ids for request in requests] == [run_alone(text) for text in texts]
    assert [request.result().usage.reused_tokens for request in requests] == [0, 0, 64]
    for wrong in (None, 5, b"a"):
        with pytest.raises(ParameterError, match="cache_salt must be a string"):
            engine.submit(SYSTEM, GREEDY, cache_salt=wrong)


def test_scored_prompts_share_pages_only_under_their_salt(engine):
    prompt = [*SYSTEM, 7, 7, 7]
    engine.submit_score(prompt, 1, cache_salt="score").result()
    requests = [engine.submit(prompt, GREEDY, cache_salt=salt) for salt in ("other", "score")]
    assert [request.result().usage.reused_tokens > 0 for request in requests] == [False, True]


def test_a_turn_that_waits_for_pages_keeps_the_end_of_its_conversation():
    engine = engine_of(slots=2, pages=16)
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    chat = [9, 8, 7, 6] * 10
    chat = [*chat, *engine.generate(chat, GREEDY).token_ids, *[5] * 40]
    other = engine.submit([4, 3, 2, 1, 0] * 35, long)
    while not other.chunks:
        engine.step()
    turn = engine.submit(chat, GREEDY)
    assert turn.result().usage.reused_tokens == 45  # All tokens of the conversation except the last one.
    engine.scheduler.assert_consistent()


def test_prefix_sharing_can_be_turned_off(run_alone):
    engine = engine_of(prefix_sharing=False)
    for _ in range(2):
        result = engine.generate(SYSTEM, GREEDY)
        assert result.token_ids == run_alone(SYSTEM) and result.usage.reused_tokens == 0
    assert not engine.scheduler.slots.cache.pages()
    engine.scheduler.assert_consistent()
