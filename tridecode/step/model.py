"""DecodeModel: all tensors that the passes read and write, at addresses that never change."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from ..blocks.attention import Attention
from ..blocks.block import AdaptedLinear, AttentionPlan, Block, LoadedLayer, Run
from ..blocks.moe import MoE
from ..blocks.rope import RopeConfig, rope_tables
from ..blocks.spec import NORM_NAMES, ModelSpec
from ..blocks.weights import Weights
from ..kernels.attention import prompt_attention_hopper
from ..kernels.attention.arguments import KVLayer, Rope, Scratch
from ..kernels.attention.attention import ATTENTION
from ..kernels.attention.attention_queries import ATTENTION_QUERIES
from ..kernels.attention.attention_rows import ATTENTION_ROWS, AttentionRowsConfig
from ..kernels.attention.prompt_attention import PromptAttentionConfig
from ..kernels.delta.arguments import DraftRows, RecordLayer
from ..kernels.delta.delta_chunks import DeltaChunksConfig
from ..kernels.delta.delta_decode import DeltaConfig
from ..kernels.delta.prompt_tables import PromptTables
from ..kernels.device import Device, device_of
from ..kernels.linear.matmul_hopper import HOPPER as MATMUL_HOPPER
from ..kernels.linear.project import MAX_ROWS, Case
from ..kernels.linear.torch_linear import TORCH, PromptScratch
from ..kernels.linear.weight import LoadedLinear
from ..kernels.moe.config import ExpertsConfig
from ..kernels.transfer.fetch import FetchConfig
from ..layout import NGRAM
from ..state.adapters import AdapterPool, make_adapters
from ..state.kv import KVCache, make_kv_cache
from ..state.offload import Offload
from ..state.records import RecordPool, make_records
from ..tensors import short_repr
from ..tuning.adapters import shrink_config
from ..tuning.attention import attention_rows_config, prompt_attention_config, queries_config
from ..tuning.configs import HOPPER, AttentionCase, Choice, PassConfigs
from ..tuning.delta import delta_config, delta_prompt_configs
from ..tuning.experts import experts_config
from ..tuning.resolve import resolve_configs
from ..tuning.rules import choose
from . import hosted
from .dispatch import max_queries
from .workspace import (
    PromptBuffers,
    Workspace,
    first_rows,
    make_prompt_buffers,
    make_states,
    make_workspace,
    named_tensors,
)

FEW_ROWS = 8, 16, 32, MAX_ROWS  # Rows of prompt passes that multiply by packed weights.
IN_TORCH = Choice(TORCH, None)  # The choice for most linears of prompt passes.


@dataclass(frozen=True)
class DecodeModel:
    """A model on its device with the state of its requests, for passes of up to `rows` rows.

    It is the PassState (blocks/block.py) of a decode pass.

    Args:
        ropes: rotary embedding and head size -> cos and sin, fp32 [capacity, head_dim / 2].
        configs_by_rows: number of rows -> launch configs of passes with up to that number of rows. The configs of the
            largest number also serve larger passes.
        fixed_chunk: number of rows of every prompt pass in batch-invariant mode. The token at position p is in
            row p % fixed_chunk, and a decode pass computes the last token of a prompt. With 0, prompt passes have the
            number of rows that they need.
        verify: workspace of passes that verify drafts, with its own meta and samp. None without drafts.
        requests: in a pass that verifies drafts (for_queries), the workspace with one row for each request.
        ngram: largest and smallest number of tokens that must match for a draft.
        recurrent: the records of layers with recurrent state, or None.
        pool: the adapters, or None.
        adapter_configs: as configs_by_rows, for passes with adapters. Empty without a pool.
        adapting: whether the passes have adapters.
    """

    spec: ModelSpec
    weights: Weights
    kv: KVCache
    ropes: Mapping[tuple[RopeConfig, int], tuple[torch.Tensor, torch.Tensor]]
    workspace: Workspace
    prompt: PromptBuffers
    configs_by_rows: Mapping[int, PassConfigs]
    gpu: Device
    prompt_config: PromptAttentionConfig
    fetch_config: FetchConfig = FetchConfig()
    fixed_chunk: int = 0
    verify: Workspace | None = None
    requests: Workspace | None = None
    ngram: tuple[int, int] = NGRAM
    recurrent: RecordPool | None = None
    pool: AdapterPool | None = None
    adapter_configs: Mapping[int, PassConfigs] = field(default_factory=dict)
    adapting: bool = False

    def __repr__(self) -> str:
        facts = {"family": self.spec.family, "layers": self.spec.num_layers, "capacity": self.kv.capacity}
        return short_repr(self, self.weights.embed, **facts)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.weights.device

    @property
    def pdl(self) -> bool:
        """Whether the GPU has programmatic dependent launch."""
        return self.gpu.capability >= 90

    @property
    def rows(self) -> int:
        """Rows of the largest pass."""
        return len(self.workspace.meta)

    @property
    def queries(self) -> int:
        """Rows of each request in a pass."""
        return 1 if self.requests is None else self.rows // len(self.requests.meta)

    @property
    def hosted(self) -> bool:
        """Whether passes read K/V or weights in host memory."""
        return self.kv.rings or self.weights.host is not None

    @cached_property
    def layers(self) -> tuple[LoadedLayer, ...]:
        """The layers with their weights. Layers with pages are numbered, and so are those with recurrent state."""
        loaded, pages, recurrent = [], 0, 0
        for i, (layer, (linears, weights)) in enumerate(zip(self.spec.layers, self.weights.layers)):
            has_pages, recurs = layer.pages() is not None, layer.recurrent() is not None
            numbers = pages if has_pages else None, recurrent if recurs else None
            loaded.append(LoadedLayer(i, linears, weights, *numbers))
            pages, recurrent = pages + has_pages, recurrent + recurs
        return tuple(loaded)

    def norms(self, index: int) -> list[torch.Tensor]:
        """Return the weights of the norms before the blocks of a layer."""
        return [self.weights.layers[index].weights[name] for name, _ in zip(NORM_NAMES, self.spec.layers[index].blocks)]

    def next_norms(self, index: int) -> list[torch.Tensor]:
        """Return the weights of the norms after the blocks of a layer."""
        last = index + 1 == self.spec.num_layers
        return [*self.norms(index)[1:], self.weights.final_norm if last else self.norms(index + 1)[0]]

    # ---- PassState of a decode pass

    @property
    def meta(self) -> torch.Tensor:
        """State of the rows, int32 [rows, META_WIDTH]."""
        return self.workspace.meta

    @property
    def scratch(self):
        """Scratch of the linears."""
        return self.workspace.split

    def buffers(self, block: Block) -> Mapping[str, torch.Tensor]:
        """Return the buffers that a block declares, by name."""
        return self.workspace.blocks[block]

    def choice(self, linear: LoadedLinear, epilogue: str) -> Choice:
        """Return the kernel and the launch config of a linear."""
        # This key is hashed faster than a LinearCase. Each launch of a pass without a graph needs it.
        key = id(linear), epilogue
        if (choice := self._choices.get(key)) is None:
            choice = self._choices[key] = self.configs.linears[linear_case(linear, epilogue)]
        return choice

    def adapters(self, layer: LoadedLayer, name: str) -> AdaptedLinear | None:
        """Return the adapters of a linear. None in passes without adapters."""
        if not self.adapting:
            return None
        assert self.pool is not None
        config = shrink_config(layer.linears[name].in_features, self.rows, self.fixed_chunk > 0)
        return AdaptedLinear(self.pool.linear(layer.index, name, self.rows, False, config.split), config)

    def experts(self, block: MoE, layer: LoadedLayer) -> ExpertsConfig:
        """Return the launch configs of a mixture of experts in a layer."""
        size, packed = self.weights.dtype.itemsize, block.packed(layer)
        return experts_config(block.sizes, self.rows, self.gpu, self.fixed_chunk > 0, itemsize=size, packed=packed)

    def kv_layer(self, layer: LoadedLayer) -> KVLayer:
        """Return K and V of a layer."""
        at = layer.page_index
        return KVLayer(self.kv.tables[at], self.kv.k[at], self.kv.v[at])

    def rope(self, block: Attention, layer: LoadedLayer) -> Rope:
        """Return the rotary embedding and the norms of a layer's attention."""
        cos, sin = self.ropes[block.rope, block.head_dim]
        return Rope(cos, sin, layer.weights.get("q_norm"), layer.weights.get("k_norm"), block.eps)

    def attention(self, block: Attention) -> AttentionPlan:
        """Return the kernel and the launch config of a block's attention."""
        return self._plans[block]

    def records(self, layer: LoadedLayer) -> RecordLayer:
        """Return the records of a layer, which store its states."""
        assert self.recurrent is not None and layer.recurrent is not None
        return self.recurrent.layers[layer.recurrent]

    def draft_rows(self, layer: LoadedLayer) -> DraftRows | None:
        """Return the updates of a layer's recurrent state by drafts. None if the engine has no drafts."""
        assert self.recurrent is not None and layer.recurrent is not None
        return self.recurrent.drafts[layer.recurrent] if self.recurrent.drafts else None

    @property
    def delta_config(self) -> DeltaConfig:
        """Launch config of gated delta net layers."""
        return delta_config(self.queries)

    def wait_for_pages(self, run: Run, layer: LoadedLayer) -> None:
        """List the wait for the layer's pages, if they are in host memory."""
        hosted.pages_fetched(run, self, layer.page_index)

    def fetch_next_pages(self, run: Run, layer: LoadedLayer) -> None:
        """List the fetch of a later layer's pages, if they are in host memory."""
        hosted.next_pages(run, self, self.meta, layer.page_index, self.spec.page_layers)

    # ----

    @cached_property
    def configs_for(self) -> int:
        """Number of rows whose launch configs serve a pass of all rows."""
        fitting = [rows for rows in self.configs_by_rows if rows >= self.rows]
        return min(fitting, default=max(self.configs_by_rows))

    @property
    def configs(self) -> PassConfigs:
        """Launch configs of a pass of all rows."""
        return (self.adapter_configs if self.adapting else self.configs_by_rows)[self.configs_for]

    @property
    def adapter_forms(self) -> tuple[bool, ...]:
        """The forms of passes: without adapters, with adapters, or both.

        In batch-invariant mode all passes have the same form, because the kernels of the two forms may round
        differently.
        """
        return (False,) if self.pool is None else (True,) if self.fixed_chunk else (False, True)

    @property
    def reads_packed(self) -> bool:
        """Whether prompt passes of few rows can multiply by packed weights without dequantizing them first.

        The kernels read tiles of up to MAX_ROWS rows. They were measured on Hopper.
        """
        bf16 = self.weights.dtype == torch.bfloat16 and self.spec.quantization is not None
        measured = self.gpu.capability == HOPPER and self.prompt.rows >= MAX_ROWS
        return bf16 and measured and not self.fixed_chunk and not self.adapting

    def prompt_rows(self, rows: int) -> int:
        """Return `rows`, or the next number of rows for which prompt passes with packed weights have kernels."""
        if not self.reads_packed or rows > MAX_ROWS:
            return rows
        return next(size for size in FEW_ROWS if size >= rows)

    def with_adapters(self, adapting: bool = True) -> "DecodeModel":
        """Return the same model for passes with adapters, or without them."""
        return self if adapting == self.adapting else replace(self, adapting=adapting)

    @property
    def cases(self) -> dict[str, Case]:
        """Name of each linear -> the case that decides its kernel, of the first layer that has the linear."""
        return linear_cases(self.spec, self.weights)

    @cached_property
    def _choices(self) -> dict[tuple[int, str], Choice]:
        return {}

    @cached_property
    def _plans(self) -> dict[Block, AttentionPlan]:
        return {block: self._plan(block) for block in self.spec.blocks() if isinstance(block, Attention)}

    def _plan(self, block: Attention) -> AttentionPlan:
        case = attention_case(block, self.weights.dtype, self.spec.fp8_kv)
        config = self.configs.attention[case]
        if self.queries > 1 and not self._row_by_row(block):
            requests = self.rows // self.queries
            return AttentionPlan(ATTENTION_QUERIES, queries_config(case, requests, self.queries, self.gpu))
        if self.queries > 1:
            config = replace(rows_config(config, case, self.rows, self.gpu), early=False)
        op = ATTENTION_ROWS if isinstance(config, AttentionRowsConfig) else ATTENTION
        return AttentionPlan(op, config, self.queries > 1)

    def _row_by_row(self, block: Attention) -> bool:
        """Return whether attention computes each row of a request separately, after a launch that writes K and V.

        It does so in batch-invariant mode, in which a row must not depend on other rows, and if a tile would not fit.
        """
        fits = self.queries * block.group <= 32 and block.head_dim in (64, 128)
        return self.fixed_chunk > 0 or not fits or self.weights.dtype == torch.float32

    @cached_property
    def _prompt_mixers(self) -> Mapping[Block, int]:
        """The mixers of a prompt pass and the number of layers that have each, without a last layer that is cut."""
        layers = self.spec.layers[: -1 if self.spec.layers[-1].mixer.cuts_prompt else None]
        return Counter(layer.mixer for layer in layers)

    def prompt_attention_flops(self, start: int, tokens: int) -> int:
        """Return the floating-point operations of attention in a prompt pass of `tokens` tokens from a position."""
        mixers = self._prompt_mixers.items()
        return sum(count * mixer.attention_flops(start, start + tokens) for mixer, count in mixers)

    def for_rows(self, rows: int) -> "DecodeModel":
        """Return the same model for passes of its first `rows` rows."""
        return self if rows == self.rows else replace(self, workspace=first_rows(self.workspace, rows))

    def for_queries(self, requests: int, queries: int) -> "DecodeModel":
        """Return the same model for passes that verify drafts: `queries` rows of each of the first requests."""
        own = first_rows(self.workspace, requests)
        if queries == 1:
            return replace(self, workspace=own, requests=own)
        assert self.verify is not None
        return replace(self, workspace=first_rows(self.verify, requests * queries), requests=own)

    def addresses(self) -> dict[str, int]:
        """Return the address of every tensor that captured passes use."""
        tensors = {f"weights.{name}": t for name, t in self.weights.tensors().items()}
        tensors |= {f"workspace.{name}": t for name, t in named_tensors(self.workspace).items()}
        if self.verify:
            tensors |= {f"verify.{name}": getattr(self.verify, name) for name in ("meta", "samp")}
        tensors |= {f"prompt.{name}": t for name, t in named_tensors(self.prompt).items()}
        tensors |= {"pool": self.kv.pool, "page_table": self.kv.page_table}
        for i, tables in enumerate(self.ropes.values()):
            tensors |= {f"rope.{i}.{name}": t for name, t in zip(("cos", "sin"), tables)}
        if self.recurrent:
            tensors |= {f"records.{name}": t for name, t in self.recurrent.tensors().items()}
        if self.kv.offload:
            tensors |= {name: getattr(self.kv.offload, name) for name in ("cells", "host", "tables", "fetched")}
        if self.pool:
            tensors |= {f"adapters.{name}": t for name, t in self.pool.tensors().items()}
        if host := self.weights.host:
            tensors |= {"host_layers": host.source[0], "places": host.places}
        return {name: t.data_ptr() for name, t in tensors.items()}


