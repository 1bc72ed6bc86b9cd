"""rope_write: q/k norm and RoPE for the tokens of a prompt; K and V enter the cache."""

import torch
import triton
import triton.language as tl

from .common import options
from .rope import _rms_rope, rms_norm, rotate


@triton.jit
def _rope_write_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    eps,
    stride_kh,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """q and k of a token, normalised where the family does and rotated; v as it is. A program a token.

    qkv: [rows, (HEADS + 2 KV_HEADS) * D]; q_norm, k_norm: [D]; cos, sin: [rows, D / 2] fp32, from the first row's
    position; q: [rows, HEADS * D] (output); k, v: the cache from the first row's position, [KV_HEADS, rows.., D]
    (output). Moves each element once in and once out. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    offs_h = tl.arange(0, HALF_BLOCK)
    mask_h = offs_h < HALF
    cos = tl.load(cos_ptr + row * HALF + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(sin_ptr + row * HALF + offs_h, mask=mask_h, other=0.0)
    qkv_ptr += row * (HEADS + 2 * KV_HEADS) * D
    norm_lo, norm_hi = cos, cos

    heads = tl.arange(0, HEADS_BLOCK)
    mask = (heads < HEADS)[:, None] & mask_h[None, :]
    offs = heads[:, None] * D + offs_h[None, :]
    lo = tl.load(qkv_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    hi = tl.load(qkv_ptr + offs + HALF, mask=mask, other=0.0).to(tl.float32)
    if QK_NORM:
        norm_lo = tl.load(q_norm_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        norm_hi = tl.load(q_norm_ptr + HALF + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    lo, hi = _rms_rope(lo, hi, norm_lo, norm_hi, cos, sin, eps, D, QK_NORM)
    q_ptr += row * HEADS * D
    tl.store(q_ptr + offs, lo.to(q_ptr.dtype.element_ty), mask=mask)
    tl.store(q_ptr + offs + HALF, hi.to(q_ptr.dtype.element_ty), mask=mask)

    kv_heads = tl.arange(0, KV_BLOCK)
    mask_k = (kv_heads < KV_HEADS)[:, None] & mask_h[None, :]
    offs_k = kv_heads[:, None] * D + offs_h[None, :]
    cache = kv_heads.to(tl.int64)[:, None] * stride_kh + row * D + offs_h[None, :]
    k_lo = tl.load(qkv_ptr + HEADS * D + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    k_hi = tl.load(qkv_ptr + HEADS * D + HALF + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    if QK_NORM:
        norm_lo = tl.load(k_norm_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        norm_hi = tl.load(k_norm_ptr + HALF + offs_h, mask=mask_h, other=0.0).to(tl.float32)
    k_lo, k_hi = _rms_rope(k_lo, k_hi, norm_lo, norm_hi, cos, sin, eps, D, QK_NORM)
    tl.store(k_ptr + cache, k_lo.to(k_ptr.dtype.element_ty), mask=mask_k)
    tl.store(k_ptr + cache + HALF, k_hi.to(k_ptr.dtype.element_ty), mask=mask_k)
    v_offs = (HEADS + KV_HEADS) * D + offs_k
    tl.store(v_ptr + cache, tl.load(qkv_ptr + v_offs, mask=mask_k), mask=mask_k)
    tl.store(v_ptr + cache + HALF, tl.load(qkv_ptr + v_offs + HALF, mask=mask_k), mask=mask_k)


def rope_write(qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, eps):
    """qkv [rows, (heads + 2 kv_heads) * D] -> q [rows, heads, D], and k_cache, v_cache [kv_heads, rows, D] views of the
    cache at the rows' positions; cos, sin [rows, D / 2] fp32. q_norm, k_norm: [D] or None."""
    rows, heads, D = q.shape
    kv_heads = k_cache.shape[0]
    spare = cos  # stands in for absent norms
    _rope_write_kernel[(rows,)](
        qkv,
        spare if q_norm is None else q_norm,
        spare if k_norm is None else k_norm,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        eps,
        k_cache.stride(0),
        heads,
        kv_heads,
        D,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(kv_heads),
        triton.next_power_of_2(D // 2),
        q_norm is not None,
        **options(4),
    )


def rope_write_ref(qkv, q_norm, k_norm, cos, sin, q, k_cache, v_cache, eps):
    rows, heads, D = q.shape
    kv_heads = k_cache.shape[0]
    new_q, new_k, new_v = qkv.view(rows, -1, D).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos[:, None], sin[:, None]
    new_q, new_k = new_q.float(), new_k.float()
    if q_norm is not None:
        new_q, new_k = rms_norm(new_q, q_norm, eps), rms_norm(new_k, k_norm, eps)
    q.copy_(rotate(new_q, cos, sin))
    k_cache.copy_(rotate(new_k, cos, sin).transpose(0, 1))
    v_cache.copy_(new_v.transpose(0, 1))


def rope_write_bytes(rows: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    return rows * head_dim * (2 * (heads + 2 * kv_heads) * dtype.itemsize + 4)
