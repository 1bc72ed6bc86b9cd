"""Engine: load a checkpoint, stream answers, score tokens."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from . import meta, threads
from .arguments import choice, flag, function, integer, mapping, shown
from .checkpoint import load_config, load_weights, resolve_model
from .config import ModelConfig
from .errors import GenerationError, ParameterError, PromptError, not_finite
from .graph import EagerSteps, StepGraphs, launcher
from .kv_cache import PAGE
from .memory import MemoryPlan, plan_memory
from .model import DecodeModel, make_model
from .placement import check_dtype, plan_capacity, resolve_device, resolve_dtype
from .prefill import prefill, warm_up
from .prompts import Prompt, listed, prompt_ids
from .results import Piece, Result, Timings, TokenLogprobs, Usage
from .run import refer
from .sampling import SamplingParams
from .shapes import StepShapes
from .text import StopStrings
from .tokenizer import Tokenizer
from .weights import Weights, brief

BUNDLED = Path(__file__).parent / "bundled"
GRAPHS = ("full", "none")
LONGEST = 2**31 - 2  # positions are 32-bit integers
NO_TOKEN = 0xFFFFFFFF  # in the output ring: the step's logits were not finite


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
        self._cached: list[int] = []  # tokens whose K/V the cache holds
        self._lock = threading.RLock()  # held while the device state changes, never while a caller has control
        self._stream = 0
        self._ring = self.model.workspace.out.numpy()
        self._ahead = 1 if self.device.type == "cuda" and self.backend == "triton" else 0
        if self.graph == "full":
            self.steps = StepGraphs(self.model)
        else:
            self.steps = EagerSteps(self.model, launcher(self.model) if self.backend == "triton" else refer)
        if self.device.type == "cuda":
            warm_up(self.model)  # nothing of it counts as cached

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
        model = make_model(config, weights, capacity, page=PAGE if backend == "triton" else None, shapes=shapes)
        return cls(model, tokenizer, backend, graph, plan, name, list(notes))

    def __repr__(self) -> str:
        facts = {"name": shown(self.name), "family": self.config.family, "backend": self.backend}
        return brief(self, self.model.weights.embed, **facts, graph=self.graph, capacity=self.capacity)

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
        started = time.perf_counter()
        params = self._params(params)
        flag("reuse_prefix", reuse_prefix)
        ids, chat = self._encode(prompt, template_variables)
        stop_ids = self._stop_ids(params)
        self._check_ids("logit_bias", params.logit_bias)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # An answer begins a text of its own; raw text and ids are continued, spaces and all.
        return self._generate(ids, () if chat else ids, replace(params, seed=seed), stop_ids, reuse_prefix, started)

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
            self._stream += 1
            self._cached = []
            self._begin(ids, 0, SamplingParams(temperature=0, seed=0), (), limit=len(ids) + 1)
            for row in logits:
                self._step("greedy")
                row.copy_(self.model.workspace.logits[0])
            self._check_status()
            self._cached = ids
        return logits

    def rewind(self, position: int, params: SamplingParams) -> None:
        """Put the state at `position` with whatever the cache holds, for benchmarks; `enqueue` then runs steps."""
        self._stream += 1
        self._cached = []
        self._begin([0] * (position + 1), position, params, (), limit=self.capacity + 1)

    def enqueue(self, params: SamplingParams) -> None:
        """Enqueue one step of the kind that `params` needs; returns before it has run on a GPU."""
        self._step(step_kind(params))

    def _step(self, kind: str) -> None:
        threads.use(self.threads)
        self.steps.replay(kind)

    @torch.inference_mode()
    def _begin(self, ids, position, params, stop_ids, limit) -> None:
        """Set the state for a request whose first step embeds ids[position]; no step may be in flight."""
        ws = self.model.workspace
        self._synchronize()
        row, samp = meta.request_rows(
            params, position=position, n_known=len(ids), limit=limit, stop_ids=stop_ids, seed=params.seed, page_row=0
        )
        ws.out.fill_(-1)
        ws.tokens[0, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        ws.samp[0] = samp
        if params.penalties:
            ws.counts.zero_()
            ws.counts[0, torch.tensor(sorted(set(ids)), device=self.device)] = 1
        if params.logit_bias:
            ws.bias.zero_()
            for token, value in params.logit_bias.items():
                ws.bias[0, token] = value
        ws.meta[0] = row

    def _prefill(self, ids: list[int], reuse_prefix: bool) -> int:
        """Fill the cache with all but the last token; returns how many of them were there already."""
        common = 0
        if reuse_prefix:
            pairs = zip(self._cached, ids[:-1])
            common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self._cached), len(ids) - 1))
        self._synchronize()
        self._cached = ids[:common]  # the rest counts once a step on it has given finite logits
        threads.use(self.threads)
        prefill(self.model, ids[common:-1], common)
        return common

    def _generate(self, ids, context, params, stop_ids, reuse_prefix, started) -> Iterator[Piece]:
        limit = min(len(ids) + (params.max_tokens or self.capacity), self.capacity + 1)
        kind = step_kind(params)
        steps = limit - len(ids)
        with self._lock:
            self._stream += 1
            stream = self._stream
            reused = self._prefill(ids, reuse_prefix)
            self._begin(ids, len(ids) - 1, params, stop_ids, limit)
            for _ in range(min(self._ahead, steps)):
                self._step(kind)

        detokenizer = self.tokenizer.detokenizer(context) if self.tokenizer else None
        stops = StopStrings(params.stop)
        done, first, finish, error = 0, None, "length", None
        held, embedded = ids[:-1], ids[-1]
        while done < steps:
            with self._lock:
                if self._stream != stream:
                    raise GenerationError("this stream was ended by a newer one of the same engine")
                if done + self._ahead < steps:
                    self._step(kind)
                token = self._await_token(done)
                logprobs = self._logprobs(done, params)
                drawn = token != NO_TOKEN
                # Attention multiplies masked values by 0, and 0 * NaN is NaN: nothing in the cache is above suspicion.
                held.append(embedded)
                self._cached = held if drawn else []
            now = time.perf_counter()
            first = first or now
            if not drawn:
                finish = "error"
                error = not_finite(done + 1, len(ids) + done - 1, self.model.weights.dtype)
                break
            done += 1
            embedded = token
            stopped = token in stop_ids
            text = "" if stopped or detokenizer is None else stops.push(detokenizer.push(token))
            yield Piece(token, text, logprobs)
            if stopped or stops.hit:
                finish = "stop"
                break
        now = time.perf_counter() if first is None else now
        tail = "" if detokenizer is None or stops.hit else stops.push(detokenizer.flush()) + stops.flush()
        decode_time = now - (first or now)
        rate = (done - 1) / decode_time if done > 1 and decode_time > 0 else 0.0
        yield Piece(
            None,
            tail,
            finish_reason=finish,
            usage=Usage(len(ids), reused, done),
            timings=Timings((first or now) - started, decode_time, rate),
            error=error,
        )

    def _await_token(self, step: int) -> int:
        """Poll the ring for the token of `step`; the device writes it there, no copy or synchronisation."""
        entry, polls = step % meta.RING, 0
        while (value := int(self._ring[0, entry])) >> 32 != step:
            polls += 1
            time.sleep(0)  # let the thread that draws the screen run
            if polls % 1024 == 0 and (self.device.type != "cuda" or torch.cuda.current_stream(self.device).query()):
                value = int(self._ring[0, entry])
                if value >> 32 != step:
                    raise GenerationError(f"step {step + 1} ended without a token")
        return value & 0xFFFFFFFF

    def _logprobs(self, step: int, params: SamplingParams) -> TokenLogprobs | None:
        if params.logprobs is None:
            return None
        ws, entry = self.model.workspace, step % meta.RING
        values = ws.out_logprobs[0, entry, : params.logprobs + 1].tolist()
        ids = ws.out_top_ids[0, entry, : params.logprobs].tolist()
        return TokenLogprobs(values[0], tuple(zip(ids, values[1:])))

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        own = () if params.ignore_eos else self.config.stop_ids
        stop_ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
        if len(stop_ids) > meta.MAX_STOP_IDS:
            raise ParameterError(
                f"stop_token_ids: at most {meta.MAX_STOP_IDS} with the model's own, got {len(stop_ids)}"
            )
        self._check_ids("stop_token_ids", params.stop_token_ids)
        return stop_ids

    def _check_ids(self, name: str, ids) -> None:
        for token in ids:
            if token >= self.config.vocab_size:
                raise ParameterError(f"{name}: token id {token} is not in the vocabulary of {self.config.vocab_size}")

    def _check_status(self) -> None:
        row = self.model.workspace.meta[0].tolist()
        if row[meta.STATUS] == meta.NAN:
            raise GenerationError(not_finite(row[meta.STEP], row[meta.POSITION], self.model.weights.dtype))

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def step_kind(params: SamplingParams) -> str:
    """The captured variant (decode.KINDS) that serves `params`."""
    if params.logprobs is not None:
        return "logprobs"
    return "greedy" if params.greedy else "sample"
