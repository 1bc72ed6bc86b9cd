"""Loaded: from a checkpoint, or weights, to a model on its device, and what was decided on the way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

import torch

from .arguments import function, shown
from .blocks.spec import ModelSpec
from .blocks.weights import Weights
from .checkpoint.hub import BUNDLED, resolve_model
from .checkpoint.load import load_config, load_weights
from .errors import EngineClosed, counted
from .layout import NGRAM
from .plan import placement, threads
from .plan.memory import MemoryPlan, allocating, plan_memory
from .serve.policy import PROMPT_MS, Policy
from .state.offload import Offload
from .step.model import DecodeModel, make_model
from .tensors import short_repr
from .text.tokenizer import Tokenizer
from .tuning.configs import PassConfigs


@dataclass
class Loaded:
    """What an engine is before it runs anything: a model, and how its passes will run."""

    model: DecodeModel
    tokenizer: Tokenizer | None
    backend: str
    graphs: placement.GraphPlan
    plan: MemoryPlan
    name: str
    notes: list[str] = field(default_factory=list)
    threads: int | None = None  # of the CPU, unless the user has chosen
    policy: Policy = Policy()

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
        kv_offload: float | str | None = None,
        kv_ring: int | None = None,
        weights_offload: float | None = None,
        graph: str = "full",
        graph_sizes: Sequence[int] | None = None,
        attention: str = "triton",
        chunk_tokens: int | None = None,
        max_queue: int | None = None,
        prompt_graph_max_tokens: int | None = None,
        prompt_graph_sizes: Sequence[int] | None = None,
        prompt_attention: str = "auto",
        prompt_ms: float = PROMPT_MS,
        prefix_sharing: bool = True,
        batch_invariant: bool = False,
        quantize: str | None = None,
        quantize_head: str | None = None,
        kv_dtype: str = "auto",
        speculate: str = "auto",
        speculate_ngram: tuple[int, int] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Self:
        """Load a checkpoint directory or Hugging Face id; None is the bundled model, and "bundled" where no such
        directory is.

        device: auto, cpu, cuda or cuda:N. backend: auto, triton or torch. dtype: auto (the checkpoint's; fp32 ones run
        in bf16 on a GPU; fp32 on a CPU), bfloat16, float16 or float32. max_seq_len: K/V positions of one request, None
        is the model's limit or what fits. slots: requests that run at a time. kv_tokens: K/V positions of all of them
        together, None is slots x max_seq_len or what fits. kv_offload: GiB of host memory for K/V beyond those, or
        auto, and kv_ring, the buffers through which they come; weights_offload: GiB of host memory for weights of the
        last layers; see docs/offload.md. graph: how passes run, see docs/graphs.md: full (each is one captured CUDA
        graph), piecewise (captured but for attention), none (launched one by one), full_decode_only or
        full_and_piecewise. graph_sizes: rows of the decode passes that are captured, ascending. attention: of these,
        triton, or torch, which no graph can hold. chunk_tokens: of prompts in one pass, None is 2,048, or 256 with
        batch_invariant. prompt_graph_sizes: tokens of the prompt passes that are captured, ascending, by default a
        schedule up to prompt_graph_max_tokens (2,048). prompt_attention: of these, auto, triton, flash or cudnn; see
        docs/prompts.md. prompt_ms: milliseconds that a pass may take which reads prompts while others decode.
        prefix_sharing: K/V of equal beginnings are computed once. batch_invariant: a request's logits have the same
        bits alone and in any company, see docs/sharing.md. max_queue: requests that may wait for a slot, None is any
        number. quantize, quantize_head: fp8, int8 or int4, what projections and LM head (or keep) become while they are
        loaded; kv_dtype: auto (the dtype), or fp8, in which twice as many fit; see docs/quantization.md. speculate:
        ngram (what may come next is guessed from the text itself, and verified), off, or auto: ngram on a GPU, off
        where that cannot be or does not pay; speculate_ngram: for ngram, which it asks for, the last tokens are looked
        for that stood there before, at most and at least so many, None is (8, 2); see docs/speculation.md.
        progress(done_bytes, total_bytes) is called while weights load. On a CPU the engine sets PyTorch's threads: one
        for a tiny model, else as many as there are free cores; a number that OMP_NUM_THREADS or torch.set_num_threads
        has given stays. Raises CheckpointError, DeviceError, ParameterError; each says what was expected.
        """
        graphs = dict(
            graph_sizes=graph_sizes, attention=attention, prompt_graph_max_tokens=prompt_graph_max_tokens,
            prompt_graph_sizes=prompt_graph_sizes, prompt_attention=prompt_attention, batch_invariant=batch_invariant,
        )  # fmt: skip
        placement.check_dtype(dtype)
        function("progress", progress)
        slots = placement.check_limits(slots, max_seq_len)
        policy = Policy(chunk_tokens, max_queue, prompt_ms, prefix_sharing, batch_invariant, speculate, speculate_ngram)
        chunk_tokens = policy.chunk_tokens
        place, backend = placement.resolve_device(device, backend)
        on_gpu = backend == "triton"
        planned = placement.plan_graphs(slots, chunk_tokens, on_gpu, on_gpu, graph=graph, **graphs)  # bad ones end here
        host, given = (kv_offload is not None, weights_offload is not None), policy.speculate_ngram is not None
        speculate, _ = placement.resolve_speculation(policy.speculate, planned, kv_dtype == "fp8", *host, given)
        policy = replace(policy, speculate=speculate)
        path = resolve_model(model)
        spec = placement.to_quantize(load_config(path), quantize, quantize_head, kv_dtype)
        tokenizer = Tokenizer.load(path)
        torch_dtype = placement.resolve_dtype(dtype, spec, place)
        support = placement.capture_support(backend, spec, torch_dtype, place)
        planned = placement.plan_graphs(slots, chunk_tokens, *support, graph=graph, **graphs)
        on_host = placement.plan_weights(spec, torch_dtype, weights_offload)
        kv = placement.plan_kv(
            spec, torch_dtype, place, backend, max_seq_len, slots, kv_tokens, chunk_tokens, planned.one_piece,
            kv_offload, kv_ring, batch_invariant, on_host, policy.speculates,
        )  # fmt: skip
        if on_host:
            kv.notes.append(f"the weights of the last {counted(on_host, 'layer')} come from the host in every pass")
        cores = threads.FreeCores()
        weights = load_weights(path, spec, place, torch_dtype, progress, on_host)
        name = BUNDLED.name if model is None else str(model)
        engine = cls.build(
            spec, weights, tokenizer, kv.capacity, backend, graph, plan=kv.memory, name=name, notes=kv.notes,
            slots=slots, pages=kv.pages, page=kv.page, offload=kv.offload, **asdict(policy) | graphs,
        )  # fmt: skip
        engine.threads = threads.choose(kv.memory.weights, cores) if place.type == "cpu" else None
        return engine

    @classmethod
    def build(
        cls,
        spec: ModelSpec,
        weights: Weights,
        tokenizer: Tokenizer | None,
        capacity: int,
        backend: str,
        graph: str = "full",
        plan: MemoryPlan | None = None,
        name: str = "",
        notes: Sequence[str] = (),
        configs: Mapping[int, PassConfigs] | None = None,
        slots: int = 1,
        pages: int | None = None,
        page: int | None = None,
        offload: Offload | None = None,
        **more,
    ) -> Self:
        """Build an engine from weights that are on their device already; `load` and the benchmarks end here.

        Args:
            configs: launch configs by rows, by default those chosen for the GPU.
            pages: of the pool, by default what all slots can have.
            page: positions in one page.
            offload: pages of host memory.
            more: what Policy and placement.plan_graphs take.
        """
        slots, policy = placement.check_limits(slots), Policy.out_of(more)
        invariant = policy.batch_invariant
        page = page or placement.page_size(backend, slots, invariant)
        chunk_tokens = policy.chunk(slots, capacity, page or capacity)
        placement.check_pages(pages, page or capacity, capacity, slots, offload, chunk_tokens if invariant else 1)
        support = placement.capture_support(backend, spec, weights.dtype, weights.device)
        planned = placement.plan_graphs(slots, chunk_tokens, *support, graph=graph, batch_invariant=invariant, **more)
        host = offload is not None, weights.host is not None
        given = policy.speculate_ngram is not None
        speculate, _ = placement.resolve_speculation(policy.speculate, planned, spec.fp8_kv, *host, given)
        policy = replace(policy, speculate=speculate)
        how = slots, chunk_tokens, planned.one_piece, 0, policy.speculates, invariant
        plan = plan or plan_memory(spec, weights.dtype, weights.device, *how)
        with allocating(capacity, weights.device):
            sizes = pages, max(slots, *planned.sizes), chunk_tokens
            model = make_model(
                spec, weights, capacity, slots, page, configs, *sizes, batch_invariant=invariant, offload=offload,
                speculate=policy.speculates, ngram=policy.speculate_ngram or NGRAM, one_piece=planned.one_piece,
            )  # fmt: skip
        notes = [*notes, *filter(None, [planned.note])]
        return cls(model, tokenizer, backend, planned, plan, name, notes, None, policy)

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
    def config(self) -> ModelSpec:
        return self._open().spec

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
        """K/V positions of all requests together on the device."""
        return self._open().kv.positions

    def _open(self) -> DecodeModel:
        if self.model is None:
            raise EngineClosed
        return self.model
