"""rope_write: normalizes and rotates q and k of the tokens of prompts, and writes k and v to the cache."""

import triton
import triton.language as tl

from ..chunks import chunk_of, listed
from ..common import gdc_launch_dependents, interpreted, next_power_of_2, options
from ..op import Op
from .arguments import Heads, KVLayer, Rope
from .fp8_kv import e4m3_scale, store_cells, to_e4m3
from .rope import Rotary, partner_of, rms_rope, rotated, rotation


@triton.jit
def _load_heads(
    ptr, heads, COUNT: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """Load COUNT heads of a token and the partners of their columns, fp32 [heads, BLOCK_D] each. Also return the mask.

    The heads are COLUMNS apart.

    Args:
        heads: [BLOCK, 1], the numbers of the heads.
    """
    offs_d = tl.arange(0, BLOCK_D)
    mask = (heads < COUNT) & (offs_d < D)[None, :]
    x = tl.load(ptr + heads * COLUMNS + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(ptr + heads * COLUMNS + partner_of(offs_d, D, ROTARY)[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    return x, partner, mask


@triton.jit
def _store_fp8(ptrs, scale_ptrs, x, mask, mask_heads):
    """Store rows x, one for each head, as codes and scales."""
    scale, inverse = e4m3_scale(x, 1)
    codes, _ = to_e4m3(x * inverse[:, None])
    tl.store(ptrs, codes, mask=mask)
    tl.store(scale_ptrs, scale.to(tl.bfloat16), mask=mask_heads)


@triton.jit
def _rope_write_kernel(
    chunks_ptr, qkv_ptr, q_ptr,
    table_ptr, stride_table,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_COLUMNS: tl.constexpr,
    FP8: tl.constexpr,
    FOLLOWED: tl.constexpr,
):  # fmt: skip
    """Rotate q and k of a token, after normalizing them if QK_NORM. Write q, and k and v to the cache.

    A program computes one token. Grid: (rows,). Reads and writes each element once; partners come from L1. Rows outside
    all chunks are not written.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        qkv_ptr: [rows, HEADS * Q_COLUMNS + 2 KV_HEADS * D].
        q_ptr: [rows, HEADS * D] (output).
        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr: K and V of the layer (outputs), see arguments.KVLayer.
        Others: see arguments.py.
    """
    if FOLLOWED:
        gdc_launch_dependents()
    rotary = Rotary(cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps)
    row = tl.program_id(0)
    in_chunk, slot, position = chunk_of(chunks_ptr, row)
    if not in_chunk:
        return
    row = row.to(tl.int64)
    page = tl.load(table_ptr + slot * stride_table + position // PAGE).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    qkv_ptr += row * (HEADS * (Q_COLUMNS // D) + 2 * KV_HEADS) * D

    heads = tl.arange(0, BLOCK_H)[:, None]
    q, partner, mask = _load_heads(qkv_ptr, heads, HEADS, Q_COLUMNS, D, BLOCK_D, ROTARY)
    q = rms_rope(q, partner, rotation(rotary, q_norm_ptr, position, offs_d, D, ROTARY, QK_NORM), eps, D, QK_NORM)
    tl.store(q_ptr + row * HEADS * D + heads * D + offs_d[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)

    kv_heads = tl.arange(0, BLOCK_KV)
    qkv_ptr += HEADS * Q_COLUMNS
    k, partner, mask = _load_heads(qkv_ptr, kv_heads[:, None], KV_HEADS, D, D, BLOCK_D, ROTARY)
    k = rms_rope(k, partner, rotation(rotary, k_norm_ptr, position, offs_d, D, ROTARY, QK_NORM), eps, D, QK_NORM)
    v = tl.load(qkv_ptr + (KV_HEADS + kv_heads[:, None]) * D + offs_d[None, :], mask=mask, other=0.0)
    cells = page * stride_kp + kv_heads.to(tl.int64)[:, None] * stride_kh + (position % PAGE) * D + offs_d[None, :]
    if FP8:
        offs_s = page * stride_sp + kv_heads.to(tl.int64) * stride_sh + position % PAGE
        _store_fp8(k_ptr + cells, k_scale_ptr + offs_s, k, mask, kv_heads < KV_HEADS)
        _store_fp8(v_ptr + cells, v_scale_ptr + offs_s, v.to(tl.float32), mask, kv_heads < KV_HEADS)
    else:
        tl.store(k_ptr + cells, k.to(k_ptr.dtype.element_ty), mask=mask)
        tl.store(v_ptr + cells, v, mask=mask)


def rope_write(chunks, qkv, q, kv: KVLayer, rope: Rope, heads: Heads, *, followed: bool = False):
    """Write q, and K and V in the cache, of the chunks' rows.

    Args:
        qkv: [rows, heads * query_columns + 2 kv_heads * head_dim].
        q: [rows, heads, head_dim] (output).
        followed: The next launch may start early, and waits for this one itself (sm_90 and later).
    """
    _rope_write_kernel[(len(q),)](
        chunks,
        qkv,
        q,
        *kv.kernel_arguments(),
        *rope.kernel_arguments(),
        kv.page,
        heads.query,
        heads.kv,
        heads.dim,
        next_power_of_2(heads.query),
        next_power_of_2(heads.kv),
        next_power_of_2(heads.dim),
        rope.q_norm is not None,
        rope.rotary,
        heads.query_columns,
        kv.fp8,
        followed and not interpreted(),
        **options(4),
    )


def rope_write_ref(chunks, qkv, q, kv: KVLayer, rope: Rope, heads: Heads):
    """Compute `rope_write` in torch."""
    page = kv.page
    for chunk in listed(chunks):
        start, end, table = chunk.start, chunk.end, kv.table[chunk.slot]
        new_q, _, new_k, new_v = heads.split(qkv[chunk.rows])
        at = rope.cos[start:end, None], rope.sin[start:end, None]
        q[chunk.rows] = rotated(new_q.float(), rope.q_norm, *at, rope.eps).to(q.dtype)
        new_k = rotated(new_k.float(), rope.k_norm, *at, rope.eps)
        for index in range(start // page, -(-end // page)):
            first, last = max(index * page, start), min((index + 1) * page, end)
            cells = table[index], slice(None), slice(first - index * page, last - index * page)
            store_cells(kv.k, cells, new_k[first - start : last - start].transpose(0, 1))
            store_cells(kv.v, cells, new_v[first - start : last - start].transpose(0, 1))


def rope_write_bytes(chunks, qkv, q, kv: KVLayer, rope: Rope, heads: Heads) -> int:
    """Return the bytes of q, k and v in and out, and of the rotary tables."""
    return 2 * qkv.nbytes + 4 * len(q) * heads.dim


ROPE_WRITE = Op(rope_write, rope_write_ref, rope_write_bytes, (_rope_write_kernel,), outputs=("q",))
