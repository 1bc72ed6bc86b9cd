"""Functions that the sampling kernels share: keys of logits and ids, detection of the last program, end of a step."""

import torch
import triton
import triton.language as tl

from ... import layout as m
from ...layout import MAX_LOGPROBS
from ..common import (
    ALLOCATED,
    GENERATION,
    LATE,
    LIMIT,
    LIMIT_REACHED,
    MAX_STOP_IDS,
    META_WIDTH,
    N_KNOWN,
    N_STOP,
    NAN,
    POSITION,
    RING,
    RUN,
    SLOT,
    STATUS,
    STEP,
    STOP,
    STOP_IDS,
    WAIT,
)
from .mass import MAX_FP32

GENERATION_SHIFT, STEP_SHIFT = tl.constexpr(m.GENERATION_SHIFT), tl.constexpr(m.STEP_SHIFT)
NO_TOKEN, STEP_MASK = tl.constexpr(m.NO_TOKEN), tl.constexpr(m.STEP_MASK)
LATE_TOKEN = tl.constexpr(m.LATE_TOKEN)
LOWEST = tl.constexpr(-(2**63))  # The key that represents no token.
# The key of a block that contains NaN or infinity. It is greater than all other keys.
NAN_KEY = tl.constexpr(2**63 - 1)
SIGN_FREE = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
# Number of values of an entry: the sampled token, then the most likely tokens.
LOGPROBS_WIDTH = tl.constexpr(1 + MAX_LOGPROBS)


@triton.jit
def pack(x, ids):
    """Pack each finite fp32 x with its id into an int64 key that sorts like x.

    Among equal values, the lower id has the larger key. -0 and 0 are equal.
    """
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & SIGN_FREE)
    return (order.to(tl.int64) << 32) | (ids ^ SIGN_FREE).to(tl.int64)


@triton.jit
def packed_id(key):
    """Return the token id of a key."""
    return ((key & SIGN_FREE) ^ SIGN_FREE).to(tl.int32)


@triton.jit
def packed_value(key):
    """Return the logit of a key. For NAN_KEY, return the largest finite fp32, from which every distance is finite."""
    order = (key >> 32).to(tl.int32)
    value = (order ^ ((order >> 31) & SIGN_FREE)).to(tl.float32, bitcast=True)
    return tl.where(key == NAN_KEY, MAX_FP32, value)


@triton.jit
def block_key(x, shown, ids, mask):
    """Return the largest key of `shown` in this block, or NAN_KEY if x contains a NaN or an infinity."""
    finite = (x.to(tl.int32, bitcast=True) & EXPONENT) != EXPONENT
    return tl.max(tl.where(mask, tl.where(finite, pack(shown, ids), NAN_KEY), LOWEST), axis=0)


@triton.jit
def largest_key(keys_ptr, blocks, BLOCKS: tl.constexpr):
    """Return the largest of the keys that `blocks` programs stored."""
    offs = tl.arange(0, BLOCKS)
    return tl.max(tl.load(keys_ptr + offs, mask=offs < blocks, other=LOWEST, cache_modifier=".cg"), axis=0)


