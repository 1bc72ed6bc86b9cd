"""A replica: an engine and its HTTP server in a process of Ray Serve.

This module imports torch, which the gateways do not need.
"""

import asyncio
import os
import secrets
from typing import Any

import ray
from ray import serve

from ..engine import Engine
from ..server.access import log_requests
from ..server.listen import allow_files, bind, prepare_threads, started
from ..server.run import Uvicorn
from ..server.settings import Settings
from .config import Model

CONNECTIONS = 64  # Connections in addition to one for each request.


class Replica:
    """The deployment of one model: an engine and its HTTP server, whose address Ray sends to the gateways.

    Args:
        model: the configuration.
        grace: seconds for running requests to end when the replica stops.
    """

    async def __init__(self, model: Model, grace: float):  # type: ignore[misc]  # Ray awaits it.
        if not model.gpus:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
        log_requests()
        self._model, self._host = model, ray.util.get_node_ip_address()
        self.engine = Engine.load(model.model, **model.options)
        queue = model.options["max_queue"]
        self._settings = Settings(
            model=model.name,
            max_queue=queue,
            timeout=model.timeout or None,
            grace=grace,
            max_connections=self.engine.slots + queue + CONNECTIONS,
            api_keys=(secrets.token_hex(16),),  # Only processes of the Ray cluster learn the key.
            log_prompts=model.log_prompts,
            replica=serve.get_replica_context().replica_id.unique_id,
        )
        self._passes, self._progress = -1, 0.0
        allow_files(self._settings.max_connections)
        bound = bind(self._host, 0, self._settings.timeout)
        self._port = bound.getsockname()[1]
        prepare_threads()
        self._server = Uvicorn(self.engine, self._settings, None, lambda: None)
        self._serving = await started(self._server, bound)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Return the address of the HTTP server; Ray sends it to the gateways."""
        key = self._settings.api_keys[0]
        sizes = {"slots": self.engine.slots, "context": self.engine.capacity}
        return {"host": self._host, "port": self._port, "key": key} | sizes

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the number of requests that run or wait, for `replicas_needed`."""
        return {"requests": self._server.http.loop.open}

    async def check_health(self) -> None:
        """Check that the engine works.

        Raises:
            RuntimeError: the engine has failed, or no pass has ended for a long time although requests are active.
        """
        loop, now = self._server.http.loop, asyncio.get_running_loop().time()
        if loop.failure is not None or self._serving.done() or not loop.running:
            raise RuntimeError(f"the engine or its HTTP server has ended: {loop.failure}")
        passes = sum(stat.count for stat in self.engine.graph_stats())
        if passes != self._passes or not self.engine.scheduler.busy:
            self._passes, self._progress = passes, now
        elif now - self._progress > self._model.pass_seconds:
            raise RuntimeError(f"no pass has ended for {now - self._progress:.0f} seconds although requests are active")

    async def __del__(self) -> None:
        """Refuse new requests, let running ones end during the grace time, and free the engine."""
        if hasattr(self, "_serving"):  # Ray also calls this if the replica could not start.
            self._server.should_exit = True
            await self._serving
            self.engine.close()
