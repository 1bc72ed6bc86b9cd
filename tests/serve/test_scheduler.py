"""Scheduler: whatever comes, goes or runs short, a request's tokens are those of running alone, and no page is lost.

In fp32, where the rows of a pass have no influence on a text. On a machine without a GPU the scheduler is told to keep
a pass in flight all the same, so that what it does is what it does on a GPU.
"""

import gc
import sys
from dataclasses import replace
from functools import cache
from weakref import WeakSet

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CUDA, tiny_engine

from tridecode import SamplingParams
from tridecode.checkpoint.load import random_weights
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.errors import QueueFull

POISON = 301  # a token whose embedding is NaN
CAPACITY = 96
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.2, top_k=40, top_p=0.95, seed=11),
    "penalties": SamplingParams(
        temperature=0.9, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.7, seed=5, logit_bias={7: 2}
    ),
    "logprobs": SamplingParams(temperature=1.0, min_p=0.01, seed=3, logprobs=3),
}


def engine_of(slots=1, ahead=1, capacity=CAPACITY, **build):
    """An engine with small pages, in fp32, with a token that poisons."""
    engine = tiny_engine(
        dtype=torch.float32, capacity=capacity, tie_word_embeddings=False, num_layers=1, build=build | {"slots": slots}
    )
    weights = engine.model.weights.tensors()  # those of any machine: what is drawn, POISON too, depends on them
    for name, tensor in random_weights(engine.config, torch.device("cpu"), torch.float32, seed=0).tensors().items():
        weights[name].copy_(tensor)
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
        if not scheduler.queue.requests:
            break
        scheduler.step()
    assert not scheduler.queue.requests and not scheduler.queue.rows
    scheduler.assert_consistent()


REQUEST = st.tuples(
    st.integers(0, 2), st.sampled_from([1, 5, 17, 40, 47, 70]), st.sampled_from(sorted(PARAMS)),
    st.sampled_from([1, 20, 40, 60]), st.booleans(), st.integers(0, 9),
)  # fmt: skip
ACTION = st.one_of(
    *[st.tuples(st.just("submit"), REQUEST)] * 3,
    st.tuples(st.just("step"), st.integers(1, 25)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("drop"), st.integers(0, 9)),
)


@pytest.fixture(scope="module")
def small():
    """Three slots, and pages for little more than one request."""
    return engine_of(slots=3, page=16, pages=7, chunk_tokens=24, max_queue=4)


@settings(max_examples=300, deadline=None)
@given(actions=st.lists(ACTION, min_size=4, max_size=24), ahead=st.integers(0, 1))
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
            full = len(scheduler.queue.requests) == 3 + 4
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


def test_who_waits_for_pages_is_matched_once(monkeypatch):
    """And again when pages may have come."""
    small, looked = engine_of(slots=2, page=16, pages=7), []
    first, second = (small.submit(prompt_of(base, 60), params_of("greedy", 30)) for base in (0, 1))
    slots, admit = small.scheduler.slots, small.scheduler.slots.admit
    monkeypatch.setattr(slots, "admit", lambda *args: looked.append(first.finish_reason) or admit(*args))
    finish(small.scheduler)
    assert len(second.result().token_ids) == 30 and small.scheduler.preemptions == 0
    assert looked.count(None) <= 3, "one for the first, and for the second before and after what that has published"
    assert len(looked) == looked.count(None) + 1


@settings(max_examples=100, deadline=None)
@given(actions=st.lists(ACTION, min_size=4, max_size=24))
def test_nobody_waits_who_could_be_admitted(small, actions):
    scheduler, queue, requests = small.scheduler, small.scheduler.queue, []
    for action, value in actions:
        if action == "submit" and len(queue.requests) < 3 + 4:
            base, length, kind, most, reuse, special = value
            prompt = prompt_of(base, length, poisoned=special == 9)
            requests.append(small.submit(prompt, params_of(kind, most), reuse_prefix=reuse))
        elif action == "step":
            for _ in range(value):
                scheduler.step()
                if queue._refused and not queue.admit():
                    queue._refused = None
                    assert not queue.admit()
        elif requests:
            requests[value % len(requests)].cancel()
    finish(scheduler)


def spied(monkeypatch, owner, name, log):
    """Calls of owner.name go to `log` as (name, arguments) before they are made."""
    function = getattr(owner, name)

    def spy(*args, **kwargs):
        log.append((name, (*args, *kwargs.values())))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)


