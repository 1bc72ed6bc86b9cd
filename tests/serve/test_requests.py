"""Requests in Python: submission, threads, cancellation, limits and closing the engine."""

import gc
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pytest
import torch
from models import CUDA, tiny_engine

from tridecode import Engine, Request, SamplingParams
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.errors import EngineClosed, GenerationError, ParameterError, QueueFull
from tridecode.layout import MAX_STOP_IDS
from tridecode.serve import driver, output
from tridecode.serve.masks import Masks
from tridecode.serve.scheduler import Scheduler

PROMPTS = [[5, 17, 300, 42, 8, 8, 99], [1, 2], [200, 100, 50, 25], [7] * 30, [9, 9, 8]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
LONG = SamplingParams(temperature=0.0, max_tokens=200)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.95, seed=11, max_tokens=12)


def build(slots, **options):
    engine = tiny_engine(dtype=torch.float32, num_layers=1, build={"slots": slots} | options)
    engine.threads = 1
    return engine


@pytest.fixture(scope="module")
def run_alone():
    engine = build(1)
    return lambda prompt, params=GREEDY: engine.generate(prompt, params, reuse_prefix=False).token_ids


@pytest.fixture(scope="module")
def engine():
    return build(2)


@pytest.fixture(autouse=True)
def consistent(engine):
    yield
    gc.collect()
    if engine.scheduler.queue.requests:  # If a request is dropped during a step, the next step cancels it.
        engine.generate([1], GREEDY)
    assert not engine.scheduler.queue.requests
    engine.scheduler.assert_consistent()


@contextmanager
def stepping(engine):
    """Hold the lock of an engine, as a thread does while it steps."""
    with engine._driver._lock:
        yield


def tokens(pieces) -> tuple[int, ...]:
    return tuple(piece.token_id for piece in pieces if piece.token_id is not None)


def test_request_can_be_iterated_and_awaited(engine, run_alone):
    request = engine.submit(PROMPTS[0], GREEDY)
    assert isinstance(request, Request) and request.finish_reason is None
    assert repr(request) == "Request(prompt_tokens=7, finish_reason=None)"
    pieces = list(request)
    assert tokens(pieces) == run_alone(PROMPTS[0]) == request.result().token_ids == tokens(request)
    assert pieces[-1].finish_reason == request.finish_reason == "length"
    assert request.result().usage.completion_tokens == 12 and request.result().timings.ttft > 0
    assert not request.cancel() and request.finish_reason == "length", "a request that had ended was cancelled"


def test_waiting_for_one_request_advances_all(engine, run_alone):
    first, second = (engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2])
    assert second.result().token_ids == run_alone(PROMPTS[1])
    assert len(first.chunks) >= 11, "the first request did not run at the same time as the second one"
    assert first.result().token_ids == run_alone(PROMPTS[0])


def test_requests_beyond_the_slots_wait_in_order(engine, run_alone):
    requests = [engine.submit(prompt, SAMPLED) for prompt in PROMPTS]
    assert requests[-1].result().token_ids == run_alone(PROMPTS[-1], SAMPLED)
    assert [request.finish_reason for request in requests] == ["length"] * 5
    assert [request.result().token_ids for request in requests] == [run_alone(prompt, SAMPLED) for prompt in PROMPTS]


# ---- ends


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_cancelled_request_ends_with_a_last_output_chunk(engine, run_alone, taken):
    request = engine.submit(PROMPTS[0], LONG)
    pieces = iter(request)
    read = [next(pieces) for _ in range(taken)]
    assert request.cancel() and request.finish_reason == "cancelled"
    *rest, last = pieces
    assert tokens([*read, *rest]) == run_alone(PROMPTS[0])[: taken + len(rest)]
    assert last.finish_reason == "cancelled" and last.usage.completion_tokens == taken + len(rest)
    assert last.timings.ttft > 0 and request.result().finish_reason == "cancelled"
    assert not request.cancel()


def test_cancel_of_a_waiting_request(engine, run_alone):
    running = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
    waiting, after = (engine.submit(prompt, GREEDY) for prompt in PROMPTS[2:4])
    next(iter(running[0]))
    assert waiting.cancel() and waiting.result().token_ids == ()
    assert after.result().token_ids == run_alone(PROMPTS[3])


