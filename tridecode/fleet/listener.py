"""An HTTP server in its own thread, with its own event loop, so that Ray's calls do not delay tokens."""

import asyncio
import gc
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import uvicorn

from ..server.run import allow_files, bind, config
from ..server.settings import Settings
from ..server.tls import Tls

SWITCH_INTERVAL = 1e-4  # Interval in seconds at which Python switches threads.


class Listener:
    """Serves an ASGI application until `stop`.

    Args:
        app: the application.
        settings: limits of connections and the grace time.
        host, port: address to listen on; port 0 selects a free one.
        tls: certificate and key.
        before: awaited in the thread's event loop before the server listens.
        shared: whether other processes may listen on the same port.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        host: str,
        port: int,
        tls: Tls | None = None,
        before: Callable[[], Awaitable[None]] | None = None,
        shared: bool = False,
    ):
        allow_files(2 * settings.max_connections)  # A gateway has a connection to a replica for each client.
        self._bound = bind(host, port, settings.timeout, shared)
        self.port = self._bound.getsockname()[1]
        self._grace = settings.grace
        self._server = uvicorn.Server(config(app, settings, tls))
        self._before = before
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        sys.setswitchinterval(SWITCH_INTERVAL)

    def start(self) -> None:
        """Start the thread and wait until clients can connect. Raises the error of `before`."""
        gc.collect()
        gc.freeze()  # Garbage collections stop all threads. They can skip the objects that stay until the end.
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Refuse new connections, wait for running requests during the grace time, and end the thread."""
        self._server.should_exit = True
        self._thread.join(self._grace + 5)
        gc.unfreeze()  # Otherwise extension modules report leaked objects at exit.

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        async def main() -> None:
            if self._before is not None:
                await self._before()
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._bound]))
            while not self._server.started and not serving.done():
                await asyncio.sleep(0.005)
            self._ready.set()
            await serving

        try:
            with asyncio.Runner(loop_factory=self._server.config.get_loop_factory()) as runner:
                runner.run(main())
        except BaseException as error:
            self._error = error
        finally:
            self._ready.set()
            with suppress(OSError):
                self._bound.close()
