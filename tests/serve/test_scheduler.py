"""Scheduler: any sequence of submissions, cancellations and preemptions leaves tokens unchanged and loses no page.

The engines use fp32, so that tokens do not depend on the rows of a pass. On a machine without a GPU the tests still
let the scheduler keep a pass in flight, so that it behaves as on a GPU.
"""

import gc
import sys
import weakref
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
from tridecode.errors import QueueFull

POISON = 301  # The embedding of this token is NaN.
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
    """Build an engine in fp32 with small pages, and with the token POISON, whose embedding is NaN."""
    engine = tiny_engine(
        dtype=torch.float32, capacity=capacity, tie_word_embeddings=False, num_layers=1, build=build | {"slots": slots}
    )
    # The CPU makes the weights, because sampled tokens depend on them and must be equal on all machines.
    weights = engine.model.weights.tensors()
    for name, tensor in random_weights(engine.config, torch.device("cpu"), torch.float32, seed=0).tensors().items():
        weights[name].copy_(tensor)
    engine.model.weights.embed[POISON] = float("nan")
    engine.scheduler.lookahead = ahead
    # A second thread would cost more time than it saves, because the operations of a tiny model are short.
    engine.threads = 1
    return engine


@pytest.fixture(scope="module")
def run_alone():
    """Return the result of a request with these arguments in a separate engine."""
    engine = engine_of()

    @cache
    def run_alone(prompt, kind, max_tokens, stop=None):
        return engine.generate(prompt, params_of(kind, max_tokens, stop), reuse_prefix=False)

    return run_alone


@cache
def params_of(kind: str, max_tokens: int, stop: int | None = None) -> SamplingParams:
    return replace(PARAMS[kind], max_tokens=max_tokens, stop_token_ids=() if stop is None else (stop,))


@cache
def prompt_of(base: int, length: int, poisoned: bool = False) -> tuple[int, ...]:
    """Return the first `length` tokens of conversation `base`, with POISON before the last token if `poisoned`."""
    ids = [(base * 97 + i * (13 + base)) % 300 for i in range(length)]
    return tuple(ids[:-1] + [POISON] + ids[-1:] if poisoned else ids)


def same(result, expected) -> None:
    assert (result.token_ids, result.finish_reason, result.error) == (
        expected.token_ids, expected.finish_reason, expected.error,
    )  # fmt: skip
    assert result.usage.prompt_tokens == expected.usage.prompt_tokens
    for actual, other in zip(result.logprobs or (), expected.logprobs or ()):
        assert actual.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [token for token, _ in actual.top] == [token for token, _ in other.top]


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
    """An engine with three slots, and pages for little more than one request."""
    return engine_of(slots=3, page=16, pages=7, chunk_tokens=24, max_queue=4)


