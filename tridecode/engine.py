"""Engine: a model on its device, and its requests."""

import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from .arguments import Flag, Integer, Text, function, mapping, shown
from .blocks.spec import ModelSpec
from .blocks.weights import Weights
from .checkpoint.hub import BUNDLED, fetch_weights, resolve_model
from .checkpoint.load import load_config, load_weights
from .errors import EngineClosed, GenerationError, ParameterError, PromptError, counted
from .layout import NGRAM
from .options import EngineOptions
from .plan import threads
from .plan.device import find_device
from .plan.graphs import GraphPlan
from .plan.memory import allocating
from .plan.resolve import EnginePlan, resolve
from .results import Piece, Result
from .sampling import SamplingParams
from .serve.driver import Driver
from .serve.policy import Policy
from .serve.request import Request, checked_stop_ids, scoring
from .serve.scheduler import Scheduler
from .step.costs import measure_costs
from .step.dispatch import Dispatcher, GraphStat
from .step.graphs import make_steps
from .step.model import DecodeModel, make_model
from .step.prompt_graphs import make_prompts
from .step.reachable import compile_passes
from .tensors import short_repr
from .text.grammar import Grammars
from .text.prompt import Encoded, Prompt, listed, prompt_ids
from .text.tokenizer import Tokenizer
from .tuning.configs import PassConfigs

FLAG, TEXT, CALLERS = Flag(), Text(), Integer(1)
FIRST_TURN = 64  # tokens of the largest prompt pass that an engine of one slot captures before it is ready


