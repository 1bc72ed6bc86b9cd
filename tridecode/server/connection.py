"""One HTTP connection: uvicorn's protocol on httptools, with bounded heads, deadlines and a limit of connections.

uvicorn takes a protocol class as its option `http`. httptools parses the bytes, and uvicorn runs the application. This
class limits what is parsed and how long a connection may wait.

uvicorn's other parser, h11, has a limit for heads. But it is written in Python: on one core it needs
2.6 µs to frame an event of a stream (this one 0.2 µs), and 5 µs to parse a chunk of a body.
"""

import asyncio
import json
import logging
import time
from dataclasses import dataclass, field

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from .access import Record
from .errors import ApiError, bad_request
from .settings import HEAD_SECONDS, MAX_HEAD_BYTES, MAX_HEADERS

SLICE = 4096  # Bytes between two checks of the limits.
SLICES = 4  # Slices of a connection that are parsed before other connections have their turn.
PARSING = 0.25  # Maximum share of the time that parsing takes, except in bursts, so that passes get the GIL.
BURST_SECONDS = 0.002
MAX_UNPARSED = 1 << 16  # Bytes that wait to be parsed before the connection stops reading.
PIPELINE_SECONDS = 0.002  # Pause before each pipelined request, so that passes get the GIL.
LINGER_SECONDS = 1.0  # Seconds in which a refused client, which may still be sending, can read the answer.
LOG_SECONDS = 10.0  # Seconds between two log lines about the limit of connections.
PROBE_SECONDS = 1.0  # Seconds between two probes of a client that ended its side of the connection.
VERSION = b"HTTP/1.1 "  # Every response begins with these bytes.
log = logging.getLogger("tridecode.server")


@dataclass(eq=False)
class Connections:
    """The limit of connections, which all connections of a server share.

    Args:
        limit: maximum number of open connections.
        waiting: connections without a request, beginning with the one that has waited longest.
    """

    limit: int
    waiting: dict["Connection", None] = field(default_factory=dict)
    resume_at: float = 0.0  # Time from which parsing has no debt, as time.monotonic().
    _logged: float = -LOG_SECONDS

    def admit(self, count: int) -> bool:
        """Return whether the last of `count` connections may stay. The longest waiting one is closed for it."""
        if count <= self.limit:
            return True
        oldest = next(iter(self.waiting), None)
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._logged = time.monotonic()
            action = "refusing new ones" if oldest is None else "closing those that wait longest for a request"
            log.warning("%d connections are open, the limit of --max-connections: %s", self.limit, action)
        if oldest is not None:
            oldest.drop()
        return oldest is not None

    def add(self, started: float) -> None:
        """Count the time of parsing since `started`."""
        self.resume_at = max(self.resume_at, started) + (time.monotonic() - started) / PARSING

    def delay(self) -> float:
        """Return the seconds until a connection may parse again."""
        return max(self.resume_at - BURST_SECONDS - time.monotonic(), 0.0)


