"""accept: counts the correct drafts of a pass, and ends the step of each accepted token."""

import triton
import triton.language as tl

from ... import layout as m
from ..common import (
    ALLOCATED,
    DRAFT_LIMIT,
    DRAFTS,
    GENERATION,
    LIMIT,
    LIMIT_REACHED,
    MAX_DRAFTS,
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
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    options,
    running,
)
from ..op import Op
from .finish import GENERATION_SHIFT, LOGPROBS_WIDTH, NO_TOKEN, STEP_MASK, STEP_SHIFT, finish_step_ref

FOLLOWING_SHIFT, DRAFTED_SHIFT = tl.constexpr(m.FOLLOWING_SHIFT), tl.constexpr(m.DRAFTED_SHIFT)
REQUESTED_SHIFT = tl.constexpr(m.REQUESTED_SHIFT)


@triton.jit
def _leading(true):
    """Return the number of lanes that are true before the first that is false."""
    return tl.sum((tl.cumsum(1 - true.to(tl.int32), 0) == 0).to(tl.int32), 0)


@triton.jit
def _accept_kernel(
    sampled_ptr,
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
    QUERIES: tl.constexpr,
    COUNT: tl.constexpr,
    LOGPROBS: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """End the steps of a row: the step of its next token, and those of drafts whose predecessors were all right.

    Grid: (rows,). Moves a few hundred bytes per row.
    The kernel does in lanes, for all accepted tokens, what finish_step does for one token. A step that does not end
    with status RUN is the last of the row. If a pass has only one row for a request (QUERIES = 1), the first draft is
    still compared with the sampled token, so that DRAFT_LIMIT grows when drafts become right. Known tokens (below
    N_KNOWN) do not change DRAFT_LIMIT.

    Args:
        sampled_ptr: [rows * QUERIES] int32, a token or NO_TOKEN.
        meta_ptr: [rows, META_WIDTH] int32 (in and out).
        tokens_ptr: [slots, capacity + 1] int32 (in and out). The drafts follow POSITION.
        counts_ptr: [slots, vocab] int32 (in and out). Used only if COUNT.
        out_ptr: [slots, RING] int64 (output), the output ring.
        logits_ptr: [rows * QUERIES, vocab] fp32. Used only if LOGPROBS.
        lse_ptr: [rows * QUERIES] fp32. Used only if LOGPROBS.
        logprobs_ptr: [slots, RING, LOGPROBS_WIDTH] fp32 (output). Used only if LOGPROBS.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    meta_ptr += row * META_WIDTH
    lanes = tl.arange(0, QUERIES)
    runs = tl.load(meta_ptr + STATUS) == RUN
    slot, position, step = tl.load(meta_ptr + SLOT), tl.load(meta_ptr + POSITION), tl.load(meta_ptr + STEP)
    drafts, trust = tl.load(meta_ptr + DRAFTS), tl.load(meta_ptr + DRAFT_LIMIT)
    generation = tl.load(meta_ptr + GENERATION).to(tl.int64)
    verified = tl.minimum(drafts, QUERIES - 1)
    ran = lanes <= verified
    following = position + 1 + lanes
    known = following < tl.load(meta_ptr + N_KNOWN)
    ends = following + 1 >= tl.load(meta_ptr + LIMIT)
    waits = following >= tl.load(meta_ptr + ALLOCATED)
    offs = tl.arange(0, MAX_STOP_IDS)
    stop_ids = tl.load(meta_ptr + STOP_IDS + offs, mask=offs < tl.load(meta_ptr + N_STOP), other=-1)
    tokens_ptr += slot.to(tl.int64) * stride_tokens + following
    # The tokens that the pass should sample: known tokens and drafts.
    expected = tl.load(tokens_ptr, mask=known | (lanes < drafts), other=-1)
    if PDL:
        gdc_wait()
    if runs:
        token = tl.load(sampled_ptr + row * QUERIES + lanes, mask=ran, other=0)
        bad = token == NO_TOKEN
        draws = ran & (known == 0) & (bad == 0)
        token = tl.where(known, expected, token)
        stops = tl.sum((stop_ids[None, :] == token[:, None]).to(tl.int32), 1) > 0
        status = tl.where(ends, LIMIT_REACHED, tl.where(waits, WAIT, RUN))
        status = tl.where(bad, NAN, tl.where(stops & draws, STOP, status))
        right = ran & (bad == 0) & (lanes < drafts) & (token == expected)
        last = tl.minimum(_leading(right & (status == RUN)), verified)
        accepted = lanes <= last
        writes = accepted & draws
        tl.store(tokens_ptr, token, mask=writes)
        if COUNT:
            counts_ptr += slot.to(tl.int64) * stride_counts
            tl.atomic_add(counts_ptr + token, 2, mask=writes, sem="relaxed")
        ring = slot * RING + ((step + lanes) & (RING - 1))
        if LOGPROBS:
            source, sound = row * QUERIES + lanes, accepted & (bad == 0)
            logit = tl.load(logits_ptr + source.to(tl.int64) * stride_logits + token, mask=sound, other=0.0)
            tl.store(logprobs_ptr + ring * LOGPROBS_WIDTH, logit - tl.load(lse_ptr + source, mask=sound), mask=sound)
        hits = _leading(right)
        lost = tl.maximum(hits, trust // 2)
        grown = tl.where(hits >= tl.minimum(drafts, QUERIES), tl.minimum(2 * trust + 1, MAX_DRAFTS), lost)
        known_left = tl.load(meta_ptr + N_KNOWN) - 1 - position
        grown = tl.where((known_left > 0) | (drafts == 0), trust, grown)
        proposed = tl.where(known_left > 0, tl.minimum(known_left, MAX_DRAFTS), tl.where(drafts > 0, grown, 0))
        failed = tl.sum(tl.where((lanes == last) & bad, 1, 0), 0)
        tl.store(meta_ptr + STATUS, tl.sum(tl.where(lanes == last, status, 0), 0))
        tl.store(meta_ptr + POSITION, position + 1 + last - failed)
        tl.store(meta_ptr + STEP, step + 1 + last)
        tl.store(meta_ptr + DRAFT_LIMIT, grown)
        counters = (last - lanes) << FOLLOWING_SHIFT | verified << DRAFTED_SHIFT | proposed << REQUESTED_SHIFT
        entry = (generation << GENERATION_SHIFT) | (((step + lanes) & STEP_MASK).to(tl.int64) << STEP_SHIFT)
        entry |= (counters | token).to(tl.int64)  # The token of a row with invalid logits is NO_TOKEN.
        if FENCE:
            tl.debug_barrier()
            entry = tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [entry], dtype=tl.int64, is_pure=False, pack=1
            )
        tl.store(out_ptr + ring, entry, mask=accepted)


def accept(sampled, meta, tokens, counts, out, logits, lse=None, logprobs_ring=None, *, pdl=False):
    """End the steps of the rows of `meta`. `sampled` contains a token for each row and for each of its drafts.

    Args:
        sampled: [rows * queries] int32, a token or NO_TOKEN.
        meta: [rows, META_WIDTH] int32 (in and out).
        tokens: [slots, capacity + 1] int32 (in and out).
        counts: [slots, vocab] int32 (in and out), or None for a greedy pass, which keeps no counts.
        out: [slots, RING] int64 (output).
        logits: [rows * queries, vocab] fp32.
        lse: [rows * queries] fp32. Required with logprobs_ring.
        logprobs_ring: [slots, RING, LOGPROBS_WIDTH] fp32 (output), or None.
    """
    logprobs = logprobs_ring is not None
    _accept_kernel[(len(meta),)](
        sampled,
        meta,
        tokens,
        counts,
        out,
        logits,
        lse,
        logprobs_ring,
        tokens.stride(0),
        0 if counts is None else counts.stride(0),
        logits.stride(0),
        QUERIES=len(sampled) // len(meta),
        COUNT=counts is not None,
        LOGPROBS=logprobs,
        FENCE=logprobs and not interpreted(),
        PDL=pdl,
        **options(1, pdl),
    )


def accept_ref(sampled, meta, tokens, counts, out, logits, lse=None, logprobs_ring=None):
    """Compute `accept` in torch: call finish_step_ref token by token, until a token differs from its draft."""
    queries = len(sampled) // len(meta)
    for row in running(meta, len(meta)):
        state = meta[row].tolist()
        slot, first, step, drafts = state[m.SLOT], state[m.POSITION], state[m.STEP], state[m.DRAFTS]
        proposed = tokens[slot, first + 1 : first + 1 + drafts].tolist()
        verified, hits, done = min(drafts, queries - 1), 0, False
        for query in range(verified + 1):
            token = int(sampled[row * queries + query])
            bad = token == m.NO_TOKEN
            if not done:
                finish_step_ref(
                    row, 0 if bad else token, bad, logits, meta, tokens, counts, out, lse, logprobs_ring,
                    source=row * queries + query,
                )  # fmt: skip
                done, last = int(meta[row, m.STATUS]) != m.RUN, query
            known = first + 1 + query < state[m.N_KNOWN]
            right = not bad and query < drafts and (known or token == proposed[query])
            if not right:
                break
            hits += 1
        known_left, grown = state[m.N_KNOWN] - 1 - first, state[m.DRAFT_LIMIT]
        if drafts and known_left <= 0:
            right = hits >= min(drafts, queries)
            grown = min(2 * grown + 1, m.MAX_DRAFTS) if right else max(hits, grown // 2)
        meta[row, m.DRAFT_LIMIT] = grown
        next_drafts = min(known_left, m.MAX_DRAFTS) if known_left > 0 else grown * (drafts > 0)
        for query in range(last + 1):
            out[slot, (step + query) % m.RING] |= m.ring_entry(0, 0, 0, last - query, verified, next_drafts)


def accept_bytes(sampled, meta, tokens, counts, out, logits, lse=None, logprobs_ring=None) -> int:
    """Return the bytes that a launch moves."""
    return sampled.nbytes + meta.nbytes


ACCEPT = Op(accept, accept_ref, accept_bytes, (_accept_kernel,))
