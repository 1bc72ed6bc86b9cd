"""From a server to a process: its socket, uvicorn, signals, and the code with which it ends."""

import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import contextmanager

import uvicorn

from ..engine import Engine
from ..errors import TridecodeError
from .app import Server
from .errors import stopping
from .settings import DYING, Settings
from .tls import Tls

ENGINE_FAILED = 3
UNREAD = 1 << 16  # bytes of an answer that the kernel holds for its reader; beyond it tokens wait to be sent together
STUCK = 600  # seconds that it may be full where requests have no deadline


def bind(host: str, port: int, timeout: float | None = None) -> socket.socket:
    """A socket that nobody can connect to yet. timeout: that of Settings, here the seconds for which a client may read
    nothing of what is there for it, before the kernel ends the connection. Raises TridecodeError."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Of each connection that it accepts:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (timeout or STUCK)))
        bound.bind(address)
        return bound
    except OSError as error:
        raise TridecodeError(f"cannot listen on {host}, port {port}: {error.strerror}") from None


class Uvicorn(uvicorn.Server):
    """uvicorn, but for signals: the first one lets requests finish for the grace time, a second one ends at once."""

    def __init__(self, engine: Engine, settings: Settings, tls: Tls | None, ready: Callable[[], None]):
        self.code, self._settings, self._ready = 0, settings, ready
        self.face = Server(engine, settings, self._died)
        config = uvicorn.Config(
            self.face.app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=int(settings.grace) + 2,
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        super().__init__(config)

    async def startup(self, sockets=None) -> None:
        await self.face.start()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets=None) -> None:
        loop = self.face.loop
        problem = stopping()
        loop.refusing = problem.message
        loop.later(self._settings.grace, lambda: loop.end_all(problem))
        await super().shutdown(sockets)
        loop.stop()

    def _died(self) -> None:
        self.code = ENGINE_FAILED
        self.face.loop.later(DYING, lambda: setattr(self, "should_exit", True))

    @contextmanager
    def capture_signals(self):
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame) -> None:
        if self.should_exit:
            sys.stderr.flush()
            os._exit(128 + sig)  # a pass that runs cannot be waited for
        self.should_exit = True


def serve(
    engine: Engine,
    settings: Settings,
    bound: socket.socket,
    tls: Tls | None = None,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal; returns the exit code: 0, or 3 where the engine has failed. ready: called once clients can
    connect."""
    server = Uvicorn(engine, settings, tls, ready)
    server.run(sockets=[bound])
    return server.code
