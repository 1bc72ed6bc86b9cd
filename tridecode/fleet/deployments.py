"""The fleet as an application of Ray Serve: one deployment for each model, and the gateways.

Ray Serve starts the processes, checks their health, replaces and scales them, and sends the list of ready replicas
to the gateways. Requests do not pass through it. Each class serves HTTP in the event loop of its other methods.
"""

import asyncio
import hashlib
import re
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from ..server.access import log_requests
from ..server.listen import allow_files, bind, config, prepare_threads, started
from ..server.settings import Settings
from ..server.tls import Tls
from .config import Config, Model
from .gateway import Backend, Gateway
from .peers import Peers
from .policy import Policy
from .router import Router, replicas_needed
from .upstream import replicas_of

HEALTH_SECONDS = 2.0  # Seconds between health checks.
CONNECT_SECONDS = 5.0  # Seconds for which a new gateway waits for replicas before it listens.
LEAVE_SECONDS = 3.0  # Seconds for which a gateway that stops still accepts connections, and closes them one by one.
KILL_SECONDS = 10.0  # Seconds after the grace time after which Ray ends a process.
GATEWAY = "gateway"


class GatewayDeployment:
    """A gateway process.

    Args:
        config: the configuration.
        handles: the deployments of the models, in their order.
    """

    async def __init__(self, config: Config, handles: list[DeploymentHandle]):  # type: ignore[misc]  # Ray awaits it.
        log_requests()
        routing, backends = config.routing, []
        for model in config.models:
            policy = Policy(routing.entries, routing.spread, routing.policy, several=config.gateways > 1)
            replicas = partial(replicas_of, deployment_name(model.name))
            backends.append(Backend(model.name, replicas, policy, model.api_key_file, model.adapters))
        self._serving: asyncio.Task[None] | None = None
        self._settings = Settings(
            model=config.models[0].name,
            grace=config.grace,
            timeout=max(model.timeout for model in config.models) or None,
            allow_hosts=(*config.allow_host, config.host),
            max_connections=config.max_connections,
            timeout_keep_alive=config.timeout_keep_alive,
            api_keys=(*config.api_key_file, *(key for backend in backends for key in backend.keys)),
            cors=config.cors,
        )
        self._gateway = Gateway(backends, self._settings, config.api_key_file, config.join_ms)
        if config.gateways > 1:
            folder = Path(tempfile.gettempdir(), f"tridecode-fleet-{config.port}")
            peers = Peers({backend.name: backend.policy for backend in backends}, folder)
            self._exchanging = asyncio.create_task(peers.run())
        # A gateway that replaces another one listens when it knows the replicas. In a new fleet, they are loading.
        self._connecting = [asyncio.ensure_future(connect(handle)) for handle in handles]
        await asyncio.wait(self._connecting, timeout=CONNECT_SECONDS)
        if config.port is not None:
            await self._listen(config)

    async def _listen(self, fleet: Config) -> None:
        allow_files(2 * fleet.max_connections)  # A gateway has a connection to a replica for each client.
        tls = Tls(fleet.ssl_certfile, fleet.ssl_keyfile) if fleet.ssl_certfile else None
        bound = bind(fleet.host, fleet.port or 0, shared=fleet.port != 0)
        prepare_threads()
        self._server = uvicorn.Server(config(self._gateway.app, self._settings, tls))
        self._serving = await started(self._server, bound)

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application for requests that come through Ray's proxies."""
        return self._gateway.app

    async def check_health(self) -> None:
        """Check that the HTTP server runs. Raises RuntimeError."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server has ended")

    async def __del__(self) -> None:
        """Let clients go to another gateway, and wait for running requests during the grace time."""
        if self._serving is not None:
            self._gateway.stopping = True
            await asyncio.sleep(LEAVE_SECONDS)
            self._server.should_exit = True
            await self._serving


async def connect(handle: DeploymentHandle) -> None:
    """Wait for the first replica. From then on, Ray sends the addresses of all replicas to `Router`."""
    async with handle.choose_replica():
        pass


def deployment_name(model: str) -> str:
    """Return a name for the deployment of a model; Ray shows it, and allows few characters."""
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", model)
    return plain if plain == model != GATEWAY else f"{plain}-{hashlib.sha256(model.encode()).hexdigest()[:6]}"


def deploy_model(model: Model, config: Config) -> serve.Application:
    """Return the deployment of one model."""
    from .replica import Replica

    scaling = model.autoscaling
    limits = AutoscalingConfig(
        min_replicas=scaling.min,
        max_replicas=scaling.max,
        target_ongoing_requests=scaling.target or model.options["slots"] / 2,
        upscale_delay_s=scaling.up_seconds,
        downscale_delay_s=scaling.down_seconds,
        look_back_period_s=max(scaling.up_seconds, 1.0),
        policy=AutoscalingPolicy(policy_function=replicas_needed),
    ) if scaling else None  # fmt: skip
    deployment = serve.deployment(
        Replica,
        name=deployment_name(model.name),
        num_replicas=None if scaling else model.least,
        autoscaling_config=limits,
        ray_actor_options={"num_gpus": model.gpus, "num_cpus": model.cpus},
        request_router_config=RequestRouterConfig(request_router_class=Router),
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=config.grace + KILL_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        max_constructor_retry_count=2,
    )
    return deployment.bind(model, config.grace)


def application(config: Config) -> serve.Application:
    """Return the application of a fleet."""
    gateway = serve.deployment(
        serve.ingress()(GatewayDeployment),
        name=GATEWAY,
        num_replicas=config.gateways,
        # The gateways share one port, so they run on one node: the head of the cluster.
        ray_actor_options={"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}},
        max_ongoing_requests=config.max_connections,
        max_surge_percent=100,  # A new gateway starts before the old one stops; they can share the port.
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=config.grace + LEAVE_SECONDS + KILL_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
    )
    return gateway.bind(config, [deploy_model(model, config) for model in config.models])
