"""The server's life: slow readers, full queues, deadlines, storms, signals, and an engine that dies."""

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
from tridecode.errors import EngineClosed, ParameterError, QueueFull, TridecodeError
from tridecode.server.call import Call
from tridecode.server.errors import ApiError, api_error
from tridecode.server.loop import Loop
from tridecode.server.tls import Tls

ROOT = Path(__file__).parents[2]
STORM = 15.0  # seconds


@pytest.fixture(scope="module")
def engine():
    with Engine.load(device="cpu", slots=4) as engine:
        yield engine


def consistent(engine) -> None:
    engine._driver.exclusively(lambda scheduler: scheduler.assert_consistent())
    assert engine.scheduler.load().requests == 0


class RawClient:
    """A client that reads when it likes."""

    def __init__(self, running: Running, body: dict, path: str = "/v1/completions", buffer: int = 4096):
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(60)
        self.socket.connect(("127.0.0.1", running.port))
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        self.socket.sendall(head.encode() + data)

    def rest(self) -> str:
        """All that still comes, without the chunks' lengths between."""
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


def test_a_stuck_reader_stalls_nobody_and_loses_nothing(engine, monkeypatch):
    """Its socket holds a few events only, and the server's buffer is small; neither the engine nor others wait."""
    asked = LONG | {"stream": True, "logprobs": 20, "max_tokens": 400, "temperature": 0}
    with Running(engine) as running:
        stuck = RawClient(running, asked)
        until(lambda: engine.scheduler.load().rows == 1)
        began = time.monotonic()
        assert running.client().chat.completions.create(**GREEDY).choices[0].message.content == ANSWER
        assert time.monotonic() - began < 20
        until(lambda: engine.scheduler.load().requests == 0, 60)  # all of it is drawn, and its slot is free
        time.sleep(0.2)
        found = events(stuck.rest().splitlines())
    expected = engine.generate(LONG["prompt"], SamplingParams(temperature=0, ignore_eos=True, max_tokens=400))
    assert found[-1] == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in found[:-1]) == expected.text
    sizes = [len(chunk["choices"][0]["logprobs"]["tokens"]) for chunk in found[:-1] if chunk["choices"][0]["logprobs"]]
    assert sum(sizes) == 400 and max(sizes) > 1, "tokens were not taken together"


def test_a_stream_that_waits_has_comments(engine, monkeypatch):
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


def test_a_reader_that_never_reads_is_let_go(engine):
    with Running(engine, timeout=1) as running:
        stuck = RawClient(running, LONG | {"stream": True, "logprobs": 20})
        until(lambda: engine.scheduler.load().rows == 1)
        until(lambda: not running.server.loop._calls and engine.scheduler.load().requests == 0, 60)
        stuck.socket.close()


# ---- queue and deadline


def test_a_full_queue_is_told_at_once(engine, monkeypatch):
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
    consistent(engine)


def test_what_can_never_find_a_place_is_no_matter_of_later(engine):
    with Running(engine, max_queue=2) as running:
        never = "requests: this server takes at most 6 at a time; ask for fewer"
        texts = {"model": "bundled", "prompt": ["a"] * 4, "max_tokens": 1, "logprobs": 1, "echo": True}
        for path, asked, count in (("chat/completions", GREEDY | {"n": 7}, 7), ("completions", texts, 8)):
            got = running.post(f"/v1/{path}", asked)
            assert got.status_code == 400 and "retry-after" not in got.headers, got.text
            assert f"come to {count} {never}" in got.json()["error"]["message"]
        assert running.post("/v1/completions", texts | {"prompt": ["a"] * 3}).status_code == 200


def test_a_request_that_was_ended_has_no_place_any_more():
    """Before a pass is over, which may be long."""
    loop = Loop(SimpleNamespace(slots=1), 0, 1.0)
    call = Call(loop, None, None, 0.0, None)
    call.follow([SimpleNamespace(finish_reason=None, drop=lambda: None)])
    with pytest.raises(ApiError, match="1 request under way or waiting, as many as may be"):
        loop.check()
    call.end(ApiError(504, "too long", code="timeout"))
    loop.check()


def test_a_queue_that_only_the_engine_finds_full_is_told_in_words_for_clients():
    """As for two passes behind requests that ended by themselves."""
    full = "the queue is full: 2 requests under way and 2 waiting; try again later, or raise max_queue"
    problem = api_error(QueueFull(full), None)
    assert (problem.status, problem.code, problem.headers) == (503, "queue_full", {"Retry-After": "1"})
    assert problem.message == "the queue is full; try again later"


