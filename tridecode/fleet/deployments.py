"""The fleet as an application of Ray Serve: one deployment for each model, and the gateway as the ingress."""

import asyncio
import hashlib
import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from ..server.errors import ApiError
from ..server.settings import Settings
from ..server.tls import Tls
from .config import Config, Model
from .gateway import Gateway, full
from .listener import Listener
from .prefix import ROUTERS, Ticket
from .replica import Replica, log_requests
from .upstream import Address, ReplicaLost

QUEUE_SECONDS = 1.0  # Seconds for which a request waits for a place on a replica.
READY_SECONDS = 10.0  # The same if there is no replica, for example for a moment of an update.
CONNECT_SECONDS = 5.0  # Seconds for which a new gateway waits for replicas before it listens.
LEAVE_SECONDS = 3.0  # Seconds for which a gateway that stops still accepts connections, and closes them one by one.
END_SECONDS = 2.0  # Seconds in which a replica reports the end of a request that has ended.
HEALTH_SECONDS = 2.0  # Seconds between health checks.
HEALTH_TIMEOUT = 10.0
KILL_SECONDS = 10.0  # Seconds after the grace time after which Ray ends a process.
CONSTRUCTOR_RETRIES = 2
GATEWAY = "gateway"
log = logging.getLogger("tridecode.server")


class ModelReplicas:
    """The replicas of one model, by the handle of its deployment."""

    def __init__(self, name: str, deployment: str, handle: DeploymentHandle, keys: tuple[str, ...]):
        self.name, self.keys = name, keys
        self._deployment, self._handle = deployment, handle.options(method_name="attend")

    async def connect(self) -> None:
        """Wait for the first replica. From then on, Ray sends the addresses of all replicas."""
        ticket = Ticket()
        async with self._handle.choose_replica(ticket):
            self._release(ticket)

    def replicas(self) -> Sequence[Address]:
        """Return the replicas that are ready."""
        if (router := ROUTERS.get(self._deployment)) is None:
            return ()
        return [_address(id.unique_id, each.replica_metadata) for id, each in list(router.curr_replicas.items())]

    @asynccontextmanager
    async def lease(self, ticket: Ticket) -> AsyncIterator[Address]:
        """Yield the replica that the policy chooses, with a place reserved for the request. Raises ApiError."""
        choice = self._handle.choose_replica(ticket)
        try:
            async with asyncio.timeout(QUEUE_SECONDS if self.replicas() else READY_SECONDS):
                selection = await choice.__aenter__()
        except TimeoutError:
            self._release(ticket)
            if not self.replicas():
                raise ApiError(503, f"no replica of {self.name} is ready; try again later", code="no_replica") from None
            raise full() from None
        except (RayError, RayServeException) as error:
            self._release(ticket)
            log.warning("%s: no replica can be chosen: %s", ticket.id, error)
            raise ApiError(503, f"no replica of {self.name} is ready; try again later", code="no_replica") from None
        except BaseException:
            self._release(ticket)
            raise
        attending = None
        try:
            ROUTERS[self._deployment].policy.place(ticket, selection.replica_id)
            attending = self._handle.dispatch(selection, ticket.id)
            yield _address(selection.replica_id, selection.replica_metadata)
        except ReplicaLost:
            if attending is not None:
                attending.cancel()
            raise
        finally:
            self._release(ticket)
            with suppress(RayError, RayServeException, TimeoutError, asyncio.CancelledError):
                if attending is not None:
                    async with asyncio.timeout(END_SECONDS):
                        await attending
            with suppress(RayError, RayServeException):
                await choice.__aexit__(None, None, None)

    def _release(self, ticket: Ticket) -> None:
        if (router := ROUTERS.get(self._deployment)) is not None:
            router.policy.release(ticket)


