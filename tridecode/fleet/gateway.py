"""The gateway: an ASGI application that sends each request to a replica and its response to the client.

It needs no Ray. It does not send requests through Ray either, because that costs more than the request itself: see
"Why a gateway" in docs/fleet.md.
"""

import asyncio
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..server import events
from ..server.access import GENERATIONS, ID_HEADERS, matches
from ..server.asgi import make_app, paths_of
from ..server.bodies import Bodies
from ..server.errors import ApiError, bad_request
from ..server.page import Page
from ..server.settings import Settings
from ..version import __version__
from .policy import Policy, Ticket
from .prefix import Chain, chain_of, fields_of
from .upstream import Address, ReplicaLost, Upstream, fetch

LARGEST_CONTEXT = 1 << 20  # Tokens. A replica refuses bodies that are too long for its own context.
OTHERS = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
ATTEMPTS = 2  # A request without a token is sent to at most this many replicas.
READY_SECONDS = 10.0  # Seconds for which a request waits if there is no replica.
LOST_SECONDS = 5.0  # Seconds for which a replica that cannot be reached gets no requests. Ray removes it meanwhile.
LOOK_SECONDS = 0.05
SCRAPE_SECONDS = 5.0
NOT_FORWARDED = {b"connection", b"keep-alive", b"transfer-encoding", b"date", *(name.encode() for name in ID_HEADERS)}
SESSION_HEADER = "x-session-id"
JOIN_STREAMS = 16  # Number of streams above which tokens are joined.
log = logging.getLogger("tridecode.server")


class Backend:
    """The replicas of one model.

    Args:
        name: the name of the model.
        replicas: returns the replicas that are ready, by name: the same object until they change.
        policy: chooses a replica.
        keys: API keys for this model.
        adapters: names of its adapters, which requests may name as their model.
    """

    def __init__(
        self, name: str, replicas: Callable[[], Mapping[str, Address]], policy: Policy, keys: tuple[str, ...] = (),
        adapters: tuple[str, ...] = (),
    ):  # fmt: skip
        self.name, self.policy, self.keys, self.adapters = name, policy, keys, adapters
        self.counts: Counter[str] = Counter()  # Event -> number: "retried", "broken".
        self._current, self._known = replicas, replicas()
        self._lost: dict[str, float] = {}  # Replica -> when it can be tried again.

    def replicas(self) -> Mapping[str, Address]:
        """Return the replicas that are ready, by name."""
        if (current := self._current()) is not self._known:
            for name in self._known.keys() - current.keys():
                self.policy.remove(name)
                self._lost.pop(name, None)
            self._known = current
        return self._known

    @asynccontextmanager
    async def lease(self, ticket: Ticket) -> AsyncIterator[Address]:
        """Choose a replica, and count the request as running there until the end of the context. Raises ApiError."""
        deadline = time.monotonic() + READY_SECONDS
        while True:
            now, replicas = time.monotonic(), self.replicas()
            slots = {name: each.slots for name, each in replicas.items() if self._lost.get(name, 0.0) <= now}
            name = self.policy.choose(ticket, slots)
            if name is not None:
                break
            if ticket.avoid or now > deadline:
                raise ApiError(503, f"no replica of {self.name} is ready; try again later", code="no_replica")
            await asyncio.sleep(LOOK_SECONDS)
        try:
            yield replicas[name]
        except ReplicaLost as lost:
            ticket.avoid.add(name)
            if not lost.refusal:
                self._lost[name] = time.monotonic() + LOST_SECONDS
            raise
        finally:
            self.policy.release(ticket)


FAMILIES: tuple[tuple[type, str, str, Callable[[Backend], int]], ...] = (
    (GaugeMetricFamily, "replicas", "replicas that are ready", lambda backend: len(backend.replicas())),
    (CounterMetricFamily, "retried", "requests sent to a second replica", lambda backend: backend.counts["retried"]),
    (CounterMetricFamily, "broken", "streams that a failure ended", lambda backend: backend.counts["broken"]),
    (CounterMetricFamily, "moved", "turns that left their busy replica", lambda backend: backend.policy.moved),
)


