"""attention of several positions of each request: its rows share its K and V, and see the new ones before them."""

import triton
import triton.language as tl

from .attention import attention_bytes, attention_ref
from .attention_rows import _pick
from .common import META_WIDTH, POSITION, RUN, SLOT, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from .op import Op
from .pages import page_rows, pages_at
from .rope import _partner
from .splits import EMPTY, LOG2E, _combined, blocks_seen, combine_splits

NEW = 16  # new positions in their tile: the fewest rows that are multiplied at once, no fewer than a request has


@triton.jit
def _rotated(
    row_ptrs, positions, mask, cos_ptr, sin_ptr, norm_ptr, offs_d, eps, D: tl.constexpr, NORM: tl.constexpr
):
    """The rows [N, D padded] at row_ptrs [N], normalised if NORM, and rotated to their positions [N]."""
    lower, partner = offs_d < D // 2, _partner(offs_d, D)
    mask = mask[:, None] & (offs_d < D)[None, :]
    x = tl.load(row_ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_partner = tl.load(row_ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    place = positions.to(tl.int64)[:, None] * (D // 2) + tl.where(lower, offs_d, offs_d - D // 2)[None, :]
    cos = tl.load(cos_ptr + place, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + place, mask=mask, other=0.0)
    sin = tl.where(lower[None, :], -sin, sin)
    if NORM:
        cos *= tl.load(norm_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
        sin *= tl.load(norm_ptr + partner, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
    y = x * cos + x_partner * sin
    if NORM:
        y *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return y


@triton.jit
def _tile(
    table_ptr,
    t,
    start,
    end,
    stride_kp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Where the positions from t lie in a head of the cache, [BLOCK_T, BLOCK_D], and which are in [start, end)."""
    offs_t, offs_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
    places = page_rows(pages_at(table_ptr, t, end, PAGE, BLOCK_T), t, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
    return places, ((t + offs_t >= start) & (t + offs_t < end))[:, None] & (offs_d < D)[None, :]


@triton.jit
def _attention_queries_kernel(
    meta_ptr,
    page_table_ptr,
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    k_ptr,
    v_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    out_ptr,
    scale,
    eps,
    stride_qkv,
    stride_om,
    stride_table,
    stride_kp,
    stride_kh,
    requests,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NEW: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention of QUERIES rows of each request, at consecutive positions, over its cached positions and each other.

    Arguments, and what they hold, as in _attention_rows_kernel, without EARLY too; rows
    [r * QUERIES, (r + 1) * QUERIES) are a request's, of which the first ones run. Grid (PROGRAMS,); items of work as
    there, but for all rows of a request together: its K and V are read once, for QUERIES * GROUP columns. New keys and
    values are taken from qkv, never from the cache, in a tile of their own, which split 0 begins with and writes.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else k_ptr.dtype.element_ty
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < requests
    state_ptrs = meta_ptr + offs_m * (QUERIES * META_WIDTH)
    positions = tl.load(state_ptrs + POSITION, mask=mask_m, other=0)
    slots = tl.load(state_ptrs + SLOT, mask=mask_m, other=0)
    counts = positions * 0
    for query in tl.static_range(QUERIES):
        counts += (tl.load(state_ptrs + query * META_WIDTH + STATUS, mask=mask_m, other=-1) == RUN).to(tl.int32)
    _, first_blocks, blocks = blocks_seen(positions, BLOCK_T, WINDOW)
    per_splits = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    active = tl.where(counts > 0, tl.maximum(tl.cdiv(blocks, per_splits), 1), 0)
    ends = tl.cumsum(active, 0)
    items = tl.sum(active, 0) * KV_HEADS
    if (pid >= items) & (pid > 0):
        return  # no wait: the grid ends after its predecessor as long as program 0, which always waits, does
    if PDL and not EARLY:
        gdc_wait()
    offs_c = tl.arange(0, COLUMNS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_T)
    offs_n = tl.arange(0, NEW)
    query, member = offs_c // GROUP, offs_c % GROUP
    for each in range(pid, items, PROGRAMS):
        item = tl.minimum(each, items - 1)  # a tensor in the interpreter too
        unit, head = item // KV_HEADS, item % KV_HEADS
        request = tl.sum((ends <= unit).to(tl.int32), 0)
        splits, count = _pick(active, offs_m, request), _pick(counts, offs_m, request)
        split = unit - _pick(ends, offs_m, request) + splits
        position = _pick(positions, offs_m, request)
        table_ptr = page_table_ptr + _pick(slots, offs_m, request) * stride_table
        start = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
        per_split = _pick(per_splits, offs_m, request)
        first = (_pick(first_blocks, offs_m, request) + split * per_split) * BLOCK_T
        end = tl.minimum(first + per_split * BLOCK_T, position)
        k_head, v_head = k_ptr + head.to(tl.int64) * stride_kh, v_ptr + head.to(tl.int64) * stride_kh
        tile, mask = _tile(table_ptr, first, start, end, stride_kp, PAGE, D, BLOCK_D, BLOCK_T)
        k_t = tl.load(k_head + tile, mask=mask, other=0.0)
        if PDL:  # elsewhere registers do not hold values too
            v_t = tl.load(v_head + tile, mask=mask, other=0.0)
        if PDL and EARLY:
            gdc_wait()  # of further items there is nothing left to wait for
        row_ptr = qkv_ptr + request * QUERIES * stride_qkv
        mask_c = query < count
        q_ptrs = row_ptr + query * stride_qkv + (head * GROUP + member) * D
        q = _rotated(q_ptrs, position + query, mask_c, cos_ptr, sin_ptr, q_norm_ptr, offs_d, eps, D, QK_NORM)
        dot_q = tl.trans((q * (scale * LOG2E)).to(k_ptr.dtype.element_ty).to(TYPE))
        mask_n = offs_n < count
        new_ptrs = row_ptr + offs_n * stride_qkv + (KV_HEADS * GROUP + head) * D
        new_k = _rotated(new_ptrs, position + offs_n, mask_n, cos_ptr, sin_ptr, k_norm_ptr, offs_d, eps, D, QK_NORM)
        new_k = new_k.to(k_ptr.dtype.element_ty)
        mask_new = mask_n[:, None] & (offs_d < D)[None, :]
        new_v = tl.load(new_ptrs[:, None] + KV_HEADS * D + offs_d[None, :], mask=mask_new, other=0.0)
        new_v = new_v.to(v_ptr.dtype.element_ty)
        if split == 0:
            new = position + offs_n
            page = tl.load(table_ptr + new // PAGE, mask=mask_n, other=0).to(tl.int64)
            write = (page * stride_kp + (new % PAGE) * D)[:, None] + offs_d[None, :]
            tl.store(k_head + write, new_k, mask=mask_new)
            tl.store(v_head + write, new_v, mask=mask_new)

        # Positions are the rows of the first product, D of the second, the columns of both the heads of the group for
        # one query after another. Sums are kept for each place of a tile and added up at the end. Masked scores
        # underflow to 0; where a window hides a whole tile, a later score scales its sums to 0.
        seen_new = (offs_n[:, None] <= query[None, :]) & (mask_n[:, None] & (split == 0))
        if WINDOW > 0:
            seen_new = seen_new & (offs_n[:, None] > query[None, :] - WINDOW)
        s_new = tl.where(seen_new, tl.dot(new_k.to(TYPE), dot_q, input_precision="ieee"), EMPTY)
        m = tl.max(s_new, 0)
        p_new = tl.where(seen_new, tl.exp2(s_new - m[None, :]), 0.0)
        l_t = tl.zeros([BLOCK_T, COLUMNS], tl.float32) + tl.where(offs_t[:, None] == 0, tl.sum(p_new, 0)[None, :], 0.0)
        acc = tl.zeros([BLOCK_D, COLUMNS], tl.float32)
        p_new = p_new.to(v_ptr.dtype.element_ty).to(TYPE)
        acc = tl.dot(tl.trans(new_v.to(TYPE)), p_new, acc, input_precision="ieee")
        for t in range(first, end, BLOCK_T):
            if not PDL:
                v_t = tl.load(v_head + tile, mask=mask, other=0.0)
            tile, mask = _tile(table_ptr, t + BLOCK_T, start, end, stride_kp, PAGE, D, BLOCK_D, BLOCK_T)
            k_next = tl.load(k_head + tile, mask=mask, other=0.0)  # in flight while the tile at t is attended to
            if PDL:
                v_next = tl.load(v_head + tile, mask=mask, other=0.0)
            s = tl.dot(k_t.to(TYPE), dot_q, input_precision="ieee")
            seen = (t + offs_t < end)[:, None] & (query >= 0)[None, :]
            if WINDOW > 0:
                seen = seen & ((t + offs_t)[:, None] > (position + query)[None, :] - WINDOW)
            s = tl.where(seen, s, EMPTY)
            m_new = tl.maximum(m, tl.max(s, 0))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[None, :])
            l_t = l_t * alpha[None, :] + p
            p = p.to(v_ptr.dtype.element_ty).to(TYPE)
            acc = tl.dot(tl.trans(v_t.to(TYPE)), p, acc * alpha[None, :], input_precision="ieee")
            m, k_t = m_new, k_next
            if PDL:
                v_t = v_next
        l = tl.sum(l_t, 0)

        out_ptrs = out_ptr + (request * QUERIES + query).to(tl.int64) * stride_om + (head * GROUP + member) * D
        if splits == 1:
            o = (acc / l[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptrs[None, :] + offs_d[:, None], o, mask=(offs_d < D)[:, None] & mask_c[None, :])
        else:
            base = (request * KV_HEADS + head).to(tl.int64) * (QUERIES * GROUP * MAX_SPLITS)
            place = base + offs_c * MAX_SPLITS + split
            mask_p = offs_c < QUERIES * GROUP
            tl.store(
                partial_ptr + place[None, :] * D + offs_d[:, None], acc, mask=(offs_d < D)[:, None] & mask_p[None, :]
            )
            tl.store(lse_ptr + place * 2, m, mask=mask_p)
            tl.store(lse_ptr + place * 2 + 1, l, mask=mask_p)
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + request * KV_HEADS + head, 1)
            if arrived == splits - 1:
                tl.debug_barrier()
                o = _combined(
                    partial_ptr, lse_ptr, base, splits, QUERIES * GROUP, D, BLOCK_D, COLUMNS, MAX_SPLITS, COMBINE
                )
                mask_o = mask_c[:, None] & (offs_d < D)[None, :]
                tl.store(out_ptrs[:, None] + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask_o)
                tl.store(counter_ptr + request * KV_HEADS + head, 0)


def attention_queries(
    meta,
    page_table,
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    k_cache,
    v_cache,
    partial,
    lse,
    counter,
    out,
    scale,
    eps,
    window,
    *,
    shape,
    pdl=False,
):
    """attention for shape.queries rows of each request at once."""
    _, kv_heads, page, head_dim = k_cache.shape
    queries, group = shape.queries, out.shape[1] // (kv_heads * head_dim)
    requests, columns = len(out) // queries, max(triton.next_power_of_2(queries * group), 8)
    spare = cos  # stands in for absent q/k norms
    assert queries <= NEW and len(out) == requests * queries
    assert shape.splits <= partial.shape[2], "more splits than partial has room for"
    assert shape.block_t % page == 0 or page % shape.block_t == 0, "a tile must be whole pages or a part of one"
    _attention_queries_kernel[(shape.programs,)](
        meta,
        page_table,
        qkv,
        spare if q_norm is None else q_norm,
        spare if k_norm is None else k_norm,
        cos,
        sin,
        k_cache,
        v_cache,
        partial,
        lse,
        counter,
        out,
        scale,
        eps,
        qkv.stride(0),
        out.stride(0),
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        requests,
        queries,
        triton.next_power_of_2(requests),
        NEW,
        page,
        kv_heads,
        group,
        head_dim,
        triton.next_power_of_2(head_dim),
        columns,
        shape.block_t,
        shape.least,
        shape.splits,
        partial.shape[2],
        combine_splits(columns, head_dim, shape),
        window,
        q_norm is not None,
        shape.programs,
        shape.early,
        pdl,
        interpreted(),
        **options(shape.num_warps, pdl, shape.registers),
    )


ATTENTION_QUERIES = Op(
    attention_queries, attention_ref, attention_bytes, (_attention_queries_kernel,), outputs=("partial", "lse", "out")
)
