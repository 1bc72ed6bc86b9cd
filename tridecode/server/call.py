"""Call: one HTTP request for a generation, with its requests in the engine and its response."""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from ..errors import GenerationError
from ..results import OutputChunk, Usage
from ..sampling import SamplingParams
from ..serve.request import Request
from ..text.prompt import Encoded
from . import events
from .choice import Choice
from .errors import ApiError, api_error, outcome, stopping
from .loop import Loop
from .metrics import Metrics
from .protocol import Generation
from .serializers import Serializer

log = logging.getLogger("tridecode.server")


@dataclass
class Plan:
    """The requests of a call, and the serializer of its response.

    Args:
        payload: the parsed body.
        prepare: returns the encoded prompts; it runs in a thread.
        params: sampling parameters, one for each of the n answers to a prompt.
        choice: (number of a prompt, prompt) -> a new Choice.
        prompts: number of prompts.
        constraint: prompt -> fields of SamplingParams that constrain its answers.
        parameter_names: field of SamplingParams -> the parameter that sets it in the request, for errors.
        constrained: whether `constraint` returns fields.
    """

    payload: Generation
    serializer: Serializer
    prepare: Callable[[], list[Encoded]]
    params: list[SamplingParams]
    choice: Callable[[int, Encoded], Choice]
    prompts: int = 1
    constraint: Callable[[Encoded], dict] = lambda prompt: {}
    parameter_names: dict[str, str] = field(default_factory=dict)
    constrained: bool = False

    @property
    def requests(self) -> int:
        """Number of requests in the engine: one per choice, and one per prompt with requested log-probabilities."""
        return self.prompts * (len(self.params) + self.payload.scores_prompt)


