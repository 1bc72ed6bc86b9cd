"""The server as a process: socket, uvicorn, signals and exit code."""

import errno
import gc
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, cast

import uvicorn

from ..engine import Engine
from ..errors import TridecodeError
from .app import Server
from .connection import Connection, Connections
from .errors import stopping
from .settings import FAILURE_GRACE, Settings
from .tls import Tls

ENGINE_FAILED = 3
# Bytes of a response that the kernel buffers. If the buffer is full, tokens wait and are sent together.
SEND_BUFFER = 1 << 16
STALL_TIMEOUT = 600  # Seconds that the send buffer may stay full if requests have no deadline.
OTHER_FILES = 256  # File descriptors that are not connections of clients.
SWITCH_INTERVAL = 1e-4  # Interval in seconds at which Python switches threads.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def bind(host: str, port: int, timeout: float | None = None, shared: bool = False) -> socket.socket:
    """Bind a socket that does not listen yet.

    Args:
        timeout: seconds, as in Settings. The kernel closes a connection whose client does not read for this time.
        shared: whether other processes may listen on the same port; the kernel distributes the connections.

    Raises:
        TridecodeError: the address cannot be used.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Accepted connections inherit these options.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * (timeout or STALL_TIMEOUT)))
        bound.bind(address)
        return bound
    except OSError as error:
        fix = "; choose another port with --port N" if error.errno == errno.EADDRINUSE else ""
        if both := re.fullmatch(r"([^:]+|\[.*\]):(\d+)", host):
            fix = f"; use --host {both[1].strip('[]')} --port {both[2]}"
        raise TridecodeError(f"cannot listen on {host}, port {port}: {error.strerror}{fix}") from None


def config(app, settings: Settings, tls: Tls | None = None) -> uvicorn.Config:
    """Return the configuration of uvicorn for an ASGI application."""
    protocol = partial(Connection, limits=Connections(settings.max_connections))
    return uvicorn.Config(
        app,
        http=cast(Any, protocol),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.timeout_keep_alive,
        timeout_graceful_shutdown=int(settings.grace) + 2,
        ssl_certfile=tls.certificate if tls else None,
        ssl_keyfile=tls.key if tls else None,
    )


def allow_files(connections: int) -> None:
    """Raise the limit of open files of this process for a number of connections.

    Raises:
        TridecodeError: the system does not allow as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_FILES
    if resource.RLIM_INFINITY not in (soft, hard) and needed > hard:
        fix = f"use --max-connections {max(hard - OTHER_FILES, 1)}, or raise the limit with ulimit -n"
        raise TridecodeError(f"{connections} connections need {needed} open files, the system allows {hard}: {fix}")
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def prepare_threads() -> None:
    """Let Python's threads switch more often, and garbage collections, which stop all threads, skip loaded objects."""
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()


class Uvicorn(uvicorn.Server):
    """uvicorn with our signal handling: the first signal starts the grace time, the second one ends the process."""

    def __init__(self, engine: Engine, settings: Settings, tls: Tls | None, ready: Callable[[], None]):
        self.code, self._settings, self._ready = 0, settings, ready
        self.http = Server(engine, settings, self._engine_failed)
        super().__init__(config(self.http.app, settings, tls))

    async def startup(self, sockets=None) -> None:
        """Start the engine's thread, then listen."""
        await self.http.start()
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets=None) -> None:
        """Refuse new requests, wait for running ones during the grace time, then stop the engine's thread."""
        loop = self.http.loop
        problem = stopping()
        loop.refusing = problem.message
        loop.call_later(self._settings.grace, lambda: loop.end_all(problem))
        await super().shutdown(sockets)
        loop.stop()

    def _engine_failed(self) -> None:
        self.code = ENGINE_FAILED
        self.http.loop.call_later(FAILURE_GRACE, lambda: setattr(self, "should_exit", True))

    @contextmanager
    def capture_signals(self):
        """Install the signal handlers, and restore the previous ones at the end. nohup's choice for SIGHUP stays.

        Only the main thread can have handlers.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        caught = [each for each in SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]
        before = {each: signal.signal(each, self.handle_exit) for each in caught}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)

    def handle_exit(self, sig: int, frame) -> None:
        """Request a graceful stop; end the process at the second signal."""
        if self.should_exit:
            with suppress(OSError):  # The terminal may be gone.
                sys.stderr.flush()
            os._exit(128 + sig)  # A running pass cannot be interrupted.
        self.should_exit = True


def serve(
    engine: Engine,
    settings: Settings,
    bound: socket.socket,
    tls: Tls | None = None,
    ready: Callable[[], None] = lambda: None,
) -> int:
    """Serve until a signal arrives.

    Args:
        bound: the socket, from `bind`.
        ready: called once, when clients can connect.

    Returns:
        The exit code: 0, or ENGINE_FAILED.
    """
    server = Uvicorn(engine, settings, tls, ready)
    server.run(sockets=[bound])
    return server.code
