"""The gateway: an ASGI application that sends each request to a replica and its response to the client.

It needs no Ray: `Backend` provides the replicas of a model.
"""

import asyncio
import hmac
import json
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..server import events
from ..server.access import ID_HEADERS, PUBLIC, Access, keys_of
from ..server.app import handle_api_error, handle_http_error, handle_internal_error, paths_of
from ..server.errors import ApiError, bad_request
from ..server.page import page
from ..server.settings import MAX_BODY_BYTES, Settings
from ..version import __version__
from .metrics import merged
from .prefix import Ticket, chain_of, fields_of
from .upstream import Address, ReplicaLost, Upstream, fetch

GENERATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
OTHERS = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
ATTEMPTS = 2  # A request without a token is sent to at most this many replicas.
RETRIED = ("stopping", "engine_failed", "queue_full")  # Codes of errors that another replica may not have.
NOT_FORWARDED = {b"connection", b"keep-alive", b"transfer-encoding", b"date", *(name.encode() for name in ID_HEADERS)}
SESSION_HEADER = b"x-session-id"
JOIN_STREAMS = 16  # Number of streams above which tokens are joined.
RETRY_AFTER = 1
log = logging.getLogger("tridecode.server")


class Backend(Protocol):
    """The replicas of one model."""

    keys: tuple[str, ...]

    def lease(self, ticket: Ticket) -> AbstractAsyncContextManager[Address]:
        """Return a context in which a place on a replica is reserved for a request. Raises ApiError."""
        ...

    def replicas(self) -> Sequence[Address]:
        """Return the replicas that are ready."""
        ...


