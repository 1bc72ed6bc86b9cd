"""Answer: one HTTP request's generations on their way to its client, whole or as a stream, until the end or a cause."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from ..engine import Engine
from ..errors import GenerationError
from ..results import Piece
from ..sampling import SamplingParams
from ..text.prompt import Encoded
from . import events
from .choice import Choice
from .errors import ApiError, outcome, stopping, told
from .loop import Call, Loop
from .metrics import Metrics
from .protocol import Generation
from .shapes import Shape

log = logging.getLogger("tridecode.server")


@dataclass
class Plan:
    """What a request comes to. prepare: makes the prompts' ids, in a thread; choice: from a prompt's number and ids the
    Choice that its answer begins as."""

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
        """Of the engine: all answers, and where a prompt's own log-probabilities are asked for one more for each."""
        return self.prompts * (len(self.params) + self.asked.scores_prompt)


class Answer:
    """An ASGI application that answers one request."""

    def __init__(self, engine: Engine, loop: Loop, metrics: Metrics, call: Call, plan: Plan):
        self._engine, self._loop, self._metrics, self._call, self._plan = engine, loop, metrics, call, plan
        self._prompts: list[Encoded] = []
        self._choices: list[Choice] = []
        self._begun = False  # the head of the response was sent
        self._opened = False  # and a stream's first event

    async def __call__(self, scope, receive, send) -> None:
        call, record = self._call, scope["tridecode.record"]
        gone = asyncio.create_task(self._watch(receive))
        try:
            await self._loop.begin(call, self._plan.requests, self._submit, self._plan.formed)
            if self._plan.asked.stream:
                await self._stream(send)
            else:
                await self._whole(send)
            record.outcome = self._choices[0].finish_reason
        except Exception as error:
            names = self._plan.asked.names | self._plan.places
            problem = told(error, self._engine.tokenizer.directory, names)
            if problem is None:
                log.exception("a request failed")
                problem = ApiError(500, "internal error; the server's log says more")
            record.outcome = outcome(problem.status)
            await self._tell(problem, send)
        finally:
            gone.cancel()
            call.close()
            usages = [choice.usage for choice in self._choices if choice.usage]
            self._metrics.read(usages)
            prompt, drawn = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
            record.tokens = f", {prompt} + {drawn} tokens"

    async def _watch(self, receive) -> None:
        """Once the client has gone nobody waits for its tokens."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._call.end(ApiError(499, "the client has gone", code="disconnected"))

    def _submit(self) -> list:
        """The requests of all answers, and after them those that score the prompts."""
        plan, engine = self._plan, self._engine
        prompts = self._prompts = plan.prepare()
        self._choices = [plan.choice(i, prompt) for i, prompt in enumerate(prompts) for _ in plan.params]
        sharing = {"reuse_prefix": plan.asked.cache_prompt, "cache_salt": plan.asked.cache_salt}
        forms = [plan.form(prompt) for prompt in prompts]
        answers = [
            engine.submit(prompt, replace(params, **form), **sharing)
            for prompt, form in zip(prompts, forms)
            for params in plan.params
        ]
        scored = prompts if plan.asked.scores_prompt else ()
        return answers + [engine.submit_score(prompt, plan.params[0].logprobs) for prompt in scored]

    async def _news(self) -> list[tuple[int, list[Piece]]]:
        news = await self._call.news()
        for _, pieces in news:
            last = pieces[-1]
            if last.finish_reason == "error":
                raise GenerationError(last.error)
            if last.finish_reason == "cancelled":  # by whoever closed the engine
                raise self._call.ended or stopping()
        self._metrics.heard(self._call, [(i, pieces) for i, pieces in news if i < len(self._choices)])
        return news

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
        """Events as tokens come. A silence before the first has comments in it, as any later one; a failure before
        anything was sent still has a status of its own."""
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
        """As a response, or within a stream as its last event."""
        with suppress(OSError):
            if self._begun:
                await self._send(send, self._plan.shape.failure(problem), more=False)
            else:
                await self._send_json(send, problem.status, self._plan.shape.refusal(problem), problem.headers)


def _head(status: int, headers: dict[str, str]) -> dict:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
