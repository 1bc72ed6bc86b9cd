"""Blocks of rows of a prompt pass and the splits of their positions, for prompt_attention: which there are, and the sum
of what they have left, by a kernel of its own or by the last of them."""

import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT, CHUNK_FIRST, CHUNK_SLOT, CHUNK_START, CHUNK_WIDTH, MAX_CHUNKS
from ..common import gdc_wait
from .splits import EMPTY

CHUNK = tl.constexpr(1 << 24)  # added once a chunk to a sum of blocks, of which there are fewer


@triton.jit
def blocks_of(chunks_ptr, ROWS: tl.constexpr):
    """Of each chunk how many blocks of rows it has."""
    counts = tl.load(chunks_ptr + tl.arange(0, MAX_CHUNKS) * CHUNK_WIDTH + CHUNK_COUNT)
    return (counts + ROWS - 1) // ROWS


@triton.jit
def splits_of(total, PARTS: tl.constexpr, MOST: tl.constexpr, SPLITS: tl.constexpr):
    """Into how many items each of `total` blocks and PARTS of the heads is split at most."""
    return tl.maximum(tl.minimum(MOST // tl.maximum(total * PARTS, 1), SPLITS), 1)


@triton.jit
def block_of(chunks_ptr, block, ROWS: tl.constexpr):
    """Of a block of all chunks': its chunk's slot, its first row in the pass, how many rows that chunk has from there
    on, and the position of the first."""
    blocks = blocks_of(chunks_ptr, ROWS)  # anew for each item: registers are what prompt_attention has least of
    before = tl.cumsum(blocks, 0) <= block
    found = tl.sum(tl.where(before, blocks + CHUNK, 0), 0)  # both sums at once: of chunks, and of their blocks
    chunk_ptr = chunks_ptr + found // CHUNK * CHUNK_WIDTH
    done = (block - found % CHUNK) * ROWS
    slot, first_row = tl.load(chunk_ptr + CHUNK_SLOT), tl.load(chunk_ptr + CHUNK_FIRST)
    count, start = tl.load(chunk_ptr + CHUNK_COUNT), tl.load(chunk_ptr + CHUNK_START)
    return slot, first_row + done, count - done, start + done


@triton.jit
def shares(lowest, end, splits, WINDOW: tl.constexpr, LEAST: tl.constexpr, PAGE: tl.constexpr):
    """How rows at positions from `lowest` to `end` - 1 share what they attend to: its first position, a page's; the
    pages of each split; the splits that have any."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest - WINDOW + 1, 0) // PAGE * PAGE
    pages = (end - begin + PAGE - 1) // PAGE
    share = tl.maximum((pages + splits - 1) // splits, LEAST)
    return begin, share, (pages + share - 1) // share


@triton.jit
def store_rows(
    out_ptr, x, tile, first_row, left, head, HEADS: tl.constexpr, TOGETHER: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """x, [rows and TOGETHER heads, columns], the places `tile` of a block that begins at first_row and has `left` rows,
    from `head` on."""
    offs_d = tl.arange(0, x.shape[1])
    rows = tile // TOGETHER
    places = ((first_row + rows).to(tl.int64) * HEADS + head + tile % TOGETHER)[:, None] * D + offs_d[None, :]
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=(rows < left)[:, None] & (offs_d < D)[None, :])


@triton.jit
def sum_splits(
    partial_ptr,
    lse_ptr,
    item,
    used,
    out_ptr,
    first,
    first_row,
    left,
    head,
    HEADS: tl.constexpr,
    TOGETHER: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """out of AT_ONCE places from `first` on of a block, from what its `used` splits have left, the first of them as
    `item`: of all of them at once, so that one latency hides the others."""
    tile = first + tl.arange(0, AT_ONCE)
    offs_s, offs_d = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    here = item + offs_s[None, :] * (HEADS // TOGETHER)
    mask = (tile < left * TOGETHER)[:, None] & (offs_s < used)[None, :]
    cells = (here * BLOCK_M + tile[:, None])[:, :, None] * BLOCK_D + offs_d[None, None, :]
    m = tl.load(lse_ptr + here * (2 * BLOCK_M) + tile[:, None], mask=mask, other=EMPTY, cache_modifier=".cg")
    l = tl.load(lse_ptr + here * (2 * BLOCK_M) + BLOCK_M + tile[:, None], mask=mask, other=1.0, cache_modifier=".cg")
    o = tl.load(partial_ptr + cells, mask=mask[:, :, None], other=0.0, cache_modifier=".cg")
    weight = tl.exp2(m - tl.max(m, 1)[:, None])
    x = tl.sum(o * weight[:, :, None], 1) / tl.sum(l * weight, 1)[:, None]
    store_rows(out_ptr, x, tile, first_row, left, head, HEADS, TOGETHER, D)


@triton.jit
def _prompt_splits_kernel(
    chunks_ptr,
    partial_ptr,
    lse_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MOST: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    LEAST: tl.constexpr,
    TOGETHER: tl.constexpr,
    SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """What the splits of prompt_attention have left, added up: out [rows, HEADS * D] (output) of those blocks that have
    more than one. chunks, partial, lse: as there; SPLITS: MOST_SPLITS or more. A program takes AT_ONCE places of a
    block, and a part of the heads, at a time, so that there are enough of them for all multiprocessors. Grid
    (programs,)."""
    PARTS: tl.constexpr = HEADS // TOGETHER
    PIECES: tl.constexpr = BLOCK_M // AT_ONCE
    ROWS: tl.constexpr = BLOCK_M // TOGETHER
    total = tl.sum(blocks_of(chunks_ptr, ROWS), 0)
    splits = splits_of(total, PARTS, MOST, MOST_SPLITS)
    if PDL and total == 0:
        gdc_wait()
    for piece in range(tl.program_id(0), total * PARTS * PIECES, tl.num_programs(0)):
        first, part, block = piece % PIECES * AT_ONCE, piece // PIECES % PARTS, piece // (PIECES * PARTS)
        _, first_row, left, lowest = block_of(chunks_ptr, total - 1 - block, ROWS)
        _, _, used = shares(lowest, lowest + tl.minimum(left, ROWS), splits, WINDOW, LEAST, PAGE)
        if PDL:
            gdc_wait()  # once more is nothing
        if used > 1:
            sum_splits(
                partial_ptr, lse_ptr, block * splits * PARTS + part, used, out_ptr, first, first_row, left,
                part * TOGETHER, HEADS, TOGETHER, D, BLOCK_M, BLOCK_D, SPLITS, AT_ONCE,
            )  # fmt: skip


def heads_together(group: int, most: int) -> int:
    """Heads of one K/V head, of `group`, that share a block: a power of two that divides them."""
    return min(group & -group, most)


def rows_at_once(columns: int, registers: int, num_warps: int, most: int) -> int:
    """Rows of so many fp32 columns that so many registers a thread hold, a power of two of `most` or fewer."""
    return max(min(registers * 32 * num_warps // columns, most), 1)
