"""Attention of one token's heads to K/V in 8 bits: each warp attends to positions of its own, from codes that come
straight into the registers where the tensor cores want them.

Codes are loaded as words of four, 16 bytes a lane, and stay words until they are wanted. The order of the columns of a
product is free as long as both operands agree, and the order of its results is put right once, after the last turn. So
nothing moves between lanes, and no turn has a barrier: warps meet when all positions are done.
"""

import triton
import triton.language as tl

from .fp8_kv import two_words_to_bf16, words_to_numbers
from .splits import EMPTY

_HEADS = tl.constexpr(16)  # the fewest rows of a product


def warp_positions(config, page: int) -> int:
    """WARP_T of the kernels: how many of the block_t positions of a turn each warp attends to."""
    return min(max(config.block_t // config.num_warps, 16), 32, page)  # a product takes a multiple of 16


@triton.jit
def _pages(table_ptr, t, warp, end, PAGE: tl.constexpr, WARP_T: tl.constexpr):
    """The page of each warp's positions; 0 where all of them lie behind the last."""
    return tl.load(table_ptr + (t + warp * WARP_T) // PAGE, mask=t + warp * WARP_T < end, other=0)


@triton.jit
def fp8_pages(table_ptr, t, end, PAGE: tl.constexpr, WARP_T: tl.constexpr, BLOCK_T: tl.constexpr):
    """The pages of the BLOCK_T positions from t: of each warp, as its lanes load codes and as they load scales."""
    WARPS: tl.constexpr = BLOCK_T // WARP_T
    of_codes = _pages(table_ptr, t, tl.arange(0, WARPS * 8)[:, None] // 8, end, PAGE, WARP_T)
    return of_codes, _pages(table_ptr, t, tl.arange(0, WARPS)[:, None, None], end, PAGE, WARP_T)


@triton.jit
def _codes(
    ptr,
    pages,
    t,
    end,
    stride_p,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    WARP_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """(pointers to the first word of each warp's positions, of eight lines a warp; which warps have any)."""
    first = t + tl.arange(0, BLOCK_T // WARP_T * 8)[:, None] // 8 * WARP_T
    places = pages[0].to(tl.int64) * (stride_p // 4) + first % PAGE * (D // 4)
    return ptr.to(tl.pointer_type(tl.int32)) + places, first < end


@triton.jit
def _scale_pairs(ptr, pages, t, end, stride_p, PAGE: tl.constexpr, WARP_T: tl.constexpr, BLOCK_T: tl.constexpr):
    """Scales of the positions from t, in words of two: int32 [warps, 1, positions / 2]."""
    first = t + tl.arange(0, BLOCK_T // WARP_T)[:, None, None] * WARP_T
    places = pages[1].to(tl.int64) * (stride_p // 2) + first % PAGE // 2
    ptr = ptr.to(tl.pointer_type(tl.int32))
    return tl.load(ptr + places + tl.arange(0, WARP_T // 2)[None, None, :], first < end, 0)


@triton.jit
def fp8_keys(
    k_ptr,
    scale_ptr,
    pages,
    t,
    end,
    stride_p,
    stride_sp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WARP_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """K of the positions from t, which stand on `pages`: words [warps * 8, 16], 64 codes of eight positions of each
    warp, for all of the head and of the warp's positions; and scales. What lies behind `end` may be anything."""
    line, word = tl.arange(0, BLOCK_T // WARP_T * 8)[:, None], tl.arange(0, 16)[None, :]
    ptrs, some = _codes(k_ptr, pages, t, end, stride_p, PAGE, D, WARP_T, BLOCK_T)
    ptrs += line % 8 * (D // 4) + word
    words = ()
    for part in tl.static_range(BLOCK_D // 64):
        for i in tl.static_range(WARP_T // 8):
            mask = some if part * 64 + 64 <= D else some & (part * 16 + word < D // 4)
            words += (tl.load(ptrs + (i * 8 * (D // 4) + part * 16), mask=mask, other=0),)
    return words + (_scale_pairs(scale_ptr, pages, t, end, stride_sp, PAGE, WARP_T, BLOCK_T),)


@triton.jit
def fp8_values(
    v_ptr,
    scale_ptr,
    pages,
    t,
    end,
    stride_p,
    stride_sp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WARP_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """V of the same positions: words [warps * 8, 4 * words of a lane], of four positions of each warp; and scales."""
    WIDE: tl.constexpr = min(BLOCK_D, 128) // 32  # words of V that a lane loads at once
    line, word = tl.arange(0, BLOCK_T // WARP_T * 8)[:, None], tl.arange(0, 4 * WIDE)[None, :]
    ptrs, some = _codes(v_ptr, pages, t, end, stride_p, PAGE, D, WARP_T, BLOCK_T)
    column = line % 8 * WIDE + word % WIDE
    ptrs += word // WIDE * 2 * (D // 4) + column
    words = ()
    for i in tl.static_range(WARP_T // 4):
        row = i // 4 * 16 + i // 2 % 2 * 8 + i % 2
        for part in tl.static_range(BLOCK_D // (32 * WIDE)):
            mask = some if (part + 1) * 32 * WIDE <= D else some & (part * 8 * WIDE + column < D // 4)
            words += (tl.load(ptrs + (row * (D // 4) + part * 8 * WIDE), mask=mask, other=0),)
    return words + (_scale_pairs(scale_ptr, pages, t, end, stride_sp, PAGE, WARP_T, BLOCK_T),)


@triton.jit
def _scales(pairs):
    """Scales fp32 [..., n] of words [..., n / 2] of two."""
    low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.join(low, high).reshape(pairs.shape[0], 1, 2 * pairs.shape[2])


@triton.jit
def _halved(parts, HALF: tl.constexpr):
    both = ()
    for i in tl.static_range(HALF):
        both += (tl.join(parts[i], parts[i + HALF]),)
    return both


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """COUNT tensors of a tuple, a power of two up to 16, one after another along new last dimensions."""
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
def fp8_queries(q, WARPS: tl.constexpr, INTERPRETED: tl.constexpr):
    """q [8 or 16, BLOCK_D], fp32, as fp8_scores wants them; of eight heads the others are nought."""
    BLOCK_D: tl.constexpr = q.shape[1]
    if q.shape[0] < _HEADS:
        q = tl.permute(tl.join(q, q * 0.0), (2, 0, 1)).reshape(_HEADS, BLOCK_D)
    q = q.to(tl.float16).to(tl.float32 if INTERPRETED else tl.float16)
    q = tl.permute(q.reshape(_HEADS, BLOCK_D // 64, 4, 4, 4), (0, 1, 3, 2, 4)).reshape(1, _HEADS, BLOCK_D)
    return tl.broadcast_to(q, (WARPS, _HEADS, BLOCK_D))


@triton.jit
def fp8_scores(keys, q, seen, CONVERTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Scores [warps, HEADS, positions] with what fp8_keys has loaded; seen: [warps, 1, positions]."""
    WARPS: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[2]
    WARP_T: tl.constexpr = seen.shape[2]
    k = ()
    for i in tl.static_range(BLOCK_D // 64 * WARP_T // 8):
        k += (words_to_numbers(keys[i], tl.float16, CONVERTS, INTERPRETED),)
    k = _joined(k, BLOCK_D // 64 * WARP_T // 8)
    k = k.reshape(WARPS, 8, 4, 4, 4, BLOCK_D // 64, WARP_T // 8)  # line, lane, word, byte, part, eight
    k = tl.permute(k, (0, 5, 3, 2, 4, 6, 1)).reshape(WARPS, BLOCK_D, WARP_T)
    s = tl.dot(q, k, input_precision="ieee") * _scales(keys[BLOCK_D // 64 * WARP_T // 8])
    return tl.where(seen, s, EMPTY)


@triton.jit
def fp8_summed_values(values, p, acc, seen, INTERPRETED: tl.constexpr):
    """acc [warps, HEADS, BLOCK_D] and what fp8_values has loaded, weighted by p [warps, HEADS, positions]."""
    WARPS: tl.constexpr = acc.shape[0]
    BLOCK_D: tl.constexpr = acc.shape[2]
    WARP_T: tl.constexpr = p.shape[2]
    WIDE: tl.constexpr = min(BLOCK_D, 128) // 32
    PARTS: tl.constexpr = BLOCK_D // (32 * WIDE)
    # The scale of a position behind the last may be anything. What a lane has of p is renamed as what it has of V.
    p = tl.where(seen, p * _scales(values[WARP_T // 4 * PARTS]), 0.0).to(tl.bfloat16)
    p = tl.permute(p.reshape(WARPS, _HEADS, WARP_T // 16, 2, 4, 2), (0, 1, 2, 4, 3, 5)).reshape(WARPS, _HEADS, WARP_T)
    p = p.to(tl.float32 if INTERPRETED else tl.bfloat16)
    v = ()
    for part in tl.static_range(PARTS):
        of_part = ()
        for i in tl.static_range(WARP_T // 8):
            first, second = values[2 * i * PARTS + part], values[(2 * i + 1) * PARTS + part]
            of_part += (two_words_to_bf16(first, second, INTERPRETED),)
        v += (_joined(of_part, WARP_T // 8),)
    v = _joined(v, PARTS)
    v = v.reshape(WARPS, 8, 4, WIDE, 4, 2, WARP_T // 16, 2, PARTS)  # line, lane, word, byte, of two, 16, eight, part
    v = tl.permute(v, (0, 6, 2, 7, 5, 8, 3, 4, 1)).reshape(WARPS, WARP_T, BLOCK_D)
    return tl.dot(p, v, acc, input_precision="ieee")


@triton.jit
def fp8_attend(
    q,
    keys,
    values,
    pages,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    first,
    start,
    end,
    stride_p,
    stride_sp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    HEADS: tl.constexpr,
    CONVERTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """(maxima [HEADS], sums of weights [HEADS], sums of values [BLOCK_D, HEADS]), HEADS 8 or 16, of the positions
    [max(first, start), end).

    first: a multiple of BLOCK_T; keys, values: of the BLOCK_T positions from there; pages: of those behind them; q: of
    fp8_queries. Masked scores underflow to 0, or a later one scales their sums to 0.
    """
    BLOCK_D: tl.constexpr = q.shape[2]
    WARPS: tl.constexpr = q.shape[0]
    WARP_T: tl.constexpr = BLOCK_T // WARPS
    m, l = tl.full([WARPS, _HEADS], EMPTY, tl.float32), tl.zeros([WARPS, _HEADS], tl.float32)
    acc = tl.zeros([WARPS, _HEADS, BLOCK_D], tl.float32)
    offs = tl.arange(0, WARPS)[:, None, None] * WARP_T + tl.arange(0, WARP_T)[None, None, :]
    for t in range(first, end, BLOCK_T):
        seen = (t + offs >= start) & (t + offs < end)
        s = fp8_scores(keys, q, seen, CONVERTS, INTERPRETED)
        keys = fp8_keys(  # in flight from here on, as V is from the end of the turn
            k_ptr, k_scale_ptr, pages, t + BLOCK_T, end, stride_p, stride_sp, PAGE, D, BLOCK_D, WARP_T, BLOCK_T
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 2))
        alpha = tl.exp2(m - m_new)
        p = tl.exp2(s - m_new[:, :, None])
        l = l * alpha + tl.sum(p, 2)
        acc = fp8_summed_values(values, p, acc * alpha[:, :, None], seen, INTERPRETED)
        values = fp8_values(
            v_ptr, v_scale_ptr, pages, t + BLOCK_T, end, stride_p, stride_sp, PAGE, D, BLOCK_D, WARP_T, BLOCK_T
        )  # fmt: skip
        pages = fp8_pages(table_ptr, t + 2 * BLOCK_T, end, PAGE, WARP_T, BLOCK_T)
        m = m_new
    if HEADS < _HEADS:
        m, l, acc = _eight(m), _eight(l), _eight(acc)
    top = tl.max(m, 0)
    factor = tl.exp2(m - top[None, :])
    WIDE: tl.constexpr = min(BLOCK_D, 128) // 32
    total = tl.sum(acc * factor[:, :, None], 0).reshape(HEADS, BLOCK_D // (32 * WIDE), WIDE, 4, 8)
    return top, tl.sum(l * factor, 0), tl.permute(total, (1, 4, 2, 3, 0)).reshape(BLOCK_D, HEADS)


@triton.jit
def _eight(x):
    """The first half of dimension 1, of 16."""
    if len(x.shape) == 2:
        x, _ = tl.split(tl.permute(x.reshape(x.shape[0], 2, 8), (0, 2, 1)))
    else:
        x, _ = tl.split(tl.permute(x.reshape(x.shape[0], 2, 8, x.shape[2]), (0, 2, 3, 1)))
    return x
