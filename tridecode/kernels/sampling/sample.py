"""sample: applies bias, penalties, temperature, top-k, top-p and min-p, and draws a token, in five launches."""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ... import layout as m
from ...layout import MAX_LOGPROBS
from ..common import (
    META_WIDTH,
    MIN_P,
    POSITION,
    RUN,
    SAMP_WIDTH,
    SEED_HI,
    SEED_LO,
    STATUS,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    next_power_of_2,
    options,
    running,
)
from ..op import Op
from . import greedy as greedy_op
from .filters import (
    DECIDED,
    LEVELS,
    LISTED,
    STATE,
    THRESHOLD,
    TOTAL,
    _bins_kernel,
    _process_kernel,
    active,
    binned_threshold,
    process_ref,
    threshold_ref,
)
from .finish import (
    NAN_KEY,
    NO_TOKEN,
    arrive,
    finish_step,
    finish_step_ref,
    largest_key,
    packed_id,
    packed_value,
    step_state,
)
from .mass import BINS, FARTHEST, WEIGHT_BITS, distance, distance_ref, grid_scale, weight, weight_ref
from .nearest import NEAREST, TOPS, load_nearest, ranked_threshold
from .philox import philox_bits, philox_bits_ref

BLOCK = 2048  # Number of tokens of the vocabulary that a program computes.
WARPS = 16
LOGPROBS_BLOCK = 4096
# Number of candidates that a program of logprobs stores: MAX_LOGPROBS, rounded up to a power of two.
LOGPROBS_KEEP = 32

_BINS, _LEVELS, _FARTHEST = tl.constexpr(BINS), tl.constexpr(LEVELS), tl.constexpr(FARTHEST)
_STATE, _THRESHOLD = tl.constexpr(STATE), tl.constexpr(THRESHOLD)
_LISTED, _TOTAL, _DECIDED = tl.constexpr(LISTED), tl.constexpr(TOTAL), tl.constexpr(DECIDED)
_NEAREST = tl.constexpr(NEAREST)
_MAX_WEIGHT = tl.constexpr(float(2**WEIGHT_BITS))


@dataclass(frozen=True, repr=False)
class SamplerBuffers:
    """Scratch of mask, greedy, sample and logprobs.

    `counter` must be zero before a launch, and is zero after it. The other buffers may contain anything.
    """

    mask: torch.Tensor  # int32 [rows, vocab / 32]: mask of the row; see layout.mask_words.
    keys: torch.Tensor  # int64 [rows, blocks]: maximum of each block of logits, packed with its token id
    counter: torch.Tensor  # int32 [rows, 2]: number of arrived programs of greedy or sample, and of logprobs.
    tops: torch.Tensor  # fp32 [rows, blocks * TOPS]: maximum of each of the TOPS parts of a block of processed logits.
    processed: torch.Tensor  # fp32 [rows, vocab]: logits after bias and penalties, before the temperature
    bins: torch.Tensor  # int32 [rows, LEVELS, BINS]: number of tokens in each bin of distance from the maximum
    bin_mass: torch.Tensor  # int64 [rows, BINS]: probability mass of each bin of the first level
    # int64 [rows, STATE]: results of the filters. Entry THRESHOLD is the largest distance that is kept.
    state: torch.Tensor
    near: torch.Tensor  # int32 [rows, NEAREST]: distances of the tokens nearest to the maximum, not sorted
    ranks: torch.Tensor  # int64 [rows, NEAREST]: for each token of `near`, the number of nearer tokens and their mass.
    mass: torch.Tensor  # int64 [rows, blocks]: probability mass that the filters keep in each block.
    candidates: torch.Tensor  # int32 [rows, blocks]: the token that each block samples, used if the block is sampled.
    lse: torch.Tensor  # fp32 [rows]: log-sum-exp of the raw logits
    top_keys: torch.Tensor  # int64 [rows, logprobs blocks, LOGPROBS_KEEP]
    block_lse: torch.Tensor  # fp32 [rows, logprobs blocks, 2]: maximum and sum of exponentials


