"""One request from a gateway to a replica over HTTP."""

import asyncio
from dataclasses import dataclass

import httptools

from ..server.errors import ApiError

CONNECT_SECONDS = 5.0
MAX_BUFFERED = 1 << 18  # Bytes of a response that wait for the client before the connection stops reading.


class ReplicaLost(Exception):
    """The replica closed the connection before the end of its response, cannot be reached, or refuses requests.

    Args:
        problem: the error that the replica sent, if any.
    """

    def __init__(self, message: str, problem: ApiError | None = None):
        super().__init__(message)
        self.problem = problem


@dataclass(frozen=True)
class Address:
    """The address of a replica, the key that it requires, and its sizes."""

    replica: str
    host: str
    port: int
    key: str
    slots: int = 1
    context: int = 0


class Upstream(asyncio.Protocol):
    """A connection with one request. `read` returns what has arrived of the response."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._parser = httptools.HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._size, self._complete, self._lost = 0, False, False
        self._waiter: asyncio.Future[None] | None = None

    @classmethod
    async def send(
        cls, address: Address, method: str, path: str, headers: dict[str, str], body: bytes = b""
    ) -> "Upstream":
        """Connect, send a request, and wait for the head of the response. Raises ReplicaLost."""
        own = {
            "Host": f"{address.host}:{address.port}",
            "Authorization": f"Bearer {address.key}",
            "Connection": "close",
            "Content-Length": str(len(body)),
        }
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (headers | own).items())]
        head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, upstream = await asyncio.get_running_loop().create_connection(cls, address.host, address.port)
        except (OSError, TimeoutError) as error:
            raise ReplicaLost(str(error)) from None
        try:
            upstream._transport.write(head + body)
            while not upstream.status and not upstream._complete:
                await upstream._wait()
        except BaseException:
            upstream.close()
            raise
        return upstream

    async def read(self) -> bytes:
        """Return the bytes of the body that have arrived, b"" at the end. Raises ReplicaLost."""
        while not self._parts:
            if self._complete:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        if self._size > MAX_BUFFERED:
            self._transport.resume_reading()
        self._size = 0
        return data

    async def read_all(self) -> bytes:
        """Return the whole body. Raises ReplicaLost."""
        body = bytearray()
        while data := await self.read():
            body += data
        return bytes(body)

    def close(self) -> None:
        """Close the connection; the replica then cancels the request."""
        self._transport.abort()

    async def _wait(self) -> None:
        if self._lost:
            raise ReplicaLost("the connection was closed")
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ---- callbacks of asyncio

    def connection_made(self, transport) -> None:
        """Store the transport."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parse a part of the response."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._lost = True
            self._transport.abort()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """Let `read` raise an error unless the response is complete."""
        self._lost = True
        self._wake()

    # ---- callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Store the status."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        before, self._size = self._size, self._size + len(body)
        self._parts.append(body)
        if before <= MAX_BUFFERED < self._size:
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """Mark the end of the response."""
        self._complete = True


async def fetch(address: Address, path: str) -> bytes:
    """Return the body of a GET request to a replica. Raises ReplicaLost."""
    upstream = await Upstream.send(address, "GET", path, {})
    try:
        return await upstream.read_all()
    finally:
        upstream.close()
