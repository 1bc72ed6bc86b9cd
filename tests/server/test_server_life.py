"""The server under stress: slow readers, full queues, deadlines, random load, signals and engine failures."""

import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from servers import (
    ANSWER,
    CERTIFICATE,
    ED25519_KEY,
    ENCRYPTED_KEY,
    GREEDY,
    KEY,
    LONG,
    OTHER_KEY,
    Running,
    events,
    slow_passes,
    until,
)

from tridecode import Engine, SamplingParams
from tridecode.errors import ParameterError, QueueFull, TridecodeError
from tridecode.server.call import Call
from tridecode.server.errors import ApiError, api_error
from tridecode.server.loop import Loop
from tridecode.server.tls import Tls

ROOT = Path(__file__).parents[2]
STORM_SECONDS = 8.0
JSON_HEADERS = "Host: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def engine():
    with Engine.load(device="cpu", slots=4) as engine:
        yield engine


def assert_idle(engine) -> None:
    """Check the scheduler's invariants, and that it has no requests."""
    assert engine.scheduler.load().requests == 0
    engine.scheduler.assert_consistent()


class RawClient:
    """A client over a plain socket, which reads only on demand."""

    def __init__(self, running: Running, body: dict, path: str = "/v1/completions", buffer: int = 4096):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", running.port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{JSON_HEADERS}Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def rest(self) -> str:
        """Return the rest of the response, without the lengths of its chunks."""
        got = b""
        while part := self.socket.recv(1 << 16):
            got += part
        self.socket.close()
        head, _, body = got.partition(b"\r\n\r\n")
        if b"chunked" not in head:
            return body.decode()
        text = b""
        while body:
            size, _, body = body.partition(b"\r\n")
            text, body = text + body[: int(size, 16)], body[int(size, 16) + 2 :]
        return text.decode()


# ---- slow and stuck readers


def test_stuck_reader_neither_blocks_others_nor_loses_tokens(engine, monkeypatch):
    """The answer has more events than the socket and the server buffer. The client reads them only at the end."""
    payload = LONG | {"stream": True, "logprobs": 20, "max_tokens": 400, "temperature": 0}
    with Running(engine) as running:
        stuck = RawClient(running, payload)
        until(lambda: engine.scheduler.load().rows == 1)
        assert running.client().chat.completions.create(**GREEDY).choices[0].message.content == ANSWER
        # The engine has sampled all tokens, and the slot is free.
        until(lambda: engine.scheduler.load().requests == 0)
        time.sleep(0.2)
        got = events(stuck.rest().splitlines())
    expected = engine.generate(LONG["prompt"], SamplingParams(temperature=0, ignore_eos=True, max_tokens=400))
    assert got[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in got[:-1]) == expected.text
    sizes = [len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in got[:-1] if chunk["choices"][0]["logprobs"]]
    assert sum(sizes) == 400 and max(sizes) > 1, "each event contained only one token"


def test_waiting_stream_sends_comments(engine, monkeypatch):
    slow_passes(engine, monkeypatch)
    with Running(engine, keep_alive=0.3) as running:
        blockers = [RawClient(running, LONG | {"stream": True}) for _ in range(engine.slots)]
        until(lambda: engine.scheduler.load().rows == engine.slots)
        with running.stream(GREEDY, "/v1/chat/completions") as got:
            lines = got.iter_lines()
            assert next(lines) == ": keep-alive"
            for blocker in blockers:
                blocker.socket.close()
            chunks = [event for event in events(lines) if not isinstance(event, str)]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        until(lambda: engine.scheduler.load().requests == 0)


def test_reader_that_never_reads_is_disconnected(engine):
    with Running(engine, timeout=1) as running:
        stuck = RawClient(running, LONG | {"stream": True, "logprobs": 20})
        until(lambda: engine.scheduler.load().rows == 1)
        until(lambda: running.metric("requests_total") == 1 and engine.scheduler.load().requests == 0, 60)
        stuck.socket.close()


# ---- queue and deadline


