"""rope_write: q/k norm and RoPE for the tokens of prompts; K and V enter the cache."""

import triton
import triton.language as tl

from ..chunks import chunk_of, listed
from ..common import gdc_launch_dependents, interpreted, options
from ..op import Op
from .fp8_kv import e4m3_scale, is_fp8, put, scales, to_e4m3
from .rope import _partner, _rms_rope, _rotation, rms_norm, rotate


@triton.jit
def _rope_write_kernel(
    chunks_ptr,
    page_table_ptr,
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    eps,
    stride_table,
    stride_kp,
    stride_kh,
    stride_sp,
    stride_sh,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
    FP8: tl.constexpr,
    FOLLOWED: tl.constexpr,
):
    """q and k of a token, normalised where the family does and rotated; v as it is. A program a token.

    chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32; page_table: [slots, max_pages] int32; qkv:
    [rows, (HEADS + 2 KV_HEADS) * D]; q_norm, k_norm: [D]; cos, sin: [capacity, D / 2] fp32; q: [rows, HEADS * D]
    (output); k, v: the cache, [pages, KV_HEADS, PAGE, D], written at the tokens' positions (output), if FP8 codes, with
    their scales [pages, KV_HEADS, PAGE] (output; see fp8_kv.py). Rows of no chunk are not written. Moves each element
    once in and once out; partners come from L1. Grid (rows,).
    """
    if FOLLOWED:
        gdc_launch_dependents()
    row = tl.program_id(0)
    held, slot, position = chunk_of(chunks_ptr, row)
    if not held:
        return
    row = row.to(tl.int64)
    page = tl.load(page_table_ptr + slot * stride_table + position // PAGE).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    partner = _partner(offs_d, D)
    cos_ptr += position.to(tl.int64) * (D // 2)
    sin_ptr += position.to(tl.int64) * (D // 2)
    qkv_ptr += row * (HEADS + 2 * KV_HEADS) * D

    heads = tl.arange(0, HEADS_BLOCK)[:, None]
    mask = (heads < HEADS) & mask_d[None, :]
    q = tl.load(qkv_ptr + heads * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    q_partner = tl.load(qkv_ptr + heads * D + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = _rotation(cos_ptr, sin_ptr, q_norm_ptr, offs_d, D, QK_NORM)
    q = _rms_rope(q, q_partner, cos, sin, eps, D, QK_NORM)
    tl.store(q_ptr + row * HEADS * D + heads * D + offs_d[None, :], q.to(q_ptr.dtype.element_ty), mask=mask)

    kv_heads = tl.arange(0, KV_BLOCK)[:, None]
    mask = (kv_heads < KV_HEADS) & mask_d[None, :]
    cache = page * stride_kp + kv_heads.to(tl.int64) * stride_kh + (position % PAGE) * D + offs_d[None, :]
    qkv_ptr += HEADS * D
    k = tl.load(qkv_ptr + kv_heads * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    k_partner = tl.load(qkv_ptr + kv_heads * D + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = _rotation(cos_ptr, sin_ptr, k_norm_ptr, offs_d, D, QK_NORM)
    k = _rms_rope(k, k_partner, cos, sin, eps, D, QK_NORM)
    v = tl.load(qkv_ptr + (KV_HEADS + kv_heads) * D + offs_d[None, :], mask=mask, other=0.0)
    if FP8:
        cells = page * stride_sp + tl.arange(0, KV_BLOCK).to(tl.int64) * stride_sh + position % PAGE
        _store_fp8(k_ptr + cache, k_scale_ptr + cells, k, mask, tl.arange(0, KV_BLOCK) < KV_HEADS)
        _store_fp8(v_ptr + cache, v_scale_ptr + cells, v.to(tl.float32), mask, tl.arange(0, KV_BLOCK) < KV_HEADS)
    else:
        tl.store(k_ptr + cache, k.to(k_ptr.dtype.element_ty), mask=mask)
        tl.store(v_ptr + cache, v, mask=mask)


@triton.jit
def _store_fp8(ptrs, scale_ptrs, x, mask, mask_heads):
    """Rows x, one a head, as codes and scales."""
    scale, inverse = e4m3_scale(x, 1)
    codes, _ = to_e4m3(x * inverse[:, None])
    tl.store(ptrs, codes, mask=mask)
    tl.store(scale_ptrs, scale.to(tl.bfloat16), mask=mask_heads)


def rope_write(chunks, page_table, qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, eps, *, followed: bool = False):
    """qkv [rows, (heads + 2 kv_heads) * D] of the chunks' rows -> q [rows, heads, D]; K/V into k_cache, v_cache
    [pages, kv_heads, page, D] through page_table [slots, max_pages]. cos, sin [capacity, D / 2] fp32. q_norm, k_norm:
    [D] or None. followed: what is launched next may begin meanwhile, and waits for it by itself (sm_90 and above)."""
    rows, heads, D = q.shape
    _, kv_heads, page, _ = k_cache.shape
    k_scale, v_scale = scales(k_cache), scales(v_cache)
    spare = cos  # stands in for absent norms
    _rope_write_kernel[(rows,)](
        chunks,
        page_table,
        qkv,
        spare if q_norm is None else q_norm,
        spare if k_norm is None else k_norm,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        eps,
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_scale.stride(0),
        k_scale.stride(1),
        page,
        heads,
        kv_heads,
        D,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(kv_heads),
        triton.next_power_of_2(D),
        q_norm is not None,
        is_fp8(k_cache),
        followed and not interpreted(),
        **options(4),
    )


def rope_write_ref(chunks, page_table, qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, eps):
    _, heads, D = q.shape
    _, kv_heads, page, _ = k_cache.shape
    for chunk in listed(chunks):
        start, end, table = chunk.start, chunk.end, page_table[chunk.slot]
        new_q, new_k, new_v = qkv[chunk.rows].view(-1, heads + 2 * kv_heads, D).split((heads, kv_heads, kv_heads), 1)
        at = cos[start:end, None], sin[start:end, None]
        new_q, new_k = new_q.float(), new_k.float()
        if q_norm is not None:
            new_q, new_k = rms_norm(new_q, q_norm, eps), rms_norm(new_k, k_norm, eps)
        q[chunk.rows] = rotate(new_q, *at).to(q.dtype)
        new_k = rotate(new_k, *at)
        for place in range(start // page, -(-end // page)):
            first, last = max(place * page, start), min((place + 1) * page, end)
            cells = table[place], slice(None), slice(first - place * page, last - place * page)
            put(k_cache, cells, new_k[first - start : last - start].transpose(0, 1))
            put(v_cache, cells, new_v[first - start : last - start].transpose(0, 1))


def rope_write_bytes(chunks, page_table, qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, eps) -> int:
    """q, k and v in and out; the rotation."""
    return 2 * qkv.nbytes + 4 * len(q) * q.shape[2]


ROPE_WRITE = Op(rope_write, rope_write_ref, rope_write_bytes, (_rope_write_kernel,), outputs=("q",))
