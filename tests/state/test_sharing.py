"""What requests have in common is computed once, whoever asks next, and nobody's text depends on it."""

import pytest
import torch
from models import tiny_engine

from tridecode import SamplingParams
from tridecode.errors import ParameterError

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SYSTEM = [(11 * i) % 300 for i in range(70)]


def engine_of(slots=4, **build):
    build |= {"slots": slots, "page": 16}
    engine = tiny_engine(dtype=torch.float32, capacity=256, tie_word_embeddings=False, build=build)
    engine.threads = 1  # a tiny model's operations are shorter than a wait for another thread
    return engine


@pytest.fixture
def engine():
    return engine_of()


@pytest.fixture(scope="module")
def alone():
    engine = engine_of(1)
    return lambda ids, params=GREEDY: engine.generate(ids, params, reuse_prefix=False).token_ids


def computed(engine) -> int:
    """Tokens of prompts that went through prompt passes so far."""
    return sum(stat.rows * stat.count for stat in engine.graph_stats() if stat.kind in ("prompt", "mixed"))


def test_a_prefix_that_many_ask_for_at_once_is_computed_once(engine, alone):
    prompts = [[*SYSTEM, 200 + i, 7, 9] for i in range(6)]
    results = engine.generate_many(prompts, GREEDY)
    assert [result.token_ids for result in results] == [alone(prompt) for prompt in prompts]
    reused = [result.usage.reused_tokens for result in results]
    assert reused == [0, 64, 64, 64, 70, 70], "whole pages while it runs, then the last too"
    assert computed(engine) == 73 + 3 * 9 + 2 * 3


def test_side_requests_push_no_conversation_out(engine, alone):
    """A title and tags are asked for after each turn: the conversation's own next turn still finds all."""
    text = list(SYSTEM)
    for turn in range(4):
        text += [30 + turn, 31, 32]
        result = engine.generate(text, GREEDY)
        assert result.token_ids == alone(text)
        assert result.usage.reused_tokens == (0 if turn == 0 else len(text) - 4)
        text += result.token_ids
        for side in (100, 150):
            asked = [side, side + 1, *text[-40:]]
            assert engine.generate(asked, GREEDY).token_ids == alone(asked)


def test_side_requests_push_no_conversation_out_where_pages_are_few(alone):
    """More questions beside it than the pool holds: what the conversation has found again is there at its next turn."""
    engine = engine_of(2, pages=24)
    text, side = list(SYSTEM), 0
    for turn in range(5):
        before = len(text)
        text += [30 + turn, 31, 32]
        result = engine.generate(text, GREEDY)
        assert result.token_ids == alone(text)
        assert result.usage.reused_tokens == (before - 1 if turn else 0)
        text += result.token_ids
        for _ in range(8 if turn else 0):  # from the second one on it is known as a conversation
            side += 1
            asked = [side, *SYSTEM[:63]]
            assert engine.generate(asked, GREEDY).token_ids == alone(asked)
    engine.scheduler.assert_consistent()


def test_a_preempted_request_resumes_from_what_is_there(alone, monkeypatch):
    """Two that need more pages than there are: the younger one reads again only what had to go."""
    engine, log = engine_of(2, pages=17), []
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
        assert request.result().token_ids == alone(prompt, params)
    assert engine.scheduler.preemptions
    assert log[:2] == [(69, 0), (70, 0)]
    assert all(length > 70 and read >= 64 for length, read in log[2:]), log
    engine.scheduler.assert_consistent()