def test_full_queue_is_503_immediately(engine, monkeypatch):
    with Running(engine, max_queue=2) as running:
        running.client().chat.completions.create(**GREEDY, n=6)
        slow_passes(engine, monkeypatch)
        blockers = [RawClient(running, LONG | {"stream": True}) for _ in range(6)]
        until(lambda: (engine.scheduler.load().requests, engine.scheduler.load().rows) == (6, 4))
        got = running.post("/v1/chat/completions", GREEDY)
        assert (got.status_code, got.headers["retry-after"]) == (503, "1")
        assert got.json()["error"]["code"] == "queue_full"
        assert running.metric("num_requests_waiting") == 2 and running.metric("num_requests_running") == 4
        for blocker in blockers:
            blocker.socket.close()
        until(lambda: engine.scheduler.load().requests == 0)
        assert running.post("/v1/chat/completions", GREEDY).status_code == 200
    assert_idle(engine)


def test_request_larger_than_queue_is_400(engine):
    with Running(engine, max_queue=2) as running:
        limit = "requests: this server accepts at most 6 at a time; send fewer"
        texts = {"model": "bundled", "prompt": ["a"] * 4, "max_tokens": 1, "logprobs": 1, "echo": True}
        for path, payload, count in (("chat/completions", GREEDY | {"n": 7}, 7), ("completions", texts, 8)):
            got = running.post(f"/v1/{path}", payload)
            assert got.status_code == 400 and "retry-after" not in got.headers, got.text
            assert f"are {count} {limit}" in got.json()["error"]["message"]
        assert running.post("/v1/completions", texts | {"prompt": ["a"] * 3}).status_code == 200


def test_ended_request_frees_its_place():
    """The place in the queue is free before the running pass ends."""
    loop = Loop(SimpleNamespace(slots=1), 0, 1.0)
    call = Call(loop, None, None, 0.0, None)
    call.attach([SimpleNamespace(finish_reason=None, drop=lambda: None)])
    with pytest.raises(ApiError, match="the queue is full: 1 request running or waiting"):
        loop.check()
    call.end(ApiError(504, "too long", code="timeout"))
    loop.check()


def test_finished_request_frees_its_place_before_its_call_ends():
    """A client that reads slowly does not keep the place of a request whose answer is complete."""
    loop = Loop(SimpleNamespace(slots=1), 0, 1.0)
    call, request = Call(loop, None, None, 0.0, None), SimpleNamespace(finish_reason=None)
    call.attach([request])
    with pytest.raises(ApiError, match="the queue is full"):
        loop.check()
    request.finish_reason = "stop"
    loop.check()


def test_errors_of_the_engine_name_parameters_of_the_request():
    """The engine counts finished requests for two passes longer than the server does. So its queue may be full."""
    full = "the queue is full: 2 requests running and 2 waiting; try again later, or raise max_queue"
    problem = api_error(QueueFull(full), None)
    assert (problem.status, problem.code, problem.headers) == (503, "queue_full", {"Retry-After": "1"})
    assert problem.message == "the queue is full; try again later"
    for error, names, param, message in (
        (("max_tokens must be larger", "max_tokens", "range"), {"max_tokens": "max_output_tokens"},
         "max_output_tokens", "max_output_tokens must be larger"),
        (("the answer must be longer", "max_tokens", "range"), {"max_tokens": "max_output_tokens"},
         "max_output_tokens", "the answer must be longer"),
        (("json_schema: too deep",), {"json_schema": "response_format"},
         "response_format", "response_format: too deep"),
    ):  # fmt: skip
        problem = api_error(ParameterError(*error), None, names)
        assert (problem.status, problem.param, problem.message) == (400, param, message)


def test_deadline_ends_running_and_waiting_requests(engine, monkeypatch):
    slow_passes(engine, monkeypatch)
    with Running(engine, timeout=2.0) as running:
        slow = [RawClient(running, LONG | {"stream": True}) for _ in range(engine.slots)]
        got = running.post("/v1/completions", LONG)
        assert got.status_code == 504 and got.json()["error"]["code"] == "timeout"
        for client in slow:
            *_, error, done = events(client.rest().splitlines())
            assert error["error"]["code"] == "timeout" and done == "[DONE]"
        with pytest.raises(openai.APIError, match="exceeded the time limit of this server"):
            list(
                running.client().completions.create(
                    model="bundled", prompt="a", stream=True, extra_body={"ignore_eos": True}
                )
            )
        until(lambda: engine.scheduler.load().requests == 0)
        assert running.metric("requests_total", 'outcome="timeout"') >= 1


