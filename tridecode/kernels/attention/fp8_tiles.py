"""Attention of the queries of one row to fp8 K/V, in which each warp attends to its own positions.

Codes are loaded directly into the registers of the layout that the tensor cores take, as words of four, 16 bytes a
lane. They are converted only when they are multiplied. The columns of a product may have any order that both operands
share. The order of the results is restored once, after the last iteration. Therefore no data moves between lanes, and
warps synchronize only once, after all positions.
"""

import triton
import triton.language as tl

from .fp8_kv import two_words_to_bf16, words_to_numbers
from .splits import EMPTY

_HEADS = tl.constexpr(16)  # Minimum number of rows of a matrix product.


def warp_positions(config, page: int) -> int:
    """Return WARP_T, the number of positions of a tile that each warp attends to."""
    # A matrix product takes a multiple of 16 positions.
    return min(max(config.block_t // config.num_warps, 16), 32, page)


@triton.jit
def _warp_pages(table_ptr, t, warp, end, SIZES: tl.constexpr):
    """Load the page of each warp's positions; 0 if they begin at `end` or later."""
    first = t + warp * SIZES.WARP_T
    return tl.load(table_ptr + first // SIZES.PAGE, mask=first < end, other=0)


@triton.jit
def _fp8_pages(table_ptr, t, end, SIZES: tl.constexpr):
    """Load the pages of BLOCK_T positions from t for each warp, in the layouts of its codes and of its scales."""
    WARPS: tl.constexpr = SIZES.BLOCK_T // SIZES.WARP_T
    pages = _warp_pages(table_ptr, t, tl.arange(0, WARPS * 8)[:, None] // 8, end, SIZES)
    return pages, _warp_pages(table_ptr, t, tl.arange(0, WARPS)[:, None, None], end, SIZES)


@triton.jit
def _codes(ptr, pages, t, end, stride_p, SIZES: tl.constexpr):
    """Return pointers to the first words of each warp's positions, in eight lines, and which warps have positions."""
    first = t + tl.arange(0, SIZES.BLOCK_T // SIZES.WARP_T * 8)[:, None] // 8 * SIZES.WARP_T
    places = pages[0].to(tl.int64) * (stride_p // 4) + first % SIZES.PAGE * (SIZES.D // 4)
    return ptr.to(tl.pointer_type(tl.int32)) + places, first < end


@triton.jit
def _scale_pairs(ptr, pages, t, end, stride_p, SIZES: tl.constexpr):
    """Load the scales of BLOCK_T positions from t, in words of two: int32 [warps, 1, positions / 2]."""
    first = t + tl.arange(0, SIZES.BLOCK_T // SIZES.WARP_T)[:, None, None] * SIZES.WARP_T
    places = pages[1].to(tl.int64) * (stride_p // 2) + first % SIZES.PAGE // 2
    ptr = ptr.to(tl.pointer_type(tl.int32))
    return tl.load(ptr + places + tl.arange(0, SIZES.WARP_T // 2)[None, None, :], first < end, 0)


@triton.jit
def _fp8_keys(cache, pages, t, end, SIZES: tl.constexpr):
    """Load K of BLOCK_T positions from t in `pages`, and its scales.

    Returns words [warps * 8, 16], each tensor with 64 codes of eight positions of each warp, for the whole head and all
    positions of a warp, followed by the scales. Entries at `end` or later are arbitrary.
    """
    D: tl.constexpr = SIZES.D
    line, word = tl.arange(0, SIZES.BLOCK_T // SIZES.WARP_T * 8)[:, None], tl.arange(0, 16)[None, :]
    ptrs, some = _codes(cache.k_ptr, pages, t, end, cache.stride_kp, SIZES)
    ptrs += line % 8 * (D // 4) + word
    words = ()
    for part in tl.static_range(SIZES.BLOCK_D // 64):
        for i in tl.static_range(SIZES.WARP_T // 8):
            mask = some if part * 64 + 64 <= D else some & (part * 16 + word < D // 4)
            words += (tl.load(ptrs + (i * 8 * (D // 4) + part * 16), mask=mask, other=0),)
    return words + (_scale_pairs(cache.k_scale_ptr, pages, t, end, cache.stride_sp, SIZES),)


@triton.jit
def _fp8_values(cache, pages, t, end, SIZES: tl.constexpr):
    """Load V of the same positions, and its scales.

    Returns words [warps * 8, 4 * words of a lane], each tensor with four positions of each warp, followed by the
    scales.
    """
    D: tl.constexpr = SIZES.D
    WIDE: tl.constexpr = min(SIZES.BLOCK_D, 128) // 32  # Number of words of V that a lane loads together.
    line, word = tl.arange(0, SIZES.BLOCK_T // SIZES.WARP_T * 8)[:, None], tl.arange(0, 4 * WIDE)[None, :]
    ptrs, some = _codes(cache.v_ptr, pages, t, end, cache.stride_kp, SIZES)
    column = line % 8 * WIDE + word % WIDE
    ptrs += word // WIDE * 2 * (D // 4) + column
    words = ()
    for i in tl.static_range(SIZES.WARP_T // 4):
        row = i // 4 * 16 + i // 2 % 2 * 8 + i % 2
        for part in tl.static_range(SIZES.BLOCK_D // (32 * WIDE)):
            mask = some if (part + 1) * 32 * WIDE <= D else some & (part * 8 * WIDE + column < D // 4)
            words += (tl.load(ptrs + (row * (D // 4) + part * 8 * WIDE), mask=mask, other=0),)
    return words + (_scale_pairs(cache.v_scale_ptr, pages, t, end, cache.stride_sp, SIZES),)


@triton.jit
def fp8_tile(cache, table_ptr, t, end, SIZES: tl.constexpr):
    """Load the tile that `fp8_attend` starts with: K and V of BLOCK_T positions from t, and the next pages."""
    pages = _fp8_pages(table_ptr, t, end, SIZES)
    keys, values = _fp8_keys(cache, pages, t, end, SIZES), _fp8_values(cache, pages, t, end, SIZES)
    return keys, values, _fp8_pages(table_ptr, t + SIZES.BLOCK_T, end, SIZES)


@triton.jit
def _scales(pairs):
    """Unpack words of two scales [..., n / 2] to fp32 [..., n]."""
    low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high).reshape(pairs.shape[0], 1, 2 * pairs.shape[2])


@triton.jit
def _halved(parts, HALF: tl.constexpr):
    """Join the first HALF tensors of a tuple with the second HALF, along a new last dimension."""
    both = ()
    for i in tl.static_range(HALF):
        both += (tl.join(parts[i], parts[i + HALF]),)
    return both


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """Join COUNT tensors of a tuple, a power of two up to 16, along new last dimensions."""
    if COUNT >= 16:
        parts = _halved(parts, 8)
    if COUNT >= 8:
        parts = _halved(parts, 4)
    if COUNT >= 4:
        parts = _halved(parts, 2)
    if COUNT >= 2:
        parts = _halved(parts, 1)
    return parts[0]


@triton.jit
def _fp8_queries(q, SIZES: tl.constexpr):
    """Arrange q [8 or 16, BLOCK_D], fp32, for _fp8_scores: [warps, 16, BLOCK_D]. Rows beyond 8 heads are 0."""
    WARPS: tl.constexpr = SIZES.BLOCK_T // SIZES.WARP_T
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    if q.shape[0] < _HEADS:
        q = tl.permute(tl.join(q, q * 0.0), (2, 0, 1)).reshape(_HEADS, BLOCK_D)
    q = q.to(tl.float16).to(tl.float32 if SIZES.INTERPRETED else tl.float16)
    q = tl.permute(q.reshape(_HEADS, BLOCK_D // 64, 4, 4, 4), (0, 1, 3, 2, 4)).reshape(1, _HEADS, BLOCK_D)
    return tl.broadcast_to(q, (WARPS, _HEADS, BLOCK_D))


@triton.jit
def _fp8_scores(keys, q, seen, SIZES: tl.constexpr):
    """Return the scores [warps, heads, positions] of q with the keys that _fp8_keys loaded.

    Args:
        seen: [warps, 1, positions], whether a position is attended to.
    """
    WARPS: tl.constexpr = SIZES.BLOCK_T // SIZES.WARP_T
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    WARP_T: tl.constexpr = SIZES.WARP_T
    k = ()
    for i in tl.static_range(BLOCK_D // 64 * WARP_T // 8):
        k += (words_to_numbers(keys[i], tl.float16, SIZES.CONVERTS, SIZES.INTERPRETED),)
    k = _joined(k, BLOCK_D // 64 * WARP_T // 8)
    # Dimensions: line, lane, word, byte, part, group of eight positions.
    k = k.reshape(WARPS, 8, 4, 4, 4, BLOCK_D // 64, WARP_T // 8)
    k = tl.permute(k, (0, 5, 3, 2, 4, 6, 1)).reshape(WARPS, BLOCK_D, WARP_T)
    s = tl.dot(q, k, input_precision="ieee") * _scales(keys[BLOCK_D // 64 * WARP_T // 8])
    return tl.where(seen, s, EMPTY)


@triton.jit
def _fp8_weighted(values, p, acc, seen, SIZES: tl.constexpr):
    """Add the values of _fp8_values, weighted by p [warps, heads, positions], to acc [warps, heads, BLOCK_D]."""
    WARPS: tl.constexpr = SIZES.BLOCK_T // SIZES.WARP_T
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    WARP_T: tl.constexpr = SIZES.WARP_T
    WIDE: tl.constexpr = min(BLOCK_D, 128) // 32
    PARTS: tl.constexpr = BLOCK_D // (32 * WIDE)
    # Scales after the last position are arbitrary. Reorder the columns of p to the order in which lanes hold V.
    p = tl.where(seen, p * _scales(values[WARP_T // 4 * PARTS]), 0.0).to(tl.bfloat16)
    p = tl.permute(p.reshape(WARPS, _HEADS, WARP_T // 16, 2, 4, 2), (0, 1, 2, 4, 3, 5)).reshape(WARPS, _HEADS, WARP_T)
    p = p.to(tl.float32 if SIZES.INTERPRETED else tl.bfloat16)
    v = ()
    for part in tl.static_range(PARTS):
        words = ()
        for i in tl.static_range(WARP_T // 8):
            first, second = values[2 * i * PARTS + part], values[(2 * i + 1) * PARTS + part]
            words += (two_words_to_bf16(first, second, SIZES.INTERPRETED),)
        v += (_joined(words, WARP_T // 8),)
    v = _joined(v, PARTS)
    # Dimensions: line, lane, word, byte, half of a pair, group of 16, group of eight, part.
    v = v.reshape(WARPS, 8, 4, WIDE, 4, 2, WARP_T // 16, 2, PARTS)
    v = tl.permute(v, (0, 6, 2, 7, 5, 8, 3, 4, 1)).reshape(WARPS, WARP_T, BLOCK_D)
    return tl.dot(p, v, acc, input_precision="ieee")


@triton.jit
def fp8_attend(q, tile, cache, table_ptr, first, start, end, SIZES: tl.constexpr):
    """Attend to the positions [max(first, start), end) of one head.

    Masked scores underflow to 0, or a later score scales their sums to 0.

    Args:
        q: [COLUMNS, BLOCK_D] fp32, scaled by log2(e). COLUMNS is 8 or 16.
        tile: Result of `fp8_tile` at `first`, a multiple of BLOCK_T.

    Returns:
        For each column: maximum score [COLUMNS], sum of weights [COLUMNS], weighted values [BLOCK_D, COLUMNS].
    """
    WARPS: tl.constexpr = SIZES.BLOCK_T // SIZES.WARP_T
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    BLOCK_T: tl.constexpr = SIZES.BLOCK_T
    WARP_T: tl.constexpr = SIZES.WARP_T
    COLUMNS: tl.constexpr = SIZES.COLUMNS
    q = _fp8_queries(q, SIZES)
    keys, values, pages = tile
    m, l = tl.full([WARPS, _HEADS], EMPTY, tl.float32), tl.zeros([WARPS, _HEADS], tl.float32)
    acc = tl.zeros([WARPS, _HEADS, BLOCK_D], tl.float32)
    offs = tl.arange(0, WARPS)[:, None, None] * WARP_T + tl.arange(0, WARP_T)[None, None, :]
    for t in range(first, end, BLOCK_T):
        seen = (t + offs >= start) & (t + offs < end)
        s = _fp8_scores(keys, q, seen, SIZES)
        # Keys are in flight from here on, and V from the end of the iteration.
        keys = _fp8_keys(cache, pages, t + BLOCK_T, end, SIZES)
        m_new = tl.maximum(m, tl.max(s, 2))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, :, None])
        l = l * alpha + tl.sum(p, 2)
        acc = _fp8_weighted(values, p, acc * alpha[:, :, None], seen, SIZES)
        values = _fp8_values(cache, pages, t + BLOCK_T, end, SIZES)
        pages = _fp8_pages(table_ptr, t + 2 * BLOCK_T, end, SIZES)
        m = m_new
    if COLUMNS < _HEADS:
        m, l, acc = _first_eight(m), _first_eight(l), _first_eight(acc)
    top = tl.max(m, 0)
    factor = tl.exp2(m - top[None, :])
    WIDE: tl.constexpr = min(BLOCK_D, 128) // 32
    total = tl.sum(acc * factor[:, :, None], 0).reshape(COLUMNS, BLOCK_D // (32 * WIDE), WIDE, 4, 8)
    return top, tl.sum(l * factor, 0), tl.permute(total, (1, 4, 2, 3, 0)).reshape(BLOCK_D, COLUMNS)


@triton.jit
def _first_eight(x):
    """Return the first 8 of the 16 elements of dimension 1."""
    if len(x.shape) == 2:
        x, _ = tl.split(tl.permute(x.reshape(x.shape[0], 2, 8), (0, 2, 1)))
    else:
        x, _ = tl.split(tl.permute(x.reshape(x.shape[0], 2, 8, x.shape[2]), (0, 2, 3, 1)))
    return x