class Gateway:
    """The application in front of all models; `app` is its ASGI entry.

    Args:
        backends: the replicas of each model.
        settings: settings of the HTTP server. Its keys are the keys for all models and of each model.
        keys: API keys for all models. With neither these nor keys of models, requests need no key.
        join_ms: see Config.
    """

    def __init__(self, backends: list[Backend], settings: Settings, keys: tuple[str, ...] = (), join_ms: float = 0.0):
        self.backends = {backend.name: backend for backend in backends}
        self._named = {name: each for each in backends for name in (each.name, *each.adapters)}
        self.join_seconds, self._keys, self._created = join_ms / 1000, keys, int(time.time())
        self.outcomes: Counter[str] = Counter()
        self.streams = 0  # Streams that run.
        self.stopping = False  # Whether connections are closed after their request.
        self._bodies = Bodies(LARGEST_CONTEXT, asyncio.to_thread, settings.timeout)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.app = make_app(
            [
                *Page().routes,
                Route("/v1", self._paths),
                *(Route(path, self._forward, methods=["POST"]) for path in (*GENERATIONS, *OTHERS)),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._scrape),
                Route("/version", self._version),
            ],
            settings,
            self._observe,
        )

    def _observe(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1

    # ---- requests that replicas answer

    async def _forward(self, request: Request) -> "Forwarded":
        body, fields, chain = await self._bodies.read(request, parsed)
        backend = self._backend(fields.get("model"), request)
        session = request.headers.get(SESSION_HEADER) or fields.get("prompt_cache_key")
        return Forwarded(self, backend, Ticket(chain, session if isinstance(session, str) else ""), request, body)

    def _backend(self, name: Any, request: Request) -> Backend:
        """Return the model of a request. Raises ApiError if it does not exist, or if the key is for another one."""
        known = f"this server has {', '.join(self._named)}"
        if name is None and len(self.backends) > 1:
            raise bad_request(f"model is required: {known}", "model")
        name = next(iter(self.backends)) if name is None else name  # The replica decides whether it requires the name.
        if not isinstance(name, str) or (backend := self._named.get(name)) is None:
            message = f"the model {json.dumps(name)[:102]} does not exist: {known}"
            raise ApiError(404, message, "model", "model_not_found")
        keys = (*backend.keys, *self._keys)  # Without either, no model has keys.
        if keys and not matches(request.scope, keys):
            raise ApiError(401, f"the API key does not allow the model {name}; use another key", code="invalid_api_key")
        return backend

    # ---- requests that the gateway answers

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self._named]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._named:
            raise ApiError(404, f"the model {json.dumps(name[:100])} does not exist", "model", "model_not_found")
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        backend = self._named[name]
        context = min((each.context for each in backend.replicas().values()), default=None)
        parent = None if name == backend.name else backend.name
        facts = {"owned_by": "tridecode", "root": name, "parent": parent, "max_model_len": context}
        return {"id": name, "object": "model", "created": self._created} | facts

    async def _paths(self, request: Request) -> Response:
        return JSONResponse({"paths": paths_of(request)})

    async def _health(self, request: Request) -> Response:
        """Return status 200 while every model has a replica."""
        replicas = {name: len(backend.replicas()) for name, backend in self.backends.items()}
        status = "stopping" if self.stopping else "ok" if all(replicas.values()) else "starting"
        return JSONResponse({"status": status, "replicas": replicas}, 200 if status == "ok" else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _scrape(self, request: Request) -> Response:
        """Return the metrics of all replicas, which have the label `replica`, and of this gateway."""

        async def one(address: Address) -> bytes:
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(SCRAPE_SECONDS):
                    return await fetch(address, "/metrics")
            return b""

        addresses = [each for backend in self.backends.values() for each in backend.replicas().values()]
        texts = await asyncio.gather(*(one(address) for address in addresses))
        own = generate_latest(self._registry)
        return Response(merged([*texts, own]), media_type="text/plain; version=0.0.4; charset=utf-8")

    def collect(self):
        """Yield the metrics of this gateway; prometheus-client calls this for each scrape."""
        family = CounterMetricFamily("tridecode:fleet_requests", "requests by outcome", labels=["outcome"])
        for outcome, count in sorted(self.outcomes.items()):
            family.add_metric([outcome], count)
        yield family
        for kind, name, help, value in FAMILIES:
            family = kind(f"tridecode:fleet_{name}", help, labels=["model_name"])
            for model, backend in self.backends.items():
                family.add_metric([model], value(backend))
            yield family


class Forwarded:
    """ASGI application that sends one request to a replica, to another one if the first fails without a token."""

    def __init__(self, gateway: Gateway, backend: Backend, ticket: Ticket, request: Request, body: bytes):
        self._gateway, self._backend, self._ticket, self._body = gateway, backend, ticket, body
        self._path, self._id = request.scope["path"], request.scope["tridecode.record"].id
        self._headers = {"Content-Type": "application/json", "X-Request-Id": self._id}
        self._headed = False  # Whether the client has the head of the response.
        self._began = False  # Whether the client has any of the content of the response.

    async def __call__(self, scope, receive, send) -> None:
        """Answer the request."""
        record, task = scope["tridecode.record"], asyncio.current_task()
        gone = asyncio.create_task(disconnected(receive))
        gone.add_done_callback(lambda done: done.cancelled() or task is None or task.cancel())
        try:
            await self._attempts(send)
            record.outcome = "answered"
        except ApiError as problem:
            record.outcome = "failed" if self._headed or problem.status >= 500 else "refused"
            await self._send_error(problem, scope, send)
        except asyncio.CancelledError:
            if not gone.done():  # The server stops.
                raise
            record.outcome = "cancelled"
            if task is not None:
                task.uncancel()
        finally:
            gone.cancel()

    async def _attempts(self, send) -> None:
        """Send the request to one replica after the other until one answers it. Raises ApiError."""
        counts = self._backend.counts
        problem: ApiError | None = None
        for attempt in range(ATTEMPTS):
            try:
                async with self._backend.lease(self._ticket) as address:
                    counts["retried"] += attempt
                    return await self._relay(address, send)
            except ReplicaLost as lost:
                log.warning("%s: a replica did not answer: %s", self._id, lost)
                failed = ApiError(503, "the replica failed; send the request again", code="replica_failed")
                problem = lost.refusal or failed
                if self._began:
                    counts["broken"] += 1
                    break
            except ApiError as none_left:
                raise problem or none_left from None
        assert problem is not None
        raise problem

    async def _relay(self, address: Address, send) -> None:
        """Send the request to a replica and its response to the client.

        Raises:
            ReplicaLost: the replica failed, or another one may answer the request.
            ApiError: the request failed.
        """
        upstream = await Upstream.send(address, "POST", self._path, self._headers, self._body)
        try:
            if upstream.status == 503:
                problem = refusal(await upstream.read_all())
                raise ReplicaLost(problem.message, problem)
            headers = [(name, value) for name, value in upstream.headers if name not in NOT_FORWARDED]
            if self._gateway.stopping:
                headers.append((b"connection", b"close"))
            start = {"type": "http.response.start", "status": upstream.status, "headers": headers}
            if any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers):
                return await self._relay_stream(upstream, start, send)
            body = await upstream.read_all()  # The whole body first, because a replica that fails now can be replaced.
            if self._headed:  # The first replica sent only comments, then it failed.
                raise ApiError(upstream.status, msgspec.json.decode(body)["error"]["message"])
            self._headed = self._began = True
            await send(start)
            await send({"type": "http.response.body", "body": body})
        finally:
            upstream.close()

    async def _relay_stream(self, upstream: Upstream, start: dict[str, Any], send) -> None:
        gateway = self._gateway
        gateway.streams += 1
        try:
            while data := await upstream.read():
                if not self._headed:
                    self._headed = True
                    await send(start)
                if not self._began and data.replace(events.KEEP_ALIVE, b""):
                    self._began, self._body = True, b""
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if gateway.join_seconds and gateway.streams > JOIN_STREAMS:
                    await asyncio.sleep(gateway.join_seconds)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gateway.streams -= 1

    async def _send_error(self, problem: ApiError, scope, send) -> None:
        with suppress(OSError):
            if not self._headed:
                response = JSONResponse(problem.body(self._path), problem.status, problem.headers)
                return await response(scope, None, send)  # type: ignore[arg-type]  # It receives nothing.
            if self._path == "/v1/messages":
                data = events.named_event(problem.body(self._path))
            elif self._path == "/v1/responses":
                error = {"type": "error", "code": problem.code, "message": problem.message, "param": None}
                data = events.named_event(error)
            else:
                data = events.event(problem.body()) + events.DONE
            await send({"type": "http.response.body", "body": data})


def parsed(body: bytes) -> tuple[bytes, dict[str, Any], Chain]:
    """Return a body, its fields that decide where it goes, and the hashes of its prompt."""
    try:
        fields = fields_of(body)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        fields = {}  # The body is wrong, and a replica names the error.
    return body, fields, chain_of(fields)


async def disconnected(receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def refusal(body: bytes) -> ApiError:
    """Return the error for a request that a replica has refused with status 503."""
    if b"the queue is full" in body:
        return ApiError(429, "all queues are full; try again later", code="queue_full")
    return ApiError(503, "no replica can run the request at present; send it again", code="no_replica")


def merged(texts: list[bytes]) -> bytes:
    """Return several texts in Prometheus' format as one, in which each family of metrics has its comments once."""
    families: dict[bytes, list[bytes]] = {}
    for text in texts:
        own: list[bytes] = []
        for line in text.splitlines(keepends=True):
            if line.startswith(b"# HELP "):
                name = line.split(b" ", 3)[2]
                own = families.setdefault(name, [])
                known = bool(own)
            if not (line.startswith(b"#") and known):
                own.append(line)
    return b"".join(line for lines in families.values() for line in lines)