def dropped_request(engine):
    engine.submit(PROMPTS[0], LONG)


def dropped_iterator(engine):
    next(engine.stream(PROMPTS[0], LONG))


def iterator_never_read(engine):
    engine.stream(PROMPTS[0], LONG)


def closed_iterator(engine):
    stream = engine.stream(PROMPTS[0], LONG)
    next(stream)
    stream.close()


def left_loop(engine):
    for _ in engine.submit(PROMPTS[0], LONG):
        break


def garbage_in_a_circle(engine):
    circle = [engine.stream(PROMPTS[0], LONG)]
    next(circle[0])
    circle.append(circle)
    del circle
    gc.collect()


def waiting_garbage_in_a_circle(engine):
    other, circle = engine.submit(PROMPTS[1], GREEDY), [engine.submit(PROMPTS[0], LONG)]
    engine.step()
    circle.append(circle)
    del circle
    gc.collect()
    other.result()


def garbage_within_a_step(engine, circle=False):
    active, replay = [[engine.submit(PROMPTS[0], LONG)]], engine.steps.replay
    if circle:
        active[0].append(active[0])

    def collecting(*args):
        active.clear()
        gc.collect()
        replay(*args)

    engine.steps.replay = collecting
    engine.generate(PROMPTS[1], GREEDY)
    engine.steps.replay = replay


def garbage_in_a_circle_before_it_is_in_the_queue(engine):
    with stepping(engine):
        active = [engine.submit(PROMPTS[1], LONG)]
        active.append(active)
        del active
        gc.collect()


def garbage_in_a_circle_within_a_step(engine):
    garbage_within_a_step(engine, circle=True)
    gc.collect()


@pytest.mark.parametrize(
    "drop",
    [
        dropped_request, dropped_iterator, iterator_never_read, closed_iterator, left_loop, garbage_in_a_circle,
        waiting_garbage_in_a_circle, garbage_within_a_step, garbage_in_a_circle_within_a_step,
        garbage_in_a_circle_before_it_is_in_the_queue,
    ],
)  # fmt: skip
def test_unreferenced_request_is_cancelled(engine, run_alone, drop):
    neighbor = engine.submit(PROMPTS[2], SAMPLED)
    drop(engine)
    assert neighbor.result().token_ids == run_alone(PROMPTS[2], SAMPLED)
    assert not engine.scheduler.queue.requests and not any(slot.busy for slot in engine.scheduler.slots)


def test_a_thread_with_another_stream_leaves_the_cancellation_to_the_next_step(engine, monkeypatch):
    first, second = (engine.submit(prompt, LONG) for prompt in PROMPTS[:2])
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(driver, "_on_other_stream", lambda: True)
        first.driver.drop(first)
        assert len(engine.scheduler.queue.requests) == 2
    engine.step()
    assert first.finish_reason == "cancelled" and [*engine.scheduler.queue.requests] == [second.ref]
    second.driver.drop(second)
    assert second.finish_reason == "cancelled"


def test_error_in_progress_cancels_the_requests(engine):
    def broken(done, total):
        raise KeyError("progress")

    with pytest.raises(KeyError) as raised:
        engine.generate_many([PROMPTS[1]] * 6, GREEDY, progress=broken)
    assert raised.value and not engine.scheduler.queue.requests, (
        "requests still run although the exception ended their caller"
    )


# ---- threads


def test_threads_share_an_engine(engine, run_alone):
    results, errors = {}, []

    def run(i):
        try:
            for turn in range(3):
                params = (GREEDY, SAMPLED)[(i + turn) % 2]
                prompt = PROMPTS[(i + turn) % 5]
                if turn == 1:
                    got = tokens(engine.stream(prompt, params))
                else:
                    got = engine.submit(prompt, params).result().token_ids
                results[i, turn] = got == expected[(i + turn) % 5][params is SAMPLED]
        except BaseException as error:
            errors.append(error)

    expected = [(run_alone(prompt), run_alone(prompt, SAMPLED)) for prompt in PROMPTS]
    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and len(results) == 24 and all(results.values())


