"""The routes: from a request to what answers it."""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ..engine import Engine
from ..errors import EngineClosed, TridecodeError
from ..sampling import SamplingParams
from ..text.prompt import Encoded
from ..text.tokenizer import Tokenizer
from ..version import __version__
from .access import Access, body
from .anthropic_api import CountRequest, MessagesRequest, MessagesShape
from .call import Call, Plan
from .choice import Choice
from .errors import ApiError, api_error, refusal
from .form import held_to, places, thinking_off
from .loop import Loop
from .messages import chat_messages
from .metrics import Metrics
from .page import page
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, F, Generation, TokenizeRequest, parsed
from .responses_api import ResponsesRequest, ResponsesShape
from .settings import Settings
from .shapes import ChatShape, CompletionShape, Shape
from .tools.asked import Tools, openai_tools

G = TypeVar("G", bound=Generation)
log = logging.getLogger("tridecode.server")


class Server:
    """An engine's HTTP face; `app` is the ASGI application. died: called once, when the engine has failed."""

    def __init__(self, engine: Engine, settings: Settings, died: Callable[[], None] = lambda: None):
        self.engine, self.settings, self._died = engine, settings, died
        self.loop = Loop(engine, settings.max_queue, settings.keep_alive)
        self.metrics = Metrics(engine, settings.model)
        self._created = int(time.time())
        self._page, self._page_headers = page()
        middleware = [Middleware(Access, api_key=settings.api_key, ended=self.metrics.ended)]
        if settings.cors:
            middleware.insert(
                0,
                Middleware(
                    CORSMiddleware, allow_origins=settings.cors, allow_methods=["GET", "POST"], allow_headers=["*"]
                ),
            )
        self.app = Starlette(
            routes=[
                Route("/", self.root),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/responses", self.responses, methods=["POST"]),
                Route("/v1/messages", self.messages, methods=["POST"]),
                Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
                Route("/v1/models", self.models),
                Route("/v1/models/{model:path}", self.model),
                Route("/tokenize", self.tokenize, methods=["POST"]),
                Route("/detokenize", self.detokenize, methods=["POST"]),
                Route("/health", self.health),
                Route("/metrics", self.scrape),
                Route("/version", self.version),
            ],
            middleware=middleware,
            exception_handlers={ApiError: refused, EngineClosed: refused, HTTPException: not_found, 500: internal},
        )

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None, "a server needs a tokenizer"
        return self.engine.tokenizer

    async def start(self) -> None:
        await self.loop.start(self._died)
        await self.loop.prepared(self.engine.warm_up)

    # ---- generations

    async def chat(self, request: Request):
        asked, deadline = await self._asked(request, ChatRequest)
        tools = openai_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
        shape = ChatShape(self.settings.model, self.tokenizer, **shown(asked))
        variables = thinking_off(asked.reasoning_effort, self.tokenizer) | (asked.chat_template_kwargs or {})
        return self._conversation(request, deadline, asked, shape, chat_messages(asked.messages), tools, variables)

    async def responses(self, request: Request):
        asked, deadline = await self._asked(request, ResponsesRequest)
        shape = ResponsesShape(asked.model or self.settings.model, self.tokenizer, asked)
        return self._agents(request, deadline, asked, shape)

    async def messages(self, request: Request):
        asked, deadline = await self._asked(request, MessagesRequest)
        shape = MessagesShape(asked.model or self.settings.model, self.tokenizer)
        return self._agents(request, deadline, asked, shape)

    def _agents(self, request, deadline, asked: ResponsesRequest | MessagesRequest, shape: Shape) -> Call:
        messages, tools = asked.conversation(), asked.asked_tools()
        return self._conversation(request, deadline, asked, shape, messages, tools, asked.variables(self.tokenizer))

    async def count_tokens(self, request: Request) -> Response:
        asked = await self._read(request, CountRequest)
        self._check_model(asked.model, required=True)
        messages, tools, tokenizer = asked.conversation(), asked.asked_tools(), self.tokenizer

        def count() -> int:
            fitted, variables = tools.fit(messages, tokenizer)
            return len(tokenizer.encode_chat(fitted, **asked.variables(tokenizer), **variables))

        try:
            return JSONResponse({"input_tokens": await self.loop.prepared(count)})
        except TridecodeError as error:
            raise api_error(error, tokenizer.directory, asked.names) or error from None

    def _conversation(
        self, request: Request, deadline: float | None, asked: Generation, shape: Shape, messages: list[dict],
        tools: Tools, variables: dict,
    ) -> Call:  # fmt: skip
        """The call of a conversation, in any of the APIs."""
        tokenizer, engine, structure = self.tokenizer, self.engine, asked.structure
        if tools.enforced:
            asked.check_ended_by("tool_choice")

        def prepare() -> list[Encoded]:
            fitted, told_tools = tools.fit(messages, tokenizer)
            return [engine.prepare(fitted, variables | told_tools)]

        return self._call(
            request,
            deadline,
            Plan(
                asked,
                shape,
                prepare,
                self._params(asked),
                lambda number, prompt: Choice(tokenizer, prompt.tokens if tokenizer.thinks else None, tools=tools),
                form=lambda prompt: held_to(structure, tools, tokenizer, prompt.tokens),
                places=places(structure, tools),
                formed=structure is not None or tools.enforced,
            ),
        )

    async def completions(self, request: Request):
        asked, deadline = await self._asked(request, CompletionRequest)
        prompts, tokenizer, structure = asked.prompts, self.tokenizer, asked.structure

        def choice(number: int, prompt: Encoded) -> Choice:
            given = prompts[number] if asked.echo else ""
            text = given if isinstance(given, str) else tokenizer.decode(given, False)
            return Choice(tokenizer, None, text, before=prompt.tokens)

        return self._call(
            request,
            deadline,
            Plan(
                asked,
                CompletionShape(self.settings.model, tokenizer, **shown(asked)),
                lambda: [self.engine.prepare(prompt) for prompt in prompts],
                self._params(asked),
                choice,
                len(prompts),
                lambda prompt: held_to(structure, Tools(), tokenizer, None),
                places(structure, Tools()),
                structure is not None,
            ),
        )

    async def _asked(self, request: Request, form: type[G]) -> tuple[G, float | None]:
        """Return the checked request and its deadline. A server that accepts no requests does not read the body."""
        self.loop.check()
        started, timeout = request.scope["tridecode.record"].started, self.settings.timeout
        asked = await self._read(request, form)
        self._check_model(asked.model, required=True)
        if self.settings.log_prompts:
            log.info("asked: %s", json.dumps(getattr(asked, "messages", None) or getattr(asked, "prompt", "")))
        return asked, None if timeout is None else started + timeout

    async def _read(self, request: Request, form: type[F]) -> F:
        try:
            async with asyncio.timeout(self.settings.timeout):
                return parsed(await body(request), form)
        except TimeoutError:
            raise ApiError(408, "the body took longer than this server allows", code="timeout") from None
        except ClientDisconnect:
            raise ApiError(499, "the client has gone", code="disconnected") from None

    def _check_model(self, model: str | None, required: bool = False) -> None:
        if self.settings.any_model or model == self.settings.model or model is None and not required:
            return
        if model is None:
            raise refusal(f"model is required: this server has {self.settings.model}", "model")
        message = f"the model {json.dumps(model[:100])} does not exist: this server has {self.settings.model}"
        raise ApiError(404, message, "model", "model_not_found")

    def _params(self, asked: Generation) -> list[SamplingParams]:
        """Of each of the n answers: seeds seed, seed + 1, ..."""
        try:
            params = self.engine.default_params(**asked.sampling())
            if asked.n == 1:
                return [params]
            first = secrets.randbits(62) if params.seed is None else params.seed
            return [replace(params, seed=first + i) for i in range(asked.n)]
        except TridecodeError as error:
            raise api_error(error, None, asked.names) or error from None

    def _call(self, request: Request, deadline: float | None, plan: Plan) -> Call:
        return Call(self.loop, self.metrics, plan, request.scope["tridecode.record"].started, deadline)

    # ---- the rest

    async def tokenize(self, request: Request) -> Response:
        asked = await self._read(request, TokenizeRequest)
        self._check_model(asked.model)
        prompt = chat_messages(asked.messages or []) if asked.prompt is None else asked.prompt
        try:
            ids = await self.loop.prepared(lambda: self.engine.encode(prompt, asked.chat_template_kwargs))
        except TridecodeError as error:
            raise api_error(error, self.tokenizer.directory, asked.names) or error from None
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.engine.capacity})

    async def detokenize(self, request: Request) -> Response:
        asked = await self._read(request, DetokenizeRequest)
        self._check_model(asked.model)
        size = self.engine.config.vocab_size
        if outside := next((token for token in asked.tokens if not 0 <= token < size), None):
            raise refusal(f"tokens: {outside} is not in the vocabulary (0 to {size - 1})", "tokens")
        text = await self.loop.prepared(lambda: self.tokenizer.decode(asked.tokens, skip_special=False))
        return JSONResponse({"prompt": text})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"], required=True)
        return JSONResponse(self._card())

    def _card(self) -> dict:
        name = self.settings.model
        facts = {"owned_by": "tridecode", "root": name, "parent": None, "max_model_len": self.engine.capacity}
        return {"id": name, "object": "model", "created": self._created} | facts

    async def root(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def health(self, request: Request) -> Response:
        if self.loop.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "stopping"}, 503) if self.loop.refusing else JSONResponse({"status": "ok"})

    async def scrape(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})


def shown(asked: ChatRequest | CompletionRequest) -> dict:
    """Return the options of a Shape that a request sets."""
    with_logprobs = asked.logprobs is not None and asked.logprobs is not False  # 0 asks for those of drawn tokens
    return {
        "n": asked.n,
        "with_logprobs": with_logprobs,
        "with_usage": asked.with_usage,
        "with_ids": asked.return_token_ids,
    }


async def refused(request: Request, error: Exception) -> Response:
    if (problem := api_error(error, None)) is None:
        raise error
    return JSONResponse(problem.body(request.url.path), problem.status, problem.headers)


async def not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this path", 405: "this path does not take this method"}
    message = known.get(error.status_code, str(error.detail))
    return JSONResponse(ApiError(error.status_code, message).body(request.url.path), error.status_code, error.headers)


async def internal(request: Request, error: Exception) -> Response:
    said = ApiError(500, "internal error; the server's log says more").body(request.url.path)
    return JSONResponse(said, 500, request.scope["tridecode.record"].headers)  # sent past Access
