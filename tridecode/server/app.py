"""The routes of the server and their handlers."""

import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ..arguments import listed
from ..engine import Engine
from ..errors import TridecodeError
from ..sampling import SamplingParams, random_seed
from ..text.fill import fill_ends, fill_prompt
from ..text.prompt import Encoded
from ..text.tokenizer import Tokenizer
from ..version import __version__
from .adapters import Adapters
from .anthropic_api import CountRequest, MessagesRequest, MessagesSerializer
from .asgi import make_app, paths_of
from .bodies import Bodies
from .call import Call, Plan
from .choice import Choice, Output
from .constraints import answer_constraint, parameter_names
from .errors import ApiError, api_error, bad_request
from .loop import Loop
from .messages import chat_messages
from .metrics import Metrics
from .page import Page
from .protocol import ChatRequest, CompletionRequest, DetokenizeRequest, F, Generation, TokenizeRequest, parse_body
from .responses_api import ResponsesRequest, ResponsesSerializer
from .serializers import ChatSerializer, CompletionSerializer, Serializer
from .settings import Settings
from .tools.toolset import Tools, openai_tools

G = TypeVar("G", bound=Generation)
R = TypeVar("R")
log = logging.getLogger("tridecode.server")


class Server:
    """HTTP server over an engine; `app` is its ASGI application.

    Args:
        on_failure: called once if the engine fails.
    """

    def __init__(self, engine: Engine, settings: Settings, on_failure: Callable[[], None] = lambda: None):
        self.engine, self.settings, self._on_failure = engine, settings, on_failure
        self.loop = Loop(engine, settings.max_queue, settings.keep_alive)
        self.bodies = Bodies(engine.capacity, self.loop.run_in_thread, settings.timeout)
        self.metrics = Metrics(engine, settings)
        self.adapters = Adapters(engine, settings, self.loop, self.bodies)
        self._created = int(time.time())
        self.app = make_app(
            [
                *Page().routes,
                Route("/v1", self.paths),
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
                *self.adapters.routes(),
            ],
            settings,
            self.metrics.observe_outcome,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the engine."""
        assert self.engine.tokenizer is not None, "the engine has no tokenizer"
        return self.engine.tokenizer

    async def start(self) -> None:
        """Start the thread that runs the engine, and wait until the engine is warm."""
        await self.loop.start(self._on_failure)
        await self.loop.run_in_thread(self.engine.warm_up)

    # ---- generations

    async def chat(self, request: Request):
        """Handle POST /v1/chat/completions."""
        return await self._generation(request, ChatRequest, self._chat_plan)

    def _chat_plan(self, payload: ChatRequest) -> Plan:
        tools = openai_tools(payload.tools, payload.tool_choice, payload.parallel_tool_calls)
        serializer = ChatSerializer(self._name(payload.model), self.tokenizer, **serializer_options(payload))
        messages, variables = chat_messages(payload.messages), payload.variables(self.tokenizer)
        return self._conversation(payload, serializer, messages, tools, variables)

    async def responses(self, request: Request):
        """Handle POST /v1/responses."""
        return await self._generation(request, ResponsesRequest, self._responses_plan)

    def _responses_plan(self, payload: ResponsesRequest) -> Plan:
        serializer = ResponsesSerializer(payload.model or self.settings.model, self.tokenizer, payload)
        return self._agent_plan(payload, serializer)

    async def messages(self, request: Request):
        """Handle POST /v1/messages."""
        return await self._generation(request, MessagesRequest, self._messages_plan)

    def _messages_plan(self, payload: MessagesRequest) -> Plan:
        return self._agent_plan(payload, MessagesSerializer(payload.model or self.settings.model, self.tokenizer))

    def _agent_plan(self, payload: ResponsesRequest | MessagesRequest, serializer: Serializer) -> Plan:
        messages, tools, variables = payload.conversation(), payload.parse_tools(), payload.variables(self.tokenizer)
        return self._conversation(payload, serializer, messages, tools, variables)

    async def count_tokens(self, request: Request) -> Response:
        """Handle POST /v1/messages/count_tokens."""
        payload = await self._read(request, CountRequest)
        self._check_model(payload.model, required=True)
        tokenizer = self.tokenizer

        def count() -> int:
            messages, tools = payload.conversation(), payload.parse_tools()
            rendered, variables = tools.render(messages, tokenizer)
            return len(self.engine.encode(rendered, payload.variables(tokenizer) | variables, payload.reading))

        try:
            return JSONResponse({"input_tokens": await self.loop.run_in_thread(count)})
        except TridecodeError as error:
            raise api_error(error, tokenizer.directory, payload.names) or error from None

    def _conversation(
        self, payload: Generation, serializer: Serializer, messages: list[dict], tools: Tools, variables: dict
    ) -> Plan:
        """Return the plan for a chat request of any API."""
        tokenizer, engine, structure = self.tokenizer, self.engine, payload.structure
        params = self._params(payload)
        if tools.enforced:
            payload.check_ended_by("tool_choice")

        def prepare() -> list[Encoded]:
            rendered, tool_variables = tools.render(messages, tokenizer)
            return [engine.prepare(rendered, variables | tool_variables, payload.reading)]

        serializer.params = params[0]
        return Plan(
            payload,
            serializer,
            prepare,
            params,
            lambda number, prompt: Choice(
                tokenizer,
                prompt.tag if tokenizer.supports_thinking else None,
                tools=tools,
                before=() if prompt.chat else prompt.tokens,
                output=self._output(payload),
                stops=params[0].stop,
            ),
            constraint=lambda prompt: answer_constraint(
                structure, tools, tokenizer, prompt.tag, engine.plan.options.open_objects
            ),
            parameter_names=parameter_names(structure, tools),
            constrained=structure is not None or tools.enforced,
        )

    def _output(self, payload: Generation) -> Output:
        """Return the form of the answers' texts that a request sets."""
        stops = [*(() if payload.ignore_eos else self.engine.config.stop_ids), *(payload.stop_token_ids or ())]
        return Output(
            not payload.skip_special_tokens, payload.include_stop_str_in_output, payload.only_prompt, frozenset(stops)
        )

    async def completions(self, request: Request):
        """Handle POST /v1/completions."""
        return await self._generation(request, CompletionRequest, self._completion_plan)

    def _completion_plan(self, payload: CompletionRequest) -> Plan:
        prompts, tokenizer, structure = payload.prompts, self.tokenizer, payload.structure

        params = self._params(payload)
        texts = prompts
        if payload.suffix:
            try:
                texts = [fill_prompt(tokenizer, str(prompt), payload.suffix) for prompt in prompts]
            except TridecodeError as error:
                raise api_error(error, None) or error from None
            ends = fill_ends(tokenizer)
            params = [replace(each, stop_token_ids=[*each.stop_token_ids, *ends]) for each in params]

        def choice(number: int, prompt: Encoded) -> Choice:
            echoed = prompts[number] if payload.echo else ""
            text = echoed if isinstance(echoed, str) else tokenizer.decode(echoed, False)
            return Choice(tokenizer, None, text, before=prompt.tokens, output=self._output(payload))

        return Plan(
            payload,
            CompletionSerializer(self._name(payload.model), tokenizer, **serializer_options(payload)),
            lambda: [self.engine.prepare(text, None, payload.reading) for text in texts],
            params,
            choice,
            len(prompts),
            lambda prompt: answer_constraint(structure, Tools(), tokenizer, None),
            parameter_names(structure, Tools()),
            structure is not None,
        )

    async def paths(self, request: Request) -> Response:
        """Handle GET /v1, which people open in a browser: name the base URLs of clients, and list the paths."""
        base = str(request.base_url).rstrip("/")
        message = f"{base}/v1 is the base URL for clients of OpenAI's API, {base} for those of Anthropic's API"
        return JSONResponse({"message": f"{message}; open {base} to chat", "paths": paths_of(request)})

    async def _generation(self, request: Request, body_type: type[G], plan: Callable[[G], Plan]) -> Call:
        """Return the call that answers a request. If the server cannot accept requests, the body is not read."""
        self.loop.check()
        started, timeout = request.scope["tridecode.record"].started, self.settings.timeout

        def prepare(payload: G) -> Plan:
            self._check_model(payload.model, required=True)
            if self.settings.log_prompts:
                log.info("prompt: %s", json.dumps(getattr(payload, "messages", None) or getattr(payload, "prompt", "")))
            return plan(payload)

        prepared = await self.bodies.read(request, lambda body: prepare(parse_body(body, body_type)))
        return Call(self.loop, self.metrics, prepared, started, None if timeout is None else started + timeout)

    async def _read(self, request: Request, body_type: type[F]) -> F:
        return await self.bodies.read(request, lambda body: parse_body(body, body_type))

    def _check_model(self, model: str | None, required: bool = False) -> None:
        names = [self.settings.model, *self.adapters.names()]
        if self.settings.any_model or model in names or not (model or required):
            return
        there = f"this server has {listed(names).replace(' or ', ' and ') if len(names) < 10 else names[0]}"
        if not model:
            raise bad_request(f"model is required: {there}", "model")
        message = f"the model {json.dumps(model[:100])} does not exist: {there}"
        raise ApiError(404, message, "model", "model_not_found")

    def _name(self, model: str | None) -> str:
        """Return the name of the model that answers a request: an adapter's, or the base model's."""
        return self.adapters.adapter_of(model) or self.settings.model

    def _params(self, payload: Generation) -> list[SamplingParams]:
        """Return the sampling parameters of each of the n answers, with the seeds seed, seed + 1, ..."""
        try:
            params = self.engine.default_params(**payload.sampling(), adapter=self.adapters.adapter_of(payload.model))
            if payload.n == 1:
                return [params]
            first = random_seed(payload.n) if params.seed is None else params.seed
            return [replace(params, seed=first + i) for i in range(payload.n)]
        except TridecodeError as error:
            raise api_error(error, None, payload.names) or error from None

    # ---- other endpoints

    async def tokenize(self, request: Request) -> Response:
        """Handle POST /tokenize."""
        payload, tokenizer = await self._read(request, TokenizeRequest), self.tokenizer
        self._check_model(payload.model)
        tools = openai_tools(payload.tools, None, None)

        def encode() -> bytes:
            if payload.messages is None:
                special, added = payload.reading.allow_special, payload.reading.add_special_tokens is not False
                ids = tokenizer.encode(payload.prompt or "", special, self.engine.capacity, added)
            else:
                rendered, variables = tools.render(chat_messages(payload.messages), tokenizer)
                ids = self.engine.encode(rendered, payload.variables(tokenizer) | variables, payload.reading)
            body = {"tokens": ids, "count": len(ids), "max_model_len": self.engine.capacity}
            if payload.return_token_strs:
                body["token_strs"] = [tokenizer.token_bytes(token).decode(errors="replace") for token in ids]
            return msgspec.json.encode(body)

        try:
            return Response(await self.loop.run_in_thread(encode), media_type="application/json")
        except TridecodeError as error:
            raise api_error(error, tokenizer.directory, payload.names) or error from None

    async def detokenize(self, request: Request) -> Response:
        """Handle POST /detokenize."""
        payload = await self._read(request, DetokenizeRequest)
        self._check_model(payload.model)
        size = self.engine.config.vocab_size
        if outside := next((token for token in payload.tokens if not 0 <= token < size), None):
            raise bad_request(f"tokens: {outside} is not in the vocabulary (0 to {size - 1})", "tokens")
        text = await self.loop.run_in_thread(lambda: self.tokenizer.decode(payload.tokens, skip_special=False))
        return JSONResponse({"prompt": text})

    async def models(self, request: Request) -> Response:
        """Handle GET /v1/models."""
        names = [self.settings.model, *self.adapters.names()]
        return JSONResponse({"object": "list", "data": [self._card(name) for name in names]})

    async def model(self, request: Request) -> Response:
        """Handle GET /v1/models/NAME."""
        name = request.path_params["model"]
        self._check_model(name)
        return JSONResponse(self._card(self._name(name)))

    def _card(self, name: str) -> dict:
        """Return the description of the base model or of an adapter, whose parent is the base model."""
        parent = None if name == self.settings.model else self.settings.model
        facts = {"owned_by": "tridecode", "root": name, "parent": parent, "max_model_len": self.engine.capacity}
        return {"id": name, "object": "model", "created": self._created} | facts

    async def health(self, request: Request) -> Response:
        """Handle GET /health."""
        if self.loop.failure is not None:
            return JSONResponse({"status": "failed"}, 503)
        return JSONResponse({"status": "stopping"}, 503) if self.loop.refusing else JSONResponse({"status": "ok"})

    async def scrape(self, request: Request) -> Response:
        """Handle GET /metrics."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(self, request: Request) -> Response:
        """Handle GET /version."""
        return JSONResponse({"version": __version__})


def serializer_options(payload: ChatRequest | CompletionRequest) -> dict:
    """Return the options of Serializer that a request sets."""
    # logprobs=0 requests only the log-probabilities of the sampled tokens.
    with_logprobs = payload.logprobs is not None and payload.logprobs is not False
    return {
        "n": payload.n,
        "with_logprobs": with_logprobs,
        "with_usage": payload.with_usage,
        "continuous_usage": payload.continuous_usage,
        "with_ids": payload.return_token_ids,
    }
