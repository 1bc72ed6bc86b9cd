"""Sampling inside the step: bias, penalties, temperature, top-k, top-p, min-p and the draw, in five launches."""

from dataclasses import dataclass

import torch

from ..sampling import MAX_LOGPROBS

BLOCK = 1024  # tokens of the vocabulary a program
BINS = 2048  # of one histogram level
LEVELS = 3
LOGPROBS_BLOCK = 4096
LOGPROBS_KEEP = 32  # candidates a program of logprobs leaves: MAX_LOGPROBS, a power of two
STATE = 8


@dataclass(frozen=True)
class SamplerBuffers:
    """Scratch of greedy, sample and logprobs; only `counter` must be zero between launches (it is left so)."""

    keys: torch.Tensor  # int64 [rows, blocks]: maximum of each block of logits, packed with its token id
    counter: torch.Tensor  # int32 [rows, 2]: programs that arrived, of greedy or sample, and of logprobs
    processed: torch.Tensor  # fp32 [rows, vocab]: logits after bias and penalties, before the temperature
    bins: torch.Tensor  # int32 [rows, LEVELS, BINS]: tokens a bin of distance from the maximum
    bin_mass: torch.Tensor  # int64 [rows, BINS]: fixed-point probability mass a bin of the first level
    state: torch.Tensor  # int64 [rows, STATE]: what the filters found
    mass: torch.Tensor  # int64 [rows, blocks]: fixed-point mass each block keeps
    lse: torch.Tensor  # fp32 [rows]: log-sum-exp of the raw logits
    top_keys: torch.Tensor  # int64 [rows, logprobs blocks, LOGPROBS_KEEP]
    block_lse: torch.Tensor  # fp32 [rows, logprobs blocks, 2]: maximum and sum of exponentials


def make_buffers(vocab: int, rows: int, device) -> SamplerBuffers:
    """Allocate the sampler's scratch for logits [rows, vocab]."""
    assert MAX_LOGPROBS <= LOGPROBS_KEEP
    blocks, top_blocks = -(-vocab // BLOCK), -(-vocab // LOGPROBS_BLOCK)

    def zeros(*shape, dtype):
        return torch.zeros(shape, dtype=dtype, device=device)

    return SamplerBuffers(
        keys=zeros(rows, blocks, dtype=torch.int64),
        counter=zeros(rows, 2, dtype=torch.int32),
        processed=zeros(rows, vocab, dtype=torch.float32),
        bins=zeros(rows, LEVELS, BINS, dtype=torch.int32),
        bin_mass=zeros(rows, BINS, dtype=torch.int64),
        state=zeros(rows, STATE, dtype=torch.int64),
        mass=zeros(rows, blocks, dtype=torch.int64),
        lse=zeros(rows, dtype=torch.float32),
        top_keys=zeros(rows, top_blocks, LOGPROBS_KEEP, dtype=torch.int64),
        block_lse=zeros(rows, top_blocks, 2, dtype=torch.float32),
    )
