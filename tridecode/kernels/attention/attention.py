"""attention: q/k norm, rotary embedding, K/V write and split-KV attention of the new tokens of each request.

A request has one row, or several that attend to each other (attention_queries.py).
"""

from dataclasses import dataclass
from typing import NamedTuple

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
    next_power_of_2,
    options,
    running,
)
from ..op import Op
from .arguments import Heads, KVLayer, Rope, Scratch, Sizes
from .fp8_kv import load_cells, row_bytes, store_cells
from .fp8_tiles import warp_positions
from .one_query import attend_query
from .pages import Cache
from .rope import Rotary, rotated
from .several_queries import AT_ONCE, NEW, attend_queries
from .splits import Partials, Rows, Split, blocks_seen, combine_splits


@dataclass(frozen=True)
class AttentionConfig:
    """Launch config of attention of one row or a few rows."""

    block_t: int = 64  # Number of positions of an iteration, a multiple or a divisor of the page size.
    splits: int = 32  # Maximum number of programs for a K/V head of a row.
    num_warps: int = 4
    registers: int = 0  # Maximum number of registers of a thread. 0 means no limit.
    # Number of iterations whose K/V are loaded before `gdc_wait` (1 for fp8 K/V). A row that needs no more iterations
    # has one split.
    ahead: int = 1
    converts: bool = False  # Whether the GPU has an instruction that converts fp8 K/V.
    # Maximum number of splits of a row, if a split then has at most short_iterations iterations. 0 means `splits`.
    short_splits: int = 0
    short_iterations: int = 32


class Limits(NamedTuple):
    """Compile-time rules for the number of splits of a request."""

    SPLITS: tl.constexpr  # Maximum number of splits.
    SHORT_SPLITS: tl.constexpr  # Maximum number of splits, if a split then has at most SHORT_ITERATIONS iterations.
    SHORT_ITERATIONS: tl.constexpr
    LEAST: tl.constexpr  # Minimum number of iterations of a split, if there are several queries.


@triton.jit
def _max_splits(blocks, LIMITS: tl.constexpr):
    """Return the maximum number of splits for `blocks` blocks.

    It is SHORT_SPLITS, or more, up to SPLITS, if a split would otherwise have more than SHORT_ITERATIONS iterations.
    """
    return tl.minimum(tl.maximum(tl.cdiv(blocks, LIMITS.SHORT_ITERATIONS), LIMITS.SHORT_SPLITS), LIMITS.SPLITS)


@triton.jit
def _longest(
    meta_ptr, REQUESTS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr, LIMITS: tl.constexpr,
    SIZES: tl.constexpr,
):  # fmt: skip
    """Return the maximum number of splits over all requests."""
    offs_m = tl.arange(0, BLOCK_M)
    positions = tl.load(meta_ptr + offs_m * (QUERIES * META_WIDTH) + POSITION, mask=offs_m < REQUESTS, other=0)
    _, _, blocks = blocks_seen(positions, SIZES.BLOCK_T, SIZES.WINDOW)
    return _max_splits(tl.max(blocks, 0), LIMITS)


@triton.jit
def _request(meta_ptr, table_ptr, request, stride_table, QUERIES: tl.constexpr):
    """Return the number of active rows of a request, the position of its first row, and its page table."""
    meta_ptr += request * (QUERIES * META_WIDTH)
    count = (tl.load(meta_ptr + STATUS) == RUN).to(tl.int32)
    position = tl.load(meta_ptr + POSITION)
    table_ptr += tl.load(meta_ptr + SLOT) * stride_table
    for query in tl.static_range(1, QUERIES):
        count += (tl.load(meta_ptr + query * META_WIDTH + STATUS) == RUN).to(tl.int32)
    return count, position, table_ptr


