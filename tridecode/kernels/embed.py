"""embed: writes the embedding of each row's current token to the residual stream."""

import triton
import triton.language as tl

from .common import META_WIDTH, POSITION, RUN, SLOT, STATUS, cdiv, gdc_launch_dependents, options, running
from .op import Op

BLOCK_K = 1024


@triton.jit
def _embed_kernel(
    meta_ptr,
    tokens_ptr,
    embed_ptr,
    norm_ptr,
    hidden_ptr,
    normed_ptr,
    sumsq_ptr,
    stride_tokens,
    stride_hidden,
    stride_normed,
    stride_sumsq,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the embedding of tokens[position] and prepare the first layer's norm.

    A program computes BLOCK_K columns of a row. Grid: (cdiv(K, BLOCK_K), rows).
    Moves K * (2 * itemsize + 4 + act itemsize) bytes per row.
    Launched without PDL in every pass. It therefore acts as a fence: later kernels may read meta and old K/V before
    they wait for their predecessor.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. Rows whose status is not RUN are skipped.
        tokens_ptr: [slots, capacity + 1] int32.
        embed_ptr: [vocab, K].
        norm_ptr: [K], weight of the first layer's norm.
        hidden_ptr: [rows, K] fp32 (output).
        normed_ptr: [rows, K] (output), hidden * norm.
        sumsq_ptr: [rows, programs] fp32 (output), partial sums of the squares of hidden.
    """
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    row = tl.program_id(1)
    meta_ptr += row * META_WIDTH
    if tl.load(meta_ptr + STATUS) != RUN:
        return
    slot, position = tl.load(meta_ptr + SLOT), tl.load(meta_ptr + POSITION)
    token = tl.load(tokens_ptr + slot.to(tl.int64) * stride_tokens + position).to(tl.int64)
    offs_k = pid * BLOCK_K + tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    h = tl.load(embed_ptr + token * K + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    g = tl.load(norm_ptr + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + row * stride_hidden + offs_k, h, mask=mask_k)
    tl.store(normed_ptr + row * stride_normed + offs_k, (h * g).to(normed_ptr.dtype.element_ty), mask=mask_k)
    tl.store(sumsq_ptr + row * stride_sumsq + pid, tl.sum(h * h, 0))


def embed(meta, tokens, embed, norm, hidden, normed, sumsq, *, pdl=False):
    """Launch the kernel. sumsq receives `embed_partials(K)` partial sums per row."""
    rows, K = hidden.shape
    _embed_kernel[(embed_partials(K), rows)](
        meta,
        tokens,
        embed,
        norm,
        hidden,
        normed,
        sumsq,
        tokens.stride(0),
        hidden.stride(0),
        normed.stride(0),
        sumsq.stride(0),
        K,
        BLOCK_K,
        pdl,
        **options(num_warps=4),
    )


def embed_partials(K: int) -> int:
    """Return the number of partial sums of squares that `embed` writes for a row of width K."""
    return cdiv(K, BLOCK_K)


def embed_ref(meta, tokens, embed, norm, hidden, normed, sumsq):
    """Compute `embed` in torch."""
    for row in running(meta, hidden.shape[0]):
        slot, position = meta[row, [SLOT.value, POSITION.value]].tolist()
        h = embed[tokens[slot, position].long()].float()
        hidden[row] = h
        normed[row] = (h * norm.float()).to(normed.dtype)
        sumsq[row, : embed_partials(h.numel())] = 0
        sumsq[row, 0] = h.square().sum()


def embed_bytes(meta, tokens, embed, norm, hidden, normed, sumsq) -> int:
    """Return the bytes that a launch moves: a row of the table and the norm's weight in, hidden and normed out."""
    return hidden.numel() * (2 * embed.itemsize + hidden.itemsize + normed.itemsize)


EMBED = Op(embed, embed_ref, embed_bytes, (_embed_kernel,), outputs=("hidden", "normed", "sumsq"))
