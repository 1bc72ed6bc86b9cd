"""Errors for clients: a status and one line in JSON, without paths and stack traces."""

import re
from pathlib import Path

from ..errors import EngineClosed, GenerationError, ParameterError, PromptError, QueueFull, TooLong

RETRY_AFTER = 1  # Seconds that the server sends with status 429 and 503.
ANTHROPIC = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
             429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}  # fmt: skip


class ApiError(Exception):
    """An error that is sent to a client.

    Args:
        status: HTTP status.
        message: one line for people.
        param: name of the invalid parameter.
        code: a word for programs.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @property
    def headers(self) -> dict[str, str]:
        """Response headers of this status."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        if self.code == "unsupported_encoding":
            return {"Accept-Encoding": "gzip, deflate"}
        return {"Retry-After": str(RETRY_AFTER)} if self.status in (429, 503) else {}

    def body(self, path: str = "") -> dict:
        """Return the body of the response, in Anthropic's form on its paths, else in OpenAI's."""
        if path.startswith("/v1/messages"):
            default = "invalid_request_error" if self.status < 500 else "api_error"
            kind = ANTHROPIC.get(self.status, default)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kinds = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
                 429: "rate_limit_error"}  # fmt: skip
        default = "invalid_request_error" if self.status < 500 else "server_error"
        kind = kinds.get(self.status, default)
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def outcome(status: int) -> str:
    """Return the outcome of a failed request, for metrics and the log. `status` is 0 if no status was sent."""
    named = {0: "cancelled", 499: "cancelled", 503: "unavailable", 504: "timeout"}
    return named.get(status, "refused" if status < 500 else "failed")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return an error with status 400."""
    return ApiError(400, message, param, code)


def stopping() -> ApiError:
    """Return the error for requests that the server refuses or ends because it stops."""
    return ApiError(503, "this server is stopping", code="stopping")


def api_error(error: Exception, directory: Path | None, names: dict[str, str] | None = None) -> ApiError | None:
    """Return the error for the client, None for internal errors, whose detail is not shown.

    Args:
        directory: directory of the checkpoint; it is removed from messages.
        names: argument -> its name in the request. It may be "one or another"; then `param` is None.
    """
    if isinstance(error, ApiError):
        return error
    text = str(error) if directory is None else str(error).replace(f"{directory}/", "")
    if isinstance(error, TooLong):
        return bad_request(text, code="context_length_exceeded")
    if isinstance(error, ParameterError | PromptError):
        argument = (error.argument if isinstance(error, ParameterError) else None) or re.split(r"\W", text)[0]
        name = (names or {}).get(argument, argument)
        if text.startswith(argument):
            text = name + text[len(argument) :]
        one = " or " not in name and ("_" in name or isinstance(error, ParameterError))
        return bad_request(text, name if one else None)
    if isinstance(error, EngineClosed):
        return stopping()
    if isinstance(error, QueueFull):
        # A client cannot set max_queue, so the message does not name it.
        return ApiError(503, "the queue is full; try again later", code="queue_full")
    if isinstance(error, GenerationError) and text.startswith("the grammar cannot be enforced"):
        # The client chose the grammar, a schema or its tools, and a smaller one can be enforced.
        name = (names or {}).get("json_schema") or (names or {}).get("grammar", "")
        param = None if not name or " or " in name else name
        return bad_request(f"{name}: {text}" if name else text, param, "grammar_failed")
    if isinstance(error, GenerationError):
        return ApiError(500, text, code="generation_failed")
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return ApiError(500, "out of memory during the prompt pass; shorten the prompt", code="out_of_memory")
    return None