def test_lock_is_shared_fairly_between_threads(engine, run_alone):
    """A second thread gets its whole answer while the first one reads a long stream without pauses."""
    began, arrived = threading.Event(), []

    def second():
        began.wait(30)
        arrived.append((engine.generate(PROMPTS[1], GREEDY).token_ids, time.perf_counter()))

    thread = threading.Thread(target=second)
    thread.start()
    pieces = engine.stream(PROMPTS[0], LONG)
    next(pieces)
    began.set()
    rest = tokens(pieces)
    ended = time.perf_counter()
    thread.join(30)
    assert len(rest) == 199 and arrived[0][0] == run_alone(PROMPTS[1]) and arrived[0][1] < ended


def test_request_dropped_at_submission_does_not_run(engine, monkeypatch):
    """One request is submitted and dropped while another one is being cancelled."""
    cancel, late = engine.scheduler.cancel, []

    def cancelling(request):
        if not late:
            late.append(engine.submit(PROMPTS[1], LONG))
            late[0].drop()
        return cancel(request)

    first = engine.submit(PROMPTS[0], LONG)
    engine.step()
    monkeypatch.setattr(engine.scheduler, "cancel", cancelling)
    with stepping(engine):
        first.drop()
    while engine.step():
        pass
    assert (late[0].finish_reason, late[0].completion_tokens) == ("cancelled", 0)


def test_last_place_in_the_queue_is_taken_once(run_alone):
    with build(1, max_queue=0) as engine:
        check, there = engine.scheduler.check_queue, threading.Barrier(4)
        engine.scheduler.check_queue = lambda *args: (check(*args), time.sleep(0.01))
        taken = []

        def come():
            there.wait(30)
            with suppress(QueueFull):
                taken.append(engine.submit(PROMPTS[0], GREEDY))

        threads = [threading.Thread(target=come) for _ in range(4)]
        with stepping(engine):
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
        (request,) = taken
        assert request.result().token_ids == run_alone(PROMPTS[0])


def test_close_ends_a_pending_score_with_an_error():
    def scores(end):
        raised, pending, ended = [], threading.Event(), threading.Event()

        def score(own):
            try:
                own.score(PROMPTS[3] * 3)
            except GenerationError as error:
                raised.append(error)

        with build(1) as own:
            wait = own._driver.wait

            def wait_until_ended(ready):
                pending.set()
                assert ended.wait(30)
                wait(ready)

            own._driver.wait = wait_until_ended
            thread = threading.Thread(target=score, args=(own,))
            thread.start()
            assert pending.wait(30)
            end(own)
            ended.set()
            thread.join(30)
        return raised

    (closed,) = scores(Engine.close)
    assert isinstance(closed, EngineClosed)
    (cancelled,) = scores(lambda own: own._driver.exclusively(type(own.scheduler).cancel_all))
    assert "score was cancelled" in str(cancelled) and not isinstance(cancelled, EngineClosed)


def test_requests_end_after_their_engine_is_closed(monkeypatch):
    """Another thread may see that its request has ended before `close` has returned."""
    cancel_all = Scheduler.cancel_all
    with build(1) as own:
        request = own.submit(PROMPTS[0], GREEDY)

        def check(scheduler):
            cancel_all(scheduler)
            assert request.finish_reason == "cancelled"
            with pytest.raises(EngineClosed):
                own.submit(PROMPTS[1], GREEDY)

        monkeypatch.setattr(Scheduler, "cancel_all", check)
        own.close()


def test_stepping_threads_pause_for_close():
    """A thread that steps sees that another thread waits in close, and pauses after its step."""
    with build(1) as own:
        thread, end = threading.Thread(target=own.close), time.monotonic() + 10
        with stepping(own):
            thread.start()
            while thread.ident not in own._driver._waiting_threads:
                assert time.monotonic() < end
                time.sleep(0.001)
        thread.join(30)
        assert not own._driver._waiting_threads and own._driver.scheduler is None


def test_score_in_one_thread_during_a_stream_in_another(engine, run_alone):
    expected, results = engine.score(PROMPTS[3]), []
    thread = threading.Thread(target=lambda: results.append(engine.score(PROMPTS[3])))
    stream = engine.stream(PROMPTS[0], LONG)
    next(stream)
    thread.start()
    assert (next(stream).token_id, *tokens(stream))[:11] == run_alone(PROMPTS[0])[1:]
    thread.join(30)
    assert torch.allclose(results[0], expected, rtol=1e-4, atol=1e-5)


