"""The server as a process: signals and exit code."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress

import uvicorn

from ..engine import Engine
from .app import Server
from .errors import stopping
from .listen import config
from .settings import FAILURE_GRACE, Settings
from .tls import Tls

ENGINE_FAILED = 3
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