@dataclass(frozen=True)
class PromptState:
    """The PassState (blocks/block.py) of a prompt pass.

    Args:
        own: the activations of the pass.
        decoding: the model for the decoding rows, which are the first rows of the pass. None without such rows.
        fetched: number of layers whose pages the pass reads.
    """

    model: DecodeModel
    own: PromptBuffers
    decoding: DecodeModel | None
    fetched: int

    @property
    def meta(self) -> torch.Tensor:
        """State of rows that run, for kernels of few rows."""
        return self.own.meta

    @property
    def scratch(self) -> PromptScratch:
        """Scratch of the linears."""
        return PromptScratch(self.own.dequantized, self.own.arrived)

    @property
    def chunks(self) -> torch.Tensor:
        """Table of chunks, int32 [MAX_CHUNKS, CHUNK_WIDTH]."""
        return self.own.chunks

    @property
    def delta(self) -> torch.Tensor:
        """Output of a block, which the next norm adds to the residual stream."""
        return self.own.delta

    @property
    def tables(self) -> PromptTables:
        """Tables of the pass for layers with recurrent state."""
        return PromptTables(self.own.chunks, self.own.records, self.own.snapshots)

    @property
    def delta_configs(self) -> tuple[DeltaChunksConfig, DeltaChunksConfig]:
        """Launch configs of delta_chunks and delta_scan."""
        return delta_prompt_configs(self.model.gpu)

    def records(self, layer: LoadedLayer) -> RecordLayer:
        """Return the records of a layer, which store its states."""
        return self.model.records(layer)

    @property
    def attention_config(self) -> PromptAttentionConfig:
        """Launch config of attention."""
        return self.model.prompt_config

    @property
    def attention_scratch(self) -> Scratch:
        """Scratch of attention."""
        return Scratch(self.own.partial, self.own.lse, self.own.counter)

    def buffers(self, block: Block) -> Mapping[str, torch.Tensor]:
        """Return the buffers that a block declares, by name."""
        return self.own.blocks[block]

    def choice(self, linear: LoadedLinear, epilogue: str) -> Choice:
        """Return torch's matrix product, or a kernel of decode passes for few rows and a packed weight.

        Torch needs the weight in bf16, which takes several times as long to write and read as the packed weight.
        """
        model, rows = self.model, len(self.own.hidden)
        if linear.packed is None or rows > MAX_ROWS or not model.reads_packed:
            return IN_TORCH
        choice = choose(linear_case(linear, epilogue), rows, model.gpu)
        # Other kernels read all activations again for each 16 rows of the weight.
        return choice if choice.kernel is MATMUL_HOPPER or rows <= 16 else IN_TORCH

    def adapters(self, layer: LoadedLayer, name: str) -> AdaptedLinear | None:
        """Return the adapters of a linear. None in a pass without adapters."""
        if not self.model.adapting:
            return None
        assert self.model.pool is not None
        rows = len(self.own.hidden)
        config = shrink_config(layer.linears[name].in_features, rows, self.model.fixed_chunk > 0, prompt=True)
        return AdaptedLinear(self.model.pool.linear(layer.index, name, rows, True, config.split), config)

    def experts(self, block: MoE, layer: LoadedLayer) -> ExpertsConfig:
        """Return the launch configs of a mixture of experts in a layer."""
        model, rows = self.model, len(self.own.hidden)
        size, packed = model.weights.dtype.itemsize, block.packed(layer)
        return experts_config(block.sizes, rows, model.gpu, model.fixed_chunk > 0, True, size, packed)

    def kv_layer(self, layer: LoadedLayer) -> KVLayer:
        """Return K and V of a layer."""
        return self.model.kv_layer(layer)

    def rope(self, block: Attention, layer: LoadedLayer) -> Rope:
        """Return the rotary embedding and the norms of a layer's attention."""
        return self.model.rope(block, layer)

    def expanded(self, block: Attention, q: torch.Tensor, kv: KVLayer) -> KVLayer | None:
        """Return the buffers to which K and V of 8 bits are expanded for attention with these queries.

        None if attention reads the 8 bits itself.
        """
        if not self.own.kv.numel():
            return None
        keys, values = self.own.kv.unbind(1)
        reads = prompt_attention_hopper.fits(q, keys, block.window, self.attention_config.hopper)
        return kv._replace(k=keys, v=values) if reads else None

    def wait_for_pages(self, run: Run, layer: LoadedLayer) -> None:
        """List the wait for the layer's pages, if they are in host memory."""
        hosted.pages_fetched(run, self.model, layer.page_index)

    def fetch_next_pages(self, run: Run, layer: LoadedLayer) -> None:
        """List the fetch of a later layer's pages, if they are in host memory."""
        hosted.next_pages(run, self.model, None, layer.page_index, self.fetched)


