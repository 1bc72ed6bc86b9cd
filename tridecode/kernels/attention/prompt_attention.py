"""prompt_attention: causal attention of chunks of prompts, rows of one slot or of many, over K/V in their pages."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention
from triton.tools.tensor_descriptor import TensorDescriptor

from ..chunks import listed
from ..common import gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from . import prompt_attention_hopper
from .fp8_kv import from_e4m3, held, is_fp8, row_bytes, scales
from .pages import pool_rows
from .prompt_splits import (
    _prompt_splits_kernel,
    block_of,
    blocks_of,
    heads_together,
    rows_at_once,
    shares,
    splits_of,
    store_rows,
    sum_splits,
)
from .splits import EMPTY, LOG2E

MASK_LIMIT = 2**21  # entries of a reference's mask


@dataclass(frozen=True)
class PromptAttentionConfig:
    """Launch config of attention of prompts: block_m rows at a time, of one head or, of the same positions, of up to
    `heads` that share K and V; `stages` pages in flight. Where these blocks are fewer than `programs`, they are split,
    into up to `splits` parts of at least `least` pages each. apart: a launch of its own adds up the parts, else the
    last of them. dependent: launched while the kernel before drains. hopper: the multiprocessors of a GPU that
    prompt_attention_hopper is for; what fits that kernel is left to it. 0: none is."""

    block_m: int = 64
    num_warps: int = 4
    stages: int = 3
    programs: int = 264
    splits: int = 8
    least: int = 4
    heads: int = 1
    apart: bool = False
    dependent: bool = False
    hopper: int = 0


@triton.jit
def _turns(
    acc,
    l,
    m,
    q,
    pool_desc,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    page,
    first,
    end,
    positions,
    k_row,
    v_row,
    rows_of_page,
    stride_sp,
    BLOCK_T: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    STAGES: tl.constexpr,
    FP8: tl.constexpr,
    TYPE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attend to the positions [first, end), from the first of `page` on; MASKED where a row may not see all of them."""
    last = tl.maximum(end - 1, 0) // BLOCK_T
    for t in tl.range(first, end, BLOCK_T, num_stages=STAGES):
        row = page * rows_of_page
        scales_of_page = page.to(tl.int64) * stride_sp + tl.arange(0, BLOCK_T)
        page = tl.load(table_ptr + tl.minimum(t // BLOCK_T + 1, last))  # a turn ahead: nothing waits for it
        k = pool_desc.load([row + k_row, 0])
        if FP8:
            k = from_e4m3(k, DOT_FP32)
        s = tl.dot(q, k.to(TYPE).T, input_precision="ieee")
        if FP8:
            s *= tl.load(k_scale_ptr + scales_of_page)[None, :].to(tl.float32)
        if MASKED:
            offs_t = (t + tl.arange(0, BLOCK_T))[None, :]
            seen = offs_t <= positions[:, None]
            if WINDOW > 0:
                seen = seen & (offs_t > positions[:, None] - WINDOW)
            s = tl.where(seen, s, EMPTY)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)  # of a row that has seen nothing yet, EMPTY - EMPTY is 0
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = pool_desc.load([row + v_row, 0])
        if FP8:
            v = from_e4m3(v, DOT_FP32)
            scale = tl.load(v_scale_ptr + scales_of_page)[None, :].to(tl.float32)
            p *= tl.where((t + tl.arange(0, BLOCK_T) < end)[None, :], scale, 0.0)
        if MASKED:  # what lies behind the last row's position may be anything, NaN too
            v = tl.where((t + tl.arange(0, BLOCK_T) < end)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype).to(TYPE), v.to(TYPE), acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, l, m


@triton.jit
def _prompt_attention_kernel(
    chunks_ptr,
    page_table_ptr,
    q_ptr,
    pool_desc,
    k_scale_ptr,
    v_scale_ptr,
    partial_ptr,
    lse_ptr,
    counter_ptr,
    out_ptr,
    scale,
    stride_table,
    k_row,
    v_row,
    rows_of_page,
    rows_of_head,
    stride_sp,
    stride_sh,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_T: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    MOST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    APART: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FP8: tl.constexpr,
    DOT_FP32: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each row attends to the positions of its slot up to its own.

    chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32; page_table: [slots, max_pages] int32; q: [rows, HEADS, D]; pool:
    descriptor of the whole of it as [pages * rows_of_page, D], a tile being the BLOCK_T positions of a page, whose K of
    this layer begin at k_row and V at v_row, rows_of_head for each head; if FP8 codes, with scales
    [pages, KV_HEADS, PAGE] (see fp8_kv.py); partial: [MOST, BLOCK_M, BLOCK_D] fp32 and lse:
    [MOST, 2, BLOCK_M] fp32, scratch; counter: [MOST] int32, zero between launches; out: [rows, HEADS * D] (output), of
    which rows of no chunk are not written. Grid (programs,).
    The programs share items, a block of a chunk's rows in TOGETHER heads of one K/V head each, BLOCK_M of both, those
    with most to do first. Where there are few, an item is split over its positions, into MOST items at most of LEAST
    pages or more, and the last split adds up all of them; if APART, prompt_splits.py's kernel does. Nothing of
    lengths, places or pages is an argument, so one launch serves all.
    """
    ROWS: tl.constexpr = BLOCK_M // TOGETHER
    PARTS: tl.constexpr = HEADS // TOGETHER
    if APART and not DOT_FP32:  # the interpreter has neither
        gdc_launch_dependents()
    total = tl.sum(blocks_of(chunks_ptr, ROWS), 0)
    if PDL and total == 0:
        gdc_wait()
    splits = splits_of(total, PARTS, MOST, MOST_SPLITS)
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else q_ptr.dtype.element_ty
    offs_d = tl.arange(0, BLOCK_D)
    tile = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), total * PARTS * splits, tl.num_programs(0)):
        part, split = item % PARTS, item // PARTS % splits
        slot, first_row, left, lowest = block_of(chunks_ptr, total - 1 - item // PARTS // splits, ROWS)
        end = lowest + tl.minimum(left, ROWS)
        begin, share, used = shares(lowest, end, splits, WINDOW, LEAST, BLOCK_T)
        whole = begin if WINDOW > 0 else (lowest + 1) // BLOCK_T * BLOCK_T  # up to here are pages that all rows see
        if split < used:
            begin += split * share * BLOCK_T
            end = tl.minimum(end, begin + share * BLOCK_T)
            whole = tl.maximum(tl.minimum(whole, end), begin)
            table_ptr = page_table_ptr + slot * stride_table
            page = tl.load(table_ptr + begin // BLOCK_T)  # before q, so that one latency hides the other
            if PDL:
                gdc_wait()  # the first split of a block always comes here, and once more is nothing
            head = part * TOGETHER
            rows = tile // TOGETHER
            places = (first_row + rows).to(tl.int64) * HEADS + head + tile % TOGETHER
            mask = (rows < left)[:, None] & (offs_d < D)[None, :]
            q = tl.load(q_ptr + places[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
            q = (q.to(tl.float32) * (scale * LOG2E)).to(q_ptr.dtype.element_ty).to(TYPE)
            positions = lowest + tl.minimum(rows, left - 1)
            kv_head = head // (HEADS // KV_HEADS)
            head_row, head_scale = kv_head * rows_of_head, kv_head.to(tl.int64) * stride_sh
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            m = tl.full([BLOCK_M], EMPTY, tl.float32)
            if WINDOW == 0:
                acc, l, m = _turns(
                    acc, l, m, q, pool_desc, k_scale_ptr + head_scale, v_scale_ptr + head_scale, table_ptr, page,
                    begin, whole, positions, k_row + head_row, v_row + head_row, rows_of_page, stride_sp, BLOCK_T, 0,
                    False, STAGES, FP8, TYPE, DOT_FP32,
                )  # fmt: skip
                page = tl.load(table_ptr + tl.minimum(whole, end - 1) // BLOCK_T)
            acc, l, m = _turns(
                acc, l, m, q, pool_desc, k_scale_ptr + head_scale, v_scale_ptr + head_scale, table_ptr, page,
                whole, end, positions, k_row + head_row, v_row + head_row, rows_of_page, stride_sp, BLOCK_T, WINDOW,
                True, STAGES, FP8, TYPE, DOT_FP32,
            )  # fmt: skip
            if used == 1:
                store_rows(out_ptr, acc / l[:, None], tile, first_row, left, head, HEADS, TOGETHER, D)
            else:
                mine = rows < left
                cells = tile[:, None] * BLOCK_D + offs_d[None, :]
                tl.store(partial_ptr + item * (BLOCK_M * BLOCK_D) + cells, acc, mask=mine[:, None])
                tl.store(lse_ptr + item * (2 * BLOCK_M) + tile, m, mask=mine)
                tl.store(lse_ptr + item * (2 * BLOCK_M) + BLOCK_M + tile, l, mask=mine)
                if not APART:
                    tl.debug_barrier()
                    counter = counter_ptr + item // (PARTS * splits) * PARTS + part
                    if tl.atomic_add(counter, 1) == used - 1:
                        tl.debug_barrier()
                        tl.store(counter, 0)
                        for first in range(0, tl.minimum(left * TOGETHER, BLOCK_M), AT_ONCE):
                            sum_splits(
                                partial_ptr, lse_ptr, item - split * PARTS, used, out_ptr, first, first_row, left,
                                head, HEADS, TOGETHER, D, BLOCK_M, BLOCK_D, SPLITS, AT_ONCE,
                            )  # fmt: skip


def scratch_sizes(head_dim: int, config) -> dict[str, tuple[int, ...]]:
    """Name -> size of the scratch that a launch of this shape needs."""
    programs, tile = config.programs, (config.block_m, triton.next_power_of_2(head_dim))
    return {"partial": (programs, *tile), "lse": (programs, 2, config.block_m), "counter": (programs,)}


def prompt_attention(chunks, page_table, q, k_cache, v_cache, partial, lse, counter, out, window, scale, *, config):
    """out [rows, heads * D]: attention of the chunks' rows. q: [rows, heads, D]; k_cache, v_cache: a layer's part of
    the pool, [pages, kv_heads, page, D]; partial, lse, counter: scratch of `scratch_sizes`, the last zero. window: 0,
    or the positions attended to."""
    if config.hopper and prompt_attention_hopper.fits(q, k_cache, window, config.hopper):
        return prompt_attention_hopper.launch(chunks, page_table, q, k_cache, v_cache, out, scale, config.hopper)
    rows, heads, D = q.shape
    _, kv_heads, page, _ = k_cache.shape
    block = [page, triton.next_power_of_2(D)]
    pool, rows_of_page = pool_rows(k_cache)
    k_scale, v_scale = scales(k_cache), scales(v_cache)
    assert partial.numel() >= config.programs * config.block_m * block[1], "less scratch than the launch shape needs"
    together = heads_together(heads // kv_heads, config.heads)
    parts = heads // together
    items = triton.cdiv(rows, config.block_m // together) * parts
    apart = config.apart and 2 * items <= config.programs  # else nothing is split, but in a pass of much padding
    wide, pdl = triton.next_power_of_2(config.splits), config.dependent and not interpreted()
    # With a program for each item it is the GPU that hands out the work, and better than any fixed share.
    _prompt_attention_kernel[(max(config.programs, min(items, 8 * config.programs)),)](
        chunks,
        page_table,
        q,
        TensorDescriptor.from_tensor(pool, block),
        k_scale,
        v_scale,
        partial,
        lse,
        counter,
        out,
        scale,
        page_table.stride(0),
        k_cache.storage_offset() // D,
        v_cache.storage_offset() // D,
        rows_of_page,
        k_cache.stride(1) // D,
        k_scale.stride(0),
        k_scale.stride(1),
        heads,
        kv_heads,
        D,
        block[1],
        config.block_m,
        page,
        window,
        config.stages,
        config.programs,
        config.splits,
        wide,
        config.least,
        together,
        apart,
        rows_at_once(wide * block[1], 64, config.num_warps, config.block_m),
        is_fp8(k_cache),
        interpreted(),
        pdl,
        **options(config.num_warps, pdl),
    )
    if apart:
        at_once = rows_at_once(wide * block[1], 64, 4, config.block_m)
        _prompt_splits_kernel[(items * config.block_m // at_once,)](
            chunks,
            partial,
            lse,
            out,
            heads,
            D,
            config.block_m,
            block[1],
            page,
            window,
            config.programs,
            config.splits,
            config.least,
            together,
            wide,
            at_once,
            not interpreted(),
            **options(4, pdl=not interpreted()),
        )


def prompt_attention_ref(chunks, page_table, q, k_cache, v_cache, partial, lse, counter, out, window, scale):
    _, heads, D = q.shape
    page = k_cache.shape[2]
    for chunk in listed(chunks):
        first = max(chunk.start - window + 1, 0) // page if window else 0  # of the pages
        table = page_table[chunk.slot, first : -(-chunk.end // page)].long()
        if len(table) == 1:  # then nothing is copied
            found = (held(cache, (table[0],)) for cache in (k_cache, v_cache))
        else:
            found = (held(cache, (table,)).transpose(0, 1).flatten(1, 2) for cache in (k_cache, v_cache))
        keys, values = (cache[None, :, : chunk.end - first * page].to(q.dtype) for cache in found)
        attend_masked(
            q[chunk.rows].transpose(0, 1)[None], keys, values,
            out[chunk.rows].view(chunk.count, heads, D).transpose(0, 1), window, scale,
        )  # fmt: skip


def attend_masked(q, k, v, out, window: int, scale: float) -> None:
    """Causal attention of the last rows, q [1, heads, n, D] over k, v [1, kv_heads, positions, D] into out
    [heads, n, D], as many rows at a time as keep the mask below MASK_LIMIT entries."""
    n, end = q.shape[2], k.shape[2]
    keys = torch.arange(end, dtype=torch.int32, device=q.device)
    rows, done, grouped = keys[end - n :], 0, k.shape[1] != q.shape[1]
    for some in rows.split(max(MASK_LIMIT // end, 1)):
        behind = some[:, None] - keys
        mask = (behind >= 0) & (behind < window) if window else behind >= 0
        part = slice(done, done + len(some))
        attended = scaled_dot_product_attention(q[:, :, part], k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        out[:, part] = attended[0]
        done += len(some)


def prompt_attention_bytes(
    chunks, page_table, q, k_cache, v_cache, partial, lse, counter, out, window, scale
) -> int:
    """q and the output, and K and V of each slot once."""
    ends = sum(chunk.end for chunk in listed(chunks))
    return q.nbytes + out.nbytes + 2 * ends * k_cache.shape[1] * row_bytes(k_cache)


# Behind it, where positions are split, _prompt_splits_kernel; of many rows on Hopper prompt_attention_hopper's instead.
PROMPT_ATTENTION = Op(
    prompt_attention, prompt_attention_ref, prompt_attention_bytes, (_prompt_attention_kernel,),
    outputs=("partial", "lse", "out"),
)
