"""embed_rows: writes the embeddings of the tokens of a prompt pass to its residual stream."""

import triton
import triton.language as tl

from .chunks import chunk_of, listed
from .common import META_WIDTH, POSITION, RUN, SLOT, STATUS, next_power_of_2, options, running
from .op import Op


@triton.jit
def _embed_rows_kernel(
    chunks_ptr,
    meta_ptr,
    tokens_ptr,
    embed_ptr,
    out_ptr,
    stride_tokens,
    DECODING: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Copy the embedding of each row's token. A program computes one row.

    A row without a token is set to zeros, so that the layers do not compute large numbers from it.
    Grid: (rows,). Moves K * (itemsize + 4) bytes per row.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        meta_ptr: [>= DECODING, META_WIDTH] int32. The first DECODING rows of the pass belong to requests that decode.
        tokens_ptr: [slots, capacity + 1] int32.
        embed_ptr: [vocab, K].
        out_ptr: [rows, K] fp32 (output).
    """
    row = tl.program_id(0)
    has_token, slot, position = chunk_of(chunks_ptr, row)
    if DECODING > 0:
        if row < DECODING:
            meta_ptr += row * META_WIDTH
            has_token = tl.load(meta_ptr + STATUS) == RUN
            slot, position = tl.load(meta_ptr + SLOT), tl.load(meta_ptr + POSITION)
    slot, position = tl.where(has_token, slot, 0), tl.where(has_token, position, 0)
    token = tl.load(tokens_ptr + slot.to(tl.int64) * stride_tokens + position).to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    mask_k = offs_k < K
    h = tl.load(embed_ptr + token * K + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * K + offs_k, tl.where(has_token, h, 0.0), mask=mask_k)


def embed_rows(chunks, meta, tokens, embed, out, decoding):
    """Write the embeddings of a prompt pass to out.

    The first `decoding` rows receive the embeddings of the current tokens of meta's rows, the others those of the
    chunks' tokens.

    Args:
        out: [rows, K] fp32 (output).
        decoding: Number of rows that belong to requests that decode.
    """
    rows, K = out.shape
    _embed_rows_kernel[(rows,)](
        chunks, meta, tokens, embed, out, tokens.stride(0), decoding, K, next_power_of_2(K), **options(4)
    )


def embed_rows_ref(chunks, meta, tokens, embed, out, decoding):
    """Compute `embed_rows` in torch."""
    out.zero_()
    for row in running(meta, decoding):
        slot, position = meta[row, [SLOT.value, POSITION.value]].tolist()
        out[row] = embed[tokens[slot, position].long()]
    for chunk in listed(chunks):
        out[chunk.rows] = embed[tokens[chunk.slot, chunk.start : chunk.end].long()].float()


def embed_rows_bytes(chunks, meta, tokens, embed, out, decoding) -> int:
    """Return the bytes that a launch moves."""
    return out.numel() * (embed.itemsize + out.itemsize)


EMBED_ROWS = Op(embed_rows, embed_rows_ref, embed_rows_bytes, (_embed_rows_kernel,), outputs=("out",))