# ---- many


def test_generate_many_returns_results_in_order(engine, run_alone):
    seen = []
    results = engine.generate_many(PROMPTS * 3, SAMPLED, progress=lambda *counts: seen.append(counts))
    assert [result.token_ids for result in results] == [run_alone(prompt, SAMPLED) for prompt in PROMPTS * 3]
    done, totals = zip(*seen)
    assert list(done) == sorted(set(done)) and done[-1] == 15 and set(totals) == {15}
    assert engine.generate_many([]) == []


def test_generate_many_takes_parameters_for_each_prompt(engine, run_alone):
    params = [GREEDY, SAMPLED, LONG, None, GREEDY]
    results = engine.generate_many(PROMPTS, params)
    assert [len(result.token_ids) for result in results][:3] == [12, 12, 200]
    assert results[1].token_ids == run_alone(PROMPTS[1], SAMPLED)


def test_invalid_request_fails_alone(engine, run_alone):
    bad = [
        ([1] * 257, GREEDY, "the prompt has 257 tokens, the context holds 256"),
        ([331], GREEDY, "token id 331 is not in the vocabulary"),
        ([], GREEDY, "the prompt is empty"),
        (b"ab", GREEDY, "got bytes"),
        ([1], SamplingParams(logit_bias={400: 1.0}), "logit_bias: token id 400"),
        ([1], {"temperature": 0}, "params must be a SamplingParams"),
    ]
    prompts = [prompt for pair in zip([prompt for prompt, *_ in bad], PROMPTS * 2) for prompt in pair]
    params = [own for pair in zip([own for _, own, _ in bad], [GREEDY] * 6) for own in pair]
    seen = []
    results = engine.generate_many(prompts, params, progress=lambda *counts: seen.append(counts))
    for result, (_, _, message) in zip(results[::2], bad):
        assert result.finish_reason == "error" and message in result.error and "\n" not in result.error
        assert (result.text, result.token_ids) == ("", ())
    assert [result.token_ids for result in results[1::2]] == [run_alone(prompt) for prompt in (PROMPTS * 2)[:6]]
    assert seen[-1] == (12, 12)


def test_interrupt_of_generate_many_cancels_all_requests(engine):
    def progress(done, total):
        if done >= 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.generate_many(PROMPTS * 2, GREEDY, progress=progress)
    gc.collect()
    assert not engine.scheduler.queue.requests


def test_collected_requests_do_not_block_a_mask_thread(monkeypatch):
    """The garbage collector drops a request in the thread that writes its mask."""
    engine, write = build(1), Masks.write
    begun, unreferenced, written = threading.Event(), threading.Event(), threading.Event()

    def collect(*args):
        begun.set()
        unreferenced.wait(30)
        gc.collect()
        write(*args)
        written.set()

    request = engine.submit(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=12, min_tokens=2))
    while not request.chunks:
        engine.step()
    monkeypatch.setattr(Masks, "write", collect)
    while not begun.is_set():
        engine.step()
    request.cycle = request
    del request
    unreferenced.set()
    assert written.wait(30), "the thread waits for a lock that it holds"
    assert not engine.scheduler.busy
    assert engine.generate(PROMPTS[0], GREEDY).finish_reason == "length"
    engine.scheduler.assert_consistent()


# ---- limits and ends of an engine


def test_full_queue_refuses_only_new_requests(run_alone):
    engine = build(1, max_queue=2)
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:3]]
    for call in (engine.submit, engine.generate, engine.stream):
        with pytest.raises(QueueFull, match="1 request running and 2 waiting; try again later, or raise max_queue"):
            call(PROMPTS[3], GREEDY)
    requests.pop().cancel()
    requests.append(engine.submit(PROMPTS[3], GREEDY))
    assert [request.result().token_ids for request in requests] == [run_alone(PROMPTS[i]) for i in (0, 1, 3)]
    requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
    # The call submits requests until the queue is full, and the others later.
    many = engine.generate_many(PROMPTS, GREEDY)
    assert [result.token_ids for result in many] == [run_alone(prompt) for prompt in PROMPTS]


