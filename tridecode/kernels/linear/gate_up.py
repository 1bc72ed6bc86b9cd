"""gate_up: both input projections of the MLP, SiLU and their product."""

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, options, running
from ..op import Op
from .tiles import dot_tiles, load_rows, load_tiles


@triton.jit
def _gate_up_kernel(
    meta_ptr,
    x_ptr,
    weight_ptr,
    out_ptr,
    sumsq_ptr,
    eps,
    stride_xm,
    stride_om,
    stride_sumsq,
    N: tl.constexpr,
    K: tl.constexpr,
    N_SUMSQ: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = silu(gate(x)) * up(x), x scaled by its norm.

    meta: [rows, META_WIDTH] int32; x: [rows, K]; weight: [2 * N, K], gate rows then up rows; sumsq: [rows, partials]
    fp32; out: [rows, N] (output). Moves 2 * N * K weight bytes. Grid (PROGRAMS, rows).
    A program owns the same rows of both halves, so the product needs no exchange.
    """
    pid = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    up_ptr = weight_ptr + N * K
    gate = load_rows(weight_ptr, offs_n, N, K, BLOCK_K, N % BLOCK_N != 0)
    up = load_rows(up_ptr, offs_n, N, K, BLOCK_K, N % BLOCK_N != 0)
    if PDL:
        gdc_wait()
    if status != RUN:
        return
    x = load_tiles(x_ptr + row * stride_xm, True, K, BLOCK_K, False, "")
    offs_s = tl.arange(0, SUMSQ_BLOCK)
    partials = tl.load(sumsq_ptr + row * stride_sumsq + offs_s, mask=offs_s < N_SUMSQ, other=0.0)
    scale = tl.rsqrt(tl.sum(partials, 0) / K + eps)
    for turn in range((BLOCKS + PROGRAMS - 1) // PROGRAMS):
        offs_n = (pid + turn * PROGRAMS) * BLOCK_N + tl.arange(0, BLOCK_N)
        gate_next, up_next = gate, up
        if BLOCKS > PROGRAMS:  # the next rows are in flight while these are summed
            gate_next = load_rows(weight_ptr, offs_n + PROGRAMS * BLOCK_N, N, K, BLOCK_K, True)
            up_next = load_rows(up_ptr, offs_n + PROGRAMS * BLOCK_N, N, K, BLOCK_K, True)
        g = dot_tiles(gate, x, BLOCK_N, K, BLOCK_K) * scale
        y = g * tl.sigmoid(g) * (dot_tiles(up, x, BLOCK_N, K, BLOCK_K) * scale)
        tl.store(out_ptr + row * stride_om + offs_n, y.to(out_ptr.dtype.element_ty), mask=offs_n < N)
        gate, up = gate_next, up_next


def gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """out[row] = silu(gate) * up of the normalised row, the mean square from n_sumsq partial sums of squares."""
    rows, N = out.shape
    K = linear.in_features
    blocks, programs = config.grid(N)
    _gate_up_kernel[(programs, rows)](
        meta,
        normed,
        linear.weight,
        out,
        sumsq,
        eps,
        normed.stride(0),
        out.stride(0),
        sumsq.stride(0),
        N,
        K,
        n_sumsq,
        triton.next_power_of_2(n_sumsq),
        config.block_n,
        256 * config.num_warps,
        blocks,
        programs,
        pdl,
        **options(config.num_warps, pdl, config.registers),
    )


def gate_up_ref(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None):
    for row in running(meta, out.shape[0]):
        x = normed[row].float()
        scale = torch.rsqrt(sumsq[row, :n_sumsq].sum() / x.numel() + eps)
        gate, up = ((linear.matrix() @ x) * scale).chunk(2)
        out[row] = (torch.nn.functional.silu(gate) * up).to(out.dtype)


def gate_up_bytes(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None) -> int:
    """The weights once for all rows, the rows in and out."""
    return linear.nbytes + normed.nbytes + out.nbytes


GATE_UP = Op(gate_up, gate_up_ref, gate_up_bytes, (_gate_up_kernel,), outputs=("out",))
