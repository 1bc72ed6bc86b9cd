"""Fleets: replicas of engines on several GPUs and machines, on Ray Serve. See docs/fleet.md.

`build` is the builder for `serve run tridecode.fleet:build` and `serve deploy`.
"""

from typing import Any

from .config import Config, missing, read_config
from .config import build as build_config

__all__ = ["Config", "build"]


def build(config: Any) -> Any:
    """Return the application of a fleet for Ray Serve.

    Args:
        config: a Config, the values of a configuration file, or {"config": path of the file}.

    Raises:
        ParameterError: a key or a value is wrong.
        TridecodeError: a file cannot be read, or a package is absent.
    """
    if isinstance(config, dict) and [*config] == ["config"]:
        config = read_config(config["config"])
    try:
        from .deployments import application
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tridecode"):
            raise
        raise missing(error.name or "ray") from None
    return application(build_config(Config, config))