@pytest.mark.parametrize("message", ["max_tokens must be larger", "the answer must be longer"])
def test_param_is_the_client_name_of_the_argument(message):
    problem = api_error(ParameterError(message, "max_tokens", "range"), None, {"max_tokens": "max_output_tokens"})
    assert (problem.status, problem.param) == (400, "max_output_tokens")
    assert problem.message == message.replace("max_tokens", "max_output_tokens")


def test_param_is_the_first_word_of_an_error_without_an_argument():
    problem = api_error(ParameterError("json_schema: too deep"), None, {"json_schema": "response_format"})
    assert (problem.param, problem.message) == ("response_format", "response_format: too deep")


def test_a_deadline_ends_what_runs_and_what_waits(engine, monkeypatch):
    slow_passes(engine, monkeypatch)
    with Running(engine, timeout=0.6) as running:
        slow = [RawClient(running, LONG | {"stream": True}) for _ in range(engine.slots)]
        got = running.post("/v1/completions", LONG)
        assert got.status_code == 504 and got.json()["error"]["code"] == "timeout"
        for client in slow:
            *_, error, done = events(client.rest().splitlines())
            assert error["error"]["code"] == "timeout" and done == "[DONE]"
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(
                running.client().completions.create(
                    model="bundled", prompt="a", stream=True, extra_body={"ignore_eos": True}
                )
            )
        until(lambda: engine.scheduler.load().requests == 0)
        assert running.metric("requests_total", 'outcome="timeout"') >= 1


