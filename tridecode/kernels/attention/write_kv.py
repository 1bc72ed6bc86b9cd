"""write_kv: K and V of the rows of a pass enter the cache, before attention in which rows see each other."""

import triton
import triton.language as tl

from ..common import META_WIDTH, POSITION, RUN, SLOT, STATUS, gdc_launch_dependents, gdc_wait, options, running
from ..op import Op
from .rope import _partner, _rms_rope, _rotation, rms_norm, rotate


@triton.jit
def _write_kv_kernel(
    meta_ptr,
    page_table_ptr,
    qkv_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    eps,
    stride_qkv,
    stride_table,
    stride_kp,
    stride_kh,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """K, normalised where the family does and rotated, and V of each row's token at its position.

    meta: [rows, META_WIDTH] int32; page_table: [slots, max_pages] int32; qkv: [rows, (HEADS + 2 KV_HEADS) * D]; k_norm:
    [D]; cos, sin: [capacity, D / 2] fp32; K, V: [pages, KV_HEADS, PAGE, D] (output). Moves (8 + 2 * itemsize) * D bytes
    a row and head. Grid (KV_HEADS, rows). K stands in all rows of a tile, as in attention: so it has the bits that
    attention gives it.
    """
    head, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    position = tl.where(status == RUN, tl.load(meta_ptr + POSITION), 0)  # that of an idle row may be beyond all tables
    page = tl.load(page_table_ptr + tl.load(meta_ptr + SLOT) * stride_table + position // PAGE).to(tl.int64)
    offs_g, offs_d = tl.arange(0, TILE), tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    mask = (offs_g >= 0)[:, None] & mask_d[None, :]
    cos_ptr += position.to(tl.int64) * (D // 2)
    sin_ptr += position.to(tl.int64) * (D // 2)
    cos, sin = _rotation(cos_ptr, sin_ptr, k_norm_ptr, offs_d, D, QK_NORM)
    if PDL:
        gdc_wait()
    if status != RUN:
        return
    new_ptr = qkv_ptr + row * stride_qkv + (HEADS + head) * D
    k_ptrs = new_ptr + (offs_g * 0)[:, None]
    k = tl.load(k_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(k_ptrs + _partner(offs_d, D)[None, :], mask=mask, other=0.0).to(tl.float32)
    v = tl.load(new_ptr + KV_HEADS * D + offs_d, mask=mask_d, other=0.0).to(v_ptr.dtype.element_ty)
    k = _rms_rope(k, partner, cos, sin, eps, D, QK_NORM).to(k_ptr.dtype.element_ty)
    write = page * stride_kp + head.to(tl.int64) * stride_kh + (position % PAGE) * D
    first = (offs_g == 0)[:, None] & mask_d[None, :]
    tl.store(k_ptr + write + (offs_g * 0)[:, None] + offs_d[None, :], k, mask=first)
    tl.store(v_ptr + write + offs_d, v, mask=mask_d)


def write_kv(meta, page_table, qkv, k_norm, cos, sin, k_cache, v_cache, eps, *, config, pdl=False):
    """k_cache, v_cache [pages, kv_heads, page, D] get what qkv [rows, ...] says of each row's position; config:
    attention's, which comes next."""
    _, kv_heads, page, head_dim = k_cache.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    _write_kv_kernel[(kv_heads, len(meta))](
        meta,
        page_table,
        qkv,
        cos if k_norm is None else k_norm,  # a spare
        cos,
        sin,
        k_cache,
        v_cache,
        eps,
        qkv.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        page,
        kv_heads,
        heads,
        head_dim,
        triton.next_power_of_2(head_dim),
        max(triton.next_power_of_2(heads // kv_heads), 8),
        k_norm is not None,
        pdl,
        **options(config.num_warps, pdl),
    )


def write_kv_ref(meta, page_table, qkv, k_norm, cos, sin, k_cache, v_cache, eps):
    _, kv_heads, page, head_dim = k_cache.shape
    for row in running(meta, len(meta)):
        slot, position = meta[row, [SLOT.value, POSITION.value]].tolist()
        k, v = qkv[row].float().view(-1, head_dim)[-2 * kv_heads :].chunk(2)
        if k_norm is not None:
            k = rms_norm(k, k_norm, eps)
        place = page_table[slot, position // page].long(), slice(None), position % page
        k_cache[place] = rotate(k, cos[position], sin[position]).to(k_cache.dtype)
        v_cache[place] = v.to(v_cache.dtype)


def write_kv_bytes(meta, page_table, qkv, k_norm, cos, sin, k_cache, v_cache, eps) -> int:
    _, kv_heads, _, head_dim = k_cache.shape
    return len(running(meta, len(meta))) * 2 * kv_heads * head_dim * (qkv.itemsize + k_cache.itemsize)


WRITE_KV = Op(write_kv, write_kv_ref, write_kv_bytes, (_write_kv_kernel,))
