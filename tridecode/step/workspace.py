"""The buffers of the passes. Each is allocated once, at an address that never changes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

import torch

from ..blocks.block import Block
from ..blocks.declarations import Buffer
from ..blocks.spec import ModelSpec
from ..kernels.attention.prompt_attention import PromptAttentionConfig, scratch_sizes
from ..kernels.linear.project import MAX_ROWS, Case
from ..kernels.linear.split_sums import SplitBuffers
from ..kernels.linear.split_sums import make_buffers as make_split_buffers
from ..kernels.sampling.sample import SamplerBuffers, make_buffers
from ..layout import (
    CHUNK_WIDTH,
    LIMIT_REACHED,
    MAX_CHUNKS,
    MAX_LOGPROBS,
    MAX_SNAPSHOTS,
    META_WIDTH,
    RECORDS_WIDTH,
    RING,
    SAMP_WIDTH,
    SNAPSHOT_WIDTH,
    STATUS,
    mask_words,
)
from ..tensors import short_repr
from ..tuning.configs import DRAFT_SPLITS, TILE_ROWS, is_head

DEQUANTIZED = 2**25  # Elements of a quantized weight that a prompt pass dequantizes at a time.
# Buffers with a row for each slot. The others have a row for each row of the pass.
OF_SLOTS = ("tokens", "counts", "bias", "mask", "mask_stamp", "out", "out_logprobs", "out_top_ids")
BlockBuffers = Mapping[Block, Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Workspace:
    """State and activations of passes of up to `rows` rows.

    `out`, `out_logprobs` and `out_top_ids` are rings of RING entries in pinned host memory (plain memory on a CPU), and
    so are the masks, which the host writes while a pass runs.
    """

    # state
    meta: torch.Tensor  # int32 [rows, META_WIDTH]
    samp: torch.Tensor  # fp32 [rows, SAMP_WIDTH]
    tokens: torch.Tensor  # int32 [slots, capacity + 1]
    counts: torch.Tensor  # int32 [slots, vocab]: 2 * occurrences in the output, plus 1 if the token is in the prompt.
    bias: torch.Tensor  # fp32 [slots, vocab]
    mask: torch.Tensor  # int32 [slots, vocab / 32]; see layout.mask_words.
    mask_stamp: torch.Tensor  # int64 [slots]; see layout.mask_stamp. It is written after the mask.
    out: torch.Tensor  # int64 [slots, RING]; see layout.ring_entry.
    out_logprobs: torch.Tensor  # fp32 [slots, RING, 1 + MAX_LOGPROBS]: the sampled token, then the most likely tokens.
    out_top_ids: torch.Tensor  # int32 [slots, RING, MAX_LOGPROBS]
    # activations
    hidden: torch.Tensor  # fp32 [rows, hidden]: the residual stream
    normed: torch.Tensor  # activation dtype [rows, hidden]: hidden * norm weight, before the division by the RMS.
    # fp32 [rows, hidden]: partial sums of hidden ** 2. There is at most one for each row of a weight.
    sumsq: torch.Tensor
    blocks: BlockBuffers  # The buffers that each block declares.
    logits: torch.Tensor  # fp32 [rows, vocab]: the logits before bias and penalties.
    sampled: torch.Tensor  # int32 [rows]: tokens that passes with drafts sampled.
    draft_keys: torch.Tensor  # int64 [rows, DRAFT_SPLITS]: scratch.
    draft_counter: torch.Tensor  # int32 [rows]. The counters are zero between launches.
    split: SplitBuffers
    sampler: SamplerBuffers

    def __repr__(self) -> str:
        tensors = named_tensors(self).values()
        return short_repr(self, self.normed, tensors=len(tensors), nbytes=sum(t.nbytes for t in tensors))


def make_workspace(
    spec: ModelSpec, capacity: int, device, dtype: torch.dtype, slots: int = 1, rows: int | None = None
) -> Workspace:
    """Allocate the workspace for `slots` of `capacity` K/V positions, and passes of `rows` rows, by default slots.

    Activations between kernels are bf16 for bf16 checkpoints, and fp32 for fp16 and fp32 checkpoints, because fp16 can
    overflow before the division by the root mean square.
    """
    device = torch.device(device)
    rows, vocab = rows or slots, spec.vocab_size
    act_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    pin = device.type == "cuda"

    def state(*shape, dtype=torch.int32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def ring(*shape, dtype):
        return torch.zeros(shape, dtype=dtype, pin_memory=pin)

    def real(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def tiled(*shape):  # The buffer has whole tiles, but the view has only the rows.
        return real(max(rows, TILE_ROWS), *shape, dtype=act_dtype)[:rows]

    def activations(buffer: Buffer) -> torch.Tensor:
        dtypes = {"activation": act_dtype, "weights": dtype, "float32": torch.float32, "int32": torch.int32}
        return tiled(*buffer.shape) if buffer.tile else real(rows, *buffer.shape, dtype=dtypes[buffer.dtype])

    meta, samp = make_states(rows, device)
    cases = {Case(linear.n, linear.k, dtype, linear.epilogue) for linear in spec.linears() if not linear.experts}
    widest = max(case.n for case in cases if not is_head(case))
    return Workspace(
        meta=meta,
        samp=samp,
        tokens=state(slots, capacity + 1),
        counts=state(slots, vocab),
        bias=real(slots, vocab),
        mask=ring(slots, mask_words(vocab), dtype=torch.int32),
        mask_stamp=ring(slots, dtype=torch.int64),
        out=ring(slots, RING, dtype=torch.int64),
        out_logprobs=ring(slots, RING, 1 + MAX_LOGPROBS, dtype=torch.float32),
        out_top_ids=ring(slots, RING, MAX_LOGPROBS, dtype=torch.int32),
        hidden=real(rows, spec.hidden_size),
        normed=tiled(spec.hidden_size),
        sumsq=real(rows, spec.hidden_size),
        blocks=block_buffers(((block, block.buffers()) for block in spec.blocks()), activations),
        logits=real(rows, vocab),
        sampled=state(rows),
        draft_keys=state(rows, DRAFT_SPLITS, dtype=torch.int64),
        draft_counter=state(rows),
        split=make_split_buffers(widest, rows, device),
        sampler=make_buffers(vocab, rows, device),
    )


def block_buffers(declared: Iterable[tuple[Block, tuple[Buffer, ...]]], allocate) -> BlockBuffers:
    """Allocate the declared buffers of each block. Equal declarations share one tensor."""
    shared: dict[Buffer, torch.Tensor] = {}
    allocated = {}
    for block, buffers in declared:
        for buffer in buffers:
            if buffer not in shared:
                shared[buffer] = allocate(buffer)
        allocated[block] = {buffer.name: shared[buffer] for buffer in buffers}
    return allocated


def first_of(blocks: BlockBuffers, rows: int) -> BlockBuffers:
    """Return the first `rows` rows of the buffers. Blocks that share a buffer also share its first rows."""
    narrowed = {id(tensor): tensor[:rows] for own in blocks.values() for tensor in own.values()}
    return {block: {name: narrowed[id(tensor)] for name, tensor in own.items()} for block, own in blocks.items()}


def make_states(rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate meta and samp. No row is active until a request starts."""
    meta = torch.zeros(rows, META_WIDTH, dtype=torch.int32, device=device)
    meta[:, STATUS] = LIMIT_REACHED
    return meta, torch.zeros(rows, SAMP_WIDTH, device=device)


