"""Bodies of requests: their type, encoding and size are checked before they are parsed."""

import asyncio
import time
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from .errors import ApiError, bad_request
from .settings import (
    BODY_BUDGET,
    BODY_BYTES_PER_TOKEN,
    BODY_VALUES_PER_TOKEN,
    MAX_BODY_BYTES,
    MIN_BODY_LIMIT,
    MIN_BODY_VALUES,
    SMALL_BODY,
)

R = TypeVar("R")


class Bodies:
    """Reads JSON bodies.

    msgspec holds the GIL while it parses, in any thread. Therefore the size of a body and the number of its values are
    limited by the context, which longer prompts exceed anyway. Large bodies are parsed in a thread, one at a time.
    After each one, the next waits for as long, so that passes get the GIL.

    Args:
        context: context length, in tokens.
        run_in_thread: runs a function in a thread and returns its result.
        timeout: seconds in which a body must arrive; None removes the limit.
    """

    def __init__(
        self, context: int, run_in_thread: Callable[[Callable[[], Any]], Awaitable[Any]], timeout: float | None
    ):
        self.max_bytes = min(MAX_BODY_BYTES, max(MIN_BODY_LIMIT, BODY_BYTES_PER_TOKEN * context))
        self.max_values = max(MIN_BODY_VALUES, BODY_VALUES_PER_TOKEN * context)
        self._run_in_thread, self._timeout = run_in_thread, timeout
        self.budget = max(BODY_BUDGET, self.max_bytes)
        self._parsing = asyncio.Lock()  # Held while a large body is parsed.
        self._buffered = 0  # Bytes of large bodies that are not parsed yet.

    async def read(self, request: Request, parse: Callable[[bytes], R]) -> R:
        """Return `parse(body)`. A large body is parsed in a thread.

        Raises:
            ApiError: (400, 408, 413, 415, 499, 503) the body is refused; errors of `parse` are raised unchanged.
        """
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            sent = f", got {kind[:100]}" if kind else ""
            raise ApiError(415, f"send the header Content-Type: application/json{sent}", code="unsupported_media_type")
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise ApiError(
                415, "the body must have the Content-Encoding gzip, deflate or none", code="unsupported_encoding"
            )
        taken = [0]
        try:
            async with asyncio.timeout(self._timeout):
                body = await self._receive(request, taken)
            if encoding == "identity" and len(body) <= SMALL_BODY:
                return parse(body)
            await self._parsing.acquire()
            started = time.monotonic()
            try:
                return await self._run_in_thread(lambda: parse(self._checked(body, encoding)))
            finally:
                asyncio.get_running_loop().call_later(time.monotonic() - started, self._parsing.release)
        except TimeoutError:
            raise ApiError(
                408, "the body did not arrive within the time limit of this server; send it again", code="timeout"
            ) from None
        except ClientDisconnect:
            raise ApiError(499, "the client disconnected", code="disconnected") from None
        finally:
            self._buffered -= taken[0]

    async def _receive(self, request: Request, taken: list[int]) -> bytes:
        """Return the body as it was sent. `taken` is the size of its part in the budget for large bodies."""
        length = request.headers.get("content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.max_bytes:
            raise self._too_long()
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.max_bytes:
                raise self._too_long()
            if (excess := max(len(body) - SMALL_BODY, 0) - taken[0]) > 0:
                if self._buffered + excess > self.budget:
                    raise ApiError(503, "too many large bodies arrive at once; try again later", code="overloaded")
                self._buffered += excess
                taken[0] += excess
        return bytes(body)

    def _checked(self, body: bytes, encoding: str) -> bytes:
        """Return a decompressed body with a bounded number of values."""
        if encoding != "identity":
            body = self._decompress(body)
        # Objects and lists need several times the memory and time of a number.
        if _count(body, b",") + 2 * (_count(body, b"{") + _count(body, b"[")) > self.max_values:
            message = f"the body has more than {self.max_values:,} values, which the context cannot hold; shorten it"
            raise ApiError(413, message, code="body_too_large")
        return body

    def _decompress(self, body: bytes) -> bytes:
        text, rest = bytearray(), body
        try:
            while rest:
                decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # It detects the formats of gzip and zlib.
                text += decoder.decompress(rest, self.max_bytes + 1 - len(text))
                if len(text) > self.max_bytes:
                    raise self._too_long()
                if not decoder.eof:
                    raise zlib.error("it is incomplete")
                rest = decoder.unused_data
        except zlib.error as error:
            raise bad_request(f"the body cannot be decompressed: {error}", code="invalid_encoding") from None
        return bytes(text)

    def _too_long(self) -> ApiError:
        size = f"{self.max_bytes / (1 << 20):g} MiB"
        return ApiError(413, f"the body is longer than {size}; send a shorter one", code="body_too_large")


def _count(body: bytes, sign: bytes) -> int:
    """Count a character. Other threads get the GIL between two parts."""
    return sum(body.count(sign, start, start + SMALL_BODY) for start in range(0, len(body), SMALL_BODY))
