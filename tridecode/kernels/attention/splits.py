"""What both forms of attention share: tiles kept in registers, and the sum over the splits of one head's positions."""

import triton
import triton.language as tl

from .pages import page_rows, pages_at

LOG2E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(-1e30)  # running maximum of a split that saw no position


@triton.jit
def blocks_seen(position, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr):
    """Of rows at `position`: the first position attended to, its block, and how many blocks."""
    start = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
    return start, start // BLOCK_T, tl.cdiv(position, BLOCK_T) - start // BLOCK_T


@triton.jit
def _held(x, position, HOLD: tl.constexpr):
    """x as it is, in registers until here. Without an instruction that the compiler cannot see through, in a branch it
    does not know is always taken (Triton 3.6 needs both), a tile goes to shared memory where it was loaded. All tiles
    there are more than the 48 KiB beyond which the whole step is slower."""
    if HOLD:
        if position >= 0:
            x = tl.inline_asm_elementwise(
                "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=32 // x.dtype.primitive_bitwidth
            )
    return x


@triton.jit
def tiles_ahead(
    k_ptr,
    v_ptr,
    table_ptr,
    first,
    start,
    end,
    stride_kp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """What `attend_tiles` begins with: the first AHEAD tiles of K and V from position `first`, which of their positions
    are in [start, end), and the pages of the two tiles behind them. k_ptr, v_ptr: of a K/V head."""
    offs_d, offs_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    mask_d = offs_d < D
    k, v, seen = (), (), ()
    for i in tl.static_range(AHEAD):
        t = first + i * BLOCK_T
        pages = pages_at(table_ptr, t, end, PAGE, BLOCK_T)
        tiles = page_rows(pages, t, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
        seen += (((t + offs_t >= start) & (t + offs_t < end))[:, None],)
        mask = seen[i] & mask_d[None, :]
        k += (tl.load(k_ptr + tiles, mask=mask, other=0.0),)
        v += (tl.load(v_ptr + tiles, mask=mask, other=0.0),)
    rest = first + AHEAD * BLOCK_T
    rest_pages = pages_at(table_ptr, rest, end, PAGE, BLOCK_T)
    next_pages = pages_at(table_ptr, rest + BLOCK_T, end, PAGE, BLOCK_T)
    return k, v, seen, (rest_pages, next_pages)


@triton.jit
def attend_tiles(
    dot_q,
    k,
    v,
    seen,
    pages,
    lows,
    k_ptr,
    v_ptr,
    table_ptr,
    position,
    first,
    end,
    stride_kp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DOT_N: tl.constexpr,
    AHEAD: tl.constexpr,
    LOWS: tl.constexpr,
    ELEMENT: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attention over the positions [first, end), of which `tiles_ahead` has begun to load: the maxima and the sums of
    the exponentials of each column of dot_q [D padded, DOT_N], and the values' sums [D padded, DOT_N]. If LOWS, a
    column sees no position before its own of lows [DOT_N].

    Positions are the rows of the first product, D of the second, the few columns those of both. The tiles that were
    loaded ahead share one maximum; sums are kept for each place of a tile and added up at the end. Masked scores
    underflow to 0. Where a window hides a whole tile, a later score scales its sums to 0.
    """
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else ELEMENT
    HOLD: tl.constexpr = TYPE != tl.float32  # the instruction takes two elements of 16 bits
    offs_d, offs_t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_T)
    mask_d = offs_d < D
    scores = ()
    for i in tl.static_range(AHEAD):
        s = tl.full([BLOCK_T, DOT_N], EMPTY, tl.float32)
        if first + i * BLOCK_T < end:
            s = tl.dot(_held(k[i], position, HOLD).to(TYPE), dot_q, input_precision="ieee")
            s = tl.where(seen[i], s, EMPTY)
            if LOWS:
                s = tl.where((first + i * BLOCK_T + offs_t)[:, None] >= lows[None, :], s, EMPTY)
        scores += (s,)
    top = scores[0]
    for i in tl.static_range(1, AHEAD):
        top = tl.maximum(top, scores[i])
    m = tl.max(top, 0)
    l_t = tl.zeros([BLOCK_T, DOT_N], tl.float32)
    acc = tl.zeros([BLOCK_D, DOT_N], tl.float32)
    for i in tl.static_range(AHEAD):
        if first + i * BLOCK_T < end:
            p = tl.exp2(scores[i] - m[None, :])
            l_t += p
            tile = tl.trans(_held(v[i], position, HOLD).to(TYPE))
            acc = tl.dot(tile, p.to(ELEMENT).to(TYPE), acc, input_precision="ieee")
    rest, next_pages = first + AHEAD * BLOCK_T, pages[1]
    if rest < end:
        tiles = page_rows(pages[0], rest, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
        mask = (rest + offs_t < end)[:, None] & mask_d[None, :]
        k_t = tl.load(k_ptr + tiles, mask=mask, other=0.0)
        for t in range(rest, end, BLOCK_T):
            v_t = tl.load(v_ptr + tiles, mask=mask, other=0.0)
            seen_t = (t + offs_t < end)[:, None]
            if LOWS:
                seen_t = seen_t & ((t + offs_t)[:, None] >= lows[None, :])
            tiles = page_rows(next_pages, t + BLOCK_T, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
            next_pages = pages_at(table_ptr, t + 2 * BLOCK_T, end, PAGE, BLOCK_T)  # a turn before they are needed
            mask = (t + BLOCK_T + offs_t < end)[:, None] & mask_d[None, :]
            k_next = tl.load(k_ptr + tiles, mask=mask, other=0.0)  # in flight while the tile at t is attended to
            s = tl.where(seen_t, tl.dot(k_t.to(TYPE), dot_q, input_precision="ieee"), EMPTY)
            m_new = tl.maximum(m, tl.max(s, 0))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[None, :])
            l_t = l_t * alpha[None, :] + p
            p = p.to(ELEMENT).to(TYPE)
            v_t = tl.trans(_held(v_t, position, HOLD).to(TYPE))
            acc = tl.dot(v_t, p, acc * alpha[None, :], input_precision="ieee")
            m = m_new
            k_t = k_next
    return m, tl.sum(l_t, 0), acc


@triton.jit
def _combined(
    partial_ptr,
    lse_ptr,
    base,
    active,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """The output of one K/V head's group, [GROUP, D] padded, from what its `active` splits left at `base`."""
    offs_d = tl.arange(0, BLOCK_D)
    mask_d = offs_d < D
    # Maxima, sums and partial outputs of COMBINE splits are loaded at once, so their latencies overlap.
    offs_q = tl.arange(0, BLOCK_G)
    mask_q1 = offs_q < GROUP
    offs_s = tl.arange(0, COMBINE)
    m_all = tl.full([BLOCK_G], EMPTY, tl.float32)
    denominator = tl.zeros([BLOCK_G], tl.float32)
    o = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for s0 in range(0, active, COMBINE):
        index = base + offs_q[:, None] * MAX_SPLITS + s0 + offs_s[None, :]
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
    return o / denominator[:, None]


@triton.jit
def _combine(
    partial_ptr,
    lse_ptr,
    out_ptr,
    base,
    active,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_G: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    COMBINE: tl.constexpr,
):
    """_combined, to [GROUP, D] at out_ptr."""
    o = _combined(partial_ptr, lse_ptr, base, active, GROUP, D, BLOCK_D, BLOCK_G, MAX_SPLITS, COMBINE)
    offs_q, offs_d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    mask = (offs_q < GROUP)[:, None] & (offs_d < D)[None, :]
    tl.store(out_ptr + offs_q[:, None] * D + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask)


def combine_splits(group: int, head_dim: int, config) -> int:
    """Splits whose partial results the last program loads at once: what 32 registers a thread hold."""
    tile = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return max(min(32 * config.num_warps * 32 // tile, triton.next_power_of_2(config.splits)), 2)
