"""One request from a gateway to a replica over HTTP.

With aiohttp's client, a gateway needs a sixth more CPU time for each token of each stream.
"""

import asyncio
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httptools

from ..server.errors import ApiError

CONNECT_SECONDS = 5.0
# Without an answer of the other machine's kernel for about ten seconds, a connection is lost.
KEEP_ALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 10_000}
READ_BYTES = 1 << 16


class ReplicaLost(Exception):
    """The replica cannot be reached, closed the connection before the end of its response, or refuses requests.

    Args:
        refusal: the error for the client if the replica refuses requests at present.
    """

    def __init__(self, message: str, refusal: ApiError | None = None):
        super().__init__(message)
        self.refusal = refusal


@dataclass(frozen=True)
class Address:
    """The address of a replica, the key that it requires, and its sizes."""

    replica: str
    host: str
    port: int
    key: str
    slots: int = 1
    context: int = 0


_replicas: dict[str, Mapping[str, Address]] = {}
_NONE: Mapping[str, Address] = {}


def set_replicas(deployment: str, facts: Mapping[str, dict[str, Any]]) -> None:
    """Set the replicas of a deployment that are ready: name -> the fields of its Address."""
    _replicas[deployment] = {name: Address(name, **fields) for name, fields in facts.items()}


def replicas_of(deployment: str) -> Mapping[str, Address]:
    """Return the replicas of a deployment that are ready, by name: the same object until they change."""
    return _replicas.get(deployment, _NONE)


class Upstream:
    """A connection with one request, whose response is read in parts."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self.status, self.headers = 0, list[tuple[bytes, bytes]]()
        self._reader, self._writer = reader, writer
        self._parser = httptools.HttpResponseParser(self)
        self._parts, self._complete = list[bytes](), False

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
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                upstream = cls(*await asyncio.open_connection(address.host, address.port))
        except (OSError, TimeoutError) as error:
            raise ReplicaLost(f"cannot connect: {error}") from None
        bound = upstream._writer.get_extra_info("socket")
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEP_ALIVE.items():
            bound.setsockopt(socket.IPPROTO_TCP, option, value)
        try:
            upstream._writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
            while not upstream.status:
                await upstream._receive()
        except BaseException:
            upstream.close()
            raise
        return upstream

    async def read(self) -> bytes:
        """Return the bytes of the body that have arrived, b"" at the end. Raises ReplicaLost."""
        while not self._parts and not self._complete:
            await self._receive()
        data = b"".join(self._parts)
        self._parts.clear()
        return data

    async def read_all(self) -> bytes:
        """Return the whole body. Raises ReplicaLost."""
        while not self._complete:
            await self._receive()
        return b"".join(self._parts)

    def close(self) -> None:
        """Close the connection; the replica then cancels the request."""
        self._writer.transport.abort()

    async def _receive(self) -> None:
        try:
            if not (data := await self._reader.read(READ_BYTES)):
                raise ReplicaLost("the connection was closed")
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise ReplicaLost(str(error)) from None

    # ---- callbacks of the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Store the status."""
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Store a part of the body."""
        self._parts.append(body)

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
