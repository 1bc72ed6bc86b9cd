"""rope_write: q/k norm and RoPE for the tokens of a prompt; K and V enter the cache."""

import torch
import triton
import triton.language as tl

from .common import options
from .rope import _partner, _rms_rope, _rotation, rms_norm, rotate


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
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """q and k of a token, normalised where the family does and rotated; v as it is. A program a token.

    qkv: [rows, (HEADS + 2 KV_HEADS) * D]; q_norm, k_norm: [D]; cos, sin: [rows, D / 2] fp32, from the first row's
    position; q: [rows, HEADS * D] (output); k, v: the cache from the first row's position, [KV_HEADS, rows.., D]
    (output). Moves each element once in and once out; partners come from L1. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    partner = _partner(offs_d, D)
    cos_ptr += row * (D // 2)
    sin_ptr += row * (D // 2)
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
    cache = kv_heads.to(tl.int64) * stride_kh + row * D + offs_d[None, :]
    qkv_ptr += HEADS * D
    k = tl.load(qkv_ptr + kv_heads * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    k_partner = tl.load(qkv_ptr + kv_heads * D + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = _rotation(cos_ptr, sin_ptr, k_norm_ptr, offs_d, D, QK_NORM)
    k = _rms_rope(k, k_partner, cos, sin, eps, D, QK_NORM)
    tl.store(k_ptr + cache, k.to(k_ptr.dtype.element_ty), mask=mask)
    v = tl.load(qkv_ptr + (KV_HEADS + kv_heads) * D + offs_d[None, :], mask=mask)
    tl.store(v_ptr + cache, v, mask=mask)


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
        triton.next_power_of_2(D),
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
