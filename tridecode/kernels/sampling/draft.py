"""draft: proposes the tokens that followed an earlier occurrence of the last tokens in the text (prompt lookup)."""

import torch
import triton
import triton.language as tl

from ..common import (
    ALLOCATED,
    DRAFT_LIMIT,
    DRAFTS,
    FLAG_MASK,
    FLAGS,
    LIMIT,
    META_WIDTH,
    N_KNOWN,
    POSITION,
    RUN,
    SLOT,
    STATUS,
    next_power_of_2,
    options,
    running,
)
from ..op import Op
from .finish import arrive

BLOCK = 1024  # Number of positions that a program compares in one iteration.
NO_MATCH = tl.constexpr(-1)


@triton.jit
def _place_key(tokens_ptr, i, end, last, LONGEST: tl.constexpr, SHORTEST: tl.constexpr):
    """Return the key of the best position i < end: the length of its match << 32 | i, or NO_MATCH.

    The match length is the number of tokens up to i that equal the tokens up to `last`, at most LONGEST. Matches
    shorter than SHORTEST do not count. The longest match wins, and of equally long ones the latest.
    """
    agree = i < end
    length = tl.zeros_like(i)
    # No load depends on the result of another load, so all are in flight at once.
    for back in tl.static_range(LONGEST):
        suffix = tl.load(tokens_ptr + tl.maximum(last - back, 0))
        agree = agree & (tl.load(tokens_ptr + i - back, mask=(i < end) & (i >= back), other=-1) == suffix)
        length += agree.to(tl.int32)
    return tl.max(tl.where(length >= SHORTEST, (length.to(tl.int64) << 32) | i.to(tl.int64), NO_MATCH), 0)


@triton.jit
def _draft_kernel(
    meta_ptr,
    tokens_ptr,
    keys_ptr,
    counter_ptr,
    stride_tokens,
    SPLITS: tl.constexpr,
    MAX_DRAFTS: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
):
    """Write drafts to tokens after each row's position, and their number to meta's DRAFTS.

    Grid: (rows, SPLITS). The programs of a row share the search, and the last to arrive writes the drafts. Launched
    without PDL in every pass, because embed reads the drafts before its wait.

    Known tokens (below N_KNOWN) are used as drafts without a copy. Otherwise a row gets at most
    max(DRAFT_LIMIT, 1) drafts. In both cases there are at most MAX_DRAFTS drafts, the position of each draft is below
    ALLOCATED, and that of each sampled token is below LIMIT. A row with a mask gets no drafts. If the match is so close
    that its continuation reaches the position, the kernel repeats the continuation.

    Args:
        meta_ptr: [rows, META_WIDTH] int32 (DRAFTS is an output).
        tokens_ptr: [slots, capacity + 1] int32 (in and out).
        keys_ptr: [rows, SPLITS] int64 (scratch).
        counter_ptr: [rows] int32, zero between launches (scratch).
    """
    row, split = tl.program_id(0), tl.program_id(1)
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    slot = tl.load(meta_ptr + SLOT).to(tl.int64)
    last = tl.load(meta_ptr + POSITION)
    tokens_ptr += slot * stride_tokens
    room = tl.minimum(tl.load(meta_ptr + ALLOCATED) - 1, tl.load(meta_ptr + LIMIT) - 2) - last
    known_left = tl.load(meta_ptr + N_KNOWN) - 1 - last
    count = tl.minimum(
        tl.where(known_left > 0, known_left, tl.maximum(tl.load(meta_ptr + DRAFT_LIMIT), 1)),
        tl.minimum(MAX_DRAFTS, room),
    )
    count = tl.where((tl.load(meta_ptr + FLAGS) & FLAG_MASK) != 0, 0, tl.maximum(count, 0))
    if status != RUN:
        return
    share = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK) * BLOCK
    best = tl.full([], NO_MATCH, tl.int64)
    if (count > 0) & (known_left <= 0):
        end = tl.minimum((split + 1) * share, last)
        for first in range(split * share, end, BLOCK):
            i = first + tl.arange(0, BLOCK)
            best = tl.maximum(best, _place_key(tokens_ptr, i, end, last, LONGEST, SHORTEST))
    tl.store(keys_ptr + row * SPLITS + split, best)
    if arrive(counter_ptr + row, SPLITS):
        best = tl.max(tl.load(keys_ptr + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg"), 0)
        place = (best & 0xFFFFFFFF).to(tl.int32)
        count = tl.where((best < 0) & (known_left <= 0), 0, count)
        offs = tl.arange(0, LANES)
        mask = offs < tl.where(known_left > 0, 0, count)
        source = place + 1 + offs % tl.maximum(last - place, 1)
        tl.store(tokens_ptr + last + 1 + offs, tl.load(tokens_ptr + source, mask=mask, other=0), mask=mask)
        tl.store(meta_ptr + DRAFTS, count)


def draft(meta, tokens, keys, counter, max_drafts, ngram, *, pdl=False):
    """Write at most `max_drafts` drafts after each row's position, and their number to meta.

    Args:
        meta: [rows, META_WIDTH] int32 (DRAFTS is an output).
        tokens: [slots, capacity + 1] int32 (in and out).
        keys: [rows, splits] int64 (scratch).
        counter: [rows] int32, zero (scratch).
        max_drafts: Maximum number of drafts of a row.
        ngram: The maximum and the minimum number of tokens that must match.
    """
    rows, splits = keys.shape
    longest, shortest = ngram
    _draft_kernel[(rows, splits)](
        meta, tokens, keys, counter, tokens.stride(0), splits, max_drafts, next_power_of_2(max_drafts), BLOCK, longest,
        shortest, **options(4),
    )  # fmt: skip


def draft_ref(meta, tokens, keys, counter, max_drafts, ngram):
    """Compute `draft` in torch."""
    for row in running(meta, len(keys)):
        state = meta[row].tolist()
        slot, last = state[SLOT.value], state[POSITION.value]
        room = min(state[ALLOCATED.value] - 1, state[LIMIT.value] - 2) - last
        known = max(state[N_KNOWN.value] - 1 - last, 0)
        count = max(min(known or max(state[DRAFT_LIMIT.value], 1), max_drafts, room), 0)
        if state[FLAGS.value] & FLAG_MASK.value:
            count = 0
        text = tokens[slot, : last + 1]
        place = latest_place(text, *ngram) if count and not known else None
        if place is None:
            count = count if known else 0
        else:
            following = place + 1 + torch.arange(count) % (last - place)
            tokens[slot, last + 1 : last + 1 + count] = text[following.to(text.device)]
        meta[row, DRAFTS.value] = count


def latest_place(text: torch.Tensor, longest: int, shortest: int) -> int | None:
    """Return the position before the end of text [n] int32 with the longest match of its last tokens, or None.

    Matches are between `shortest` and `longest` tokens long. If several are equally long, the latest wins.
    """
    ends = torch.ones_like(text[:-1], dtype=torch.bool)
    place = None
    for back in range(min(longest, len(text) - 1)):
        ends[:back] = False
        ends[back:] &= text[: len(text) - 1 - back] == text[-1 - back]
        if not ends.any():
            break
        if back + 1 >= shortest:
            place = int(ends.nonzero()[-1])
    return place


def draft_bytes(meta, tokens, keys, counter, max_drafts, ngram) -> int:
    """Return the bytes that a launch moves."""
    return sum(4 * (int(meta[row, POSITION.value]) + 1) for row in running(meta, len(keys)))


DRAFT = Op(draft, draft_ref, draft_bytes, (_draft_kernel,), outputs=("keys",))
