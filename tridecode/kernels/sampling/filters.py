"""The first launches of the op `sample`: process the logits, and find the largest distance that the filters keep."""

import math

import torch
import triton
import triton.language as tl

from ... import layout as m
from ..common import (
    FLAG_BIAS,
    FLAG_PENALTIES,
    FLAGS,
    FREQUENCY_PENALTY,
    META_WIDTH,
    N_KNOWN,
    POSITION,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    RUN,
    SAMP_WIDTH,
    SLOT,
    STATUS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    gdc_launch_dependents,
    gdc_wait,
)
from .finish import LOWEST, block_key, packed_value
from .mass import BINS, FARTHEST, LOW_BITS, MAX_FP32, WEIGHT_BITS, distance, grid_scale, share, weight, weight_ref
from .nearest import NEAREST, TOPS, append, distance_bound, load_nearest, rank_nearest

LEVELS = 3  # Number of launches of the search for the threshold.
STATE = 8  # Number of entries of a row of state.
THRESHOLD, BIN, LEFT, P_BIN, P_LEFT, LISTED, TOTAL, DECIDED = range(STATE)

_BINS, _LOW_BITS = tl.constexpr(BINS), tl.constexpr(LOW_BITS)
_GROUPS = tl.constexpr(BINS // 8)
_FARTHEST, _LEVELS, _STATE = tl.constexpr(FARTHEST), tl.constexpr(LEVELS), tl.constexpr(STATE)
_BIN, _LEFT, _P_BIN, _P_LEFT = tl.constexpr(BIN), tl.constexpr(LEFT), tl.constexpr(P_BIN), tl.constexpr(P_LEFT)
_LISTED, _TOTAL, _DECIDED = tl.constexpr(LISTED), tl.constexpr(TOTAL), tl.constexpr(DECIDED)
_NEAREST, _TOPS = tl.constexpr(NEAREST), tl.constexpr(TOPS)
_MAX_WEIGHT = tl.constexpr(float(2**WEIGHT_BITS))


@triton.jit
def _process_kernel(
    logits_ptr,
    meta_ptr,
    samp_ptr,
    counts_ptr,
    bias_ptr,
    tokens_ptr,
    keys_ptr,
    tops_ptr,
    processed_ptr,
    bins_ptr,
    bin_mass_ptr,
    state_ptr,
    vocab,
    stride_logits,
    stride_counts,
    stride_tokens,
    stride_keys,
    stride_tops,
    stride_processed,
    BLOCK_N: tl.constexpr,
    CLEAR: tl.constexpr,
    QUERIES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the bias, apply the penalties, store each block's largest logits, and clear histograms and state.

    A program computes one block of a row. Grid: (vocab blocks, rows).
    Moves 8 * vocab bytes per row, and 4 * vocab more for each of bias and counts if the request uses them.
    counts and bias do not change during the step, so their loads precede `gdc_wait`. If the raw logits of a block
    contain a NaN or an infinity, its key is NAN_KEY, which the later launches check.

    Args:
        logits_ptr: [rows, vocab] fp32.
        meta_ptr: [rows, META_WIDTH] int32.
        samp_ptr: [rows, SAMP_WIDTH] fp32.
        counts_ptr: [slots, vocab] int32.
        bias_ptr: [slots, vocab] fp32.
        tokens_ptr: [slots, capacity + 1] int32. With QUERIES > 1, the drafts before a row count as tokens of the text.
        keys_ptr: [rows, >= blocks] int64 (output).
        tops_ptr: [rows, >= blocks * TOPS] fp32 (output).
        processed_ptr: [rows, vocab] fp32 (output).
        bins_ptr, bin_mass_ptr, state_ptr: see SamplerBuffers (outputs).
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    meta_ptr += row * META_WIDTH
    flags, status, slot = tl.load(meta_ptr + FLAGS), tl.load(meta_ptr + STATUS), tl.load(meta_ptr + SLOT)
    samp_ptr += row * SAMP_WIDTH
    repetition = tl.load(samp_ptr + REPETITION_PENALTY)
    presence = tl.load(samp_ptr + PRESENCE_PENALTY)
    frequency = tl.load(samp_ptr + FREQUENCY_PENALTY)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < vocab
    wide, slot_start = row.to(tl.int64), slot.to(tl.int64) * stride_counts
    # The code uses bounds instead of masks, because the interpreter cannot broadcast an int1.
    biased = tl.where((flags & FLAG_BIAS) != 0, vocab, 0)
    counted = tl.where((flags & FLAG_PENALTIES) != 0, vocab, 0)
    bias = tl.load(bias_ptr + slot_start + offs_n, mask=offs_n < biased, other=0.0)
    counts = tl.load(counts_ptr + slot_start + offs_n, mask=offs_n < counted, other=0)
    if QUERIES > 1:
        first = tl.load(meta_ptr + POSITION) - row % QUERIES
        for back in tl.static_range(1, QUERIES):
            # `counts` already contains the known tokens.
            new = (back <= row % QUERIES) & (first + back >= tl.load(meta_ptr + N_KNOWN))
            place = tl.where(new, first + back, 0)
            proposed = tl.load(tokens_ptr + slot.to(tl.int64) * stride_tokens + place)
            counts += tl.where((offs_n == proposed) & (offs_n < counted) & (place > 0), 2, 0)
    if PDL:
        gdc_wait()
    if status == RUN:
        x = tl.load(logits_ptr + wide * stride_logits + offs_n, mask=mask_n, other=0.0)
        y = x + bias
        y = tl.where(counts != 0, tl.where(y < 0, y * repetition, tl.div_rn(y, repetition)), y)
        times = counts >> 1
        y = y - tl.where(times > 0, presence, 0.0)
        y = y - times.to(tl.float32) * frequency
        y = tl.minimum(tl.maximum(y, -MAX_FP32), MAX_FP32)
        tl.store(processed_ptr + wide * stride_processed + offs_n, y, mask=mask_n)
        tops = tl.max(tl.where(mask_n, y, -MAX_FP32).reshape(_TOPS, BLOCK_N // _TOPS), axis=1)
        tl.store(tops_ptr + row * stride_tops + block * _TOPS + tl.arange(0, _TOPS), tops)
        tl.store(keys_ptr + row * stride_keys + block, block_key(x, y, offs_n, mask_n))
        offs_b = block * CLEAR + tl.arange(0, CLEAR)
        for level in tl.static_range(_LEVELS):
            tl.store(bins_ptr + (row * _LEVELS + level) * _BINS + offs_b, 0, mask=offs_b < _BINS)
        tl.store(bin_mass_ptr + row * _BINS + offs_b, tl.zeros((CLEAR,), tl.int64), mask=offs_b < _BINS)
        if block == 0:
            offs_s = tl.arange(0, _STATE)
            tl.store(state_ptr + row * _STATE + offs_s, tl.zeros((_STATE,), tl.int64))


@triton.jit
def active(meta_ptr, samp_ptr, row, vocab):
    """Return whether top-k and top-p exclude any tokens (int1 each), their values, and the temperature."""
    temperature = tl.load(samp_ptr + row * SAMP_WIDTH + TEMPERATURE)
    top_k = tl.load(meta_ptr + row * META_WIDTH + TOP_K)
    top_p = tl.load(samp_ptr + row * SAMP_WIDTH + TOP_P)
    hot = temperature > 0
    return hot & (top_k > 0) & (top_k < vocab), hot & (top_p < 1.0), top_k, top_p, temperature


@triton.jit
def _place(group):
    """Return the offset of a group of 8 bins in a histogram. Adjacent groups are in different cache lines.

    The distances of a vocabulary cluster in adjacent bins, so this spreads their atomics.
    """
    return ((group & 63) * 4 + (group >> 6)) * 8


@triton.jit
def _bin_place(bin):
    """Return the offset of a bin in a histogram."""
    return _place(bin >> 3) + (bin & 7)


@triton.jit
def load_groups(ptr, needed):
    """Load a histogram as [groups, 8] in the order of its bins. Return zeros if `needed` is false."""
    group = tl.arange(0, _GROUPS)[:, None]
    return tl.load(ptr + _place(group) + tl.arange(0, 8)[None, :], mask=group < tl.where(needed, _GROUPS, 0), other=0)


@triton.jit
def crossing(sums, goal):
    """Return the group of bins in which the running sum of `sums` reaches `goal`, and the sum of earlier groups."""
    before = tl.cumsum(sums, axis=0) < goal
    group = tl.minimum(tl.sum(before.to(tl.int32), axis=0), _GROUPS - 1)
    return group, tl.sum(tl.where(tl.arange(0, _GROUPS) < group, sums, 0), axis=0)


@triton.jit
def crossing_inside(bins, goal):
    """Return the bin of a group's 8 in which the running sum reaches goal (else the last), and the sum before it."""
    before = tl.cumsum(bins, axis=0) < goal
    place = tl.minimum(tl.sum(before.to(tl.int32), axis=0), 7)
    return place, tl.sum(tl.where(tl.arange(0, 8) < place, bins, 0), axis=0)


@triton.jit
def crossing_bin(ptr, sums, goal):
    """Return the bin in which the running sum of a histogram reaches goal, and the sum before it.

    Args:
        sums: [groups], the sum of each group of 8 bins.
    """
    group, before = crossing(sums, goal)
    place, inside = crossing_inside(tl.load(ptr + _place(group) + tl.arange(0, 8)), goal - before)
    return group * 8 + place, before + inside


@triton.jit
def _bins_kernel(
    meta_ptr,
    samp_ptr,
    keys_ptr,
    tops_ptr,
    processed_ptr,
    bins_ptr,
    bin_mass_ptr,
    state_ptr,
    near_ptr,
    ranks_ptr,
    vocab,
    stride_keys,
    stride_tops,
    stride_processed,
    LEVEL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Run one level of the search for the distances at which top-k and top-p cut, by rank or by histogram.

    A program reads one block of a row. Grid: (vocab blocks, rows). Moves 4 * vocab bytes per row, and up to 12 * BINS a
    program.

    Level 0 lists the nearest tokens and bins distances by their upper 11 bits. The bins count tokens if top-k is
    active, and sum weights if only top-p is.
    Level 1 ranks the list if the list decides the cut, and the search ends. Otherwise it finds the bin of the cut and
    counts the lower 11 bits of the distances inside it. With both filters it also sums the weights of the bins before.
    Level 2 runs only with both filters. It computes the mass that top-k keeps, finds top-p's bin and counts inside that
    bin. All tokens at a distance have the same weight, so counts are sufficient inside a bin.

    Atomics dominate the cost, so tokens that cannot affect the result are excluded. For top-k, the k-th largest of the
    blocks' largest logits bounds the k-th distance. For top-p, tokens are excluded whose mass together is at most 1 - p
    of the mass of the largest token.
    Every program scans the histogram of the previous level itself, so no level waits for a last arriver.

    Args:
        processed_ptr: [rows, vocab] fp32.
        keys_ptr: [rows, >= blocks] int64.
        tops_ptr: [rows, >= blocks * TOPS] fp32.
        bins_ptr, bin_mass_ptr, state_ptr, near_ptr, ranks_ptr: see SamplerBuffers (outputs).
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    use_k, use_p, top_k, top_p, temperature = active(meta_ptr, samp_ptr, row, vocab)
    scale = grid_scale(temperature)
    needed = (use_k & use_p) if LEVEL == 2 else (use_k | use_p)
    bins_ptr += row * _LEVELS * _BINS
    bin_mass_ptr += row * _BINS
    state_ptr += row * _STATE
    near_ptr += row * _NEAREST
    low_ptr = bins_ptr + LEVEL * _BINS
    if PDL:
        gdc_wait()
    if (status != RUN) | (needed == 0):
        return
    if LEVEL == 1:
        listed = tl.load(state_ptr + _LISTED).to(tl.int32)
        near, near_weights = load_nearest(near_ptr, tl.arange(0, _NEAREST)[None, :], listed)
        total = tl.load(state_ptr + _TOTAL)
        decided = listed <= _NEAREST
        if use_k == 0:
            decided = decided & (tl.sum(tl.sum(near_weights, axis=1), axis=0) >= share(top_p, total))
        if block == 0:
            tl.store(state_ptr + _DECIDED, decided.to(tl.int64))
        if decided:
            rank_nearest(near_ptr, ranks_ptr + row * _NEAREST, near, near_weights, listed)
            return
    elif LEVEL == 2:
        if tl.load(state_ptr + _DECIDED) != 0:
            return
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < vocab
    y = tl.load(processed_ptr + row.to(tl.int64) * stride_processed + offs_n, mask=mask_n, other=0.0)
    offs_k = tl.arange(0, BLOCKS)
    keys = tl.load(keys_ptr + row * stride_keys + offs_k, mask=offs_k < blocks, other=LOWEST)
    if LEVEL == 0:  # Issue all loads before the first use of a result.
        offs_t = tl.arange(0, BLOCKS * _TOPS)
        tops = tl.load(tops_ptr + row * stride_tops + offs_t, mask=offs_t < blocks * _TOPS, other=-MAX_FP32)
    elif LEVEL == 1:
        counts = load_groups(bins_ptr, use_k)
        mass = load_groups(bin_mass_ptr, use_k == 0)
    else:
        cut_bin = tl.load(state_ptr + _BIN).to(tl.int32)
        left = tl.load(state_ptr + _LEFT)
        counts = load_groups(bins_ptr + _BINS, True)
        mass = load_groups(bin_mass_ptr, True)
    largest = packed_value(tl.max(keys, axis=0))
    d = tl.where(mask_n, distance(y, largest, scale), _FARTHEST)
    high = d >> _LOW_BITS
    if LEVEL == 0:
        # top-p alone does not determine a number of tokens. A sixth of the block maxima (about 100 of 600) is usually
        # enough.
        at_least = tl.where(use_k, top_k, blocks * _TOPS // 6)
        bound = distance_bound(distance(tops, largest, scale), at_least)
        append(near_ptr, state_ptr + _LISTED, d, d <= bound)
        if use_k:
            tl.atomic_add(bins_ptr + _bin_place(high), 1, mask=d <= bound, sem="relaxed")
        else:
            w = weight(d)
            beyond = ((1.0 - top_p.to(tl.float64)) * (_MAX_WEIGHT * 0.999) / vocab).to(tl.int64)
            tl.atomic_add(bin_mass_ptr + _bin_place(high), w, mask=w > beyond, sem="relaxed")
            rest = tl.sum(tl.where(w > beyond, 0, w), axis=0)
            tl.atomic_add(bin_mass_ptr + _bin_place(_BINS - 1), rest, mask=rest > 0, sem="relaxed")
            tl.atomic_add(state_ptr + _TOTAL, tl.sum(w, axis=0), sem="relaxed")
    elif LEVEL == 1:
        if use_k:
            cut_bin, closer = crossing_bin(bins_ptr, tl.sum(counts, axis=1), top_k)
            left = (top_k - closer).to(tl.int64)
            if use_p:
                tl.atomic_add(bin_mass_ptr + _bin_place(high), weight(d), mask=high < cut_bin, sem="relaxed")
        else:
            goal = share(top_p, total)
            cut_bin, before = crossing_bin(bin_mass_ptr, tl.sum(mass, axis=1), goal)
            left = goal - before
        if block == 0:
            tl.store(state_ptr + _BIN, cut_bin.to(tl.int64))
            tl.store(state_ptr + _LEFT, left)
        counted = (high == cut_bin) & (high < _BINS - 1)
        tl.atomic_add(low_ptr + _bin_place(d & (_BINS - 1)), 1, mask=counted, sem="relaxed")
    else:
        low, _ = crossing_bin(bins_ptr + _BINS, tl.sum(counts, axis=1), left.to(tl.int32))
        first = cut_bin << _LOW_BITS
        offs_b = tl.arange(0, _GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
        inside = tl.sum(tl.where(offs_b <= low, counts.to(tl.int64) * weight(first + offs_b), 0), axis=1)
        sums = tl.sum(mass, axis=1)
        total = tl.sum(sums, axis=0)
        goal = share(top_p, total + tl.sum(inside, axis=0))
        p_cut_bin, before = crossing_bin(bin_mass_ptr, sums, goal)
        before = tl.where(goal > total, total, before)
        p_cut_bin = tl.where(goal > total, cut_bin, p_cut_bin)
        if block == 0:
            tl.store(state_ptr + _P_BIN, p_cut_bin.to(tl.int64))
            tl.store(state_ptr + _P_LEFT, goal - before)
        counted = (high == p_cut_bin) & (high < _BINS - 1) & (d <= first + low)
        tl.atomic_add(low_ptr + _bin_place(d & (_BINS - 1)), 1, mask=counted, sem="relaxed")


@triton.jit
def binned_threshold(bins_ptr, state_ptr, use_k, use_p):
    """Return the largest distance that top-k and top-p keep, from the last level's histogram."""
    both = use_k & use_p
    bins_ptr += tl.where(both, 2, 1) * _BINS
    counts = load_groups(bins_ptr, True)
    left = tl.load(state_ptr + tl.where(both, _P_LEFT, _LEFT))
    first = tl.load(state_ptr + tl.where(both, _P_BIN, _BIN)).to(tl.int32) << _LOW_BITS
    # top-p searches for a probability mass, and top-k for a count.
    offs_g = first + tl.arange(0, _GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    sums = tl.sum(counts.to(tl.int64) * tl.where(use_p, weight(offs_g), 1), axis=1)
    group, before = crossing(sums, left)
    offs_b = first + group * 8 + tl.arange(0, 8)
    bin_counts = tl.load(bins_ptr + _place(group) + tl.arange(0, 8)).to(tl.int64)
    place, _ = crossing_inside(bin_counts * tl.where(use_p, weight(offs_b), 1), left - before)
    return first + group * 8 + place


def process_ref(x, counts, bias, flags: int, repetition, presence, frequency):
    """Apply bias and penalties to one row in torch. The three penalties are fp32 tensors without dimensions."""
    y = x + bias if flags & m.FLAG_BIAS else x
    if flags & m.FLAG_PENALTIES:
        y = torch.where(counts != 0, torch.where(y < 0, y * repetition, y / repetition), y)
        times = counts >> 1
        y = y - torch.where(times > 0, presence, 0.0)
        y = y - times.float() * frequency
    return y.clamp(-MAX_FP32.value, MAX_FP32.value)


def threshold_ref(d, top_k: int, top_p: float) -> int:
    """Return the largest of the distances d [vocab] that top-k and top-p keep."""
    threshold = FARTHEST
    if 0 < top_k <= 1024 < d.numel():
        threshold = int(d.topk(top_k, largest=False, sorted=False).values.max())
    elif 0 < top_k < d.numel():
        threshold = int(d.kthvalue(top_k).values)
    if threshold >> LOW_BITS == BINS - 1:
        threshold = FARTHEST
    if top_p < 1:
        if threshold < FARTHEST:
            d = d[d <= threshold]
        goal = max(math.ceil(top_p * float(int(weight_ref(d).sum()))), 1)
        near = d.topk(min(512, d.numel()), largest=False).values  # 512 tokens are nearly always sufficient.
        if int(weight_ref(near).sum()) < goal:
            near = d.sort().values
        threshold = int(near[torch.searchsorted(weight_ref(near).cumsum(0), goal)])
    return threshold
