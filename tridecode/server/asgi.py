"""The application around the routes of a server or gateway: middleware, and the responses to errors."""

import re
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..errors import EngineClosed
from .access import ID_HEADERS, Access
from .errors import ApiError, api_error
from .settings import Settings


def make_app(routes: list[Route], settings: Settings, ended: Callable[[str, float], None]) -> Starlette:
    """Return an application with the access checks, the log and the errors of a server.

    Args:
        ended: called with the outcome and the seconds of every request for a generation.
    """
    middleware = [Middleware(Access, settings=settings, ended=ended)]
    if settings.cors:
        middleware.insert(
            0,
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[*ID_HEADERS, "retry-after"],
                allow_private_network=True,
            ),
        )
    handlers = {
        ApiError: handle_api_error,
        EngineClosed: handle_api_error,
        HTTPException: handle_http_error,
        500: handle_internal_error,
    }
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # Access removes the slash.
    return app


async def handle_api_error(request: Request, error: Exception) -> Response:
    """Return the response for an ApiError or a closed engine; raise other errors again."""
    if (problem := api_error(error, None)) is None:
        raise error
    return JSONResponse(problem.body(request.url.path), problem.status, problem.headers)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Return the response for an unknown path or method."""
    assert isinstance(error, HTTPException)
    path, message = request.url.path, str(error.detail)
    if error.status_code == 404:
        end = ending(path)
        similar = (each for each in paths_of(request) if each.split()[1].removeprefix("/v1").startswith(end))
        near = next(similar, "") if end != "/" else ""
        message = f"this path does not exist; {f'did you mean {near}?' if near else 'GET /v1 lists the paths'}"
    elif error.status_code == 405:
        message = (
            f"this path does not support {request.method}; use {(error.headers or {}).get('Allow', 'another method')}"
        )
    return JSONResponse(ApiError(error.status_code, message).body(request.url.path), error.status_code, error.headers)


def paths_of(request: Request) -> list[str]:
    """Return the methods and paths of the server, such as "POST /v1/completions"."""
    return [
        f"{'POST' if 'POST' in route.methods else 'GET'} {route.path.replace(':path', '')}"
        for route in request.app.routes
    ]


def ending(path: str) -> str:
    """Return a path without the prefixes that clients add by mistake: /v1 twice, /api, or another path before /v1."""
    return "/" + re.sub(r"^/+(.*/)?(v1|api)/+|^/+|/+$", "", path)


async def handle_internal_error(request: Request, error: Exception) -> Response:
    """Return the response for an unexpected error, without its detail."""
    body = ApiError(500, "internal error; the server's log has the details").body(request.url.path)
    # Starlette sends this response outside of Access, which adds the headers to all other responses.
    return JSONResponse(body, 500, request.scope["tridecode.record"].headers)
