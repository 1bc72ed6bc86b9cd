"""The chat page at /, and the files that it loads, below a path that contains their hash."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from .errors import ApiError

STATIC = Path(__file__).parent / "static"
DOCUMENT = "page.html"
TYPES = {".js": "text/javascript", ".css": "text/css"}
FILES_PATH = "/page/"  # Paths of the files begin with this. They contain no secret, so they need no API key.
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "connect-src": "'self'",
    "img-src": "data:",  # The page has an empty icon.
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # Scripts cannot insert text as HTML.
    "trusted-types": "'none'",
}
HEADERS = {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
DOCUMENT_HEADERS = HEADERS | {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
# The path of a file changes with its content, so browsers need not ask for it again.
FILE_HEADERS = HEADERS | {"Cache-Control": "public, max-age=31536000, immutable"}


class Page:
    """The document and its files, read from STATIC.

    Attributes:
        version: hash of all files, a part of their paths.
        routes: routes of the document and the files.
    """

    def __init__(self):
        paths = sorted(path for path in STATIC.rglob("*") if path.suffix in TYPES)
        self._files = {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in paths}
        self.version = hashlib.sha256(repr(self._files).encode()).hexdigest()[:16]
        self.document = (STATIC / DOCUMENT).read_text(encoding="utf-8").replace("VERSION", self.version)
        self.routes = [Route("/", self._root), Route(f"{FILES_PATH}{{version}}/{{name:path}}", self._file)]

    async def _root(self, request: Request) -> Response:
        """Handle GET /."""
        return HTMLResponse(self.document, headers=DOCUMENT_HEADERS)

    async def _file(self, request: Request) -> Response:
        """Handle GET for a file of the page."""
        version, name = request.path_params["version"], request.path_params["name"]
        if version != self.version or name not in self._files:
            raise ApiError(404, "this file is not a part of the page; load the page again")
        return Response(self._files[name], media_type=TYPES[Path(name).suffix], headers=FILE_HEADERS)
