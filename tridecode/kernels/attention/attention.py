"""attention: q/k norm, RoPE, K/V write and split-KV attention of a token a row; the last split of a row combines."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common import (
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
from ..op import Op
from .attention_split import attend_split
from .fp8_kv import held, is_fp8, put, row_bytes, scales
from .fp8_tiles import warp_positions
from .rope import rms_norm, rotate
from .splits import blocks_seen, combine_splits


@dataclass(frozen=True)
class AttentionConfig:
    """Launch config of attention of one row, or few: `block_t` positions a turn (a multiple or a divisor of the page),
    at most `splits` programs per K/V head and row.

    few: splits of a row, as long as none has more than `turns` turns; a longer row has more of them. 0: as many as
    there may be.

    ahead: the turns of a split whose K and V are loaded before the wait; where all positions fit in as many, one split
    takes them. Of K/V in 8 bits one turn is, and converts says that the GPU has an instruction for them. registers: the
    most a thread may use, 0 for no bound.
    """

    block_t: int = 64
    splits: int = 32
    num_warps: int = 4
    registers: int = 0
    ahead: int = 1
    converts: bool = False
    few: int = 0
    turns: int = 32


@triton.jit
def _most_splits(blocks, SPLITS: tl.constexpr, FEW: tl.constexpr, TURNS: tl.constexpr):
    """FEW for so many blocks, or one for each TURNS of them, up to SPLITS."""
    return tl.minimum(tl.maximum(tl.cdiv(blocks, TURNS), FEW), SPLITS)


@triton.jit
def _row(meta_ptr, page_table_ptr, row, stride_table):
    """A row's status, position and page table."""
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    position = tl.load(meta_ptr + POSITION)
    return status, position, page_table_ptr + tl.load(meta_ptr + SLOT) * stride_table


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
    ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
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
    Moves 2 * KV_HEADS * D * itemsize bytes a position. Grid (KV_HEADS, ROWS * FEW + SPLITS - FEW). A row has as many
    splits as its own length says (see _most_splits), so that its result does not depend on its neighbours. The first
    FEW of all rows have a program each; those behind these share the others, of which there are mostly none. Programs
    without work leave at once, so that the next kernel's can start. The first AHEAD tiles are in flight before the
    wait, since only earlier steps wrote them.
    """
    head = tl.program_id(0)
    place = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    if SPLITS == FEW or place < ROWS * FEW:
        row, split = place % ROWS, place // ROWS
        status, position, table_ptr = _row(meta_ptr, page_table_ptr, row, stride_table)
        start, first_block, blocks = blocks_seen(position, BLOCK_T, WINDOW)
        # Few blocks stay in one split: what is loaded before the wait costs less than combining.
        turns = AHEAD if blocks <= AHEAD else tl.cdiv(blocks, _most_splits(blocks, SPLITS, FEW, TURNS))
        active = tl.maximum(tl.cdiv(blocks, turns), 1)
        if split >= active:
            return  # no wait: the grid ends after its predecessor as long as split 0, which always waits, does
        if status != RUN:
            if PDL:
                gdc_wait()
            return
        first = (first_block + split * turns) * BLOCK_T
        end = tl.minimum(first + turns * BLOCK_T, position)
        attend_split(
            row, head, split, active, position, table_ptr, start, first, end, qkv_ptr, q_norm_ptr, k_norm_ptr,
            cos_ptr, sin_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, partial_ptr, lse_ptr, counter_ptr, out_ptr,
            scale, eps, stride_qkv, stride_om, stride_kp, stride_kh, stride_sp, stride_sh, PAGE, KV_HEADS, GROUP, D,
            BLOCK_D, BLOCK_G, DOT_N, BLOCK_T, AHEAD, MAX_SPLITS, COMBINE, WINDOW, QK_NORM, FP8, WARP_T, CONVERTS, PDL,
            DOT_FP32,
        )  # fmt: skip
    else:
        offs_m = tl.arange(0, BLOCK_M)
        positions = tl.load(meta_ptr + offs_m * META_WIDTH + POSITION, mask=offs_m < ROWS, other=0)
        _, _, all_blocks = blocks_seen(positions, BLOCK_T, WINDOW)
        if _most_splits(tl.max(all_blocks, 0), SPLITS, FEW, TURNS) <= FEW:
            return
        before = 0  # splits beyond FEW of the rows before, which are dealt out to these programs in turn
        for row in tl.range(0, ROWS, num_stages=1, disable_licm=True):
            status, position, table_ptr = _row(meta_ptr, page_table_ptr, row, stride_table)
            start, first_block, blocks = blocks_seen(position, BLOCK_T, WINDOW)
            turns = AHEAD if blocks <= AHEAD else tl.cdiv(blocks, _most_splits(blocks, SPLITS, FEW, TURNS))
            active = tl.cdiv(blocks, turns)
            split = FEW + (place + before) % (SPLITS - FEW)
            before += tl.maximum(active - FEW, 0)
            if (split < active) & (status == RUN):
                first = (first_block + split * turns) * BLOCK_T
                end = tl.minimum(first + turns * BLOCK_T, position)
                attend_split(
                    row, head, split, active, position, table_ptr, start, first, end, qkv_ptr, q_norm_ptr, k_norm_ptr,
                    cos_ptr, sin_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, partial_ptr, lse_ptr, counter_ptr,
                    out_ptr, scale, eps, stride_qkv, stride_om, stride_kp, stride_kh, stride_sp, stride_sh, PAGE,
                    KV_HEADS, GROUP, D, BLOCK_D, BLOCK_G, DOT_N, BLOCK_T, AHEAD, MAX_SPLITS, COMBINE, WINDOW, QK_NORM,
                    FP8, WARP_T, CONVERTS, PDL, DOT_FP32,
                )  # fmt: skip


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
    config,
    pdl=False,
):
    """out[row] = attention of the row's token; its K and V enter the cache. window: 0, or the positions attended to."""
    _, kv_heads, page, head_dim = k_cache.shape
    group, k_scale, v_scale = out.shape[1] // (kv_heads * head_dim), scales(k_cache), scales(v_cache)
    spare, fp8 = cos, is_fp8(k_cache)  # stands in for absent q/k norms
    assert config.splits <= partial.shape[2], "more splits than partial has room for"
    assert config.block_t % page == 0 or page % config.block_t == 0, "a tile must be whole pages or a part of one"
    rows, splits = len(out), config.splits
    few = min(config.few or splits, splits)
    _attention_kernel[(kv_heads, rows * few + splits - few)](
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
        config.ahead,
        splits,
        few,
        config.turns,
        partial.shape[2],
        combine_splits(group, head_dim, config),
        window,
        q_norm is not None,
        fp8,
        warp_positions(config, page),
        config.converts,
        pdl,
        interpreted(),
        **options(config.num_warps, pdl, config.registers),
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
