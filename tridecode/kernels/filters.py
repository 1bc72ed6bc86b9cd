"""What the five launches of sample do before the draw: processed logits, and the distance at which the filters cut."""

import math

import torch
import triton
import triton.language as tl

from .. import meta as m
from .common import (
    FLAG_BIAS,
    FLAG_PENALTIES,
    FLAGS,
    FREQUENCY_PENALTY,
    META_WIDTH,
    PRESENCE_PENALTY,
    REPETITION_PENALTY,
    RUN,
    SAMP_WIDTH,
    STATUS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    gdc_launch_dependents,
    gdc_wait,
)
from .finish import BAD, block_key, largest_key, packed_value
from .mass import BINS, FARTHEST, LOW_BITS, distance, share, weight, weight_ref

LEVELS = 3  # of the search
STATE = 8  # entries of a row of state, of which these are used
THRESHOLD, BIN, LEFT, BEFORE, K_THRESHOLD, P_BIN, P_LEFT = range(7)

_BINS, _LOW_BITS = tl.constexpr(BINS), tl.constexpr(LOW_BITS)
_FARTHEST, _LEVELS, _STATE = tl.constexpr(FARTHEST), tl.constexpr(LEVELS), tl.constexpr(STATE)
_BIN, _LEFT, _BEFORE = tl.constexpr(BIN), tl.constexpr(LEFT), tl.constexpr(BEFORE)
_K_THRESHOLD, _P_BIN, _P_LEFT = tl.constexpr(K_THRESHOLD), tl.constexpr(P_BIN), tl.constexpr(P_LEFT)
_HUGE = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _process_kernel(
    logits_ptr,
    meta_ptr,
    samp_ptr,
    counts_ptr,
    bias_ptr,
    keys_ptr,
    processed_ptr,
    bins_ptr,
    bin_mass_ptr,
    vocab,
    stride_logits,
    stride_state,
    stride_keys,
    stride_processed,
    BLOCK_N: tl.constexpr,
    CLEAR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the bias, apply the penalties, leave each block's largest logit, and clear the histograms.

    logits: [rows, vocab] fp32. samp: [slots, SAMP_WIDTH] fp32. counts: [slots, vocab] int32. bias: [slots, vocab] fp32.
    keys: [rows, >= blocks] int64 (out). processed: [rows, vocab] fp32 (out). bins, bin_mass: see SamplerBuffers (out).
    Bytes: 8 * vocab a row, 4 * vocab more for each of bias and counts in use. Grid: (vocab blocks, rows).
    counts and bias are older than this step: their loads come before the wait. A NaN or an infinity among the raw
    logits makes its block's key BAD, which the launches after this one look for.
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    flags = tl.load(meta_ptr + row * META_WIDTH + FLAGS)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    samp_ptr += row * SAMP_WIDTH
    repetition = tl.load(samp_ptr + REPETITION_PENALTY)
    presence = tl.load(samp_ptr + PRESENCE_PENALTY)
    frequency = tl.load(samp_ptr + FREQUENCY_PENALTY)
    offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < vocab
    wide = row.to(tl.int64)
    biased = tl.where((flags & FLAG_BIAS) != 0, vocab, 0)  # an end, not a mask: the interpreter cannot splat an int1
    counted = tl.where((flags & FLAG_PENALTIES) != 0, vocab, 0)
    bias = tl.load(bias_ptr + wide * stride_state + offs_n, mask=offs_n < biased, other=0.0)
    counts = tl.load(counts_ptr + wide * stride_state + offs_n, mask=offs_n < counted, other=0)
    if PDL:
        gdc_wait()
    if status == RUN:
        x = tl.load(logits_ptr + wide * stride_logits + offs_n, mask=mask_n, other=0.0)
        y = x + bias
        y = tl.where(counts != 0, tl.where(y < 0, y * repetition, tl.div_rn(y, repetition)), y)
        times = counts >> 1
        y = y - tl.where(times > 0, presence, 0.0)
        y = y - times.to(tl.float32) * frequency
        y = tl.minimum(tl.maximum(y, -_HUGE), _HUGE)
        tl.store(processed_ptr + wide * stride_processed + offs_n, y, mask=mask_n)
        tl.store(keys_ptr + row * stride_keys + block, block_key(x, y, offs_n, mask_n))
        offs_b = block * CLEAR + tl.arange(0, CLEAR)
        for level in tl.static_range(_LEVELS):
            tl.store(bins_ptr + (row * _LEVELS + level) * _BINS + offs_b, 0, mask=offs_b < _BINS)
        tl.store(bin_mass_ptr + row * _BINS + offs_b, tl.zeros((CLEAR,), tl.int64), mask=offs_b < _BINS)


@triton.jit
def active(meta_ptr, samp_ptr, row, vocab):
    """Whether top-k and top-p have anything to do (int1 each), and the temperature."""
    temperature = tl.load(samp_ptr + row * SAMP_WIDTH + TEMPERATURE)
    top_k = tl.load(meta_ptr + row * META_WIDTH + TOP_K)
    top_p = tl.load(samp_ptr + row * SAMP_WIDTH + TOP_P)
    hot = temperature > 0
    return hot & (top_k > 0) & (top_k < vocab), hot & (top_p < 1.0), temperature


@triton.jit
def _bins_kernel(
    meta_ptr,
    samp_ptr,
    keys_ptr,
    processed_ptr,
    bins_ptr,
    bin_mass_ptr,
    state_ptr,
    vocab,
    stride_keys,
    stride_processed,
    LEVEL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One level of the search for the distances at which top-k and top-p cut, by histogram.

    processed: [rows, vocab] fp32. keys: [rows, >= blocks] int64. bins, bin_mass, state: see SamplerBuffers (out).
    Bytes: 4 * vocab a row, and up to 12 * BINS a program. Grid: (vocab blocks, rows).
    Level 0 counts (and weighs) the upper 11 bits of every distance. Level 1 finds the bin where top-k, or without it
    top-p, cuts and counts the lower 11 bits inside it. Level 2, only with both, knows top-k's cut and its mass, finds
    top-p's bin and counts inside that. One distance has one weight, so that only level 0 needs sums of mass. Every
    program scans the histogram before for itself: cheaper than to wait for a last arriver's result.
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    use_k, use_p, temperature = active(meta_ptr, samp_ptr, row, vocab)
    top_p = tl.load(samp_ptr + row * SAMP_WIDTH + TOP_P)
    top_k = tl.load(meta_ptr + row * META_WIDTH + TOP_K)
    needed = (use_k & use_p) if LEVEL == 2 else (use_k | use_p)
    if PDL:
        gdc_wait()
    if (status == RUN) & needed:
        key = largest_key(keys_ptr + row * stride_keys, tl.num_programs(0), BLOCKS)
        if key != BAD:
            offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
            mask_n = offs_n < vocab
            y = tl.load(processed_ptr + row.to(tl.int64) * stride_processed + offs_n, mask=mask_n, other=0.0)
            d = tl.where(mask_n, distance(y, packed_value(key), temperature), _FARTHEST)
            bins_ptr += row * _LEVELS * _BINS
            bin_mass_ptr += row * _BINS
            state_ptr += row * _STATE
            high = d >> _LOW_BITS
            offs_b = tl.arange(0, _BINS)
            if LEVEL == 0:
                # the farthest bin stays empty: whoever reaches it keeps everything, and its weights are 0
                w = weight(d)
                tl.atomic_add(bins_ptr + high, 1, mask=high < tl.where(use_k, _BINS - 1, 0), sem="relaxed")
                heavy = (high < tl.where(use_p, _BINS - 1, 0)) & (w > 0)
                tl.atomic_add(bin_mass_ptr + high, w, mask=heavy, sem="relaxed")
            elif LEVEL == 1:
                mass = tl.load(bin_mass_ptr + offs_b)
                sought = tl.where(use_k, tl.load(bins_ptr + offs_b).to(tl.int64), mass)
                goal = tl.where(use_k, top_k.to(tl.int64), share(top_p, tl.sum(mass, axis=0)))
                before = tl.cumsum(sought, axis=0) < goal
                found = tl.minimum(tl.sum(before.to(tl.int32), axis=0), _BINS - 1)
                if block == 0:
                    tl.store(state_ptr + _BIN, found.to(tl.int64))
                    tl.store(state_ptr + _LEFT, goal - tl.sum(tl.where(before, sought, 0), axis=0))
                    tl.store(state_ptr + _BEFORE, tl.sum(tl.where(before, mass, 0), axis=0))
                counted = (high == found) & (high < _BINS - 1)
                tl.atomic_add(bins_ptr + _BINS + (d & (_BINS - 1)), 1, mask=counted, sem="relaxed")
            else:
                found = tl.load(state_ptr + _BIN).to(tl.int32)
                counts = tl.load(bins_ptr + _BINS + offs_b)
                before = tl.cumsum(counts, axis=0) < tl.load(state_ptr + _LEFT)
                low = tl.minimum(tl.sum(before.to(tl.int32), axis=0), _BINS - 1)
                first = found << _LOW_BITS
                inside = tl.where(offs_b <= low, counts.to(tl.int64) * weight(first + offs_b), 0)
                goal = share(top_p, tl.load(state_ptr + _BEFORE) + tl.sum(inside, axis=0))
                mass = tl.load(bin_mass_ptr + offs_b)
                before = tl.cumsum(mass, axis=0) < goal
                p_found = tl.minimum(tl.sum(before.to(tl.int32), axis=0), found)
                if block == 0:
                    tl.store(state_ptr + _K_THRESHOLD, (first + low).to(tl.int64))
                    tl.store(state_ptr + _P_BIN, p_found.to(tl.int64))
                    tl.store(state_ptr + _P_LEFT, goal - tl.sum(tl.where(before, mass, 0), axis=0))
                counted = (high == p_found) & (high < _BINS - 1) & (d <= first + low)
                tl.atomic_add(bins_ptr + 2 * _BINS + (d & (_BINS - 1)), 1, mask=counted, sem="relaxed")


def process_ref(x, counts, bias, flags: int, repetition, presence, frequency):
    """Bias and penalties on one row; the three penalties are fp32 tensors without dimensions."""
    y = x + bias if flags & m.FLAG_BIAS else x
    if flags & m.FLAG_PENALTIES:
        y = torch.where(counts != 0, torch.where(y < 0, y * repetition, y / repetition), y)
        times = counts >> 1
        y = y - torch.where(times > 0, presence, 0.0)
        y = y - times.float() * frequency
    return y.clamp(-_HUGE.value, _HUGE.value)


def threshold_ref(d, top_k: int, top_p: float) -> int:
    """The largest distance that top-k and top-p keep, of distances d [vocab]."""
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
        near = d.topk(min(512, d.numel()), largest=False).values  # nearly always enough
        if int(weight_ref(near).sum()) < goal:
            near = d.sort().values
        threshold = int(near[torch.searchsorted(weight_ref(near).cumsum(0), goal)])
    return threshold
