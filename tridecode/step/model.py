"""DecodeModel: everything one token step reads and writes, at addresses that never change."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ..blocks.rope import rope_tables
from ..blocks.weights import Weights
from ..kernels.attention import prompt_attention_hopper
from ..kernels.attention.attention import ATTENTION
from ..kernels.attention.attention_queries import ATTENTION_QUERIES
from ..kernels.attention.attention_rows import ATTENTION_ROWS, AttentionRowsConfig
from ..kernels.attention.prompt_attention import PromptAttentionConfig
from ..kernels.op import Op
from ..kernels.transfer.fetch import FetchConfig
from ..layout import NGRAM
from ..models.config import ModelConfig
from ..state.kv import KVCache, make_kv_cache
from ..state.offload import Offload
from ..tensors import short_repr
from ..tuning.choose import (
    attention_rows_shape,
    choose_shapes,
    fp8_kv_shape,
    invariant_shapes,
    prompt_attention_shape,
    queries_shape,
)
from ..tuning.few_bits import few_bits, packings
from ..tuning.shapes import StepShapes
from ..tuning.tuned import with_table
from .dispatch import most_queries
from .workspace import (
    PromptBuffers,
    Workspace,
    first_rows,
    make_prompt_buffers,
    make_states,
    make_workspace,
    named_tensors,
)

PROMPT_SHAPE = PromptAttentionConfig()


@dataclass(frozen=True)
class DecodeModel:
    """cos, sin: [capacity, head_dim / 2] fp32; `pdl` where the GPU has programmatic dependent launch.

    shapes_by_rows: launch shapes for passes of up to so many rows; those for the most serve any above. fixed_chunk: in
    the batch-invariant mode the rows of every prompt pass, in which a position has the row of its number modulo them; a
    prompt's last token is then always a decode pass's. 0: prompt passes have the rows that come.
    verify: what passes that verify drafts see, None where there are none; its meta and samp are its own, all else is
    the workspace's. requests: of such a pass (see of_queries) the workspace with the rows of the requests themselves.
    ngram: how many tokens are to agree where drafts are found, at most and at least. gpu: (compute capability,
    multiprocessors), (0, 0) if there is none.
    """

    config: ModelConfig
    weights: Weights
    kv: KVCache
    cos: torch.Tensor
    sin: torch.Tensor
    workspace: Workspace
    prompt: PromptBuffers
    shapes_by_rows: dict[int, StepShapes]
    pdl: bool
    prompt_shape: PromptAttentionConfig = PROMPT_SHAPE
    fetch_shape: FetchConfig = FetchConfig()
    fixed_chunk: int = 0
    verify: Workspace | None = None
    requests: Workspace | None = None
    ngram: tuple[int, int] = NGRAM
    gpu: tuple[int, int] = (0, 0)

    def __repr__(self) -> str:
        facts = {"family": self.config.family, "layers": self.config.num_layers, "capacity": self.kv.capacity}
        return short_repr(self, self.weights.embed, **facts)

    @property
    def device(self) -> torch.device:
        return self.weights.device

    @property
    def scale(self) -> float:
        """Softmax scale."""
        return self.config.head_dim**-0.5

    @property
    def rows(self) -> int:
        """Of the largest pass."""
        return len(self.workspace.meta)

    @cached_property
    def shapes_for(self) -> int:
        """The rows for which a pass of all has launch shapes."""
        fitting = [rows for rows in self.shapes_by_rows if rows >= self.rows]
        return min(fitting, default=max(self.shapes_by_rows))

    @property
    def queries(self) -> int:
        """Rows of each request in a pass."""
        return 1 if self.requests is None else self.rows // len(self.requests.meta)

    @cached_property
    def shapes(self) -> StepShapes:
        """Of a pass of all rows."""
        shapes = self.shapes_by_rows[self.shapes_for]
        if self.queries == 1:
            return shapes
        attention = shapes.attention
        if not self.writes_first:
            attention = queries_shape(self.config, self.rows // self.queries, self.queries, *self.gpu)
        elif isinstance(attention, AttentionRowsConfig):
            attention = replace(attention, early=False)
        else:
            attention = replace(attention_rows_shape(self.config, self.weights.dtype, self.rows), early=False)
        return replace(shapes, attention=attention)

    @property
    def writes_first(self) -> bool:
        """K and V enter the cache before attention, in which each row of a request stands for itself, as it must where
        its bits are those that it has alone; elsewhere all are attended together, if their tiles fit."""
        dim, group = self.config.head_dim, self.config.num_heads // self.config.num_kv_heads
        fits = self.queries * group <= 32 and dim in (64, 128)
        alone = self.fixed_chunk > 0 or not fits or self.weights.dtype == torch.float32
        return self.queries > 1 and alone

    @property
    def prompt_pair_flops(self) -> int:
        """FLOPs of attention between one prompt token and one position, in all layers but the last."""
        return 4 * self.config.q_size * (self.config.num_layers - 1)

    @property
    def hosted(self) -> bool:
        """Whether passes read what lies in the host's memory."""
        return self.kv.rings or self.weights.host is not None

    @property
    def attention(self) -> Op:
        if self.queries > 1 and not self.writes_first:
            return ATTENTION_QUERIES
        return ATTENTION_ROWS if isinstance(self.shapes.attention, AttentionRowsConfig) else ATTENTION

    def expands(self, q: torch.Tensor, layer: int) -> bool:
        """Whether attention of a prompt pass with these queries wants K/V in 8 bits expanded to bf16 first."""
        keys, window, multiprocessors = self.prompt.kv[:, 0], self.config.window(layer), self.prompt_shape.hopper
        return keys.numel() > 0 and prompt_attention_hopper.fits(q, keys, window, multiprocessors)

    def of_rows(self, rows: int) -> "DecodeModel":
        """The same model for passes of its first `rows` rows."""
        return self if rows == self.rows else replace(self, workspace=first_rows(self.workspace, rows))

    def of_queries(self, requests: int, queries: int) -> "DecodeModel":
        """The same model for passes of its first rows, so many for each request, which verify drafts."""
        own = first_rows(self.workspace, requests)
        return replace(
            self, workspace=own if queries == 1 else first_rows(self.verify, requests * queries), requests=own
        )

    def addresses(self) -> dict[str, int]:
        """Address of every tensor that a captured step holds."""
        tensors = {f"weights.{name}": t for name, t in self.weights.tensors().items()}
        tensors |= {f"workspace.{name}": t for name, t in named_tensors(self.workspace).items()}
        if self.verify:
            tensors |= {f"verify.{name}": getattr(self.verify, name) for name in ("meta", "samp")}
        tensors |= {f"prompt.{name}": t for name, t in named_tensors(self.prompt).items()}
        tensors |= {"pool": self.kv.pool, "page_table": self.kv.page_table, "cos": self.cos, "sin": self.sin}
        if self.kv.offload:
            tensors |= {name: getattr(self.kv.offload, name) for name in ("cells", "host", "tables", "fetched")}
        if host := self.weights.host:
            tensors |= {"host_layers": host.source[0], "places": host.places}
        return {name: t.data_ptr() for name, t in tensors.items()}


