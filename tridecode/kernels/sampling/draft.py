"""draft: what may come next, taken from where the last tokens stood before in the same text (prompt lookup)."""

import torch
import triton
import triton.language as tl

from ..common import (
    DRAFTS,
    FLAG_MASK,
    FLAGS,
    LIMIT,
    META_WIDTH,
    N_KNOWN,
    POSITION,
    ROOM,
    RUN,
    SLOT,
    STATUS,
    TRUST,
    next_power_of_2,
    options,
    running,
)
from ..op import Op
from .finish import arrive

BLOCK = 1024  # places that a program looks at in one turn
NOWHERE = tl.constexpr(-1)


@triton.jit
def _place_key(tokens_ptr, i, end, last, LONGEST: tl.constexpr, SHORTEST: tl.constexpr):
    """Of places i < end the best: how many tokens up to it agree with those up to `last`, SHORTEST to LONGEST, over i.
    The more, the better; of two equally good places the later."""
    agree = i < end
    length = tl.zeros_like(i)
    for back in tl.static_range(LONGEST):  # no load waits for what another one found
        wanted = tl.load(tokens_ptr + tl.maximum(last - back, 0))
        agree = agree & (tl.load(tokens_ptr + i - back, mask=(i < end) & (i >= back), other=-1) == wanted)
        length += agree.to(tl.int32)
    return tl.max(tl.where(length >= SHORTEST, (length.to(tl.int64) << 32) | i.to(tl.int64), NOWHERE), 0)


@triton.jit
def _draft_kernel(
    meta_ptr,
    tokens_ptr,
    keys_ptr,
    counter_ptr,
    stride_tokens,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
):
    """Write drafts behind each row's position, and how many.

    meta: [rows, META_WIDTH] int32, DRAFTS is written; tokens: [slots, capacity + 1] int32, written behind POSITION;
    keys: [rows, SPLITS] int64, scratch; counter: [rows] int32, zero between launches. At most MOST drafts and, beside
    the first, as many as the row trusts; as many as leave every position below ROOM and every drawn token below LIMIT;
    none where there is a mask. Tokens that are given are drafts as they stand. Where the place found is so near that
    its continuation ends at the position, it is repeated. Grid (rows, SPLITS), always launched without PDL: embed reads
    what is written here.
    """
    row, split = tl.program_id(0), tl.program_id(1)
    meta_ptr += row * META_WIDTH
    status = tl.load(meta_ptr + STATUS)
    slot = tl.load(meta_ptr + SLOT).to(tl.int64)
    last = tl.load(meta_ptr + POSITION)
    tokens_ptr += slot * stride_tokens
    room = tl.minimum(tl.load(meta_ptr + ROOM) - 1, tl.load(meta_ptr + LIMIT) - 2) - last
    given = tl.load(meta_ptr + N_KNOWN) - 1 - last
    count = tl.minimum(tl.where(given > 0, given, tl.maximum(tl.load(meta_ptr + TRUST), 1)), tl.minimum(MOST, room))
    count = tl.where((tl.load(meta_ptr + FLAGS) & FLAG_MASK) != 0, 0, tl.maximum(count, 0))
    if status != RUN:
        return
    share = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK) * BLOCK
    best = tl.full([], NOWHERE, tl.int64)
    if (count > 0) & (given <= 0):
        end = tl.minimum((split + 1) * share, last)
        for first in range(split * share, end, BLOCK):
            i = first + tl.arange(0, BLOCK)
            best = tl.maximum(best, _place_key(tokens_ptr, i, end, last, LONGEST, SHORTEST))
    tl.store(keys_ptr + row * SPLITS + split, best)
    if arrive(counter_ptr + row, SPLITS):
        best = tl.max(tl.load(keys_ptr + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg"), 0)
        place = (best & 0xFFFFFFFF).to(tl.int32)
        count = tl.where((best < 0) & (given <= 0), 0, count)
        offs = tl.arange(0, LANES)
        there = offs < tl.where(given > 0, 0, count)
        source = place + 1 + offs % tl.maximum(last - place, 1)
        tl.store(tokens_ptr + last + 1 + offs, tl.load(tokens_ptr + source, mask=there, other=0), mask=there)
        tl.store(meta_ptr + DRAFTS, count)


def draft(meta, tokens, keys, counter, most, ngram, *, pdl=False):
    """Write at most `most` tokens behind each row's position, and into meta how many; ngram: how many tokens are to
    agree, at most and at least."""
    rows, splits = keys.shape
    longest, shortest = ngram
    _draft_kernel[(rows, splits)](
        meta, tokens, keys, counter, tokens.stride(0), splits, most, next_power_of_2(most), BLOCK, longest,
        shortest, **options(4),
    )  # fmt: skip


def draft_ref(meta, tokens, keys, counter, most, ngram):
    for row in running(meta, len(keys)):
        state = meta[row].tolist()
        slot, last = state[SLOT.value], state[POSITION.value]
        room = min(state[ROOM.value] - 1, state[LIMIT.value] - 2) - last
        given = max(state[N_KNOWN.value] - 1 - last, 0)
        count = max(min(given or max(state[TRUST.value], 1), most, room), 0)
        if state[FLAGS.value] & FLAG_MASK.value:
            count = 0
        text = tokens[slot, : last + 1]
        place = latest_place(text, *ngram) if count and not given else None
        if place is None:
            count = count if given else 0
        else:
            following = place + 1 + torch.arange(count) % (last - place)
            tokens[slot, last + 1 : last + 1 + count] = text[following.to(text.device)]
        meta[row, DRAFTS.value] = count


def latest_place(text: torch.Tensor, longest: int, shortest: int) -> int | None:
    """The last place before the end of text [n] int32 at which as many of its last tokens stood as stood anywhere, of
    `longest`, if they are `shortest` or more."""
    ends = torch.ones_like(text[:-1], dtype=torch.bool)
    found = None
    for back in range(min(longest, len(text) - 1)):
        ends[:back] = False
        ends[back:] &= text[: len(text) - 1 - back] == text[-1 - back]
        if not ends.any():
            break
        if back + 1 >= shortest:
            found = int(ends.nonzero()[-1])
    return found


def draft_bytes(meta, tokens, keys, counter, most, ngram) -> int:
    return sum(4 * (int(meta[row, POSITION.value]) + 1) for row in running(meta, len(keys)))


DRAFT = Op(draft, draft_ref, draft_bytes, (_draft_kernel,), outputs=("keys",))
