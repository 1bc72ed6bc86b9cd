"""Read bandwidth of device memory, measured with a kernel that only reads. All bandwidth percentages refer to it."""

from functools import partial
from statistics import median

import torch
import triton
import triton.language as tl

from ...kernels.common import cdiv, options
from .timing import time_runs


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """Sum BLOCK * TURNS elements in each program. The grid has cdiv(n, BLOCK * TURNS) programs, which read 2 n bytes.

    x_ptr: [n] bf16. out_ptr: [programs] fp32, the sum of each program (output).
    """
    pid = tl.program_id(0)
    acc = tl.zeros([BLOCK], tl.float32)
    offs = pid.to(tl.int64) * BLOCK * TURNS + tl.arange(0, BLOCK)
    for _ in range(TURNS):
        acc += tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        offs += BLOCK
    tl.store(out_ptr + pid, tl.sum(acc, 0))


def read(x, out, block=2048, turns=8, num_warps=4):
    """Launch the read kernel.

    Args:
        x: [n] bf16
        out: fp32, at least cdiv(n, block * turns) elements: one sum for each program (output)
        block: elements that a program loads per iteration
        turns: iterations of each program
        num_warps: warps of each program
    """
    _read_kernel[(cdiv(x.numel(), block * turns),)](x, out, x.numel(), block, turns, **options(num_warps))


def measure_read_bandwidth(device, nbytes: int = 2**33, runs: int = 9) -> float:
    """Return the bytes per second for `nbytes` of random bf16: the highest median of four launch configs."""
    x = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device).normal_()
    out = torch.empty(cdiv(x.numel(), 2048 * 4), device=device)
    configs = ((2048, 8, 4), (4096, 8, 8), (2048, 32, 4), (8192, 4, 8))  # (block, turns, num_warps)
    return max(nbytes / median(time_runs(partial(read, x, out, *config), runs)) for config in configs)