def test_incomplete_body_times_out(engine):
    with Running(engine, timeout=0.4) as running, socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(f"POST /v1/completions HTTP/1.1\r\n{JSON_HEADERS}Content-Length: 100\r\n\r\n{{".encode())
        client.settimeout(20)
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
        until(lambda: running.metric("requests_total", 'outcome="refused"') == 1)


# ---- failures


def test_failed_prompt_pass_ends_only_its_request(engine, monkeypatch):
    read = engine.prompts.read

    def fails(chunks, tokens, *rest):
        if tokens > 100:
            raise MemoryError
        read(chunks, tokens, *rest)

    monkeypatch.setattr(engine.prompts, "read", fails)
    with Running(engine) as running:
        got = running.post("/v1/completions", {"model": "bundled", "prompt": list(range(100, 400)), "stream": True})
        assert got.status_code == 500 and got.json()["error"]["code"] == "out_of_memory"
        assert running.post("/v1/chat/completions", GREEDY).json()["choices"][0]["message"]["content"] == ANSWER
        assert running.metric("requests_total", 'outcome="failed"') >= 1
    assert_idle(engine)


def test_engine_failure_ends_streams_and_fails_health():
    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        with running.stream(LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            engine.steps.replay = lambda *args: 1 / 0
            *_, error, done = events(lines)
        assert error["error"]["code"] == "engine_failed" and "division" not in json.dumps(error)
        assert (running.get("/health").status_code, running.get("/health").json()) == (503, {"status": "failed"})
        got = running.post("/v1/chat/completions", GREEDY)
        assert got.status_code == 503 and "retry-after" in got.headers


def test_closed_engine_ends_streams_at_once():
    with Engine.load(device="cpu", slots=2) as engine, Running(engine, keep_alive=60) as running:

        def step():
            engine.close()
            return type(engine).step(engine)

        with running.stream(LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            began, engine.step = time.monotonic(), step
            *_, error, done = events(lines)
        assert (error["error"]["code"], done) == ("stopping", "[DONE]") and time.monotonic() - began < 30
        for path in ("/metrics", "/v1/models"):
            got = running.get(path)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "stopping")
        assert running.server.loop.failure is None


def test_closing_idle_engine_is_not_a_failure():
    def capture_next():
        engine.close()
        return type(engine).capture_next(engine)

    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        engine.capture_next = capture_next
        assert running.post("/v1/chat/completions", GREEDY).status_code == 200
        until(lambda: running.get("/metrics").status_code == 503)
        assert running.server.loop.failure is None


def test_deferred_captures_run_while_idle(monkeypatch):
    """Captures run one at a time after the first answer.

    A request, or the end of the server, waits only for the running capture.
    """
    with Engine.load(device="cpu", slots=2) as engine:
        busy = []

        def capture_next() -> bool:
            busy.append(engine.scheduler.busy)
            time.sleep(0.05)
            return True  # The engine always has another size to capture.

        monkeypatch.setattr(engine.prompts, "capture_next", capture_next)
        with Running(engine) as running:
            time.sleep(0.2)
            assert not busy, "a capture ran before the first answer"
            running.post("/v1/chat/completions", GREEDY)
            until(lambda: busy)
            assert running.post("/v1/chat/completions", GREEDY).json()["choices"][0]["message"]["content"] == ANSWER
            assert not any(busy) and running.server.loop.failure is None
        ended = len(busy)
        time.sleep(0.2)
        assert len(busy) == ended


# ---- random load


def storm(running: Running, seconds: float, clients: int = 64) -> dict[str, int]:
    """Run clients that disconnect, read slowly or send invalid bodies; return counts by kind."""
    counts, wrong, lock, end = {}, [], threading.Lock(), time.monotonic() + seconds

    def count(kind: str) -> None:
        with lock:
            counts[kind] = counts.get(kind, 0) + 1

    def good(rng, http) -> None:
        body = GREEDY | {"stream": rng.random() < 0.5}
        with http.stream("POST", f"{running.url}/v1/chat/completions", json=body) as got:
            if got.status_code == 503:
                count("full")
                time.sleep(0.1)
                return
            if body["stream"]:
                chunks = [event for event in events(got.iter_lines()) if not isinstance(event, str)]
                text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            else:
                got.read()
                text = got.json()["choices"][0]["message"]["content"]
        if text != ANSWER:
            wrong.append(text)
        count("answered")

    def disconnecting(rng, http) -> None:
        client = RawClient(running, LONG | {"stream": rng.random() < 0.7, "n": rng.choice([1, 1, 2])})
        time.sleep(rng.random() * 0.5)
        client.socket.close()
        count("disconnected")

    def slow(rng, http) -> None:
        client = RawClient(running, LONG | {"stream": True, "max_tokens": 60, "logprobs": 5})
        time.sleep(rng.random() * 2)
        text = client.rest()
        assert text.endswith("[DONE]\n\n") or "queue_full" in text, text[-200:]
        count("slow")

    def garbage(rng, http) -> None:
        body = rng.choice(
            [
                rng.randbytes(200),
                b"{",
                b'{"model": "bundled"}',
                json.dumps(GREEDY | {"n": "x"}).encode(),
                json.dumps(GREEDY | {"messages": [{"role": "user", "content": "a b " * 2000}]}).encode(),
            ]
        )
        got = http.post(
            f"{running.url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"}
        )
        if got.status_code not in (400, 503):
            wrong.append(got.text)
        count("garbage")

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=60) as http:
            while time.monotonic() < end:
                try:
                    rng.choices([good, disconnecting, slow, garbage], [4, 2, 1, 1])[0](rng, http)
                except Exception as error:
                    wrong.append(repr(error))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 90)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong, wrong[:5]
    return counts


