"""Blocks of rows of a prompt pass, the splits of their positions, and the sum over the splits of a block."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT, CHUNK_FIRST, CHUNK_SLOT, CHUNK_START, CHUNK_WIDTH, MAX_CHUNKS
from ..common import gdc_wait
from .splits import EMPTY, Partials

CHUNK = tl.constexpr(1 << 24)  # Each chunk adds this number to a sum of blocks. The number of blocks is always smaller.


class Blocks(NamedTuple):
    """Compile-time sizes of the blocks of prompt attention and of their splits."""

    HEADS: tl.constexpr  # Number of query heads.
    TOGETHER: tl.constexpr  # Number of heads of one K/V head that a block contains.
    PARTS: tl.constexpr  # HEADS / TOGETHER, the number of blocks of the same rows.
    BLOCK_M: tl.constexpr  # Number of rows of a block, multiplied by its heads.
    ROWS: tl.constexpr  # BLOCK_M / TOGETHER
    D: tl.constexpr  # Head dimension.
    BLOCK_D: tl.constexpr  # D, padded
    PAGE: tl.constexpr  # Number of positions of a page.
    WINDOW: tl.constexpr  # Number of positions that a query attends to. 0 means all.
    MAX_ITEMS: tl.constexpr  # Number of items for which the scratch has room. An item is a split of a block.
    MAX_SPLITS: tl.constexpr  # Maximum number of splits of a block.
    BLOCK_S: tl.constexpr  # MAX_SPLITS, padded
    LEAST: tl.constexpr  # Minimum number of pages of a split.


class Block(NamedTuple):
    """Rows of a chunk."""

    slot: tl.tensor
    first_row: tl.tensor  # Row of the pass in which the block begins.
    position: tl.tensor  # Position of the first row.
    left: tl.tensor  # Number of rows from the first row to the end of the chunk.


@triton.jit
def blocks_of(chunks_ptr, ROWS: tl.constexpr):
    """Return the number of blocks of each chunk."""
    counts = tl.load(chunks_ptr + tl.arange(0, MAX_CHUNKS) * CHUNK_WIDTH + CHUNK_COUNT)
    return (counts + ROWS - 1) // ROWS


@triton.jit
def splits_of(total, BLOCKS: tl.constexpr):
    """Return the maximum number of splits of each of `total` blocks of rows."""
    return tl.maximum(tl.minimum(BLOCKS.MAX_ITEMS // tl.maximum(total * BLOCKS.PARTS, 1), BLOCKS.MAX_SPLITS), 1)


@triton.jit
def block_of(chunks_ptr, block, BLOCKS: tl.constexpr):
    """Return the Block with this number, counted over all chunks."""
    # Load the table for each item, because prompt_attention has few registers to spare.
    blocks = blocks_of(chunks_ptr, BLOCKS.ROWS)
    before = tl.cumsum(blocks, 0) <= block
    sums = tl.sum(tl.where(before, blocks + CHUNK, 0), 0)  # Number of earlier chunks, and number of their blocks.
    chunk_ptr = chunks_ptr + sums // CHUNK * CHUNK_WIDTH
    done = (block - sums % CHUNK) * BLOCKS.ROWS
    slot, first_row = tl.load(chunk_ptr + CHUNK_SLOT), tl.load(chunk_ptr + CHUNK_FIRST)
    count, start = tl.load(chunk_ptr + CHUNK_COUNT), tl.load(chunk_ptr + CHUNK_START)
    return Block(slot, first_row + done, start + done, count - done)


@triton.jit
def shares(block, splits, BLOCKS: tl.constexpr):
    """Divide the positions that a block attends to into splits.

    Returns the range [begin, end) of positions, where begin is the first of a page, the pages of each split, and the
    number of splits that have pages.
    """
    begin, end = 0, block.position + tl.minimum(block.left, BLOCKS.ROWS)
    if BLOCKS.WINDOW > 0:
        begin = tl.maximum(block.position - BLOCKS.WINDOW + 1, 0) // BLOCKS.PAGE * BLOCKS.PAGE
    pages = (end - begin + BLOCKS.PAGE - 1) // BLOCKS.PAGE
    share = tl.maximum((pages + splits - 1) // splits, BLOCKS.LEAST)
    return begin, end, share, (pages + share - 1) // share


@triton.jit
def store_rows(out_ptr, x, tile, block, head, BLOCKS: tl.constexpr):
    """Store x [len(tile), BLOCK_D], the outputs of the entries `tile` of a block, whose first head is `head`."""
    offs_d = tl.arange(0, BLOCKS.BLOCK_D)
    rows = tile // BLOCKS.TOGETHER
    places = (block.first_row + rows).to(tl.int64) * BLOCKS.HEADS + head + tile % BLOCKS.TOGETHER
    ptrs = out_ptr + places[:, None] * BLOCKS.D + offs_d[None, :]
    tl.store(ptrs, x.to(out_ptr.dtype.element_ty), mask=(rows < block.left)[:, None] & (offs_d < BLOCKS.D)[None, :])


@triton.jit
def sum_splits(partials, item, used, out_ptr, first, block, head, AT_ONCE: tl.constexpr, BLOCKS: tl.constexpr):
    """Combine AT_ONCE entries of a block from `first` on, and store their outputs.

    The partial results of all splits are loaded together, so that their latencies overlap.

    Args:
        item: Number of the item of the block's first split.
        used: Number of splits of the block.
    """
    tile = first + tl.arange(0, AT_ONCE)
    offs_s, offs_d = tl.arange(0, BLOCKS.BLOCK_S), tl.arange(0, BLOCKS.BLOCK_D)
    items = item + offs_s[None, :] * BLOCKS.PARTS
    mask = (tile < block.left * BLOCKS.TOGETHER)[:, None] & (offs_s < used)[None, :]
    cells = (items * BLOCKS.BLOCK_M + tile[:, None])[:, :, None] * BLOCKS.BLOCK_D + offs_d[None, None, :]
    lse_ptrs = partials.lse_ptr + items * (2 * BLOCKS.BLOCK_M) + tile[:, None]
    m = tl.load(lse_ptrs, mask=mask, other=EMPTY, cache_modifier=".cg")
    l = tl.load(lse_ptrs + BLOCKS.BLOCK_M, mask=mask, other=1.0, cache_modifier=".cg")
    o = tl.load(partials.partial_ptr + cells, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
    weight = tl.exp2(m - tl.max(m, 1)[:, None])
    x = tl.sum(o * weight[:, :, None], 1) / tl.sum(l * weight, 1)[:, None]
    store_rows(out_ptr, x, tile, block, head, BLOCKS)


@triton.jit
def _prompt_splits_kernel(
    chunks_ptr, out_ptr,
    partial_ptr, lse_ptr, counter_ptr,
    HEADS: tl.constexpr, TOGETHER: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    MAX_ITEMS: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr, LEAST: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the partial results of the splits of prompt_attention, for blocks that have more than one split.

    Grid: (programs,). A program combines AT_ONCE entries of a block at a time, so that there is work for all
    multiprocessors.

    Args:
        out_ptr: [rows, HEADS * D] (output).
        Others: see _prompt_attention_kernel.
    """
    BLOCKS: tl.constexpr = Blocks(
        HEADS, TOGETHER, PARTS, BLOCK_M, ROWS, D, BLOCK_D, PAGE, WINDOW, MAX_ITEMS, MAX_SPLITS, BLOCK_S, LEAST
    )
    partials = Partials(partial_ptr, lse_ptr, counter_ptr)
    SHARES: tl.constexpr = BLOCK_M // AT_ONCE
    total = tl.sum(blocks_of(chunks_ptr, ROWS), 0)
    splits = splits_of(total, BLOCKS)
    if PDL and total == 0:
        gdc_wait()
    for unit in range(tl.program_id(0), total * PARTS * SHARES, tl.num_programs(0)):
        first, part, index = (
            unit % SHARES * AT_ONCE,
            unit // SHARES % PARTS,
            unit // (SHARES * PARTS),
        )
        block = block_of(chunks_ptr, total - 1 - index, BLOCKS)
        _, _, _, used = shares(block, splits, BLOCKS)
        if PDL:
            gdc_wait()  # If the program has waited before, this wait has no effect.
        if used > 1:
            item = index * splits * PARTS + part
            sum_splits(partials, item, used, out_ptr, first, block, part * TOGETHER, AT_ONCE, BLOCKS)


def heads_together(group: int, limit: int) -> int:
    """Return the number of heads of one K/V head that share a block: the largest power of two that divides `group`.

    The result is at most `limit`.
    """
    return min(group & -group, limit)


def rows_at_once(columns: int, registers: int, num_warps: int, limit: int) -> int:
    """Return how many rows of `columns` fp32 columns fit into `registers` registers of each thread: a power of two.

    The result is at most `limit`.
    """
    return max(min(registers * 32 * num_warps // columns, limit), 1)
