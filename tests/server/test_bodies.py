"""Bodies: their types, encodings and sizes, and the threads that parse them."""

import gzip
import json
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from servers import ANSWER, GREEDY, Running, until

from tridecode import Engine
from tridecode.server import app, bodies


@pytest.fixture(scope="module")
def running():
    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        yield running


@pytest.fixture
def parsed(monkeypatch):
    """The thread and the size of each parsed body."""
    calls, parse = [], app.parse_body

    def parse_body(body, body_type):
        calls.append((threading.current_thread().name, len(body)))
        return parse(body, body_type)

    monkeypatch.setattr(app, "parse_body", parse_body)
    return calls


def test_announced_size_is_checked_before_the_body_arrives(running, parsed):
    with socket.create_connection(("127.0.0.1", running.port), 20) as client:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        client.sendall(f"{head}Content-Length: 30000000\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 413 ")
    assert parsed == []


def test_size_of_chunked_body_is_checked_while_it_arrives(running, parsed, monkeypatch):
    monkeypatch.setattr(running.server.bodies, "max_bytes", 1 << 17)
    sent = []

    def parts():
        for _ in range(100):
            sent.append(1 << 16)
            yield b" " * (1 << 16)

    got = httpx.post(f"{running.url}/tokenize", content=parts(), headers={"Content-Type": "application/json"})
    assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large") and parsed == []


MANY_VALUES = {
    "ids": b'{"model": "bundled", "prompt": [' + b"1," * 1_000_000 + b"1]}",
    "objects": b'{"model": "bundled", "messages": [' + b"{}," * 1_000_000 + b"{}]}",
    "lists": b'{"model": "bundled", "prompt": [' + b"[1]," * 100_000 + b"[1]]}",
    "fields": b'{"model": "bundled", ' + b'"a":1,' * 500_000 + b'"prompt": "a"}',
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("body", MANY_VALUES.values(), ids=MANY_VALUES)
def test_number_of_values_is_checked_before_parsing(running, parsed, body, packed):
    headers = {"Content-Encoding": "gzip"} if packed else {}
    got = running.post("/v1/completions", gzip.compress(body, 1) if packed else body, headers=headers)
    assert (got.status_code, got.json()["error"]["code"]) == (413, "body_too_large") and parsed == []


def test_large_bodies_are_parsed_and_checked_in_a_thread(running, parsed, monkeypatch):
    threads = []
    messages = app.chat_messages
    monkeypatch.setattr(
        app, "chat_messages", lambda parts: (threads.append(threading.current_thread().name), messages(parts))[1]
    )
    large = GREEDY | {"metadata": {"text": "a" * bodies.SMALL_BODY}}
    for body in (GREEDY, large):
        got = running.post("/v1/chat/completions", body)
        assert got.json()["choices"][0]["message"]["content"] == ANSWER
    (small_thread, _), (large_thread, size) = parsed
    assert large_thread.startswith("prompt") and size > bodies.SMALL_BODY
    assert not small_thread.startswith("prompt") and threads == [small_thread, large_thread]


def test_limits_follow_the_context():
    limits = [(bodies.Bodies(context, None, None).max_bytes >> 20) for context in (2048, 1 << 17, 1 << 20)]
    assert limits == [4, 8, 32]


def test_large_bodies_share_a_budget(running, monkeypatch):
    monkeypatch.setattr(running.server.bodies, "budget", 1 << 20)
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    large = b'{"prompt": "' + b"a" * (1 << 19) + b'"}'
    with ExitStack() as stack:
        for i in range(2):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", running.port), 20))
            client.sendall(f"{head}Content-Length: {len(large)}\r\n\r\n".encode() + large[:-1])
            size = (i + 1) * (len(large) - 1 - bodies.SMALL_BODY)
            until(lambda size=size: running.server.bodies._buffered == size)
        got = running.post("/tokenize", large)
        assert (got.status_code, got.json()["error"]["code"]) == (503, "overloaded")
        assert got.headers["retry-after"] == "1"
        assert running.post("/tokenize", {"prompt": "small"}).status_code == 200
    until(lambda: running.server.bodies._buffered == 0)
    assert running.post("/tokenize", large).json()["error"]["code"] == "context_length_exceeded"
    assert running.server.bodies._buffered == 0


def test_large_bodies_are_parsed_one_at_a_time(running, monkeypatch):
    active, most, parse = [], [], app.parse_body

    def slow(body, body_type):
        active.append(body)
        most.append(len(active))
        time.sleep(0.05)
        active.remove(body)
        return parse(body, body_type)

    monkeypatch.setattr(app, "parse_body", slow)
    large = json.dumps({"prompt": "a" * (1 << 17)}).encode()
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda _: running.post("/tokenize", large).status_code, range(4)))
    assert got == [400] * 4 and most == [1] * 4


# ---- types and encodings


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"])
def test_only_json_is_accepted(running, parsed, kind, path):
    headers = {} if kind is None else {"Content-Type": kind}
    got = httpx.post(f"{running.url}{path}", content=json.dumps(GREEDY), headers=headers)
    assert got.status_code == 415 and "application/json" in got.json()["error"]["message"] and parsed == []


def test_charset_and_case_of_the_type_are_ignored(running):
    got = running.post("/tokenize", {"prompt": "a"}, headers={"Content-Type": "Application/JSON; charset=UTF-8"})
    assert got.status_code == 200


DATA = json.dumps(GREEDY).encode()
ENCODED = {
    "gzip": ("gzip", gzip.compress(DATA)),
    "x-gzip": ("X-GZIP", gzip.compress(DATA)),
    "members": ("gzip", gzip.compress(DATA[:20]) + gzip.compress(DATA[20:])),
    "deflate": ("deflate", zlib.compress(DATA)),
    "identity": ("identity", DATA),
}


@pytest.mark.parametrize("encoding, body", ENCODED.values(), ids=ENCODED)
def test_compressed_bodies_are_decoded(running, encoding, body):
    got = running.post("/v1/chat/completions", body, headers={"Content-Encoding": encoding})
    assert got.json()["choices"][0]["message"]["content"] == ANSWER


REFUSED = {
    "not_gzip": ("gzip", DATA, 400, "invalid_encoding"),
    "truncated": ("gzip", gzip.compress(DATA)[:-9], 400, "invalid_encoding"),
    "bomb": ("gzip", gzip.compress(bytes(1 << 28), 1), 413, "body_too_large"),
    "brotli": ("br", DATA, 415, "unsupported_encoding"),
    "twice": ("gzip, gzip", gzip.compress(gzip.compress(DATA)), 415, "unsupported_encoding"),
}


@pytest.mark.parametrize("encoding, body, status, code", REFUSED.values(), ids=REFUSED)
def test_other_encodings_are_refused(running, parsed, encoding, body, status, code):
    got = running.post("/v1/chat/completions", body, headers={"Content-Encoding": encoding})
    assert (got.status_code, got.json()["error"]["code"]) == (status, code) and parsed == []
    assert ("accept-encoding" in got.headers) == (status == 415)
