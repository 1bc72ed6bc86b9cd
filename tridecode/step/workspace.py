"""Every buffer of the token step, by name, allocated once."""

from dataclasses import dataclass, fields, replace

import torch

from ..kernels.attention.prompt_attention import PromptAttentionConfig, scratch_sizes
from ..kernels.linear import matmul_wide
from ..kernels.sampling import sample as sample_op
from ..layout import (
    CHUNK_WIDTH,
    LIMIT_REACHED,
    MAX_CHUNKS,
    MAX_LOGPROBS,
    META_WIDTH,
    RING,
    SAMP_WIDTH,
    STATUS,
    mask_words,
)
from ..models.config import ModelConfig
from ..tensors import short_repr
from ..tuning.shapes import DRAFT_SPLITS, MAX_SPLITS, TILE_ROWS

DEQUANTISED = 2**25  # numbers: the most of a weight in fewer bits that stand there in all their bits at once
# By slot; all else is by row.
OF_SLOTS = ("tokens", "counts", "bias", "mask", "mask_stamp", "out", "out_logprobs", "out_top_ids")


@dataclass(frozen=True)
class Workspace:
    """Fixed addresses for state and activations, for passes of up to `rows` rows.

    `out`, `out_logprobs` and `out_top_ids` are rings of RING entries in pinned host memory (plain memory on a CPU), as
    are the masks, which the host writes while a pass runs.
    """

    # state
    meta: torch.Tensor  # int32 [rows, META_WIDTH]
    samp: torch.Tensor  # fp32 [rows, SAMP_WIDTH]
    tokens: torch.Tensor  # int32 [slots, capacity + 1]
    counts: torch.Tensor  # int32 [slots, vocab]: 2 * occurrences in the output + (1 if in the prompt)
    bias: torch.Tensor  # fp32 [slots, vocab]
    mask: torch.Tensor  # int32 [slots, vocab / 32]: see layout.mask_words
    mask_stamp: torch.Tensor  # int64 [slots]: see layout.mask_stamp; written after the mask
    out: torch.Tensor  # int64 [slots, RING]: see layout.ring_entry
    out_logprobs: torch.Tensor  # fp32 [slots, RING, 1 + MAX_LOGPROBS]: of the drawn token, then of the most likely
    out_top_ids: torch.Tensor  # int32 [slots, RING, MAX_LOGPROBS]
    # activations
    hidden: torch.Tensor  # fp32 [rows, hidden]: the residual stream
    normed: torch.Tensor  # act [rows, hidden]: hidden * norm weight, before the division by the root mean square
    sumsq: torch.Tensor  # fp32 [rows, hidden]: partial sums of hidden ** 2, at most one a row of the weight
    qkv: torch.Tensor  # fp32 [rows, q_size + 2 * kv_size]
    attn_out: torch.Tensor  # act [rows, q_size]
    attn_partial: torch.Tensor  # fp32 [rows, heads, MAX_SPLITS, head_dim]
    attn_lse: torch.Tensor  # fp32 [rows, heads, MAX_SPLITS, 2]: running maximum and sum of each split
    attn_counter: torch.Tensor  # int32 [rows, kv_heads], zero between launches
    act: torch.Tensor  # act [rows, intermediate]
    logits: torch.Tensor  # fp32 [rows, vocab]: raw
    drawn: torch.Tensor  # int32 [rows]: of passes that verify drafts
    draft_keys: torch.Tensor  # int64 [rows, DRAFT_SPLITS]: scratch
    draft_counter: torch.Tensor  # int32 [rows], zero between launches
    split: matmul_wide.SplitBuffers
    sampler: sample_op.SamplerBuffers

    def __repr__(self) -> str:
        tensors = named_tensors(self).values()
        return short_repr(self, self.normed, tensors=len(tensors), nbytes=sum(t.nbytes for t in tensors))


def make_workspace(
    config: ModelConfig, capacity: int, device, dtype: torch.dtype, slots: int = 1, rows: int | None = None
) -> Workspace:
    """Allocate the workspace for `slots` of `capacity` K/V positions, and passes of `rows` (by default slots) rows.

    bf16 checkpoints keep bf16 activations between kernels; fp16 and fp32 ones keep fp32 (fp16 can overflow before the
    norm's division).
    """
    device = torch.device(device)
    rows, vocab = rows or slots, config.vocab_size
    act_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    pin = device.type == "cuda"

    def state(*shape, dtype=torch.int32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def ring(*shape, dtype):
        return torch.zeros(shape, dtype=dtype, pin_memory=pin)

    def real(*shape, dtype=torch.float32):
        return torch.zeros(shape, dtype=dtype, device=device)

    def factor(columns):  # of a product by tiles, whose last rows nobody needs
        return real(max(rows, TILE_ROWS), columns, dtype=act_dtype)[:rows]

    meta, samp = make_states(rows, device)
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
        hidden=real(rows, config.hidden_size),
        normed=factor(config.hidden_size),
        sumsq=real(rows, config.hidden_size),
        qkv=real(rows, config.q_size + 2 * config.kv_size),
        attn_out=factor(config.q_size),
        attn_partial=real(rows, config.num_heads, MAX_SPLITS, config.head_dim),
        attn_lse=real(rows, config.num_heads, MAX_SPLITS, 2),
        attn_counter=state(rows, config.num_kv_heads),
        act=factor(config.intermediate_size),
        logits=real(rows, vocab),
        drawn=state(rows),
        draft_keys=state(rows, DRAFT_SPLITS, dtype=torch.int64),
        draft_counter=state(rows),
        split=matmul_wide.make_buffers(
            max(config.q_size + 2 * config.kv_size, config.hidden_size, 2 * config.intermediate_size), rows, device
        ),
        sampler=sample_op.make_buffers(vocab, rows, device),
    )


