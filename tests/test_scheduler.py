"""Scheduler: whatever comes, goes and runs short, each request's tokens are those of running alone, and no page is lost.

In fp32, where the rows of a pass have no influence on a text. On a machine without a GPU the scheduler is told to keep
a pass in flight all the same, so that what it does is what it does on a GPU.
"""

import gc
import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CUDA, tiny_engine

from tridecode import SamplingParams
from tridecode.errors import QueueFull
from tridecode.serve import scheduler as scheduling
from tridecode.serve.request import Job
from tridecode.step.prefill import prefill

POISON = 301  # a token whose embedding is NaN
CAPACITY = 96
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=11),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7, seed=5, logit_bias={7: 2.0}
    ),
    "logprobs": SamplingParams(temperature=1.0, min_p=0.01, seed=3, logprobs=3),
}


def engine_of(slots=1, ahead=1, capacity=CAPACITY, **build):
    """An engine with small pages, in fp32, with a token that poisons."""
    engine = tiny_engine(
        dtype=torch.float32, capacity=capacity, tie_word_embeddings=False, num_layers=1, build=build | {"slots": slots}
    )
    engine.model.weights.embed[POISON] = float("nan")
    engine.scheduler._ahead = ahead
    engine.threads = 1  # a tiny model's operations are shorter than a wait for another thread
    return engine


@pytest.fixture(scope="module")
def alone():
    """What a request of the same arguments gives in an engine of its own."""
    engine = engine_of()

    @cache
    def alone(prompt, kind, max_tokens, stop=None):
        return engine.generate(prompt, params_of(kind, max_tokens, stop), reuse_prefix=False)

    return alone


@cache
def params_of(kind: str, max_tokens: int, stop: int | None = None) -> SamplingParams:
    return replace(PARAMS[kind], max_tokens=max_tokens, stop_token_ids=() if stop is None else (stop,))


@cache
def prompt_of(base: int, length: int, poisoned: bool = False) -> tuple[int, ...]:
    """One of a few conversations, cut: many share a beginning."""
    ids = [(base * 97 + i * (13 + base)) % 300 for i in range(length)]
    return tuple(ids[:-1] + [POISON] + ids[-1:] if poisoned else ids)


def same(result, expected) -> None:
    assert (result.token_ids, result.finish_reason, result.error) == (
        expected.token_ids, expected.finish_reason, expected.error,
    )  # fmt: skip
    assert result.usage.prompt_tokens == expected.usage.prompt_tokens
    for got, wanted in zip(result.logprobs or (), expected.logprobs or ()):
        assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
        assert [token for token, _ in got.top] == [token for token, _ in wanted.top]


def finish(scheduler) -> None:
    for _ in range(20_000):
        if not scheduler._jobs:
            break
        scheduler.step()
    assert not scheduler._jobs and not scheduler._rows
    scheduler.assert_consistent()


REQUEST = st.tuples(
    st.integers(0, 2), st.sampled_from([1, 5, 16, 17, 40, 70]), st.sampled_from(sorted(PARAMS)),
    st.sampled_from([1, 3, 20, 60]), st.booleans(), st.integers(0, 9),
)  # fmt: skip
ACTION = st.one_of(
    st.tuples(st.just("submit"), REQUEST),
    st.tuples(st.just("submit"), REQUEST),
    st.tuples(st.just("step"), st.integers(1, 25)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
)


@pytest.fixture(scope="module")
def small():
    """Three slots, and pages for little more than one request."""
    return engine_of(slots=3, page=16, pages=7, chunk_tokens=24, max_queue=4)


@settings(max_examples=300, deadline=None)
@given(actions=st.lists(ACTION, max_size=16), ahead=st.integers(0, 1))
def test_any_schedule_gives_the_tokens_of_running_alone(small, alone, actions, ahead):
    scheduler, requests, cancelled = small.scheduler, [], set()
    scheduler._ahead = 1 if CUDA else ahead
    for action, value in actions:
        if action == "submit":
            base, length, kind, most, reuse, special = value
            prompt, wanted = prompt_of(base, length, poisoned=special == 9), (kind, most)
            if special < 3:
                tokens = alone(prompt, *wanted).token_ids
                wanted = (*wanted, tokens[special * len(tokens) // 3])
            full = len(scheduler._jobs) == 3 + 4
            try:
                request = small.submit(prompt, params_of(*wanted), reuse_prefix=reuse)
                requests.append((request, prompt, wanted))
                assert not full
            except QueueFull:
                assert full
        elif action == "step":
            for _ in range(value):
                scheduler.step()
                scheduler.assert_consistent()
        elif requests:
            number = value % len(requests)
            request = requests[number][0]
            if action == "cancel":
                running = request.finish_reason is None
                assert request.cancel() == running and not request.cancel()
            else:
                pieces = iter(request)
                next(pieces)
                running = request.finish_reason is None
                pieces.close()
            assert not running or request.finish_reason == "cancelled"
            cancelled |= {number} if running else set()
        scheduler.assert_consistent()
    finish(scheduler)
    for number, (request, prompt, wanted) in enumerate(requests):
        result, expected = request.result(), alone(prompt, *wanted)
        if number in cancelled:
            assert result.finish_reason == "cancelled"
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            same(result, expected)
