"""attention: q/k norm, RoPE, K/V write and split-KV attention of one token; the last split combines."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .common import (
    META_WIDTH,
    PAGE_ROW,
    POSITION,
    RUN,
    STATUS,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    options,
    running,
)
from .rope import _rms_rope, rms_norm, rotate

LOG2E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(-1e30)  # running maximum of a split that saw no position


@dataclass(frozen=True)
class AttentionShape:
    """Launch shape: `block_t` positions a turn (a divisor of the page where a slot has several), at most `splits`
    programs a K/V head.

    ahead: the turns of a split whose K and V are loaded before the wait; where all positions fit in as many, one split
    takes them. registers: the most a thread may use, 0 for no bound.
    """

    block_t: int = 64
    splits: int = 32
    num_warps: int = 4
    registers: int = 0
    ahead: int = 1


@triton.jit
def _load_keys(
    k_ptrs, table_ptr, t, end, offs_t, mask_h, head, stride_kp, stride_kh, PAGE: tl.constexpr, D: tl.constexpr
):
    """Both halves of the keys at t + offs_t, zero from end on. k_ptrs: [D / 2 padded, T], the tile at offset 0."""
    page = tl.load(table_ptr + t // PAGE, mask=t < end, other=0).to(tl.int64)
    k_ptrs += page * stride_kp + head.to(tl.int64) * stride_kh + (t % PAGE) * D
    mask = (t + offs_t < end)[None, :] & mask_h[:, None]
    return tl.load(k_ptrs, mask=mask, other=0.0), tl.load(k_ptrs + D // 2, mask=mask, other=0.0)


@triton.jit
def _attend(q_lo, q_hi, k_lo, k_hi, v, mask_t, m, l, acc, DOT_FP32: tl.constexpr):
    """Add a tile of positions to the running maxima m, sums l [DOT_M] and outputs acc [DOT_M, D padded].

    q_lo, q_hi: [DOT_M, D / 2 padded], scaled; k_lo, k_hi: [D / 2 padded, T]; v: [T, D padded]; mask_t: [T].
    """
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else v.dtype
    s = tl.dot(q_lo.to(TYPE), k_lo.to(TYPE), input_precision="ieee")
    s = tl.dot(q_hi.to(TYPE), k_hi.to(TYPE), s, input_precision="ieee")
    s = tl.where(mask_t[None, :], s, EMPTY)
    m_new = tl.maximum(m, tl.max(s, 1))
    p = tl.where(mask_t[None, :], tl.exp2(s - m_new[:, None]), 0.0)
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    v = tl.where(mask_t[:, None], v, 0.0)  # after the scores, so that the tile takes the keys' shared memory
    acc = tl.dot(p.to(v.dtype).to(TYPE), v.to(TYPE), acc * alpha[:, None], input_precision="ieee")
    return m_new, l, acc


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
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
    DOT_M: tl.constexpr,
):
    """Attention of the token at `position` over the cached positions and itself; writes its K and V.

    meta: [slots, META_WIDTH] int32; page_table: [slots, max_pages] int32; qkv: [rows, (HEADS + 2 KV_HEADS) * D] fp32;
    q_norm, k_norm: [D]; cos, sin: [capacity, D / 2] fp32; K, V: [pages, KV_HEADS, PAGE, D], one position written;
    partial: [rows, HEADS, MAX_SPLITS, D] fp32, lse: [rows, HEADS, MAX_SPLITS, 2] fp32, counter: [rows, KV_HEADS]
    int32, zero between launches (scratch); out: [rows, HEADS * D] (output).
    Moves 2 * KV_HEADS * D * itemsize bytes a position. Grid (KV_HEADS, SPLITS, rows).
    Splits without work leave at once; the first AHEAD tiles are in flight before the wait, since only earlier steps
    wrote them.
    """
    head = tl.program_id(0)
    split = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        gdc_launch_dependents()
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    position = tl.load(meta_ptr + POSITION)
    table_ptr = page_table_ptr + tl.load(meta_ptr + PAGE_ROW) * stride_table
    start = 0
    if WINDOW > 0:
        start = tl.maximum(position - WINDOW + 1, 0)
    first_block = start // BLOCK_T
    blocks = tl.cdiv(position, BLOCK_T) - first_block
    # Few blocks stay in one split: what is loaded before the wait costs less than combining.
    blocks_per_split = AHEAD if blocks <= AHEAD else tl.cdiv(blocks, SPLITS)
    active = tl.maximum(tl.cdiv(blocks, blocks_per_split), 1)
    if (status != RUN) | (split >= active):
        if PDL:
            gdc_wait()
        return

    HALF: tl.constexpr = D // 2
    offs_g = tl.arange(0, DOT_M)
    offs_h = tl.arange(0, HALF_BLOCK)
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_T)
    mask_g = offs_g < GROUP
    mask_h = offs_h < HALF
    mask_d = offs_d < D
    cos = tl.load(cos_ptr + position.to(tl.int64) * HALF + offs_h, mask=mask_h, other=0.0)
    sin = tl.load(sin_ptr + position.to(tl.int64) * HALF + offs_h, mask=mask_h, other=0.0)
    q_norm_lo, q_norm_hi, k_norm_lo, k_norm_hi = cos, cos, cos, cos
    if QK_NORM:
        q_norm_lo = tl.load(q_norm_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        q_norm_hi = tl.load(q_norm_ptr + HALF + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        k_norm_lo = tl.load(k_norm_ptr + offs_h, mask=mask_h, other=0.0).to(tl.float32)
        k_norm_hi = tl.load(k_norm_ptr + HALF + offs_h, mask=mask_h, other=0.0).to(tl.float32)

    first = (first_block + split * blocks_per_split) * BLOCK_T
    end = tl.minimum(first + blocks_per_split * BLOCK_T, position)
    k_offs = offs_t[None, :] * D + offs_h[:, None]
    v_offs = offs_t[:, None] * D + offs_d[None, :]
    k_lo, k_hi, v = (), (), ()
    for i in tl.static_range(AHEAD):
        t = first + i * BLOCK_T
        page = tl.load(table_ptr + t // PAGE, mask=t < end, other=0).to(tl.int64)
        base = page * stride_kp + head.to(tl.int64) * stride_kh + (t % PAGE) * D
        mask_t = (t + offs_t >= start) & (t + offs_t < end)
        k_lo += (tl.load(k_ptr + base + k_offs, mask=mask_t[None, :] & mask_h[:, None], other=0.0),)
        k_hi += (tl.load(k_ptr + base + HALF + k_offs, mask=mask_t[None, :] & mask_h[:, None], other=0.0),)
        v += (tl.load(v_ptr + base + v_offs, mask=mask_t[:, None] & mask_d[None, :], other=0.0),)
    write_page = tl.load(table_ptr + position // PAGE).to(tl.int64)
    if PDL:
        gdc_wait()

    # Every load that depends on the predecessor is issued before the first use of one.
    qkv_ptr += row * stride_qkv
    q_ptrs = qkv_ptr + (head * GROUP + offs_g)[:, None] * D + offs_h[None, :]
    mask_q = mask_g[:, None] & mask_h[None, :]
    new_ptr = qkv_ptr + KV_HEADS * GROUP * D + head * D
    new_ptrs = new_ptr + (offs_g * 0)[:, None] + offs_h[None, :]
    q_lo = tl.load(q_ptrs, mask=mask_q, other=0.0)
    q_hi = tl.load(q_ptrs + HALF, mask=mask_q, other=0.0)
    new_lo = tl.load(new_ptrs, mask=mask_q, other=0.0)
    new_hi = tl.load(new_ptrs + HALF, mask=mask_q, other=0.0)
    new_v = tl.load(new_ptr + KV_HEADS * D + offs_d, mask=mask_d, other=0.0).to(v_ptr.dtype.element_ty)
    q_lo, q_hi = _rms_rope(q_lo, q_hi, q_norm_lo, q_norm_hi, cos, sin, eps, D, QK_NORM)
    q_lo = q_lo * (scale * LOG2E)
    q_hi = q_hi * (scale * LOG2E)
    dot_lo = q_lo.to(k_ptr.dtype.element_ty)
    dot_hi = q_hi.to(k_ptr.dtype.element_ty)

    m = tl.full([DOT_M], EMPTY, tl.float32)
    l = tl.zeros([DOT_M], tl.float32)
    acc = tl.zeros([DOT_M, BLOCK_D], tl.float32)
    for i in tl.static_range(AHEAD):
        t = first + i * BLOCK_T
        if t < end:
            mask_t = (t + offs_t >= start) & (t + offs_t < end)
            # The compiler puts a tile into shared memory where it was loaded, here before the wait. That is wanted for
            # the first keys only: with more than 48 KiB the driver runs nothing beside this kernel.
            k_lo_i = k_lo[i] if i == 0 else tl.where(mask_t[None, :], k_lo[i], 0.0)
            k_hi_i = k_hi[i] if i == 0 else tl.where(mask_t[None, :], k_hi[i], 0.0)
            m, l, acc = _attend(dot_lo, dot_hi, k_lo_i, k_hi_i, v[i], mask_t, m, l, acc, DOT_FP32)
    rest = first + AHEAD * BLOCK_T
    if rest < end:
        k_lo_t, k_hi_t = _load_keys(
            k_ptr + k_offs, table_ptr, rest, end, offs_t, mask_h, head, stride_kp, stride_kh, PAGE, D
        )
        for t in range(rest, end, BLOCK_T):
            page = tl.load(table_ptr + t // PAGE).to(tl.int64)
            base = page * stride_kp + head.to(tl.int64) * stride_kh + (t % PAGE) * D
            mask_t = t + offs_t < end
            v_t = tl.load(v_ptr + base + v_offs, mask=mask_t[:, None] & mask_d[None, :], other=0.0)
            k_lo_next, k_hi_next = _load_keys(  # in flight while the tile at t is attended to
                k_ptr + k_offs, table_ptr, t + BLOCK_T, end, offs_t, mask_h, head, stride_kp, stride_kh, PAGE, D
            )
            m, l, acc = _attend(dot_lo, dot_hi, k_lo_t, k_hi_t, v_t, mask_t, m, l, acc, DOT_FP32)
            k_lo_t, k_hi_t = k_lo_next, k_hi_next

    # The new token is attended as the cache will hold it; split 0 owns it. Its key stands in every row, so that its
    # scores need no exchange between warps.
    new_lo, new_hi = _rms_rope(new_lo, new_hi, k_norm_lo, k_norm_hi, cos, sin, eps, D, QK_NORM)
    new_lo = new_lo.to(k_ptr.dtype.element_ty)
    new_hi = new_hi.to(k_ptr.dtype.element_ty)
    if split == 0:
        write = write_page * stride_kp + head.to(tl.int64) * stride_kh + (position % PAGE) * D
        mask_k = (offs_g == 0)[:, None] & mask_h[None, :]
        tl.store(k_ptr + write + (offs_g * 0)[:, None] + offs_h[None, :], new_lo, mask=mask_k)
        tl.store(k_ptr + write + HALF + (offs_g * 0)[:, None] + offs_h[None, :], new_hi, mask=mask_k)
        tl.store(v_ptr + write + offs_d, new_v, mask=mask_d)
    s_new = tl.sum(q_lo * new_lo.to(tl.float32) + q_hi * new_hi.to(tl.float32), 1)
    s_new = tl.where(split == 0, s_new, EMPTY)
    m_new = tl.maximum(m, s_new)
    alpha = tl.exp2(m - m_new)
    p_new = tl.where(split == 0, tl.exp2(s_new - m_new), 0.0)
    l = l * alpha + p_new
    acc = acc * alpha[:, None] + p_new[:, None] * new_v.to(tl.float32)[None, :]
    m = m_new

    out_ptr += row * stride_om + head * GROUP * D
    mask_o = mask_g[:, None] & mask_d[None, :]
    if active == 1:
        o = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs_g[:, None] * D + offs_d[None, :], o, mask=mask_o)
    else:
        base_slot = (row * KV_HEADS + head) * GROUP * MAX_SPLITS
        slots = base_slot + offs_g * MAX_SPLITS + split
        tl.store(partial_ptr + slots[:, None] * D + offs_d[None, :], acc, mask=mask_o)
        tl.store(lse_ptr + slots * 2, m, mask=mask_g)
        tl.store(lse_ptr + slots * 2 + 1, l, mask=mask_g)
        tl.debug_barrier()
        arrived = tl.atomic_add(counter_ptr + row * KV_HEADS + head, 1)
        if arrived == active - 1:
            tl.debug_barrier()
            # Maxima, sums and partial outputs of COMBINE splits are loaded at once, so their latencies overlap.
            offs_q = tl.arange(0, BLOCK_G)
            mask_q1 = offs_q < GROUP
            offs_s = tl.arange(0, COMBINE)
            m_all = tl.full([BLOCK_G], EMPTY, tl.float32)
            denominator = tl.zeros([BLOCK_G], tl.float32)
            o = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            for s0 in range(0, active, COMBINE):
                index = base_slot + offs_q[:, None] * MAX_SPLITS + s0 + offs_s[None, :]
                mask_s = mask_q1[:, None] & (s0 + offs_s < active)[None, :]
                m_part = tl.load(lse_ptr + 2 * index, mask=mask_s, other=EMPTY, cache_modifier=".cg")
                l_part = tl.load(lse_ptr + 2 * index + 1, mask=mask_s, other=0.0, cache_modifier=".cg")
                o_part = tl.load(
                    partial_ptr + index[:, :, None] * D + offs_d[None, None, :],
                    mask=mask_s[:, :, None] & mask_d[None, None, :],
                    other=0.0,
                    cache_modifier=".cg",
                )
                m_top = tl.maximum(m_all, tl.max(m_part, 1))
                rescale = tl.exp2(m_all - m_top)
                weight = tl.exp2(m_part - m_top[:, None])
                denominator = denominator * rescale + tl.sum(l_part * weight, 1)
                o = o * rescale[:, None] + tl.sum(o_part * weight[:, :, None], 1)
                m_all = m_top
            denominator = tl.where(mask_q1, denominator, 1.0)
            o = (o / denominator[:, None]).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + offs_q[:, None] * D + offs_d[None, :], o, mask=mask_q1[:, None] & mask_d[None, :])
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
    rows = out.shape[0]
    _, kv_heads, page, head_dim = k_cache.shape
    group = out.shape[1] // (kv_heads * head_dim)
    spare = cos  # stands in for absent q/k norms
    assert shape.splits <= partial.shape[2], "more splits than partial has room for"
    _attention_kernel[(kv_heads, shape.splits, rows)](
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
        page,
        kv_heads,
        group,
        head_dim,
        max(triton.next_power_of_2(head_dim // 2), 16),
        triton.next_power_of_2(head_dim),
        triton.next_power_of_2(group),
        shape.block_t,
        shape.ahead,
        shape.splits,
        partial.shape[2],
        combine_splits(group, head_dim, shape),
        window,
        q_norm is not None,
        pdl,
        interpreted(),
        16,
        **options(shape.num_warps, pdl, shape.registers),
    )


def combine_splits(group: int, head_dim: int, shape: AttentionShape) -> int:
    """Splits whose partial results the last program loads at once: what 32 registers a thread hold."""
    tile = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return max(min(32 * shape.num_warps * 32 // tile, triton.next_power_of_2(shape.splits)), 2)


def attention_ref(
    meta, page_table, qkv, q_norm, k_norm, cos, sin, k_cache, v_cache, partial, lse, counter, out, scale, eps, window
):
    _, kv_heads, page, head_dim = k_cache.shape
    for row in running(meta, out.shape[0]):
        position = int(meta[row, POSITION.value])
        table = page_table[meta[row, PAGE_ROW.value]].long()
        q, k, v = qkv[row].view(-1, head_dim).split((out.shape[1] // head_dim, kv_heads, kv_heads))
        if q_norm is not None:
            q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
        q, k = rotate(q, cos[position], sin[position]), rotate(k, cos[position], sin[position])
        k_cache[table[position // page], :, position % page] = k.to(k_cache.dtype)
        v_cache[table[position // page], :, position % page] = v.to(v_cache.dtype)
        start = max(position - window + 1, 0) if window else 0
        if start // page == position // page:
            held = table[start // page], slice(None), slice(start % page, position % page + 1)
            keys, values = k_cache[held], v_cache[held]
        else:
            t = torch.arange(start, position + 1, device=table.device)
            keys = k_cache[table[t // page], :, t % page].transpose(0, 1)
            values = v_cache[table[t // page], :, t % page].transpose(0, 1)
        q = q.view(kv_heads, -1, head_dim)
        scores = (q @ keys.float().transpose(1, 2)) * scale
        out[row] = (torch.softmax(scores, -1) @ values.float()).reshape(-1).to(out.dtype)


def attention_bytes(positions: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """K and V of `positions` tokens; queries, outputs and partial results are small beside them."""
    return 2 * positions * kv_heads * head_dim * dtype.itemsize