@pytest.mark.parametrize("kind", PARAMS)
def test_a_preempted_request_resumes_with_the_same_tokens(small, alone, monkeypatch, kind):
    """Two that need ten pages of seven: the younger one waits, and goes on behind its last token."""
    log = []
    spied(monkeypatch, small.scheduler, "_preempt", log)
    wanted = [(prompt_of(base, 17), kind, 60) for base in (0, 1)]
    requests = [small.submit(prompt, params_of(*rest)) for prompt, *rest in wanted]
    finish(small.scheduler)
    assert [slot.ref is requests[1].ref for _, (slot,) in log] == [True]
    for request, expected in zip(requests, wanted):
        same(request.result(), alone(*expected))
    assert requests[1].result().usage.reused_tokens <= 16


def test_a_request_takes_pages_that_nobody_uses_before_those_of_others(small, alone, monkeypatch):
    cache = small.scheduler.slots.cache
    cache.clear()
    for base in (0, 1, 2):
        small.generate(prompt_of(base, 20), params_of("greedy", 10))
    assert len(cache.pages()) == 6
    log = []
    spied(monkeypatch, small.scheduler, "_preempt", log)
    same(small.generate(prompt_of(3, 40), params_of("greedy", 50)), alone(prompt_of(3, 40), "greedy", 50))
    assert not log and len(cache.pages()) <= 7
    assert cache.match(prompt_of(3, 40)).tokens(16) == 40


def test_pages_are_given_as_they_are_needed(alone, monkeypatch):
    """Eight slots of a pool of twelve pages: each page of a long request comes alone, at most 16 positions ahead."""
    engine = engine_of(slots=8, page=16, pages=7)
    log = []
    spied(monkeypatch, engine.scheduler.slots, "grow", log)
    prompt = prompt_of(0, 5)
    for kind in PARAMS:
        same(engine.generate(prompt, params_of(kind, 90), reuse_prefix=False), alone(prompt, kind, 90))
    assert [(slot.number, *rest) for _, (slot, *rest) in log] == [(0, 0, 1)] * 20
    engine.scheduler.assert_consistent()


def test_a_row_whose_pages_end_idles_until_there_are_more(small, alone):
    """The oldest waits at the end of its pages until its passes were seen, then takes those of the youngest."""
    before = small.scheduler.preemptions
    wanted = [(prompt_of(0, 40), "sampled", 50), (prompt_of(1, 17), "sampled", 60)]
    requests = [small.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in wanted]
    finish(small.scheduler)
    assert small.scheduler.preemptions > before, "no row came to the end of its pages"
    for request, expected in zip(requests, wanted):
        same(request.result(), alone(*expected))


@pytest.mark.parametrize("ahead", [1] if CUDA else [0, 1])
def test_rows_decode_beside_the_chunks_of_a_prompt_and_no_more_passes_are_in_flight(small, monkeypatch, ahead):
    scheduler, log = small.scheduler, []
    monkeypatch.setattr(scheduler, "_ahead", ahead)
    spied(monkeypatch, small.prompts, "read", log)
    spied(monkeypatch, small.prompts, "finish", log)
    spied(monkeypatch, small.steps, "replay", log)
    spied(monkeypatch, scheduler._ring, "entry", log)
    first = small.submit(prompt_of(0, 5), params_of("greedy", 30), reuse_prefix=False)
    pieces = iter(first)
    next(pieces)
    small.submit(prompt_of(1, 60), params_of("greedy", 4), reuse_prefix=False).result()
    names = [name for name, _ in log]
    read = [(*chunk[2:], args[2] > 0) for name, args in log if name == "read" for chunk in args[0]]
    assert read == [(5, 0, False), (24, 0, True), (24, 24, True), (12, 48, True)]
    passes = "".join({"read": "c", "finish": "f", "replay": "p", "entry": ""}[name] for name in names)
    assert passes.startswith("cf") and passes[2:].strip("p") == "cfcfcf", "a row waited for a chunk"
    enqueued, seen, slot = 0, 0, next(args[0] for name, args in log if name == "entry")
    for name, args in log:
        enqueued += name in ("replay", "finish")
        seen = args[2] + 1 if name == "entry" and args[0] == slot else seen
        assert enqueued - seen <= ahead + 1, "a pass was enqueued before the last but one was seen"