def shapes_of(
    config: ModelConfig, weights: Weights, capability: int, gpu: str | None = None, batch_invariant: bool = False
) -> dict[int, StepShapes]:
    """Launch shapes by rows, for these weights and K/V on that GPU (see choose_shapes); with its name those of the
    user's own table, if there are."""
    known = config, weights.dtype, capability
    chosen = invariant_shapes(*known) if batch_invariant else choose_shapes(*known)
    found = few_bits(chosen, weights, capability, batch_invariant)
    if gpu is not None and not batch_invariant:
        found = with_table(found, config, weights.dtype, gpu, packings(weights, capability))
    if config.fp8_kv:
        of = {rows: fp8_kv_shape(shapes.attention, capability) for rows, shapes in found.items()}
        found = {rows: replace(shapes, attention=of[rows]) for rows, shapes in found.items()}
    return found


def gpu_of(device: torch.device) -> tuple[int, int, str | None]:
    """(compute capability, multiprocessors, name); 0, 0 and None if it is none."""
    if device.type != "cuda":
        return 0, 0, None
    facts = torch.cuda.get_device_properties(device)
    return 10 * facts.major + facts.minor, facts.multi_processor_count, facts.name


def expands_kv(config: ModelConfig, device: torch.device, batch_invariant: bool, one_piece: bool) -> bool:
    """Whether prompts have a layer's K/V in bf16 beside the cache's in 8 bits: what the kernel for Hopper attends to.
    one_piece: prompts are attended to by torch."""
    if not config.fp8_kv or one_piece:
        return False
    capability, multiprocessors, _ = gpu_of(device)
    return prompt_attention_shape(capability, multiprocessors, batch_invariant, config.fp8_kv).hopper > 0