def test_storm_leaves_engine_consistent(engine):
    threads = threading.active_count()
    with Running(engine, max_queue=40) as running:
        counts = storm(running, STORM_SECONDS)
        assert {"answered", "disconnected", "slow", "garbage"} <= counts.keys(), counts
        until(lambda: engine.scheduler.load().requests == 0)
        assert_idle(engine)
        several = GREEDY | {"n": engine.slots + 40}  # The requests fill all places of the queue.
        until(lambda: running.post("/v1/chat/completions", several).status_code == 200, 60)
    until(lambda: threading.active_count() <= threads)


# ---- random requests

NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NEAR = st.sampled_from([-1, 0, 1, 2, 3, 0.5, 1.0, -0.5, 4095, 4096, 2**31, 2**63, 2**64 - 1, 2**64, 1e30, 1e-30])
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "assistant", "system", "developer"]),
        "content": st.text(max_size=30) | st.just([{"type": "text", "text": "<|im_end|>"}]),
    },
    optional={"name": VALUES, "reasoning_content": VALUES, "tool_calls": VALUES},
)
OPTIONS = {
    **dict.fromkeys(["temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "seed",
                     "frequency_penalty", "logprobs", "top_logprobs", "min_tokens", "n", "max_completion_tokens"],
                    NEAR | VALUES),
    **dict.fromkeys(["stream", "echo", "ignore_eos", "return_token_ids", "cache_prompt", "store"],
                    st.booleans() | VALUES),
    **dict.fromkeys(["stream_options", "chat_template_kwargs", "tools", "response_format", "suffix", "user"], VALUES),
    "stop": st.lists(st.text(max_size=3), max_size=3) | VALUES,
    "stop_token_ids": st.lists(NEAR, max_size=3) | VALUES,
    "logit_bias": st.dictionaries(NEAR.map(str), NEAR, max_size=3) | VALUES,
}  # fmt: skip
CHATS = st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=3) | VALUES}, optional=OPTIONS)
TEXTS = st.fixed_dictionaries(
    {"prompt": st.text(max_size=20) | st.lists(NEAR, max_size=3) | st.lists(st.text(max_size=5), max_size=3) | VALUES},
    optional=OPTIONS,
)