@triton.jit
def arrive(counter_ptr, programs):
    """Return True in the last of `programs` programs to call it.

    That program sees the stores of the others. It also resets the counter to zero.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter_ptr, 1) == programs - 1
    tl.store(counter_ptr, 0, mask=last)
    return last


@triton.jit
def step_state(row, meta_ptr, tokens_ptr, stride_tokens):
    """Load the state of a row that finish_step needs.

    It does not change during the step, so a kernel may load it before its wait.
    """
    meta_ptr += row * META_WIDTH
    slot = tl.load(meta_ptr + SLOT)
    following = tl.load(meta_ptr + POSITION) + 1
    step = tl.load(meta_ptr + STEP)
    generation = tl.load(meta_ptr + GENERATION).to(tl.int64)
    known = following < tl.load(meta_ptr + N_KNOWN)
    known_token = tl.load(tokens_ptr + slot.to(tl.int64) * stride_tokens + following, mask=known, other=0)
    ends = following + 1 >= tl.load(meta_ptr + LIMIT)
    waits = following >= tl.load(meta_ptr + ALLOCATED)
    offs = tl.arange(0, MAX_STOP_IDS)
    stop_ids = tl.load(meta_ptr + STOP_IDS + offs, mask=offs < tl.load(meta_ptr + N_STOP), other=-1)
    return slot, following, step, generation, known, known_token, ends, waits, stop_ids


@triton.jit
def finish_step(
    row,
    token,
    bad,
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
    COUNT: tl.constexpr,
    LOGPROBS: tl.constexpr,
    FENCE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """End the step of a row: store token, count, log-probability, status, position and step, and the ring entry last.

    Known tokens (below N_KNOWN) are reported, are not overwritten and do not stop the request. With FENCE, the ring of
    log-probabilities, which is in host memory too, is written before the entry of `out` that the host polls. With
    MASKED, a row whose mask was late samples no token: its entry contains LATE_TOKEN, and its position does not change.
    """
    slot, following, step, generation, known, known_token, ends, waits, stop_ids = state
    meta_ptr += row * META_WIDTH
    stays = bad
    if MASKED:  # .cg bypasses the L1 cache. The previous launch wrote LATE to a line that this program may have cached.
        late = tl.load(meta_ptr + LATE, cache_modifier=".cg") != 0
        stays = bad | late
    samples = (known | stays) == 0
    token = tl.where(known, known_token, token)
    stops = tl.sum((stop_ids == token).to(tl.int32), axis=0) * samples.to(tl.int32)
    status = tl.where(stops > 0, STOP, tl.where(ends, LIMIT_REACHED, tl.where(waits, WAIT, RUN)))
    tl.store(tokens_ptr + slot.to(tl.int64) * stride_tokens + following, token, mask=samples)
    if COUNT:
        tl.atomic_add(counts_ptr + slot.to(tl.int64) * stride_counts + token, 2, mask=samples, sem="relaxed")
    ring = slot * RING + (step & (RING - 1))
    if LOGPROBS:
        logit = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + token)
        tl.store(logprobs_ptr + ring * LOGPROBS_WIDTH, logit - tl.load(lse_ptr + row), mask=bad == 0)
    if MASKED:
        status = tl.where(late, RUN, status)
        token = tl.where(late, LATE_TOKEN, token)
    tl.store(meta_ptr + STATUS, tl.where(bad, NAN, status))
    tl.store(meta_ptr + POSITION, tl.where(stays, following - 1, following))
    tl.store(meta_ptr + STEP, step + 1)
    entry = (generation << GENERATION_SHIFT) | ((step & STEP_MASK).to(tl.int64) << STEP_SHIFT)
    entry |= tl.where(bad, NO_TOKEN, token)
    if FENCE:
        tl.debug_barrier()
        entry = tl.inline_asm_elementwise(
            "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [entry], dtype=tl.int64, is_pure=False, pack=1
        )
    tl.store(out_ptr + ring, entry)


def finish_step_ref(
    row, token, bad, logits, meta, tokens, counts, out, lse=None, logprobs_ring=None, masked=False, source=None
):
    """Compute `finish_step` in torch.

    Args:
        counts: [slots, vocab] int32, or None for a greedy pass, which keeps no counts.
        source: The row of logits and lse, if it is not `row`.
    """
    source = row if source is None else source
    state = meta[row].tolist()
    late = masked and bool(state[m.LATE]) and not bad
    slot, position, step = state[m.SLOT], state[m.POSITION], state[m.STEP]
    following = position + 1
    known = following < state[m.N_KNOWN]
    status = m.WAIT if following >= state[m.ALLOCATED] else m.RUN
    if following + 1 >= state[m.LIMIT]:
        status = m.LIMIT_REACHED
    if known:
        token = int(tokens[slot, following])
    elif not (bad or late):
        tokens[slot, following] = token
        if counts is not None:
            counts[slot, token] += 2
        if token in state[m.STOP_IDS : m.STOP_IDS + state[m.N_STOP]]:
            status = m.STOP
    if logprobs_ring is not None and not (bad or late):
        logprobs_ring[slot, step % m.RING, 0] = logits[source, token] - lse[source]
    if late:
        token, following, status = m.LATE_TOKEN, position, m.RUN
    changed = [position, step + 1, m.NAN] if bad else [following, step + 1, status]
    meta[row, m.POSITION : m.STATUS + 1] = torch.tensor(changed, dtype=torch.int32)
    out[slot, step % m.RING] = m.ring_entry(state[m.GENERATION], step, m.NO_TOKEN if bad else token)
