"""attention of several rows: as attention, by a fixed number of programs that share the work of all rows."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import META_WIDTH, POSITION, RUN, SLOT, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from .attention import attention_bytes, attention_ref
from .fp8_kv import is_fp8, put_fp8, scales
from .fp8_tiles import fp8_attend, fp8_keys, fp8_pages, fp8_queries, fp8_values, warp_positions
from .pages import page_rows, pages_at
from .rope import _partner, _rms_rope, _rotation
from .splits import EMPTY, LOG2E, _combine, blocks_seen, combine_splits


@dataclass(frozen=True)
class AttentionRowsConfig:
    """Launch config of attention of several rows: `programs` share the work, items of `block_t` positions a turn; a row
    has at most `splits` items per K/V head, each of at least `least` turns. registers: as above. stages: of the loop
    over an item's tiles, two for each tile on its way through shared memory and one; 1: the next one, in registers.
    early: the first tile is loaded before the wait, as no launch of this pass writes it. converts: as above."""

    block_t: int = 64
    splits: int = 32
    num_warps: int = 4
    registers: int = 0
    least: int = 4
    programs: int = 132
    stages: int = 1
    early: bool = True
    converts: bool = False


@triton.jit
def _pick(values, offs, index):
    return tl.sum(tl.where(offs == index, values, 0), 0)


@triton.jit
def _item(
    item,
    ends,
    active,
    positions,
    slots,
    offs_m,
    page_table_ptr,
    stride_table,
    KV_HEADS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Of an item of the work: row, head, split, splits of the row, position, page-table row, and its positions."""
    unit, head = item // KV_HEADS, item % KV_HEADS
    row = tl.sum((ends <= unit).to(tl.int32), 0)
    splits = _pick(active, offs_m, row)
    split = unit - _pick(ends, offs_m, row) + splits
    position = _pick(positions, offs_m, row)
    table_ptr = page_table_ptr + _pick(slots, offs_m, row) * stride_table
    start, first_block, blocks = blocks_seen(position, BLOCK_T, WINDOW)
    per_split = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    first = (first_block + split * per_split) * BLOCK_T
    end = tl.minimum(first + per_split * BLOCK_T, position)
    return row, head, split, splits, position, table_ptr, start, first, end


@triton.jit
def _tile(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    head,
    t,
    start,
    end,
    stride_kp,
    stride_kh,
    stride_sp,
    stride_sh,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FP8: tl.constexpr,
    WARP_T: tl.constexpr,
):
    """K [BLOCK_T, BLOCK_D] and V [BLOCK_D, BLOCK_T] of the positions from t that lie in [start, end); if FP8, what
    fp8_attend wants of them."""
    pages = fp8_pages(table_ptr, t, end, PAGE, WARP_T, BLOCK_T) if FP8 else pages_at(table_ptr, t, end, PAGE, BLOCK_T)
    k_ptr += head.to(tl.int64) * stride_kh
    v_ptr += head.to(tl.int64) * stride_kh
    if FP8:
        k_scale_ptr += head.to(tl.int64) * stride_sh
        v_scale_ptr += head.to(tl.int64) * stride_sh
        k = fp8_keys(k_ptr, k_scale_ptr, pages, t, end, stride_kp, stride_sp, PAGE, D, BLOCK_D, WARP_T, BLOCK_T)
        v = fp8_values(v_ptr, v_scale_ptr, pages, t, end, stride_kp, stride_sp, PAGE, D, BLOCK_D, WARP_T, BLOCK_T)
        return k, v, fp8_pages(table_ptr, t + BLOCK_T, end, PAGE, WARP_T, BLOCK_T)
    else:
        offs_t, offs_d = tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D)
        places = page_rows(pages, t, stride_kp, PAGE, D, BLOCK_T)
        there, mask_d = (t + offs_t >= start) & (t + offs_t < end), offs_d < D
        k = tl.load(k_ptr + places + offs_d[None, :], mask=there[:, None] & mask_d[None, :], other=0.0)
        v = tl.load(v_ptr + tl.trans(places) + offs_d[:, None], mask=mask_d[:, None] & there[None, :], other=0.0)
        return k, v