@triton.jit
def _share(position, QUERIES: tl.constexpr, LIMITS: tl.constexpr, SIZES: tl.constexpr):
    """Divide the cached positions of a request at `position` into splits.

    Returns the first position attended to, its block, the blocks of each split, and the number of splits, which is 0
    without cached positions.
    """
    start, first_block, blocks = blocks_seen(position, SIZES.BLOCK_T, SIZES.WINDOW)
    if QUERIES == 1:  # Use one split if the prefetched tiles are enough, because they cost less than a combination.
        length = SIZES.TILES if blocks <= SIZES.TILES else tl.cdiv(blocks, _max_splits(blocks, LIMITS))
    else:
        length = tl.maximum(tl.cdiv(blocks, _max_splits(blocks, LIMITS)), LIMITS.LEAST)
    return start, first_block, length, tl.cdiv(blocks, length)


@triton.jit
def _attend(
    request, head, split, splits, position, table_ptr, start, first_block, length, count, together, rows, cache, rotary,
    partials, QUERIES: tl.constexpr, COMBINE_ALL: tl.constexpr, PDL: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """Compute one split of `length` blocks."""
    first = (first_block + split * length) * SIZES.BLOCK_T
    end = tl.minimum(first + length * SIZES.BLOCK_T, position)
    part = Split(request, head, split, splits, position, table_ptr, start, first, end)
    if QUERIES == 1:
        attend_query(part, rows, cache, rotary, partials, PDL, SIZES)
    else:
        attend_queries(part, count, together, rows, cache, rotary, partials, QUERIES, COMBINE_ALL, PDL, SIZES)


@triton.jit
def _attention_kernel(
    meta_ptr, qkv_ptr, out_ptr, stride_qkv, stride_om, scale,
    table_ptr, stride_table,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    partial_ptr, lse_ptr, counter_ptr,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, WARP_T: tl.constexpr,
    TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, COMBINE: tl.constexpr, WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr, FP8: tl.constexpr, CONVERTS: tl.constexpr, INTERPRETED: tl.constexpr,
    ROTARY: tl.constexpr, GATE: tl.constexpr, Q_COLUMNS: tl.constexpr,
    REQUESTS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
    SHORT_SPLITS: tl.constexpr,
    SHORT_ITERATIONS: tl.constexpr,
    LEAST: tl.constexpr,
    COMBINE_ALL: tl.constexpr,
    TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of the new tokens of each request to its cached positions and to themselves.

    A request has QUERIES rows at consecutive positions. Its new tokens are its active rows, which come first. The
    kernel writes K and V of the new tokens to the cache. A program computes one split of a K/V head of a request.

    Grid: (KV_HEADS, REQUESTS * SHORT_SPLITS + SPLITS - SHORT_SPLITS). The number of splits of a request depends only on
    its own length, so that its result does not depend on other requests. Each of the first SHORT_SPLITS splits of every
    request has its own program. The remaining splits, usually none, are distributed among the remaining programs.
    Programs without work exit immediately, so that programs of the next kernel can start. The first TILES tiles of a
    split are loaded before `gdc_wait`. This is safe because earlier passes wrote them.
    Moves 2 * KV_HEADS * D * itemsize bytes per position.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        qkv_ptr: [rows, HEADS * Q_COLUMNS + 2 KV_HEADS * D].
        out_ptr: [rows, HEADS * D] (output).
        REQUESTS: Number of requests.
        QUERIES: Number of rows per request.
        BLOCK_M: REQUESTS, padded to a power of two.
        SPLITS: Maximum number of splits of a request.
        SHORT_SPLITS: Maximum number of splits of a request whose splits then have at most SHORT_ITERATIONS iterations.
        SHORT_ITERATIONS: See SHORT_SPLITS.
        LEAST: Minimum number of iterations of a split if QUERIES > 1.
        COMBINE_ALL: Number of splits whose partial results a program loads together when it combines all queries.
        TOGETHER: Whether the first SHORT_SPLITS programs of all requests run at the same time. If so, the splits of a
            request wait for each other, and each combines a part of the results. It has no effect if a request has more
            splits.
        PDL: Whether the launch uses programmatic dependent launch.
        Others: see arguments.py, which also describes the sizes up to Q_COLUMNS.
    """
    SIZES: tl.constexpr = Sizes(
        PAGE, KV_HEADS, GROUP, COLUMNS, D, BLOCK_D, BLOCK_G, BLOCK_T, WARP_T, TILES, MAX_SPLITS, COMBINE, WINDOW,
        QK_NORM, FP8, CONVERTS, INTERPRETED, ROTARY, GATE, Q_COLUMNS,
    )  # fmt: skip
    LIMITS: tl.constexpr = Limits(SPLITS, SHORT_SPLITS, SHORT_ITERATIONS, LEAST)
    rows = Rows(qkv_ptr, out_ptr, stride_qkv, stride_om, scale)
    cache = Cache(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh)
    rotary = Rotary(cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps)
    partials = Partials(partial_ptr, lse_ptr, counter_ptr)
    head = tl.program_id(0)
    program = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    longest = SHORT_SPLITS  # Maximum number of splits of a request.
    if SPLITS > SHORT_SPLITS and QUERIES > 1:
        longest = _longest(meta_ptr, REQUESTS, QUERIES, BLOCK_M, LIMITS, SIZES)
    together = TOGETHER
    if TOGETHER:
        together = longest == SHORT_SPLITS
    if SPLITS == SHORT_SPLITS or program < REQUESTS * SHORT_SPLITS:
        request, split = program % REQUESTS, program // REQUESTS
        count, position, own_table_ptr = _request(meta_ptr, table_ptr, request, stride_table, QUERIES)
        start, first_block, length, splits = _share(position, QUERIES, LIMITS, SIZES)
        splits = tl.maximum(splits, 1)
        if split >= splits:
            return  # This program need not wait. The grid ends after its predecessor, because split 0 always waits.
        if count == 0:
            if PDL:
                gdc_wait()
            return
        _attend(
            request, head, split, splits, position, own_table_ptr, start, first_block, length, count, together, rows,
            cache, rotary, partials, QUERIES, COMBINE_ALL, PDL, SIZES,
        )  # fmt: skip
    else:
        if QUERIES == 1:
            longest = _longest(meta_ptr, REQUESTS, QUERIES, BLOCK_M, LIMITS, SIZES)
        if longest <= SHORT_SPLITS:
            return
        before = 0  # Number of additional splits of earlier requests.
        for request in tl.range(0, REQUESTS, num_stages=1, disable_licm=True):
            count, position, own_table_ptr = _request(meta_ptr, table_ptr, request, stride_table, QUERIES)
            start, first_block, length, splits = _share(position, QUERIES, LIMITS, SIZES)
            split = SHORT_SPLITS + (program + before) % (SPLITS - SHORT_SPLITS)
            before += tl.maximum(splits - SHORT_SPLITS, 0)
            if (split < splits) & (count > 0):
                _attend(
                    request, head, split, splits, position, own_table_ptr, start, first_block, length, count, together,
                    rows, cache, rotary, partials, QUERIES, COMBINE_ALL, PDL, SIZES,
                )  # fmt: skip


def attention(meta, qkv, out, kv: KVLayer, rope: Rope, scratch: Scratch, heads: Heads, *, config, pdl=False):
    """Compute attention of one new token per row.

    Args:
        meta: [rows, META_WIDTH] int32.
        qkv: [rows, heads * query_columns + 2 kv_heads * head_dim].
        out: [rows, heads * head_dim] (output).
    """
    launch_attention(meta, qkv, out, kv, rope, scratch, heads, config, pdl)


def launch_attention(
    meta, qkv, out, kv, rope, scratch, heads, config, pdl, queries: int = 1, least: int = 1, together: bool = False
) -> None:
    """Launch the kernel for requests of `queries` rows. QueriesConfig describes `least` and `together`."""
    sizes = sizes_of(kv, rope, scratch, heads, config, config.ahead, queries)
    requests = len(out) // queries
    short = min(config.short_splits or config.splits, config.splits)
    assert queries <= NEW.value and len(out) == requests * queries
    _attention_kernel[(heads.kv, requests * short + config.splits - short)](
        meta,
        qkv,
        out,
        qkv.stride(0),
        out.stride(0),
        heads.scale,
        *kv.kernel_arguments(),
        *rope.kernel_arguments(),
        *scratch,
        *sizes,
        requests,
        queries,
        next_power_of_2(requests),
        config.splits,
        short,
        config.short_iterations,
        least,
        combine_splits(sizes.COLUMNS, heads.dim, config),
        together and not sizes.INTERPRETED,  # The interpreter runs programs one after another.
        pdl,
        **options(config.num_warps, pdl, config.registers),
    )


def sizes_of(
    kv: KVLayer, rope: Rope, scratch: Scratch, heads: Heads, config, tiles: int = 1, queries: int = 1
) -> Sizes:
    """Return the sizes of a launch on `queries` rows of each request.

    Raises:
        AssertionError: if the scratch has no room for the splits, or a tile is neither whole pages nor a part of one.
    """
    assert config.splits <= scratch.partial.shape[2], (
        f"config.splits is {config.splits}, but scratch.partial has room for {scratch.partial.shape[2]} splits"
    )
    assert config.block_t % kv.page == 0 or kv.page % config.block_t == 0, (
        f"config.block_t is {config.block_t}, which is neither a multiple nor a divisor of the page size {kv.page}"
    )
    return Sizes(
        PAGE=kv.page,
        KV_HEADS=heads.kv,
        GROUP=heads.group,
        COLUMNS=max(next_power_of_2(queries * heads.group), 8),
        D=heads.dim,
        BLOCK_D=max(next_power_of_2(heads.dim), 64 if kv.fp8 else 1),
        BLOCK_G=next_power_of_2(heads.group),
        BLOCK_T=config.block_t,
        WARP_T=warp_positions(config, kv.page),
        TILES=tiles,
        MAX_SPLITS=scratch.partial.shape[2],
        COMBINE=combine_splits(heads.group if queries == 1 else AT_ONCE.value, heads.dim, config),
        WINDOW=heads.window,
        QK_NORM=rope.q_norm is not None,
        FP8=kv.fp8,
        CONVERTS=kv.fp8 and config.converts,
        INTERPRETED=interpreted(),
        ROTARY=rope.rotary,
        GATE=heads.gate,
        Q_COLUMNS=heads.query_columns,
    )


def attention_ref(meta, qkv, out, kv: KVLayer, rope: Rope, scratch: Scratch, heads: Heads):
    """Compute `attention` in torch."""
    page = kv.page
    for row in running(meta, out.shape[0]):
        slot, position = meta[row, [SLOT.value, POSITION.value]].tolist()
        table = kv.table[slot].long()
        q, gate, k, v = heads.split(qkv[row].float())
        at = rope.cos[position], rope.sin[position]
        q, k = rotated(q, rope.q_norm, *at, rope.eps), rotated(k, rope.k_norm, *at, rope.eps)
        cell = table[position // page], slice(None), position % page
        store_cells(kv.k, cell, k)
        store_cells(kv.v, cell, v)
        start = max(position - heads.window + 1, 0) if heads.window else 0
        if start // page == position // page:
            cells = table[start // page], slice(None), slice(start % page, position % page + 1)
            keys, values = load_cells(kv.k, cells), load_cells(kv.v, cells)
        else:
            t = torch.arange(start, position + 1, device=table.device)
            each = table[t // page], slice(None), t % page
            keys, values = load_cells(kv.k, each).transpose(0, 1), load_cells(kv.v, each).transpose(0, 1)
        scores = (q.view(heads.kv, -1, heads.dim) @ keys.float().transpose(1, 2)) * heads.scale
        attended = (torch.softmax(scores, -1) @ values.float()).reshape(heads.query, heads.dim)
        out[row] = (attended if gate is None else attended * gate.sigmoid()).flatten().to(out.dtype)


def attention_bytes(meta, qkv, out, kv: KVLayer, rope: Rope, scratch: Scratch, heads: Heads) -> int:
    """Return the bytes of K and V that the rows attend to.

    Queries, outputs and partial results are small in comparison.
    """
    positions = meta[running(meta, out.shape[0]), POSITION.value].tolist()
    return 2 * sum(min(position, heads.window or position) for position in positions) * heads.kv * row_bytes(kv.k)


OUTPUTS = "scratch.partial", "scratch.lse", "out"
ATTENTION = Op(attention, attention_ref, attention_bytes, (_attention_kernel,), outputs=OUTPUTS)
