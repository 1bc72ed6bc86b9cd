"""Greedy sampling: the most likely token, in one launch that also ends the step."""

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, cdiv, gdc_launch_dependents, gdc_wait, next_power_of_2, options, running
from ..op import Op
from .finish import (
    BAD,
    NO_TOKEN,
    arrive,
    block_key,
    finish_step,
    finish_step_ref,
    largest_key,
    packed_id,
    step_state,
)

BLOCK = 2048  # tokens of the vocabulary a program
WARPS = 8


@triton.jit
def _greedy_kernel(
    logits_ptr,
    meta_ptr,
    tokens_ptr,
    out_ptr,
    keys_ptr,
    counter_ptr,
    drawn_ptr,
    vocab,
    stride_logits,
    stride_tokens,
    stride_keys,
    BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    DRAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """The lowest id among the largest raw logits; the last program to arrive ends the step.

    logits: [rows, vocab] fp32. meta: [rows, META_WIDTH] int32 (out). tokens: [slots, capacity + 1] int32 (out). out:
    [slots, RING] int64 (out). keys: [rows, >= blocks] int64 (scratch). counter: [rows, 2] int32, zero (scratch). With
    DRAW instead of all these outputs drawn: [rows] int32 (out), a token or NO_TOKEN; the step does not end.
    Bytes: 4 * vocab a row. Grid: (vocab blocks, rows).
    A logit and its id travel as one int64, so that the largest key is the answer, ties included, in any order of
    arrival; a NaN or an infinity is the largest key of all.
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
            if DRAW:
                tl.store(drawn_ptr + row, tl.where(key == BAD, NO_TOKEN, packed_id(key)))
            else:
                finish_step(
                    row,
                    packed_id(key),
                    key == BAD,
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


def greedy(logits, meta, tokens, out, sampler, masked=False, drawn=None, *, pdl=False):
    """Take the most likely token of each row of logits and end the step; masked: mask came before it; drawn: int32
    [rows], where the tokens go if `accept` is to end it."""
    rows, vocab = logits.shape
    blocks = cdiv(vocab, BLOCK)
    _greedy_kernel[(blocks, rows)](
        logits,
        meta,
        tokens,
        out,
        sampler.keys,
        sampler.counter,
        drawn,
        vocab,
        logits.stride(0),
        tokens.stride(0),
        sampler.keys.stride(0),
        BLOCK_N=BLOCK,
        BLOCKS=next_power_of_2(blocks),
        MASKED=masked,
        DRAW=drawn is not None,
        PDL=pdl,
        **options(WARPS, pdl),
    )


def greedy_ref(logits, meta, tokens, out, sampler, masked=False, drawn=None):
    """greedy in torch."""
    for row in running(meta, logits.shape[0]):
        bad = not bool(torch.isfinite(logits[row]).all())
        token = 0 if bad else int(logits[row].argmax())
        if drawn is not None:
            drawn[row] = NO_TOKEN.value if bad else token
            continue
        finish_step_ref(row, token, bad, logits, meta, tokens, None, out, masked=masked)


def greedy_bytes(logits, meta, tokens, out, sampler, masked=False, drawn=None) -> int:
    return logits.nbytes


GREEDY = Op(greedy, greedy_ref, greedy_bytes, (_greedy_kernel,))