def make_states(rows: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """meta and samp; no row runs before a request has begun."""
    meta = torch.zeros(rows, META_WIDTH, dtype=torch.int32, device=device)
    meta[:, STATUS] = LIMIT_REACHED
    return meta, torch.zeros(rows, SAMP_WIDTH, device=device)


@dataclass(frozen=True)
class PromptBuffers:
    """The activations of a prompt pass, at fixed addresses too; dtype: the weights'."""

    chunks: torch.Tensor  # int32 [MAX_CHUNKS, CHUNK_WIDTH]: whose rows they are
    hidden: torch.Tensor  # fp32 [rows, hidden]: the residual stream
    delta: torch.Tensor  # [rows, hidden]: what is added to it next
    x: torch.Tensor  # [rows, hidden]: its norm
    qkv: torch.Tensor  # [rows, q_size + 2 * kv_size]
    q: torch.Tensor  # [rows, heads, head_dim]: rotated
    attended: torch.Tensor  # [rows, q_size]
    gate_up: torch.Tensor  # [rows, 2 * intermediate]
    act: torch.Tensor  # [rows, intermediate]
    dequantised: torch.Tensor  # flat: rows of a weight in fewer bits, in front of a product
    partial: torch.Tensor  # fp32, scratch of attention
    lse: torch.Tensor  # fp32
    counter: torch.Tensor  # int32, zero between launches
    kv: torch.Tensor  # [pages, 2, kv_heads, page, head_dim]: a layer's K and V, for attention that reads no 8 bits

    def __repr__(self) -> str:
        return short_repr(self, self.x, rows=self.rows, nbytes=sum(t.nbytes for t in named_tensors(self).values()))

    @property
    def rows(self) -> int:
        return len(self.hidden)

    def first(self, rows: int) -> "PromptBuffers":
        """The same buffers as a pass of `rows` rows sees them."""
        names = ("hidden", "delta", "x", "qkv", "q", "attended", "gate_up", "act")
        return replace(self, **{name: getattr(self, name)[:rows] for name in names})


def make_prompt_buffers(
    config: ModelConfig, rows: int, device, dtype: torch.dtype, shape: PromptAttentionConfig, pages: int = 0,
    page: int = 0,
) -> PromptBuffers:  # fmt: skip
    """Allocate them for passes of up to `rows` rows, their attention launched in that shape, over so many pages."""
    scratch = scratch_sizes(config.head_dim, shape)

    def real(*shape, dtype=dtype):
        return torch.empty(rows, *shape, dtype=dtype, device=device)

    return PromptBuffers(
        chunks=torch.zeros(MAX_CHUNKS, CHUNK_WIDTH, dtype=torch.int32, device=device),
        hidden=real(config.hidden_size, dtype=torch.float32),
        delta=real(config.hidden_size),
        x=real(config.hidden_size),
        qkv=real(config.q_size + 2 * config.kv_size),
        q=real(config.num_heads, config.head_dim),
        attended=real(config.q_size),
        gate_up=real(2 * config.intermediate_size),
        act=real(config.intermediate_size),
        dequantised=torch.empty(DEQUANTISED if config.few_bits else 0, dtype=dtype, device=device),
        partial=torch.empty(scratch["partial"], device=device),
        lse=torch.empty(scratch["lse"], device=device),
        counter=torch.zeros(scratch["counter"], dtype=torch.int32, device=device),
        kv=torch.empty(pages, 2, config.num_kv_heads, page, config.head_dim, dtype=dtype, device=device),
    )


def first_rows(ws: Workspace, rows: int) -> Workspace:
    """The same buffers as a pass of `rows` rows sees them."""

    def narrowed(buffers, of_slots=()):
        tensors = {f.name: getattr(buffers, f.name) for f in fields(buffers) if f.name not in of_slots}
        return {name: t[:rows] if isinstance(t, torch.Tensor) else t for name, t in tensors.items()}

    nested = {name: replace(of, **narrowed(of)) for name, of in (("split", ws.split), ("sampler", ws.sampler))}
    return replace(ws, **narrowed(ws, of_slots=OF_SLOTS) | nested)


def named_tensors(workspace) -> dict[str, torch.Tensor]:
    """Every tensor of the workspace by name, nested buffers included."""
    found = {}
    for f in fields(workspace):
        value = getattr(workspace, f.name)
        if isinstance(value, torch.Tensor):
            found[f.name] = value
        else:
            found.update({f"{f.name}.{name}": t for name, t in named_tensors(value).items()})
    return found