def test_dropped_request_frees_its_place_in_the_queue(run_alone):
    """A server drops requests while a pass runs; the next step cancels them."""
    engine = build(1, max_queue=0)
    first = engine.submit(PROMPTS[0], LONG)
    for _ in range(2):
        first.drop()  # a second drop has no effect
    second = engine.submit(PROMPTS[1], GREEDY)
    with pytest.raises(QueueFull):
        engine.submit(PROMPTS[2], GREEDY)
    assert second.result().token_ids == run_alone(PROMPTS[1]) and first.finish_reason == "cancelled"


def test_queue_of_length_zero_accepts_one_request_per_slot(run_alone):
    engine = build(2, max_queue=0)
    assert [r.token_ids for r in engine.generate_many(PROMPTS, GREEDY)] == [run_alone(prompt) for prompt in PROMPTS]
    active = [engine.submit(prompt, LONG) for prompt in PROMPTS[:2]]
    (refused,) = engine.generate_many(PROMPTS[:1], GREEDY)
    assert refused.finish_reason == "error" and "the queue is full" in refused.error
    assert all(request.cancel() for request in active)


CALLS = {
    "submit": lambda engine: engine.submit([1]),
    "stream": lambda engine: engine.stream([1]),
    "generate": lambda engine: engine.generate([1]),
    "generate_many": lambda engine: engine.generate_many([[1]]),
    "score": lambda engine: engine.score([1]),
    "encode": lambda engine: engine.encode([1]),
    "rewind": lambda engine: rewind(engine, 3, GREEDY),
    "enqueue": lambda engine: enqueue(engine, GREEDY),
    "synchronize": lambda engine: engine.synchronize(),
    "default_params": lambda engine: engine.default_params(),
    "capacity": lambda engine: engine.capacity,
    "kv_tokens": lambda engine: engine.kv_tokens,
}


def test_close_cancels_requests_and_later_calls_are_refused():
    with build(2) as engine:
        running, waiting = engine.stream(PROMPTS[0], LONG), [engine.submit([1], LONG) for _ in range(3)]
        read = [next(running) for _ in range(3)]
    *rest, last = running
    assert last.finish_reason == "cancelled" and len(read) + len(rest) == 3 == last.usage.completion_tokens
    assert [request.result().finish_reason for request in waiting] == ["cancelled"] * 3
    assert not waiting[0].cancel()
    for name, call in CALLS.items():
        with pytest.raises(EngineClosed, match="^this engine is closed; load another one$"):
            call(engine)
            pytest.fail(name)
    engine.close()
    assert repr(engine) == "Engine(name='', closed)"


def test_submit_does_not_wait_for_a_pass():
    with build(2) as engine:
        with stepping(engine):
            requests = [engine.submit(prompt, GREEDY) for prompt in PROMPTS[:2]]
            assert not engine.scheduler.busy
        assert engine.step() and engine.scheduler.load().requests == 2
        assert all(request.result().finish_reason == "length" for request in requests)


def test_request_submitted_during_close_is_cancelled():
    engine = build(2)
    with stepping(engine):
        request = engine.submit(PROMPTS[0], GREEDY)
    engine.close()
    assert request.finish_reason == "cancelled"
    with pytest.raises(EngineClosed):
        engine.submit(PROMPTS[0], GREEDY)


@pytest.mark.skipif(not CUDA, reason="measures GPU memory")
def test_close_frees_gpu_memory():
    with build(2) as engine:  # Torch keeps the workspaces of cuBLAS, so the test creates them first.
        engine.generate(PROMPTS[0], GREEDY)
    del engine
    gc.collect()
    before = torch.cuda.memory_allocated()
    with build(2) as engine:
        engine.generate(PROMPTS[0], GREEDY)
        assert torch.cuda.memory_allocated() > before
    gc.collect()
    assert torch.cuda.memory_allocated() == before


def test_calls_during_close_raise_engine_closed():
    """Close waits for the GPU; other threads call the engine meanwhile."""
    engine, raised = build(1), []

    def synchronize():
        for call in (engine.capture_next, lambda: engine.scheduler, lambda: engine.submit([1])):
            with pytest.raises(EngineClosed):
                call()
            raised.append(call)

    engine.synchronize = synchronize
    engine.close()
    assert len(raised) == 3


