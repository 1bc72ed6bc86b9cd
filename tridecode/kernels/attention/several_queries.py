"""Attention of one split of a request with several new tokens, which attend to each other."""

import triton
import triton.language as tl

from ..common import gdc_wait
from .pages import cell_of, head_of
from .rope import load_rotated
from .splits import EMPTY, LOG2E, combined, gated, store_partial
from .tiles import attend_tiles, prefetch_tiles

# Number of rows of the tile of new tokens. A matrix product needs at least 16, and a request has at most 16.
NEW = tl.constexpr(16)
AT_ONCE = tl.constexpr(2)  # Number of columns that are combined together. There are at least two queries.


@triton.jit
def attend_queries(
    part, count, together, rows, cache, rotary, partials, QUERIES: tl.constexpr, COMBINE_ALL: tl.constexpr,
    PDL: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Attend to the positions of the Split `part`, for the first `count` of QUERIES rows of its request.

    The queries belong to the heads that share the split's K/V head. Split 0 also attends to the new tokens, and writes
    their K and V. The split that finishes last combines all splits. If `together`, and if there are enough splits, they
    wait for each other instead, and each combines some of the columns, with the same results.
    """
    D: tl.constexpr = SIZES.D
    GROUP: tl.constexpr = SIZES.GROUP
    WINDOW: tl.constexpr = SIZES.WINDOW
    QK_NORM: tl.constexpr = SIZES.QK_NORM
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    ELEMENT: tl.constexpr = cache.k_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if SIZES.INTERPRETED else ELEMENT
    request, head, split, splits, position, table_ptr, start, first, end = part
    offs_c = tl.arange(0, COLUMNS)
    offs_d = tl.arange(0, SIZES.BLOCK_D)
    offs_n = tl.arange(0, NEW)
    query, member = offs_c // GROUP, offs_c % GROUP
    cache = head_of(cache, head)
    prefetched = prefetch_tiles(cache, table_ptr, first, start, end, SIZES)
    if PDL:
        gdc_wait()
    row_ptr = rows.qkv_ptr + request * QUERIES * rows.stride_qkv
    mask_c = query < count
    ROTARY: tl.constexpr = SIZES.ROTARY
    q_ptrs = row_ptr + query * rows.stride_qkv + (head * GROUP + member) * SIZES.Q_COLUMNS
    q = load_rotated(q_ptrs, position + query, mask_c, rotary, rotary.q_norm_ptr, SIZES.BLOCK_D, D, ROTARY, QK_NORM)
    dot_q = tl.trans((q * (rows.scale * LOG2E)).to(ELEMENT).to(TYPE))
    mask_n = offs_n < tl.where(split == 0, count, 0)
    new_ptrs = row_ptr + offs_n * rows.stride_qkv + (SIZES.KV_HEADS * GROUP * (SIZES.Q_COLUMNS // D) + head) * D
    new_k = load_rotated(
        new_ptrs, position + offs_n, mask_n, rotary, rotary.k_norm_ptr, SIZES.BLOCK_D, D, ROTARY, QK_NORM
    ).to(ELEMENT)  # fmt: skip
    mask_new = mask_n[:, None] & (offs_d < D)[None, :]
    new_v = tl.load(new_ptrs[:, None] + SIZES.KV_HEADS * D + offs_d[None, :], mask=mask_new, other=0.0)
    new_v = new_v.to(ELEMENT)

    lows = position + query - WINDOW + 1
    m, l, acc = attend_tiles(dot_q, prefetched, lows, cache, table_ptr, position, first, end, WINDOW > 0, SIZES)
    if split == 0:
        seen = (offs_n[:, None] <= query[None, :]) & mask_n[:, None]
        if WINDOW > 0:
            seen = seen & (offs_n[:, None] > query[None, :] - WINDOW)
        s = tl.where(seen, tl.dot(new_k.to(TYPE), dot_q, input_precision="ieee"), EMPTY)
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2(m - m_new)
        p = tl.where(seen, tl.exp2(s - m_new[None, :]), 0.0)
        l = l * alpha + tl.sum(p, 0)
        p = p.to(ELEMENT).to(TYPE)
        acc = tl.dot(tl.trans(new_v.to(TYPE)), p, acc * alpha[None, :], input_precision="ieee")
        m = m_new
        new = position + offs_n
        page = tl.load(table_ptr + new // SIZES.PAGE, mask=mask_n, other=0).to(tl.int64)
        write = cell_of(cache, page, new, SIZES.PAGE, D)[:, None] + offs_d[None, :]
        tl.store(cache.k_ptr + write, new_k, mask=mask_new)
        tl.store(cache.v_ptr + write, new_v, mask=mask_new)

    if splits == 1:
        mask = (offs_d < D)[:, None] & mask_c[None, :]
        gate_ptrs = _gate_ptrs(rows, request, head, offs_c, QUERIES, SIZES)
        o = gated(acc / l[None, :], gate_ptrs[None, :] + offs_d[:, None], mask, SIZES).to(rows.out_ptr.dtype.element_ty)
        ptrs = _output_ptrs(rows, request, head, offs_c, QUERIES, SIZES)
        tl.store(ptrs[None, :] + offs_d[:, None], o, mask=mask)
    else:
        unit = request * SIZES.KV_HEADS + head
        base = unit.to(tl.int64) * (QUERIES * GROUP * SIZES.MAX_SPLITS)
        store_partial(partials, base, split, m, l, acc, QUERIES * GROUP, SIZES)
        tl.debug_barrier()
        counter_ptr = partials.counter_ptr + unit
        arrived = tl.atomic_add(counter_ptr, 1)
        # Otherwise each split would combine its columns in more than two iterations.
        if splits * AT_ONCE * 2 < QUERIES * GROUP:
            if arrived == splits - 1:
                tl.debug_barrier()
                o = combined(partials, base, splits, QUERIES * GROUP, COLUMNS, COMBINE_ALL, SIZES)
                ptrs = _output_ptrs(rows, request, head, offs_c, QUERIES, SIZES)
                mask = mask_c[:, None] & (offs_d < D)[None, :]
                gate_ptrs = _gate_ptrs(rows, request, head, offs_c, QUERIES, SIZES)
                o = gated(o, gate_ptrs[:, None] + offs_d[None, :], mask, SIZES)
                tl.store(ptrs[:, None] + offs_d[None, :], o.to(rows.out_ptr.dtype.element_ty), mask=mask)
                tl.store(counter_ptr, 0)
        else:
            finished = tl.where(together, arrived + 1, splits)
            while finished < splits:
                finished = tl.atomic_add(counter_ptr, 0, sem="acquire")
            tl.debug_barrier()
            # The split that arrives last combines all columns.
            alone = tl.where(arrived == splits - 1, 0, QUERIES * GROUP)
            step = tl.where(together, splits, 1) * AT_ONCE
            for column in range(tl.where(together, split * AT_ONCE, alone), QUERIES * GROUP, step):
                o = combined(partials, base + column * SIZES.MAX_SPLITS, splits, AT_ONCE, AT_ONCE, SIZES.COMBINE, SIZES)
                offs = column + tl.arange(0, AT_ONCE)
                ptrs = _output_ptrs(rows, request, head, offs, QUERIES, SIZES)
                mask = (offs // GROUP < count)[:, None] & (offs_d < D)[None, :]
                gate_ptrs = _gate_ptrs(rows, request, head, offs, QUERIES, SIZES)
                o = gated(o, gate_ptrs[:, None] + offs_d[None, :], mask, SIZES)
                tl.store(ptrs[:, None] + offs_d[None, :], o.to(rows.out_ptr.dtype.element_ty), mask=mask)
            left = splits + arrived
            if together:
                left = tl.atomic_add(counter_ptr, 1, sem="relaxed")
            if left == 2 * splits - 1:  # No other split waits.
                tl.store(counter_ptr, 0)


@triton.jit
def _output_ptrs(rows, request, head, offs_c, QUERIES: tl.constexpr, SIZES: tl.constexpr):
    """Return the pointers to the outputs of columns offs_c: query by query, the heads that share a K/V head."""
    row = (request * QUERIES + offs_c // SIZES.GROUP).to(tl.int64)
    return rows.out_ptr + row * rows.stride_om + (head * SIZES.GROUP + offs_c % SIZES.GROUP) * SIZES.D


@triton.jit
def _gate_ptrs(rows, request, head, offs_c, QUERIES: tl.constexpr, SIZES: tl.constexpr):
    """Return the pointers to the gates of columns offs_c."""
    row = (request * QUERIES + offs_c // SIZES.GROUP).to(tl.int64)
    columns = (head * SIZES.GROUP + offs_c % SIZES.GROUP) * SIZES.Q_COLUMNS + SIZES.D
    return rows.qkv_ptr + row * rows.stride_qkv + columns