@dataclass(frozen=True)
class PromptBuffers:
    """The activations of a prompt pass, at fixed addresses."""

    chunks: torch.Tensor  # int32 [MAX_CHUNKS, CHUNK_WIDTH]: slot and positions of the rows of each chunk.
    # int32 [MAX_CHUNKS, RECORDS_WIDTH]: the records of each chunk. [0, RECORDS_WIDTH] for models without records.
    records: torch.Tensor
    # int32 [MAX_SNAPSHOTS, SNAPSHOT_WIDTH]: the snapshots to take. [0, SNAPSHOT_WIDTH] for models without records.
    snapshots: torch.Tensor
    hidden: torch.Tensor  # fp32 [rows, hidden]: the residual stream
    # Dtype of the weights [rows, hidden]: output of a block, which the next norm adds to the residual stream.
    delta: torch.Tensor
    x: torch.Tensor  # Dtype of the weights [rows, hidden]: the normalized rows.
    blocks: BlockBuffers  # The buffers that each block declares.
    dequantized: torch.Tensor  # [DEQUANTIZED] or [0]: rows of a quantized weight.
    meta: torch.Tensor  # int32 [MAX_ROWS, META_WIDTH]: the status RUN for each row, for kernels of few rows.
    arrived: torch.Tensor  # int32: counters of kernels of few rows, which are zero between launches.
    partial: torch.Tensor  # fp32: scratch of attention.
    lse: torch.Tensor  # fp32: scratch of attention.
    counter: torch.Tensor  # int32: scratch of attention, which is zero between launches.
    kv: torch.Tensor  # [pages, 2, kv_heads, page, head_dim]: K and V of a layer, expanded from 8 bits.

    def __repr__(self) -> str:
        return short_repr(self, self.x, rows=self.rows, nbytes=sum(t.nbytes for t in named_tensors(self).values()))

    @property
    def rows(self) -> int:
        """Rows of the largest prompt pass."""
        return len(self.hidden)

    def buffers(self, block: Block) -> Mapping[str, torch.Tensor]:
        """Return the buffers that a block declares."""
        return self.blocks[block]

    def first(self, rows: int) -> "PromptBuffers":
        """Return the buffers of a pass of `rows` rows."""
        narrowed = {name: getattr(self, name)[:rows] for name in ("hidden", "delta", "x")}
        return replace(self, **narrowed, blocks=first_of(self.blocks, rows))