def make_buffers(vocab: int, rows: int, device) -> SamplerBuffers:
    """Allocate the sampler's scratch for logits [rows, vocab]."""
    assert MAX_LOGPROBS <= LOGPROBS_KEEP
    blocks, top_blocks = cdiv(vocab, min(BLOCK, greedy_op.BLOCK)), cdiv(vocab, LOGPROBS_BLOCK)

    def zeros(*shape, dtype):
        return torch.zeros(shape, dtype=dtype, device=device)

    return SamplerBuffers(
        mask=zeros(rows, m.mask_words(vocab), dtype=torch.int32),
        keys=zeros(rows, blocks, dtype=torch.int64),
        counter=zeros(rows, 2, dtype=torch.int32),
        tops=zeros(rows, blocks * TOPS, dtype=torch.float32),
        processed=zeros(rows, vocab, dtype=torch.float32),
        bins=zeros(rows, LEVELS, BINS, dtype=torch.int32),
        bin_mass=zeros(rows, BINS, dtype=torch.int64),
        state=zeros(rows, STATE, dtype=torch.int64),
        near=zeros(rows, NEAREST, dtype=torch.int32),
        ranks=zeros(rows, NEAREST, dtype=torch.int64),
        mass=zeros(rows, blocks, dtype=torch.int64),
        candidates=zeros(rows, blocks, dtype=torch.int32),
        lse=zeros(rows, dtype=torch.float32),
        top_keys=zeros(rows, top_blocks, LOGPROBS_KEEP, dtype=torch.int64),
        block_lse=zeros(rows, top_blocks, 2, dtype=torch.float32),
    )