def rows_config(config, case: AttentionCase, rows: int, gpu: Device) -> AttentionRowsConfig:
    """Return the config of attention that computes each row separately, `config` itself if it is of that type."""
    return config if isinstance(config, AttentionRowsConfig) else attention_rows_config(case, rows, gpu)


def rope_keys(spec: ModelSpec) -> list[tuple[RopeConfig, int]]:
    """Return the distinct rotary embeddings, each with the head dimension that it rotates."""
    attention = [block for block in spec.blocks() if isinstance(block, Attention)]
    return list(dict.fromkeys((block.rope, block.head_dim) for block in attention))


def attention_case(block: Attention, dtype: torch.dtype, fp8: bool) -> AttentionCase:
    """Return the case that decides the launch config of a block's attention."""
    return AttentionCase(block.heads, block.kv_heads, block.head_dim, dtype, fp8)


def linear_case(linear: LoadedLinear, epilogue: str) -> Case:
    """Return the case that decides the kernel of a linear."""
    return Case(linear.out_features, linear.in_features, linear.packed or linear.weight.dtype, epilogue)


def linear_cases(spec: ModelSpec, weights: Weights) -> dict[str, Case]:
    """Return the cases of all linears by name, without those of experts.

    If layers differ, the name of a later case contains its layer.
    """
    cases: dict[str, Case] = {}
    for index, (layer, loaded) in enumerate(zip(spec.layers, weights.layers)):
        for linear in (each for each in layer.linears() if not each.experts):
            case = linear_case(loaded.linears[linear.name], linear.epilogue)
            if cases.setdefault(linear.name, case) != case and case not in cases.values():
                cases[f"{linear.name} of layer {index}"] = case
    return cases | {spec.lm_head.name: linear_case(weights.lm_head, spec.lm_head.epilogue)}


