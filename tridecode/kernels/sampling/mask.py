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
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    options,
    running,
)
from ..op import Op
from .finish import GENERATION_SHIFT
from .mass import HUGE

BLOCK = 1024  # tokens of the vocabulary a program
_SAW = tl.constexpr(1 << 16)  # added to the counter by a program that found the mask; fewer programs share a row


@triton.jit
def _mask_kernel(
    logits_ptr,
    meta_ptr,
    mask_ptr,
    stamp_ptr,
    counter_ptr,
    vocab,
    stride_logits,
    stride_mask,
    BLOCK_N: tl.constexpr,
    FENCE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Lower the logits that a row's mask does not allow to the least finite number, if the mask is there.

    logits: [rows, vocab] fp32 (in and out). meta: [rows, META_WIDTH] int32 (LATE is out). mask: [slots, words] int32
    and stamp: [slots] int64, in host memory. counter: [rows, 2] int32, zero (scratch).
    Bytes: vocab / 8 over the bus and at most 4 * vocab, for each row that has a mask. Grid: (vocab blocks, rows).
    The host computes the mask while this pass runs, and stamps it once it is whole; so it is looked for as late as may
    be. Programs may see it come between them: the row has it only if all of them do, which the last to arrive says.
    A program is one warp, so that it cannot see two stamps itself.
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    meta_ptr += row * META_WIDTH
    flags, status, slot = tl.load(meta_ptr + FLAGS), tl.load(meta_ptr + STATUS), tl.load(meta_ptr + SLOT)
    position = tl.load(meta_ptr + POSITION)
    wanted = tl.load(meta_ptr + GENERATION).to(tl.int64) << GENERATION_SHIFT | position
    draws = position + 1 >= tl.load(meta_ptr + N_KNOWN)  # else its token is given
    if PDL:
        gdc_wait()
    if (status == RUN) & ((flags & FLAG_MASK) != 0) & draws:
        lanes = tl.arange(0, 32) >> 5
        stamp = tl.load(stamp_ptr + slot + lanes, volatile=True)
        if FENCE:  # what is read below is no older than the stamp
            stamp = tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [stamp], dtype=tl.int64, is_pure=False, pack=1
            )
        saw = tl.min((stamp == wanted).to(tl.int32), axis=0)
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        end = tl.where(saw != 0, vocab, 0)
        words = tl.load(mask_ptr + slot.to(tl.int64) * stride_mask + (offs_n >> 5), mask=offs_n < end, other=-1)
        barred = ((words >> (offs_n & 31)) & 1) == 0
        tl.store(logits_ptr + row.to(tl.int64) * stride_logits + offs_n, -HUGE, mask=barred)
        arrived = tl.atomic_add(counter_ptr + 2 * row, 1 + saw * _SAW) + 1 + saw * _SAW
        if (arrived & (_SAW - 1)) == blocks:
            tl.store(counter_ptr + 2 * row, 0)
            tl.store(meta_ptr + LATE, ((arrived >> 16) != blocks).to(tl.int32))


def mask(logits, meta, mask, stamp, sampler, *, pdl=False):
    """Put what the rows' masks do not allow out of reach; rows whose masks are late are marked."""
    rows, vocab = logits.shape
    _mask_kernel[(triton.cdiv(vocab, BLOCK), rows)](
        logits,
        meta,
        mask,
        stamp,
        sampler.counter,
        vocab,
        logits.stride(0),
        mask.stride(0),
        BLOCK_N=BLOCK,
        FENCE=not interpreted(),
        PDL=pdl,
        **options(1, pdl),
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
                bits = mask[slot][:, None] >> torch.arange(32, dtype=torch.int32) & 1
                barred = bits.flatten()[: logits.shape[1]] == 0
                logits[row].masked_fill_(barred.to(logits.device), -HUGE.value)


def mask_bytes(logits, meta, mask, stamp, sampler) -> int:
    return logits.nbytes + mask.nbytes


MASK = Op(mask, mask_ref, mask_bytes, (_mask_kernel,))
