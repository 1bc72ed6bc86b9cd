"""read: stream through memory and keep nothing; the denominator of every percentage of bandwidth."""

import statistics

import torch
import triton
import triton.language as tl

from ...kernels.common import cdiv, options


@triton.jit
def _read_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    """Sum BLOCK * TURNS elements a program. x: [n] bf16; out: [programs] fp32 (output). Moves 2 n bytes."""
    pid = tl.program_id(0)
    acc = tl.zeros([BLOCK], tl.float32)
    offs = pid.to(tl.int64) * BLOCK * TURNS + tl.arange(0, BLOCK)
    for _ in range(TURNS):
        acc += tl.load(x_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
        offs += BLOCK
    tl.store(out_ptr + pid, tl.sum(acc, 0))


def read(x, out, block=2048, turns=8, num_warps=4):
    """out[program] = sum of its part of x; out holds at least cdiv(n, block * turns) elements."""
    _read_kernel[(cdiv(x.numel(), block * turns),)](x, out, x.numel(), block, turns, **options(num_warps))


def measure_read_bandwidth(device, nbytes: int = 2**33, repeats: int = 9) -> float:
    """Bytes per second of the best of a few launch shapes over `nbytes` of random bf16, median of `repeats` each."""
    x = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device).normal_()
    out = torch.empty(cdiv(x.numel(), 2048 * 4), device=device)
    best = 0.0
    for block, turns, warps in ((2048, 8, 4), (4096, 8, 8), (2048, 32, 4), (8192, 4, 8)):
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            read(x, out, block, turns, warps)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        best = max(best, nbytes / statistics.median(times))
    return best
