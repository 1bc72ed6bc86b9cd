"""The gateway without Ray: real HTTP, with replicas that are engines or scripts."""

import asyncio
import gzip
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest
import uvicorn
from servers import GREEDY, LONG, Running, events, slow_passes, until

from tridecode.fleet import gateway as module
from tridecode.fleet.gateway import Backend, Gateway
from tridecode.fleet.policy import Policy
from tridecode.fleet.upstream import Address, ReplicaLost, Upstream
from tridecode.server.listen import bind, config
from tridecode.server.settings import Settings

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
KEEP_ALIVE = b"e\r\n: keep-alive\n\n\r\n"
TOKEN = b'd\r\ndata: {"a":1}\r\n'


class Script:
    """A replica that answers each request with the same bytes and then closes the connection."""

    def __init__(self, answer: bytes):
        self.requests = 0
        self._answer, self._bound = answer, socket.create_server(("127.0.0.1", 0))
        self.address = Address("script", "127.0.0.1", self._bound.getsockname()[1], "key")
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            connection, _ = self._bound.accept()
            with connection:
                connection.recv(1 << 20)
                self.requests += 1
                connection.sendall(self._answer)


class InOrder(Policy):
    """Chooses the first replica, then the next one."""

    def _idlest(self, hashes, ticket, loads):
        return next(iter(loads))


def backend(name: str, *addresses: Address, keys: tuple[str, ...] = (), adapters: tuple[str, ...] = ()) -> Backend:
    """Return a model whose replicas are tried in their order."""
    replicas = {each.replica: each for each in addresses}
    return Backend(name, lambda: replicas, InOrder(kind="load"), keys, adapters)


def address(running: Running, name: str = "one") -> Address:
    return Address(name, "127.0.0.1", running.port, "key", running.engine.slots, running.engine.capacity)


@contextmanager
def gateway(*backends: Backend, keys: tuple[str, ...] = (), join_ms: float = 0.0):
    """Run a gateway on a free port and yield a client of it."""
    every = (*keys, *(key for each in backends for key in each.keys))
    settings = Settings("fleet", grace=1, api_keys=every)
    front = Gateway(list(backends), settings, keys, join_ms)
    server, bound = uvicorn.Server(config(front.app, settings)), bind("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{bound.getsockname()[1]}", timeout=60) as client:
            client.gateway = front
            yield client
    finally:
        server.should_exit = True
        thread.join(30)


@pytest.fixture(scope="module")
def replica():
    from tridecode import Engine

    with (
        Engine.load(slots=2, max_queue=1, adapters={"json": "bundled"}) as engine,
        Running(engine, api_keys=("key",), max_queue=1, replica="label") as running,
    ):
        yield running