def make_prompt_buffers(
    spec: ModelSpec, rows: int, device, dtype: torch.dtype, config: PromptAttentionConfig, pages: int = 0,
    page: int = 0,
) -> PromptBuffers:  # fmt: skip
    """Allocate the buffers of prompt passes of up to `rows` rows.

    Args:
        config: launch config of their attention, which determines the size of its scratch.
        pages: number of pages of K and V that are expanded from 8 bits.
        page: positions of a page.
    """
    kv = spec.pages
    scratch = scratch_sizes(kv.head_dim, config)

    def real(*shape, dtype=dtype):
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    def activations(buffer: Buffer) -> torch.Tensor:
        if buffer.dtype == "int32":  # Counters are zero between launches.
            return torch.zeros(rows, *buffer.shape, dtype=torch.int32, device=device)
        return real(*buffer.shape, dtype={"weights": dtype, "float32": torch.float32}[buffer.dtype])

    def table(*shape) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    quantized = spec.quantization is not None
    return PromptBuffers(
        chunks=table(MAX_CHUNKS, CHUNK_WIDTH),
        records=table(MAX_CHUNKS if spec.recurrent else 0, RECORDS_WIDTH),
        snapshots=table(MAX_SNAPSHOTS if spec.recurrent else 0, SNAPSHOT_WIDTH),
        hidden=real(spec.hidden_size, dtype=torch.float32),
        delta=real(spec.hidden_size),
        x=real(spec.hidden_size),
        blocks=block_buffers(((block, block.prompt_buffers()) for block in spec.blocks()), activations),
        dequantized=torch.empty(DEQUANTIZED if quantized else 0, dtype=dtype, device=device),
        meta=table(MAX_ROWS, META_WIDTH),
        arrived=table(max(linear.n for linear in spec.linears()) // 16 + 1),
        partial=torch.empty(scratch["partial"], device=device),
        lse=torch.empty(scratch["lse"], device=device),
        counter=torch.zeros(scratch["counter"], dtype=torch.int32, device=device),
        kv=torch.empty(pages, 2, kv.kv_heads, page, kv.head_dim, dtype=dtype, device=device),
    )


def first_rows(ws: Workspace, rows: int) -> Workspace:
    """Return the buffers of a pass of `rows` rows."""

    def narrowed(buffers, without=()):
        tensors = {f.name: getattr(buffers, f.name) for f in fields(buffers) if f.name not in without}
        return {name: t[:rows] if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}

    nested = {name: replace(of, **narrowed(of)) for name, of in (("split", ws.split), ("sampler", ws.sampler))}
    return replace(ws, **narrowed(ws, without=OF_SLOTS) | nested | {"blocks": first_of(ws.blocks, rows)})


def named_tensors(buffers) -> dict[str, torch.Tensor]:
    """Return every tensor of the buffers by name, including nested ones. A shared tensor is listed once."""
    tensors = {}
    for f in fields(buffers):
        value = getattr(buffers, f.name)
        if isinstance(value, torch.Tensor):
            tensors[f.name] = value
        elif f.name == "blocks":
            seen = set()
            for i, (block, own) in enumerate(value.items()):
                kind = type(block).__name__.lower()
                for name, tensor in own.items():
                    if id(tensor) not in seen:
                        seen.add(id(tensor))
                        tensors[f"{kind}.{name}" if f"{kind}.{name}" not in tensors else f"{kind}.{i}.{name}"] = tensor
        else:
            tensors.update({f"{f.name}.{name}": t for name, t in named_tensors(value).items()})
    return tensors