def test_second_close_waits_for_the_first():
    """Two threads close an engine at once. Each returns without an error when the engine is closed."""
    engine, states = build(1), []
    second, synchronize = (
        threading.Thread(target=lambda: (engine.close(), states.append(repr(engine)))),
        engine.synchronize,
    )

    def slow():
        second.start()
        second.join(0.2)  # The second call waits. If it has returned, its state is wrong.
        synchronize()

    engine.synchronize = slow
    engine.close()
    second.join(30)
    assert states == [repr(engine)] == ["Engine(name='', closed)"]


def test_close_wakes_a_waiting_thread(run_alone):
    engine, results = build(1), []
    thread = threading.Thread(target=lambda: results.append(engine.submit(PROMPTS[0], LONG).result()))
    thread.start()
    while not engine.scheduler.queue.rows:
        time.sleep(0.001)
    engine.close()
    thread.join(30)
    (result,) = results
    assert result.finish_reason in ("cancelled", "length")
    assert result.token_ids[:12] == run_alone(PROMPTS[0])[: len(result.token_ids)]


@pytest.fixture(scope="module")
def loaded():
    """Return engines of the bundled model with three slots that share the pages of one, and with one slot."""
    several = Engine.load(device="cpu", max_seq_len=192, slots=3, kv_tokens=192)
    return several, Engine.load(device="cpu", max_seq_len=192)


CHATS = [[{"role": "user", "content": text}] for text in ("Tell me a story", "Who are you?", "Tell me a tale.")]


@pytest.mark.parametrize(
    "params, finish_reason, preempted",
    [
        (SamplingParams(temperature=0, max_tokens=90, ignore_eos=True), "length", True),
        (SamplingParams(temperature=1.5, seed=2, max_tokens=90, ignore_eos=True, stop=["zzz", "the the"]), None, True),
        (SamplingParams(temperature=0, max_tokens=30, stop=["e"]), "stop", False),
    ],
    ids=["greedy", "sampled", "stop strings"],
)
def test_concurrent_requests_return_the_texts_of_single_ones(loaded, params, finish_reason, preempted):
    """Requests are preempted in the middle of a character or of a stop string."""
    several, one = loaded
    before = several.scheduler.preemptions
    assert (several.slots, several.capacity, several.kv_tokens, one.slots, one.kv_tokens) == (3, 192, 192, 1, 192)
    results = several.generate_many(CHATS, params)
    assert [result.text for result in results] == [one.generate(chat, params).text for chat in CHATS]
    assert finish_reason is None or {result.finish_reason for result in results} == {finish_reason}
    assert (several.scheduler.preemptions > before) == preempted
    several.scheduler.assert_consistent()


class FailingReader:
    """A reader that raises an error in one of its methods, at its third token."""

    def __init__(self, method: str):
        self.method, self.fed = method, 0
        if method == "__init__":
            raise GenerationError("the reader fails")

    @property
    def hit(self) -> None:
        if self.method == "hit" and self.fed == 3:
            raise GenerationError("the reader fails")

    def feed(self, token, text):
        self.fed += 1
        if self.method == "feed" and self.fed == 3:
            raise GenerationError("the reader fails")


@pytest.mark.parametrize("method", ["__init__", "feed", "hit"])
def test_errors_of_a_reader_end_only_its_request(loaded, method):
    several, one = loaded
    failing = several.submit(CHATS[0], GREEDY, reader=lambda: FailingReader(method))
    other = several.submit(CHATS[1], GREEDY)
    assert other.result().text == one.generate(CHATS[1], GREEDY).text
    assert failing.finish_reason == "error" and not failing.cancel()
    assert failing.completion_tokens == (0 if method == "__init__" else 2)
    for wait in (failing.result, lambda: [*failing]):
        with pytest.raises(GenerationError, match="the reader fails"):
            wait()
    assert not several.scheduler.busy
    several.scheduler.assert_consistent()


@dataclass(frozen=True)
class FrozenError(Exception):
    reason: str


def test_errors_without_attributes_end_only_their_request(loaded):
    def fail():
        raise FrozenError("the reader fails")

    several, one = loaded
    failing = several.submit(CHATS[0], GREEDY, reader=fail)
    assert several.generate(CHATS[1], GREEDY).text == one.generate(CHATS[1], GREEDY).text
    assert failing.failure == FrozenError("the reader fails")