class Connection(HttpToolsProtocol):
    """A connection whose client may be slow, wrong or hostile."""

    def __init__(self, config, server_state, app_state, _loop=None, *, limits: Connections):
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._asgi, self.app = self.app, self._answer
        self._unparsed = bytearray()  # Received bytes that are not parsed yet.
        self._scheduled = False  # Whether `_parse` will run again.
        self._silent = 0  # Bytes that were parsed since the last part of a body, or the end of a head or message.
        self._in_head = False  # Whether a head has begun.
        self._deadline: asyncio.TimerHandle | None = None  # The deadline of the head.
        self._pipelined = False  # Whether the next request has waited for the response to another one.
        self._refused = False  # Whether further bytes are dropped.
        self._ended = False  # Whether the client has ended its side of the connection.

    # ---- events of the transport

    def connection_made(self, transport) -> None:
        """Accept the connection, unless there are too many."""
        super().connection_made(transport)
        self.flow = _Flow(transport, self._unparsed)
        if not self._limits.admit(len(self.connections)):
            error = ApiError(503, "too many connections are open; try again later", code="too_many_connections")
            return self._refuse(error, linger=False)
        self._wait()

    def connection_lost(self, exc) -> None:
        """Forget the connection and its bytes."""
        self._unparsed.clear()
        self._busy()
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection, which has no request."""
        self._busy()
        self.connections.discard(self)
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes up to the limits."""
        if self._refused:
            return
        self._unset_keepalive_if_required()
        if self._deadline is None and self._idle:
            self._wait()
        self._unparsed += data
        if not self._scheduled and self._limits.delay() == 0:
            return self._parse()
        self._schedule()
        if len(self._unparsed) > MAX_UNPARSED:
            self.flow.pause_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection open until complete requests are answered. TLS cannot."""
        if self.scheme == "https" or self._incomplete:
            return False
        if not self._ended:
            self._ended = True
            self._begin_probes()
        return True

    # ---- parser

    def _parse(self) -> None:
        """Parse the received bytes. Pipelined requests wait for the responses to earlier ones."""
        self._scheduled = False
        started = time.monotonic()
        for _ in range(SLICES):
            if not self._unparsed or self._refused or self.parser is None or self.pipeline:
                break
            part = bytes(self._unparsed[:SLICE])
            del self._unparsed[:SLICE]
            self._feed(part)
        self._limits.add(started)
        if self._unparsed and not self._refused and not self.pipeline:
            self._schedule()
        elif self._ended and self._incomplete and not self._refused:
            self.transport.close()
        if len(self._unparsed) > MAX_UNPARSED:
            self.flow.pause_reading()
        elif not self._unparsed and (self._idle or len(self.cycle.body) <= HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self.loop.call_later(self._limits.delay(), self._parse)

    def _feed(self, part: bytes) -> None:
        self._silent += len(part)
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() == b"CONNECT":
                return self._refuse(ApiError(405, "this server is not a proxy: CONNECT is not supported"))
            return self._decline_upgrade(part[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            cause = error.__context__
            return self._refuse(cause if isinstance(cause, ApiError) else bad_request(f"this is not HTTP: {error}"))
        if self._silent > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"the head of the request is longer than {MAX_HEAD_BYTES >> 10} KiB"))

    def _decline_upgrade(self, rest: bytes) -> None:
        """Parse a request that offers another protocol as if it did not. httptools would skip its body."""
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + self.parser.get_http_version().encode()]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self._unparsed[:0] = rest
        self._feed(b"\r\n".join(lines) + b"\r\n\r\n")

    def on_message_begin(self) -> None:
        """Begin a head."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header, or a trailer of a chunked body."""
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise ApiError(431, f"the request has more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        """Start the request."""
        if self.parser.should_upgrade():
            return
        self._in_head, self._silent = False, 0
        self._busy()
        if self.parser.get_http_version() != "1.1":
            self.expect_100_continue = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Add a part of the body."""
        self._silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End the request."""
        if self.parser.should_upgrade():
            return
        self._silent = 0
        super().on_message_complete()
        if self.cycle.response_complete:  # The response did not wait for the body.
            self._busy()
            self._unset_keepalive_if_required()
            self._limits.waiting[self] = None
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        self._begin_probes()

    # ---- responses

    async def _answer(self, scope, receive, send) -> None:
        """Run the application. Clients of HTTP/1.0 cannot read chunks, so the end of the connection ends the body."""
        if self._pipelined:
            await asyncio.sleep(PIPELINE_SECONDS)
        if scope["http_version"] == "1.1":
            return await self._asgi(scope, receive, send)
        cycle: RequestResponseCycle = send.__self__
        has_length = False

        async def send_plain(message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not has_length:
                cycle.chunked_encoding, cycle.expected_content_length = False, len(message.get("body", b""))
            await send(message)

        await self._asgi(scope, receive, send_plain)

    def on_response_complete(self) -> None:
        """Continue with the next request, or wait for it."""
        self._pipelined = bool(self.pipeline)
        super().on_response_complete()
        self._begin_probes()
        if not self._idle or self.transport.is_closing():
            return
        self._limits.waiting[self] = None
        if self._unparsed:
            self._schedule()
        elif self._ended:
            self.transport.close()

    def _refuse(self, error: ApiError, linger: bool = True) -> None:
        """Drop further bytes, send the error if no response has begun, and close the connection."""
        self._refused = True
        self._unparsed.clear()
        self._busy()
        if self.transport.is_closing():
            return
        if self.pipeline:
            return self.transport.close()
        if not self._idle:
            if self.cycle.response_started or not self.cycle.more_body:
                self.cycle.keep_alive = False  # The bytes behind a complete request are wrong: answer this request.
                return
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        record = Record()
        path = self.url.decode("latin-1") if self.scope else ""
        body = json.dumps(error.body(path)).encode()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = [f"{name}: {value}\r\n".encode() for name, value in (headers | error.headers | record.headers).items()]
        lines += [name + b": " + value + b"\r\n" for name, value in self.server_state.default_headers]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))
        log.info("%s - - %d refused: %s", record.id, error.status, error.message)
        if linger and self.transport.can_write_eof():
            self.transport.write_eof()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()

    def _begin_probes(self) -> None:
        """Probe a client that ended its side, if the response to its last request has not begun."""
        if self._ended and not self._idle and not self.pipeline and not self.cycle.response_started:
            self._probe(_EarlyTransport(self.cycle))

    def _probe(self, transport: "_EarlyTransport") -> None:
        """Send a byte of a response that has not begun. The kernel of a client that is gone resets the connection.

        An end of the client's side may mean both: it sends no further requests, or it is gone.
        """
        if transport.begin():
            self.loop.call_later(PROBE_SECONDS, self._probe, transport)

    # ---- deadlines

    @property
    def _idle(self) -> bool:
        """Whether the connection has no request that needs a response."""
        return not self.pipeline and (self.cycle is None or self.cycle.response_complete)

    @property
    def _incomplete(self) -> bool:
        """Whether the connection can send nothing until the client sends more."""
        return not self._unparsed and (self._idle or self.cycle.more_body)

    def _wait(self) -> None:
        """Wait for a head until its deadline."""
        self._limits.waiting.setdefault(self)
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._expire)

    def _busy(self) -> None:
        """End the wait for a head."""
        self._limits.waiting.pop(self, None)
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _expire(self) -> None:
        if self._in_head:
            message = f"the head of the request did not arrive within {HEAD_SECONDS:g} seconds; send it again"
            self._refuse(ApiError(408, message, code="timeout"))
        else:
            self.transport.close()


class _Flow(FlowControl):
    """The flow control of a connection, which does not read while many bytes wait to be parsed."""

    def __init__(self, transport, unparsed: bytearray):
        super().__init__(transport)
        self._unparsed = unparsed

    def resume_reading(self) -> None:
        """Read, unless too many bytes wait to be parsed. The application calls this when it has received a body."""
        if len(self._unparsed) <= MAX_UNPARSED:
            super().resume_reading()


class _EarlyTransport:
    """The transport of a response that has begun before its status is known.

    Args:
        cycle: the response. Its next write is the rest of its head.
    """

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle, self._transport, self._sent = cycle, cycle.transport, 0
        cycle.transport = self  # type: ignore[assignment]

    def begin(self) -> bool:
        """Send the next byte that all responses have in common. Return whether there are more."""
        if self._cycle.transport is not self or self._transport.is_closing():
            return False
        self._transport.write(VERSION[self._sent : self._sent + 1])
        self._sent += 1
        return self._sent < len(VERSION)

    def write(self, data: bytes) -> None:
        """Send the rest of the head."""
        self._cycle.transport = self._transport
        self._transport.write(data[self._sent :])

    def __getattr__(self, name: str):
        return getattr(self._transport, name)