def test_rows_are_the_first_ones_whoever_leaves(small, alone, monkeypatch):
    log, scheduler = [], small.scheduler
    spied(monkeypatch, small.steps, "replay", log)
    spied(monkeypatch, small.prompts, "finish", log)
    wanted = [
        (prompt_of(base, 5), *rest) for base, rest in enumerate((("sampled", 3), ("greedy", 9), ("penalties", 6)))
    ]
    requests = [small.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in wanted]
    finish(scheduler)
    for request, expected in zip(requests, wanted):
        same(request.result(), alone(*expected))
    passes = [args[:2] for _, args in log]
    assert passes[0] == ("sample", 3) and ("sample", 2) in passes and passes[-1] == ("greedy", 1)


def test_a_request_that_fails_is_cut_out_of_its_neighbours(small, alone):
    bad = [(prompt_of(0, 20, True), "greedy", 9), (prompt_of(1, 1, True), "sampled", 9)]
    good = [(prompt_of(1, 20), "greedy", 20), (prompt_of(2, 17), "penalties", 20)]
    wanted = [bad[0], good[0], bad[1], good[1]]
    results = small.generate_many([ids for ids, *_ in wanted], [params_of(*rest) for _, *rest in wanted])
    for result, expected in zip(results, wanted):
        same(result, alone(*expected))
    assert [result.finish_reason for result in results] == ["error", "length", "error", "length"]
    small.scheduler.assert_consistent()
    found = [small.scheduler.slots.cache.match(ids).tokens(16) for ids, *_ in bad]
    assert all(tokens <= ids.index(POISON) for tokens, (ids, *_) in zip(found, bad))


def test_a_prompt_that_finds_no_memory_ends_alone(small, alone, monkeypatch):
    read = small.prompts.read

    def full(chunks, tokens, decoding):
        if any(chunk.end == 17 for chunk in chunks):
            raise RuntimeError("CUDA out of memory")
        read(chunks, tokens, decoding)

    monkeypatch.setattr(small.prompts, "read", full)
    good = small.submit(prompt_of(0, 20), params_of("greedy", 20))
    bad = small.submit(prompt_of(1, 17), params_of("greedy", 20), reuse_prefix=False)
    same(good.result(), alone(prompt_of(0, 20), "greedy", 20))
    assert bad.finish_reason == "error"
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.result()
    (failed,) = small.generate_many([prompt_of(1, 17)], params_of("greedy", 20), reuse_prefix=False)
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: CUDA out of memory")
    small.scheduler.assert_consistent()


def test_a_conversation_finds_its_slot_again(small):
    """Not the slot of another one that begins alike, while there is one that has nothing to lose."""
    greedy = params_of("greedy", 5)
    system = list(prompt_of(0, 4))
    first = system + list(prompt_of(1, 10))
    second = system + list(prompt_of(2, 10))
    first += [*small.generate(first, greedy).token_ids, 9]
    second += [*small.generate(second, greedy).token_ids, 9]
    assert small.generate(first, greedy).usage.reused_tokens == len(first) - 2
    assert small.generate(second, greedy).usage.reused_tokens == len(second) - 2


def test_a_score_runs_beside_others(small, alone):
    ids = prompt_of(2, 40)
    expected = small.score(ids)
    request = small.submit(prompt_of(0, 17), params_of("sampled", 60))
    next(iter_of := iter(request))
    assert torch.allclose(small.score(ids), expected, rtol=1e-4, atol=1e-5)
    assert len(list(iter_of)) == 60
    same(request.result(), alone(prompt_of(0, 17), "sampled", 60))


def test_of_a_prompt_no_more_is_read_than_there_is(alone):
    """Neither of one that was preempted, which reads what it has drawn, too."""
    engine, told = engine_of(slots=2, page=16, pages=7, chunk_tokens=8), set()
    requests = [engine.submit(prompt_of(base, 30), params_of("greedy", 60)) for base in range(2)]
    while engine.step():
        told.add(engine.scheduler.reading())
    assert engine.scheduler.preemptions and all(0 <= kept <= read <= of for kept, read, of in told - {None})
    assert max(of for _, _, of in told - {None}) > 30
    for base, request in enumerate(requests):
        same(request.result(), alone(prompt_of(base, 30), "greedy", 60))


def test_a_score_that_is_preempted_goes_on_where_it_was(alone):
    """Its pieces are never fewer than they were: who reads them has some of them already."""
    engine = engine_of(slots=2, page=16, pages=7)
    ids, kept = prompt_of(2, 80), []
    expected = engine.submit_score(ids, 2).result()
    older = engine.submit(prompt_of(0, 17), params_of("greedy", 60))
    score = engine.submit_score(ids, 2)
    while score.finish_reason is None:
        engine.step()
        assert score.pieces[: len(kept)] == kept
        kept = [*score.pieces]
    assert engine.scheduler.preemptions > 0 and kept[-1].usage.completion_tokens == len(ids)
    same(score.result(), expected)
    same(older.result(), alone(prompt_of(0, 17), "greedy", 60))
    engine.scheduler.assert_consistent()


