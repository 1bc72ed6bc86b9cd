"""attention: q/k norm, RoPE, K/V write and split-KV attention of one token; the last split combines."""

import torch
import triton
import triton.language as tl

from .common import (
    META_WIDTH,
    POSITION,
    RUN,
    SLOT,
    STATUS,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    options,
    running,
)
from .fp8_kv import held, is_fp8, put, put_fp8, row_bytes, scales
from .fp8_tiles import fp8_attend, fp8_keys, fp8_pages, fp8_queries, fp8_values, warp_positions
from .op import Op
from .pages import page_rows, pages_at
from .rope import _partner, _rms_rope, _rotation, rms_norm, rotate
from .splits import EMPTY, LOG2E, _combine, _held, combine_splits


@triton.jit
def _attention_kernel(
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
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    DOT_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW: tl.constexpr,
    TURNS: tl.constexpr,
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
    """Attention of each row's token, at `position`, over the cached positions and itself; writes its K and V.

    meta: [rows, META_WIDTH] int32; page_table: [slots, max_pages] int32; qkv:
    [rows, (HEADS + 2 KV_HEADS) * D]; q_norm, k_norm: [D]; cos, sin: [capacity, D / 2] fp32; K, V:
    [pages, KV_HEADS, PAGE, D], one layer's part of each page (PAGE and BLOCK_T: one divides the other), one position
    written; if FP8 codes, with scales [pages, KV_HEADS, PAGE] (see fp8_kv.py); partial:
    [rows, HEADS, MAX_SPLITS, D] fp32, lse: [rows, HEADS, MAX_SPLITS, 2] fp32, counter:
    [rows, KV_HEADS] int32, zero between launches (scratch); out: [rows, HEADS * D] (output).
    Moves 2 * KV_HEADS * D * itemsize bytes a position. Grid (KV_HEADS, rows, SPLITS), the first splits of all rows
    first. A row has as many splits as its own length says, so that its result does not depend on its neighbours: FEW,
    or one for TURNS blocks; SPLITS if FEW is 0. Those without work leave at once, so that the next kernel's programs
    can start. The first AHEAD tiles are in flight before the wait, since only earlier steps wrote them.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    position = tl.load(meta_ptr + POSITION)
    table_ptr = page_table_ptr + tl.load(meta_ptr + SLOT) * stride_table
    start = 0
    if WINDOW > 0:
        start = tl.maximum(position - WINDOW + 1, 0)
    first_block = start // BLOCK_T
    blocks = tl.cdiv(position, BLOCK_T) - first_block
    # Few blocks stay in one split: what is loaded before the wait costs less than combining.
    if FEW == 0:
        blocks_per_split = AHEAD if blocks <= AHEAD else tl.cdiv(blocks, SPLITS)
    else:
        splits = tl.minimum(tl.maximum(tl.cdiv(blocks, TURNS), FEW), SPLITS)
        blocks_per_split = AHEAD if blocks <= AHEAD else tl.cdiv(blocks, splits)
    active = tl.maximum(tl.cdiv(blocks, blocks_per_split), 1)
    if split >= active:
        return  # no wait: the grid ends after its predecessor as long as split 0, which always waits, does
    if status != RUN:
        if PDL:
            gdc_wait()
        return

    ELEMENT: tl.constexpr = tl.bfloat16 if FP8 else k_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else ELEMENT
    HOLD: tl.constexpr = TYPE != tl.float32  # the instruction takes two elements of 16 bits
    offs_g = tl.arange(0, DOT_N)
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_T)
    mask_g = offs_g < GROUP
    mask_d = offs_d < D
    cos_ptr += position.to(tl.int64) * (D // 2)
    sin_ptr += position.to(tl.int64) * (D // 2)
    q_cos, q_sin = _rotation(cos_ptr, sin_ptr, q_norm_ptr, offs_d, D, QK_NORM)
    k_cos, k_sin = _rotation(cos_ptr, sin_ptr, k_norm_ptr, offs_d, D, QK_NORM)

    first = (first_block + split * blocks_per_split) * BLOCK_T
    end = tl.minimum(first + blocks_per_split * BLOCK_T, position)
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
        k, v, seen = (), (), ()
        for i in tl.static_range(AHEAD):
            t = first + i * BLOCK_T
            pages = pages_at(table_ptr, t, end, PAGE, BLOCK_T)
            tiles = page_rows(pages, t, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
            seen += (((t + offs_t >= start) & (t + offs_t < end))[:, None],)
            mask = seen[i] & mask_d[None, :]
            k += (tl.load(k_ptr + tiles, mask=mask, other=0.0),)
            v += (tl.load(v_ptr + tiles, mask=mask, other=0.0),)
        rest = first + AHEAD * BLOCK_T
        rest_pages = pages_at(table_ptr, rest, end, PAGE, BLOCK_T)
        next_pages = pages_at(table_ptr, rest + BLOCK_T, end, PAGE, BLOCK_T)
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
        # Positions are the rows of the first product, D of the second, the heads of the group the few columns of both.
        # The tiles that were loaded ahead share one maximum; sums are kept for each place of a tile and added up at the
        # end. Masked scores underflow to 0. Where a window hides a whole tile, the new token's score scales its sums
        # to 0.
        scores = ()
        for i in tl.static_range(AHEAD):
            s = tl.full([BLOCK_T, DOT_N], EMPTY, tl.float32)
            if first + i * BLOCK_T < end:
                s = tl.dot(_held(k[i], position, HOLD).to(TYPE), dot_q, input_precision="ieee")
                s = tl.where(seen[i], s, EMPTY)
            scores += (s,)
        top = scores[0]
        for i in tl.static_range(1, AHEAD):
            top = tl.maximum(top, scores[i])
        m = tl.max(top, 0)
        l_t = tl.zeros([BLOCK_T, DOT_N], tl.float32)
        acc = tl.zeros([BLOCK_D, DOT_N], tl.float32)
        for i in tl.static_range(AHEAD):
            if first + i * BLOCK_T < end:
                p = tl.exp2(scores[i] - m[None, :])
                l_t += p
                tile = tl.trans(_held(v[i], position, HOLD).to(TYPE))
                acc = tl.dot(tile, p.to(ELEMENT).to(TYPE), acc, input_precision="ieee")
        if rest < end:
            tiles = page_rows(rest_pages, rest, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
            mask = (rest + offs_t < end)[:, None] & mask_d[None, :]
            k_t = tl.load(k_ptr + tiles, mask=mask, other=0.0)
            for t in range(rest, end, BLOCK_T):
                v_t = tl.load(v_ptr + tiles, mask=mask, other=0.0)
                seen_t = (t + offs_t < end)[:, None]
                tiles = page_rows(next_pages, t + BLOCK_T, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
                next_pages = pages_at(table_ptr, t + 2 * BLOCK_T, end, PAGE, BLOCK_T)  # a turn before they are needed
                mask = (t + BLOCK_T + offs_t < end)[:, None] & mask_d[None, :]
                k_next = tl.load(k_ptr + tiles, mask=mask, other=0.0)  # in flight while the tile at t is attended to
                s = tl.where(seen_t, tl.dot(k_t.to(TYPE), dot_q, input_precision="ieee"), EMPTY)
                m_new = tl.maximum(m, tl.max(s, 0))
                alpha = tl.exp2(m - m_new)
                p = tl.exp2(s - m_new[None, :])
                l_t = l_t * alpha[None, :] + p
                p = p.to(ELEMENT).to(TYPE)
                v_t = tl.trans(_held(v_t, position, HOLD).to(TYPE))
                acc = tl.dot(v_t, p, acc * alpha[None, :], input_precision="ieee")
                m = m_new
                k_t = k_next
        l = tl.sum(l_t, 0)

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


def attention(
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
    """out[row] = attention of the row's token; its K and V enter the cache. window: 0, or the positions attended to."""
    _, kv_heads, page, head_dim = k_cache.shape
    group, k_scale, v_scale = out.shape[1] // (kv_heads * head_dim), scales(k_cache), scales(v_cache)
    spare, fp8 = cos, is_fp8(k_cache)  # stands in for absent q/k norms
    assert shape.splits <= partial.shape[2], "more splits than partial has room for"
    assert shape.block_t % page == 0 or page % shape.block_t == 0, "a tile must be whole pages or a part of one"
    _attention_kernel[(kv_heads, out.shape[0], shape.splits)](
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
        page,
        kv_heads,
        group,
        head_dim,
        max(triton.next_power_of_2(head_dim), 64 if fp8 else 1),
        triton.next_power_of_2(group),
        max(triton.next_power_of_2(group), 8),
        shape.block_t,
        shape.ahead,
        shape.splits,
        min(shape.few, shape.splits),
        shape.turns,
        partial.shape[2],
        combine_splits(group, head_dim, shape),
        window,
        q_norm is not None,
        fp8,
        warp_positions(shape, page),
        shape.converts,
        pdl,
        interpreted(),
        **options(shape.num_warps, pdl, shape.registers),
    )


def attention_ref(
    meta, page_table, qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, partial, lse, counter, out, scale, eps,
    window,
):
    _, kv_heads, page, head_dim = k_cache.shape
    for row in running(meta, out.shape[0]):
        slot, position = meta[row, [SLOT.value, POSITION.value]].tolist()
        table = page_table[slot].long()
        q, k, v = qkv[row].float().view(-1, head_dim).split((out.shape[1] // head_dim, kv_heads, kv_heads))
        if q_norm is not None:
            q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        q, k = rotate(q, cos[position], sin[position]), rotate(k, cos[position], sin[position])
        cell = table[position // page], slice(None), position % page
        put(k_cache, cell, k)
        put(v_cache, cell, v)
        start = max(position - window + 1, 0) if window else 0
        if start // page == position // page:
            cells = table[start // page], slice(None), slice(start % page, position % page + 1)
            keys, values = held(k_cache, cells), held(v_cache, cells)
        else:
            t = torch.arange(start, position + 1, device=table.device)
            cells = table[t // page], slice(None), t % page
            keys, values = held(k_cache, cells).transpose(0, 1), held(v_cache, cells).transpose(0, 1)
        q = q.view(kv_heads, -1, head_dim)
        scores = (q @ keys.float().transpose(1, 2)) * scale
        out[row] = (torch.softmax(scores, -1) @ values.float()).reshape(-1).to(out.dtype)


def attention_bytes(
    meta, page_table, qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, partial, lse, counter, out, scale, eps,
    window,
) -> int:
    """K and V of the positions that the rows attend to now; queries, outputs and partial results are small beside."""
    positions = meta[running(meta, out.shape[0]), POSITION.value].tolist()
    return 2 * sum(min(position, window or position) for position in positions) * k_cache.shape[1] * row_bytes(k_cache)


ATTENTION = Op(attention, attention_ref, attention_bytes, (_attention_kernel,), outputs=("partial", "lse", "out"))