def test_the_gateway_returns_the_answers_of_the_replica(replica):
    with gateway(backend("bundled", address(replica))) as client:
        direct = replica.post("/v1/chat/completions", GREEDY, headers={"Authorization": "Bearer key"})
        answer = client.post("/v1/chat/completions", json=GREEDY)
        assert answer.status_code == 200
        assert answer.json()["choices"] == direct.json()["choices"]
        assert answer.headers["x-request-id"].startswith("req_")
        with client.stream("POST", "/v1/chat/completions", json=GREEDY | {"stream": True}) as stream:
            data = events(stream.iter_lines())
        assert data[-1] == "[DONE]"
        text = "".join(choice["delta"].get("content") or "" for each in data[:-1] for choice in each["choices"])
        assert text == direct.json()["choices"][0]["message"]["content"]
        wrong = client.post("/v1/chat/completions", json=GREEDY | {"temperatur": 1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperatur")


def test_a_compressed_body(replica):
    body, headers = gzip.compress(json.dumps(GREEDY).encode()), {"Content-Type": "application/json"}
    with gateway(backend("bundled", address(replica)), backend("other")) as client:
        answer = client.post("/v1/chat/completions", content=body, headers=headers | {"Content-Encoding": "gzip"})
        assert answer.status_code == 200


def test_models_and_unknown_models(replica):
    with gateway(backend("bundled", address(replica)), backend("other")) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["max_model_len"]) for card in cards] == [
            ("bundled", replica.engine.capacity),
            ("other", None),
        ]
        assert client.get("/v1/models/other").status_code == 200
        assert client.get("/v1/models/none").status_code == 404
        unknown = client.post("/v1/chat/completions", json=GREEDY | {"model": "none"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/v1/chat/completions", json={"messages": []}).json()["error"]["param"] == "model"
        assert client.get("/health").json() == {"status": "starting", "replicas": {"bundled": 1, "other": 0}}


def test_adapters_are_models(replica):
    with gateway(backend("bundled", address(replica), adapters=("json",)), backend("other")) as client:
        cards = client.get("/v1/models").json()["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [
            ("bundled", None), ("json", "bundled"), ("other", None),
        ]  # fmt: skip
        assert client.get("/v1/models/json").json()["root"] == "json"
        answer = client.post("/v1/chat/completions", json=GREEDY | {"model": "json", "max_tokens": 60}).json()
        assert answer["model"] == "json" and "answer" in json.loads(answer["choices"][0]["message"]["content"])


def test_keys_of_the_fleet_and_of_a_model(replica):
    own, shared = backend("bundled", address(replica), keys=("own",)), backend("other", address(replica))
    with gateway(own, shared, keys=("all",)) as client:

        def status(key: str | None, model: str) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = GREEDY | {"model": model, "max_tokens": 1}
            return client.post("/v1/chat/completions", json=body, headers=headers).status_code

        assert [status(key, "bundled") for key in (None, "wrong", "own", "all")] == [401, 401, 200, 200]
        assert status("all", "other") != 401  # The replica has another name, so it answers 404.
        assert status("own", "other") == 401
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200


def test_a_key_of_one_model_does_not_allow_another(replica):
    with gateway(*(backend(name, address(replica), keys=(name,)) for name in ("bundled", "other"))) as client:
        headers = {"Authorization": "Bearer other"}
        assert client.post("/v1/chat/completions", json=GREEDY, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "broken, stream",
    [(b"", False), (b"HTTP/1.1 200 OK\r\nContent-Le", False), (b"", True), (STREAM, True), (STREAM + KEEP_ALIVE, True)],
)
def test_a_request_without_a_token_is_retried_once(replica, broken, stream):
    script = Script(broken)
    with gateway(backend("bundled", script.address, address(replica))) as client:
        answer = client.post("/v1/chat/completions", json=GREEDY | {"stream": stream})
        assert answer.status_code == 200 and script.requests == 1
        assert ("[DONE]" in answer.text) == stream
        assert client.gateway.backends["bundled"].counts["retried"] == 1


def test_a_replica_that_cannot_be_reached_is_avoided(replica):
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    dead = Address("dead", "127.0.0.1", port, "key")
    with gateway(backend("bundled", dead, address(replica))) as client:
        for _ in range(2):  # The second request does not try it.
            assert client.post("/v1/chat/completions", json=GREEDY).status_code == 200
        assert client.gateway.backends["bundled"].counts["retried"] == 1


def test_two_failures_are_an_error():
    scripts = [Script(b""), Script(b"")]
    addresses = [Address(f"{i}", "127.0.0.1", script.address.port, "key") for i, script in enumerate(scripts)]
    with gateway(backend("bundled", *addresses)) as client:
        answer = client.post("/v1/chat/completions", json=GREEDY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "replica_failed")
        assert "retry-after" in answer.headers
        assert [script.requests for script in scripts] == [1, 1]


@pytest.mark.parametrize(
    "path, last",
    [
        ("/v1/chat/completions", "data: [DONE]"),
        ("/v1/messages", '"type":"error"'),
        ("/v1/responses", '"code":"replica_failed"'),
    ],
)
def test_a_stream_that_began_ends_with_an_error_event(path, last):
    script = Script(STREAM + TOKEN)
    other = Address("other", "127.0.0.1", script.address.port, "key")
    with gateway(backend("bundled", script.address, other)) as client:
        answer = client.post(path, json=GREEDY | {"stream": True})
        assert answer.text.startswith('data: {"a":1}') and script.requests == 1
        assert "the replica failed" in answer.text and last in answer.text.rstrip().splitlines()[-1]
        assert client.gateway.backends["bundled"].counts["broken"] == 1


def test_full_queues_are_status_429():
    answer = b'{"error": {"message": "the queue is full", "type": "server_error", "param": null, "code": "queue_full"}}'
    script = Script(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
    with gateway(backend("bundled", script.address)) as client:
        refused = client.post("/v1/chat/completions", json=GREEDY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1


def test_a_client_that_disconnects_cancels_its_request(replica, monkeypatch):
    slow_passes(replica.engine, monkeypatch)
    model = backend("bundled", address(replica))
    with gateway(model) as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            next(stream.iter_lines())
            assert model.policy.running == {"one": 1} and replica.engine.scheduler.busy
        until(lambda: not replica.engine.scheduler.busy and model.policy.running == {"one": 0})
        until(lambda: client.gateway.outcomes["cancelled"] == 1)


def test_a_large_answer_to_a_slow_client_arrives_whole():
    body = b"x" * (4 << 20)
    chunks = STREAM + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    with gateway(backend("bundled", Script(chunks).address)) as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            time.sleep(0.3)
            assert sum(len(part) for part in stream.iter_bytes()) == len(body)


def test_one_scrape_has_the_metrics_of_all_replicas(replica):
    with gateway(backend("bundled", address(replica), address(replica, "two"))) as client:
        lines = client.get("/metrics").text.splitlines()
    assert 'tridecode:fleet_replicas{model_name="bundled"} 2.0' in lines
    slots = [line for line in lines if line.startswith("tridecode:slots{")]
    assert len(slots) == 2 and 'replica="label"' in slots[0]
    assert lines.count("# TYPE tridecode:slots gauge") == 1


def test_a_gateway_that_stops_closes_connections_after_their_request(replica):
    with gateway(backend("bundled", address(replica))) as client:
        assert client.get("/health").headers.get("connection") is None
        client.gateway.stopping = True
        answer = client.post("/v1/chat/completions", json=GREEDY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert client.get("/health").status_code == 503


def test_an_answer_that_is_not_http_is_a_lost_replica():
    async def main() -> None:
        with pytest.raises(ReplicaLost):
            await Upstream.send(Script(b"nonsense\r\n\r\n").address, "GET", "/", {})

    asyncio.run(main())


def test_a_request_waits_for_a_replica_up_to_a_limit(replica, monkeypatch):
    monkeypatch.setattr(module, "READY_SECONDS", 0.1)
    ready: dict[str, Address] = {}
    model = Backend("bundled", lambda: dict(ready), Policy())
    with gateway(model) as client:
        answer = client.post("/v1/chat/completions", json=GREEDY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
        assert "retry-after" in answer.headers
        monkeypatch.setattr(module, "READY_SECONDS", 60)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(client.post, "/v1/chat/completions", json=GREEDY)
            ready["one"] = address(replica)
            assert waiting.result(60).status_code == 200


def test_a_replica_uses_the_identifier_of_the_gateway(replica):
    with gateway(backend("bundled", address(replica))) as client:
        answer = client.post("/v1/chat/completions", json=GREEDY)
    direct = replica.post("/v1/completions", {}, headers={"Authorization": "Bearer key", "X-Request-Id": "mine"})
    assert answer.headers["x-request-id"].startswith("req_") and direct.headers["x-request-id"] == "mine"
