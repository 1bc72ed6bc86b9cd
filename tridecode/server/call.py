"""Call: an HTTP request, its requests of the engine, and its response, whole or as a stream."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from ..errors import GenerationError
from ..results import Piece
from ..sampling import SamplingParams
from ..serve.request import Request
from ..text.prompt import Encoded
from . import events
from .choice import Choice
from .errors import ApiError, api_error, outcome, stopping
from .loop import Loop
from .metrics import Metrics
from .protocol import Generation
from .shapes import Shape

log = logging.getLogger("tridecode.server")


@dataclass
class Plan:
    """The requests of a call, and the form of its response.

    prepare: returns the encoded prompts, in a thread. choice: returns the initial Choice for a prompt and its number.
    """

    asked: Generation
    shape: Shape
    prepare: Callable[[], list[Encoded]]
    params: list[SamplingParams]  # one for each of n answers
    choice: Callable[[int, Encoded], Choice]
    prompts: int = 1
    form: Callable[[Encoded], dict] = lambda prompt: {}  # fields of SamplingParams that depend on it
    places: dict[str, str] = field(default_factory=dict)  # where the request has those
    formed: bool = False  # whether there are any

    @property
    def requests(self) -> int:
        """Number of requests of the engine: one a choice, and one a prompt if its log-probabilities are requested."""
        return self.prompts * (len(self.params) + self.asked.scores_prompt)


class Call:
    """An HTTP request and its response, an ASGI application. It has one or several requests of the engine."""

    def __init__(self, loop: Loop, metrics: Metrics, plan: Plan, started: float, deadline: float | None):
        self._loop, self._metrics, self._plan = loop, metrics, plan
        self.started, self.deadline = started, deadline  # by time.monotonic, as all times here
        self.heard = time.monotonic()  # when its task was last awake
        self.last: dict[int, float] = {}  # when the last pieces of each request arrived
        self.expected = 0  # number of requests that it will have
        self.ended: ApiError | None = None  # why the server ended it early
        self._prompts: list[Encoded] = []
        self._choices: list[Choice] = []
        self._requests: list[Request] = []
        self._taken: list[int] = []  # pieces of each request that were read
        self._waiter: asyncio.Future | None = None
        self._begun = False  # the head of the response was sent
        self._opened = False  # and the first event of a stream
        loop.add(self)

    async def __call__(self, scope, receive, send) -> None:
        record = scope["tridecode.record"]
        gone = asyncio.create_task(self._watch(receive))
        try:
            await self._loop.begin(self, self._plan.requests, self._submit, self._plan.formed)
            if self._plan.asked.stream:
                await self._stream(send)
            else:
                await self._whole(send)
            record.outcome = self._choices[0].finish_reason
        except Exception as error:
            names = self._plan.asked.names | self._plan.places
            problem = api_error(error, self._plan.shape.tokenizer.directory, names)
            if problem is None:
                log.exception("a request failed")
                problem = ApiError(500, "internal error; the server's log says more")
            record.outcome = outcome(problem.status)
            await self._tell(problem, send)
        finally:
            gone.cancel()
            self._drop()
            self._loop.forget(self)
            usages = [choice.usage for choice in self._choices]
            self._metrics.read(usages)
            prompt, output = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
            record.tokens = f", {prompt} + {output} tokens"

    async def _watch(self, receive) -> None:
        """End the call when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ApiError(499, "the client has gone", code="disconnected"))

    # ---- its requests

    def _submit(self) -> list[Request]:
        """Submit the requests of all choices, and after them the requests that score the prompts."""
        plan, asked, engine = self._plan, self._plan.asked, self._loop.engine
        prompts = self._prompts = plan.prepare()
        self._choices = [plan.choice(i, prompt) for i, prompt in enumerate(prompts) for _ in plan.params]
        forms = [plan.form(prompt) for prompt in prompts]
        answers = [
            engine.submit(prompt, replace(params, **form), reuse_prefix=asked.cache_prompt, cache_salt=asked.cache_salt)
            for prompt, form in zip(prompts, forms)
            for params in plan.params
        ]
        scored = prompts if asked.scores_prompt else ()
        return answers + [engine.submit_score(prompt, plan.params[0].logprobs or 0) for prompt in scored]

    def follow(self, requests: list[Request]) -> None:
        self._requests, self._taken = requests, [0] * len(requests)
        if self.ended:
            self._drop()

    @property
    def open(self) -> int:
        """Number of its requests that take a place in the queue or a slot.

        After `end` it is 0, although a pass may still run.
        """
        if self.ended:
            return 0
        if not self._requests:
            return self.expected
        return sum(request.finish_reason is None for request in self._requests)

    def look(self, anyway: bool = False) -> None:
        """Wake its task if there are new pieces, or with `anyway` in any case."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self.ended or self._loop.failure is not None or self._fresh():
            waiter.set_result(False)
        elif anyway:
            waiter.set_result(True)

    def end(self, error: ApiError) -> None:
        """Cancel its requests and let its task raise `error`. Within two passes their slots and pages are free."""
        if self.ended is None:
            self.ended = error
            self._drop()
            self.look()

    def _drop(self) -> None:
        for request in self._requests:
            request.drop()

    def _fresh(self) -> bool:
        return any(len(r.pieces) > taken or r.failure for r, taken in zip(self._requests, self._taken))

    def _take(self, number: int) -> list[Piece]:
        request, taken = self._requests[number], self._taken[number]
        if len(request.pieces) == taken and request.failure:
            raise request.failure
        pieces = request.pieces[taken:]
        self._taken[number] += len(pieces)
        return pieces

    async def _news(self) -> list[tuple[int, list[Piece]]]:
        """Wait for new pieces; return them by number of their request, or [] after a long silence.

        Raises ApiError if the call or the engine was ended, and the error of a request that failed.
        """
        while True:
            if self._loop.failure is not None:
                raise ApiError(503, "the engine has failed; this server is about to end", code="engine_failed")
            if self.ended:
                raise self.ended
            self.heard = time.monotonic()
            if self._fresh():
                break
            self._waiter = asyncio.get_running_loop().create_future()
            if await self._waiter:
                return []
        news = [(i, pieces) for i in range(len(self._requests)) if (pieces := self._take(i))]
        for _, pieces in news:
            last = pieces[-1]
            if last.finish_reason == "error":
                raise GenerationError(last.error)
            if last.finish_reason == "cancelled":  # the engine was closed
                raise self.ended or stopping()
        self._metrics.heard(self, [(i, pieces) for i, pieces in news if i < len(self._choices)])
        return news

    # ---- its response

    async def _whole(self, send) -> None:
        answers, n, left = len(self._choices), len(self._plan.params), self._plan.requests
        pieces: list[list[Piece]] = [[] for _ in range(left)]
        while left:
            for i, new in await self._news():
                pieces[i] += new
                left -= new[-1].finish_reason is not None
        for i, scores in enumerate(pieces[answers:]):
            for choice in self._choices[i * n : (i + 1) * n]:
                choice.echo_logprobs(self._prompts[i].tokens, scores)
        said = [choice.add(new) for choice, new in zip(self._choices, pieces)]
        await self._send_json(send, 200, self._plan.shape.whole(self._choices, said))

    async def _stream(self, send) -> None:
        """Send events as tokens arrive, and comments during a long silence.

        An error before anything was sent has a status of its own.
        """
        shape, left = self._plan.shape, len(self._choices)
        while left:
            news = await self._news()
            data = b"" if news else events.KEEP_ALIVE
            if news and not self._opened:
                self._opened = True
                data = shape.opening([len(prompt.tokens) for prompt in self._prompts])
            for i, pieces in news:
                choice = self._choices[i]
                said = choice.add(pieces)
                left -= choice.finish_reason is not None
                data += shape.news(i, choice, said)
            if data:
                await self._send(send, data)
        await self._send(send, shape.closing(self._choices), more=False)

    async def _send(self, send, data: bytes, more: bool = True) -> None:
        if not self._begun:
            self._begun = True
            await send(_head(200, events.HEADERS))
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_json(self, send, status: int, value, headers: dict[str, str] | None = None) -> None:
        body = msgspec.json.encode(value)
        own = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        await send(_head(status, own | (headers or {})))
        await send({"type": "http.response.body", "body": body})

    async def _tell(self, problem: ApiError, send) -> None:
        """Send the problem as the response, or as the last event of a stream."""
        with suppress(OSError):
            if self._begun:
                await self._send(send, self._plan.shape.failure(problem), more=False)
            else:
                await self._send_json(send, problem.status, self._plan.shape.refusal(problem), problem.headers)


def _head(status: int, headers: dict[str, str]) -> dict:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
