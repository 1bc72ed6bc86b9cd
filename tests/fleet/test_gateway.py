"""The gateway without Ray: real HTTP, with replicas that are engines or scripts."""

import asyncio
import json
import socket
import threading
import time
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest
from servers import GREEDY, LONG, Running, events, slow_passes, until

from tridecode.fleet.gateway import Gateway, full
from tridecode.fleet.listener import Listener
from tridecode.fleet.upstream import Address, ReplicaLost
from tridecode.server.errors import ApiError
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


class Replicas:
    """A model whose replicas are tried in their order."""

    def __init__(self, *addresses: Address, keys: tuple[str, ...] = ()):
        self.addresses, self.keys, self.leases = addresses, keys, 0

    def replicas(self):
        return self.addresses

    @asynccontextmanager
    async def lease(self, ticket):
        left = [address for address in self.addresses if address.replica not in ticket.avoid]
        if not left:
            raise full()
        self.leases += 1
        try:
            yield left[0]
        finally:
            self.leases -= 1


def address(running: Running, name: str, key: str = "key") -> Address:
    return Address(name, "127.0.0.1", running.port, key, running.engine.slots, running.engine.capacity)


@contextmanager
def gateway(keys: tuple[str, ...] = (), join_ms: float = 0.0, **backends: Replicas):
    """Run a gateway on a free port and yield a client of it."""
    front = Gateway(backends, Settings("fleet", grace=1), keys, join_ms)
    listener = Listener(front.app, front.settings, "127.0.0.1", 0)
    listener.start()
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{listener.port}", timeout=60) as client:
            client.gateway = front
            yield client
    finally:
        listener.stop()


@pytest.fixture(scope="module")
def replica():
    from tridecode import Engine

    with Engine.load(slots=2, max_queue=1) as engine, Running(engine, api_key="key", max_queue=1) as running:
        yield running


def test_the_gateway_returns_the_answers_of_the_replica(replica):
    with gateway(bundled=Replicas(address(replica, "one"))) as client:
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


def test_models_and_unknown_models(replica):
    backends = {"bundled": Replicas(address(replica, "one")), "other": Replicas()}
    with gateway(**backends) as client:
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


def test_keys_of_the_fleet_and_of_a_model(replica):
    own, shared = Replicas(address(replica, "one"), keys=("own",)), Replicas(address(replica, "one"))
    with gateway(("all",), bundled=own, other=shared) as client:

        def status(key: str | None, model: str) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            body = GREEDY | {"model": model, "max_tokens": 1}
            return client.post("/v1/chat/completions", json=body, headers=headers).status_code

        assert [status(key, "bundled") for key in (None, "wrong", "own", "all")] == [401, 401, 200, 200]
        assert status("all", "other") != 401  # The replica has another name, so it answers 404.
        assert client.get("/v1/models").status_code == 401
        assert client.get("/health").status_code == 200


def test_a_key_of_one_model_does_not_allow_another(replica):
    one, two = (Replicas(address(replica, "one"), keys=(key,)) for key in ("first", "second"))
    with gateway(bundled=one, other=two) as client:
        headers = {"Authorization": "Bearer second"}
        assert client.post("/v1/chat/completions", json=GREEDY, headers=headers).status_code == 401


@pytest.mark.parametrize(
    "broken, stream",
    [(b"", False), (b"HTTP/1.1 200 OK\r\nContent-Le", False), (b"", True), (STREAM, True), (STREAM + KEEP_ALIVE, True)],
)
def test_a_request_without_a_token_is_retried_once(replica, broken, stream):
    script = Script(broken)
    with gateway(bundled=Replicas(script.address, address(replica, "one"))) as client:
        answer = client.post("/v1/chat/completions", json=GREEDY | {"stream": stream})
        assert answer.status_code == 200 and script.requests == 1
        assert ("[DONE]" in answer.text) == stream
        assert client.gateway.counts["bundled", "retried"] == 1


def test_a_replica_that_cannot_be_reached_is_avoided(replica):
    free = socket.create_server(("127.0.0.1", 0))
    port = free.getsockname()[1]
    free.close()
    dead = Address("dead", "127.0.0.1", port, "key")
    with gateway(bundled=Replicas(dead, address(replica, "one"))) as client:
        assert client.post("/v1/chat/completions", json=GREEDY).status_code == 200


def test_two_failures_are_an_error():
    scripts = [Script(b""), Script(b"")]
    addresses = [Address(f"{i}", "127.0.0.1", script.address.port, "key") for i, script in enumerate(scripts)]
    with gateway(bundled=Replicas(*addresses)) as client:
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
    with gateway(bundled=Replicas(script.address, other)) as client:
        answer = client.post(path, json=GREEDY | {"stream": True})
        assert answer.text.startswith('data: {"a":1}') and script.requests == 1
        assert "the replica failed" in answer.text and last in answer.text.rstrip().splitlines()[-1]
        assert client.gateway.counts["bundled", "broken"] == 1


def test_full_queues_are_status_429():
    answer = b'{"error": {"message": "the queue is full", "type": "server_error", "param": null, "code": "queue_full"}}'
    script = Script(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)
    with gateway(bundled=Replicas(script.address)) as client:
        refused = client.post("/v1/chat/completions", json=GREEDY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1


def test_a_client_that_disconnects_cancels_its_request(replica, monkeypatch):
    slow_passes(replica.engine, monkeypatch)
    replicas = Replicas(address(replica, "one"))
    with gateway(bundled=replicas) as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            next(stream.iter_lines())
            assert replicas.leases == 1 and replica.engine.scheduler.busy
        until(lambda: not replica.engine.scheduler.busy and not replicas.leases)
        until(lambda: client.gateway.outcomes["cancelled"] == 1)


def test_a_large_answer_to_a_slow_client_arrives_whole():
    body = b"x" * (4 << 20)
    chunks = STREAM + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n"
    with gateway(bundled=Replicas(Script(chunks).address)) as client:
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
            time.sleep(0.3)
            assert sum(len(part) for part in stream.iter_bytes()) == len(body)


def test_one_scrape_has_the_metrics_of_all_replicas(replica):
    with gateway(bundled=Replicas(address(replica, "one"), address(replica, "two"))) as client:
        lines = client.get("/metrics").text.splitlines()
    assert 'tridecode:fleet_replicas{model_name="bundled"} 2' in lines
    slots = [line for line in lines if line.startswith("tridecode:slots{")]
    assert len(slots) == 2 and {'replica="one"' in line for line in slots} == {True, False}
    assert lines.count("# TYPE tridecode:slots gauge") == 1


def test_a_gateway_that_stops_closes_connections_after_their_request(replica):
    with gateway(bundled=Replicas(address(replica, "one"))) as client:
        assert client.get("/health").headers.get("connection") is None
        client.gateway.stopping = True
        answer = client.post("/v1/chat/completions", json=GREEDY)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        assert client.get("/health").status_code == 503


def test_upstream_errors_are_replica_lost():
    from tridecode.fleet.upstream import Upstream

    async def main() -> None:
        script = Script(b"nonsense\r\n\r\n")
        with pytest.raises(ReplicaLost):
            await Upstream.send(script.address, "GET", "/", {})

    asyncio.run(main())


def test_lease_errors_reach_the_client():
    class Failing(Replicas):
        @asynccontextmanager
        async def lease(self, ticket):
            raise ApiError(503, "no replica of bundled is ready; try again later", code="no_replica")
            yield

    with gateway(bundled=Failing()) as client:
        answer = client.post("/v1/chat/completions", json=GREEDY)
        assert (answer.status_code, json.loads(answer.text)["error"]["code"]) == (503, "no_replica")
