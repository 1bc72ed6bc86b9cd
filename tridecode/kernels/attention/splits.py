"""Splits of a row's cached positions, and the sum over the splits of a K/V head."""

from typing import NamedTuple

import triton
import triton.language as tl

from ..common import next_power_of_2

LOG2E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(-1e30)  # Running maximum of a split without positions.


class Partials(NamedTuple):
    """Scratch of the splits in a kernel. See arguments.Scratch."""

    partial_ptr: tl.tensor
    lse_ptr: tl.tensor
    counter_ptr: tl.tensor


class Rows(NamedTuple):
    """The activations of a pass in a kernel, and the softmax scale."""

    qkv_ptr: tl.tensor  # [rows, HEADS * Q_COLUMNS + 2 KV_HEADS * D]
    out_ptr: tl.tensor  # [rows, HEADS * D]
    stride_qkv: tl.tensor
    stride_om: tl.tensor
    scale: tl.tensor


class Split(NamedTuple):
    """A split of the work of one K/V head: cached positions of a row, or of a request with several rows."""

    row: tl.tensor  # Row of the pass, or number of the request if it has several rows.
    head: tl.tensor  # Number of the K/V head.
    split: tl.tensor
    splits: tl.tensor  # Number of splits of the row.
    position: tl.tensor  # position of the first new token
    table_ptr: tl.tensor  # Pointer to the row of the page table.
    start: tl.tensor  # First position that is attended to. Earlier positions are masked.
    first: tl.tensor  # first position of the split
    end: tl.tensor  # End of the positions of the split.


@triton.jit
def blocks_seen(position, BLOCK_T: tl.constexpr, WINDOW: tl.constexpr):
    """Return the first position that a row at `position` attends to, its block, and the number of cached blocks."""
    start = tl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else position * 0
    return start, start // BLOCK_T, tl.cdiv(position, BLOCK_T) - start // BLOCK_T


@triton.jit
def combined(
    partials, base, splits, COUNT: tl.constexpr, BLOCK: tl.constexpr, COMBINE: tl.constexpr, SIZES: tl.constexpr
):  # fmt: skip
    """Return the outputs [BLOCK, BLOCK_D] of COUNT columns from the partial results of `splits` splits at `base`."""
    offs_d = tl.arange(0, SIZES.BLOCK_D)
    mask_d = offs_d < SIZES.D
    # Load the maxima, sums and partial outputs of COMBINE splits together, so that their latencies overlap.
    offs_q = tl.arange(0, BLOCK)
    mask_q1 = offs_q < COUNT
    offs_s = tl.arange(0, COMBINE)
    m_all = tl.full([BLOCK], EMPTY, tl.float32)
    denominator = tl.zeros([BLOCK], tl.float32)
    o = tl.zeros([BLOCK, SIZES.BLOCK_D], tl.float32)
    for s0 in range(0, splits, COMBINE):
        index = base + offs_q[:, None] * SIZES.MAX_SPLITS + s0 + offs_s[None, :]
        mask_s = mask_q1[:, None] & (s0 + offs_s < splits)[None, :]
        m_part = tl.load(partials.lse_ptr + 2 * index, mask=mask_s, other=EMPTY, cache_modifier=".cg")
        l_part = tl.load(partials.lse_ptr + 2 * index + 1, mask=mask_s, other=0.0, cache_modifier=".cg")
        o_part = tl.load(
            partials.partial_ptr + index[:, :, None] * SIZES.D + offs_d[None, None, :],
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
def store_partial(partials, base, split, m, l, acc, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """Store the partial result of a split, of COUNT columns, at `base`.

    Args:
        m, l: [columns].
        acc: [D padded, columns].
    """
    offs_c, offs_d = tl.arange(0, SIZES.COLUMNS), tl.arange(0, SIZES.BLOCK_D)
    mask_c = offs_c < COUNT
    index = base + offs_c * SIZES.MAX_SPLITS + split
    mask = (offs_d < SIZES.D)[:, None] & mask_c[None, :]
    tl.store(partials.partial_ptr + index[None, :] * SIZES.D + offs_d[:, None], acc, mask=mask)
    tl.store(partials.lse_ptr + index * 2, m, mask=mask_c)
    tl.store(partials.lse_ptr + index * 2 + 1, l, mask=mask_c)


@triton.jit
def gated(o, gate_ptrs, mask, SIZES: tl.constexpr):
    """Return o, times the sigmoid of its gates if there are any."""
    if SIZES.GATE:
        o *= tl.sigmoid(tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32))
    return o


@triton.jit
def store_split(partials, out_ptr, gate_ptr, unit, split, splits, m, l, acc, SIZES: tl.constexpr):
    """Store a split's result for K/V head `unit` of the pass.

    A single split stores the output [GROUP, D] at out_ptr. Otherwise each split stores a partial result, and the split
    that finishes last combines those of all `splits`. gate_ptr points to the gate of the first head, if there is one.
    """
    offs_g, offs_d = tl.arange(0, SIZES.COLUMNS), tl.arange(0, SIZES.BLOCK_D)
    mask = (offs_d < SIZES.D)[:, None] & (offs_g < SIZES.GROUP)[None, :]
    if splits == 1:
        gate_ptrs = gate_ptr + offs_g[None, :] * SIZES.Q_COLUMNS + offs_d[:, None]
        o = gated(acc / l[None, :], gate_ptrs, mask, SIZES).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + offs_g[None, :] * SIZES.D + offs_d[:, None], o, mask=mask)
    else:
        base = unit * SIZES.GROUP * SIZES.MAX_SPLITS
        store_partial(partials, base, split, m, l, acc, SIZES.GROUP, SIZES)
        tl.debug_barrier()
        arrived = tl.atomic_add(partials.counter_ptr + unit, 1)
        if arrived == splits - 1:
            tl.debug_barrier()
            o = combined(partials, base, splits, SIZES.GROUP, SIZES.BLOCK_G, SIZES.COMBINE, SIZES)
            offs_q = tl.arange(0, SIZES.BLOCK_G)
            mask_q = (offs_q < SIZES.GROUP)[:, None] & (offs_d < SIZES.D)[None, :]
            o = gated(o, gate_ptr + offs_q[:, None] * SIZES.Q_COLUMNS + offs_d[None, :], mask_q, SIZES)
            tl.store(out_ptr + offs_q[:, None] * SIZES.D + offs_d[None, :], o.to(out_ptr.dtype.element_ty), mask=mask_q)
            tl.store(partials.counter_ptr + unit, 0)


def combine_splits(columns: int, head_dim: int, config) -> int:
    """Return the number of splits whose partial results a program loads together, in 32 registers of each thread."""
    tile = next_power_of_2(columns) * next_power_of_2(head_dim)
    return max(min(32 * config.num_warps * 32 // tile, next_power_of_2(config.splits)), 2)
