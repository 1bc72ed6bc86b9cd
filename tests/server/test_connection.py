"""Connections of slow, wrong and hostile clients."""

import json
import socket
import struct
import time

import pytest
from servers import ANSWER, GREEDY, LONG, Running, slow_passes, until

from tridecode import Engine
from tridecode.errors import TridecodeError
from tridecode.server import connection, listen
from tridecode.server.connection import Connection, Connections


@pytest.fixture(scope="module")
def engine():
    with Engine.load(device="cpu", slots=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def running(engine):
    with Running(engine) as running:
        yield running


def opened(running: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", running.port), 30)


def rest(client: socket.socket) -> bytes:
    """Return all bytes until the server closes the connection."""
    return b"".join(iter(lambda: client.recv(1 << 16), b""))


def post(body: dict, *headers: str, version: str = "1.1", path: str = "/v1/chat/completions") -> bytes:
    """Return the bytes of a request."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


def error_of(response: bytes) -> tuple[int, dict]:
    """Return the status and the error of a response, after a check of its form."""
    head, _, body = response.partition(b"\r\n\r\n")
    lines = head.decode().lower().split("\r\n")
    assert "content-type: application/json" in lines and "connection: close" in lines
    assert any(line.startswith("x-request-id: req_") for line in lines)
    return int(head.split()[1]), json.loads(body)["error"]


# ---- heads


HEAD = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "header": b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: ",
    "url": b"GET /",
    "empty_lines": None,
    "trailer": CHUNKED + b"0\r\nX: ",
    "chunk_extension": CHUNKED + b"5;",
}


@pytest.mark.parametrize("start", ENDLESS.values(), ids=ENDLESS)
def test_endless_head_is_refused_at_the_limit(running, start, monkeypatch):
    parsed = []
    feed = Connection._feed
    monkeypatch.setattr(Connection, "_feed", lambda self, part: (parsed.append(len(part)), feed(self, part)))
    with opened(running) as client:
        client.sendall(b"\r\n" * (1 << 17) if start is None else start + b"a" * (1 << 18))
        status, _ = error_of(rest(client))
    assert status in (400, 431)
    assert sum(parsed) <= connection.MAX_HEAD_BYTES + 2 * connection.SLICE


def test_many_headers_are_refused(running):
    with opened(running) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 1000 + b"\r\n")
        assert error_of(rest(client))[0] == 431


def test_large_head_within_the_limit_is_accepted(running):
    assert running.get("/health", headers={"x-large": "a" * 60_000}).status_code == 200


def test_incomplete_head_is_closed_at_its_deadline(engine, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.3)
    with Running(engine) as running, opened(running) as half, opened(running) as silent, opened(running) as second:
        half.sendall(b"GET /health HTTP/1.1\r\nHo")
        second.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200 OK" in second.recv(1000)
        second.sendall(b"G")  # The deadline applies to every head of a connection.
        assert error_of(rest(half))[0] == 408 and rest(silent) == b""
        assert error_of(rest(second))[0] == 408


def test_parser_errors_are_json(running):
    for data in (b"hello\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n", b"\x16\x03\x01\x02\x00" + bytes(100)):
        with opened(running) as client:
            client.sendall(data)
            status, error = error_of(rest(client))
        assert status == 400 and error["type"] == "invalid_request_error", error
    with opened(running) as client:
        client.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com\r\n\r\n")
        assert error_of(rest(client))[0] == 405


def test_wrong_bytes_behind_a_request_do_not_damage_its_answer(running):
    with opened(running) as client:
        client.sendall(post(GREEDY | {"stream": True}) + b"\0\0\0 no request")
        answer = rest(client)
    assert answer.count(b"HTTP/1.1") == 1 and answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


# ---- limit of connections


def test_at_the_limit_the_longest_waiting_connection_is_closed(engine, caplog):
    with Running(engine, max_connections=3) as running:
        first, *others = (opened(running) for _ in range(3))
        first.sendall(b"GET /health HTTP/1.1\r\nHo")
        assert running.get("/health").status_code == 200
        assert rest(first) == b""
        for other in others:
            other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert b"200 OK" in rest(other)
    assert caplog.text.count("the limit of --max-connections") == 1


def test_connections_with_requests_are_not_closed_at_the_limit(engine, monkeypatch):
    slow_passes(engine, monkeypatch)
    with Running(engine, max_connections=2) as running:
        with running.stream(LONG) as one, running.stream(LONG) as two:
            streams = one.iter_lines(), two.iter_lines()
            assert all([next(stream) for stream in streams])
            with opened(running) as third:
                status, error = error_of(rest(third))
            assert all([next(stream) == "" and next(stream) for stream in streams])
        assert (status, error["code"]) == (503, "too_many_connections")
        until(lambda: engine.scheduler.load().requests == 0)
        assert running.get("/health").status_code == 200


def test_limit_of_open_files_follows_the_limit_of_connections(monkeypatch):
    changed = []
    monkeypatch.setattr(listen.resource, "getrlimit", lambda kind: (1024, 4096))
    monkeypatch.setattr(listen.resource, "setrlimit", lambda kind, limits: changed.append(limits))
    listen.allow_files(500)
    listen.allow_files(2000)
    assert changed == [(2000 + listen.OTHER_FILES, 4096)]
    with pytest.raises(TridecodeError, match="--max-connections 3840"):
        listen.allow_files(4000)


def test_idle_connection_is_kept_for_the_announced_time(running):
    with opened(running) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"keep-alive: timeout=75\r\n" in client.recv(4096).lower()
        until(lambda: any(each.timeout_keep_alive_task for each in running.connections()))
        (kept,) = [each for each in running.connections() if each.timeout_keep_alive_task]
        assert 70 < kept.timeout_keep_alive_task.when() - kept.loop.time() < 75.5
    with opened(running) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"keep-alive" not in rest(client).lower()


# ---- bodies and pipelines


def test_other_connections_run_between_the_parts_of_a_body(running, monkeypatch):
    """A body of tiny chunks is parsed in rounds, and waits for them in a bounded buffer."""
    sizes = []
    parse = Connection._parse

    def counted_parse(self):
        sizes.append(len(self._unparsed))
        parse(self)

    monkeypatch.setattr(Connection, "_parse", counted_parse)
    with opened(running) as client:
        client.sendall(HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 300_000)
        client.sendall(b"2\r\n{}\r\n0\r\n\r\n")
        assert error_of(rest(client))[0] == 400
    assert len(sizes) >= 6 * 300_000 // (connection.SLICE * connection.SLICES)
    assert max(sizes) <= connection.MAX_UNPARSED + 2 * (1 << 18)


def test_bytes_of_a_lost_connection_are_not_parsed(running, monkeypatch):
    parses = []
    parse = Connection._parse
    monkeypatch.setattr(Connections, "delay", lambda self: 0.02)
    monkeypatch.setattr(Connection, "_parse", lambda self: (parses.append(self), parse(self)))
    with opened(running) as client:
        client.sendall(CHUNKED + b"1\r\n \r\n" * 10_000)  # Several rounds of a body.
        until(lambda: parses)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # Close by a reset.
    until(lambda: not running.connections())
    time.sleep(0.1)  # A round that is scheduled already.
    count = len(parses)
    time.sleep(0.3)
    assert len(parses) == count


def test_parsing_takes_a_share_of_the_time(monkeypatch):
    now, connections = [100.0], Connections(10)
    monkeypatch.setattr(connection.time, "monotonic", lambda: now[0])
    parsed = 0.0
    for _ in range(1000):
        now[0] += connections.delay()
        started = now[0]
        now[0] += 0.0003
        parsed += now[0] - started
        connections.add(started)
    assert parsed == pytest.approx((now[0] - 100) * connection.PARSING, rel=0.02)


def test_pipelined_requests_wait_in_a_bounded_queue(engine, monkeypatch):
    slow_passes(engine, monkeypatch)
    with Running(engine) as running, opened(running) as client:
        client.settimeout(1)
        with pytest.raises(TimeoutError):  # The server stops reading.
            client.sendall(post(LONG, path="/v1/completions") + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 2_000_000)
        (served,) = running.connections()
        assert len(served.pipeline) <= connection.SLICE // 20
        assert len(served._unparsed) <= connection.MAX_UNPARSED + (1 << 19)
    with Running(engine) as running, opened(running) as client:
        client.sendall(post(GREEDY) + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        client.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answers = rest(client)
    assert answers.count(b"HTTP/1.1 200 OK") == 1002 and answers.index(ANSWER.encode()) < answers.index(b'"ok"')


# ---- protocol versions


@pytest.mark.parametrize("segments", ["one", "two"])
@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_offered_upgrade_is_ignored(running, segments, framing):
    data = json.dumps(GREEDY).encode()
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAA\r\n"
    )
    head += b"Transfer-Encoding: chunked\r\n\r\n" if framing == "chunked" else b"Content-Length: %d\r\n\r\n" % len(data)
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data) if framing == "chunked" else data
    last = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with opened(running) as client:
        client.sendall(head if segments == "two" else head + body + last)
        if segments == "two":
            time.sleep(0.1)
            client.sendall(body + last)
        answer = rest(client)
    assert answer.count(b"HTTP/1.1 200 OK") == 2 and ANSWER.encode() in answer and b'"ok"' in answer


def test_http_1_0_has_no_chunks(running):
    for stream, end in ((True, b"data: [DONE]\n\n"), (False, b"}")):
        with opened(running) as client:
            client.sendall(post(GREEDY | {"stream": stream}, version="1.0"))
            head, _, body = rest(client).partition(b"\r\n\r\n")
        assert b"200 OK" in head and b"transfer-encoding" not in head.lower()
        assert body.startswith((b"data: {", b"{")) and body.endswith(end)


# ---- half-closed connections


@pytest.fixture(params=["at_once", "later"])
def pace(request, monkeypatch):
    """Whether received bytes are parsed at once, or wait because parsing took too much time."""
    if request.param == "later":
        monkeypatch.setattr(Connections, "delay", lambda self: 0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_half_closed_client_gets_its_answer(running, stream, pace):
    with opened(running) as client:
        client.sendall(post(GREEDY | {"stream": stream}))
        client.shutdown(socket.SHUT_WR)
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and answer.count(b"HTTP/1.1") == 1
    assert (b"data: [DONE]" if stream else ANSWER.encode()) in answer


def test_half_closed_client_gets_the_answer_to_a_slow_request(engine, monkeypatch):
    """The client gets the first bytes of the response before the response."""
    monkeypatch.setattr(connection, "PROBE_SECONDS", 0.05)
    slow_passes(engine, monkeypatch, 0.05)
    with Running(engine) as running, opened(running) as client:
        client.sendall(post(GREEDY))
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1000) == b"H"
        answer = b"H" + rest(client)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and ANSWER.encode() in answer


@pytest.mark.parametrize("stream", [True, False])
def test_gone_client_cancels_its_request(engine, monkeypatch, stream):
    slow_passes(engine, monkeypatch, 0.02)
    with Running(engine) as running:
        client = opened(running)
        client.sendall(post(LONG | {"stream": stream}, path="/v1/completions"))
        until(lambda: engine.scheduler.load().rows == 1)
        client.close()
        until(lambda: engine.scheduler.load().requests == 0, 5)
        assert running.metric("requests_total", 'outcome="cancelled"') == 1


@pytest.mark.parametrize("stream", [True, False])
def test_client_gone_before_parsing_cancels_its_request(engine, monkeypatch, stream):
    monkeypatch.setattr(Connections, "delay", lambda self: 0.2)
    slow_passes(engine, monkeypatch, 0.02)
    with Running(engine) as running:
        with opened(running) as client:
            client.sendall(post(LONG | {"stream": stream}, path="/v1/completions"))
        until(lambda: running.metric("requests_total", 'outcome="cancelled"') == 1, 10)
    assert engine.scheduler.load().requests == 0


def test_incomplete_request_of_a_half_closed_client_is_closed(running, pace):
    with opened(running) as client:
        client.sendall(post(GREEDY)[:-5])
        client.shutdown(socket.SHUT_WR)
        assert rest(client) == b""
    until(lambda: not running.connections())
