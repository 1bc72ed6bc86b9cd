"""A client of an OpenAI-compatible server that times what streams to it. HTTP is httpx's."""

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
TEXTS = ("content", "text", "reasoning_content", "reasoning")  # of a choice: where its text may stand


class Failed(Exception):
    """A request gave no whole answer; the message is the reason, in the same words for the same cause."""


@dataclass(eq=False)
class Answer:
    """One request and when its parts came: seconds of time.perf_counter()."""

    started: float
    first: float = math.inf  # the first text, or the end where there was none
    last: float = math.inf  # the last event but [DONE]
    gaps: list[float] = field(default_factory=list)  # between an event with text and the next
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None
    _latest: float = 0.0  # event with text

    @property
    def ttft(self) -> float:
        return self.first - self.started

    @property
    def latency(self) -> float:
        return self.last - self.started

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None where no token is."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None

    def event(self, data: bytes, now: float) -> None:
        """Take the data of an event that came at `now`. Raises Failed."""
        try:
            found = json.loads(data)
            texts = [has_text(choice) for choice in found.get("choices") or ()]
            if found.get("error"):
                raise Failed(f"an error in the stream: {message_of(found)}")
            if usage := found.get("usage"):
                self.input_tokens, self.output_tokens = int(usage["prompt_tokens"]), int(usage["completion_tokens"])
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            shown = brief(data.decode(errors="replace"), 80)
            raise Failed(f"an event in the stream is none of this API: {shown}") from None
        self.last = now
        if any(texts):
            if self.first == math.inf:
                self.first = now
            else:
                self.gaps.append(now - self._latest)
            self._latest = now

    def finish(self) -> None:
        """The stream has ended as it should. Raises Failed where something is missing in it."""
        if not self.input_tokens and not self.output_tokens:
            raise Failed("the stream ended without usage: it was cut off, or the server ignores include_usage")
        self.first = min(self.first, self.last)


def has_text(choice: dict) -> bool:
    part = choice.get("delta") or choice
    return any(map(part.get, TEXTS))


def message_of(found) -> str:
    """What a JSON error body says."""
    error = found.get("error", found) if isinstance(found, dict) else found
    message = error.get("message", error) if isinstance(error, dict) else error
    return brief(message if isinstance(message, str) else as_json(message))


class Client:
    """Sends requests to one server; what came of them are Answers."""

    def __init__(self, url: str, key: str | None, timeout: float):
        """timeout: seconds for a whole request."""
        self._timeout = timeout
        # What is compressed comes late, and in other pieces than it was sent in.
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        # Servers close what is idle for some seconds (uvicorn: 5): no request should meet that.
        limits = httpx.Limits(max_connections=1, keepalive_expiry=3.0)
        self._url, context = url, httpx.create_ssl_context()
        self._connect = partial(
            httpx.AsyncClient, base_url=url, headers=headers, limits=limits, timeout=None, verify=context
        )
        # Each of them has one connection: a pool looks at all of its connections at each request (4 ms at 64 of them).
        self._all: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *raised) -> None:
        for http in self._all:
            await http.aclose()

    def prepare(self, connections: int) -> None:
        """Make what so many requests at once need: it takes a millisecond each."""
        while len(self._idle) < connections:
            self._all.append(self._connect())
            self._idle.append(self._all[-1])

    @contextmanager
    def _connection(self):
        self.prepare(1)
        http = self._idle.pop()  # the one used last, whose connection is the likeliest to be open
        try:
            yield http
        finally:
            self._idle.append(http)

    async def first_model(self) -> str:
        """The name of the first model that the server has. Raises GenerationError."""
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
            raise GenerationError(f"{place} names no model; give --model") from None

    async def ask(self, path: str, body: bytes, running: set[Answer]) -> Answer:
        """Post `body`, JSON that asks for a stream; the answer is in `running` meanwhile. What fails is its error."""
        answer = Answer(time.perf_counter())
        running.add(answer)
        try:
            async with failing(self._timeout):
                with self._connection() as http:
                    await stream(http, path, body, answer)
        except Failed as error:
            answer.error = str(error)
        finally:
            running.remove(answer)
        return answer


async def stream(http: httpx.AsyncClient, path: str, body: bytes, answer: Answer) -> None:
    """Raises Failed and what httpx raises."""
    json_body = {"content-type": "application/json"}
    async with http.stream("POST", path, content=body, headers=json_body) as response:
        if response.status_code != 200:
            await response.aread()
            check(response)
        rest = b""
        async for piece in response.aiter_raw():
            now = time.perf_counter()
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    answer.event(data, now)
        answer.finish()


def check(response: httpx.Response) -> None:
    """Raises Failed for a response, read to its end, that is none with status 200."""
    if response.status_code != 200:
        try:
            said = message_of(response.json())
        except (ValueError, RecursionError):
            said = brief(response.text)
        hint = "; give TRIDECODE_API_KEY or --api-key-file" if response.status_code == 401 else ""
        raise Failed(f"{response.status_code}: {said or response.reason_phrase}{hint}")


@asynccontextmanager
async def failing(timeout: float):
    """Within, what goes wrong on the way to a server and back raises Failed; so does an end that does not come."""
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        raise Failed(f"no end within {timeout:g} s (--timeout)") from None
    except httpx.ConnectError as error:
        raise Failed(f"cannot connect: {brief(error)}; is a server there? --url says where") from None
    except (httpx.HTTPError, OSError) as error:
        raise Failed(f"{type(error).__name__}: {brief(error)}".removesuffix(": ")) from None
