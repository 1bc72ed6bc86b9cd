"""What stands before the routes: a line in the log, the API key, and a body of bounded size."""

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
from .settings import BODY

PUBLIC = ("/", "/health")  # without a key: a page that holds no secret, and whether the server is there
GENERATIONS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
ID_HEADERS = ("x-request-id", "request-id")  # where OpenAI's and Anthropic's clients look
log = logging.getLogger("tridecode.server")


@dataclass
class Record:
    """What is told of one request. id: for its client and the log; started: by time.monotonic; outcome: how a
    generation ended; tokens: for the log."""

    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(8)}")
    started: float = field(default_factory=time.monotonic)
    outcome: str | None = None
    tokens: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """What a client needs to name the request."""
        return dict.fromkeys(ID_HEADERS, self.id)


class Access:
    """ASGI middleware. The log has no prompts: what of them is wanted is another line's."""

    def __init__(self, app, api_key: str | None, ended: Callable[[str, float], None]):
        """ended: called with outcome and seconds of every request for a generation."""
        self._app, self._key, self._ended = app, None if api_key is None else api_key.encode(), ended

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope["tridecode.record"] = Record()
        status = 0

        async def watched(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = [(name.encode(), id.encode()) for name, id in record.headers.items()]
                message = message | {"headers": [*message.get("headers", ()), *told]}
            await send(message)

        try:
            app = self._app
            if self._key is not None and scope["path"] not in PUBLIC and not self._allowed(scope):
                error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
                app = JSONResponse(error.body(scope["path"]), 401, error.headers)
            await app(scope, receive, watched)
        except asyncio.CancelledError:  # the server stops, and this body does not come or this client does not read
            if status:
                record.outcome = record.outcome or "cancelled"
            else:
                error = stopping()
                await JSONResponse(error.body(scope["path"]), 503, error.headers)(scope, receive, watched)
        except Exception:  # the 500 for it is sent by who calls this
            status = status or 500
            raise
        finally:
            seconds = time.monotonic() - record.started
            if scope["path"] in GENERATIONS:
                record.outcome = record.outcome or outcome(status)
                self._ended(record.outcome, seconds)
            path, words = json.dumps(scope["path"][:200])[1:-1], f"{record.outcome or ''}{record.tokens}"
            log.info("%s %s %s %d %.3f s %s", record.id, scope["method"], path, status, seconds, words)

    def _allowed(self, scope) -> bool:
        headers = dict(scope["headers"])
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"x-api-key" in headers:  # as Anthropic's clients send it
            kind, key = b"bearer", headers[b"x-api-key"]
        return hmac.compare_digest(key.strip(), self._key) and kind.lower() == b"bearer"


async def body(request: Request) -> bytes:
    """The body of a request. Raises ApiError (413) as soon as it is too long."""
    too_long = ApiError(413, f"the body has more than {BODY >> 20} MiB", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > BODY:
        raise too_long
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > BODY:
            raise too_long
        parts.append(part)
    return b"".join(parts)
