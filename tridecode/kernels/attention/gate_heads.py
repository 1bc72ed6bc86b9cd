"""gate_heads: multiplies the attention output of prompts by the sigmoids of gates.

Decode attention does this itself.
"""

import triton
import triton.language as tl

from ..chunks import chunk_of, listed
from ..common import next_power_of_2, options
from ..op import Op
from .arguments import Heads


@triton.jit
def _gate_heads_kernel(
    chunks_ptr, qkv_ptr, out_ptr, stride_qkv, HEADS: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Multiply BLOCK_H heads of a row by their gates. Rows outside all chunks are not written.

    Grid: (rows, cdiv(HEADS, BLOCK_H)). Moves 3 * itemsize * D bytes per head.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        qkv_ptr: [rows, ...]. The D columns of each query are followed by those of its gate.
        out_ptr: [rows, HEADS * D] (in and out).
    """
    row = tl.program_id(0)
    in_chunk, _, _ = chunk_of(chunks_ptr, row)
    if not in_chunk:
        return
    row = row.to(tl.int64)
    heads, offs_d = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None], tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < HEADS) & (offs_d < D)
    gate = tl.load(qkv_ptr + row * stride_qkv + (2 * heads + 1) * D + offs_d, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + row * (HEADS * D) + heads * D + offs_d
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) * tl.sigmoid(gate)
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def gate_heads(chunks, qkv, out, heads: Heads):
    """Multiply the chunks' rows of out by the sigmoids of their gates.

    Args:
        chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        qkv: [rows, heads * query_columns + 2 kv_heads * head_dim].
        out: [rows, heads * head_dim] (in and out).
    """
    block_h = min(next_power_of_2(heads.query), 8)
    _gate_heads_kernel[(len(out), -(-heads.query // block_h))](
        chunks, qkv, out, qkv.stride(0), heads.query, heads.dim, block_h, next_power_of_2(heads.dim), **options(4)
    )  # fmt: skip


def gate_heads_ref(chunks, qkv, out, heads: Heads):
    """Compute `gate_heads` in torch."""
    for chunk in listed(chunks):
        _, gate, _, _ = heads.split(qkv[chunk.rows].float())
        assert gate is not None, "gate is None, but gate_heads needs query heads with gates"
        out[chunk.rows] = (out[chunk.rows] * gate.sigmoid().flatten(1)).to(out.dtype)


def gate_heads_bytes(chunks, qkv, out, heads: Heads) -> int:
    """Return the bytes that a launch moves."""
    return 3 * out.nbytes


GATE_HEADS = Op(gate_heads, gate_heads_ref, gate_heads_bytes, (_gate_heads_kernel,))
