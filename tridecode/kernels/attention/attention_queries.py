"""attention of several positions of each request: its rows share its K and V, and see the new ones before them."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import META_WIDTH, POSITION, RUN, SLOT, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from .attention import _most_splits, attention_bytes, attention_ref
from .rope import _partner
from .splits import EMPTY, LOG2E, _combined, attend_tiles, blocks_seen, combine_splits, tiles_ahead

EACH = tl.constexpr(2)  # columns that are added up at once; there are at least two queries
NEW = 16  # new positions in their tile: the fewest rows that are multiplied at once, no fewer than a request has


@dataclass(frozen=True)
class QueriesConfig:
    """Launch config of attention of `queries` rows of each request, which are attended to together; fields as of
    AttentionConfig for a request, whose splits have `least` turns or more. together: where no request has more than
    `few` splits, all programs run at once, and those of a head add up together."""

    queries: int
    block_t: int = 32
    splits: int = 32
    num_warps: int = 8
    ahead: int = 1
    few: int = 0
    turns: int = 32
    least: int = 2
    together: bool = False
    registers: int = 0


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
def _attend_queries(
    request,
    head,
    split,
    splits,
    together,
    count,
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
    QUERIES: tl.constexpr,
    NEW: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    COMBINE_ALL: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention of one split of a request's cached positions, [first, end), for its first `count` rows and the heads
    that share a K/V head; split 0 ends with the new positions. The split that ends last adds up all `splits`; if
    `together`, and there are enough of them, they wait for each other, and each adds up some of the columns, the same
    way. Tensors and numbers as in _attention_queries_kernel."""
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else k_ptr.dtype.element_ty
    offs_c = tl.arange(0, COLUMNS)
    offs_d = tl.arange(0, BLOCK_D)
    offs_n = tl.arange(0, NEW)
    query, member = offs_c // GROUP, offs_c % GROUP
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_kh
    k, v, seen, pages = tiles_ahead(
        k_ptr, v_ptr, table_ptr, first, start, end, stride_kp, PAGE, D, BLOCK_D, BLOCK_T, AHEAD
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
        dot_q, k, v, seen, pages, position + query - WINDOW + 1, k_ptr, v_ptr, table_ptr, position, first, end,
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
        tl.store(k_ptr + write, new_k, mask=mask_new)
        tl.store(v_ptr + write, new_v, mask=mask_new)

    if splits == 1:
        out_ptrs = out_ptr + (request * QUERIES + query).to(tl.int64) * stride_om + (head * GROUP + member) * D
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
        counter_ptr += request * KV_HEADS + head
        arrived = tl.atomic_add(counter_ptr, 1)
        if splits * EACH * 2 < QUERIES * GROUP:  # so few would take their columns in more than two turns
            if arrived == splits - 1:
                tl.debug_barrier()
                o = _combined(
                    partial_ptr, lse_ptr, base, splits, QUERIES * GROUP, D, BLOCK_D, COLUMNS, MAX_SPLITS, COMBINE_ALL
                )
                out_ptrs = out_ptr + (request * QUERIES + query).to(tl.int64) * stride_om + (head * GROUP + member) * D
                mask_o = mask_c[:, None] & (offs_d < D)[None, :]
                tl.store(out_ptrs[:, None] + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask_o)
                tl.store(counter_ptr, 0)
        else:
            there = tl.where(together, arrived + 1, splits)
            while there < splits:
                there = tl.atomic_add(counter_ptr, 0, sem="acquire")
            tl.debug_barrier()
            mine = tl.where(arrived == splits - 1, 0, QUERIES * GROUP)  # none but of the last
            step = tl.where(together, splits, 1) * EACH
            for column in range(tl.where(together, split * EACH, mine), QUERIES * GROUP, step):
                o = _combined(
                    partial_ptr, lse_ptr, base + column * MAX_SPLITS, splits, EACH, D, BLOCK_D, EACH, MAX_SPLITS,
                    COMBINE,
                )  # fmt: skip
                offs_e = column + tl.arange(0, EACH)
                rows = request * QUERIES + offs_e // GROUP
                o_ptrs = out_ptr + rows.to(tl.int64) * stride_om + (head * GROUP + offs_e % GROUP) * D
                mask_o = (offs_e // GROUP < count)[:, None] & (offs_d < D)[None, :]
                tl.store(o_ptrs[:, None] + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask_o)
            left = splits + arrived
            if together:
                left = tl.atomic_add(counter_ptr, 1, sem="relaxed")
            if left == 2 * splits - 1:  # nobody waits any more
                tl.store(counter_ptr, 0)


@triton.jit
def _request(meta_ptr, page_table_ptr, request, stride_table, QUERIES: tl.constexpr):
    """Of a request: how many of its rows run, the position of the first, and its page table."""
    meta_ptr += request * (QUERIES * META_WIDTH)
    position = tl.load(meta_ptr + POSITION)
    table_ptr = page_table_ptr + tl.load(meta_ptr + SLOT) * stride_table
    count = position * 0
    for query in tl.static_range(QUERIES):
        count += (tl.load(meta_ptr + query * META_WIDTH + STATUS) == RUN).to(tl.int32)
    return count, position, table_ptr


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
    REQUESTS: tl.constexpr,
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
    FEW: tl.constexpr,
    TURNS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    COMBINE_ALL: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention of QUERIES rows of each request, at consecutive positions, over its cached positions and each other.

    Arguments, and what they hold, as in _attention_kernel; rows [r * QUERIES, (r + 1) * QUERIES) are a request's, of
    which the first ones run. They are attended to together: the request's K and V are read once, for QUERIES * GROUP
    columns. New keys and values are taken from qkv, never from the cache, in a tile of their own. Splits of a request,
    and the grid (KV_HEADS, REQUESTS * FEW + SPLITS - FEW), as in _attention_kernel, in splits of LEAST turns or more.
    TOGETHER, where the first FEW of all requests run at once: if nobody has more, they add up together.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    together = TOGETHER
    if SPLITS > FEW:
        offs_m = tl.arange(0, BLOCK_M)
        positions = tl.load(meta_ptr + offs_m * (QUERIES * META_WIDTH) + POSITION, mask=offs_m < REQUESTS, other=0)
        _, _, all_blocks = blocks_seen(positions, BLOCK_T, WINDOW)
        longest = _most_splits(tl.max(all_blocks, 0), SPLITS, FEW, TURNS)
        together = TOGETHER and longest == FEW
    if SPLITS == FEW or place < REQUESTS * FEW:
        request, split = place % REQUESTS, place // REQUESTS
        count, position, table_ptr = _request(meta_ptr, page_table_ptr, request, stride_table, QUERIES)
        start, first_block, blocks = blocks_seen(position, BLOCK_T, WINDOW)
        turns = tl.maximum(tl.cdiv(blocks, _most_splits(blocks, SPLITS, FEW, TURNS)), LEAST)
        splits = tl.maximum(tl.cdiv(blocks, turns), 1)
        if split >= splits:
            return  # no wait: the grid ends after its predecessor as long as split 0, which always waits, does
        if count == 0:
            if PDL:
                gdc_wait()
            return
        first = (first_block + split * turns) * BLOCK_T
        end = tl.minimum(first + turns * BLOCK_T, position)
        _attend_queries(
            request, head, split, splits, together, count, position, table_ptr, start, first, end, qkv_ptr, q_norm_ptr,
            k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr, scale, eps,
            stride_qkv, stride_om, stride_kp, stride_kh, QUERIES, NEW, PAGE, KV_HEADS, GROUP, D, BLOCK_D, COLUMNS,
            BLOCK_T, AHEAD, MAX_SPLITS, COMBINE, COMBINE_ALL, WINDOW, QK_NORM, PDL, DOT_FP32,
        )  # fmt: skip
    else:
        if longest == FEW:
            return
        before = 0  # splits beyond FEW of the requests before, which are dealt out to these programs in turn
        for request in tl.range(0, REQUESTS, num_stages=1, disable_licm=True):
            count, position, table_ptr = _request(meta_ptr, page_table_ptr, request, stride_table, QUERIES)
            start, first_block, blocks = blocks_seen(position, BLOCK_T, WINDOW)
            turns = tl.maximum(tl.cdiv(blocks, _most_splits(blocks, SPLITS, FEW, TURNS)), LEAST)
            splits = tl.cdiv(blocks, turns)
            split = FEW + (place + before) % (SPLITS - FEW)
            before += tl.maximum(splits - FEW, 0)
            if (split < splits) & (count > 0):
                first = (first_block + split * turns) * BLOCK_T
                end = tl.minimum(first + turns * BLOCK_T, position)
                _attend_queries(
                    request, head, split, splits, together, count, position, table_ptr, start, first, end, qkv_ptr,
                    q_norm_ptr, k_norm_ptr, cos_ptr, sin_ptr, k_ptr, v_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr,
                    scale, eps, stride_qkv, stride_om, stride_kp, stride_kh, QUERIES, NEW, PAGE, KV_HEADS, GROUP, D,
                    BLOCK_D, COLUMNS, BLOCK_T, AHEAD, MAX_SPLITS, COMBINE, COMBINE_ALL, WINDOW, QK_NORM, PDL, DOT_FP32,
                )  # fmt: skip


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
    config,
    pdl=False,
):
    """attention for config.queries rows of each request at once."""
    _, kv_heads, page, head_dim = k_cache.shape
    queries, group = config.queries, out.shape[1] // (kv_heads * head_dim)
    requests, columns = len(out) // queries, max(triton.next_power_of_2(queries * group), 8)
    spare = cos  # stands in for absent q/k norms
    few = min(config.few or config.splits, config.splits)
    assert queries <= NEW and len(out) == requests * queries
    assert config.splits <= partial.shape[2], "more splits than partial has room for"
    assert config.block_t % page == 0 or page % config.block_t == 0, "a tile must be whole pages or a part of one"
    _attention_queries_kernel[(kv_heads, requests * few + config.splits - few)](
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
        config.block_t,
        config.ahead,
        config.least,
        config.splits,
        few,
        config.turns,
        partial.shape[2],
        combine_splits(EACH.value, head_dim, config),
        combine_splits(columns, head_dim, config),
        window,
        q_norm is not None,
        config.together and not interpreted(),  # where programs run one after the other
        pdl,
        interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )


ATTENTION_QUERIES = Op(
    attention_queries, attention_ref, attention_bytes, (_attention_queries_kernel,), outputs=("partial", "lse", "out")
)