def test_rewound_rows_are_no_requests(small, alone):
    params = SamplingParams(temperature=0, seed=1)
    rewind(small, [20, 3], params, rows=2)
    for _ in range(3):
        enqueue(small, params, rows=2)
    assert small.model.workspace.meta[:3, 32].tolist()[:2] == [23, 6]
    same(small.generate(prompt_of(0, 17), params_of("greedy", 20)), alone(prompt_of(0, 17), "greedy", 20))
    small.scheduler.assert_consistent()


# ---- prompts that share passes


@pytest.fixture(scope="module")
def reader():
    """An engine of so many slots and tokens of prompts in a pass, and what it reads: (chunks, tokens, decoding)."""

    @cache
    def reader(slots, chunk):
        engine, log = engine_of(slots=slots, page=16, chunk_tokens=chunk), []
        read = engine.prompts.read

        def logged(chunks, tokens, decoding):
            log.append((tuple(chunks), tokens, decoding))
            read(chunks, tokens, decoding)

        engine.prompts.read = logged
        return engine, log

    return reader


def check_reads(log, chunk, lengths) -> None:
    """Each position of each prompt was read once, in order, in passes of at most `chunk` tokens whose rows stand
    without gaps behind those that decode; but for a last position that a decode pass took."""
    reached, prompts = {}, []
    for chunks, tokens, decoding in log:
        assert 0 < sum(each.count for each in chunks) == tokens <= chunk
        assert len({each.slot for each in chunks}) == len(chunks)
        first = decoding
        for each in chunks:
            assert each.first == first and each.count > 0 and each.start in (0, reached.get(each.slot))
            if each.start == 0 and each.slot in reached:
                prompts.append(reached[each.slot])
            reached[each.slot] = each.end
            first = each.rows.stop
    ends, wanted = sorted(prompts + list(reached.values())), sorted(length for length in lengths if length > 1)
    assert len(ends) == len(wanted), "a prompt was not read, or twice"
    assert sum(wanted) - len(wanted) <= sum(ends) <= sum(wanted)


PROMPT = st.tuples(
    st.one_of(st.integers(1, 9), st.integers(1, 80)), st.sampled_from(sorted(PARAMS)), st.sampled_from([1, 4, 15]),
    st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.sampled_from([(2, 1), (2, 3), (4, 7), (8, 24), (8, 96), (16, 48)]), ahead=st.integers(0, 1),
    decoding=st.integers(0, 3), prompts=st.lists(PROMPT, min_size=1, max_size=20),
)  # fmt: skip
def test_prompts_of_any_lengths_in_chunks_of_any_size_beside_any_neighbours(
    reader, alone, sizes, ahead, decoding, prompts
):
    """prompts: length, kind of sampling, tokens to draw, and steps until the next one comes."""
    engine, log = reader(*sizes)
    log.clear()
    scheduler = engine.scheduler
    scheduler._ahead = 1 if CUDA else ahead
    wanted = [(prompt_of(base, 5 + base), "sampled", 60) for base in range(min(decoding, sizes[0] - 1))]
    requests = [engine.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in wanted]
    while not all(request.completion_tokens for request in requests):
        scheduler.step()
    for i, (length, kind, most, steps) in enumerate(prompts):
        wanted.append((prompt_of(i % 3, length), kind, most))
        requests.append(engine.submit(wanted[-1][0], params_of(kind, most), reuse_prefix=False))
        for _ in range(steps):
            scheduler.step()
            scheduler.assert_consistent()
    finish(scheduler)
    for request, expected in zip(requests, wanted):
        same(request.result(), alone(*expected))
    check_reads(log, sizes[1], [len(prompt) for prompt, *_ in wanted])


def test_as_many_short_prompts_as_there_are_slots_take_one_pass(reader, alone):
    engine, log = reader(16, 48)
    log.clear()
    wanted = [(prompt_of(i % 3, 3), sorted(PARAMS)[i % 4], 9) for i in range(16)]
    requests = [engine.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in wanted]
    finish(engine.scheduler)
    for request, expected in zip(requests, wanted):
        same(request.result(), alone(*expected))
    ((chunks, tokens, decoding),) = log
    assert (len(chunks), tokens, decoding) == (16, 48, 0)


