"""attention_rows: attention of several rows by a fixed number of programs that share the work of all rows."""

from dataclasses import dataclass, field
from typing import NamedTuple

import triton
import triton.language as tl

from ..common import META_WIDTH, POSITION, RUN, SLOT, STATUS, gdc_launch_dependents, gdc_wait, next_power_of_2, options
from ..op import Op
from .arguments import Heads, KVLayer, Rope, Scratch, Sizes
from .attention import OUTPUTS, attention_bytes, attention_ref, sizes_of
from .fp8_tiles import fp8_attend, fp8_tile
from .new_token import load_token, store_token
from .pages import Cache, cell_of, head_of, page_rows, pages_at
from .rope import Rotary, rms_rope, rotation
from .splits import EMPTY, LOG2E, Partials, Split, blocks_seen, store_split


@dataclass(frozen=True)
class AttentionRowsConfig:
    """Launch config of attention of several rows. The other fields are described in AttentionConfig."""

    block_t: int = 64
    splits: int = 32
    num_warps: int = 4
    registers: int = 0
    least: int = 4  # Minimum number of iterations of a split.
    # Number of programs that share the items. An item is a split of a K/V head of a row.
    programs: int = field(kw_only=True)
    stages: int = 1  # Pipeline stages: 1 + 2 for each tile in flight. With 1, the next tile is loaded into registers.
    # Whether the first tile is loaded before the wait, which is safe because no launch of this pass writes it.
    early: bool = True
    converts: bool = False


class Work(NamedTuple):
    """The rows of a pass as every program reads them from meta, [BLOCK_M] each."""

    ends: tl.tensor  # Running sum of `active`.
    active: tl.tensor  # Number of splits of each row. 0 for a row that does not run.
    positions: tl.tensor
    slots: tl.tensor