class Call:
    """ASGI application that answers one HTTP request with one or several requests in the engine."""

    def __init__(self, loop: Loop, metrics: Metrics, plan: Plan, started: float, deadline: float | None):
        self._loop, self._metrics, self._plan = loop, metrics, plan
        self.started, self.deadline = started, deadline  # Values of time.monotonic(), like all times in this class.
        self.last_awake = time.monotonic()  # The time at which the task of the call last ran.
        self.last: dict[int, float] = {}  # Number of the request -> arrival of its latest chunks.
        self.expected = 0  # Number of requests that the call will submit.
        self.ended: ApiError | None = None  # The error, if the server ended the call early.
        self._prompts: list[Encoded] = []
        self._choices: list[Choice] = []
        self._requests: list[Request] = []
        self._read: list[int] = []  # Number of chunks read, by request.
        self._waiter: asyncio.Future | None = None
        self._head_sent = False  # Whether the head of the response was sent.
        self._opened = False  # Whether the first event of the stream was sent.
        loop.add(self)

    async def __call__(self, scope, receive, send) -> None:
        """Submit the requests and send their answers, as a stream or as one body."""
        record = scope["tridecode.record"]
        watcher = asyncio.create_task(self._watch(receive))
        try:
            await self._loop.begin(self, self._plan.requests, self._submit, self._plan.constrained)
            if self._plan.payload.stream:
                await self._stream(send)
            else:
                await self._respond(send)
            record.outcome = self._choices[0].finish_reason
        except Exception as error:
            names = self._plan.payload.names | self._plan.parameter_names
            problem = api_error(error, self._plan.serializer.tokenizer.directory, names)
            if problem is None:
                log.exception("a request failed")
                problem = ApiError(500, "internal error; the server's log has the details")
            record.outcome = outcome(problem.status)
            await self._send_error(problem, send)
        finally:
            watcher.cancel()
            self._cancel()
            self._loop.remove(self)
            usages = [choice.usage for choice in self._choices]
            self._metrics.observe_usages(usages, self._plan.params[0].adapter)
            prompt, output = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
            record.tokens = f", {prompt} + {output} tokens"

    async def _watch(self, receive) -> None:
        """End the call when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ApiError(499, "the client disconnected", code="disconnected"))

    # ---- requests

    def _submit(self) -> list[Request]:
        """Submit the requests of all choices, and after them the requests that score the prompts."""
        plan, payload, engine = self._plan, self._plan.payload, self._loop.engine
        prompts = self._prompts = plan.prepare()
        self._choices = [plan.choice(i, prompt) for i, prompt in enumerate(prompts) for _ in plan.params]
        constraints = [plan.constraint(prompt) for prompt in prompts]
        fields = [replace(params, **constraint) for constraint in constraints for params in plan.params]
        each = [prompt for prompt in prompts for _ in plan.params]
        reuse, salt = payload.cache_prompt, payload.cache_salt
        answers = [
            engine.submit(prompt, params, reuse_prefix=reuse, cache_salt=salt, reader=choice.reader)
            for prompt, params, choice in zip(each, fields, self._choices)
        ]
        scored, first = prompts if payload.scores_prompt else (), plan.params[0]
        return answers + [engine.submit_score(prompt, first.logprobs or 0, first.adapter, salt) for prompt in scored]

    def attach(self, requests: list[Request]) -> None:
        """Set the submitted requests; cancel them if the call has ended in the meantime."""
        self._requests, self._read = requests, [0] * len(requests)
        if self.ended:
            self._cancel()

    @property
    def open(self) -> int:
        """Number of requests of the call that occupy a slot or a place in the queue.

        After `end` it is 0, although a pass may still run.
        """
        if self.ended:
            return 0
        if not self._requests:
            return self.expected
        return sum(request.finish_reason is None for request in self._requests)

    def wake(self, force: bool = False) -> None:
        """Wake the task of the call if new chunks or an error have arrived. With `force`, wake it in any case."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return
        if self.ended or self._loop.failure is not None or self._has_new_chunks():
            waiter.set_result(False)
        elif force:
            waiter.set_result(True)

    def end(self, error: ApiError) -> None:
        """Cancel the requests of the call, and let its task raise `error`.

        The slots and pages are free within two passes.
        """
        if self.ended is None:
            self.ended = error
            self._cancel()
            self.wake()

    def _cancel(self) -> None:
        for request in self._requests:
            request.drop()

    def _has_new_chunks(self) -> bool:
        return any(len(r.chunks) > read or r.failure for r, read in zip(self._requests, self._read))

    def _take(self, number: int) -> list[OutputChunk]:
        """Return the unread chunks of a request; raise its error after the last one."""
        request, read = self._requests[number], self._read[number]
        if len(request.chunks) == read and request.failure:
            raise request.failure
        chunks = request.chunks[read:]
        self._read[number] += len(chunks)
        return chunks

    async def _new_chunks(self) -> list[tuple[int, list[OutputChunk]]]:
        """Wait for new chunks; return (number of the request, its chunks) pairs, or [] after a long silence.

        Raises:
            ApiError: the call or the engine was ended.
            GenerationError: a request failed.
        """
        while True:
            if self._loop.failure is not None:
                raise ApiError(503, "the engine has failed; this server is about to stop", code="engine_failed")
            if self.ended:
                raise self.ended
            self.last_awake = time.monotonic()
            if self._has_new_chunks():
                break
            self._waiter = asyncio.get_running_loop().create_future()
            if await self._waiter:
                return []
        new = [(i, chunks) for i in range(len(self._requests)) if (chunks := self._take(i))]
        for _, chunks in new:
            last = chunks[-1]
            if last.finish_reason == "error":
                raise GenerationError(last.error)
            if last.finish_reason == "cancelled":  # The engine was closed.
                raise self.ended or stopping()
        self._metrics.observe_chunks(self, [(i, chunks) for i, chunks in new if i < len(self._choices)])
        return new

    # ---- response

    async def _respond(self, send) -> None:
        """Wait for all answers and send one response."""
        answers, left = len(self._choices), self._plan.requests
        chunks: list[list[OutputChunk]] = [[] for _ in range(left)]
        while left:
            for i, new in await self._new_chunks():
                chunks[i] += new
                left -= new[-1].finish_reason is not None
        self._add_scores(chunks[answers:])
        deltas = [choice.add(new) for choice, new in zip(self._choices, chunks)]
        await self._send_json(send, 200, self._plan.serializer.response(self._choices, deltas))

    def _add_scores(self, scores: list[list[OutputChunk]]) -> None:
        """Insert the log-probabilities of each prompt into its answers."""
        n = len(self._plan.params)
        for i, chunks in enumerate(scores):
            for choice in self._choices[i * n : (i + 1) * n]:
                choice.echo_logprobs(self._prompts[i].tokens, chunks)

    async def _stream(self, send) -> None:
        """Send events as tokens arrive, and comments during a long silence."""
        serializer, left, answers = self._plan.serializer, len(self._choices), len(self._choices)
        scores: list[list[OutputChunk]] = [[] for _ in self._requests[answers:]]
        waiting: list[tuple[int, list[OutputChunk]]] = []  # Chunks that wait for the scores of the prompts.
        while left:
            new = await self._new_chunks()
            data = b"" if new else events.KEEP_ALIVE
            if scores:
                for i, chunks in new:
                    if i >= answers:
                        scores[i - answers] += chunks
                waiting += [(i, chunks) for i, chunks in new if i < answers]
                if not all(chunks and chunks[-1].finish_reason for chunks in scores):
                    if data:
                        await self._send(send, data)
                    continue
                self._add_scores(scores)
                scores, new = [], waiting
            if new and not self._opened:
                self._opened = True
                firsts = self._requests[: len(self._choices) : len(self._plan.params)]
                usages = [Usage(request.prompt_tokens, request.reused or 0, 0) for request in firsts]
                data = serializer.first_events(usages)
            for i, chunks in new:
                choice = self._choices[i]
                delta = choice.add(chunks)
                left -= choice.finish_reason is not None
                data += serializer.new_events(i, choice, delta)
            if data:
                await self._send(send, data)
        await self._send(send, serializer.last_events(self._choices), more=False)

    async def _send(self, send, data: bytes, more: bool = True) -> None:
        if not self._head_sent:
            self._head_sent = True
            await send(_head(200, events.HEADERS))
        await send({"type": "http.response.body", "body": data, "more_body": more})

    async def _send_json(self, send, status: int, value, headers: dict[str, str] | None = None) -> None:
        body = msgspec.json.encode(value)
        own = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        await send(_head(status, own | (headers or {})))
        await send({"type": "http.response.body", "body": body})

    async def _send_error(self, problem: ApiError, send) -> None:
        """Send the problem as a response with its status, or as the last event of a stream that has begun."""
        with suppress(OSError):
            if self._head_sent:
                await self._send(send, self._plan.serializer.error_events(problem), more=False)
            else:
                await self._send_json(send, problem.status, self._plan.serializer.error_body(problem), problem.headers)


def _head(status: int, headers: dict[str, str]) -> dict:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http.response.start", "status": status, "headers": raw}
