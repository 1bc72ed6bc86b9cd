"""Middleware that logs requests and checks the API key. `read_body` reads request bodies up to a size limit."""

import asyncio
import hmac
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.responses import JSONResponse

from .errors import ApiError, outcome, stopping
from .settings import MAX_BODY_BYTES

# Paths that need no key: the page and the list of paths contain no secret, and monitors have no key.
PUBLIC = ("/", "/v1", "/v1/", "/health")
GENERATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ID_HEADERS = ("x-request-id", "request-id")  # Headers that the clients of OpenAI and Anthropic read.
log = logging.getLogger("tridecode.server")


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
    """ASGI middleware that logs each request, without its prompt, and checks the API key."""

    def __init__(self, app, api_key: str | None, ended: Callable[[str, float], None]):
        """Create the middleware.

        Args:
            app: the ASGI application that receives accepted requests.
            api_key: the key that requests must have; None accepts all requests.
            ended: called with the outcome and the seconds of every request for a generation.
        """
        self._app, self._key, self._ended = app, None if api_key is None else api_key.encode(), ended

    async def __call__(self, scope, receive, send) -> None:
        """Answer a request: refuse it without the API key, otherwise pass it on; log its outcome."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope["tridecode.record"] = Record()
        status = 0

        async def watched(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [(name.encode(), id.encode()) for name, id in record.headers.items()]
                message = message | {"headers": [*message.get("headers", ()), *headers]}
            await send(message)

        try:
            app = self._app
            if self._key is not None and scope["path"] not in PUBLIC and not self._allowed(scope):
                error = ApiError(
                    401,
                    "the API key is missing or wrong; send the header Authorization: Bearer KEY",
                    code="invalid_api_key",
                )
                app = JSONResponse(error.body(scope["path"]), 401, error.headers)
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

    def _allowed(self, scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"x-api-key" in headers:  # Anthropic's clients send this header.
            kind, key = b"bearer", headers[b"x-api-key"]
        return hmac.compare_digest(key.strip(), self._key) and kind.lower() == b"bearer"


async def read_body(request: Request) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: (413) as soon as the body exceeds the limit.
    """
    too_long = ApiError(
        413, f"the body is longer than {MAX_BODY_BYTES >> 20} MiB; send a shorter one", code="body_too_large"
    )
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > MAX_BODY_BYTES:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise too_long
        parts.append(part)
    return b"".join(parts)