@triton.jit
def _pick(values, index):
    """Return values[index]."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def _item(item, work, table_ptr, stride_table, LEAST: tl.constexpr, SPLITS: tl.constexpr, SIZES: tl.constexpr):
    """Return the Split of an item. Items are ordered by row, then by split, then by K/V head."""
    unit, head = item // SIZES.KV_HEADS, item % SIZES.KV_HEADS
    row = tl.sum((work.ends <= unit).to(tl.int32), 0)
    splits = _pick(work.active, row)
    split = unit - _pick(work.ends, row) + splits
    position = _pick(work.positions, row)
    table_ptr += _pick(work.slots, row) * stride_table
    start, first_block, blocks = blocks_seen(position, SIZES.BLOCK_T, SIZES.WINDOW)
    length = tl.maximum(tl.cdiv(blocks, SPLITS), LEAST)
    first = (first_block + split * length) * SIZES.BLOCK_T
    end = tl.minimum(first + length * SIZES.BLOCK_T, position)
    return Split(row, head, split, splits, position, table_ptr, start, first, end)


@triton.jit
def _tile(cache, part, t, SIZES: tl.constexpr):
    """Load K [BLOCK_T, BLOCK_D] and V [BLOCK_D, BLOCK_T] of the positions from t within a Split.

    If FP8, load the tile that fp8_attend takes.
    """
    cache = head_of(cache, part.head)
    if SIZES.FP8:
        return fp8_tile(cache, part.table_ptr, t, part.end, SIZES)
    else:
        offs_t, offs_d = tl.arange(0, SIZES.BLOCK_T), tl.arange(0, SIZES.BLOCK_D)
        pages = pages_at(part.table_ptr, t, part.end, SIZES.PAGE, SIZES.BLOCK_T)
        rows = page_rows(pages, t, cache.stride_kp, SIZES.PAGE, SIZES.D, SIZES.BLOCK_T)
        mask_t, mask_d = (t + offs_t >= part.start) & (t + offs_t < part.end), offs_d < SIZES.D
        k = tl.load(cache.k_ptr + rows + offs_d[None, :], mask=mask_t[:, None] & mask_d[None, :], other=0.0)
        v = tl.load(cache.v_ptr + tl.trans(rows) + offs_d[:, None], mask=mask_d[:, None] & mask_t[None, :], other=0.0)
        return k, v


@triton.jit
def _attend(tile, dot_q, sums, t, part, SIZES: tl.constexpr):
    """Update the online softmax with the tile from t: the maxima, the sums of weights, and the sums of values.

    The sums of weights are kept for each row of a tile.
    """
    m, l_t, acc = sums
    offs_t = tl.arange(0, SIZES.BLOCK_T)
    ELEMENT: tl.constexpr = tile[0].dtype
    s = tl.dot(tile[0].to(dot_q.dtype), dot_q, input_precision="ieee")
    s = tl.where(((t + offs_t >= part.start) & (t + offs_t < part.end))[:, None], s, EMPTY)
    m_new = tl.maximum(m, tl.max(s, 0))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[None, :])
    l_t = l_t * alpha[None, :] + p
    acc = tl.dot(tile[1].to(dot_q.dtype), p.to(ELEMENT).to(dot_q.dtype), acc * alpha[None, :], input_precision="ieee")
    return m_new, l_t, acc


@triton.jit
def _attention_rows_kernel(
    meta_ptr, qkv_ptr, out_ptr, stride_qkv, stride_om, scale,
    table_ptr, stride_table,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    partial_ptr, lse_ptr, counter_ptr,
    rows,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_T: tl.constexpr, WARP_T: tl.constexpr,
    TILES: tl.constexpr, MAX_SPLITS: tl.constexpr, COMBINE: tl.constexpr, WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr, FP8: tl.constexpr, CONVERTS: tl.constexpr, INTERPRETED: tl.constexpr,
    ROTARY: tl.constexpr, GATE: tl.constexpr, Q_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute attention of each row's token to the cached positions of its slot and to itself.

    K and V of the token are written to the cache. Grid: (PROGRAMS,). Every program reads the lengths of all rows from
    meta before the wait, and computes its share of the items, each a split of a K/V head of a row. The split of a head
    that finishes last combines all of them. The number of splits of a row depends only on its own length, so that its
    result does not depend on other rows. Without EARLY, the first tile is loaded after the wait, because the previous
    launch may have written to the cache.

    Args: see _attention_kernel.
    """
    SIZES: tl.constexpr = Sizes(
        PAGE, KV_HEADS, GROUP, COLUMNS, D, BLOCK_D, BLOCK_G, BLOCK_T, WARP_T, TILES, MAX_SPLITS, COMBINE, WINDOW,
        QK_NORM, FP8, CONVERTS, INTERPRETED, ROTARY, GATE, Q_COLUMNS,
    )  # fmt: skip
    ELEMENT: tl.constexpr = tl.bfloat16 if FP8 else k_ptr.dtype.element_ty
    cache = Cache(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh)
    rotary = Rotary(cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps)
    partials = Partials(partial_ptr, lse_ptr, counter_ptr)
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    offs_m = tl.arange(0, BLOCK_M)
    mask_m = offs_m < rows
    positions = tl.load(meta_ptr + offs_m * META_WIDTH + POSITION, mask=mask_m, other=0)
    slots = tl.load(meta_ptr + offs_m * META_WIDTH + SLOT, mask=mask_m, other=0)
    runs = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=mask_m, other=-1) == RUN
    _, _, blocks = blocks_seen(positions, BLOCK_T, WINDOW)
    active = tl.cdiv(blocks, tl.maximum(tl.cdiv(blocks, SPLITS), LEAST))
    active = tl.where(runs, tl.maximum(active, 1), 0)
    work = Work(tl.cumsum(active, 0), active, positions, slots)
    items = tl.sum(active, 0) * KV_HEADS
    if (pid >= items) & (pid > 0):
        return  # This program need not wait. The grid ends after its predecessor, because program 0 always waits.
    offs_d = tl.arange(0, BLOCK_D)
    offs_t = tl.arange(0, BLOCK_T)
    first_item = tl.maximum(tl.minimum(pid, items - 1), 0)
    following = _item(first_item, work, table_ptr, stride_table, LEAST, SPLITS, SIZES)
    if PDL and not EARLY:
        gdc_wait()
    tile = _tile(cache, following, following.first, SIZES)
    if PDL and EARLY:
        gdc_wait()
    for item in tl.range(pid, items, PROGRAMS, num_stages=1, disable_licm=True):
        part = following
        row, head, split, splits, position, own_table_ptr, start, first, end = part
        own = head_of(cache, head)
        q_factors = rotation(rotary, q_norm_ptr, position, offs_d, D, ROTARY, QK_NORM)
        k_factors = rotation(rotary, k_norm_ptr, position, offs_d, D, ROTARY, QK_NORM)
        page = tl.load(own_table_ptr + position // PAGE).to(tl.int64)
        q, q_partner, k, k_partner, v = load_token(
            qkv_ptr + row * stride_qkv, head, tl.float32 if FP8 else ELEMENT, SIZES
        )  # fmt: skip
        q = rms_rope(q, q_partner, q_factors, eps, D, QK_NORM) * (scale * LOG2E)
        # Split 0 attends to the new token before all other positions. It uses the precision of the cache.
        k = rms_rope(k, k_partner, k_factors, eps, D, QK_NORM)
        cell = cell_of(own, page, position, PAGE, D)
        k, v = store_token(own, page, cell, position, k, v, split == 0, PAGE, D, FP8)
        # In the first product, the rows are positions. In the second product, the rows are the D dimensions. The heads
        # of the
        # group are the few columns of both. The weights of each row of a tile are summed separately until the end.
        # Masked
        # scores underflow to 0. If a window hides a whole tile, a later score scales its sums to 0.
        s_new = tl.where(split == 0, tl.sum(q * k.to(tl.float32), 1), EMPTY)
        if FP8:
            m_all, l, acc = fp8_attend(q, tile, own, own_table_ptr, first, start, end, SIZES)
            m = tl.maximum(m_all, s_new)
            alpha, p_new = tl.exp2(m_all - m), tl.where(split == 0, tl.exp2(s_new - m), 0.0)
            l = l * alpha + p_new
            acc = acc * alpha[None, :] + p_new[None, :] * v[:, None]
        else:
            dot_q = tl.trans(q.to(ELEMENT).to(tl.float32 if INTERPRETED else ELEMENT))
            l_t = tl.zeros([BLOCK_T, COLUMNS], tl.float32) + tl.where((offs_t == 0) & (split == 0), 1.0, 0.0)[:, None]
            acc = tl.zeros([BLOCK_D, COLUMNS], tl.float32) + tl.where(split == 0, v.to(tl.float32), 0.0)[:, None]
            sums = s_new, l_t, acc
            if STAGES > 1:
                sums = _attend(tile, dot_q, sums, first, part, SIZES)
                for t in tl.range(first + BLOCK_T, end, BLOCK_T, num_stages=STAGES):
                    sums = _attend(_tile(cache, part, t, SIZES), dot_q, sums, t, part, SIZES)
            else:
                for t in range(first, end, BLOCK_T):
                    # The load is in flight while the tile at t is multiplied.
                    next_tile = _tile(cache, part, t + BLOCK_T, SIZES)
                    sums = _attend(tile, dot_q, sums, t, part, SIZES)
                    tile = next_tile
            m, l_t, acc = sums
            l = tl.sum(l_t, 0)
        following = _item(
            tl.minimum(item + PROGRAMS, items - 1), work, table_ptr, stride_table, LEAST, SPLITS, SIZES
        )  # fmt: skip
        tile = _tile(cache, following, following.first, SIZES)
        head_ptr = out_ptr + row * stride_om + head * GROUP * D
        unit = (row * KV_HEADS + head).to(tl.int64)
        gate_ptr = qkv_ptr + row * stride_qkv + head * GROUP * Q_COLUMNS + D
        store_split(partials, head_ptr, gate_ptr, unit, split, splits, m, l, acc, SIZES)


def attention_rows(meta, qkv, out, kv: KVLayer, rope: Rope, scratch: Scratch, heads: Heads, *, config, pdl=False):
    """Compute `attention` of several rows with a fixed number of programs."""
    assert not kv.fp8 or config.stages == 1, (
        "stages must be 1 for fp8 K/V, because the next tile is loaded into registers"
    )
    rows = len(out)
    _attention_rows_kernel[(config.programs,)](
        meta,
        qkv,
        out,
        qkv.stride(0),
        out.stride(0),
        heads.scale,
        *kv.kernel_arguments(),
        *rope.kernel_arguments(),
        *scratch,
        rows,
        *sizes_of(kv, rope, scratch, heads, config),
        next_power_of_2(rows),
        config.least,
        config.splits,
        config.programs,
        config.stages,
        config.early,
        pdl,
        **options(config.num_warps, pdl, config.registers),
    )


ATTENTION_ROWS = Op(attention_rows, attention_ref, attention_bytes, (_attention_rows_kernel,), outputs=OUTPUTS)
