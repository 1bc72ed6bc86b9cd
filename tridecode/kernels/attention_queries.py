"""attention of several positions of each request: its rows share its K and V, and see the new ones before them."""

import triton
import triton.language as tl

from .attention import attention_bytes, attention_ref
from .attention_rows import _pick
from .common import META_WIDTH, POSITION, RUN, SLOT, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from .op import Op
from .rope import _partner
from .splits import EMPTY, LOG2E, _combined, attend_tiles, blocks_seen, combine_splits, tiles_ahead

EACH = tl.constexpr(2)  # columns that are added up at once; there are at least two queries
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
    AHEAD: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention of QUERIES rows of each request, at consecutive positions, over its cached positions and each other.

    Arguments, and what they hold, as in _attention_rows_kernel with EARLY; rows
    [r * QUERIES, (r + 1) * QUERIES) are a request's, of which the first ones run. Grid (requests * KV_HEADS * SPLITS,):
    a request has as many splits as its length says, all requests' are counted out to the first programs, and those
    behind leave at once: a loop over several would fill the registers with its addresses. The rows of a request are
    attended to together: its K and V are read once, for QUERIES * GROUP columns. New keys and values are taken from
    qkv, never from the cache, in a tile of their own, which split 0 ends with and writes. The last split of a head to
    end combines; if TOGETHER, which wants all programs to run at once, those of a head wait for each other, and each
    adds up some of the columns.
    """
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else k_ptr.dtype.element_ty
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
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
    if pid >= items:
        if PDL and pid == 0:
            gdc_wait()  # the others need not: the grid ends after its predecessor as long as one of them waits
        return
    offs_c = tl.arange(0, COLUMNS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, NEW)
    query, member = offs_c // GROUP, offs_c % GROUP
    unit, head = pid // KV_HEADS, pid % KV_HEADS
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
    k, v, seen, pages = tiles_ahead(
        k_head, v_head, table_ptr, first, start, end, stride_kp, PAGE, D, BLOCK_D, BLOCK_T, AHEAD
    )
    if PDL:
        gdc_wait()
    row_ptr = qkv_ptr + request * QUERIES * stride_qkv
    mask_c = query < count
    q_ptrs = row_ptr + query * stride_qkv + (head * GROUP + member) * D
    q = _rotated(q_ptrs, position + query, mask_c, cos_ptr, sin_ptr, q_norm_ptr, offs_d, eps, D, QK_NORM)
    dot_q = tl.trans((q * (scale * LOG2E)).to(k_ptr.dtype.element_ty).to(TYPE))
    mask_n = offs_n < tl.where(split == 0, count, 0)  # which has the new positions
    new_ptrs = row_ptr + offs_n * stride_qkv + (KV_HEADS * GROUP + head) * D
    new_k = _rotated(new_ptrs, position + offs_n, mask_n, cos_ptr, sin_ptr, k_norm_ptr, offs_d, eps, D, QK_NORM)
    new_k = new_k.to(k_ptr.dtype.element_ty)
    mask_new = mask_n[:, None] & (offs_d < D)[None, :]
    new_v = tl.load(new_ptrs[:, None] + KV_HEADS * D + offs_d[None, :], mask=mask_new, other=0.0)
    new_v = new_v.to(v_ptr.dtype.element_ty)

    m, l, acc = attend_tiles(
        dot_q, k, v, seen, pages, position + query - WINDOW + 1, k_head, v_head, table_ptr, position, first, end,
        stride_kp, PAGE, D, BLOCK_D, BLOCK_T, COLUMNS, AHEAD, WINDOW > 0, k_ptr.dtype.element_ty, DOT_FP32,
    )  # fmt: skip
    if split == 0:
        seen_new = (offs_n[:, None] <= query[None, :]) & mask_n[:, None]
        if WINDOW > 0:
            seen_new = seen_new & (offs_n[:, None] > query[None, :] - WINDOW)
        s_new = tl.where(seen_new, tl.dot(new_k.to(TYPE), dot_q, input_precision="ieee"), EMPTY)
        m_new = tl.maximum(m, tl.max(s_new, 0))
        alpha = tl.exp2(m - m_new)
        p_new = tl.where(seen_new, tl.exp2(s_new - m_new[None, :]), 0.0)
        l = l * alpha + tl.sum(p_new, 0)
        p_new = p_new.to(v_ptr.dtype.element_ty).to(TYPE)
        acc = tl.dot(tl.trans(new_v.to(TYPE)), p_new, acc * alpha[None, :], input_precision="ieee")
        m = m_new
        new = position + offs_n
        page = tl.load(table_ptr + new // PAGE, mask=mask_n, other=0).to(tl.int64)
        write = (page * stride_kp + (new % PAGE) * D)[:, None] + offs_d[None, :]
        tl.store(k_head + write, new_k, mask=mask_new)
        tl.store(v_head + write, new_v, mask=mask_new)

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
        counter = counter_ptr + request * KV_HEADS + head
        arrived = tl.atomic_add(counter, 1)
        if TOGETHER:
            there = arrived + 1
            while there < splits:
                there = tl.atomic_add(counter, 0, sem="acquire")
            tl.debug_barrier()
            for column in range(split * EACH, QUERIES * GROUP, splits * EACH):
                o = _combined(
                    partial_ptr, lse_ptr, base + column * MAX_SPLITS, splits, EACH, D, BLOCK_D, EACH, MAX_SPLITS,
                    COMBINE,
                )  # fmt: skip
                offs_e = column + tl.arange(0, EACH)
                rows = request * QUERIES + offs_e // GROUP
                o_ptrs = out_ptr + rows.to(tl.int64) * stride_om + (head * GROUP + offs_e % GROUP) * D
                mask_o = (offs_e // GROUP < count)[:, None] & (offs_d < D)[None, :]
                tl.store(o_ptrs[:, None] + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask_o)
            if tl.atomic_add(counter, 1, sem="relaxed") == 2 * splits - 1:  # nobody waits any more
                tl.store(counter, 0)
        elif arrived == splits - 1:
            tl.debug_barrier()
            o = _combined(
                partial_ptr, lse_ptr, base, splits, QUERIES * GROUP, D, BLOCK_D, COLUMNS, MAX_SPLITS, COMBINE
            )
            mask_o = mask_c[:, None] & (offs_d < D)[None, :]
            tl.store(out_ptrs[:, None] + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask_o)
            tl.store(counter, 0)


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
    together = shape.together and not interpreted()  # where programs run one after the other
    assert shape.splits <= partial.shape[2], "more splits than partial has room for"
    assert shape.block_t % page == 0 or page % shape.block_t == 0, "a tile must be whole pages or a part of one"
    _attention_queries_kernel[(requests * kv_heads * shape.splits,)](
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
        shape.ahead,
        shape.least,
        shape.splits,
        partial.shape[2],
        combine_splits(EACH.value if together else columns, head_dim, shape),
        window,
        q_norm is not None,
        together,
        pdl,
        interpreted(),
        **options(shape.num_warps, pdl),
    )


ATTENTION_QUERIES = Op(
    attention_queries, attention_ref, attention_bytes, (_attention_queries_kernel,), outputs=("partial", "lse", "out")
)
