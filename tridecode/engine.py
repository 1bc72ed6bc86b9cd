"""Engine: load a checkpoint, stream answers, score tokens."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import torch

from . import placement, threads
from .arguments import flag, function, mapping, shown, string
from .errors import EngineClosed, GenerationError, ParameterError, PromptError
from .grammar import Grammars
from .memory import MemoryPlan, allocating, plan_memory
from .model.checkpoint import load_config, load_weights
from .model.config import ModelConfig
from .model.hub import resolve_model
from .model.weights import Weights, short_repr
from .prompt import Encoded, Prompt, listed, prompt_ids
from .results import Piece, Result
from .sampling import SamplingParams
from .serve.driver import Driver, Request
from .serve.policy import PROMPT_MS, Policy
from .serve.request import Job, generating, scoring, step_kind
from .serve.scheduler import Scheduler
from .serve.slots import checked_positions
from .step.dispatch import PROMPT_MOST, Dispatcher, GraphStat
from .step.graphs import make_steps
from .step.prompt_graphs import make_prompts
from .step.shapes import StepShapes
from .step.state import DecodeModel, make_model
from .text.tokenizer import Tokenizer

FIRST_TURN = 64  # tokens of a prompt whose passes a one-slot engine captures before it is ready
BUNDLED = Path(__file__).parent / "bundled"


@dataclass
class Engine:
    """A loaded model with its captured step.

    As many requests run at a time as there are slots, others wait for one, in the order in which they came, from
    whichever thread. What requests before have left of K/V, those that follow find.
    """

    model: DecodeModel
    tokenizer: Tokenizer | None
    backend: str
    graphs: placement.GraphPlan
    plan: MemoryPlan
    name: str
    notes: list[str] = field(default_factory=list)
    threads: int | None = None  # of the CPU, unless the user has chosen
    policy: Policy = Policy()

    def __post_init__(self):
        graphs = self.graphs
        dispatcher = Dispatcher(graphs.graph, graphs.sizes, graphs.prompt_sizes, graphs.prompt_attention)
        self.steps = make_steps(self.model, self.backend, dispatcher, graphs.attention)
        self.prompts = make_prompts(self.model, self.steps, self.backend, graphs.prompt_attention)
        self.prompts.capture_all(None if self.slots > 1 or self.policy.batch_invariant else FIRST_TURN)
        ahead = 1 if self.device.type == "cuda" and self.backend == "triton" else 0
        runners = (lambda: self.steps), (lambda: self.prompts)  # those of now: benchmarks put others in their place
        scheduler = Scheduler(self.model, self.tokenizer, *runners, ahead, self.policy)
        self._grammars = Grammars(self.tokenizer, self.config.vocab_size, self.config.stop_ids)
        self._driver = Driver(scheduler, lambda: threads.use(self.threads))

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
        dtype: str = "auto",
        max_seq_len: int | None = None,
        slots: int = 1,
        kv_tokens: int | None = None,
        graph: str = "full",
        graph_sizes: Sequence[int] | None = None,
        attention: str = "triton",
        chunk_tokens: int | None = None,
        max_queue: int | None = None,
        prompt_graph_max_tokens: int = PROMPT_MOST,
        prompt_graph_sizes: Sequence[int] | None = None,
        prompt_attention: str = "auto",
        prompt_ms: float = PROMPT_MS,
        prefix_sharing: bool = True,
        batch_invariant: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Engine":
        """Load a checkpoint directory or Hugging Face id; None is the bundled model.

        device: auto, cpu, cuda or cuda:N. backend: auto, triton or torch. dtype: auto (the checkpoint's; fp32 ones run
        in bf16 on a GPU; fp32 on a CPU), bfloat16, float16 or float32. max_seq_len: K/V positions of one request, None
        is the model's limit or what fits. slots: requests that run at a time. kv_tokens: K/V positions of all of them
        together, None is slots x max_seq_len or what fits. graph: how passes run, see docs/graphs.md: full (each is one
        captured CUDA graph), piecewise (captured but for attention), none (launched one by one), full_decode_only or
        full_and_piecewise. graph_sizes: rows of the decode passes that are captured, ascending. attention: of these,
        triton, or torch, which no graph can hold. chunk_tokens: of prompts in one pass, None is 2,048, or 256 with
        batch_invariant. prompt_graph_sizes: tokens of the prompt passes that are captured, ascending, by default a
        schedule up to prompt_graph_max_tokens. prompt_attention: of these, auto, triton, flash or cudnn; see
        docs/prompts.md. prompt_ms: milliseconds that a pass may take which reads prompts while others decode.
        prefix_sharing: K/V of equal beginnings are computed once. batch_invariant: a request's logits have the same
        bits alone and in any company, see docs/sharing.md. max_queue: requests that may wait for a slot, None is any
        number. progress(done_bytes, total_bytes) is called while weights load. On a CPU the engine sets PyTorch's
        threads: one for a tiny model, else as many as there are free cores; a number that OMP_NUM_THREADS or
        torch.set_num_threads has given stays. Raises CheckpointError, DeviceError, ParameterError; each says what was
        expected.
        """
        graphs = dict(
            graph_sizes=graph_sizes, attention=attention, prompt_graph_max_tokens=prompt_graph_max_tokens,
            prompt_graph_sizes=prompt_graph_sizes, prompt_attention=prompt_attention, batch_invariant=batch_invariant,
        )  # fmt: skip
        placement.check_dtype(dtype)
        function("progress", progress)
        slots = placement.check_limits(slots, max_seq_len)
        policy = Policy(chunk_tokens, max_queue, prompt_ms, prefix_sharing, batch_invariant)
        chunk_tokens = policy.chunk_tokens
        placement.plan_graphs(slots, chunk_tokens, False, False, graph=graph, **graphs)  # bad ones end here
        place, backend = placement.resolve_device(device, backend)
        path = BUNDLED if model is None else resolve_model(model)
        config = load_config(path)
        tokenizer = Tokenizer.load(path)
        torch_dtype = placement.resolve_dtype(dtype, config, place)
        support = placement.capture_support(backend, config, torch_dtype, place)
        planned = placement.plan_graphs(slots, chunk_tokens, *support, graph=graph, **graphs)
        plan, capacity, notes = placement.plan_capacity(
            config, torch_dtype, place, max_seq_len, slots, kv_tokens, chunk_tokens, planned.one_piece
        )
        pool = plan.kv_tokens(capacity, kv_tokens, str(place))
        page = placement.page_size(backend, slots, batch_invariant) or capacity
        pages = None if pool == slots * capacity else -(-pool // page)
        cores = threads.FreeCores()
        weights = load_weights(path, config, place, torch_dtype, progress)
        name = "bundled" if model is None else str(model)
        engine = cls.build(
            config, weights, tokenizer, capacity, backend, graph, plan=plan, name=name, notes=notes, slots=slots,
            pages=pages, page=page, **asdict(policy) | graphs,
        )  # fmt: skip
        engine.threads = threads.choose(plan.weights, cores) if place.type == "cpu" else None
        return engine

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        weights: Weights,
        tokenizer: Tokenizer | None,
        capacity: int,
        backend: str,
        graph: str = "full",
        plan: MemoryPlan | None = None,
        name: str = "",
        notes: Sequence[str] = (),
        shapes: StepShapes | None = None,
        slots: int = 1,
        pages: int | None = None,
        page: int | None = None,
        **more,
    ) -> "Engine":
        """An engine from weights that are on their device already (load and the benchmarks end here); shapes: launch
        shapes other than those chosen for the GPU. pages: of the pool, by default what all slots can have; page:
        positions in one. more: what Policy and placement.plan_graphs take."""
        slots, policy = placement.check_limits(slots), Policy.out_of(more)
        invariant = policy.batch_invariant
        page = page or placement.page_size(backend, slots, invariant)
        if pages is not None and pages * (page or capacity) < capacity:
            raise ParameterError(f"pages: {pages:,} hold fewer positions than a request's {capacity:,}")
        chunk_tokens = policy.chunk(slots, capacity, page or capacity)
        support = placement.capture_support(backend, config, weights.dtype, weights.device)
        planned = placement.plan_graphs(slots, chunk_tokens, *support, graph=graph, batch_invariant=invariant, **more)
        plan = plan or plan_memory(config, weights.dtype, weights.device, slots, chunk_tokens, planned.one_piece)
        with allocating(capacity, weights.device):
            sizes = pages, max(slots, *planned.sizes), chunk_tokens
            model = make_model(
                config, weights, capacity, slots, page, shapes and {1: shapes}, *sizes, batch_invariant=invariant
            )
        notes = [*notes, *filter(None, [planned.note])]
        return cls(model, tokenizer, backend, planned, plan, name, notes, None, policy)

    def close(self) -> None:
        """Cancel what runs or waits, and give the memory back. Later calls raise EngineClosed."""
        if self.model is not None:
            self._driver.close()
            with suppress(RuntimeError):  # a lost GPU writes no more
                self.synchronize()
            self.model = self.steps = self.prompts = None

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def __repr__(self) -> str:
        if self.model is None:
            return f"Engine(name={shown(self.name)}, closed)"
        facts = {"name": shown(self.name), "family": self.config.family, "backend": self.backend}
        return short_repr(self, self.model.weights.embed, **facts, graph=self.graph, capacity=self.capacity)

    @property
    def graph(self) -> str:
        """How passes run: one of dispatch.MODES."""
        return self.graphs.graph

    @property
    def scheduler(self) -> Scheduler:
        self._open()
        return self._driver.scheduler

    @property
    def config(self) -> ModelConfig:
        return self._open().config

    @property
    def device(self) -> torch.device:
        return self._open().device

    @property
    def capacity(self) -> int:
        """Positions of a request's context: prompt and output together."""
        return self._open().kv.capacity

    @property
    def slots(self) -> int:
        """Requests that run at a time."""
        return len(self._open().workspace.tokens)

    @property
    def kv_tokens(self) -> int:
        """K/V positions of all requests together."""
        kv = self._open().kv
        return len(kv.pool) * kv.page

    def capture_next(self) -> bool:
        """Capture one more size of prompt passes, unless something runs; False where none is left. An engine of several
        slots has captured all at load, one of one slot those of a first turn; whoever has time may do the rest."""
        if self.scheduler.busy:  # its lock is left to those who step
            return True
        return self._driver.exclusively(lambda scheduler: scheduler.busy or self.prompts.capture_next())

    def graph_stats(self) -> list[GraphStat]:
        """What the decode passes so far were: their rows, those that they were padded to, and how they ran."""
        self._open()
        return self.steps.dispatcher.stats()

    def _open(self) -> DecodeModel:
        if self.model is None:
            raise EngineClosed("this engine is closed; load another one")
        return self.model

    def default_params(self, **overrides) -> SamplingParams:
        """SamplingParams of the model's generation_config, with `overrides`."""
        return SamplingParams(**{**dict(self.config.generation_defaults), **overrides})

    def _params(self, params) -> SamplingParams:
        if not isinstance(params, SamplingParams | None):
            raise ParameterError(f"params must be a SamplingParams or None, got {shown(params)}")
        return self.default_params() if params is None else params

    def encode(self, prompt: Prompt, template_variables: dict | None = None) -> list[int]:
        """Token ids of a prompt: text as it is, ids, or chat messages through the template. Raises PromptError."""
        return self.prepare(prompt, template_variables).ids

    def prepare(self, prompt: Prompt, template_variables: dict | None = None) -> Encoded:
        """A prompt in the form in which several requests can have it, encoded once. Raises PromptError."""
        variables = mapping("template_variables", template_variables)
        limits = self.config.vocab_size, self.capacity, self.config.max_position
        return prompt_ids(prompt, variables, self.tokenizer, *limits)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
        cache_salt: str = "",
    ) -> Request:
        """Put a request in the queue, from any thread; see Request and `stream`. cache_salt: it shares K/V with those
        of the same one only. Raises PromptError, ParameterError, QueueFull and EngineClosed."""
        return self._driver.submit(self._job(prompt, params, reuse_prefix, template_variables, cache_salt))

    def wait(self, requests: Sequence[Request]) -> None:
        """Wait until one of the requests has ended; its result() says how."""
        self._driver.wait(lambda: any(request.finish_reason for request in requests))

    def step(self) -> bool:
        """Run one pass for whatever runs or waits; False where nothing does afterwards. For a thread that owns the
        device and does nothing else: who waits for a request steps by that already."""
        return self._driver.step()

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> Iterator[Piece]:
        """Yield a Piece a token, then a last one with finish_reason, usage and timings.

        prompt: text (raw), token ids, or chat messages. params None: the model's own defaults. reuse_prefix: use the
        K/V of the longest beginning that requests before have left. template_variables: plain JSON values that the chat
        template reads, like {"enable_thinking": False}. Closing the iterator early cancels the request. Raises what
        `submit` does, before the first piece.
        """
        return iter(self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables))

    def _job(self, prompt, params, reuse_prefix, template_variables, cache_salt="") -> Job:
        started = time.perf_counter()
        self._open()
        params = self._params(params)
        flag("reuse_prefix", reuse_prefix)
        ids, chat = self.prepare(prompt, template_variables)
        salt, grammar = string("cache_salt", cache_salt), self._grammars.of(params)
        return generating(ids, chat, params, self.config, self.capacity, reuse_prefix, salt, started, grammar)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> Result:
        """The whole of a stream; see `stream`. With finish_reason "error", `error` says why."""
        return self.submit(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables).result()

    def generate_many(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | None | Sequence[SamplingParams | None] = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> list[Result]:
        """The results of many prompts in their order, as many at a time as there are slots.

        params: for all, or a list of one for each. progress(done_requests, total_requests) is called as they end. What
        is wrong with a request, its prompt or parameters included, is its own result's alone: finish_reason "error",
        and `error` says why. Raises ParameterError where the lists themselves are wrong.
        """
        if (prompts := listed(prompts)) is None:
            raise ParameterError("prompts must be a list of prompts; for one prompt there is generate")
        params = list(params) if isinstance(params, (list, tuple)) else [self._params(params)] * len(prompts)
        if len(params) != len(prompts):
            raise ParameterError(f"params: a list has one for each of {len(prompts):,} prompts, got {len(params):,}")
        function("progress", progress)
        flag("reuse_prefix", reuse_prefix)
        self._open()
        options = {"reuse_prefix": reuse_prefix, "template_variables": template_variables}
        return self._driver.gather(
            [partial(self._job, prompt, own, **options) for prompt, own in zip(prompts, params)], progress
        )

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 logits [tokens, vocab] on the model's device; row i predicts token i + 1. Runs the decode step, in a
        slot as any request does.

        Raises PromptError for ids outside the vocabulary or more than the context, GenerationError for NaN or Inf.
        """
        if (ids := listed(token_ids)) is None:
            raise PromptError(f"token_ids must be a sequence of token ids, got {shown(token_ids)}")
        ids = self.encode(ids)
        logits = torch.empty(len(ids), self.config.vocab_size, device=self.device)
        job = scoring(ids, time.perf_counter(), logits=logits)
        if error := self._driver.submit(job).result().error:
            raise GenerationError(error)
        return job.logits

    def submit_score(self, prompt: Prompt, logprobs: int) -> Request:
        """A request whose pieces tell of each token after the prompt's first one how likely it was, with the `logprobs`
        likeliest, and of the one that would follow; see `submit` and `score`."""
        return self._driver.submit(scoring(self.encode(prompt), time.perf_counter(), logprobs))

    def rewind(self, position: int | Sequence[int], params: SamplingParams, rows: int = 1) -> None:
        """Put the first `rows` rows at `position`, or each at its own of a list, with whatever the cache holds, for
        benchmarks; `enqueue` then runs passes. Each row has a slot of its own and a share of the pages that are left.

        Whatever runs or waits is cancelled. params: with a seed. Raises ParameterError, and OutOfPages where the rows
        need more pages than there are.
        """
        positions = checked_positions(position, rows, self.slots, self.capacity)
        self._driver.exclusively(Scheduler.rewind, positions, params)

    def enqueue(self, params: SamplingParams, rows: int = 1) -> None:
        """Enqueue one pass of `rows` rows, of the kind that `params` needs; returns before it has run on a GPU."""
        self._open()
        threads.use(self.threads)
        self.steps.replay(step_kind(params), rows)

    def synchronize(self) -> None:
        """Wait until everything enqueued has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