@pytest.fixture(scope="module")
def lenient(engine):
    with Running(engine) as running:
        yield running


@hypothesis_settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(payload=st.tuples(st.just("/v1/chat/completions"), CHATS) | st.tuples(st.just("/v1/completions"), TEXTS))
def test_random_requests_never_return_5xx(lenient, payload):
    path, body = payload
    got = lenient.post(path, {"max_tokens": 2, "model": "bundled"} | body)
    assert got.status_code in (200, 400), got.text
    if got.status_code == 400:
        assert got.json()["error"]["message"]
    elif body.get("stream") is True:
        assert got.text.endswith("data: [DONE]\n\n") and '"error"' not in got.text
    else:
        assert got.json()["choices"]


# ---- process


class Process:
    """A process that runs `tridecode serve`."""

    def __init__(self, *argv, **environment):
        self.process = subprocess.Popen(
            [sys.executable, "cli.py", "serve", "--device", "cpu", "--port", "0", *argv],
            cwd=ROOT, env=os.environ | environment, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.lines: list[str] = []
        for line in self.process.stderr:
            self.lines.append(line)
            if line.startswith("serving "):
                break
        else:
            raise AssertionError("".join(self.lines))
        self.url = self.lines[-1].split(" at ")[1].split("/v1")[0]
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr), daemon=True)
        self._reader.start()

    def end(self, seconds: float = 30) -> tuple[int, str]:
        code = self.process.wait(seconds)
        self._reader.join(10)
        return code, "".join(self.lines)


@pytest.fixture
def process():
    processes = []

    def process(*argv, **environment):
        processes.append(Process(*argv, **environment))
        return processes[-1]

    yield process
    for each in processes:
        each.process.kill()
        each.process.wait()


def loaded(process: Process, payload: dict, clients: int) -> tuple[list, list[threading.Thread]]:
    """Start clients that stream, and wait for the first event of each; return (list for their events, threads)."""
    streams, begun = [], threading.Semaphore(0)

    def client() -> None:
        lines = []
        try:
            url, body = f"{process.url}/v1/completions", payload | {"stream": True}
            with httpx.stream("POST", url, json=body, timeout=60) as got:
                for line in got.iter_lines():
                    lines.append(line)
                    begun.release() if len(lines) == 1 else None
        except httpx.HTTPError as error:
            lines.append(f"data: {json.dumps(repr(error))}")
        streams.append(events(lines))

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60)
    return streams, threads


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGHUP])
def test_signal_lets_running_answers_finish(process, sig):
    server = process("--slots", "4", "--grace", "60")
    streams, threads = loaded(server, LONG | {"max_tokens": 80}, 6)
    server.process.send_signal(sig)
    time.sleep(0.5)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")
    for thread in threads:
        thread.join(60)
    code, log = server.end()
    assert code == 0 and "Traceback" not in log, log
    assert len(streams) == 6
    for answer in streams:
        assert answer[-1] == "[DONE]" and answer[-2]["choices"][0]["finish_reason"] == "length"


