"""Client of an OpenAI-compatible server that measures the times of streamed answers, with httpx."""

import asyncio
import json
import math
import time
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial

import httpx

from ...errors import GenerationError, as_json, brief

ENDPOINTS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TEXTS = ("content", "text", "reasoning_content", "reasoning")  # Fields of a choice that can contain its text.


class Failed(Exception):
    """The request got no complete answer. Requests that fail for the same reason have equal messages."""


@dataclass(eq=False)
class Answer:
    """One request and the times at which its parts arrived, in seconds of `time.perf_counter()`."""

    started: float
    first: float = math.inf  # Time of the first text, or of the end of an answer without text.
    last: float = math.inf  # Time of the last event before [DONE].
    gaps: list[float] = field(default_factory=list)  # Times between an event with text and the next one.
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    _latest: float = 0.0  # Time of the latest event with text.

    @property
    def ttft(self) -> float:
        """Time to first token in seconds."""
        return self.first - self.started

    @property
    def latency(self) -> float:
        """Seconds from the request to the end of the answer."""
        return self.last - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, or None for an answer of fewer than two tokens."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def event(self, data: bytes, now: float) -> None:
        """Record an event that arrived at `now`.

        Args:
            data: the event's data
            now: seconds of `time.perf_counter()`

        Raises:
            Failed: the event reports an error or does not follow the API
        """
        try:
            event = json.loads(data)
            texts = [has_text(choice) for choice in event.get("choices") or ()]
            if event.get("error"):
                raise Failed(f"an error in the stream: {message_of(event)}")
            if usage := event.get("usage"):
                self.input_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            shown = brief(data.decode(errors="replace"), 80)
            raise Failed(f"an event in the stream does not follow the API: {shown}") from None
        self.last = now
        if any(texts):
            if self.first == math.inf:
                self.first = now
            else:
                self.gaps.append(now - self._latest)
            self._latest = now

    def finish(self) -> None:
        """Complete the answer after the end of its stream. Raises Failed for a stream without usage."""
        if not self.input_tokens and not self.output_tokens:
            raise Failed("the stream ended without usage: it was cut off, or the server ignores include_usage")
        self.first = min(self.first, self.last)


def has_text(choice: dict) -> bool:
    """Return whether a choice of a response or of an event contains text."""
    part = choice.get("delta") or choice
    return any(map(part.get, TEXTS))


def message_of(body) -> str:
    """Return the message of a parsed JSON error body."""
    error = body.get("error", body) if isinstance(body, dict) else body
    message = error.get("message", error) if isinstance(error, dict) else error
    return brief(message if isinstance(message, str) else as_json(message))


class Client:
    """HTTP client that sends requests to one server and returns their `Answer`s."""

    def __init__(self, url: str, key: str | None, timeout: float):
        """Create a client without connections.

        Args:
            url: base URL of the server
            key: API key, if the server requires one
            timeout: seconds for a whole request
        """
        self._timeout = timeout
        # Compression would delay events and merge them.
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        # Servers close connections that are idle for some seconds (uvicorn: 5). The client closes them earlier, so that
        # no
        # request uses a connection that the server has just closed.
        limits = httpx.Limits(max_connections=1, keepalive_expiry=3.0)
        self._url, context = url, httpx.create_ssl_context()
        self._connect = partial(
            httpx.AsyncClient, base_url=url, headers=headers, limits=limits, timeout=None, verify=context
        )
        # Each AsyncClient has one connection. A pool would check all its connections for each request, which takes 4 ms
        # for 64.
        self._all: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *raised) -> None:
        for http in self._all:
            await http.aclose()

    def prepare(self, connections: int) -> None:
        """Create clients until `connections` of them are idle. Creating one takes about a millisecond."""
        while len(self._idle) < connections:
            self._all.append(self._connect())
            self._idle.append(self._all[-1])

    @contextmanager
    def _connection(self):
        self.prepare(1)
        http = self._idle.pop()  # The connection of the client that was used last is most likely still open.
        try:
            yield http
        finally:
            self._idle.append(http)

    async def first_model(self) -> str:
        """Return the name of the first model that the server lists. Raises GenerationError."""
        place = f"{self._url}/v1/models"
        try:
            async with failing(self._timeout):
                with self._connection() as http:
                    response = await http.get("/v1/models")
                check(response)
                return response.json()["data"][0]["id"]
        except Failed as error:
            raise GenerationError(f"{place}: {error}") from None
        except (ValueError, LookupError, TypeError):
            raise GenerationError(f"{place} lists no model; set --model") from None

    async def ask(self, endpoint: str, body: bytes, running: set[Answer]) -> Answer:
        """Send a request and return its answer. A failure is stored in the answer's `error`.

        Args:
            endpoint: a key of ENDPOINTS
            body: JSON of a request with `"stream": true`
            running: set that contains the answer while the request runs
        """
        answer = Answer(time.perf_counter())
        running.add(answer)
        try:
            async with failing(self._timeout):
                with self._connection() as http:
                    await stream(http, ENDPOINTS[endpoint], body, answer)
        except Failed as error:
            answer.error = str(error)
        finally:
            running.remove(answer)
        return answer


async def stream(http: httpx.AsyncClient, path: str, body: bytes, answer: Answer) -> None:
    """Post `body` and record the events of the response in `answer`. Raises Failed, or an error of httpx."""
    json_body = {"content-type": "application/json"}
    async with http.stream("POST", path, content=body, headers=json_body) as response:
        if response.status_code != 200:
            await response.aread()
            check(response)
        rest = b""
        async for chunk in response.aiter_raw():
            now = time.perf_counter()
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    answer.event(data, now)
        answer.finish()


def check(response: httpx.Response) -> None:
    """Raise Failed unless the status of a response is 200. The response must have been read."""
    if response.status_code != 200:
        try:
            reason = message_of(response.json())
        except (ValueError, RecursionError):
            reason = brief(response.text)
        hint = "; set TRIDECODE_API_KEY or --api-key-file" if response.status_code == 401 else ""
        raise Failed(f"{response.status_code}: {reason or response.reason_phrase}{hint}")


@asynccontextmanager
async def failing(timeout: float):
    """Convert errors of the connection, and a timeout of `timeout` seconds, to Failed."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        raise Failed(f"no end within {timeout:g} s (--timeout)") from None
    except httpx.ConnectError as error:
        raise Failed(f"cannot connect: {brief(error)}; check that a server runs at the address of --url") from None
    except (httpx.HTTPError, OSError) as error:
        raise Failed(f"{type(error).__name__}: {brief(error)}".removesuffix(": ")) from None
