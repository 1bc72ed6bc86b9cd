"""Masks of structured output: what a row's grammar does not allow next is put out of reach, before all else."""

import torch
import triton
import triton.language as tl

from ... import layout as m
from ..common import (
    FLAG_MASK,
    FLAGS,
    GENERATION,
    LATE,
    META_WIDTH,
    N_KNOWN,
    POSITION,
    RUN,
    SLOT,
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
from .finish import GENERATION_SHIFT
from .mass import HUGE

BLOCK = 4096  # tokens of the vocabulary a program
WARPS = 8  # of the program that fetches a row's mask


@triton.jit
def _wants(meta_ptr):
    """Whether the row draws a token that its mask must allow."""
    draws = tl.load(meta_ptr + POSITION) + 1 >= tl.load(meta_ptr + N_KNOWN)  # else its token is given
    return (tl.load(meta_ptr + STATUS) == RUN) & ((tl.load(meta_ptr + FLAGS) & FLAG_MASK) != 0) & draws


@triton.jit
def _fetch_mask_kernel(
    meta_ptr,
    mask_ptr,
    stamp_ptr,
    here_ptr,
    words,
    stride_mask,
    THREADS: tl.constexpr,
    BLOCK_W: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Bring a row's mask from the host's memory, if it is there.

    meta: [rows, META_WIDTH] int32 (LATE is out). mask: [slots, words] int32 and stamp: [slots] int64, in host memory.
    here: [rows, words] int32 (out). Bytes: vocab / 8 over the bus, in as few requests as there can be, for each row
    that has a mask. Grid: (rows,). The host computes the mask while this pass runs, and stamps it once it is whole; so
    it is looked for as late as may be. Each thread has its own look at the stamp, and all must have seen it.
    """
    row = tl.program_id(0)
    meta_ptr += row * META_WIDTH
    wants, slot = _wants(meta_ptr), tl.load(meta_ptr + SLOT)
    wanted = tl.load(meta_ptr + GENERATION).to(tl.int64) << GENERATION_SHIFT | tl.load(meta_ptr + POSITION)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if wants:
        threads = tl.arange(0, THREADS)
        stamp = tl.load(stamp_ptr + slot + threads * 0, volatile=True)
        if FENCE:  # what is read below is no older than the stamp
            stamp = tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [stamp], dtype=tl.int64, is_pure=False, pack=1
            )
        saw = tl.min((stamp == wanted).to(tl.int32), axis=0)
        offs = tl.arange(0, BLOCK_W)
        inside = offs < tl.where(saw != 0, words, 0)
        found = tl.load(mask_ptr + slot.to(tl.int64) * stride_mask + offs, mask=inside, other=0)
        tl.store(here_ptr + row.to(tl.int64) * words + offs, found, mask=inside)
        tl.store(meta_ptr + LATE, 1 - saw)


@triton.jit
def _mask_kernel(logits_ptr, meta_ptr, here_ptr, vocab, words, stride_logits, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Lower the logits that a row's mask does not allow to the least finite number, if the mask is there.

    logits: [rows, vocab] fp32 (in and out). meta: [rows, META_WIDTH] int32. here: [rows, words] int32.
    Bytes: at most 4 * vocab for each row that has a mask. Grid: (vocab blocks, rows).
    """
    block, row = tl.program_id(0), tl.program_id(1)
    meta_ptr += row * META_WIDTH
    wants = _wants(meta_ptr)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if wants:
        late = tl.load(meta_ptr + LATE, cache_modifier=".cg")  # what lies near may have been read before the wait
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_n = tl.where(late != 0, vocab, offs_n)
        found = tl.load(here_ptr + row.to(tl.int64) * words + (offs_n >> 5), mask=offs_n < vocab, other=-1)
        barred = ((found >> (offs_n & 31)) & 1) == 0
        tl.store(logits_ptr + row.to(tl.int64) * stride_logits + offs_n, -HUGE, mask=barred)


def mask(logits, meta, mask, stamp, sampler, *, pdl=False):
    """Put what the rows' masks do not allow out of reach; rows whose masks are late are marked."""
    rows, vocab = logits.shape
    words = mask.shape[1]
    _fetch_mask_kernel[(rows,)](
        meta,
        mask,
        stamp,
        sampler.mask,
        words,
        mask.stride(0),
        THREADS=32 * WARPS,
        BLOCK_W=max(next_power_of_2(words), 32 * WARPS),
        FENCE=not interpreted(),
        PDL=pdl,
        **options(WARPS, pdl),
    )
    _mask_kernel[(cdiv(vocab, BLOCK), rows)](
        logits,
        meta,
        sampler.mask,
        vocab,
        words,
        logits.stride(0),
        BLOCK_N=BLOCK,
        PDL=pdl,
        **options(4, pdl),
    )


def mask_ref(logits, meta, mask, stamp, sampler):
    """mask in torch."""
    for row in running(meta, logits.shape[0]):
        state = meta[row].tolist()
        if state[m.FLAGS] & m.FLAG_MASK and state[m.POSITION] + 1 >= state[m.N_KNOWN]:
            slot = state[m.SLOT]
            late = int(stamp[slot]) != m.mask_stamp(state[m.GENERATION], state[m.POSITION])
            meta[row, m.LATE] = int(late)
            if not late:
                sampler.mask[row] = mask[slot]
                bits = mask[slot][:, None] >> torch.arange(32, dtype=torch.int32) & 1
                barred = bits.flatten()[: logits.shape[1]] == 0
                logits[row].masked_fill_(barred.to(logits.device), -HUGE.value)


def mask_bytes(logits, meta, mask, stamp, sampler) -> int:
    return logits.nbytes + mask.nbytes


MASK = Op(mask, mask_ref, mask_bytes, (_fetch_mask_kernel, _mask_kernel))
