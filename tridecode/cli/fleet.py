"""`tridecode fleet`: replicas on several GPUs and machines, by Ray Serve."""

import logging
import os
import re
import signal
import socket
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from ..errors import TridecodeError, brief, counted
from .terminal import Output

NAME = "fleet"  # Name of the application in Ray Serve.
PORT = 8000
CONNECT_SECONDS = 5.0


def fleet(args, output: Output) -> int:
    """Run `tridecode fleet` until it is stopped. Return the exit code."""
    try:
        from ..fleet import build
        from ..fleet.config import Config, missing, read_config
        from ..fleet.config import build as build_config
        from ..server.tls import Tls
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tridecode"):
            raise
        message = f"fleet needs the package {error.name}; install it: pip install 'tridecode[fleet]'"
        raise TridecodeError(message) from None
    own = {name: value for name in ("model", "replicas", "gpus") if (value := getattr(args, name)) is not None}
    if args.config and own:
        args.refuse(f"--{next(iter(own))} cannot be used with a file; set models in {args.config}")
    config = read_config(args.config) if args.config else build_config(Config, {"models": [own]})
    changed = {name: value for name in ("host", "port", "address") if (value := getattr(args, name)) is not None}
    config = replace(config, **({"port": PORT} if config.port is None else {}) | changed)
    if config.ssl_certfile:
        Tls(config.ssl_certfile, config.ssl_keyfile).check()
    try:
        import ray
        from ray import serve
    except ModuleNotFoundError as error:
        raise missing(error.name or "ray") from None
    # Without an address Ray finds the cluster of `ray start`, but not that of another `tridecode fleet`. "auto" does.
    address = config.address or os.environ.get("RAY_ADDRESS") or ("auto" if args.update else None)
    connect(ray, address, args.verbose)
    try:
        if args.update:
            update(serve, build(config), output)
        else:
            check_resources(ray, config)
            run(serve, build(config), config, output)
    finally:
        ray.shutdown()
    return 0


def run(serve, application, config, output: Output) -> None:
    """Deploy the application, and delete it after Ctrl-C or SIGTERM. Raises TridecodeError."""
    for each in (signal.SIGINT, signal.SIGTERM):  # Shells let programs in the background ignore SIGINT.
        signal.signal(each, signal.default_int_handler)
    serve.start(proxy_location="Disabled")
    output.note(f"starting {counted(sum(model.least for model in config.models), 'replica')}")
    try:
        serve.run(application, name=NAME, route_prefix="/")
        announce(output, config)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        output.note("stopping")
    except RuntimeError as error:
        raise TridecodeError(failure(serve, error)) from None
    finally:
        serve.delete(NAME)


def update(serve, application, output: Output) -> None:
    """Replace the application that runs on the cluster. Raises TridecodeError."""
    if NAME not in serve.status().applications:
        raise TridecodeError("no fleet runs on this cluster; start one without --update")
    output.note("updating")
    try:
        serve.run(application, name=NAME, route_prefix="/")
    except RuntimeError as error:
        raise TridecodeError(failure(serve, error)) from None


def connect(ray, address: str | None, verbose: bool) -> None:
    """Connect to the Ray cluster, or start Ray on this machine. Raises TridecodeError."""
    warnings.filterwarnings("ignore", module="ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    level = logging.INFO if verbose else logging.ERROR
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(level)
    try:
        if place := re.fullmatch(r"(?:ray://)?\[?([^/]+?)\]?:(\d+)", address or ""):  # Ray itself tries for minutes.
            socket.create_connection((place[1], int(place[2])), CONNECT_SECONDS).close()
        dashboard = None if address else False
        with nullcontext() if verbose else silent_stderr():
            ray.init(address=address, logging_level=level, log_to_driver=verbose, include_dashboard=dashboard)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        if address is None:
            raise TridecodeError(f"Ray cannot start: {brief(error)}; --verbose shows more") from None
        if address == "auto":
            raise TridecodeError("no Ray cluster runs on this machine; name one with --address HOST:PORT") from None
        why = f"no Ray cluster can be reached at {address}: {brief(error, 80)}"
        raise TridecodeError(f"{why}; start it there with: ray start --head") from None


@contextmanager
def silent_stderr():
    """Discard what the C++ parts of Ray write to stderr."""
    saved, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nothing)


def check_resources(ray, config) -> None:
    """Check that the cluster has the GPUs and CPUs of all replicas. Raises TridecodeError."""
    there = ray.cluster_resources()
    for kind, name in (("GPU", "gpus"), ("CPU", "cpus")):
        needed = sum(model.least * getattr(model, name) for model in config.models)
        if needed > there.get(kind, 0):
            fix = "start fewer replicas, or add machines to the cluster"
            if kind == "GPU" and not there.get(kind):
                fix = "set gpus to 0 to run on CPUs"
            raise TridecodeError(f"the replicas need {needed:g} {kind}s, the cluster has {there.get(kind, 0):g}; {fix}")


def failure(serve, error: Exception) -> str:
    """Return one line about an application that did not start."""
    messages = [str(error)]
    if (application := serve.status().applications.get(NAME)) is not None:
        messages = [each.message for each in application.deployments.values() if each.message] + messages
    for message in messages:
        if errors := re.findall(r"^(?:\S*\.)?(?:\w*Error): (.+)$", message, re.MULTILINE):
            return f"a replica cannot start: {brief(errors[-1])}"
    return f"the fleet cannot start: {brief(messages[0])}"


def announce(output: Output, config) -> None:
    """Print the address of the fleet and its models, and a warning if anyone in the network may use it."""
    scheme = "https" if config.ssl_certfile else "http"
    host = f"[{config.host}]" if ":" in config.host else config.host
    output.note(f"serving {', '.join(model.name for model in config.models)} at {scheme}://{host}:{config.port}/v1")
    keys = (*config.api_key_file, *(key for model in config.models for key in model.api_key_file))
    if not keys and config.host not in ("127.0.0.1", "::1", "localhost"):
        output.note("this fleet accepts requests without an API key; set api_key_file to require one")
    output.note("Ctrl-C stops")