def make_model(
    config: ModelConfig, weights: Weights, capacity: int, slots: int = 1, page: int | None = None,
    shapes: dict[int, StepShapes] | None = None, pages: int | None = None, rows: int | None = None,
    prompt_rows: int = 2048, batch_invariant: bool = False, offload: Offload | None = None, speculate: bool = False,
    ngram: tuple[int, int] = NGRAM, one_piece: bool = False,
) -> DecodeModel:
    """Allocate the state of a model whose weights are loaded, for `slots` of `capacity` K/V positions.

    page, pages, offload: see make_kv_cache. shapes: by rows, by default those chosen for the GPU. rows: of the largest
    pass, by default as many as slots. prompt_rows: of the largest prompt pass, those that decode beside it not counted;
    with batch_invariant of all. speculate: passes can verify drafts; ngram: see DecodeModel. one_piece: prompts are
    attended to by torch, for which no K/V are expanded.
    """
    device, dtype = weights.device, weights.dtype
    cos, sin = rope_tables(config, capacity, device)
    capability, multiprocessors, gpu = gpu_of(device)
    prompt_shape = prompt_attention_shape(capability, multiprocessors, batch_invariant, config.fp8_kv)
    if not batch_invariant:
        prompt_rows = min(prompt_rows, slots * capacity)
    rows = rows or slots
    verifying = verify_rows(rows) if speculate else 0
    workspace = make_workspace(config, capacity, device, dtype, slots, max(rows, verifying))
    meta, samp = make_states(verifying, device)
    kv = make_kv_cache(config, capacity, device, dtype, slots, page, pages, offload)
    if kv.rings:  # then attention waits for more than the kernel before
        prompt_shape = replace(prompt_shape, dependent=False)
    expanded = len(kv.pool) if expands_kv(config, device, batch_invariant, one_piece) else 0  # pages
    return DecodeModel(
        config=config,
        weights=weights,
        kv=kv,
        cos=cos,
        sin=sin,
        workspace=first_rows(workspace, rows) if speculate else workspace,
        prompt=make_prompt_buffers(config, prompt_rows + rows, device, dtype, prompt_shape, expanded, kv.page),
        shapes_by_rows=shapes or shapes_of(config, weights, capability, gpu, batch_invariant),
        pdl=capability >= 90,
        prompt_shape=prompt_shape,
        fixed_chunk=prompt_rows if batch_invariant else 0,
        verify=replace(first_rows(workspace, verifying), meta=meta, samp=samp) if speculate else None,
        ngram=ngram,
        gpu=(capability, multiprocessors),
    )


def verify_rows(requests: int) -> int:
    """Of the largest pass that verifies drafts of at most so many requests."""
    return max(each * most_queries(each) for each in range(1, requests + 1) if most_queries(each) > 1)
