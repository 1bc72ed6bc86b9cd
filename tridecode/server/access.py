"""Middleware that logs requests, and checks their API key or their site."""

import asyncio
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.responses import JSONResponse

from .errors import ApiError, outcome, stopping
from .page import FILES_PATH
from .settings import Settings
from .sites import Sites

# Paths that need no key: the page and the list of paths contain no secret, and monitors have no key.
PUBLIC = ("/", "/v1", "/health")
GENERATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ID_HEADERS = ("x-request-id", "request-id")  # Headers that the clients of OpenAI and Anthropic read.
log = logging.getLogger("tridecode.server")


def log_requests() -> None:
    """Log a line for each request to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    for name in ("tridecode.server", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers[:], logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name == "tridecode.server" else logging.ERROR)


@dataclass
class Record:
    """Log record of one HTTP request.

    Args:
        id: identifier in the log and in the response headers.
        started: arrival, by time.monotonic.
        outcome: how a generation ended, one of metrics.OUTCOMES; None for other requests.
        tokens: text for the log with the numbers of prompt and output tokens.
    """

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(8)}")
    started: float = field(default_factory=time.monotonic)
    outcome: str | None = None
    tokens: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Response headers with the request's identifier."""
        return dict.fromkeys(ID_HEADERS, self.id)


class Access:
    """ASGI middleware that logs each request, without its prompt, and checks its API key or its site."""

    def __init__(self, app, settings: Settings, ended: Callable[[str, float], None]):
        """Create the middleware.

        Args:
            app: the ASGI application that receives accepted requests.
            settings: the settings of the server, with its key.
            ended: called with the outcome and the seconds of every request for a generation.
        """
        self._app, self._ended = app, ended
        self._keys, self._keep_ids = settings.api_keys, bool(settings.replica)
        self._sites = Sites(settings.allow_hosts, settings.cors)
        self._keep_alive = b"keep-alive", f"timeout={settings.timeout_keep_alive}".encode()

    async def __call__(self, scope, receive, send) -> None:
        """Answer a request: refuse it without the key or from another site, otherwise pass it on; log its outcome."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope["tridecode.record"] = Record()
        if self._keep_ids and (id := dict(scope["headers"]).get(ID_HEADERS[0].encode())):
            record.id = id.decode("latin-1")
        scope["path"] = re.sub("/{2,}", "/", scope["path"]).rstrip("/") or "/"
        status = 0
        closes = any(name == b"connection" and b"close" in value.lower() for name, value in scope["headers"])

        async def watched(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(name.encode(), id.encode()) for name, id in record.headers.items()]
                if scope["http_version"] == "1.1" and not closes:
                    headers.append(self._keep_alive)
                message = message | {"headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            app = self._app
            try:
                self._check(scope)
            except ApiError as refusal:
                app = JSONResponse(refusal.body(scope["path"]), refusal.status, refusal.headers)
            await app(scope, receive, watched)
        except asyncio.CancelledError:  # The server stops while it waits for a body or for a client that reads slowly.
            if status:
                record.outcome = record.outcome or "cancelled"
            else:
                error = stopping()
                await JSONResponse(error.body(scope["path"]), 503, error.headers)(scope, receive, watched)
        except Exception:  # Starlette sends the response with status 500.
            status = status or 500
            raise
        finally:
            seconds = time.monotonic() - record.started
            if scope["path"] in GENERATIONS:
                record.outcome = record.outcome or outcome(status)
                self._ended(record.outcome, seconds)
            path, result = json.dumps(scope["path"][:200])[1:-1], f"{record.outcome or ''}{record.tokens}"
            log.info("%s %s %s %d %.3f s %s", record.id, scope["method"], path, status, seconds, result)

    def _check(self, scope) -> None:
        """Check the key of a request; without a key of the server, check its site. Raises ApiError."""
        path = scope["path"]
        is_public = path in PUBLIC or path.startswith(FILES_PATH)
        if not self._keys:
            if path != "/health":
                # Browsers send Origin for module scripts, and a proxy may change Host. Without its files, the page
                # could not show why its requests are refused.
                self._sites.check(scope, any_origin=path.startswith(FILES_PATH))
        elif not is_public and not matches(scope, self._keys):
            raise ApiError(
                401,
                "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )


def matches(scope, keys: Sequence[str]) -> bool:
    """Return whether a request has one of the keys. The time does not depend on the key."""
    return any([hmac.compare_digest(key, own.encode()) for key in keys_of(scope) for own in keys])


def keys_of(scope) -> list[bytes]:
    """Return the API keys of a request, in all headers that clients use for them. One right key is enough."""
    keys = []
    for name, value in scope["headers"]:
        kind, _, key = value.partition(b" ")
        if name == b"authorization" and kind.lower() == b"bearer":
            keys.append(key.strip())
        elif name in (b"x-api-key", b"api-key"):
            keys.append(value.strip())
    return keys