def test_errors_of_a_reader_after_an_interrupt_end_only_its_request(loaded, monkeypatch):
    """After an interrupt, each request creates its reader again."""
    several, one = loaded
    readers = iter(["", "__init__"])
    failing = several.submit(CHATS[0], GREEDY, reader=lambda: FailingReader(next(readers)))
    other = several.submit(CHATS[1], GREEDY)

    def interrupt(scheduler):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Scheduler, "_drain", interrupt)
        several.step()
    assert other.result().text == one.generate(CHATS[1], GREEDY).text
    with pytest.raises(GenerationError, match="the reader fails"):
        failing.result()
    several.scheduler.assert_consistent()


INVALID = [
    (lambda engine: engine.wait(None), "requests"),
    (lambda engine: engine.wait(engine.submit(PROMPTS[0], GREEDY)), "requests"),
    (lambda engine: engine.wait([5]), "requests"),
    (lambda engine: engine.generate_many("text"), "prompts"),
    (lambda engine: engine.generate_many(5), "prompts"),
    (lambda engine: engine.generate_many([[1], [2]], [GREEDY]), "params"),
    (lambda engine: engine.generate_many([[1]], 5), "params"),
    (lambda engine: engine.generate_many([[1]], progress=5), "progress"),
    (lambda engine: rewind(engine, 5, GREEDY, 3), "rows"),
    (lambda engine: rewind(engine, [5, 6, 7], GREEDY, 2), "position"),
    (lambda engine: rewind(engine, 256, GREEDY), "position"),
    (lambda engine: build(2, page=16, pages=3), "pages"),
]


@pytest.mark.parametrize("call, argument", INVALID)
def test_invalid_arguments_are_refused_by_name(engine, call, argument):
    with pytest.raises(ParameterError, match=f"^{argument}(:| must be)"):
        call(engine)


def test_rows_of_a_benchmark_do_not_change_later_requests(engine, run_alone):
    params = SamplingParams(temperature=0, seed=1)
    rewind(engine, [255, 3], params, rows=2)
    enqueue(engine, params, rows=2)
    assert engine.generate(PROMPTS[0], GREEDY).token_ids == run_alone(PROMPTS[0])


@pytest.mark.parametrize("ends, message", [(True, "ended without a token"), (False, "the GPU hangs")])
def test_pass_without_a_token_raises_an_error(engine, monkeypatch, ends, message):
    """Either the pass ends without a token, or it never ends."""
    monkeypatch.setattr(output, "HANG_TIMEOUT", 0.05)
    monkeypatch.setattr(output.Ring, "_idle", lambda ring: ends)
    monkeypatch.setattr(engine.steps, "replay", lambda *args: None)
    request = engine.submit(PROMPTS[0], GREEDY, reuse_prefix=False)
    with pytest.raises(GenerationError, match=message):
        request.result()
    monkeypatch.undo()
    assert engine.generate(PROMPTS[0], GREEDY).finish_reason == "length", "the engine stopped working"


def test_the_last_of_the_most_stop_ids_ends_the_request(engine, run_alone):
    end = run_alone(PROMPTS[0])[0]
    params = SamplingParams(temperature=0.0, stop_token_ids=[*range(end + 1, end + MAX_STOP_IDS), end])
    result = engine.generate(PROMPTS[0], params, reuse_prefix=False)
    assert (result.token_ids, result.finish_reason) == ((end,), "stop")


def test_late_token_is_awaited(engine, run_alone, monkeypatch):
    """The device is still busy when the thread that waits for a token polls it for the first time."""
    replay, polled, ended = engine.steps.replay, threading.Event(), threading.Event()

    def idle(ring):
        polled.set()
        return ended.is_set()

    def late(*args):
        polled.wait()
        replay(*args)
        engine.synchronize()
        ended.set()

    params = SamplingParams(temperature=0.0, max_tokens=2)
    expected = run_alone(PROMPTS[0], params)
    monkeypatch.setattr(output.Ring, "_idle", idle)
    monkeypatch.setattr(engine.steps, "replay", lambda *args: threading.Thread(target=late, args=args).start())
    assert engine.generate(PROMPTS[0], params, reuse_prefix=False).token_ids == expected