def test_what_was_read_of_a_prompt_is_found_where_it_was_cancelled(alone):
    """It began in the middle of a page, and went on beyond it before it had drawn anything."""
    engine = engine_of(chunk_tokens=20)
    engine.generate(SYSTEM[:21], SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    request = engine.submit(SYSTEM, GREEDY)
    engine.step()
    request.cancel()
    engine.scheduler.assert_consistent()
    result = engine.generate(SYSTEM, GREEDY)
    assert result.token_ids == alone(SYSTEM) and result.usage.reused_tokens >= 32


def test_whole_pages_are_there_while_their_prompt_is_still_read(alone):
    engine = engine_of(chunk_tokens=40)
    first = engine.submit([*SYSTEM, *SYSTEM, *SYSTEM, 1, 2], GREEDY)
    while computed(engine) < 40:
        engine.step()
    second = engine.submit([*SYSTEM[:32], 5, 6], GREEDY)
    assert second.result().token_ids == alone([*SYSTEM[:32], 5, 6])
    assert second.result().usage.reused_tokens == 32
    assert first.result().token_ids == alone([*SYSTEM, *SYSTEM, *SYSTEM, 1, 2])


def test_whoever_waits_for_a_prefix_computes_it_where_its_reader_was_cancelled(alone):
    engine = engine_of(chunk_tokens=20)
    first = engine.submit([*SYSTEM, 1, 2], GREEDY)
    engine.step()
    second = engine.submit([*SYSTEM, 5, 6], GREEDY)
    engine.step()
    first.cancel()
    assert second.result().token_ids == alone([*SYSTEM, 5, 6])
    engine.scheduler.assert_consistent()


def test_a_prompt_that_ends_while_it_is_read_leaves_each_page_once(alone):
    """It goes on with a part of a page, which its own whole page begins with when it is cancelled."""
    engine = engine_of(chunk_tokens=20)
    engine.generate(SYSTEM, GREEDY)
    second = engine.submit([*SYSTEM, *SYSTEM, 1, 2], GREEDY)
    engine.step()
    second.cancel()
    engine.scheduler.assert_consistent()
    assert engine.generate([*SYSTEM, *SYSTEM], GREEDY).token_ids == alone([*SYSTEM, *SYSTEM])


def test_what_gave_no_finite_logits_is_not_found_again(engine, alone):
    engine.model.weights.embed[301] = float("nan")
    bad = [*SYSTEM[:40], 301, *SYSTEM[40:]]
    assert engine.generate(bad, GREEDY).finish_reason == "error"
    assert engine.scheduler.slots.cache.match(bad).tokens(16) == 0
    assert engine.generate(SYSTEM, GREEDY).token_ids == alone(SYSTEM)
    assert engine.generate(bad, GREEDY).finish_reason == "error"
    engine.scheduler.assert_consistent()


def test_whoever_found_a_bad_prefix_computes_it_himself(alone):
    engine = engine_of(chunk_tokens=40)
    engine.model.weights.embed[301] = float("nan")
    bad = engine.submit([*SYSTEM[:64], 301, 5], GREEDY)
    good = [engine.submit([*SYSTEM[:64], i, 5], GREEDY) for i in range(3)]
    assert bad.result().finish_reason == "error"
    for i, request in enumerate(good):
        assert request.result().token_ids == alone([*SYSTEM[:64], i, 5])
    engine.scheduler.assert_consistent()


def test_a_page_in_which_two_part_is_copied(engine, alone):
    """The first one's page stays as it was: a third request that goes on with it says what it would alone."""
    first, second = SYSTEM[:24], [*SYSTEM[:20], 3, 4, 5, 6]
    for ids in (first, second, [*first, 8], [*second, 8]):
        assert engine.generate(ids, GREEDY).token_ids == alone(ids)
    assert engine.generate([*first, 8], GREEDY).usage.reused_tokens == 24
    engine.scheduler.assert_consistent()


def test_a_prompt_that_needs_every_page_takes_over_the_one_it_has_in_part(alone):
    """Kept to be copied, that page would be the one that lacks, and nobody would ever give it back. What stood behind
    it goes, as it would for the room."""
    engine = engine_of(1, pages=16)
    first, second = (SYSTEM * 3)[:200], [*SYSTEM[:40], *range(210)]
    engine.generate(first, GREEDY)
    request = engine.submit(second, GREEDY)
    for _ in range(40):
        engine.step()
        engine.scheduler.assert_consistent()
    assert request.finish_reason and request.result().token_ids == alone(second)
    assert request.result().usage.reused_tokens == 40


def test_tenants_share_nothing(engine, alone):
    texts = [[*SYSTEM, 4], [*SYSTEM, 4], [*SYSTEM, 5]]
    requests = [engine.submit(text, GREEDY, cache_salt=salt) for text, salt in zip(texts, ("a", "b", "a"))]
    assert [request.result().token_ids for request in requests] == [alone(text) for text in texts]
    assert [request.result().usage.reused_tokens for request in requests] == [0, 0, 64]
    for wrong in (None, 5, b"a"):
        with pytest.raises(ParameterError, match="cache_salt must be a string"):
            engine.submit(SYSTEM, GREEDY, cache_salt=wrong)


def test_nothing_is_shared_where_nobody_wants_it(alone):
    engine = engine_of(prefix_sharing=False)
    for _ in range(2):
        result = engine.generate(SYSTEM, GREEDY)
        assert result.token_ids == alone(SYSTEM) and result.usage.reused_tokens == 0
    assert not engine.scheduler.slots.cache.pages()
    engine.scheduler.assert_consistent()
