"""rope_write: q/k norm and RoPE for the tokens of a prompt; K and V enter the cache."""

import triton
import triton.language as tl

from .common import options
from .op import Op
from .rope import _partner, _rms_rope, _rotation, rms_norm, rotate


@triton.jit(do_not_specialize=["start"])
def _rope_write_kernel(
    table_ptr,
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    start,
    eps,
    stride_kp,
    stride_kh,
    stride_out,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QK_NORM: tl.constexpr,
):
    """q and k of a token, normalised where the family does and rotated; v as it is. A program a token.

    table: [max_pages] int32, the slot's; qkv: [rows, (HEADS + 2 KV_HEADS) * D]; q_norm, k_norm: [D]; cos, sin:
    [rows, D / 2] fp32, from the first row's position `start`; q: [rows, HEADS * D] (output); k, v: the cache,
    [pages, KV_HEADS, PAGE, D], and keys, values: [KV_HEADS, >= start + rows, D], each written at the rows' positions
    (output). Moves each element once in, K and V twice out; partners come from L1. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    position = start + row
    page = tl.load(table_ptr + position // PAGE).to(tl.int64)
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
    cache = page * stride_kp + kv_heads.to(tl.int64) * stride_kh + (position % PAGE) * D + offs_d[None, :]
    piece = kv_heads.to(tl.int64) * stride_out + position * D + offs_d[None, :]
    qkv_ptr += HEADS * D
    k = tl.load(qkv_ptr + kv_heads * D + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    k_partner = tl.load(qkv_ptr + kv_heads * D + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    cos, sin = _rotation(cos_ptr, sin_ptr, k_norm_ptr, offs_d, D, QK_NORM)
    k = _rms_rope(k, k_partner, cos, sin, eps, D, QK_NORM).to(k_ptr.dtype.element_ty)
    tl.store(k_ptr + cache, k, mask=mask)
    tl.store(keys_ptr + piece, k, mask=mask)
    v = tl.load(qkv_ptr + (KV_HEADS + kv_heads) * D + offs_d[None, :], mask=mask)
    tl.store(v_ptr + cache, v, mask=mask)
    tl.store(values_ptr + piece, v, mask=mask)


def rope_write(table, qkv, q_norm, k_norm, cos, sin, start, q, k_cache, v_cache, keys, values, eps):
    """qkv [rows, (heads + 2 kv_heads) * D] -> q [rows, heads, D]; K/V at positions start, start + 1, ... into
    k_cache, v_cache [pages, kv_heads, page, D] through the slot's table, and into keys, values
    [kv_heads, >= start + rows, D]. cos, sin [rows, D / 2] fp32. q_norm, k_norm: [D] or None."""
    rows, heads, D = q.shape
    _, kv_heads, page, _ = k_cache.shape
    spare = cos  # stands in for absent norms
    _rope_write_kernel[(rows,)](
        table,
        qkv,
        spare if q_norm is None else q_norm,
        spare if k_norm is None else k_norm,
        cos,
        sin,
        q,
        k_cache,
        v_cache,
        keys,
        values,
        start,
        eps,
        k_cache.stride(0),
        k_cache.stride(1),
        keys.stride(0),
        page,
        heads,
        kv_heads,
        D,
        triton.next_power_of_2(heads),
        triton.next_power_of_2(kv_heads),
        triton.next_power_of_2(D),
        q_norm is not None,
        **options(4),
    )


def rope_write_ref(table, qkv, q_norm, k_norm, cos, sin, start, q, k_cache, v_cache, keys, values, eps):
    rows, heads, D = q.shape
    _, kv_heads, page, _ = k_cache.shape
    new_q, new_k, new_v = qkv.view(rows, -1, D).split((heads, kv_heads, kv_heads), dim=1)
    cos, sin = cos[:, None], sin[:, None]
    new_q, new_k = new_q.float(), new_k.float()
    if q_norm is not None:
        new_q, new_k = rms_norm(new_q, q_norm, eps), rms_norm(new_k, k_norm, eps)
    q.copy_(rotate(new_q, cos, sin))
    end = start + rows
    keys[:, start:end] = rotate(new_k, cos, sin).transpose(0, 1)
    values[:, start:end] = new_v.transpose(0, 1)
    for place in range(start // page, -(-end // page)):
        first, last = max(place * page, start), min((place + 1) * page, end)
        held = table[place], slice(None), slice(first - place * page, last - place * page)
        k_cache[held], v_cache[held] = keys[:, first:last], values[:, first:last]


def rope_write_bytes(table, qkv, q_norm, k_norm, cos, sin, start, q, k_cache, v_cache, keys, values, eps) -> int:
    """q, k and v in, q out, K and V out to the cache and in one piece; the rotation."""
    rows, kv_heads, D = q.shape[0], k_cache.shape[1], k_cache.shape[3]
    return 2 * qkv.nbytes + 2 * rows * kv_heads * D * k_cache.itemsize + cos.nbytes + sin.nbytes


ROPE_WRITE = Op(
    rope_write, rope_write_ref, rope_write_bytes, (_rope_write_kernel,), outputs=("q", "keys", "values")
)