def test_a_prompt_that_is_cut_leaves_the_rest_of_a_pass_to_the_next_one(reader, alone):
    """First come, first served: the last part of a prompt shares its pass with the beginning of the next."""
    engine, log = reader(4, 7)
    log.clear()
    wanted = [(prompt_of(base, 10), "greedy", 4) for base in range(3)]
    requests = [engine.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in wanted]
    finish(engine.scheduler)
    for request, expected in zip(requests, wanted):
        same(request.result(), alone(*expected))
    assert [[(each.start, each.count) for each in chunks] for chunks, *_ in log] == [
        [(0, 7)], [(7, 3), (0, 4)], [(4, 6), (0, 1)], [(1, 7)], [(8, 2)],
    ]  # fmt: skip


# ---- interrupts


class Interrupts:
    """Raises KeyboardInterrupt before the instruction `at` of serve/ and state/, except for the driver and its lock."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def __call__(self, frame, event, arg):
        path = frame.f_code.co_filename
        if "/tridecode/state/" not in path and ("/tridecode/serve/" not in path or path.endswith("driver.py")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.count += 1
            if self.count == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self):
        sys._getframe().f_trace_opcodes = True  # Python 3.12 heeds it only where one was set before it begins to trace
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        return bool(error[0]) and issubclass(error[0], KeyboardInterrupt)


INTERRUPTED = [(prompt_of(0, 17), "penalties", 40), (prompt_of(1, 40), "sampled", 40), (prompt_of(2, 5), "logprobs", 9)]


@pytest.mark.parametrize("driven", ["scheduler", "stream"])
def test_an_interrupt_anywhere_harms_nobody_else(small, alone, driven):
    """Whoever steps when it comes loses his own request; no page is lost, no token of another one."""

    def run(at):
        requests = [small.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in INTERRUPTED]
        own = small.submit(prompt_of(1, 3), params_of("greedy", 30)) if driven == "stream" else None
        with Interrupts(at) as interrupts:
            if own:
                for _ in own:
                    pass
            else:
                while small.scheduler.queue.requests:
                    small.scheduler.step()
        small.scheduler.assert_consistent()
        finish(small.scheduler)
        for request, expected in zip(requests, INTERRUPTED):
            same(request.result(), alone(*expected))
        if own and interrupts.count == at:
            ended = alone(prompt_of(1, 3), "greedy", 30).finish_reason  # before the interrupt
            assert own.finish_reason in ("cancelled", ended)
        return interrupts.count

    total = run(0)
    assert total > 10_000
    for at in range(1, total, total // (120 if CUDA else 60)):
        run(at)


def test_an_interrupt_that_is_interrupted(small, alone):
    request = small.submit(prompt_of(0, 17), params_of("sampled", 30))
    with Interrupts(3000):
        request.result()
    assert request.finish_reason == "cancelled"
    request = small.submit(prompt_of(0, 17), params_of("sampled", 30), reuse_prefix=False)
    for at in (3000, 40, 300, 70):
        with Interrupts(at):
            for _ in range(100):
                small.scheduler.step()
    same(request.result(), alone(prompt_of(0, 17), "sampled", 30))
    small.scheduler.assert_consistent()


# ---- many


def test_many_requests_leave_nothing_behind(alone, monkeypatch):
    total = 10_000 if CUDA else 500
    engine = engine_of(slots=16, page=16, pages=40, chunk_tokens=32)
    kinds = sorted(PARAMS)
    wanted = [
        (prompt_of(i % 3, (1, 5, 16, 17, 40)[i * 7 % 5], i % 41 == 40), kinds[i % 4], (1, 3, 9, 20)[i * 11 % 4])
        for i in range(total)
    ]
    alive, seen, make = WeakSet(), [], engine._request
    monkeypatch.setattr(engine, "_request", lambda *args, **options: alive.add(made := make(*args, **options)) or made)

    def look(done, total):
        if done > total // 2 and not seen or done == total:
            gc.collect()
            seen.append((len(alive), torch.cuda.memory_allocated() if CUDA else 0))

    results = engine.generate_many(
        [ids for ids, *_ in wanted], [params_of(*rest) for _, *rest in wanted], progress=look, reuse_prefix=False
    )
    for result, expected in zip(results, wanted):
        same(result, alone(*expected))
    engine.scheduler.assert_consistent()
    (half, bytes_then), (last, bytes_now) = seen
    assert half <= 2 * 16 and last <= 1 and bytes_now == bytes_then
