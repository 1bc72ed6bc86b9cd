"""Attention of one split of a row with one new token."""

import triton
import triton.language as tl

from ..common import gdc_wait
from .fp8_tiles import fp8_attend, fp8_tile
from .new_token import load_token, store_token
from .pages import cell_of, head_of
from .rope import rms_rope, rotation
from .splits import EMPTY, LOG2E, store_split
from .tiles import attend_tiles, prefetch_tiles


@triton.jit
def attend_query(part, rows, cache, rotary, partials, PDL: tl.constexpr, SIZES: tl.constexpr):
    """Attend to the positions of the Split `part`, for the query heads that share its K/V head.

    Split 0 also attends to the new token, and writes its K and V.
    """
    D: tl.constexpr = SIZES.D
    FP8: tl.constexpr = SIZES.FP8
    QK_NORM: tl.constexpr = SIZES.QK_NORM
    ELEMENT: tl.constexpr = tl.bfloat16 if FP8 else cache.k_ptr.dtype.element_ty
    row, head, split, splits, position, table_ptr, start, first, end = part
    offs_d = tl.arange(0, SIZES.BLOCK_D)
    q_factors = rotation(rotary, rotary.q_norm_ptr, position, offs_d, D, SIZES.ROTARY, QK_NORM)
    k_factors = rotation(rotary, rotary.k_norm_ptr, position, offs_d, D, SIZES.ROTARY, QK_NORM)
    page = tl.load(table_ptr + position // SIZES.PAGE).to(tl.int64)
    cache = head_of(cache, head)
    if FP8:
        prefetched = fp8_tile(cache, table_ptr, first, end, SIZES)
    else:
        prefetched = prefetch_tiles(cache, table_ptr, first, start, end, SIZES)
    cell = cell_of(cache, page, position, SIZES.PAGE, D)
    if PDL:
        gdc_wait()

    # Issue all loads of the previous kernel's output before the first use of a result.
    q, q_partner, k, k_partner, v = load_token(
        rows.qkv_ptr + row * rows.stride_qkv, head, tl.float32 if FP8 else ELEMENT, SIZES
    )  # fmt: skip
    q = rms_rope(q, q_partner, q_factors, rotary.eps, D, QK_NORM) * (rows.scale * LOG2E)
    if FP8:
        m, l, acc = fp8_attend(q, prefetched, cache, table_ptr, first, start, end, SIZES)
    else:
        dot_q = tl.trans(q.to(ELEMENT).to(tl.float32 if SIZES.INTERPRETED else ELEMENT))
        m, l, acc = attend_tiles(dot_q, prefetched, 0, cache, table_ptr, position, first, end, False, SIZES)

    # The new token is attended to with the precision of the cache.
    k = rms_rope(k, k_partner, k_factors, rotary.eps, D, QK_NORM)
    k, v = store_token(cache, page, cell, position, k, v, split == 0, SIZES.PAGE, D, FP8)
    s_new = tl.where(split == 0, tl.sum(q * k.to(tl.float32), 1), EMPTY)
    m_new = tl.maximum(m, s_new)
    alpha = tl.exp2(m - m_new)
    p_new = tl.where(split == 0, tl.exp2(s_new - m_new), 0.0)
    l = l * alpha + p_new
    acc = acc * alpha[None, :] + p_new[None, :] * v.to(tl.float32)[:, None]
    out_ptr = rows.out_ptr + row * rows.stride_om + head * SIZES.GROUP * D
    gate_ptr = rows.qkv_ptr + row * rows.stride_qkv + head * SIZES.GROUP * SIZES.Q_COLUMNS + D
    store_split(partials, out_ptr, gate_ptr, row * SIZES.KV_HEADS + head, split, splits, m_new, l, acc, SIZES)
