"""Adapters of a server: models for clients, with endpoints that load and unload them. The endpoints are vLLM's."""

import logging
import os
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ..engine import Engine
from ..errors import CheckpointError, ParameterError
from .bodies import Bodies
from .errors import ApiError, bad_request
from .loop import Loop
from .protocol import RequestBody, parse_body
from .settings import Settings

log = logging.getLogger("tridecode.server")


class LoadRequest(RequestBody, kw_only=True):
    """Body of /v1/load_lora_adapter."""

    without_effect = frozenset(("lora_int_id", "base_model_name"))
    lora_name: str
    lora_path: str
    load_inplace: bool = False

    def check(self) -> None:
        """Raise ApiError if the request would replace an adapter."""
        if self.load_inplace:
            raise bad_request("load_inplace is not supported; unload the adapter first", "load_inplace")


class UnloadRequest(RequestBody, kw_only=True):
    """Body of /v1/unload_lora_adapter."""

    without_effect = frozenset(("lora_int_id",))
    lora_name: str


class Adapters:
    """The adapters of an engine as models of a server."""

    def __init__(self, engine: Engine, settings: Settings, loop: Loop, bodies: Bodies):
        self._engine, self._settings, self._loop, self._bodies = engine, settings, loop, bodies
        self._root = None if settings.adapter_root is None else Path(settings.adapter_root).resolve()

    def routes(self) -> list[Route]:
        """Return the routes that change the adapters. There are none without a directory for them."""
        if self._root is None:
            return []
        return [
            Route("/v1/load_lora_adapter", self.load, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload, methods=["POST"]),
        ]

    def names(self) -> list[str]:
        """Return the names of the loaded adapters."""
        return [*self._engine.adapters]

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request names as its model, or None for the base model."""
        return model if model in self._engine.adapters else None

    async def load(self, request: Request) -> Response:
        """Handle POST /v1/load_lora_adapter."""
        payload = await self._bodies.read(request, lambda body: parse_body(body, LoadRequest))
        name, path = payload.lora_name, self._inside(payload.lora_path)
        if name == self._settings.model:
            raise bad_request(f"lora_name: {name} is the name of the base model; choose another one", "lora_name")
        try:
            await self._loop.run_in_thread(lambda: self._engine.load_adapter(name, path))
        except CheckpointError as error:  # The message does not show where the directory is.
            raise bad_request(str(error).replace(f"{self._root}/", ""), "lora_path") from None
        except ParameterError as error:
            raise bad_request(str(error).replace("adapter", "lora_name", 1), "lora_name", error.code) from None
        log.info("loaded adapter %s from %s", name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: Request) -> Response:
        """Handle POST /v1/unload_lora_adapter."""
        payload = await self._bodies.read(request, lambda body: parse_body(body, UnloadRequest))
        name = payload.lora_name
        try:
            await self._loop.run_in_thread(lambda: self._engine.unload_adapter(name))
        except ParameterError:
            text = msgspec.json.encode(name[:100]).decode()
            raise ApiError(404, f"there is no adapter {text}", "lora_name", "model_not_found") from None
        log.info("unloaded adapter %s", name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _inside(self, path: str) -> Path:
        """Return the directory of an adapter, which must be below the root. Links may not lead out of it."""
        assert self._root is not None
        try:
            directory = (self._root / path).resolve()
        except (OSError, ValueError, RuntimeError):  # The name is too long, contains NUL, or is a loop of links.
            directory = self._root
        if not directory.is_relative_to(self._root) or directory == self._root:
            raise bad_request("lora_path must be a directory below the adapter root of this server", "lora_path")
        if not os.path.isdir(directory):
            raise bad_request("lora_path: there is no such directory below the adapter root", "lora_path")
        return directory
