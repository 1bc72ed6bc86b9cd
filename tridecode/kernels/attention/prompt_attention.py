"""prompt_attention: causal attention of chunks of prompts, rows of one slot or of several, over paged K/V."""

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch.nn.functional import scaled_dot_product_attention
from triton.tools.tensor_descriptor import TensorDescriptor

from ..chunks import listed
from ..common import cdiv, gdc_launch_dependents, gdc_wait, interpreted, next_power_of_2, options
from ..op import Op
from . import prompt_attention_hopper
from .arguments import Heads, KVLayer, Scratch
from .fp8_kv import from_e4m3, load_cells, row_bytes, scales
from .pages import pool_rows
from .prompt_splits import (
    Blocks,
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
from .splits import EMPTY, LOG2E, Partials

MASK_LIMIT = 2**21  # Maximum number of mask entries that the reference allocates at once.


@dataclass(frozen=True)
class PromptAttentionConfig:
    """Launch config of attention of prompts."""

    block_m: int = 64  # Number of rows of a block, multiplied by its heads.
    num_warps: int = 4
    stages: int = 3  # Number of pages in flight.
    # If there are fewer blocks than this number, their positions are divided into splits.
    programs: int = field(kw_only=True)
    splits: int = 8  # Maximum number of splits of a block.
    least: int = 4  # Minimum number of pages of a split.
    heads: int = 1  # Maximum number of query heads of one K/V head in a block.
    # Whether a separate launch combines the splits. Otherwise the split that finishes last combines them.
    separate_combine: bool = False
    dependent: bool = False  # Whether the launch may start before the previous kernel has ended.
    # Number of programs of prompt_attention_hopper, which runs the launches that fit it. 0 disables it.
    hopper: int = 0


class Pool(NamedTuple):
    """K and V of one head in the pool: the row at which each begins, the number of rows per page, and the scales."""

    k_row: tl.tensor
    v_row: tl.tensor
    rows_of_page: tl.tensor
    k_scale_ptr: tl.tensor
    v_scale_ptr: tl.tensor
    stride_sp: tl.tensor


@triton.jit
def _attend_pages(
    sums, q, pool_desc, pool, table_ptr, page, first, end, positions, MASKED: tl.constexpr, STAGES: tl.constexpr,
    FP8: tl.constexpr, INTERPRETED: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Attend to the positions [first, end), whose first page is `page`, and update the sums.

    The sums are the weighted sums of values, the sums of weights, and the maxima.

    Args:
        MASKED: Whether some rows do not attend to all of the positions.
    """
    acc, l, m = sums
    PAGE: tl.constexpr = BLOCKS.PAGE
    last = tl.maximum(end - 1, 0) // PAGE
    for t in tl.range(first, end, PAGE, num_stages=STAGES):
        row = page * pool.rows_of_page
        offs_s = page.to(tl.int64) * pool.stride_sp + tl.arange(0, PAGE)
        # The page number is loaded one iteration before its use.
        page = tl.load(table_ptr + tl.minimum(t // PAGE + 1, last))
        k = pool_desc.load([row + pool.k_row, 0])
        if FP8:
            k = from_e4m3(k, INTERPRETED)
        s = tl.dot(q, k.to(q.dtype).T, input_precision="ieee")
        if FP8:
            s *= tl.load(pool.k_scale_ptr + offs_s)[None, :].to(tl.float32)
        if MASKED:
            offs_t = (t + tl.arange(0, PAGE))[None, :]
            seen = offs_t <= positions[:, None]
            if BLOCKS.WINDOW > 0:
                seen = seen & (offs_t > positions[:, None] - BLOCKS.WINDOW)
            s = tl.where(seen, s, EMPTY)
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)  # EMPTY - EMPTY is 0 for a row that has not attended to any position.
        alpha = tl.exp2(m - m_new)
        l = l * alpha + tl.sum(p, 1)
        v = pool_desc.load([row + pool.v_row, 0])
        if FP8:
            v = from_e4m3(v, INTERPRETED)
            scale = tl.load(pool.v_scale_ptr + offs_s)[None, :].to(tl.float32)
            p *= tl.where((t + tl.arange(0, PAGE) < end)[None, :], scale, 0.0)
        if MASKED:  # Entries after the position of the last row are arbitrary, possibly NaN.
            v = tl.where((t + tl.arange(0, PAGE) < end)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype).to(q.dtype), v.to(q.dtype), acc * alpha[:, None], input_precision="ieee")
        m = m_new
    return acc, l, m


@triton.jit
def _prompt_attention_kernel(
    chunks_ptr, q_ptr, out_ptr, scale,
    table_ptr, stride_table,
    pool_desc, k_row, v_row, rows_of_page, rows_of_head, k_scale_ptr, v_scale_ptr, stride_sp, stride_sh,
    partial_ptr, lse_ptr, counter_ptr,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    MAX_ITEMS: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, LEAST: tl.constexpr,
    KV_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    SEPARATE_COMBINE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of each row to the positions of its slot up to its own.

    Grid: (programs,). The programs share the items, each a split of a block. A block is BLOCK_M / TOGETHER rows of a
    chunk in TOGETHER heads of one K/V head. Items with the most work come first. If there are few blocks, each is split
    over its positions. The split that finishes last combines them, or with SEPARATE_COMBINE the kernel of
    prompt_splits.py. No argument depends on lengths or pages, so one captured launch serves all prompts. Rows outside
    all chunks are not written.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        q_ptr: [rows, HEADS, D].
        out_ptr: [rows, HEADS * D] (output).
        table_ptr: [slots, max_pages] int32.
        pool_desc: Tensor descriptor of the whole pool, [pages * rows_of_page, D], in tiles of a page of one head. The
            numbers are codes with scales if FP8.
        k_row, v_row: Rows of the pool at which K and V of this layer begin. Each head has rows_of_head rows.
        k_scale_ptr, v_scale_ptr: [pages, KV_HEADS, PAGE] bf16. Read only if FP8.
        partial_ptr: [MAX_ITEMS, BLOCK_M, BLOCK_D] fp32 (scratch).
        lse_ptr: [MAX_ITEMS, 2, BLOCK_M] fp32 (scratch).
        counter_ptr: [MAX_ITEMS] int32, zero between launches (scratch).
    """
    BLOCKS: tl.constexpr = Blocks(
        HEADS, TOGETHER, PARTS, BLOCK_M, ROWS, D, BLOCK_D, PAGE, WINDOW, MAX_ITEMS, MAX_SPLITS, BLOCK_S, LEAST
    )
    TYPE: tl.constexpr = tl.float32 if INTERPRETED else q_ptr.dtype.element_ty
    partials = Partials(partial_ptr, lse_ptr, counter_ptr)
    if SEPARATE_COMBINE and not INTERPRETED:  # The interpreter supports neither this instruction nor gdc_wait.
        gdc_launch_dependents()
    total = tl.sum(blocks_of(chunks_ptr, ROWS), 0)
    if PDL and total == 0:
        gdc_wait()
    splits = splits_of(total, BLOCKS)
    offs_d = tl.arange(0, BLOCK_D)
    tile = tl.arange(0, BLOCK_M)
    for item in range(tl.program_id(0), total * PARTS * splits, tl.num_programs(0)):
        part, split = item % PARTS, item // PARTS % splits
        block = block_of(chunks_ptr, total - 1 - item // PARTS // splits, BLOCKS)
        begin, end, share, used = shares(block, splits, BLOCKS)
        # End of the pages that all rows attend to completely.
        whole_end = begin if WINDOW > 0 else (block.position + 1) // PAGE * PAGE
        if split < used:
            begin += split * share * PAGE
            end = tl.minimum(end, begin + share * PAGE)
            whole_end = tl.maximum(tl.minimum(whole_end, end), begin)
            own_table_ptr = table_ptr + block.slot * stride_table
            # This load precedes that of q, so that their latencies overlap.
            page = tl.load(own_table_ptr + begin // PAGE)
            if PDL:
                gdc_wait()  # The first split of a block always waits. A second wait has no effect.
            head = part * TOGETHER
            rows = tile // TOGETHER
            places = (block.first_row + rows).to(tl.int64) * HEADS + head + tile % TOGETHER
            mask = (rows < block.left)[:, None] & (offs_d < D)[None, :]
            q = tl.load(q_ptr + places[:, None] * D + offs_d[None, :], mask=mask, other=0.0)
            q = (q.to(tl.float32) * (scale * LOG2E)).to(q_ptr.dtype.element_ty).to(TYPE)
            positions = block.position + tl.minimum(rows, block.left - 1)
            kv_head = head // (HEADS // KV_HEADS)
            head_row, offs_s = kv_head * rows_of_head, kv_head.to(tl.int64) * stride_sh
            pool = Pool(
                k_row + head_row, v_row + head_row, rows_of_page, k_scale_ptr + offs_s, v_scale_ptr + offs_s,
                stride_sp,
            )  # fmt: skip
            acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            l = tl.zeros([BLOCK_M], tl.float32)
            m = tl.full([BLOCK_M], EMPTY, tl.float32)
            sums = acc, l, m
            if WINDOW == 0:
                sums = _attend_pages(
                    sums, q, pool_desc, pool, own_table_ptr, page, begin, whole_end, positions, False, STAGES, FP8,
                    INTERPRETED, BLOCKS,
                )  # fmt: skip
                page = tl.load(own_table_ptr + tl.minimum(whole_end, end - 1) // PAGE)
            acc, l, m = _attend_pages(
                sums, q, pool_desc, pool, own_table_ptr, page, whole_end, end, positions, True, STAGES, FP8,
                INTERPRETED, BLOCKS,
            )  # fmt: skip
            if used == 1:
                store_rows(out_ptr, acc / l[:, None], tile, block, head, BLOCKS)
            else:
                mask_m = rows < block.left
                cells = tile[:, None] * BLOCK_D + offs_d[None, :]
                tl.store(partial_ptr + item * (BLOCK_M * BLOCK_D) + cells, acc, mask=mask_m[:, None])
                tl.store(lse_ptr + item * (2 * BLOCK_M) + tile, m, mask=mask_m)
                tl.store(lse_ptr + item * (2 * BLOCK_M) + BLOCK_M + tile, l, mask=mask_m)
                if not SEPARATE_COMBINE:
                    tl.debug_barrier()
                    own_counter_ptr = counter_ptr + item // (PARTS * splits) * PARTS + part
                    if tl.atomic_add(own_counter_ptr, 1) == used - 1:
                        tl.debug_barrier()
                        tl.store(own_counter_ptr, 0)
                        for first in range(0, tl.minimum(block.left * TOGETHER, BLOCK_M), AT_ONCE):
                            sum_splits(
                                partials, item - split * PARTS, used, out_ptr, first, block, head, AT_ONCE, BLOCKS
                            )


def scratch_sizes(head_dim: int, config) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the fields of Scratch that a launch with this config needs."""
    programs, tile = config.programs, (config.block_m, next_power_of_2(head_dim))
    return {"partial": (programs, *tile), "lse": (programs, 2, config.block_m), "counter": (programs,)}


def prompt_attention(chunks, q, out, kv: KVLayer, scratch: Scratch, heads: Heads, *, config):
    """Compute causal attention of the chunks' rows.

    Args:
        chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        q: [rows, heads, head_dim].
        out: [rows, heads * head_dim] (output).
        kv: K and V of one layer, as part of the pool.
        scratch: Buffers of at least `scratch_sizes`.
    """
    if config.hopper and prompt_attention_hopper.fits(q, kv.k, heads.window, config.hopper):
        return prompt_attention_hopper.launch(chunks, q, out, kv, heads, config.hopper)
    pool, rows_of_page = pool_rows(kv.k)
    k_scale, v_scale = scales(kv.k), scales(kv.v)
    together = heads_together(heads.group, config.heads)
    blocks = Blocks(
        HEADS=heads.query,
        TOGETHER=together,
        PARTS=heads.query // together,
        BLOCK_M=config.block_m,
        ROWS=config.block_m // together,
        D=heads.dim,
        BLOCK_D=next_power_of_2(heads.dim),
        PAGE=kv.page,
        WINDOW=heads.window,
        MAX_ITEMS=config.programs,
        MAX_SPLITS=config.splits,
        BLOCK_S=next_power_of_2(config.splits),
        LEAST=config.least,
    )
    room = config.programs * config.block_m * blocks.BLOCK_D
    assert scratch.partial.numel() >= room, "scratch.partial is smaller than the launch config needs"
    items = cdiv(len(q), blocks.ROWS) * blocks.PARTS
    separate_combine = (
        config.separate_combine and 2 * items <= config.programs
    )  # With more items, only passes with much padding have splits.
    pdl = config.dependent and not interpreted()
    # With one program for each item, the GPU assigns the items. This is faster than a fixed assignment.
    _prompt_attention_kernel[(max(config.programs, min(items, 8 * config.programs)),)](
        chunks,
        q,
        out,
        heads.scale,
        kv.table,
        kv.table.stride(0),
        TensorDescriptor.from_tensor(pool, [kv.page, blocks.BLOCK_D]),
        kv.k.storage_offset() // heads.dim,
        kv.v.storage_offset() // heads.dim,
        rows_of_page,
        kv.k.stride(1) // heads.dim,
        k_scale,
        v_scale,
        k_scale.stride(0),
        k_scale.stride(1),
        *scratch,
        *blocks,
        heads.kv,
        config.stages,
        separate_combine,
        rows_at_once(blocks.BLOCK_S * blocks.BLOCK_D, 64, config.num_warps, config.block_m),
        kv.fp8,
        interpreted(),
        pdl,
        **options(config.num_warps, pdl),
    )
    if separate_combine:
        at_once = rows_at_once(blocks.BLOCK_S * blocks.BLOCK_D, 64, 4, config.block_m)
        dependent = not interpreted()
        _prompt_splits_kernel[(items * config.block_m // at_once,)](
            chunks, out, *scratch, *blocks, at_once, dependent, **options(4, pdl=dependent)
        )


def prompt_attention_ref(chunks, q, out, kv: KVLayer, scratch: Scratch, heads: Heads):
    """Compute `prompt_attention` in torch."""
    for chunk in listed(chunks):
        # The first page that the chunk attends to.
        first = max(chunk.start - heads.window + 1, 0) // kv.page if heads.window else 0
        table = kv.table[chunk.slot, first : -(-chunk.end // kv.page)].long()
        if len(table) == 1:  # One page is a view, without a copy.
            both = (load_cells(cache, (table[0],)) for cache in (kv.k, kv.v))
        else:
            both = (load_cells(cache, (table,)).transpose(0, 1).flatten(1, 2) for cache in (kv.k, kv.v))
        keys, values = (cache[None, :, : chunk.end - first * kv.page].to(q.dtype) for cache in both)
        attend_masked(
            q[chunk.rows].transpose(0, 1)[None], keys, values,
            out[chunk.rows].view(chunk.count, heads.query, heads.dim).transpose(0, 1), heads.window, heads.scale,
        )  # fmt: skip


def attend_masked(q, k, v, out, window: int, scale: float) -> None:
    """Compute causal attention of the last rows over k and v, in parts whose mask has at most MASK_LIMIT entries.

    Args:
        q: [1, heads, n, D].
        k, v: [1, kv_heads, positions, D].
        out: [heads, n, D] (output).
    """
    n, end = q.shape[2], k.shape[2]
    keys = torch.arange(end, dtype=torch.int32, device=q.device)
    rows, done, grouped = keys[end - n :], 0, k.shape[1] != q.shape[1]
    for part_rows in rows.split(max(MASK_LIMIT // end, 1)):
        distance = part_rows[:, None] - keys
        mask = (distance >= 0) & (distance < window) if window else distance >= 0
        part = slice(done, done + len(part_rows))
        attended = scaled_dot_product_attention(q[:, :, part], k, v, attn_mask=mask, scale=scale, enable_gqa=grouped)
        out[:, part] = attended[0]
        done += len(part_rows)


def prompt_attention_bytes(chunks, q, out, kv: KVLayer, scratch: Scratch, heads: Heads) -> int:
    """Return the bytes of q and the output, and of K and V of each slot once."""
    ends = sum(chunk.end for chunk in listed(chunks))
    return q.nbytes + out.nbytes + 2 * ends * heads.kv * row_bytes(kv.k)


# _prompt_splits_kernel follows if blocks have splits. On Hopper, prompt_attention_hopper runs passes of many rows.
PROMPT_ATTENTION = Op(
    prompt_attention, prompt_attention_ref, prompt_attention_bytes, (_prompt_attention_kernel,),
    outputs=("scratch.partial", "scratch.lse", "out"),
)  # fmt: skip
