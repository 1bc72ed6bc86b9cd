"""A split of attention: q/k norm, RoPE, K/V write, and a K/V head's part of it over a range of a row's positions."""

import triton
import triton.language as tl

from ..common import gdc_wait
from .fp8_kv import put_fp8
from .fp8_tiles import fp8_attend, fp8_keys, fp8_pages, fp8_queries, fp8_values
from .rope import _partner, _rms_rope, _rotation
from .splits import EMPTY, LOG2E, _combine, attend_tiles, tiles_ahead


@triton.jit
def attend_split(
    row,
    head,
    split,
    active,
    position,
    table_ptr,
    start,
    first,
    end,
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    out_ptr,
    scale,
    eps,
    stride_qkv,
    stride_om,
    stride_kp,
    stride_kh,
    stride_sp,
    stride_sh,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DOT_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    FP8: tl.constexpr,
    WARP_T: tl.constexpr,
    CONVERTS: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention of one split of a row's positions, [first, end), for the heads that share a K/V head; the split that
    ends last combines all `active` ones. Tensors and numbers as in _attention_kernel."""
    ELEMENT: tl.constexpr = tl.bfloat16 if FP8 else k_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else ELEMENT
    offs_g = tl.arange(0, DOT_N)
    offs_d = tl.arange(0, BLOCK_D)
    mask_g = offs_g < GROUP
    mask_d = offs_d < D
    cos_ptr += position.to(tl.int64) * (D // 2)
    sin_ptr += position.to(tl.int64) * (D // 2)
    q_cos, q_sin = _rotation(cos_ptr, sin_ptr, q_norm_ptr, offs_d, D, QK_NORM)
    k_cos, k_sin = _rotation(cos_ptr, sin_ptr, k_norm_ptr, offs_d, D, QK_NORM)

    write_page = tl.load(table_ptr + position // PAGE).to(tl.int64)
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_kh
    k_scale_ptr += head.to(tl.int64) * stride_sh
    v_scale_ptr += head.to(tl.int64) * stride_sh
    if FP8:
        pages = fp8_pages(table_ptr, first, end, PAGE, WARP_T, BLOCK_T)
        k = fp8_keys(k_ptr, k_scale_ptr, pages, first, end, stride_kp, stride_sp, PAGE, D, BLOCK_D, WARP_T, BLOCK_T)
        v = fp8_values(v_ptr, v_scale_ptr, pages, first, end, stride_kp, stride_sp, PAGE, D, BLOCK_D, WARP_T, BLOCK_T)
        next_pages = fp8_pages(table_ptr, first + BLOCK_T, end, PAGE, WARP_T, BLOCK_T)
    else:
        k, v, seen, pages = tiles_ahead(
            k_ptr, v_ptr, table_ptr, first, start, end, stride_kp, PAGE, D, BLOCK_D, BLOCK_T, AHEAD
        )
    write = write_page * stride_kp + (position % PAGE) * D
    if PDL:
        gdc_wait()

    # Every load that depends on the predecessor is issued before the first use of one. The new key stands in every row,
    # so that its scores need no exchange between warps.
    qkv_ptr += row * stride_qkv
    q_ptrs = qkv_ptr + (head * GROUP + offs_g)[:, None] * D
    new_ptr = qkv_ptr + (KV_HEADS * GROUP + head) * D
    new_k_ptrs = new_ptr + (offs_g * 0)[:, None]
    partner = _partner(offs_d, D)
    mask_q = mask_g[:, None] & mask_d[None, :]
    q = tl.load(q_ptrs + offs_d[None, :], mask=mask_q, other=0.0).to(tl.float32)
    q_partner = tl.load(q_ptrs + partner[None, :], mask=mask_q, other=0.0).to(tl.float32)
    new_k = tl.load(new_k_ptrs + offs_d[None, :], mask=mask_q, other=0.0).to(tl.float32)
    new_k_partner = tl.load(new_k_ptrs + partner[None, :], mask=mask_q, other=0.0).to(tl.float32)
    new_v = tl.load(new_ptr + KV_HEADS * D + offs_d, mask=mask_d, other=0.0)
    new_v = new_v.to(tl.float32 if FP8 else ELEMENT)
    q = _rms_rope(q, q_partner, q_cos, q_sin, eps, D, QK_NORM) * (scale * LOG2E)
    if FP8:
        q_fp8 = fp8_queries(q, BLOCK_T // WARP_T, DOT_FP32)
        m, l, acc = fp8_attend(
            q_fp8, k, v, next_pages, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, first, start, end, stride_kp,
            stride_sp, PAGE, D, BLOCK_T, DOT_N, CONVERTS, DOT_FP32,
        )  # fmt: skip
    else:
        dot_q = tl.trans(q.to(ELEMENT).to(TYPE))
        m, l, acc = attend_tiles(
            dot_q, k, v, seen, pages, 0, k_ptr, v_ptr, table_ptr, position, first, end, stride_kp, PAGE, D, BLOCK_D,
            BLOCK_T, DOT_N, AHEAD, False, ELEMENT, DOT_FP32,
        )  # fmt: skip

    # The new token is attended as the cache will hold it; split 0 owns it.
    new_k = _rms_rope(new_k, new_k_partner, k_cos, k_sin, eps, D, QK_NORM)
    mask_k = (offs_g == 0)[:, None] & mask_d[None, :]
    k_ptrs, v_ptrs = k_ptr + write + (offs_g * 0)[:, None] + offs_d[None, :], v_ptr + write + offs_d
    if FP8:
        cell = write_page * stride_sp + position % PAGE
        new_k, new_v = put_fp8(
            new_k, new_v, k_ptrs, v_ptrs, k_scale_ptr + cell, v_scale_ptr + cell, mask_k, mask_d, split == 0
        )
    else:
        new_k = new_k.to(ELEMENT)
        if split == 0:
            tl.store(k_ptrs, new_k, mask=mask_k)
            tl.store(v_ptrs, new_v, mask=mask_d)
    s_new = tl.where(split == 0, tl.sum(q * new_k.to(tl.float32), 1), EMPTY)
    m_new = tl.maximum(m, s_new)
    alpha = tl.exp2(m - m_new)
    p_new = tl.where(split == 0, tl.exp2(s_new - m_new), 0.0)
    l = l * alpha + p_new
    acc = acc * alpha[None, :] + p_new[None, :] * new_v.to(tl.float32)[:, None]
    m = m_new

    out_ptr += row * stride_om + head * GROUP * D
    mask_o = mask_d[:, None] & mask_g[None, :]
    if active == 1:
        o = (acc / l[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs_g[None, :] * D + offs_d[:, None], o, mask=mask_o)
    else:
        base = (row * KV_HEADS + head) * GROUP * MAX_SPLITS
        place = base + offs_g * MAX_SPLITS + split
        tl.store(partial_ptr + place[None, :] * D + offs_d[:, None], acc, mask=mask_o)
        tl.store(lse_ptr + place * 2, m, mask=mask_g)
        tl.store(lse_ptr + place * 2 + 1, l, mask=mask_g)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + row * KV_HEADS + head, 1)
        if arrived == active - 1:
            tl.debug_barrier()
            _combine(
                partial_ptr, lse_ptr, out_ptr, base, active, GROUP, D, BLOCK_D, BLOCK_G, MAX_SPLITS, COMBINE,
            )  # fmt: skip
            tl.store(counter_ptr + row * KV_HEADS + head, 0)
