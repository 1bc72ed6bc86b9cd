"""A replica: an engine and its HTTP server in a process that Ray Serve starts, watches and replaces."""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from concurrent.futures import Future
from typing import Any

from ..engine import Engine
from ..server.access import Record
from ..server.app import Server
from ..server.errors import stopping
from ..server.settings import FAILURE_GRACE, Settings
from .config import Model
from .listener import Listener

ENGINE_FAILED = 3  # Exit code, as of `tridecode serve`.
ARRIVAL_SECONDS = 30.0  # Seconds in which a request must arrive after its place was reserved.
CONNECTIONS = 64  # Connections in addition to one for each request.
ID_HEADER = b"x-request-id"


class Replica:
    """The deployment of one model.

    Gateways send HTTP requests to the address in `record_replica_metadata`. For each of them, a gateway also calls
    `attend`, which lasts as long as the request. Thereby Ray knows the load of the replica, waits for running requests
    when it stops the replica, and reports to gateways at once when the process dies.

    Args:
        model: the configuration.
        grace: seconds for running requests to end at the end.
        host: address to listen on; "" selects the address of this node.
    """

    def __init__(self, model: Model, grace: float, host: str = ""):
        if not model.gpus:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        log_requests()
        self.model = model
        self.engine = Engine.load(model.model, **model.options)
        self._host = host or node_address()
        self._settings = Settings(
            model=model.name,
            max_queue=model.options["max_queue"],
            timeout=model.timeout,
            grace=grace,
            max_connections=model.max_requests + CONNECTIONS,
            api_key=secrets.token_hex(16),  # Only processes of the Ray cluster learn the key.
            log_prompts=model.log_prompts,
        )
        self.server = Server(self.engine, self._settings, self._engine_failed)
        self._attended = Attended(self.server.app)
        self._passes, self._progress = -1, time.monotonic()
        self._listener = Listener(self._attended, self._settings, self._host, 0, before=self.server.start)
        self._listener.start()

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the address of the HTTP server; Ray sends it to the gateways."""
        return {
            "host": self._host,
            "port": self._listener.port,
            "key": self._settings.api_key,
            "slots": self.engine.slots,
            "context": self.engine.capacity,
        }

    async def attend(self, id: str) -> None:
        """Return when the request `id` has ended, or if it does not arrive."""
        await self._attended.attend(id)

    def check_health(self) -> None:
        """Check that the engine works.

        Raises:
            RuntimeError: the engine has failed, or no pass has ended for a long time although requests are active.
        """
        loop = self.server.loop
        if loop.failure is not None:
            raise RuntimeError(f"the engine has failed: {loop.failure}")
        if not (loop.running and self._listener.alive):
            raise RuntimeError("the thread of the engine or of the HTTP server has ended")
        passes = sum(stat.count for stat in self.engine.graph_stats())
        now = time.monotonic()
        if passes != self._passes or not self.engine.scheduler.busy:
            self._passes, self._progress = passes, now
        elif now - self._progress > self.model.pass_seconds:
            raise RuntimeError(f"no pass has ended for {now - self._progress:.0f} seconds although requests are active")

    def __del__(self) -> None:
        """End the requests that are left, and free the engine. Ray calls this after it has waited for them."""
        if (listener := self.__dict__.pop("_listener", None)) is None:  # Python calls this again.
            return
        loop, problem = self.server.loop, stopping()
        loop.refusing = problem.message
        loop.call_soon(lambda: loop.end_all(problem))
        listener.stop()
        loop.stop()
        self.engine.close()

    def _engine_failed(self) -> None:
        """End the process, so that Ray starts another one."""
        self.server.loop.call_later(FAILURE_GRACE, lambda: os._exit(ENGINE_FAILED))


class Attended:
    """ASGI application that runs another one, and lets `attend` wait for the end of its requests.

    Both run in different event loops.
    """

    def __init__(self, app: Any):
        self._app = app
        self._requests: dict[str, Future[None]] = {}  # Requests that run, or whose place is reserved.
        self._arrived: set[str] = set()
        self._ended: deque[str] = deque(maxlen=1000)

    async def __call__(self, scope, receive, send) -> None:
        """Run a request under the id that the gateway has given it."""
        id = next((value.decode("latin-1") for name, value in scope["headers"] if name == ID_HEADER), "")
        if not id:
            return await self._app(scope, receive, send)
        scope["tridecode.record"] = Record(id)
        ended = self._requests.setdefault(id, Future())
        self._arrived.add(id)
        try:
            await self._app(scope, receive, send)
        finally:
            self._ended.append(id)
            self._requests.pop(id, None)
            if not ended.done():
                ended.set_result(None)
            self._arrived.discard(id)

    async def attend(self, id: str) -> None:
        """Return when a request has ended, or if it does not arrive."""
        ended = self._requests.setdefault(id, Future())
        try:
            if id in self._ended:
                return
            await asyncio.wait([asyncio.shield(asyncio.wrap_future(ended))], timeout=ARRIVAL_SECONDS)
            if id in self._arrived:
                await asyncio.shield(asyncio.wrap_future(ended))
        finally:
            if id not in self._arrived:
                self._requests.pop(id, None)


def node_address() -> str:
    """Return the address of this node in the Ray cluster."""
    import ray

    return ray.util.get_node_ip_address()


def log_requests() -> None:
    """Send the server's log of requests to the log of the process, which Ray collects."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("tridecode.server")
    logger.handlers[:], logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
