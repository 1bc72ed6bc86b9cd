"""Engine: load a checkpoint, stream answers, score tokens."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from . import layout, threads
from .arguments import choice, flag, function, integer, mapping, shown
from .cache.kv import PAGE
from .errors import GenerationError, ParameterError, PromptError, not_finite
from .memory import MemoryPlan, allocating, plan_memory
from .model.checkpoint import load_config, load_weights
from .model.config import ModelConfig
from .model.hub import resolve_model
from .model.weights import Weights, short_repr
from .placement import check_dtype, plan_capacity, resolve_device, resolve_dtype
from .prompt import Prompt, listed, prompt_ids
from .results import Piece, Result
from .sampling import SamplingParams
from .serve.request import Request, checked_stop_ids, step_kind
from .serve.scheduler import Scheduler
from .step.graphs import EagerSteps, StepGraphs, launcher
from .step.prefill import warm_up
from .step.run import refer
from .step.shapes import StepShapes
from .step.state import DecodeModel, make_model
from .text.tokenizer import Tokenizer

BUNDLED = Path(__file__).parent / "bundled"
GRAPHS = ("full", "none")
LONGEST = 2**31 - 2  # positions are 32-bit integers


@dataclass
class Engine:
    """A loaded model with its captured step.

    One conversation at a time: a new stream, or score, ends the stream before it, from whichever thread it comes.
    """

    model: DecodeModel
    tokenizer: Tokenizer | None
    backend: str
    graph: str
    plan: MemoryPlan
    name: str
    notes: list[str] = field(default_factory=list)
    threads: int | None = None  # of the CPU, unless the user has chosen

    def __post_init__(self):
        self._lock = threading.RLock()  # held while the device state changes, never while a caller has control
        if self.graph == "full":
            self.steps = StepGraphs(self.model)
        else:
            self.steps = EagerSteps(self.model, launcher(self.model) if self.backend == "triton" else refer)
        if self.device.type == "cuda":
            warm_up(self.model)  # nothing of it counts as cached
        ahead = 1 if self.device.type == "cuda" and self.backend == "triton" else 0
        self.scheduler = Scheduler(self.model, self.tokenizer, self._step, ahead)

    @classmethod
    def load(
        cls,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        backend: str = "auto",
        dtype: str = "auto",
        max_seq_len: int | None = None,
        graph: str = "full",
        progress: Callable[[int, int], None] | None = None,
    ) -> "Engine":
        """Load a checkpoint directory or Hugging Face id; None is the bundled model.

        device: auto, cpu, cuda or cuda:N. backend: auto, triton or torch. dtype: auto (the checkpoint's; fp32 ones run
        in bf16 on a GPU; fp32 on a CPU), bfloat16, float16 or float32. max_seq_len: K/V positions, None is the model's
        limit or what fits. graph: full (one captured CUDA graph) or none (the same launches, eagerly).
        progress(done_bytes, total_bytes) is called while weights load. On a CPU the engine sets PyTorch's threads: one
        for a tiny model, else as many as there are free cores; a number that OMP_NUM_THREADS or torch.set_num_threads
        has given stays.
        Raises CheckpointError, DeviceError, ParameterError; each says what was expected.
        """
        choice("graph", graph, GRAPHS)
        check_dtype(dtype)
        function("progress", progress)
        if max_seq_len is not None:
            integer("max_seq_len", max_seq_len, 1, LONGEST)
        place, backend = resolve_device(device, backend)
        path = BUNDLED if model is None else resolve_model(model)
        config = load_config(path)
        tokenizer = Tokenizer.load(path)
        torch_dtype = resolve_dtype(dtype, config, place)
        plan, capacity, notes = plan_capacity(config, torch_dtype, place, max_seq_len)
        cores = threads.FreeCores()
        weights = load_weights(path, config, place, torch_dtype, progress)
        name = "bundled" if model is None else str(model)
        engine = cls.build(config, weights, tokenizer, capacity, backend, graph, plan=plan, name=name, notes=notes)
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
    ) -> "Engine":
        """An engine from weights that are on their device already (load and the benchmarks end here); shapes: launch
        shapes other than those chosen for the GPU."""
        choice("graph", graph, GRAPHS)
        if backend == "torch" or weights.device.type != "cuda":
            graph = "none"
        plan = plan or plan_memory(config, weights.dtype, weights.device)
        with allocating(capacity, weights.device):
            model = make_model(
                config, weights, capacity, page=PAGE if backend == "triton" else None, shapes=shapes and {1: shapes}
            )
        return cls(model, tokenizer, backend, graph, plan, name, list(notes))

    def __repr__(self) -> str:
        facts = {"name": shown(self.name), "family": self.config.family, "backend": self.backend}
        return short_repr(self, self.model.weights.embed, **facts, graph=self.graph, capacity=self.capacity)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def capacity(self) -> int:
        """Positions of the context: prompt and output together."""
        return self.model.kv.capacity

    def default_params(self, **overrides) -> SamplingParams:
        """SamplingParams of the model's generation_config, with `overrides`."""
        return SamplingParams(**{**dict(self.config.generation_defaults), **overrides})

    def _params(self, params) -> SamplingParams:
        if not isinstance(params, SamplingParams | None):
            raise ParameterError(f"params must be a SamplingParams or None, got {shown(params)}")
        return self.default_params() if params is None else params

    def encode(self, prompt: Prompt, template_variables: dict | None = None) -> list[int]:
        """Token ids of a prompt: text as it is, ids, or chat messages through the template. Raises PromptError."""
        return self._encode(prompt, template_variables)[0]

    def _encode(self, prompt: Prompt, variables: dict | None) -> tuple[list[int], bool]:
        variables = mapping("template_variables", variables)
        limits = self.config.vocab_size, self.capacity, self.config.max_position
        return prompt_ids(prompt, variables, self.tokenizer, *limits)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> Iterator[Piece]:
        """Yield a Piece a token, then a last one with finish_reason, usage and timings.

        prompt: text (raw), token ids, or chat messages. params None: the model's own defaults. reuse_prefix: keep the
        K/V of the longest common prefix with what the cache holds. template_variables: plain JSON values that the chat
        template reads, like {"enable_thinking": False}. Closing the iterator early is safe.
        Raises PromptError and ParameterError before the first piece.
        """
        return self._pieces(self._request(prompt, params, reuse_prefix, template_variables))

    def _request(self, prompt, params, reuse_prefix, template_variables) -> Request:
        started = time.perf_counter()
        params = self._params(params)
        flag("reuse_prefix", reuse_prefix)
        ids, chat = self._encode(prompt, template_variables)
        stop_ids = checked_stop_ids(params, self.config)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Request(
            ids=ids,
            before=() if chat else ids,  # an answer begins a text of its own; raw text and ids are continued
            params=replace(params, seed=seed),
            stop_ids=stop_ids,
            limit=min(len(ids) + (params.max_tokens or self.capacity), self.capacity + 1),
            reuse_prefix=reuse_prefix,
            started=started,
        )

    def _pieces(self, request: Request) -> Iterator[Piece]:
        """Drive the scheduler for `request`, with no thread between it and its tokens."""
        try:
            with self._lock:
                threads.use(self.threads)
                self.scheduler.add(request)
            while True:
                with self._lock:
                    if request.cancelled:
                        raise GenerationError("this stream was ended by a newer one of the same engine")
                    if not request.pieces:
                        self.scheduler.step()
                    piece = request.pieces.popleft()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            with self._lock:
                self.scheduler.cancel(request)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        reuse_prefix: bool = True,
        template_variables: dict | None = None,
    ) -> Result:
        """The whole of a stream; see `stream`. With finish_reason "error", `error` says why."""
        params = self._params(params)
        if params.seed is None:
            params = replace(params, seed=secrets.randbits(63))
        *pieces, last = self.stream(prompt, params, reuse_prefix=reuse_prefix, template_variables=template_variables)
        return Result(
            text="".join(p.text for p in pieces) + last.text,
            token_ids=tuple(p.token_id for p in pieces),
            finish_reason=last.finish_reason,
            usage=last.usage,
            timings=last.timings,
            seed=params.seed,
            logprobs=None if params.logprobs is None else tuple(p.logprobs for p in pieces),
            error=last.error,
        )

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> torch.Tensor:
        """fp32 logits [tokens, vocab] on the model's device; row i predicts token i + 1. Runs the decode step.

        Raises PromptError for ids outside the vocabulary or more than the context, GenerationError for NaN or Inf.
        """
        if (ids := listed(token_ids)) is None:
            raise PromptError(f"token_ids must be a sequence of token ids, got {shown(token_ids)}")
        ids = self.encode(ids)
        logits = torch.empty(len(ids), self.config.vocab_size, device=self.device)
        with self._lock:
            self._begin(ids, 0, SamplingParams(temperature=0, seed=0), limit=len(ids) + 1)
            for row in logits:
                self._step("greedy")
                row.copy_(self.model.workspace.logits[0])
            state = self.model.workspace.meta[0].tolist()
            if state[layout.STATUS] == layout.NAN:
                error = not_finite(state[layout.STEP], state[layout.POSITION], self.model.weights.dtype)
                raise GenerationError(error)
            self.scheduler.slots.held[0].tokens = ids
        return logits

    def rewind(self, position: int, params: SamplingParams) -> None:
        """Put the state at `position` with whatever the cache holds, for benchmarks; `enqueue` then runs steps."""
        self._begin([0] * (position + 1), position, params, limit=self.capacity + 1)

    def _begin(self, ids: list[int], position: int, params: SamplingParams, limit: int) -> None:
        """Set slot 0 to `position` of `ids`, with nothing of them in the cache; whatever runs is ended."""
        self.scheduler.cancel()
        slots = self.scheduler.slots
        slots.held[0].tokens = []
        slots.write_tokens(0, ids, limit - 1)
        slots.begin(0, 0, params, position=position, n_known=len(ids), limit=limit, stop_ids=())

    def enqueue(self, params: SamplingParams) -> None:
        """Enqueue one step of the kind that `params` needs; returns before it has run on a GPU."""
        self._step(step_kind(params))

    def _step(self, kind: str) -> None:
        threads.use(self.threads)
        self.steps.replay(kind)

    def synchronize(self) -> None:
        """Wait until everything enqueued has run."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