class GatewayDeployment:
    """The process of a gateway.

    Args:
        config: the configuration, without the options of the models.
        handles: name of a model -> (name of its deployment, its handle, its keys).
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it.
        self, config: Config, handles: dict[str, tuple[str, DeploymentHandle, tuple[str, ...]]]
    ):
        log_requests()
        self._backends = {name: ModelReplicas(name, *each) for name, each in handles.items()}
        settings = Settings(
            model=next(iter(handles)),
            grace=config.grace,
            allow_hosts=(*config.allow_host, config.host),
            max_connections=config.max_connections,
            timeout_keep_alive=config.timeout_keep_alive,
            cors=config.cors,
        )
        self._gateway = Gateway(self._backends, settings, config.keys, config.join_ms)
        self._listener: Listener | None = None
        if config.port is not None:
            tls = Tls(config.ssl_certfile, config.ssl_keyfile) if config.ssl_certfile else None
            shared = config.port != 0
            self._listener = Listener(self._gateway.app, settings, config.host, config.port, tls, shared=shared)
        # A gateway that replaces another one listens when it knows the replicas. In a new fleet, they are loading.
        self._connecting = [asyncio.ensure_future(backend.connect()) for backend in self._backends.values()]
        await asyncio.wait(self._connecting, timeout=CONNECT_SECONDS)
        if self._listener is not None:
            self._listener.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application for requests that come through Ray's proxies."""
        return self._gateway.app

    def check_health(self) -> None:
        """Check that the HTTP server runs. Raises RuntimeError."""
        if self._listener is not None and not self._listener.alive:
            raise RuntimeError("the thread of the HTTP server has ended")

    def __del__(self) -> None:
        """Let clients go to another gateway, and wait for running requests during the grace time."""
        if (listener := self.__dict__.pop("_listener", None)) is not None:
            self._gateway.stopping = True
            time.sleep(LEAVE_SECONDS)
            listener.stop()


def _address(replica: str, metadata: dict[str, Any]) -> Address:
    return Address(replica, **metadata)


def deployment_name(model: str) -> str:
    """Return a name for the deployment of a model; Ray shows it, and allows few characters."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", model)
    return plain if plain == model else f"{plain}-{hashlib.sha256(model.encode()).hexdigest()[:6]}"


def deploy_model(model: Model, config: Config) -> serve.Deployment:
    """Return the deployment of one model."""
    routing = config.routing
    scaling = model.autoscaling
    router = RequestRouterConfig(
        request_router_class="tridecode.fleet.router.Router",
        request_router_kwargs={
            "slots": model.slots,
            "entries": routing.entries,
            "spread": routing.spread,
            "prefix": routing.policy == "prefix",
        },
    )
    limits = AutoscalingConfig(
        min_replicas=scaling.min, max_replicas=scaling.max, target_ongoing_requests=scaling.target
    ) if scaling else None  # fmt: skip
    return serve.deployment(
        Replica,
        name=deployment_name(model.name),
        num_replicas=None if scaling else model.replicas,
        autoscaling_config=limits,
        ray_actor_options={"num_gpus": model.gpus, "num_cpus": model.cpus},
        max_ongoing_requests=model.max_requests,
        request_router_config=router,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=config.grace + KILL_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=CONSTRUCTOR_RETRIES,
    )


def application(config: Config) -> serve.Application:
    """Return the application of a fleet."""
    handles = {
        model.name: (deployment_name(model.name), deploy_model(model, config).bind(model, config.grace), model.keys)
        for model in config.models
    }
    gateway = serve.deployment(
        serve.ingress()(GatewayDeployment),
        name=GATEWAY,
        num_replicas=config.gateways,
        # The gateways share one port, so they run on one node: the head of the cluster.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=config.max_connections,
        max_surge_percent=100,  # A new gateway starts before the old one stops; they can share the port.
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=config.grace + KILL_SECONDS,
    )
    return gateway.bind(without_models(config), handles)


def without_models(config: Config) -> Config:
    """Return what a gateway reads of the configuration, so that a change of a model does not restart the gateways."""
    return replace(config, models=(), address=None)