@triton.jit
def _attend(tile, dot_q, m, l_t, acc, t, start, end, offs_t, ELEMENT: tl.constexpr, TYPE: tl.constexpr):
    """The running maximum, sums of weights and sums of values with the tile of positions from t."""
    s = tl.dot(tile[0].to(TYPE), dot_q, input_precision="ieee")
    s = tl.where(((t + offs_t >= start) & (t + offs_t < end))[:, None], s, EMPTY)
    m_new = tl.maximum(m, tl.max(s, 0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[None, :])
    l_t = l_t * alpha[None, :] + p
    acc = tl.dot(tile[1].to(TYPE), p.to(ELEMENT).to(TYPE), acc * alpha[None, :], input_precision="ieee")
    return m_new, l_t, acc


@triton.jit
def _attention_rows_kernel(
    meta_ptr,
    page_table_ptr,
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
    stride_table,
    stride_kp,
    stride_kh,
    stride_sp,
    stride_sh,
    rows,
    BLOCK_M: tl.constexpr,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DOT_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    FP8: tl.constexpr,
    WARP_T: tl.constexpr,
    CONVERTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention of each row's token over its slot's cached positions and itself; writes its K and V.

    Arguments, and what they hold, as in _attention_kernel; without EARLY the launch before may have written some of the
    cache. Grid (PROGRAMS,): a row has a number of splits that its own
    length decides, so that its result does not depend on its neighbours; the items of work, K/V heads of splits of
    rows, are counted out to the programs by what every program reads from meta before the wait. The last split of a
    head to end combines.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    ELEMENT: tl.constexpr = tl.bfloat16 if FP8 else k_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else ELEMENT
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < rows
    positions = tl.load(meta_ptr + offs_m * META_WIDTH + POSITION, mask=mask_m, other=0)
    slots = tl.load(meta_ptr + offs_m * META_WIDTH + SLOT, mask=mask_m, other=0)
    runs = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=mask_m, other=-1) == RUN
    _, _, blocks = blocks_seen(positions, BLOCK_T, WINDOW)
    active = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, SPLITS), LEAST))
    active = tl.where(runs, tl.maximum(active, 1), 0)
    ends = tl.cumsum(active, 0)
    items = tl.sum(active, 0) * KV_HEADS
    if (pid >= items) & (pid > 0):
        return  # no wait: the grid ends after its predecessor as long as program 0, which always waits, does
    offs_g = tl.arange(0, DOT_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_T)
    mask_g = offs_g < GROUP
    mask_d = offs_d < D
    mask_q = mask_g[:, None] & mask_d[None, :]
    mask_o = mask_d[:, None] & mask_g[None, :]
    partner = _partner(offs_d, D)
    row, head, split, splits, position, table_ptr, start, first, end = _item(
        tl.maximum(tl.minimum(pid, items - 1), 0), ends, active, positions, slots, offs_m, page_table_ptr, stride_table,
        KV_HEADS, BLOCK_T, LEAST, SPLITS, WINDOW,
    )  # fmt: skip
    if PDL and not EARLY:
        gdc_wait()
    tile = _tile(
        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, first, start, end, stride_kp, stride_kh, stride_sp,
        stride_sh, PAGE, D, BLOCK_D, BLOCK_T, FP8, WARP_T,
    )  # fmt: skip
    if PDL and EARLY:
        gdc_wait()
    for item in tl.range(pid, items, PROGRAMS, num_stages=1, disable_licm=True):
        rope = position.to(tl.int64) * (D // 2)
        q_cos, q_sin = _rotation(cos_ptr + rope, sin_ptr + rope, q_norm_ptr, offs_d, D, QK_NORM)
        k_cos, k_sin = _rotation(cos_ptr + rope, sin_ptr + rope, k_norm_ptr, offs_d, D, QK_NORM)
        write_page = tl.load(table_ptr + position // PAGE).to(tl.int64)
        row_ptr = qkv_ptr + row * stride_qkv
        q_ptrs = row_ptr + (head * GROUP + offs_g)[:, None] * D
        new_ptr = row_ptr + (KV_HEADS * GROUP + head) * D
        new_k_ptrs = new_ptr + (offs_g * 0)[:, None]  # in every row, so that its scores need no exchange between warps
        q = tl.load(q_ptrs + offs_d[None, :], mask=mask_q, other=0.0).to(tl.float32)
        q_partner = tl.load(q_ptrs + partner[None, :], mask=mask_q, other=0.0).to(tl.float32)
        new_k = tl.load(new_k_ptrs + offs_d[None, :], mask=mask_q, other=0.0).to(tl.float32)
        new_k_partner = tl.load(new_k_ptrs + partner[None, :], mask=mask_q, other=0.0).to(tl.float32)
        new_v = tl.load(new_ptr + KV_HEADS * D + offs_d, mask=mask_d, other=0.0)
        new_v = new_v.to(tl.float32 if FP8 else ELEMENT)
        q = _rms_rope(q, q_partner, q_cos, q_sin, eps, D, QK_NORM) * (scale * LOG2E)
        dot_q = tl.trans(q.to(ELEMENT).to(TYPE))
        # The new token is attended as the cache will hold it; split 0 owns it, and begins with it.
        new_k = _rms_rope(new_k, new_k_partner, k_cos, k_sin, eps, D, QK_NORM)
        if FP8:
            write = write_page * stride_kp + head.to(tl.int64) * stride_kh + (position % PAGE) * D + offs_d
            cell = write_page * stride_sp + head.to(tl.int64) * stride_sh + position % PAGE
            new_k, new_v = put_fp8(
                new_k, new_v, k_ptr + (offs_g * 0)[:, None] + write[None, :], v_ptr + write, k_scale_ptr + cell,
                v_scale_ptr + cell, (offs_g == 0)[:, None] & mask_d[None, :], mask_d, split == 0,
            )  # fmt: skip
        else:
            new_k = new_k.to(ELEMENT)
            if split == 0:
                write = write_page * stride_kp + head.to(tl.int64) * stride_kh + (position % PAGE) * D
                mask_k = (offs_g == 0)[:, None] & mask_d[None, :]
                tl.store(k_ptr + write + (offs_g * 0)[:, None] + offs_d[None, :], new_k, mask=mask_k)
                tl.store(v_ptr + write + offs_d, new_v, mask=mask_d)
        # Positions are the rows of the first product, D of the second, the heads of the group the few columns of both.
        # Sums are kept for each place of a tile and added up at the end. Masked scores underflow to 0; where a window
        # hides a whole tile, a later score scales its sums to 0.
        s_new = tl.where(split == 0, tl.sum(q * new_k.to(tl.float32), 1), EMPTY)
        if FP8:
            of_head, of_scales = head.to(tl.int64) * stride_kh, head.to(tl.int64) * stride_sh
            m_all, l, acc = fp8_attend(
                fp8_queries(q, BLOCK_T // WARP_T, DOT_FP32), tile[0], tile[1], tile[2], k_ptr + of_head,
                v_ptr + of_head, k_scale_ptr + of_scales, v_scale_ptr + of_scales, table_ptr, first, start, end,
                stride_kp, stride_sp, PAGE, D, BLOCK_T, DOT_N, CONVERTS, DOT_FP32,
            )  # fmt: skip
            m = tl.maximum(m_all, s_new)
            alpha, p_new = tl.exp2(m_all - m), tl.where(split == 0, tl.exp2(s_new - m), 0.0)
            l = l * alpha + p_new
            acc = acc * alpha[None, :] + p_new[None, :] * new_v[:, None]
        else:
            m = s_new
            l_t = tl.zeros([BLOCK_T, DOT_N], tl.float32) + tl.where((offs_t == 0) & (split == 0), 1.0, 0.0)[:, None]
            acc = tl.zeros([BLOCK_D, DOT_N], tl.float32) + tl.where(split == 0, new_v.to(tl.float32), 0.0)[:, None]
            if STAGES > 1:
                m, l_t, acc = _attend(tile, dot_q, m, l_t, acc, first, start, end, offs_t, ELEMENT, TYPE)
                for t in tl.range(first + BLOCK_T, end, BLOCK_T, num_stages=STAGES):
                    tile = _tile(
                        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, t, start, end, stride_kp, stride_kh,
                        stride_sp, stride_sh, PAGE, D, BLOCK_D, BLOCK_T, FP8, WARP_T,
                    )  # fmt: skip
                    m, l_t, acc = _attend(tile, dot_q, m, l_t, acc, t, start, end, offs_t, ELEMENT, TYPE)
            else:
                for t in range(first, end, BLOCK_T):
                    following = _tile(  # in flight while the tile at t is attended to
                        k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, t + BLOCK_T, start, end, stride_kp,
                        stride_kh, stride_sp, stride_sh, PAGE, D, BLOCK_D, BLOCK_T, FP8, WARP_T,
                    )  # fmt: skip
                    m, l_t, acc = _attend(tile, dot_q, m, l_t, acc, t, start, end, offs_t, ELEMENT, TYPE)
                    tile = following
            l = tl.sum(l_t, 0)
        this_row, this_head, this_split, active_splits = row, head, split, splits
        row, head, split, splits, position, table_ptr, start, first, end = _item(
            tl.minimum(item + PROGRAMS, items - 1), ends, active, positions, slots, offs_m, page_table_ptr,
            stride_table, KV_HEADS, BLOCK_T, LEAST, SPLITS, WINDOW,
        )  # fmt: skip
        tile = _tile(  # of the next item
            k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, head, first, start, end, stride_kp, stride_kh, stride_sp,
            stride_sh, PAGE, D, BLOCK_D, BLOCK_T, FP8, WARP_T,
        )  # fmt: skip
        head_ptr = out_ptr + this_row * stride_om + this_head * GROUP * D
        if active_splits == 1:
            o = (acc / l[None, :]).to(out_ptr.dtype.element_ty)
            tl.store(head_ptr + offs_g[None, :] * D + offs_d[:, None], o, mask=mask_o)
        else:
            base = (this_row * KV_HEADS + this_head).to(tl.int64) * GROUP * MAX_SPLITS
            place = base + offs_g * MAX_SPLITS + this_split
            tl.store(partial_ptr + place[None, :] * D + offs_d[:, None], acc, mask=mask_o)
            tl.store(lse_ptr + place * 2, m, mask=mask_g)
            tl.store(lse_ptr + place * 2 + 1, l, mask=mask_g)
            tl.debug_barrier()
            arrived = tl.atomic_add(counter_ptr + this_row * KV_HEADS + this_head, 1)
            if arrived == active_splits - 1:
                tl.debug_barrier()
                _combine(
                    partial_ptr, lse_ptr, head_ptr, base, active_splits, GROUP, D, BLOCK_D, BLOCK_G, MAX_SPLITS,
                    COMBINE,
                )  # fmt: skip
                tl.store(counter_ptr + this_row * KV_HEADS + this_head, 0)


def attention_rows(
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
    """attention for several rows at once."""
    _, kv_heads, page, head_dim = k_cache.shape
    fp8 = is_fp8(k_cache)
    rows, group, k_scale, v_scale = len(out), out.shape[1] // (kv_heads * head_dim), scales(k_cache), scales(v_cache)
    spare = cos  # stands in for absent q/k norms
    assert not fp8 or config.stages == 1, "K/V in 8 bits are on their way in registers"
    assert config.splits <= partial.shape[2], "more splits than partial has room for"
    assert config.block_t % page == 0 or page % config.block_t == 0, "a tile must be whole pages or a part of one"
    _attention_rows_kernel[(config.programs,)](
        meta,
        page_table,
        qkv,
        spare if q_norm is None else q_norm,
        spare if k_norm is None else k_norm,
        cos,
        sin,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
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
        k_scale.stride(0),
        k_scale.stride(1),
        rows,
        triton.next_power_of_2(rows),
        page,
        kv_heads,
        group,
        head_dim,
        max(triton.next_power_of_2(head_dim), 64 if fp8 else 1),
        triton.next_power_of_2(group),
        max(triton.next_power_of_2(group), 8),
        config.block_t,
        config.least,
        config.splits,
        partial.shape[2],
        combine_splits(group, head_dim, config),
        window,
        q_norm is not None,
        fp8,
        warp_positions(config, page),
        config.converts,
        config.programs,
        config.stages,
        config.early,
        pdl,
        interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )


ATTENTION_ROWS = Op(
    attention_rows, attention_ref, attention_bytes, (_attention_rows_kernel,), outputs=("partial", "lse", "out")
)
