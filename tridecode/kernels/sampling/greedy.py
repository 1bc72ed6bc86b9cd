"""greedy: takes the most likely token, and ends the step in the same launch."""

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, cdiv, gdc_launch_dependents, gdc_wait, next_power_of_2, options, running
from ..op import Op
from .finish import (
    NAN_KEY,
    NO_TOKEN,
    arrive,
    block_key,
    finish_step,
    finish_step_ref,
    largest_key,
    packed_id,
    step_state,
)

BLOCK = 2048  # Number of tokens of the vocabulary that a program compares.
WARPS = 8


@triton.jit
def _greedy_kernel(
    logits_ptr,
    meta_ptr,
    tokens_ptr,
    out_ptr,
    keys_ptr,
    counter_ptr,
    sampled_ptr,
    vocab,
    stride_logits,
    stride_tokens,
    stride_keys,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    SAMPLE_ONLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Take the lowest id among the largest raw logits. The last program of a row to arrive ends its step.

    A program reads one block of a row. Grid: (vocab blocks, rows). Moves 4 * vocab bytes per row.
    A logit and its id are packed into one int64, so the largest key is the result in any order of arrival, ties
    included. A NaN or an infinity has the largest key of all.

    Args:
        logits_ptr: [rows, vocab] fp32.
        meta_ptr: [rows, META_WIDTH] int32 (in and out).
        tokens_ptr: [slots, capacity + 1] int32 (in and out).
        out_ptr: [slots, RING] int64 (output).
        keys_ptr: [rows, >= blocks] int64 (scratch).
        counter_ptr: [rows, 2] int32, zero (scratch).
        sampled_ptr: [rows] int32 (output), a token or NO_TOKEN. With SAMPLE_ONLY it replaces the other outputs, and the
            step does not end.
    """
    if PDL:
        gdc_launch_dependents()
    block, row = tl.program_id(0), tl.program_id(1)
    blocks = tl.num_programs(0)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    state = step_state(row, meta_ptr, tokens_ptr, stride_tokens)
    if PDL:
        gdc_wait()
    if status == RUN:
        keys_ptr += row * stride_keys
        offs_n = block * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < vocab
        x = tl.load(logits_ptr + row.to(tl.int64) * stride_logits + offs_n, mask=mask_n, other=0.0)
        tl.store(keys_ptr + block, block_key(x, x, offs_n, mask_n))
        if arrive(counter_ptr + 2 * row, blocks):
            key = largest_key(keys_ptr, blocks, BLOCKS)
            if SAMPLE_ONLY:
                tl.store(sampled_ptr + row, tl.where(key == NAN_KEY, NO_TOKEN, packed_id(key)))
            else:
                finish_step(
                    row,
                    packed_id(key),
                    key == NAN_KEY,
                    state,
                    meta_ptr,
                    tokens_ptr,
                    None,
                    out_ptr,
                    None,
                    None,
                    None,
                    stride_tokens,
                    0,
                    0,
                    COUNT=False,
                    LOGPROBS=False,
                    FENCE=False,
                    MASKED=MASKED,
                )


def greedy(logits, meta, tokens, out, sampler, masked=False, sampled=None, *, pdl=False):
    """Take the most likely token of each row of logits and end the step.

    Args:
        masked: Whether `mask` ran before in this pass.
        sampled: [rows] int32. If it is not None, it receives the tokens, and `accept` ends the step.
    """
    rows, vocab = logits.shape
    blocks = cdiv(vocab, BLOCK)
    _greedy_kernel[(blocks, rows)](
        logits,
        meta,
        tokens,
        out,
        sampler.keys,
        sampler.counter,
        sampled,
        vocab,
        logits.stride(0),
        tokens.stride(0),
        sampler.keys.stride(0),
        BLOCK_N=BLOCK,
        BLOCKS=next_power_of_2(blocks),
        MASKED=masked,
        SAMPLE_ONLY=sampled is not None,
        PDL=pdl,
        **options(WARPS, pdl),
    )


def greedy_ref(logits, meta, tokens, out, sampler, masked=False, sampled=None):
    """Compute `greedy` in torch."""
    for row in running(meta, logits.shape[0]):
        bad = not bool(torch.isfinite(logits[row]).all())
        token = 0 if bad else int(logits[row].argmax())
        if sampled is not None:
            sampled[row] = NO_TOKEN.value if bad else token
            continue
        finish_step_ref(row, token, bad, logits, meta, tokens, None, out, masked=masked)


def greedy_bytes(logits, meta, tokens, out, sampler, masked=False, sampled=None) -> int:
    """Return the bytes that a launch moves."""
    return logits.nbytes


GREEDY = Op(greedy, greedy_ref, greedy_bytes, (_greedy_kernel,))