def test_a_body_that_never_comes_is_given_up(engine):
    with Running(engine, timeout=0.4) as running, socket.create_connection(("127.0.0.1", running.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        client.settimeout(20)
        assert client.recv(1000).startswith(b"HTTP/1.1 408 ")
        until(lambda: running.metric("requests_total", 'outcome="refused"') == 1)


# ---- one request's failure


def test_a_prompt_that_cannot_be_read_fails_alone(engine, monkeypatch):
    read = engine.prompts.read

    def fails(chunks, tokens, decoding):
        if tokens > 100:
            raise MemoryError
        read(chunks, tokens, decoding)

    monkeypatch.setattr(engine.prompts, "read", fails)
    with Running(engine) as running:
        got = running.post("/v1/completions", {"model": "bundled", "prompt": list(range(100, 400)), "stream": True})
        assert got.status_code == 500 and got.json()["error"]["code"] == "out_of_memory"
        assert running.post("/v1/chat/completions", GREEDY).json()["choices"][0]["message"]["content"] == ANSWER
        assert running.metric("requests_total", 'outcome="failed"') >= 1
    consistent(engine)


def test_an_engine_that_dies_is_told_of(monkeypatch):
    died = threading.Event()
    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        running.server.loop._died = died.set
        with running.stream(LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            monkeypatch.setattr(engine.steps, "replay", lambda *args: 1 / 0)
            *_, error, done = events(lines)
        assert error["error"]["code"] == "engine_failed" and "division" not in json.dumps(error)
        assert died.wait(10)
        assert (running.get("/health").status_code, running.get("/health").json()) == (503, {"status": "failed"})
        got = running.post("/v1/chat/completions", GREEDY)
        assert got.status_code == 503 and "retry-after" in got.headers
        monkeypatch.undo()


def test_an_engine_that_is_closed_is_told_of_at_once():
    with Engine.load(device="cpu", slots=2) as engine, Running(engine, keep_alive=20) as running:

        def step():
            engine.close()
            return type(engine).step(engine)

        with running.stream(LONG) as stream:
            lines = stream.iter_lines()
            next(lines)
            began, engine.step = time.monotonic(), step
            *_, error, done = events(lines)
        assert (error["error"]["code"], done) == ("stopping", "[DONE]") and time.monotonic() - began < 10
        for path in ("/metrics", "/v1/models"):
            got = running.get(path)
            assert (got.status_code, got.json()["error"]["code"]) == (503, "stopping")
        assert running.server.loop.failure is None


@pytest.mark.parametrize("name, what", [("scheduler", property), ("capture_next", lambda closing: closing)])
def test_an_engine_that_closes_while_nothing_runs_has_not_failed(monkeypatch, name, what):
    def closing(engine):
        if engine._driver.opened().answered:  # else the thread may end before it has begun to wait for work
            raise EngineClosed
        return engine._driver.opened()

    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        monkeypatch.setattr(Engine, name, what(closing))
        assert running.post("/v1/chat/completions", GREEDY).status_code == 200
        until(lambda: not running.server.loop._thread.is_alive())
        assert running.server.loop.failure is None
        assert running.get("/metrics").status_code == (503 if name == "scheduler" else 200)
        monkeypatch.undo()


def test_what_can_be_captured_later_is_while_nobody_waits(monkeypatch):
    """After the first answer, one at a time: whoever comes meanwhile waits for the one that is under way."""
    with Engine.load(device="cpu", slots=2) as engine:
        began, beside, left = [], [], [8]

        def capture_next() -> bool:
            began.append(time.monotonic())
            beside.append(engine.scheduler.busy)
            time.sleep(0.2)
            left[0] -= 1
            return left[0] > 0

        monkeypatch.setattr(engine.prompts, "capture_next", capture_next)
        with Running(engine) as running:
            time.sleep(0.3)
            assert not began, "the first answer comes first"
            running.post("/v1/chat/completions", GREEDY)
            until(lambda: began)
            before = len(began)
            assert running.post("/v1/chat/completions", GREEDY).json()["choices"][0]["message"]["content"] == ANSWER
            assert len(began) - before <= 2 and left[0] > 0
            until(lambda: left[0] == 0)
            time.sleep(0.3)
            assert len(began) == 8 and not any(beside)
        assert running.server.loop.failure is None


def test_a_server_stops_between_two_captures(monkeypatch):
    with Engine.load(device="cpu", slots=2) as engine:
        began = []
        monkeypatch.setattr(engine.prompts, "capture_next", lambda: began.append(time.sleep(0.05)) or True)
        with Running(engine) as running:
            running.post("/v1/chat/completions", GREEDY)
            until(lambda: began)
        ended = len(began)
        time.sleep(0.2)
        assert len(began) == ended


# ---- the storm


def storm(running: Running, seconds: float, clients: int = 64) -> dict[str, int]:
    """Counts by kind of what happened to clients that ask, go away, read slowly or talk rubbish."""
    counts, wrong, lock, end = {}, [], threading.Lock(), time.monotonic() + seconds

    def did(kind: str) -> None:
        with lock:
            counts[kind] = counts.get(kind, 0) + 1

    def good(rng, http) -> None:
        body = GREEDY | {"stream": rng.random() < 0.5}
        with http.stream("POST", f"{running.url}/v1/chat/completions", json=body) as got:
            if got.status_code == 503:
                did("full")
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
        did("answered")

    def gone(rng, http) -> None:
        client = RawClient(running, LONG | {"stream": rng.random() < 0.7, "n": rng.choice([1, 1, 2])})
        time.sleep(rng.random() * 0.5)
        client.socket.close()
        did("gone")

    def slow(rng, http) -> None:
        client = RawClient(running, LONG | {"stream": True, "max_tokens": 60, "logprobs": 5})
        time.sleep(rng.random() * 2)
        text = client.rest()
        assert text.endswith("[DONE]\n\n") or "queue_full" in text, text[-200:]
        did("slow")

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
        got = http.post(f"{running.url}/v1/chat/completions", content=body)
        if got.status_code not in (400, 503):
            wrong.append(got.text)
        did("garbage")

    def client(number: int) -> None:
        rng = random.Random(number)
        with httpx.Client(timeout=60) as http:
            while time.monotonic() < end:
                try:
                    rng.choices([good, gone, slow, garbage], [4, 2, 1, 1])[0](rng, http)
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


def test_a_storm_leaves_nothing_behind(engine):
    threads = threading.active_count()
    with Running(engine, max_queue=40) as running:
        counts = storm(running, STORM)
        assert counts["answered"] > 10 and counts["gone"] and counts["slow"] and counts["garbage"], counts
        until(lambda: engine.scheduler.load().requests == 0 and not running.server.loop._calls)
        consistent(engine)
        assert running.post("/v1/chat/completions", GREEDY).json()["choices"][0]["message"]["content"] == ANSWER
    until(lambda: threading.active_count() <= threads)


# ---- the schema

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


@hypothesis_settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(asked=st.tuples(st.just("/v1/chat/completions"), CHATS) | st.tuples(st.just("/v1/completions"), TEXTS))
def test_no_request_is_a_5xx(lenient, asked):
    path, body = asked
    got = lenient.post(path, {"max_tokens": 2, "model": "bundled"} | body)
    assert got.status_code in (200, 400), got.text
    if got.status_code == 400:
        assert got.json()["error"]["message"]
    elif body.get("stream") is True:
        assert got.text.endswith("data: [DONE]\n\n") and '"error"' not in got.text
    else:
        assert got.json()["choices"]


# ---- the process


class Process:
    """`tridecode serve` as a user starts it."""

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
    made = []

    def process(*argv, **environment):
        made.append(Process(*argv, **environment))
        return made[-1]

    yield process
    for each in made:
        each.process.kill()
        each.process.wait()


def loaded(process: Process, asked: dict, clients: int) -> tuple[list, list[threading.Thread]]:
    """Clients that stream what is `asked`, each with its first event there; where their events will be."""
    found, begun = [], threading.Semaphore(0)

    def ask() -> None:
        lines = []
        try:
            url, asking = f"{process.url}/v1/completions", asked | {"stream": True}
            with httpx.stream("POST", url, json=asking, timeout=60) as got:
                for line in got.iter_lines():
                    lines.append(line)
                    begun.release() if len(lines) == 1 else None
        except httpx.HTTPError as error:
            lines.append(f"data: {json.dumps(repr(error))}")
        found.append(events(lines))

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60)
    return found, threads


def test_sigterm_under_load_lets_answers_end(process):
    server = process("--slots", "4", "--grace", "60")
    found, threads = loaded(server, LONG | {"max_tokens": 150}, 6)
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health")
    for thread in threads:
        thread.join(60)
    code, log = server.end()
    assert code == 0 and "Traceback" not in log, log
    assert len(found) == 6
    for answer in found:
        assert answer[-1] == "[DONE]" and answer[-2]["choices"][0]["finish_reason"] == "length"


def test_sigterm_cancels_what_outlasts_the_grace(process):
    server = process("--slots", "4", "--grace", "0.3")
    found, threads = loaded(server, LONG, 6)
    server.process.send_signal(signal.SIGTERM)
    code, log = server.end()
    for thread in threads:
        thread.join(10)
    assert code == 0 and "Traceback" not in log, log
    assert [answer[-1] for answer in found] == ["[DONE]"] * 6
    assert all(answer[-2]["error"]["code"] == "stopping" for answer in found)


def test_a_body_that_still_comes_when_the_server_ends_is_told_why(process):
    server = process("--slots", "2", "--grace", "0")
    paths, answers, data = ("/v1/chat/completions", "/v1/messages", "/tokenize"), [], json.dumps(GREEDY).encode()
    clients = [socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), 20) for _ in paths]
    for client, path in zip(clients, paths):
        client.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data[:-5])
    httpx.get(f"{server.url}/health")  # those before it are there too
    server.process.send_signal(signal.SIGTERM)
    for client in clients:
        head, _, body = b"".join(iter(lambda client=client: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 "), head
        answers.append(json.loads(body)["error"])
    code, log = server.end()
    assert code == 0 and "Traceback" not in log and " 503 " in log, log
    assert {answer["message"] for answer in answers} == {"this server is stopping"}
    assert answers[0]["code"] == "stopping" and answers[1]["type"] == "overloaded_error"


def test_a_second_signal_ends_at_once(process):
    server = process("--slots", "2", "--grace", "60")
    found, threads = loaded(server, LONG, 2)
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    assert server.end(10)[0] == 130
    for thread in threads:
        thread.join(10)


def test_a_dead_engine_ends_the_process_with_code_3():
    code = (
        "import sys, threading, httpx\n"
        "from tridecode import Engine\n"
        "from tridecode.server import run\n"
        "from tridecode.server.settings import Settings\n"
        "run.DYING = 1.0\n"
        "engine, bound = Engine.load(device='cpu', slots=2), run.bind('127.0.0.1', 0)\n"
        "engine.steps.replay = lambda *args: 1 / 0\n"
        "url = f'http://127.0.0.1:{bound.getsockname()[1]}'\n"
        "def ask():\n"
        "    transport = httpx.HTTPTransport(retries=5)\n"
        "    with httpx.Client(transport=transport) as client:\n"
        "        asked = {'model': 'm', 'prompt': 'a'}\n"
        "        print(client.post(f'{url}/v1/completions', json=asked).status_code, flush=True)\n"
        "        print(client.get(f'{url}/health').status_code, flush=True)\n"
        "threading.Thread(target=ask, daemon=True).start()\n"
        "sys.exit(run.serve(engine, Settings(model='m'), bound))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (3, "503\n503\n"), done.stderr


def test_a_key_and_a_name_from_outside(process, tmp_path):
    (tmp_path / "key").write_text("from-file\n")
    server = process("--api-key-file", str(tmp_path / "key"), "--served-model-name", "tri", TRIDECODE_API_KEY="other")
    for key, status in (("other", 401), ("from-file", 200)):
        got = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert got.status_code == status
    assert got.json()["data"][0]["id"] == "tri"


def test_a_certificate_makes_it_https(process, tmp_path):
    for name, text in (("cert.pem", CERTIFICATE), ("key.pem", KEY)):
        (tmp_path / name).write_text(text)
    server = process("--ssl-certfile", str(tmp_path / "cert.pem"), "--ssl-keyfile", str(tmp_path / "key.pem"))
    assert server.url.startswith("https://")
    trusted = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    got = httpx.post(f"{server.url}/v1/chat/completions", json=GREEDY, verify=trusted, timeout=60)
    assert got.json()["choices"][0]["message"]["content"] == ANSWER


NO_CERTIFICATE = "no certificate can be read in {cert}: expected a PEM file, with -----BEGIN CERTIFICATE----- to"
NO_KEY = "no key can be read in {key}: expected a PEM file, with -----BEGIN PRIVATE KEY----- to"
TLS = {  # what is in the two files, and the error
    "no_certificate": ("hello", KEY, NO_CERTIFICATE),
    "nothing": ("", KEY, NO_CERTIFICATE),
    "a_cut_certificate": (CERTIFICATE[:400], KEY, NO_CERTIFICATE),
    "a_key_for_it": (KEY, KEY, NO_CERTIFICATE),
    "no_key": (CERTIFICATE, "hello", NO_KEY),
    "a_cut_key": (CERTIFICATE, KEY[:150], NO_KEY),
    "a_certificate_for_it": (CERTIFICATE, CERTIFICATE, NO_KEY),
    "another_key": (CERTIFICATE, OTHER_KEY, "the key {key} does not belong to the certificate {cert}; name the one"),
    "another_kind_of_key": (CERTIFICATE, ED25519_KEY, "the key {key} does not belong to the certificate {cert}; name"),
    "an_encrypted_key": (CERTIFICATE, ENCRYPTED_KEY, "the key {key} is encrypted: expected one without a pass phrase"),
    "an_encrypted_key_beside_it": (CERTIFICATE + ENCRYPTED_KEY, None, "the key {cert} is encrypted: expected"),
    "none_beside_it": (CERTIFICATE, None, NO_KEY.replace("{key}", "{cert}")),
}


@pytest.mark.parametrize("certificate, key, says", TLS.values(), ids=TLS)
def test_a_certificate_or_key_that_cannot_be_is_named(tmp_path, certificate, key, says):
    paths = tmp_path / "cert.pem", tmp_path / "key.pem"
    for path, text in zip(paths, (certificate, key)):
        path.write_text(text or "")
    with pytest.raises(TridecodeError) as error:
        Tls(str(paths[0]), None if key is None else str(paths[1])).check()
    assert str(error.value).startswith(says.format(cert=paths[0], key=paths[1]))


def test_an_encrypted_key_asks_nothing_on_the_terminal(tmp_path):
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
        (["--served-model-name", ""], 2, "expected a name"),
        (["--ssl-keyfile", "key.pem"], 2, "--ssl-keyfile needs --ssl-certfile"),
        (["--ssl-certfile", "no.pem"], 1, "the certificate no.pem cannot be read: No such file"),
        (["--api-key-file", "no.txt"], 1, "no.txt: No such file or directory"),
        (["--host", "256.0.0.1"], 1, "cannot listen on 256.0.0.1"),
    ],
)
def test_wrong_options_are_one_line(capsys, argv, code, message):
    from tridecode import cli as commands

    try:
        got = commands.main(["serve", *argv])
    except SystemExit as exit:
        got = exit.code
    error = capsys.readouterr().err
    assert got == code and message in " ".join(error.split())


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys, monkeypatch):
    from tridecode import cli as commands

    monkeypatch.setattr(Engine, "load", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert commands.main(["serve", "--port", port]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert f"cannot listen on 127.0.0.1, port {port}: Address already in use" in told


def test_without_its_packages_serve_says_what_to_install():
    code = "import sys; sys.modules['starlette'] = None; from tridecode.cli import main; sys.exit(main(['serve']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1 and "pip install 'tridecode[serve]'" in done.stderr and done.stderr.count("\n") == 1


def test_a_directory_is_served_by_its_name(tmp_path):
    from tridecode.cli.serve import public_name

    (tmp_path / "my-model").mkdir()
    assert public_name(f"{tmp_path}/my-model/") == "my-model"
    assert (public_name(None), public_name("Qwen/Qwen3-4B")) == ("bundled", "Qwen/Qwen3-4B")