@dataclass(repr=False)
class Engine:
    """A model on its device, with captured passes.

    As many requests run at a time as there are slots. Others wait in a queue, first come, first served. Requests may be
    submitted from any thread. Requests share the K/V of equal prefixes, also with requests that have ended.
    """

    model: DecodeModel
    tokenizer: Tokenizer | None
    plan: EnginePlan
    name: str
    threads: int | None = None  # number of CPU threads; None: the user has chosen
    grammars: InitVar[Grammars | None] = None

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        compiling: Callable[[int, int], None] | None = None,
        callers: int | None = None,
        **options: Any,
    ) -> Self:
        """Load a checkpoint.

        Args:
            model: a directory or a Hugging Face id. None is the bundled model, and so is "bundled" unless there is a
                directory of that name.
            progress: called with (bytes done, bytes in all) while weights load.
            compiling: called with (kernels done, kernels in all) while kernels compile, from several threads.
            callers: threads that submit prompts at the same time; None: as many as slots. For several, `load` also
                does `warm_up`, while weights load and kernels compile.
            options: the fields of EngineOptions.

        On a CPU the engine sets PyTorch's number of threads: one for a tiny model, else the number of free cores. A
        number from OMP_NUM_THREADS or torch.set_num_threads stays.

        Raises:
            CheckpointError: the checkpoint cannot be used.
            DeviceError: the device is absent, or the model does not fit.
            ParameterError: an option is wrong, or contradicts another one, the model or the device.
        """
        function("progress", progress)
        function("compiling", compiling)
        callers = None if callers is None else CALLERS.check("callers", callers)
        requested = EngineOptions(**{name: named(value) for name, value in options.items()})
        device = find_device(requested)
        path = resolve_model(model, weights=False)
        plan = resolve(requested, load_config(path), device)
        plan.check()
        fetch_weights(model, path)
        tokenizer = Tokenizer.load(path)
        callers = callers or plan.slots
        tokenizer.start(callers)
        grammars = Grammars(tokenizer, plan.spec.vocab_size, plan.spec.stop_ids)
        if callers > 1:
            grammars.start()
        cores = threads.FreeCores()
        weights = load_weights(path, plan.spec, device, plan.dtype, progress, plan.host_layers)
        name = BUNDLED.name if model is None else str(model)
        engine = cls.build(plan, weights, tokenizer, name, compiling=compiling, grammars=grammars)
        engine.threads = threads.choose(plan.memory.weights, cores) if device.type == "cpu" else None
        if callers > 1:
            engine.warm_up()
        return engine

    @classmethod
    def build(
        cls,
        plan: EnginePlan,
        weights: Weights,
        tokenizer: Tokenizer | None = None,
        name: str = "",
        configs: Mapping[int, PassConfigs] | None = None,
        compiling: Callable[[int, int], None] | None = None,
        grammars: Grammars | None = None,
    ) -> Self:
        """Build an engine from weights that are on their device already.

        Args:
            configs: launch configs by rows, by default those chosen for the GPU.
            compiling: as for `load`.
            grammars: those of this tokenizer and model, if they are being prepared already.
        """
        with allocating(plan.capacity, plan.device):
            model = model_of(plan, weights, configs)
        if plan.graphs.captured:
            compile_passes(model, plan.graphs.sizes, plan.graphs.prompt_attention, compiling)
        return cls(model, tokenizer, plan, name, grammars=grammars)

    def __post_init__(self, grammars: Grammars | None) -> None:
        graphs, options = self.graphs, self.plan.options
        dispatcher = Dispatcher(graphs.graph, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention)
        self.steps = make_steps(self.model, self.backend, dispatcher, graphs.attention, compiled=graphs.captured)
        self.prompts = make_prompts(self.model, self.steps, self.backend, graphs.prompt_attention)
        self.prompts.capture_all(None if self.slots > 1 or options.batch_invariant else FIRST_TURN)
        ahead = 1 if self.device.type == "cuda" and self.backend == "triton" else 0
        runners = (lambda: self.steps), (lambda: self.prompts)  # benchmarks replace them
        policy = Policy(self.plan.chunk, options.max_queue, options.prompt_ms, options.prefix_sharing)
        scheduler = Scheduler(self.model, self.tokenizer, *runners, ahead, policy)
        self._grammars = grammars or Grammars(self.tokenizer, self.config.vocab_size, self.config.stop_ids)
        if self.model.verify:
            self._grammars.wait()  # it holds the GIL, which would count as a cost
            self.steps.costs = measure_costs(self.steps, scheduler.slots)
        self._driver = Driver(scheduler, lambda: threads.use(self.threads))

    def warm_up(self) -> None:
        """Wait for the child processes that render prompts, and build the vocabulary of grammars.

        Then no request waits for them. `load` does this for several callers, a server for any engine.
        """
        self._grammars.start()
        if self.tokenizer is not None:
            self.tokenizer.wait()
        self._grammars.wait()

    def close(self) -> None:
        """Cancel all requests and free the memory. Later calls raise EngineClosed."""
        if self.model is None:
            return
        try:
            self._driver.close()
            with suppress(RuntimeError):  # a lost GPU writes no more
                self.synchronize()
        finally:
            self.model = self.steps = self.prompts = None  # type: ignore[assignment]  # only after `close`

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.model is None:
            return f"Engine(name={shown(self.name)}, closed)"
        facts = {"name": shown(self.name), "family": self.config.family, "backend": self.backend}
        return short_repr(self, self.model.weights.embed, **facts, graph=self.graph, capacity=self.capacity)

    @property
    def notes(self) -> tuple[str, ...]:
        """Changes that the plan makes to the options, for the user."""
        return self.plan.notes

    @property
    def backend(self) -> str:
        return self.plan.backend

    @property
    def graphs(self) -> GraphPlan:
        return self.plan.graphs

    @property
    def graph(self) -> str:
        """How passes run: one of dispatch.MODES."""
        return self.plan.graphs.graph

    @property
    def config(self) -> ModelSpec:
        return self._open().spec

    @property
    def device(self) -> torch.device:
        return self._open().device

    @property
    def capacity(self) -> int:
        """Positions of one request, prompt and output together."""
        return self._open().kv.capacity

    @property
    def slots(self) -> int:
        """Requests that run at a time."""
        return len(self._open().workspace.tokens)

    @property
    def kv_tokens(self) -> int:
        """K/V positions of all requests together on the device."""
        return self._open().kv.positions

    def _open(self) -> DecodeModel:
        if self.model is None:
            raise EngineClosed
        return self.model

    @property
    def scheduler(self) -> Scheduler:
        return self._driver.opened()

    def capture_next(self) -> bool:
        """Capture one more size of prompt passes, unless a request runs.

        An engine of several slots captures all passes at load. One of one slot captures prompt passes of up to
        FIRST_TURN tokens, and a caller with idle time may capture the rest. Returns False if all sizes are captured.
        """
        if self.scheduler.busy:  # leave its lock to the threads that step
            return True
        return self._driver.exclusively(lambda scheduler: scheduler.busy or self.prompts.capture_next())

    def graph_stats(self) -> list[GraphStat]:
        """Return how many decode passes ran so far, by rows, padded rows and mode."""
        self._open()
        return self.steps.dispatcher.stats()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Return the SamplingParams of the model's generation_config.json, with `overrides`."""
        return SamplingParams(**{**dict(self.config.generation_defaults), **overrides})

    def _params(self, params: object) -> SamplingParams:
        if not isinstance(params, SamplingParams | None):
            raise ParameterError(f"params must be a SamplingParams or None, got {shown(params)}", "params", "type")
        return self.default_params() if params is None else params

    def encode(self, prompt: Prompt, template_variables: dict[str, Any] | None = None) -> list[int]:
        """Return the token ids of a prompt: a text, token ids, or chat messages, which go through the chat template.
        Raises PromptError."""
        return self.prepare(prompt, template_variables).ids

    def prepare(self, prompt: Prompt, template_variables: dict[str, Any] | None = None) -> Encoded:
        """Encode a prompt once for several requests. Raises PromptError."""
        variables = mapping("template_variables", template_variables)
        limits = self.config.vocab_size, self.capacity, self.config.max_position
        return prompt_ids(prompt, variables, self.tokenizer, *limits)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Put a request in the queue, from any thread. See Request, and `stream` for the arguments.

        Args:
            cache_salt: the request shares K/V only with requests of the same salt.

        Raises:
            PromptError, ParameterError, QueueFull, EngineClosed.
        """
        return self._driver.submit(self._request(prompt, params, reuse_prefix, template_variables, cache_salt))

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait until one of the requests has ended; return at once if there are none."""
        if not isinstance(requests, Sequence) or not all(isinstance(request, Request) for request in requests):
            message = f"requests must be a list of what submit gave, got {shown(requests)}"
            raise ParameterError(message, "requests", "type")
        self._driver.wait(lambda: not requests or any(request.finish_reason for request in requests))

    def step(self) -> bool:
        """Run one pass for the requests that run or wait. Returns False if all sizes are captured.

        This is for a thread that does nothing else: a thread that waits for a request runs passes by itself.
        """
        return self._driver.step()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
    ) -> Iterator[Piece]:
        """Yield a Piece for each token, then a last one with finish_reason, usage and timings.

        Closing the iterator early cancels the request.

        Args:
            prompt: a text, which is used without a chat template; token ids; or chat messages.
            params: None: the model's own defaults.
            reuse_prefix: use the K/V of the longest prefix that earlier requests have left.
            template_variables: plain JSON values that the chat template reads, like {"enable_thinking": False}.

        Raises:
            PromptError, ParameterError, QueueFull, EngineClosed: before the first piece.
        """
        return iter(self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables))

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        reuse_prefix: bool,
        template_variables: dict[str, Any] | None,
        cache_salt: str = "",
    ) -> Request:
        started = time.perf_counter()
        self._open()
        params = self._params(params)
        FLAG.check("reuse_prefix", reuse_prefix)
        tokens, chat = self.prepare(prompt, template_variables)
        salt, grammar = TEXT.check("cache_salt", cache_salt), self._grammars.of(params)
        stop_ids = checked_stop_ids(params, self.config)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        limit = min(len(tokens) + (params.max_tokens or self.capacity), self.capacity + 1)
        own = tokens[:]  # several requests may have the same prompt
        return Request(own, params, stop_ids, limit, started, not chat, reuse_prefix, salt, grammar)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
    ) -> Result:
        """Return the whole answer; see `stream`. If its finish_reason is "error", `error` has the reason."""
        return self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables).result()

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None | Sequence[SamplingParams | None] = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
    ) -> list[Result]:
        """Return the answers to many prompts in their order; as many run at a time as there are slots.

        An error of one request, of its prompt or parameters too, is the result of that request alone: finish_reason
        "error", with the reason in `error`.

        Args:
            params: for all prompts, or a list with one for each.
            progress: called with (requests done, requests in all) whenever a request ends.

        Raises:
            ParameterError: the lists themselves are wrong.
        """
        if (several := listed(prompts)) is None:
            message = "prompts must be a list of prompts; for one prompt there is generate"
            raise ParameterError(message, "prompts", "type")
        each = list(params) if isinstance(params, list | tuple) else [self._params(params)] * len(several)
        if len(each) != len(several):
            message = f"params: a list has one for each of {counted(len(several), 'prompt')}, got {len(each):,}"
            raise ParameterError(message, "params", "range")
        function("progress", progress)
        FLAG.check("reuse_prefix", reuse_prefix)
        self._open()
        shared = reuse_prefix, template_variables
        make = [partial(self._request, prompt, own, *shared) for prompt, own in zip(several, each)]
        return self._driver.gather(make, progress)

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Return the logits of all tokens: fp32 [tokens, vocab] on the model's device; row i predicts token i + 1.

        Runs decode passes in a slot, as any request does.

        Raises:
            PromptError: ids are outside the vocabulary, or more than the context.
            GenerationError: logits are NaN or Inf, or the request is cancelled.
            EngineClosed: the engine is closed.
        """
        if (ids := listed(token_ids)) is None:
            raise PromptError(f"token_ids must be a sequence of token ids, got {shown(token_ids)}")
        tokens = self.prepare(ids).tokens
        logits = torch.empty(len(tokens), self.config.vocab_size, device=self.device)
        result = self._driver.submit(scoring(tokens, time.perf_counter(), logits=logits)).result()
        if result.error:
            raise GenerationError(result.error)
        if result.finish_reason == "cancelled":
            self._driver.opened()
            raise GenerationError("score was cancelled before all logits were there")
        return logits

    def submit_score(self, prompt: Prompt, logprobs: int) -> Request:
        """Submit a request that generates nothing: its pieces have the logprob of each prompt token after the first,
        with those of the `logprobs` most likely tokens, and of the token that would follow."""
        return self._driver.submit(scoring(self.prepare(prompt).tokens, time.perf_counter(), logprobs))

    def synchronize(self) -> None:
        """Wait until all enqueued passes have run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def named(value: Any) -> Any:
    """Return the name of a torch dtype or device, and other values as they are."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value


def model_of(plan: EnginePlan, weights: Weights, configs: Mapping[int, PassConfigs] | None = None) -> DecodeModel:
    """Allocate the state of a planned model. configs: launch configs by rows, by default those chosen for the GPU."""
    return make_model(
        plan.spec, weights, plan.capacity, plan.slots, plan.page or plan.capacity, configs, plan.pages, plan.rows,
        plan.chunk, batch_invariant=plan.options.batch_invariant, offload=plan.offload,
        speculate=plan.ngram is not None, ngram=plan.ngram or NGRAM, one_piece=plan.graphs.one_piece,
    )  # fmt: skip
