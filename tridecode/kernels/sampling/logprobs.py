"""logprobs: computes log-sum-exp and the most likely tokens of the raw logits, in one launch before sample's."""

import torch
import triton
import triton.language as tl

from ... import layout as m
from ...layout import MAX_LOGPROBS
from ..common import (
    META_WIDTH,
    N_LOGPROBS,
    RING,
    RUN,
    SLOT,
    STATUS,
    STEP,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    options,
    running,
)
from ..op import Op
from .finish import LOGPROBS_WIDTH, LOWEST, arrive, pack, packed_id, packed_value
from .sample import LOGPROBS_BLOCK, LOGPROBS_KEEP

_MAX_LOGPROBS = tl.constexpr(MAX_LOGPROBS)


@triton.jit
def _logprobs_kernel(
    logits_ptr,
    meta_ptr,
    logprobs_ptr,
    ids_ptr,
    counter_ptr,
    lse_ptr,
    top_ptr,
    block_lse_ptr,
    vocab,
    stride_logits,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the log-sum-exp and the largest logits of a row.

    A program reads one block of a row, and stores the block's largest logits and its part of the sum. The last program
    of a row to arrive merges them. Grid: (vocab blocks, rows). Moves 4 * vocab bytes per row.
    A logit packed with its id sorts as one int64, lower ids first among equals. If the logits contain a NaN or a
    positive infinity, nothing is written to the rings.

    Args:
        logits_ptr: [rows, vocab] fp32.
        meta_ptr: [rows, META_WIDTH] int32.
        logprobs_ptr: [slots, RING, LOGPROBS_WIDTH] fp32 (output, all values except the first).
        ids_ptr: [slots, RING, MAX_LOGPROBS] int32 (output).
        lse_ptr: [rows] fp32 (output).
        counter_ptr: [rows, 2] int32, zero (scratch).
        top_ptr: [rows, blocks, KEEP] int64 (scratch).
        block_lse_ptr: [rows, blocks, 2] fp32 (scratch), maximum and sum of exponentials.
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    meta_ptr += row * META_WIDTH
    status, slot = tl.load(meta_ptr + STATUS), tl.load(meta_ptr + SLOT)
    count = tl.load(meta_ptr + N_LOGPROBS)
    step = tl.load(meta_ptr + STEP)
    if PDL:
        gdc_wait()
    if status == RUN:
        top_ptr += row * blocks * KEEP
        block_lse_ptr += row * blocks * 2
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < vocab
        x = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + offs_n, mask=mask_n, other=float("-inf"))
        largest = tl.max(x, axis=0)
        tl.store(block_lse_ptr + 2 * block, largest)
        tl.store(block_lse_ptr + 2 * block + 1, tl.sum(tl.exp(x - largest), axis=0))
        keys = tl.where(mask_n, pack(x, offs_n), LOWEST)
        for i in range(count):
            best = tl.max(keys, axis=0)
            keys = tl.where(keys == best, LOWEST, keys)
            tl.store(top_ptr + block * KEEP + i, best)
        if arrive(counter_ptr + 2 * row + 1, blocks):
            offs_b = tl.arange(0, BLOCKS)
            part = tl.load(block_lse_ptr + 2 * offs_b, mask=offs_b < blocks, other=float("-inf"), cache_modifier=".cg")
            total = tl.load(block_lse_ptr + 2 * offs_b + 1, mask=offs_b < blocks, other=0.0, cache_modifier=".cg")
            largest = tl.max(part, axis=0)
            lse = largest + tl.log(tl.sum(total * tl.exp(part - largest), axis=0))
            tl.store(lse_ptr + row, lse)
            offs_c = tl.arange(0, BLOCKS * KEEP)
            left = (offs_c < blocks * KEEP) & (offs_c % KEEP < count)
            merged = tl.load(top_ptr + offs_c, mask=left, other=LOWEST, cache_modifier=".cg")
            entry = slot * RING + (step & (RING - 1))
            for i in range(count):
                best = tl.max(merged, axis=0)
                merged = tl.where(merged == best, LOWEST, merged)
                shown = (best != LOWEST) & (lse == lse)
                tl.store(logprobs_ptr + entry * LOGPROBS_WIDTH + 1 + i, packed_value(best) - lse, mask=shown)
                tl.store(ids_ptr + entry * _MAX_LOGPROBS + i, packed_id(best), mask=shown)


def logprobs(logits, meta, out_logprobs, out_top_ids, sampler, *, pdl=False):
    """Write the most likely tokens of each row of logits to the rings, and its log-sum-exp to the sampler's buffers."""
    rows, vocab = logits.shape
    blocks = cdiv(vocab, LOGPROBS_BLOCK)
    _logprobs_kernel[(blocks, rows)](
        logits,
        meta,
        out_logprobs,
        out_top_ids,
        sampler.counter,
        sampler.lse,
        sampler.top_keys,
        sampler.block_lse,
        vocab,
        logits.stride(0),
        BLOCK_N=LOGPROBS_BLOCK,
        BLOCKS=next_power_of_2(blocks),
        KEEP=LOGPROBS_KEEP,
        PDL=pdl,
        **options(8, pdl),
    )


def logprobs_ref(logits, meta, out_logprobs, out_top_ids, sampler):
    """Compute `logprobs` in torch."""
    for row in running(meta, logits.shape[0]):
        x, state = logits[row], meta[row].tolist()
        lse = sampler.lse[row] = x.logsumexp(0)
        count = min(state[m.N_LOGPROBS], x.numel())
        if count and bool(torch.isfinite(lse)):
            least = x.topk(count).values[-1]
            # The ids are ascending, so that the stable sort puts lower ids first.
            ids = (x >= least).nonzero().flatten()
            ids = ids[x[ids].sort(descending=True, stable=True).indices[:count]]
            slot, entry = state[m.SLOT], state[m.STEP] % m.RING
            out_logprobs[slot, entry, 1 : 1 + count] = x[ids] - lse
            out_top_ids[slot, entry, :count] = ids.int()


def logprobs_bytes(logits, meta, out_logprobs, out_top_ids, sampler) -> int:
    """Return the bytes that a launch moves."""
    return logits.nbytes


LOGPROBS = Op(logprobs, logprobs_ref, logprobs_bytes, (_logprobs_kernel,))