def test_sigterm_cancels_answers_after_grace(process):
    server = process("--slots", "4", "--grace", "0.3")
    streams, threads = loaded(server, LONG, 4)
    paths, answers, data = ("/v1/chat/completions", "/v1/messages", "/tokenize"), [], json.dumps(GREEDY).encode()
    clients = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20) for _ in paths]
    for client, path in zip(clients, paths):  # The bodies of these requests are incomplete.
        client.sendall(
            f"POST {path} HTTP/1.1\r\n{JSON_HEADERS}Content-Length: {len(data)}\r\n\r\n".encode() + data[:-5]
        )
    httpx.get(f"{server.url}/health")  # After this answer, the server has also accepted the earlier connections.
    server.process.send_signal(signal.SIGTERM)
    for client in clients:
        head, _, body = b"".join(iter(lambda client=client: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 "), head
        answers.append(json.loads(body)["error"])
    code, log = server.end()
    for thread in threads:
        thread.join(10)
    assert code == 0 and "Traceback" not in log and " 503 " in log, log
    assert [answer[-1] for answer in streams] == ["[DONE]"] * 4
    assert all(answer[-2]["error"]["code"] == "stopping" for answer in streams)
    assert {answer["message"] for answer in answers} == {"this server is stopping"}
    assert answers[0]["code"] == "stopping" and answers[1]["type"] == "overloaded_error"


def test_ignored_sighup_stays_ignored(process):
    """Nohup starts a process that ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        server = process("--slots", "2")
    finally:
        signal.signal(signal.SIGHUP, before)
    server.process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_second_signal_ends_process_at_once(process):
    server = process("--slots", "2", "--grace", "60")
    streams, threads = loaded(server, LONG, 2)
    server.process.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGTERM)  # a second SIGINT counts only after the first one has been handled
    assert server.end()[0] == 128 + signal.SIGTERM
    for thread in threads:
        thread.join(10)


def test_engine_failure_exits_with_code_3():
    code = (
        "import sys, threading, httpx\n"
        "from tridecode import Engine\n"
        "from tridecode.server import listen, run\n"
        "from tridecode.server.settings import Settings\n"
        "run.FAILURE_GRACE = 1.0\n"
        "engine, bound = Engine.load(device='cpu', slots=2), listen.bind('127.0.0.1', 0)\n"
        "engine.steps.replay = lambda *args: 1 / 0\n"
        "url = f'http://127.0.0.1:{bound.getsockname()[1]}'\n"
        "def ask():\n"
        "    transport = httpx.HTTPTransport(retries=5)\n"
        "    with httpx.Client(transport=transport) as client:\n"
        "        payload = {'model': 'm', 'prompt': 'a'}\n"
        "        print(client.post(f'{url}/v1/completions', json=payload).status_code, flush=True)\n"
        "        print(client.get(f'{url}/health').status_code, flush=True)\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "sys.exit(run.serve(engine, Settings(model='m'), bound))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (3, "503\n503\n"), done.stderr


def test_api_key_file_model_name_and_certificate(process, tmp_path):
    for name, text in (("key", "from-file\n"), ("cert.pem", CERTIFICATE), ("key.pem", KEY)):
        (tmp_path / name).write_text(text)
    options = {"--api-key-file": "key", "--ssl-certfile": "cert.pem", "--ssl-keyfile": "key.pem"}
    argv = [word for option, name in options.items() for word in (option, str(tmp_path / name))]
    server = process(*argv, "--served-model-name", "tri", TRIDECODE_API_KEY="other")
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    for key, status in (("other", 401), ("from-file", 200)):
        headers = {"Authorization": f"Bearer {key}"}
        got = httpx.get(f"{server.url}/v1/models", headers=headers, verify=trusted)
        assert got.status_code == status
    assert got.json()["data"][0]["id"] == "tri"
    payload = GREEDY | {"model": "tri"}
    got = httpx.post(f"{server.url}/v1/chat/completions", json=payload, headers=headers, verify=trusted, timeout=60)
    assert got.json()["choices"][0]["message"]["content"] == ANSWER


NO_CERTIFICATE = "no certificate can be read in {cert}: expected a PEM file, with -----BEGIN CERTIFICATE----- to"
NO_KEY = "no key can be read in {key}: expected a PEM file, with -----BEGIN PRIVATE KEY----- to"
TLS = {  # name: (contents of the certificate file, contents of the key file, the expected error)
    "no_certificate": ("hello", KEY, NO_CERTIFICATE),
    "empty_certificate": ("", KEY, NO_CERTIFICATE),
    "truncated_certificate": (CERTIFICATE[:400], KEY, NO_CERTIFICATE),
    "key_as_certificate": (KEY, KEY, NO_CERTIFICATE),
    "no_key": (CERTIFICATE, "hello", NO_KEY),
    "truncated_key": (CERTIFICATE, KEY[:150], NO_KEY),
    "certificate_as_key": (CERTIFICATE, CERTIFICATE, NO_KEY),
    "other_key": (CERTIFICATE, OTHER_KEY, "the key {key} does not belong to the certificate {cert}; name the key"),
    "other_key_algorithm": (CERTIFICATE, ED25519_KEY, "the key {key} does not belong to the certificate {cert}; name"),
    "encrypted_key": (CERTIFICATE, ENCRYPTED_KEY, "the key {key} is encrypted: expected one without a pass phrase"),
    "encrypted_key_in_certificate_file": (CERTIFICATE + ENCRYPTED_KEY, None, "the key {cert} is encrypted: expected"),
    "no_key_in_certificate_file": (CERTIFICATE, None, NO_KEY.replace("{key}", "{cert}")),
}


@pytest.mark.parametrize("certificate, key, message", TLS.values(), ids=TLS)
def test_invalid_certificate_or_key_is_named(tmp_path, certificate, key, message):
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, text in zip(paths, (certificate, key)):
        path.write_text(text or "")
    with pytest.raises(TridecodeError) as error:
        Tls(str(paths[0]), None if key is None else str(paths[1])).check()
    assert str(error.value).startswith(message.format(cert=paths[0], key=paths[1]))


def test_encrypted_key_does_not_prompt(tmp_path):
    pexpect = pytest.importorskip("pexpect")
    (tmp_path / "cert.pem").write_text(CERTIFICATE + ENCRYPTED_KEY)
    argv = ["cli.py", "serve", "--ssl-certfile", str(tmp_path / "cert.pem")]
    child = pexpect.spawn(sys.executable, argv, cwd=str(ROOT), timeout=60, encoding="utf-8", dimensions=(50, 200))
    try:
        assert child.expect(["pass phrase:", pexpect.EOF]) == 1, child.before
        assert "encrypted:" in child.before
    finally:
        child.close(force=True)
    assert child.exitstatus == 1


@pytest.mark.parametrize(
    "argv, code, message",
    [
        (["--port", "70000"], 2, "expected an integer from 0 to 65,535, got '70000'"),
        (["--timeout", "soon"], 2, "expected a number from 0 to 1,000,000, got 'soon'"),
        (["--slots", "65"], 2, "from 1 to 64"),
        (["--cors", "https://chat.example/"], 2, "expected * or an origin"),
        (["--allow-host", "chat.example:80"], 2, "expected * or a host name"),
        (["--max-connections", "0"], 2, "expected an integer from 1"),
        (["--served-model-name", ""], 2, "expected a name"),
        (["--ssl-keyfile", "key.pem"], 2, "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "no.pem"], 1, "the certificate no.pem cannot be read: No such file"),
        (["--api-key-file", "no.txt"], 1, "no.txt: No such file or directory"),
        (["--host", "256.0.0.1"], 1, "cannot listen on 256.0.0.1"),
        (["--host", "0.0.0.0:11434"], 1, "; use --host 0.0.0.0 --port 11434"),
        (["--host", "[::1]:80"], 1, "; use --host ::1 --port 80"),
    ],
)
def test_invalid_options_are_one_line(run, argv, code, message):
    got, _, error = run("serve", *argv)
    assert got == code and message in " ".join(error.split())


def test_port_in_use_fails_before_loading(run, monkeypatch):
    monkeypatch.setattr(Engine, "load", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        code, _, err = run("serve", "--port", port)
    error = " ".join(err.split())
    assert (
        code == 1
        and f"cannot listen on 127.0.0.1, port {port}: Address already in use; choose another port with --port N"
        in error
    )


def test_missing_packages_name_the_extra():
    code = "import sys; sys.modules['starlette'] = None; from tridecode.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and "pip install 'tridecode[serve]'" in done.stderr and done.stderr.count("\n") == 1


def test_directory_name_is_model_name(tmp_path):
    from tridecode.cli.serve import public_name

    (tmp_path / "my-model").mkdir()
    assert public_name(f"{tmp_path}/my-model/") == "my-model"
    assert (public_name(None), public_name("Qwen/Qwen3-4B")) == ("bundled", "Qwen/Qwen3-4B")
