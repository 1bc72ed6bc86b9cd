"""mask: lowers the logits of tokens that a row's grammar forbids, before all other processing (structured output)."""

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
from .mass import MAX_FP32

BLOCK = 4096  # Number of tokens of the vocabulary that a program masks.
WARPS = 8  # Number of warps of a program that fetches the mask of a row.


@triton.jit
def _needs_mask(meta_ptr):
    """Return whether the row samples a token that its mask must allow."""
    # Whether the next token is sampled, because it is not known.
    draws = tl.load(meta_ptr + POSITION) + 1 >= tl.load(meta_ptr + N_KNOWN)
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
    """Copy a row's mask from host memory, if the host has completed it. A program copies the mask of one row.

    Grid: (rows,). Moves vocab / 8 bytes over the bus for each row with a mask, in as few transactions as possible.
    The host computes the mask while this pass runs, and stamps it after it is complete. The kernel therefore runs as
    late as possible. Each thread reads the stamp itself, and all must see the expected value.

    Args:
        meta_ptr: [rows, META_WIDTH] int32 (LATE is an output).
        mask_ptr: [slots, words] int32 in host memory.
        stamp_ptr: [slots] int64 in host memory.
        here_ptr: [rows, words] int32 (output).
    """
    row = tl.program_id(0)
    meta_ptr += row * META_WIDTH
    needs_mask, slot = _needs_mask(meta_ptr), tl.load(meta_ptr + SLOT)
    expected = tl.load(meta_ptr + GENERATION).to(tl.int64) << GENERATION_SHIFT | tl.load(meta_ptr + POSITION)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if needs_mask:
        threads = tl.arange(0, THREADS)
        stamp = tl.load(stamp_ptr + slot + threads * 0, volatile=True)
        if FENCE:  # Orders the load of the mask after the load of the stamp.
            stamp = tl.inline_asm_elementwise(
                "fence.acq_rel.sys; mov.b64 $0, $1;", "=l,l", [stamp], dtype=tl.int64, is_pure=False, pack=1
            )
        saw = tl.min((stamp == expected).to(tl.int32), axis=0)
        offs = tl.arange(0, BLOCK_W)
        inside = offs < tl.where(saw != 0, words, 0)
        words_here = tl.load(mask_ptr + slot.to(tl.int64) * stride_mask + offs, mask=inside, other=0)
        tl.store(here_ptr + row.to(tl.int64) * words + offs, words_here, mask=inside)
        tl.store(meta_ptr + LATE, 1 - saw)


@triton.jit
def _mask_kernel(logits_ptr, meta_ptr, here_ptr, vocab, words, stride_logits, BLOCK_N: tl.constexpr, PDL: tl.constexpr):
    """Set the logits that a row's mask forbids to the lowest finite number, unless the mask is late.

    A program masks one block of a row. Grid: (vocab blocks, rows). Moves at most 4 * vocab bytes for each row with a
    mask.

    Args:
        logits_ptr: [rows, vocab] fp32 (in and out).
        meta_ptr: [rows, META_WIDTH] int32.
        here_ptr: [rows, words] int32.
    """
    block, row = tl.program_id(0), tl.program_id(1)
    meta_ptr += row * META_WIDTH
    needs_mask = _needs_mask(meta_ptr)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if needs_mask:
        # .cg bypasses the L1 cache. This program may have cached the line before the wait, when it read other fields of
        # meta.
        late = tl.load(meta_ptr + LATE, cache_modifier=".cg")
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_n = tl.where(late != 0, vocab, offs_n)
        words_here = tl.load(here_ptr + row.to(tl.int64) * words + (offs_n >> 5), mask=offs_n < vocab, other=-1)
        barred = ((words_here >> (offs_n & 31)) & 1) == 0
        tl.store(logits_ptr + row.to(tl.int64) * stride_logits + offs_n, -MAX_FP32, mask=barred)


def mask(logits, meta, mask, stamp, sampler, *, pdl=False):
    """Lower the logits that the rows' masks forbid. A row whose mask is late is marked in meta's LATE.

    Args:
        logits: [rows, vocab] fp32 (in and out).
        meta: [rows, META_WIDTH] int32 (LATE is an output).
        mask: [slots, words] int32 in host memory.
        stamp: [slots] int64 in host memory.
    """
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
    """Compute `mask` in torch."""
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
                logits[row].masked_fill_(barred.to(logits.device), -MAX_FP32.value)


def mask_bytes(logits, meta, mask, stamp, sampler) -> int:
    """Return the bytes that a launch moves."""
    return logits.nbytes + mask.nbytes


MASK = Op(mask, mask_ref, mask_bytes, (_fetch_mask_kernel, _mask_kernel))