def choose_configs(
    spec: ModelSpec, weights: Weights, gpu: Device, batch_invariant: bool = False, user_table: bool = False,
    adapters: bool = False,
) -> dict[int, PassConfigs]:  # fmt: skip
    """Choose kernels and launch configs for all linears and attention of a model, by rows of a pass.

    Args:
        adapters: the linears of layers have adapters.
    """
    cases = linear_cases(spec, weights).values()
    blocks = [block for block in spec.blocks() if isinstance(block, Attention)]
    attention = {attention_case(block, weights.dtype, spec.fp8_kv) for block in blocks}
    return resolve_configs(cases, attention, weights.dtype, gpu, batch_invariant, user_table, adapters)


def expands_kv(spec: ModelSpec, device: torch.device, batch_invariant: bool, torch_prompt_attention: bool) -> bool:
    """Return whether prompt passes expand 8-bit K and V of a layer to bf16, as the kernel for Hopper requires.

    Args:
        torch_prompt_attention: whether torch computes the attention of prompts.
    """
    if not spec.fp8_kv or torch_prompt_attention:
        return False
    return prompt_attention_config(device_of(device), batch_invariant, True, spec.pages.head_dim).hopper > 0


def make_model(
    spec: ModelSpec, weights: Weights, capacity: int, slots: int = 1, page: int | None = None,
    configs: Mapping[int, PassConfigs] | None = None, pages: int | None = None, rows: int | None = None,
    prompt_rows: int = 2048, batch_invariant: bool = False, offload: Offload | None = None, speculate: bool = False,
    ngram: tuple[int, int] = NGRAM, torch_prompt_attention: bool = False, snapshots: int = 0, adapters: int = 0,
    max_rank: int = 0,
) -> DecodeModel:  # fmt: skip
    """Allocate the state of a model whose weights are loaded, for `slots` of `capacity` K/V positions.

    Args:
        page, pages, offload: see make_kv_cache.
        configs: launch configs by rows. The default is chosen for the GPU.
        rows: rows of the largest decode pass. The default is `slots`.
        prompt_rows: rows of the largest prompt pass, without decoding rows. With batch_invariant, every prompt pass has
            this number of rows.
        speculate: whether passes can verify drafts.
        ngram: see DecodeModel.
        torch_prompt_attention: whether torch computes the attention of prompts. Then no K and V are expanded.
        snapshots: number of snapshots of recurrent state.
        adapters: number of adapters on the device.
        max_rank: largest rank of an adapter.
    """
    device, dtype = weights.device, weights.dtype
    gpu = device_of(device)
    prompt_config = prompt_attention_config(gpu, batch_invariant, spec.fp8_kv, spec.pages.head_dim)
    if not batch_invariant:
        prompt_rows = min(prompt_rows, slots * capacity)
    rows = rows or slots
    verifying = verify_rows(rows) if speculate else 0
    workspace = make_workspace(spec, capacity, device, dtype, slots, max(rows, verifying))
    meta, samp = make_states(verifying, device)
    kv = make_kv_cache(spec, capacity, device, dtype, slots, page, pages, offload)
    if kv.rings:  # Attention then waits for more than the previous kernel.
        prompt_config = replace(prompt_config, dependent=False)
    expanded = len(kv.pool) if expands_kv(spec, device, batch_invariant, torch_prompt_attention) else 0  # Unit: pages.
    pool: AdapterPool | None = None
    adapter_configs: Mapping[int, PassConfigs] = {}
    if adapters:
        largest = max(rows, verifying), prompt_rows + rows
        pool = make_adapters(spec, device, dtype, adapters, max_rank, slots, *largest)
        adapter_configs = configs or choose_configs(spec, weights, gpu, batch_invariant, user_table=True, adapters=True)
    return DecodeModel(
        spec=spec,
        weights=weights,
        kv=kv,
        ropes={key: rope_tables(*key, capacity, device) for key in rope_keys(spec)},
        workspace=first_rows(workspace, rows) if speculate else workspace,
        prompt=make_prompt_buffers(spec, prompt_rows + rows, device, dtype, prompt_config, expanded, kv.page),
        configs_by_rows=configs or choose_configs(spec, weights, gpu, batch_invariant, user_table=True),
        gpu=gpu,
        prompt_config=prompt_config,
        fixed_chunk=prompt_rows if batch_invariant else 0,
        verify=replace(first_rows(workspace, verifying), meta=meta, samp=samp) if speculate else None,
        ngram=ngram,
        recurrent=make_records(spec, device, dtype, slots, speculate, snapshots),
        pool=pool,
        adapter_configs=adapter_configs,
    )


def verify_rows(requests: int) -> int:
    """Return the rows of the largest pass that verifies drafts of up to `requests` requests."""
    return max(each * max_queries(each) for each in range(1, requests + 1) if max_queries(each) > 1)