@triton.jit
def _sample_kernel(
    logits_ptr,
    meta_ptr,
    samp_ptr,
    tokens_ptr,
    counts_ptr,
    out_ptr,
    keys_ptr,
    counter_ptr,
    processed_ptr,
    bins_ptr,
    state_ptr,
    near_ptr,
    ranks_ptr,
    mass_ptr,
    candidates_ptr,
    lse_ptr,
    logprobs_ptr,
    tokens_out_ptr,
    vocab,
    stride_logits,
    stride_tokens,
    stride_counts,
    stride_keys,
    stride_processed,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    LOGPROBS: tl.constexpr,
    FENCE: tl.constexpr,
    MASKED: tl.constexpr,
    SAMPLE_ONLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Weigh the tokens of each block that the filters keep, draw one token of the row, and end the step.

    A program reads one block of a row. Grid: (vocab blocks, rows). Moves 4 * vocab bytes per row, and in each program
    12 * NEAREST bytes, and 4 * BINS more if the list of nearest tokens does not decide.

    Each block draws a candidate among its tokens in the order of their ids, and the last program to arrive draws a
    block. Both draws take a random number below a sum of integer weights, which does not depend on the order of
    addition. Each block has its own stream of the generator; the step's position is the counter.
    Temperature 0, a NaN and an infinity need no draw: the first program ends the step, and the others return.

    Args:
        logits_ptr, meta_ptr, tokens_ptr, counts_ptr, out_ptr, lse_ptr: see finish_step. meta, tokens, counts and out
            are outputs.
        samp_ptr: [rows, SAMP_WIDTH] fp32.
        keys_ptr: [rows, >= blocks] int64.
        counter_ptr: [rows, 2] int32, zero (scratch).
        processed_ptr: [rows, vocab] fp32.
        bins_ptr, state_ptr, near_ptr, ranks_ptr: see SamplerBuffers. state is an output too.
        mass_ptr: [rows, >= blocks] int64 (scratch).
        candidates_ptr: [rows, >= blocks] int32 (scratch).
        logprobs_ptr: [slots, RING, LOGPROBS_WIDTH] fp32 (output). Used only if LOGPROBS.
        tokens_out_ptr: [rows] int32 (output), a token or NO_TOKEN. With SAMPLE_ONLY it replaces the other outputs, and
            the step does not end.
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    meta_row = meta_ptr + row * META_WIDTH
    status = tl.load(meta_row + STATUS)
    state = step_state(row, meta_ptr, tokens_ptr, stride_tokens)
    use_k, use_p, top_k, top_p, temperature = active(meta_ptr, samp_ptr, row, vocab)
    scale = grid_scale(temperature)
    least = tl.ceil(tl.load(samp_ptr + row * SAMP_WIDTH + MIN_P).to(tl.float64) * _MAX_WEIGHT).to(tl.int64)
    seed_lo, seed_hi, position = tl.load(meta_row + SEED_LO), tl.load(meta_row + SEED_HI), tl.load(meta_row + POSITION)
    random = philox_bits(seed_lo, seed_hi, position, block + 1)
    if PDL:
        gdc_wait()
    if status == RUN:
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < vocab
        y = tl.load(processed_ptr + row.to(tl.int64) * stride_processed + offs_n, mask=mask_n, other=0.0)
        state_ptr += row * _STATE
        listed = tl.load(state_ptr + _LISTED).to(tl.int32)
        offs_l = tl.arange(0, _NEAREST)
        near, near_weights = load_nearest(near_ptr + row * _NEAREST, offs_l, listed)
        ranks = tl.load(ranks_ptr + row * _NEAREST + offs_l)
        total = tl.load(state_ptr + _TOTAL)
        decided = tl.load(state_ptr + _DECIDED) != 0
        key = largest_key(keys_ptr + row * stride_keys, blocks, BLOCKS)
        token = packed_id(key)
        ends = block == 0
        if (key != NAN_KEY) & (temperature > 0):
            mass_ptr += row * stride_keys
            candidates_ptr += row * stride_keys
            threshold = row * 0 + _FARTHEST
            if decided:
                threshold = ranked_threshold(near, near_weights, ranks, listed, total, use_k, top_k, use_p, top_p)
            elif use_k | use_p:
                threshold = binned_threshold(bins_ptr + row * _LEVELS * _BINS, state_ptr, use_k, use_p)
            d = distance(y, packed_value(key), scale)
            w = weight(d)
            w = tl.where(mask_n & (d <= threshold) & (w >= least), w, 0)
            mass = tl.sum(w, axis=0)
            place = tl.umulhi(random, mass.to(tl.uint64)).to(tl.int64)
            tl.store(mass_ptr + block, mass)
            token = block * BLOCK_N + tl.sum((tl.cumsum(w, axis=0) <= place).to(tl.int32), axis=0)
            tl.store(candidates_ptr + block, token)
            random = philox_bits(seed_lo, seed_hi, position, block * 0)
            ends = arrive(counter_ptr + 2 * row, blocks)
            if ends:
                offs_k = tl.arange(0, BLOCKS)
                masses = tl.load(mass_ptr + offs_k, mask=offs_k < blocks, other=0, cache_modifier=".cg")
                candidates = tl.load(candidates_ptr + offs_k, mask=offs_k < blocks, other=0, cache_modifier=".cg")
                place = tl.umulhi(random, tl.sum(masses, axis=0).to(tl.uint64)).to(tl.int64)
                chosen = tl.sum((tl.cumsum(masses, axis=0) <= place).to(tl.int32), axis=0)
                token = tl.sum(tl.where(offs_k == chosen, candidates, 0), axis=0)
                tl.store(state_ptr + _THRESHOLD, threshold.to(tl.int64))
        if ends:
            if SAMPLE_ONLY:
                tl.store(tokens_out_ptr + row, tl.where(key == NAN_KEY, NO_TOKEN, token))
            else:
                finish_step(
                    row,
                    token,
                    key == NAN_KEY,
                    state,
                    meta_ptr,
                    tokens_ptr,
                    counts_ptr,
                    out_ptr,
                    logits_ptr,
                    lse_ptr,
                    logprobs_ptr,
                    stride_tokens,
                    stride_counts,
                    stride_logits,
                    COUNT=True,
                    LOGPROBS=LOGPROBS,
                    FENCE=FENCE,
                    MASKED=MASKED,
                )


def sample(
    logits, meta, samp, tokens, counts, bias, out, sampler, logprobs_ring=None, masked=False, sampled=None, queries=1,
    *, pdl=False,
):  # fmt: skip
    """Draw a token from each row of logits and end the step.

    Args:
        logits: [rows, vocab] fp32.
        meta: [rows, META_WIDTH] int32 (in and out).
        samp: [rows, SAMP_WIDTH] fp32.
        tokens: [slots, capacity + 1] int32 (in and out).
        counts: [slots, vocab] int32 (in and out).
        bias: [slots, vocab] fp32.
        out: [slots, RING] int64 (output).
        sampler: SamplerBuffers.
        logprobs_ring: [slots, RING, LOGPROBS_WIDTH] fp32, or None. Receives the token's raw log-probability.
        masked: Whether `mask` ran before in this pass.
        sampled: [rows] int32. If it is not None, it receives the tokens, and `accept` ends the step.
        queries: Rows of a request.
    """
    rows, vocab = logits.shape
    blocks = cdiv(vocab, BLOCK)
    s, grid, padded = sampler, (blocks, rows), max(2, next_power_of_2(blocks))
    launch = options(WARPS, pdl) | {"enable_fp_fusion": False}  # Every product is rounded separately, as in torch.
    assert counts.stride(0) == bias.stride(0) and s.keys.stride(0) == s.mass.stride(0) == s.candidates.stride(0)
    _process_kernel[grid](
        logits,
        meta,
        samp,
        counts,
        bias,
        tokens,
        s.keys,
        s.tops,
        s.processed,
        s.bins,
        s.bin_mass,
        s.state,
        vocab,
        logits.stride(0),
        counts.stride(0),
        tokens.stride(0),
        s.keys.stride(0),
        s.tops.stride(0),
        s.processed.stride(0),
        BLOCK_N=BLOCK,
        CLEAR=next_power_of_2(cdiv(BINS, blocks)),
        QUERIES=queries,
        PDL=pdl,
        **launch,
    )
    for level in range(LEVELS):
        _bins_kernel[grid](
            meta,
            samp,
            s.keys,
            s.tops,
            s.processed,
            s.bins,
            s.bin_mass,
            s.state,
            s.near,
            s.ranks,
            vocab,
            s.keys.stride(0),
            s.tops.stride(0),
            s.processed.stride(0),
            LEVEL=level,
            BLOCK_N=BLOCK,
            BLOCKS=padded,
            PDL=pdl,
            **launch,
        )
    _sample_kernel[grid](
        logits,
        meta,
        samp,
        tokens,
        counts,
        out,
        s.keys,
        s.counter,
        s.processed,
        s.bins,
        s.state,
        s.near,
        s.ranks,
        s.mass,
        s.candidates,
        s.lse,
        logprobs_ring,
        sampled,
        vocab,
        logits.stride(0),
        tokens.stride(0),
        counts.stride(0),
        s.keys.stride(0),
        s.processed.stride(0),
        BLOCK_N=BLOCK,
        BLOCKS=padded,
        LOGPROBS=logprobs_ring is not None,
        FENCE=logprobs_ring is not None and not interpreted(),
        MASKED=masked,
        SAMPLE_ONLY=sampled is not None,
        PDL=pdl,
        **launch,
    )


def _sample_token_ref(w, blocks, counter: tuple[int, int, int]) -> int:
    """Draw an index by the weights w of tokens, whose `blocks` ascend: first the block, then the token in it."""
    masses = w.new_zeros(int(blocks[-1]) + 1).index_add_(0, blocks, w).cumsum(0)
    block = int(torch.searchsorted(masses, philox_bits_ref(*counter, 0) * int(masses[-1]) >> 64, right=True))
    first, end = torch.searchsorted(blocks, blocks.new_tensor([block, block + 1])).tolist()
    sums = w[first:end].cumsum(0)
    place = philox_bits_ref(*counter, block + 1) * int(sums[-1]) >> 64
    return first + int(torch.searchsorted(sums, place, right=True))


def sample_ref(
    logits, meta, samp, tokens, counts, bias, out, sampler, logprobs_ring=None, masked=False, sampled=None, queries=1
):
    """Compute `sample` in torch, with the same processed logits, threshold and token."""
    for row in running(meta, logits.shape[0]):
        x, state = logits[row], meta[row].tolist()
        temperature, top_p, min_p, *penalties = samp[row, :6].unbind()
        slot = state[m.SLOT]
        bad, token = not bool(torch.isfinite(x).all()), 0
        if not bad:
            seen, position = counts[slot], state[m.POSITION]
            if before := row % queries:  # The number of drafts before this row.
                first = max(position - before + 1, state[m.N_KNOWN])  # The known tokens are already counted.
                proposed = tokens[slot, first : position + 1].long()
                seen = seen.index_add(0, proposed, torch.full_like(proposed, 2, dtype=seen.dtype))
            y = sampler.processed[row].copy_(process_ref(x, seen, bias[slot], state[m.FLAGS], *penalties))
            token = int(y.argmax())
            if float(temperature) > 0:
                d = distance_ref(y, y[token], temperature)
                threshold = sampler.state[row, THRESHOLD] = threshold_ref(d, state[m.TOP_K], float(top_p))
                ids = (d <= threshold).nonzero().flatten()
                w = weight_ref(d[ids])
                w.masked_fill_(w < math.ceil(float(min_p) * 2**WEIGHT_BITS), 0)
                token = int(
                    ids[_sample_token_ref(w, ids // BLOCK, (state[m.SEED_LO], state[m.SEED_HI], state[m.POSITION]))]
                )
        if sampled is not None:
            sampled[row] = m.NO_TOKEN if bad else token
            continue
        finish_step_ref(row, token, bad, logits, meta, tokens, counts, out, sampler.lse, logprobs_ring, masked)


def sample_bytes(
    logits, meta, samp, tokens, counts, bias, out, sampler, logprobs_ring=None, masked=False, sampled=None, queries=1
) -> int:
    """Return the bytes that every draw reads. Only some requests read counts and bias too."""
    return logits.nbytes


SAMPLE = Op(sample, sample_ref, sample_bytes, (_process_kernel, *[_bins_kernel] * LEVELS, _sample_kernel))