@settings(max_examples=300, deadline=None)
@given(actions=st.lists(ACTION, min_size=4, max_size=24), ahead=st.integers(0, 1))
def test_any_schedule_gives_the_tokens_of_single_requests(small, run_alone, actions, ahead):
    scheduler, requests, cancelled = small.scheduler, [], set()
    scheduler.lookahead = 1 if CUDA else ahead
    for action, value in actions:
        if action == "submit":
            base, length, kind, most, reuse, special = value
            prompt, params = prompt_of(base, length, poisoned=special == 9), (kind, most)
            if special < 3:
                tokens = run_alone(prompt, *params).token_ids
                params = (*params, tokens[special * len(tokens) // 3])
            full = len(scheduler.queue.requests) == 3 + 4
            try:
                request = small.submit(prompt, params_of(*params), reuse_prefix=reuse)
                requests.append((request, prompt, params))
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
    for number, (request, prompt, params) in enumerate(requests):
        result, expected = request.result(), run_alone(prompt, *params)
        if number in cancelled:
            assert result.finish_reason == "cancelled"
            assert result.token_ids == expected.token_ids[: len(result.token_ids)]
        else:
            same(result, expected)


def test_request_that_waits_for_pages_is_matched_once(monkeypatch):
    """The prefix cache is searched again for the request only when pages may have become free."""
    small, looked = engine_of(slots=2, page=16, pages=7), []
    first, second = (small.submit(prompt_of(base, 60), params_of("greedy", 30)) for base in (0, 1))
    slots, admit = small.scheduler.slots, small.scheduler.slots.admit
    monkeypatch.setattr(slots, "admit", lambda *args: looked.append(first.finish_reason) or admit(*args))
    finish(small.scheduler)
    assert len(second.result().token_ids) == 30 and small.scheduler.preemptions == 0
    assert looked.count(None) <= 3, "requests that waited for pages were matched too often"
    assert len(looked) == looked.count(None) + 1


@settings(max_examples=100, deadline=None)
@given(actions=st.lists(ACTION, min_size=4, max_size=24))
def test_request_is_admitted_as_soon_as_pages_are_free(small, actions):
    scheduler, queue, requests = small.scheduler, small.scheduler.queue, []
    for action, value in actions:
        if action == "submit" and len(queue.requests) < 3 + 4:
            base, length, kind, most, reuse, special = value
            prompt = prompt_of(base, length, poisoned=special == 9)
            requests.append(small.submit(prompt, params_of(kind, most), reuse_prefix=reuse))
        elif action == "step":
            for _ in range(value):
                scheduler.step()
                if queue._blocked and not queue.admit():
                    queue._blocked = None
                    assert not queue.admit()
        elif requests:
            requests[value % len(requests)].cancel()
    finish(scheduler)


def spied(monkeypatch, owner, name, log):
    """Append (name, arguments) to `log` before each call of owner.name."""
    function = getattr(owner, name)

    def spy(*args, **kwargs):
        log.append((name, (*args, *kwargs.values())))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, spy)


@pytest.mark.parametrize("kind", PARAMS)
def test_preempted_request_resumes_with_the_same_tokens(small, run_alone, kind):
    """Two requests need ten pages, and there are seven.

    The younger one waits, and then continues after its last token.
    """
    before = small.scheduler.preemptions
    cases = [(prompt_of(base, 17), kind, 60) for base in (0, 1)]
    requests = [small.submit(prompt, params_of(*rest)) for prompt, *rest in cases]
    same(requests[0].result(), run_alone(*cases[0]))
    assert small.scheduler.preemptions == before + 1 and len(requests[1].chunks) < 50, (
        "the younger request was not preempted exactly once"
    )
    finish(small.scheduler)
    same(requests[1].result(), run_alone(*cases[1]))
    assert requests[1].result().usage.reused_tokens <= 16


def test_unused_pages_are_evicted_before_a_request_is_preempted(small, run_alone):
    before, cache = small.scheduler.preemptions, small.scheduler.slots.cache
    cache.clear()
    for base in (0, 1, 2):
        small.generate(prompt_of(base, 20), params_of("greedy", 10))
    assert len(cache.pages()) == 6
    same(small.generate(prompt_of(3, 40), params_of("greedy", 50)), run_alone(prompt_of(3, 40), "greedy", 50))
    assert small.scheduler.preemptions == before and len(cache.pages()) <= 7
    assert cache.match(prompt_of(3, 40)).tokens(16) == 40


def test_slot_grows_one_page_at_a_time(run_alone):
    """Eight slots share seven pages: a long request gets its pages one at a time, at most 16 positions in advance."""
    engine, prompt = engine_of(slots=8, page=16, pages=7), prompt_of(0, 5)
    request, used = engine.submit(prompt, params_of("greedy", 90), reuse_prefix=False), []
    while engine.step():
        load = engine.scheduler.load()
        used.append(load.pages - load.free_pages)
        assert used[-1] <= (5 + len(request.chunks)) // 16 + 2
    assert max(used) == 6 and all(after - before in (0, 1) for before, after in zip(used, used[1:]) if after)
    same(request.result(), run_alone(prompt, "greedy", 90))
    engine.scheduler.assert_consistent()


@pytest.mark.parametrize("ahead", [1] if CUDA else [0, 1])
def test_rows_decode_while_a_prompt_is_read(small, monkeypatch, ahead):
    scheduler, log = small.scheduler, []
    monkeypatch.setattr(scheduler, "lookahead", ahead)
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
    assert passes.startswith("cf") and passes[2:].strip("p") == "cfcfcf", (
        "the decoding row was not part of a pass that reads a chunk"
    )
    enqueued, seen, slot = 0, 0, next(args[0] for name, args in log if name == "entry")
    for name, args in log:
        enqueued += name in ("replay", "finish")
        seen = args[2] + 1 if name == "entry" and args[0] == slot else seen
        assert enqueued - seen <= ahead + 1, "more passes were in flight than lookahead allows"


def test_rows_stay_contiguous_when_requests_end(small, run_alone, monkeypatch):
    log, scheduler = [], small.scheduler
    spied(monkeypatch, small.steps, "replay", log)
    spied(monkeypatch, small.prompts, "finish", log)
    cases = [(prompt_of(base, 5), *rest) for base, rest in enumerate((("sampled", 3), ("greedy", 9), ("penalties", 6)))]
    requests = [small.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in cases]
    finish(scheduler)
    for request, expected in zip(requests, cases):
        same(request.result(), run_alone(*expected))
    passes = [args[:2] for _, args in log]
    assert passes[0] == ("sample", 3) and ("sample", 2) in passes and passes[-1] == ("greedy", 1)


def test_request_with_nan_fails_alone(small, run_alone):
    bad = [(prompt_of(0, 20, True), "greedy", 9), (prompt_of(1, 1, True), "sampled", 9)]
    good = [(prompt_of(1, 20), "greedy", 20), (prompt_of(2, 17), "penalties", 20)]
    cases = [bad[0], good[0], bad[1], good[1]]
    results = small.generate_many([ids for ids, *_ in cases], [params_of(*rest) for _, *rest in cases])
    for result, expected in zip(results, cases):
        same(result, run_alone(*expected))
    assert [result.finish_reason for result in results] == ["error", "length", "error", "length"]
    small.scheduler.assert_consistent()
    cached = [small.scheduler.slots.cache.match(ids).tokens(16) for ids, *_ in bad]
    assert all(tokens <= ids.index(POISON) for tokens, (ids, *_) in zip(cached, bad))


def test_prompt_without_memory_fails_alone(small, run_alone, monkeypatch):
    read = small.prompts.read

    def full(chunks, tokens, *rest):
        if any(chunk.end == 17 for chunk in chunks):
            raise RuntimeError("CUDA out of memory")
        read(chunks, tokens, *rest)

    monkeypatch.setattr(small.prompts, "read", full)
    good = small.submit(prompt_of(0, 20), params_of("greedy", 20))
    bad = small.submit(prompt_of(1, 17), params_of("greedy", 20), reuse_prefix=False)
    same(good.result(), run_alone(prompt_of(0, 20), "greedy", 20))
    assert bad.finish_reason == "error"
    with pytest.raises(RuntimeError, match="out of memory"):
        bad.result()
    (failed,) = small.generate_many([prompt_of(1, 17)], params_of("greedy", 20), reuse_prefix=False)
    assert (failed.finish_reason, failed.error) == ("error", "RuntimeError: CUDA out of memory")
    small.scheduler.assert_consistent()


def test_failed_request_keeps_no_memory_of_its_pass(small, monkeypatch):
    """The error keeps the text of its traceback, but not the frames."""

    class Buffer:
        pass

    def full(*args):
        buffer = Buffer()
        buffers.append(weakref.ref(buffer))
        try:
            raise ValueError("first error")
        except ValueError:
            raise RuntimeError("CUDA out of memory")  # noqa: B904

    buffers: list[weakref.ref] = []
    monkeypatch.setattr(small.prompts, "read", full)
    request = small.submit(prompt_of(1, 17), params_of("greedy", 20), reuse_prefix=False)
    with pytest.raises(RuntimeError, match="out of memory") as raised:
        request.result()
    gc.collect()
    assert buffers and not any(buffer() for buffer in buffers)
    assert "in full" in "".join(raised.value.__notes__)


def test_failed_request_yields_its_earlier_tokens(run_alone, monkeypatch):
    """A preempted request has tokens; then the pass that reads its prompt again fails."""
    engine = engine_of(slots=2, page=16, pages=7)
    read, got = engine.prompts.read, []

    def full(chunks, tokens, *rest):
        if engine.scheduler.preemptions:
            raise RuntimeError("CUDA out of memory")
        read(chunks, tokens, *rest)

    monkeypatch.setattr(engine.prompts, "read", full)
    requests = [engine.submit(prompt_of(base, 30), params_of("greedy", 60), reuse_prefix=False) for base in range(2)]
    finish(engine.scheduler)
    assert [request.finish_reason for request in requests] == ["length", "error"]
    with pytest.raises(RuntimeError, match="out of memory"):
        for chunk in requests[1]:
            got.append(chunk.token_id)
    assert got and tuple(got) == run_alone(prompt_of(1, 30), "greedy", 60).token_ids[: len(got)]


def test_each_conversation_reuses_its_own_pages(small):
    """Two conversations begin with the same tokens; each of them reuses its own pages."""
    greedy = params_of("greedy", 5)
    system = list(prompt_of(0, 4))
    first = system + list(prompt_of(1, 10))
    second = system + list(prompt_of(2, 10))
    first += [*small.generate(first, greedy).token_ids, 9]
    second += [*small.generate(second, greedy).token_ids, 9]
    assert small.generate(first, greedy).usage.reused_tokens == len(first) - 2
    assert small.generate(second, greedy).usage.reused_tokens == len(second) - 2


def test_reading_reports_consistent_progress(run_alone):
    """A preempted request reads its output too, so its total grows beyond the prompt."""
    engine, reports = engine_of(slots=2, page=16, pages=7, chunk_tokens=8), set()
    requests = [engine.submit(prompt_of(base, 30), params_of("greedy", 60)) for base in range(2)]
    while engine.step():
        reports.add(engine.scheduler.reading())
    reports -= {None}
    assert engine.scheduler.preemptions and all(0 <= reused <= read <= total for reused, read, total in reports)
    assert max(total for _, _, total in reports) > 30
    for base, request in enumerate(requests):
        same(request.result(), run_alone(prompt_of(base, 30), "greedy", 60))


def test_preempted_score_keeps_its_pieces(run_alone):
    """The list of pieces never becomes shorter, because a reader may have consumed some of them."""
    engine = engine_of(slots=2, page=16, pages=7)
    ids, kept = prompt_of(2, 80), []
    expected = engine.submit_score(ids, 2).result()
    older = engine.submit(prompt_of(0, 17), params_of("greedy", 60))
    score = engine.submit_score(ids, 2)
    while score.finish_reason is None:
        engine.step()
        assert score.chunks[: len(kept)] == kept
        kept = [*score.chunks]
    assert engine.scheduler.preemptions > 0 and kept[-1].usage.completion_tokens == len(ids)
    same(score.result(), expected)
    same(older.result(), run_alone(prompt_of(0, 17), "greedy", 60))
    engine.scheduler.assert_consistent()


# ---- prompts that share passes


@pytest.fixture(scope="module")
def reader():
    """Return an engine with these slots and this chunk size, and its log of prompt passes."""

    @cache
    def reader(slots, chunk):
        engine, log = engine_of(slots=slots, page=16, chunk_tokens=chunk), []
        read = engine.prompts.read

        def logged(chunks, tokens, decoding, *rest):
            log.append((tuple(chunks), tokens, decoding))
            read(chunks, tokens, decoding, *rest)

        engine.prompts.read = logged
        return engine, log

    return reader


def check_reads(log, chunk, lengths) -> None:
    """Check that each position of each prompt was read once, in order.

    Each pass reads at most `chunk` tokens, whose rows follow the decoding rows without gaps. A decode pass may read the
    last position of a prompt instead.
    """
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
    ends, expected = sorted(prompts + list(reached.values())), sorted(length for length in lengths if length > 1)
    assert len(ends) == len(expected), "a prompt was not read, or was read twice"
    assert sum(expected) - len(expected) <= sum(ends) <= sum(expected)


PROMPT = st.tuples(
    st.one_of(st.integers(1, 9), st.integers(1, 80)), st.sampled_from(sorted(PARAMS)), st.sampled_from([1, 4, 15]),
    st.integers(0, 3),
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.sampled_from([(2, 1), (2, 3), (4, 7), (8, 24), (8, 96), (16, 48)]), ahead=st.integers(0, 1),
    decoding=st.integers(0, 3), prompts=st.lists(PROMPT, min_size=1, max_size=20),
)  # fmt: skip
def test_prompts_of_any_length_chunk_size_and_batch(reader, run_alone, sizes, ahead, decoding, prompts):
    """Each prompt is (length, kind of sampling, tokens to sample, steps until the next submission)."""
    engine, log = reader(*sizes)
    log.clear()
    scheduler = engine.scheduler
    scheduler.lookahead = 1 if CUDA else ahead
    cases = [(prompt_of(base, 5 + base), "sampled", 60) for base in range(min(decoding, sizes[0] - 1))]
    requests = [engine.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in cases]
    while not all(request.completion_tokens for request in requests):
        scheduler.step()
    for i, (length, kind, most, steps) in enumerate(prompts):
        cases.append((prompt_of(i % 3, length), kind, most))
        requests.append(engine.submit(cases[-1][0], params_of(kind, most), reuse_prefix=False))
        for _ in range(steps):
            scheduler.step()
            scheduler.assert_consistent()
    finish(scheduler)
    for request, expected in zip(requests, cases):
        same(request.result(), run_alone(*expected))
    check_reads(log, sizes[1], [len(prompt) for prompt, *_ in cases])


def test_chunks_of_two_prompts_share_a_pass(reader, run_alone):
    """The last chunk of a prompt shares its pass with the first chunk of the next prompt."""
    engine, log = reader(4, 7)
    log.clear()
    cases = [(prompt_of(base, 10), "greedy", 4) for base in range(3)]
    requests = [engine.submit(prompt, params_of(*rest), reuse_prefix=False) for prompt, *rest in cases]
    finish(engine.scheduler)
    for request, expected in zip(requests, cases):
        same(request.result(), run_alone(*expected))
    assert [[(each.start, each.count) for each in chunks] for chunks, *_ in log] == [
        [(0, 7)], [(7, 3), (0, 4)], [(4, 6), (0, 1)], [(1, 7)], [(8, 2)],
    ]  # fmt: skip


# ---- interrupts


class Interrupts:
    """A tracer that raises KeyboardInterrupt before instruction `at` of serve/ and state/, except in the driver."""

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
        sys._getframe().f_trace_opcodes = True  # Python 3.12 requires this before tracing starts
        sys.settrace(self)
        return self

    def __exit__(self, *error):
        sys.settrace(None)
        return bool(error[0]) and issubclass(error[0], KeyboardInterrupt)


INTERRUPTED = [(prompt_of(0, 17), "penalties", 40), (prompt_of(1, 40), "sampled", 40), (prompt_of(2, 5), "logprobs", 9)]


@pytest.mark.parametrize("driven", ["scheduler", "stream"])
def test_interrupt_anywhere_affects_no_other_request(small, run_alone, driven):
    """The interrupted thread loses its own request only: other requests lose no token, and no page is lost."""

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
            same(request.result(), run_alone(*expected))
        if own and interrupts.count == at:
            # The request may have ended before the interrupt.
            ended = run_alone(prompt_of(1, 3), "greedy", 30).finish_reason
            assert own.finish_reason in ("cancelled", ended)
        return interrupts.count

    total = run(0)
    assert total > 10_000
    for at in range(1, total, total // (120 if CUDA else 40)):
        run(at)


def test_repeated_interrupts_during_recovery(small, run_alone):
    request = small.submit(prompt_of(0, 17), params_of("sampled", 30))
    with Interrupts(3000):
        request.result()
    assert request.finish_reason == "cancelled"
    request = small.submit(prompt_of(0, 17), params_of("sampled", 30), reuse_prefix=False)
    for at in (3000, 40, 300, 70):
        with Interrupts(at):
            for _ in range(100):
                small.scheduler.step()
    same(request.result(), run_alone(prompt_of(0, 17), "sampled", 30))
    small.scheduler.assert_consistent()


# ---- many


def test_many_requests_leak_no_memory(run_alone, monkeypatch):
    total = 10_000 if CUDA else 500
    engine = engine_of(slots=16, page=16, pages=40, chunk_tokens=32)
    kinds = sorted(PARAMS)
    cases = [
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
        [ids for ids, *_ in cases], [params_of(*rest) for _, *rest in cases], progress=look, reuse_prefix=False
    )
    for result, expected in zip(results, cases):
        same(result, run_alone(*expected))
    engine.scheduler.assert_consistent()
    (half, bytes_then), (last, bytes_now) = seen
    assert half <= 2 * 16 and last <= 1 and bytes_now == bytes_then
