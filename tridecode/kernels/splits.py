"""What both forms of attention share: tiles kept in registers, and the sum over the splits of one head's positions."""

import triton
import triton.language as tl

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


def combine_splits(group: int, head_dim: int, shape) -> int:
    """Splits whose partial results the last program loads at once: what 32 registers a thread hold."""
    tile = triton.next_power_of_2(group) * triton.next_power_of_2(head_dim)
    return max(min(32 * shape.num_warps * 32 // tile, triton.next_power_of_2(shape.splits)), 2)
