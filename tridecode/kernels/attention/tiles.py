"""Tiles of K and V in registers, and the online softmax over them."""

import triton
import triton.language as tl

from .pages import page_rows, pages_at
from .splits import EMPTY


@triton.jit
def _in_registers(x, position, HOLD: tl.constexpr):
    """Return x, unchanged, and keep it in registers until here if HOLD.

    Otherwise the compiler stores each loaded tile to shared memory. All tiles together need more than 48 KiB, and then
    the whole pass is slower. An instruction that the compiler does not understand, in a branch that it cannot prove to
    be taken, prevents this. Triton 3.6 needs both.
    """
    if HOLD:
        if position >= 0:
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=32 // x.dtype.primitive_bitwidth
            )
    return x


@triton.jit
def prefetch_tiles(cache, table_ptr, first, start, end, SIZES: tl.constexpr):
    """Load the tiles that `attend_tiles` starts with.

    Returns:
        K: TILES tiles of one head, from position `first`.
        V: the same tiles of V.
        The mask of the tiles' positions that are in [start, end).
        The page indices of the next two tiles.
    """
    PAGE: tl.constexpr = SIZES.PAGE
    D: tl.constexpr = SIZES.D
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    BLOCK_T: tl.constexpr = SIZES.BLOCK_T
    offs_d, offs_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    mask_d = offs_d < D
    k, v, seen = (), (), ()
    for i in tl.static_range(SIZES.TILES):
        t = first + i * BLOCK_T
        pages = pages_at(table_ptr, t, end, PAGE, BLOCK_T)
        tiles = page_rows(pages, t, cache.stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
        seen += (((t + offs_t >= start) & (t + offs_t < end))[:, None],)
        mask = seen[i] & mask_d[None, :]
        k += (tl.load(cache.k_ptr + tiles, mask=mask, other=0.0),)
        v += (tl.load(cache.v_ptr + tiles, mask=mask, other=0.0),)
    rest = first + SIZES.TILES * BLOCK_T
    rest_pages = pages_at(table_ptr, rest, end, PAGE, BLOCK_T)
    next_pages = pages_at(table_ptr, rest + BLOCK_T, end, PAGE, BLOCK_T)
    return k, v, seen, (rest_pages, next_pages)


@triton.jit
def attend_tiles(
    dot_q, prefetched, lows, cache, table_ptr, position, first, end, LOWS: tl.constexpr, SIZES: tl.constexpr
):  # fmt: skip
    """Attend to the positions [first, end) of one head, which begin with the tiles of `prefetch_tiles`.

    In the first product, the rows are positions. In the second product, the rows are the D dimensions. The few queries
    are the columns of both products. The
    prefetched tiles share one maximum. The weights are summed separately for each row of a tile until the end. Masked
    scores underflow to 0. If a window hides a whole tile, a later score scales its sums to 0.

    Args:
        dot_q: [D padded, columns], a query in each column, scaled by log2(e).
        lows: [columns], the first position that each column sees. Used only if LOWS.

    Returns:
        For each column: maximum score [columns], sum of weights [columns], weighted values [D padded, columns].
    """
    k, v, seen, pages = prefetched
    PAGE: tl.constexpr = SIZES.PAGE
    D: tl.constexpr = SIZES.D
    BLOCK_D: tl.constexpr = SIZES.BLOCK_D
    BLOCK_T: tl.constexpr = SIZES.BLOCK_T
    ELEMENT: tl.constexpr = cache.k_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if SIZES.INTERPRETED else ELEMENT
    HOLD: tl.constexpr = TYPE != tl.float32  # The instruction takes two elements of 16 bits.
    offs_d, offs_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    mask_d = offs_d < D
    scores = ()
    for i in tl.static_range(SIZES.TILES):
        s = tl.full([BLOCK_T, SIZES.COLUMNS], EMPTY, tl.float32)
        if first + i * BLOCK_T < end:
            s = tl.dot(_in_registers(k[i], position, HOLD).to(TYPE), dot_q, input_precision="ieee")
            s = tl.where(seen[i], s, EMPTY)
            if LOWS:
                s = tl.where((first + i * BLOCK_T + offs_t)[:, None] >= lows[None, :], s, EMPTY)
        scores += (s,)
    top = scores[0]
    for i in tl.static_range(1, SIZES.TILES):
        top = tl.maximum(top, scores[i])
    m = tl.max(top, 0)
    l_t = tl.zeros([BLOCK_T, SIZES.COLUMNS], tl.float32)
    acc = tl.zeros([BLOCK_D, SIZES.COLUMNS], tl.float32)
    for i in tl.static_range(SIZES.TILES):
        if first + i * BLOCK_T < end:
            p = tl.exp2(scores[i] - m[None, :])
            l_t += p
            tile = tl.trans(_in_registers(v[i], position, HOLD).to(TYPE))
            acc = tl.dot(tile, p.to(ELEMENT).to(TYPE), acc, input_precision="ieee")
    rest, next_pages = first + SIZES.TILES * BLOCK_T, pages[1]
    if rest < end:
        tiles = page_rows(pages[0], rest, cache.stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
        mask = (rest + offs_t < end)[:, None] & mask_d[None, :]
        k_t = tl.load(cache.k_ptr + tiles, mask=mask, other=0.0)
        for t in range(rest, end, BLOCK_T):
            v_t = tl.load(cache.v_ptr + tiles, mask=mask, other=0.0)
            seen_t = (t + offs_t < end)[:, None]
            if LOWS:
                seen_t = seen_t & ((t + offs_t)[:, None] >= lows[None, :])
            tiles = page_rows(next_pages, t + BLOCK_T, cache.stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
            # Load page numbers one iteration before their use.
            next_pages = pages_at(table_ptr, t + 2 * BLOCK_T, end, PAGE, BLOCK_T)
            mask = (t + BLOCK_T + offs_t < end)[:, None] & mask_d[None, :]
            # The load is in flight while the tile at t is multiplied.
            k_next = tl.load(cache.k_ptr + tiles, mask=mask, other=0.0)
            s = tl.where(seen_t, tl.dot(k_t.to(TYPE), dot_q, input_precision="ieee"), EMPTY)
            m_new = tl.maximum(m, tl.max(s, 0))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[None, :])
            l_t = l_t * alpha[None, :] + p
            p = p.to(ELEMENT).to(TYPE)
            v_t = tl.trans(_in_registers(v_t, position, HOLD).to(TYPE))
            acc = tl.dot(v_t, p, acc * alpha[None, :], input_precision="ieee")
            m = m_new
            k_t = k_next
    return m, tl.sum(l_t, 0), acc
