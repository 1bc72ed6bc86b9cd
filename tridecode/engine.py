"""Engine: a model on its device, and its requests."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch

from .arguments import Flag, Integer, Text, function, mapping, shown
from .blocks.adapter import Adapter
from .blocks.spec import ModelSpec
from .blocks.weights import Weights
from .checkpoint.adapters import load_adapter
from .checkpoint.hub import fetch_weights, resolve_model
from .checkpoint.load import load_config, load_weights
from .checkpoint.names import model_name
from .errors import CheckpointError, GenerationError, ParameterError, PromptError, conflict, counted
from .layout import MAX_STOP_IDS, NGRAM
from .options import ADAPTER, EngineOptions
from .plan import threads
from .plan.device import find_device
from .plan.graphs import GraphPlan
from .plan.memory import allocating
from .plan.resolve import EnginePlan, resolve
from .results import OutputChunk, Result
from .sampling import SamplingParams, random_seed
from .serve.driver import Driver
from .serve.policy import Policy
from .serve.request import Request, checked_stop_ids, scoring
from .serve.scheduler import Scheduler
from .state.adapters import AdapterLoad
from .step.costs import measure_costs
from .step.dispatch import Dispatcher, GraphStat
from .step.graphs import make_passes
from .step.model import DecodeModel, make_model
from .step.prompt_graphs import make_prompts
from .step.reachable import compile_passes
from .tensors import short_repr
from .text.grammar import Grammars
from .text.minimum import MinimumLength
from .text.prompt import AS_TEXT, Encoded, Prompt, Reading, listed, prompt_ids
from .text.stop_strings import Reader
from .text.tokenizer import Tokenizer
from .tuning.configs import PassConfigs

FLAG, TEXT, CALLERS = Flag(), Text(), Integer(1)
FIRST_TURN_TOKENS = 64  # Maximum tokens of the prompt passes that an engine of one slot captures before it is ready.


@dataclass(repr=False)
class Engine:
    """A model on its device, with captured passes.

    At most one request runs in each slot. Other requests wait in a queue, in the order of their submission. Any thread
    may submit requests. Requests share the K/V of equal prefixes, also with requests that have ended.
    """

    model: DecodeModel
    tokenizer: Tokenizer | None
    plan: EnginePlan
    name: str
    threads: int | None = None  # Number of CPU threads. None keeps the number that the user has set.
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
            model: a directory, a Hugging Face id ("owner/name" or "owner/name@revision"), or the address of its page.
                None is the bundled model, and so is "bundled" unless there is a directory of that name.
            progress: called with (bytes loaded, total bytes) while weights load.
            compiling: called with (compiled kernels, total kernels) while kernels compile, from several threads.
            callers: number of threads that submit prompts at the same time; the default is the number of slots. For
                several, `load` also calls `warm_up`.
            options: the fields of EngineOptions.

        On a CPU the engine sets PyTorch's number of threads: one for a tiny model, else the number of free cores. It
        keeps a number that OMP_NUM_THREADS or torch.set_num_threads has set.

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
        spec = load_config(path)
        plan = resolve(requested, spec, device)
        plan.check()
        fetch_weights(model, path)
        if (spec_of_files := load_config(path)) != spec:  # The weights were not there before.
            plan = resolve(requested, spec_of_files, device)
            plan.check()
        tokenizer = Tokenizer.load(path)
        plan = replace(plan, spec=with_end_of_text(plan.spec, tokenizer))
        grammars = Grammars(tokenizer, plan.spec.vocab_size, plan.spec.stop_ids, plan.options.open_objects)
        callers = callers or plan.slots
        try:
            tokenizer.start(callers)
            if callers > 1:
                grammars.start()
            cores = threads.FreeCores()
            adapters = [load_adapter(*each, plan.spec, plan.dtype) for each in (plan.options.adapters or {}).items()]
            weights = load_weights(path, plan.spec, device, plan.dtype, progress, plan.host_layers)
            name = model_name(model)
            engine = cls.build(plan, weights, tokenizer, name, compiling=compiling, grammars=grammars)
            for adapter in adapters:
                engine._add_adapter(adapter)
            engine.threads = threads.choose(plan.memory.weights, cores) if device.type == "cpu" else None
            if callers > 1:
                engine.warm_up()
        except BaseException:  # After an error or an interrupt, no child process is left.
            grammars.close()
            tokenizer.close()
            raise
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
            configs: launch configs by number of rows. By default, the engine chooses them for the GPU.
            compiling: see `load`.
            grammars: the grammars of this tokenizer and model, if their preparation has already begun.
        """
        with allocating(plan.capacity, plan.device):
            model = model_of(plan, weights, configs)
        if plan.graphs.captured:
            compile_passes(model, plan.graphs.sizes, plan.graphs.prompt_attention, compiling)
        return cls(model, tokenizer, plan, name, grammars=grammars)

    def __post_init__(self, grammars: Grammars | None) -> None:
        graphs, options = self.graphs, self.plan.options
        dispatcher = Dispatcher(graphs.graph, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention)
        self.steps = make_passes(self.model, self.backend, dispatcher, graphs.attention, compiled=graphs.captured)
        self.prompts = make_prompts(self.model, self.steps, self.backend, graphs.prompt_attention)
        self.prompts.capture_all(None if self.slots > 1 or options.batch_invariant else FIRST_TURN_TOKENS)
        lookahead = 1 if self.device.type == "cuda" and self.backend == "triton" else 0
        runners = (lambda: self.steps), (lambda: self.prompts)  # Benchmarks replace these functions.
        policy = Policy(self.plan.chunk, options.max_queue, options.prompt_ms, self.plan.prefix_sharing)
        scheduler = Scheduler(self.model, self.tokenizer, *runners, lookahead, policy)
        self._grammars = grammars or Grammars(
            self.tokenizer, self.config.vocab_size, self.config.stop_ids, options.open_objects
        )
        if self.model.verify:
            self._grammars.wait()  # Compilation of grammars holds the GIL, which would change the measured costs.
            self.steps.costs = measure_costs(self.steps, scheduler.slots)
        self._driver = Driver(scheduler, lambda: threads.use(self.threads))
        self._adapters: dict[str, Adapter] = {}
        self._closing = threading.RLock()  # Reentrant, because a signal handler may call `close` during `close`.
        _engines[id(self)] = self

    def warm_up(self) -> None:
        """Wait for the child processes that render prompts, and build the vocabulary of grammars.

        Then no request waits for these steps. `load` calls this for several callers. A server calls it for every
        engine.
        """
        self._grammars.start()
        if self.tokenizer is not None:
            self.tokenizer.wait()
        self._grammars.wait()

    def close(self) -> None:
        """Cancel all requests, free the memory and end the child processes. Later calls raise EngineClosed.

        Further calls of `close` have no effect. They return when the engine is closed.
        """
        with self._closing:
            if self.model is None:
                return
            try:
                self._driver.close()
                with suppress(RuntimeError):  # If the GPU is lost, this fails, but then the GPU does not write either.
                    self.synchronize()
            finally:
                self.model = self.steps = self.prompts = None  # type: ignore[assignment]  # only after `close`
                self._grammars.close()
                if self.tokenizer is not None:
                    self.tokenizer.close()

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
        """Backend of the passes: triton or torch."""
        return self.plan.backend

    @property
    def graphs(self) -> GraphPlan:
        """Modes and sizes of the captured passes."""
        return self.plan.graphs

    @property
    def graph(self) -> str:
        """Mode of the CUDA graphs, one of dispatch.MODES."""
        return self.plan.graphs.graph

    @property
    def config(self) -> ModelSpec:
        """Configuration of the model."""
        return self._open().spec

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self._open().device

    @property
    def capacity(self) -> int:
        """Positions of one request, prompt and output together."""
        return self._open().kv.capacity

    @property
    def slots(self) -> int:
        """Number of requests that can run at the same time."""
        return len(self._open().workspace.tokens)

    @property
    def kv_tokens(self) -> int:
        """K/V positions of all requests together on the device."""
        return self._open().kv.positions

    def _open(self) -> DecodeModel:
        if self.model is None:
            raise self._driver.closed_error()
        return self.model

    @property
    def scheduler(self) -> Scheduler:
        """Scheduler of the requests. Raises EngineClosed."""
        return self._driver.opened()

    def capture_next(self) -> bool:
        """Capture one more size of prompt passes, unless a request runs.

        An engine of several slots captures all passes at load. An engine of one slot captures only prompt passes of up
        to FIRST_TURN_TOKENS tokens, and a caller with idle time may capture the rest. Returns False if all sizes are
        captured.
        """
        if self.scheduler.busy:  # A capture would delay the threads that run passes.
            return True
        return self._driver.exclusively(lambda scheduler: scheduler.busy or self.prompts.capture_next())

    def graph_stats(self) -> list[GraphStat]:
        """Return the number of passes so far, by kind, rows, padded rows and mode."""
        self._open()
        return self.steps.dispatcher.stats()

    def default_params(self, **overrides: Any) -> SamplingParams:
        """Return the SamplingParams of the model's generation_config.json, with `overrides` applied."""
        defaults = dict(self.config.generation_defaults)
        if isinstance(overrides.get("logit_bias"), Mapping):  # Tokens that the model must not write stay excluded.
            overrides["logit_bias"] = {**dict(defaults.get("logit_bias", ())), **overrides["logit_bias"]}
        return SamplingParams(**{**defaults, **overrides})

    def _params(self, params: object) -> SamplingParams:
        if not isinstance(params, SamplingParams | None):
            raise ParameterError(f"params must be a SamplingParams or None, got {shown(params)}", "params", "type")
        return self.default_params() if params is None else params

    def encode(
        self, prompt: Prompt, template_variables: dict[str, Any] | None = None, reading: Reading = AS_TEXT
    ) -> list[int]:
        """Return the token ids of a prompt, which is a text, token ids, or chat messages. Raises PromptError.

        The chat template formats messages.
        """
        return self.prepare(prompt, template_variables, reading).ids

    def prepare(
        self, prompt: Prompt, template_variables: dict[str, Any] | None = None, reading: Reading = AS_TEXT
    ) -> Encoded:
        """Encode a prompt once for several requests. Raises PromptError."""
        variables = mapping("template_variables", template_variables)
        limits = self.config.vocab_size, self.capacity, self.config.max_position
        return prompt_ids(prompt, variables, self.tokenizer, *limits, reading)

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The loaded adapters by name."""
        return dict(self._adapters)

    def adapter_load(self) -> AdapterLoad:
        """Return the number of adapters on the device, the maximum, and the number of copies to it."""
        residents = self.scheduler.slots.adapters
        return AdapterLoad(0, 0, 0) if residents is None else residents.load()

    def load_adapter(self, name: str, path: str | Path) -> Adapter:
        """Load a LoRA adapter while requests run. Later requests select it by its name.

        It is kept in host memory. When a request needs it, it is copied to the device; if that is full, it replaces the
        least recently used adapter there.

        Args:
            path: a directory that the peft library has saved, or a Hugging Face id.

        Raises:
            CheckpointError: the adapter is malformed, is of an unsupported kind, or does not fit the model.
            ParameterError: the name is in use, or the engine has no memory for adapters.
        """
        ADAPTER.check("adapter", name)
        self._check_new_adapter(name)
        adapter = load_adapter(name, path, self.config, self.plan.dtype)
        if adapter.rank > self.plan.adapters.max_rank:
            message = f"{path}: the adapter has rank {adapter.rank}, and max_rank is {self.plan.adapters.max_rank}"
            raise CheckpointError(f"{message}; load the engine with max_rank {adapter.rank}")
        self._add_adapter(adapter)
        return adapter

    def _check_new_adapter(self, name: str) -> None:
        """Raise ParameterError if no adapter of this name can be added."""
        if self._open().pool is None:
            raise conflict("adapter", ": the engine has no memory for adapters; load it with adapter_memory")
        if name in self._adapters:
            raise conflict("adapter", f": {name} is loaded already; unload it first")

    def _add_adapter(self, adapter: Adapter) -> None:
        """Make an adapter available to requests, and copy it to the device if that has an empty place."""

        def prefetch(scheduler: Scheduler) -> None:
            self._check_new_adapter(adapter.name)
            self._adapters[adapter.name] = adapter
            scheduler.slots.prefetch_adapter(adapter)

        self._driver.exclusively(prefetch)

    def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Requests that were submitted before still use it.

        Raises:
            ParameterError: there is no adapter of this name.
        """

        def remove(scheduler: Scheduler) -> None:
            adapter = self._adapter(name)
            del self._adapters[name]
            scheduler.slots.residents.forget(adapter, scheduler.slots.used_adapters())

        self._driver.exclusively(remove)

    def _adapter(self, name: str) -> Adapter:
        """Return a loaded adapter. Raises ParameterError."""
        if (adapter := self._adapters.get(name)) is None:
            known = f"the loaded ones are {', '.join(self._adapters)}" if self._adapters else "none is loaded"
            raise ParameterError(f"adapter: there is no adapter {shown(name)}; {known}", "adapter", "choice")
        return adapter

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
        cache_salt: str = "",
        reader: Callable[[], Reader] | None = None,
        adapter: str | None = None,
    ) -> Request:
        """Add a request to the queue, from any thread. See Request, and `stream` for the other arguments.

        Args:
            adapter: the name of a LoRA adapter, in place of that of `params`.
            cache_salt: the request shares K/V only with requests that have the same salt.
            reader: returns a new reader, which searches the answer for the stop strings, such as in the text after the
                thinking only. The output chunks then contain the whole text, with a stop string. Any thread of the
                engine may call it, during a step, so it must not call the engine. Its errors end the request, and the
                caller gets them.

        Raises:
            PromptError, ParameterError, QueueFull, EngineClosed.
        """
        request = self._request(prompt, params, reuse_prefix, template_variables, cache_salt, adapter)
        request.reader = reader
        return self._driver.submit(request)

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait until one of the requests of this engine has ended. Return at once if there are no requests."""
        if not isinstance(requests, Sequence) or not all(isinstance(request, Request) for request in requests):
            message = f"requests must be a list of requests from submit, got {shown(requests)}"
            raise ParameterError(message, "requests", "type")
        if any(request.driver is not self._driver for request in requests):
            raise ParameterError("requests: one of them belongs to another engine", "requests", "conflict")
        self._driver.wait(lambda: not requests or any(request.finish_reason for request in requests))

    def step(self) -> bool:
        """Run one pass for the requests that run or wait. Return False if there are no requests.

        This is for a thread that only runs passes. A thread that waits for a request runs passes itself.
        """
        return self._driver.step()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
    ) -> Iterator[OutputChunk]:
        """Yield an OutputChunk for each token, then a last one with finish_reason, usage and timings.

        Closing the iterator early cancels the request.

        Args:
            prompt: a text, token ids, or chat messages. A text is used without a chat template.
            params: sampling parameters. None selects the model's defaults.
            reuse_prefix: whether to reuse the K/V of the longest cached prefix of earlier requests.
            template_variables: plain JSON values that the chat template reads, like {"enable_thinking": False}.

        Raises:
            PromptError, ParameterError, QueueFull, EngineClosed: at the call, before any token.
        """
        return iter(self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables))

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        reuse_prefix: bool,
        template_variables: dict[str, Any] | None,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> Request:
        started = time.perf_counter()
        self._open()
        params = self._params(params)
        name = params.adapter if adapter is None else ADAPTER.check("adapter", adapter)
        own_adapter = None if name is None else self._adapter(name)
        FLAG.check("reuse_prefix", reuse_prefix)
        try:
            tokens, chat, _ = self.prepare(prompt, template_variables)
            salt, grammar = TEXT.check("cache_salt", cache_salt), self._grammars.of(params)
        except PromptError:
            self._open()  # If another thread has closed the engine, and with it the child processes, that is the error.
            raise
        stop_ids = checked_stop_ids(params, self.config)
        if params.bounded_below:
            grammar = MinimumLength(params.min_tokens, stop_ids, self.config.vocab_size)
        if params.stop and self.tokenizer is None:
            raise conflict("stop", " needs a tokenizer, but this engine has none")
        if params.seed is None:
            params = replace(params, seed=random_seed())
        limit = min(len(tokens) + (params.max_tokens or self.capacity), self.capacity + 1)
        own = tokens[:]  # The request needs a copy, because several requests may use the same encoded prompt.
        key = salt if own_adapter is None else (own_adapter.serial, salt)  # K/V depend on the adapter.
        return Request(own, params, stop_ids, limit, started, not chat, reuse_prefix, key, grammar, own_adapter)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict[str, Any] | None = None,
    ) -> Result:
        """Return the whole answer; see `stream`. If its finish_reason is "error", `error` contains the reason."""
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
        """Return the answers to many prompts, in the order of the prompts. At most one runs in each slot at a time.

        An error of one request, also of its prompt or parameters, affects only its own result, whose finish_reason is
        "error" and whose `error` contains the reason.

        Args:
            params: parameters for all prompts, or a list with parameters for each.
            progress: called with (ended requests, all requests) whenever a request ends.

        Raises:
            ParameterError: the lists have a wrong type or different lengths.
        """
        if (several := listed(prompts)) is None:
            message = "prompts must be a list of prompts; use generate for one prompt"
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
        """Return the logits of all tokens, fp32 [tokens, vocab] on the model's device. Row i predicts token i + 1.

        The tokens run through decode passes, and occupy a slot as a request does.

        Raises:
            PromptError: ids are outside the vocabulary, or exceed the context.
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
            raise GenerationError("score was cancelled before it computed all logits")
        return logits

    def submit_score(self, prompt: Prompt, logprobs: int, adapter: str | None = None, cache_salt: str = "") -> Request:
        """Submit a request that only scores its prompt, with an adapter if one is named. See `submit` for cache_salt.

        Its chunks contain the logprob of each prompt token after the first, and the `logprobs` most likely tokens at
        each position. The last chunk has those for the token that would follow the prompt.
        """
        own_adapter = None if adapter is None else self._adapter(adapter)
        salt, tokens = TEXT.check("cache_salt", cache_salt), self.prepare(prompt).tokens
        request = scoring(tokens, time.perf_counter(), logprobs, adapter=own_adapter, cache_salt=salt)
        return self._driver.submit(request)

    def synchronize(self) -> None:
        """Wait until all enqueued passes have run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


_engines: WeakValueDictionary[int, Engine] = WeakValueDictionary()
_inherited: list[tuple] = []  # Objects of engines of the parent process, which must not be freed in this process.


def _after_fork() -> None:
    """Close the engines of the parent process in a process that it has forked."""
    for engine in list(_engines.values()):
        _inherited.append((engine.model, engine.steps, engine.prompts))
        engine._driver.disown()
        engine.model = engine.steps = engine.prompts = None  # type: ignore[assignment]
        engine._closing = threading.RLock()  # Another thread of the parent process may hold its lock.
    _engines.clear()


os.register_at_fork(after_in_child=_after_fork)


def named(value: Any) -> Any:
    """Return the name of a torch dtype or device. Return any other value unchanged."""
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype | torch.device) else value


def with_end_of_text(spec: ModelSpec, tokenizer: Tokenizer) -> ModelSpec:
    """Return the specification with the tokenizer's eos_token among its stop ids.

    In some checkpoints only tokenizer_config.json names the token that ends a turn.
    """
    end = tokenizer.eos_id
    if end is None or end >= spec.vocab_size or end in spec.stop_ids:
        return spec
    if len(spec.stop_ids) == MAX_STOP_IDS:
        raise CheckpointError(
            f"{tokenizer.directory}: eos_token_id names {MAX_STOP_IDS} tokens, and tokenizer_config.json one more as "
            f"eos_token; at most {MAX_STOP_IDS} can stop a generation: remove some"
        )
    return replace(spec, stop_ids=(*spec.stop_ids, end))


def model_of(plan: EnginePlan, weights: Weights, configs: Mapping[int, PassConfigs] | None = None) -> DecodeModel:
    """Allocate the state of a planned model.

    configs: launch configs by number of rows. By default, they are chosen for the GPU.
    """
    return make_model(
        plan.spec, weights, plan.capacity, plan.slots, plan.page or plan.capacity, configs, plan.pages, plan.rows,
        plan.chunk, batch_invariant=plan.options.batch_invariant, offload=plan.offload,
        speculate=plan.ngram is not None, ngram=plan.ngram or NGRAM,
        torch_prompt_attention=plan.graphs.torch_prompt_attention, snapshots=plan.snapshots,
        adapters=plan.adapters.count, max_rank=plan.adapters.max_rank,
    )  # fmt: skip
