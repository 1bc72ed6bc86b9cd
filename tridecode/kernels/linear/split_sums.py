"""Buffers of programs that share the columns of a weight. Each program stores its sums, and the last one adds them."""

from dataclasses import dataclass

import torch

from ..common import cdiv

MAX_SPLIT = 8  # Maximum number of programs that share the columns of a weight.
MAX_BLOCK_N = 256


@dataclass(frozen=True, repr=False)
class SplitBuffers:
    """Scratch of matmul_wide and matmul_hopper. `counter` must be zero before a launch, and is zero after it."""

    sums: torch.Tensor  # fp32 [rows, MAX_SPLIT * (outputs + MAX_BLOCK_N)]
    counter: torch.Tensor  # int32 [rows, outputs / 16]: number of programs that have arrived.


def make_buffers(outputs: int, rows: int, device) -> SplitBuffers:
    """Allocate the buffers for weights of up to `outputs` rows and passes of up to `rows` rows."""
    return SplitBuffers(
        torch.zeros(rows, MAX_SPLIT * (outputs + MAX_BLOCK_N), device=device),
        torch.zeros(rows, cdiv(outputs, 16), dtype=torch.int32, device=device),
    )