class Gateway:
    """The ASGI application in front of all models; `app` is its entry.

    Args:
        backends: name of a model -> its replicas.
        settings: settings of the HTTP server.
        keys: API keys for all models. With neither these nor keys of models, requests need no key.
        join_ms: see Config.
    """

    def __init__(
        self, backends: Mapping[str, Backend], settings: Settings, keys: tuple[str, ...] = (), join_ms: float = 0.0
    ):
        self.backends, self.settings, self.join_seconds = backends, settings, join_ms / 1000
        self._keys, self._created = keys, int(time.time())
        self.counts: Counter[tuple[str, str]] = Counter()  # (model, event) -> number.
        self.outcomes: Counter[str] = Counter()
        self.streams = 0  # Streams that run.
        self._page, self._page_headers = page()
        self.stopping = False  # Whether connections are closed after their request.
        middleware = [Middleware(Guard, settings=settings, ended=self._observe, gateway=self, keys=self._all_keys())]
        if settings.cors:
            headers = [*ID_HEADERS, "retry-after"]
            options = {"allow_origins": settings.cors, "allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
            middleware.insert(0, Middleware(CORSMiddleware, expose_headers=headers, **options))  # type: ignore[arg-type]
        self.app = Starlette(
            routes=[
                Route("/", self._root),
                Route("/v1", self._paths),
                *(Route(path, self._forward, methods=["POST"]) for path in (*GENERATIONS, *OTHERS)),
                Route("/v1/models", self._models),
                Route("/v1/models/{model:path}", self._model),
                Route("/health", self._health),
                Route("/metrics", self._scrape),
                Route("/version", self._version),
            ],
            middleware=middleware,
            exception_handlers={
                ApiError: handle_api_error,
                HTTPException: handle_http_error,
                500: handle_internal_error,
            },
        )
        self.app.router.redirect_slashes = False

    def _all_keys(self) -> tuple[str, ...]:
        return (*self._keys, *(key for backend in self.backends.values() for key in backend.keys))

    def _observe(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1

    # ---- requests that replicas answer

    async def _forward(self, request: Request) -> "Forwarded":
        body = await read_body(request)
        try:
            fields = fields_of(body)
        except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
            # The body may be compressed or wrong. A replica reads the one and names the error of the other.
            fields = {}
        name = self._model_name(fields.get("model"), request)
        session = request.headers.get(SESSION_HEADER.decode()) or fields.get("prompt_cache_key")
        ticket = Ticket(
            chain_of(fields), session if isinstance(session, str) else "", id=request.scope["tridecode.record"].id
        )
        return Forwarded(self, name, ticket, request, body)

    def _model_name(self, name: Any, request: Request) -> str:
        """Return the name of the model, whose keys must contain that of the request. Raises ApiError."""
        if name is None and len(self.backends) == 1:
            name = next(iter(self.backends))  # The replica decides whether it requires the name.
        if name is None:
            raise bad_request(f"model is required: this server has {', '.join(self.backends)}", "model")
        if not isinstance(name, str) or (backend := self.backends.get(name)) is None:
            known = f"this server has {', '.join(self.backends)}"
            raise ApiError(
                404, f"the model {json.dumps(name)[:102]} does not exist: {known}", "model", "model_not_found"
            )
        if backend.keys and not matches(request.scope, (*backend.keys, *self._keys)):
            raise ApiError(401, f"the API key does not allow the model {name}; use another key", code="invalid_api_key")
        return name

    # ---- requests that the gateway answers

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card(name) for name in self.backends]})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self.backends:
            raise ApiError(404, f"the model {json.dumps(name[:100])} does not exist", "model", "model_not_found")
        return JSONResponse(self._card(name))

    def _card(self, name: str) -> dict[str, Any]:
        context = min((each.context for each in self.backends[name].replicas()), default=None)
        facts = {"owned_by": "tridecode", "root": name, "parent": None, "max_model_len": context}
        return {"id": name, "object": "model", "created": self._created} | facts

    async def _root(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def _paths(self, request: Request) -> Response:
        return JSONResponse({"paths": paths_of(request)})

    async def _health(self, request: Request) -> Response:
        """Return 200 while every model has a replica."""
        replicas = {name: len(backend.replicas()) for name, backend in self.backends.items()}
        status = "stopping" if self.stopping else "ok" if all(replicas.values()) else "starting"
        return JSONResponse({"status": status, "replicas": replicas}, 200 if status == "ok" else 503)

    async def _version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def _scrape(self, request: Request) -> Response:
        """Return the metrics of the gateway and of all replicas, with the label `replica`."""

        async def one(address: Address) -> tuple[str, bytes]:
            with suppress(ReplicaLost, TimeoutError):
                async with asyncio.timeout(5):
                    return address.replica, await fetch(address, "/metrics")
            return address.replica, b""

        addresses = [address for backend in self.backends.values() for address in backend.replicas()]
        texts = await asyncio.gather(*(one(address) for address in addresses))
        ready = {name: len(backend.replicas()) for name, backend in self.backends.items()}
        own = merged(texts, ready, self.counts, self.outcomes)
        return Response(own, media_type="text/plain; version=0.0.4; charset=utf-8")


class Forwarded:
    """ASGI application that sends one request to a replica, to another one if the first fails without a token."""

    def __init__(self, gateway: Gateway, model: str, ticket: Ticket, request: Request, body: bytes):
        self._gateway, self._model, self._ticket, self._body = gateway, model, ticket, body
        self._path, self._request = request.scope["path"], request
        self._headed = False  # Whether the client has the head of the response.
        self._began = False  # Whether the client has any of the content of the response.
        self._stream = False

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
        backend, counts = self._gateway.backends[self._model], self._gateway.counts
        problem: ApiError | None = None
        for attempt in range(ATTEMPTS):
            address = None
            try:
                async with backend.lease(self._ticket) as address:
                    counts[self._model, "retried"] += attempt
                    return await self._relay(address, send)
            except ReplicaLost as lost:
                assert address is not None
                log.warning("%s: the replica %s failed: %s", self._ticket.id, address.replica, lost)
                self._ticket.avoid.add(address.replica)
                problem = lost.problem or ApiError(503, "the replica failed; send it again", code="replica_failed")
                if self._began:
                    counts[self._model, "broken"] += 1
                    break
            except ApiError as refused:
                if address is not None or problem is None:
                    raise refused
                break  # There is no other replica.
        assert problem is not None
        raise full() if problem.code == "queue_full" else problem

    async def _relay(self, address: Address, send) -> None:
        """Send the request to a replica and its response to the client.

        Raises:
            ReplicaLost: the replica failed, or has an error that another one may not have.
            ApiError: the request failed.
        """
        upstream = await Upstream.send(address, "POST", self._path, self._headers(), self._body)
        try:
            if upstream.status == 503:
                problem = error_of(await upstream.read_all())
                if problem.code in RETRIED:
                    raise ReplicaLost(problem.message, problem)
                raise problem
            headers = [(name, value) for name, value in upstream.headers if name not in NOT_FORWARDED]
            kind = next((value for name, value in headers if name == b"content-type"), b"")
            stream = kind.startswith(b"text/event-stream")
            if self._headed and not stream:  # The first replica sent only comments, then it failed.
                raise error_of(await upstream.read_all())
            self._stream = stream
            if not stream:  # The whole body first, so that a failure in the middle of it can be repaired.
                body = await upstream.read_all()
                self._headed = self._began = True
                await send({"type": "http.response.start", "status": upstream.status, "headers": headers})
                return await send({"type": "http.response.body", "body": body})
            await self._relay_stream(upstream, headers, send)
        finally:
            upstream.close()

    async def _relay_stream(self, upstream: Upstream, headers: list[tuple[bytes, bytes]], send) -> None:
        gateway = self._gateway
        gateway.streams += 1
        try:
            while data := await upstream.read():
                if not self._headed:
                    self._headed = True
                    await send({"type": "http.response.start", "status": upstream.status, "headers": headers})
                self._began = self._began or bool(data.replace(events.KEEP_ALIVE, b""))
                await send({"type": "http.response.body", "body": data, "more_body": True})
                if gateway.join_seconds and gateway.streams > JOIN_STREAMS:
                    await asyncio.sleep(gateway.join_seconds)
            await send({"type": "http.response.body", "body": b""})
        finally:
            gateway.streams -= 1

    def _headers(self) -> dict[str, str]:
        names = ("content-type", "content-encoding")
        kept = {name: self._request.headers[name] for name in names if name in self._request.headers}
        return kept | {"X-Request-Id": self._ticket.id}

    async def _send_error(self, problem: ApiError, scope, send) -> None:
        with suppress(OSError):
            if not self._headed:
                headers = problem.headers | ({"Retry-After": str(RETRY_AFTER)} if problem.status == 429 else {})
                response = JSONResponse(problem.body(self._path), problem.status, headers)
                await response(scope, None, send)  # type: ignore[arg-type]  # It receives nothing.
            elif self._stream:
                await send({"type": "http.response.body", "body": error_events(problem, self._path)})


class Guard(Access):
    """Access with several keys, which closes connections while the gateway stops."""

    def __init__(self, app, settings: Settings, ended, gateway: Gateway, keys: tuple[str, ...]):
        super().__init__(app, settings, ended)
        self._gateway, self._fleet_keys = gateway, keys

    async def __call__(self, scope, receive, send) -> None:
        """Answer a request."""

        async def last(message) -> None:
            if message["type"] == "http.response.start" and self._gateway.stopping:
                message = message | {"headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await super().__call__(scope, receive, last)

    def _check(self, scope) -> None:
        if not self._fleet_keys:
            return super()._check(scope)
        if scope["path"] not in PUBLIC and not matches(scope, self._fleet_keys):
            message = "the API key is missing or wrong; send the header Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")


def matches(scope, keys: Sequence[str]) -> bool:
    """Return whether a request has one of the keys. The time does not depend on the key."""
    sent = keys_of(scope)
    return any([hmac.compare_digest(own.encode(), key) for own in keys for key in sent])


async def read_body(request: Request) -> bytes:
    """Return the body as it was sent. Raises ApiError if it is too long."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            size = f"{MAX_BODY_BYTES / (1 << 20):g} MiB"
            raise ApiError(413, f"the body is longer than {size}; send a shorter one", code="body_too_large")
    return bytes(body)


async def disconnected(receive) -> None:
    """Return when the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def full() -> ApiError:
    """Return the error for a request for which no replica has a place."""
    return ApiError(429, "all queues are full; try again later", code="queue_full")


def error_of(body: bytes) -> ApiError:
    """Return the error in the response of a replica."""
    try:
        error = msgspec.json.decode(body)["error"]
        return ApiError(503, error["message"], error.get("param"), error.get("code") or code_of(error["message"]))
    except (msgspec.DecodeError, KeyError, TypeError):
        return ApiError(503, "the replica failed; send it again", code="replica_failed")


def code_of(message: str) -> str | None:
    """Return the code of an error from its message, because Anthropic's form contains no code."""
    words = {
        "this server is stopping": "stopping",
        "the engine has failed": "engine_failed",
        "the queue is": "queue_full",
    }
    return next((code for start, code in words.items() if message.startswith(start)), None)


def error_events(problem: ApiError, path: str) -> bytes:
    """Return the events that end a failed stream of an API."""
    if path == "/v1/messages":
        return events.named_event(problem.body(path))
    if path == "/v1/responses":
        return events.named_event({"type": "error", "code": problem.code, "message": problem.message, "param": None})
    return events.event(problem.body()) + events.DONE
