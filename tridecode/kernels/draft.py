"""draft: what may come next, taken from where the last tokens stood before in the same text (prompt lookup)."""

import torch
import triton
import triton.language as tl

from .common import (
    LIMIT,
    META_WIDTH,
    POSITION,
    ROOM,
    RUN,
    SLOT,
    STATUS,
    gdc_launch_dependents,
    gdc_wait,
    options,
    running,
)
from .op import Op
from .sampling.finish import arrive

BLOCK = 1024  # places that a program looks at in one turn
LONGEST, SHORTEST = 4, 2  # tokens that must agree: the more, the better; the later of two equally good places
NOWHERE = tl.constexpr(-1)


@triton.jit
def _place_key(tokens_ptr, i, end, last, LONGEST: tl.constexpr, SHORTEST: tl.constexpr):
    """Of places i < end the best: how many tokens up to it agree with those up to `last`, at most LONGEST, over i."""
    agree = i < end
    length = tl.zeros_like(i)
    for back in tl.static_range(LONGEST):
        wanted = tl.load(tokens_ptr + tl.maximum(last - back, 0))
        agree = agree & (i >= back) & (tl.load(tokens_ptr + i - back, mask=agree & (i >= back), other=-1) == wanted)
        length += agree.to(tl.int32)
    return tl.max(tl.where(length >= SHORTEST, (length.to(tl.int64) << 32) | i.to(tl.int64), NOWHERE), 0)


@triton.jit
def _draft_kernel(
    meta_ptr,
    tokens_ptr,
    wanted_ptr,
    keys_ptr,
    counter_ptr,
    drafts_ptr,
    stride_tokens,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write drafts behind each row's position, and how many.

    meta: [rows, META_WIDTH] int32; tokens: [slots, capacity + 1] int32, written behind POSITION; wanted: [slots] int32,
    drafts that a slot wants, at most MOST; keys: [rows, SPLITS] int64, scratch; counter: [rows] int32, zero between
    launches; drafts: [rows] int32 (output): how many there are, 0 for a row that does not run. As many as leave every
    position below ROOM and every drawn token below LIMIT. Where the place found is so near that its continuation ends
    at the position, it is repeated. Grid (rows, SPLITS).
    """
    row, split = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    meta_ptr += row * META_WIDTH
    if tl.load(meta_ptr + STATUS) != RUN:
        if split == 0:
            tl.store(drafts_ptr + row, 0)
        return
    slot = tl.load(meta_ptr + SLOT).to(tl.int64)
    last = tl.load(meta_ptr + POSITION)
    tokens_ptr += slot * stride_tokens
    room = tl.minimum(tl.load(meta_ptr + ROOM) - 1, tl.load(meta_ptr + LIMIT) - 2) - last
    count = tl.maximum(tl.minimum(tl.minimum(tl.load(wanted_ptr + slot), MOST), room), 0)
    share = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK) * BLOCK
    best = tl.full([], NOWHERE, tl.int64)
    if count > 0:
        end = tl.minimum((split + 1) * share, last)
        for first in range(split * share, end, BLOCK):
            i = first + tl.arange(0, BLOCK)
            best = tl.maximum(best, _place_key(tokens_ptr, i, end, last, LONGEST, SHORTEST))
    tl.store(keys_ptr + row * SPLITS + split, best)
    if arrive(counter_ptr + row, SPLITS):
        best = tl.max(tl.load(keys_ptr + row * SPLITS + tl.arange(0, SPLITS), cache_modifier=".cg"), 0)
        place = (best & 0xFFFFFFFF).to(tl.int32)
        count = tl.where(best < 0, 0, count)
        offs = tl.arange(0, LANES)
        there = offs < count
        source = place + 1 + offs % tl.maximum(last - place, 1)
        tl.store(tokens_ptr + last + 1 + offs, tl.load(tokens_ptr + source, mask=there, other=0), mask=there)
        tl.store(drafts_ptr + row, count)


def draft(meta, tokens, wanted, keys, counter, drafts, *, most, pdl=False):
    """drafts [rows]: how many tokens were written behind each row's position, at most `most`."""
    rows, splits = keys.shape
    lanes = triton.next_power_of_2(most)
    _draft_kernel[(len(drafts), splits)](
        meta, tokens, wanted, keys, counter, drafts, tokens.stride(0), splits, most, lanes, BLOCK, LONGEST, SHORTEST,
        pdl, **options(4, pdl),
    )  # fmt: skip


def draft_ref(meta, tokens, wanted, keys, counter, drafts, most):
    drafts.zero_()
    for row in running(meta, len(drafts)):
        state = meta[row].tolist()
        slot, last = state[SLOT.value], state[POSITION.value]
        room = min(state[ROOM.value] - 1, state[LIMIT.value] - 2) - last
        count = max(min(int(wanted[slot]), most, room), 0)
        text = tokens[slot, : last + 1].tolist()
        if count and (place := _latest(text)) is not None:
            distance = last - place
            found = [text[place + 1 + k % distance] for k in range(count)]
            tokens[slot, last + 1 : last + 1 + count] = torch.tensor(found, dtype=tokens.dtype)
            drafts[row] = count


def _latest(text: list[int]) -> int | None:
    """The last place before the end at which as many of the last tokens stood as stood anywhere."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        wanted = text[-length:]
        for place in range(len(text) - 2, length - 2, -1):
            if len(wanted) == length and text[place - length + 1 : place + 1] == wanted:
                return place
    return None


def draft_bytes(meta, tokens, wanted, keys, counter, drafts, most=0) -> int:
    return sum(4 * (int(meta[row, POSITION.value]) + 1) for row in running(meta, len(drafts)))


DRAFT = Op(draft, draft_ref, draft_bytes, (_draft_kernel,), outputs=("keys", "drafts"))
