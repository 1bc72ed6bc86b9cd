"""matmul for up to 64 rows: tiles of the rows and of the weights meet in shared memory, brought there by TMA.

The forms and arguments of matvec and gate_up. A program multiplies all rows by BLOCK_N rows of the weights and adds
their columns in one order, without a second program: so nothing is left to be added between programs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from .gate_up import gate_up_bytes, gate_up_ref
from .matvec import matvec_bytes, matvec_normed_ref, matvec_residual_ref


@dataclass(frozen=True)
class TilesConfig:
    """Launch config of a product of up to 64 rows by tiles of block_n rows (of gate and of up each) and block_k columns
    of the weights, `stages` of them in flight. block_m: rows of a tile, if a pass has fewer."""

    block_n: int = 32
    block_k: int = 128
    stages: int = 4
    num_warps: int = 4
    block_m: int = 16


@triton.jit
def _matmul_tiles_kernel(
    meta_ptr,
    x_desc,
    weight_desc,
    bias_ptr,
    out_ptr,
    norm_ptr,
    normed_ptr,
    sumsq_ptr,
    eps,
    stride_om,
    stride_normed,
    stride_sumsq,
    rows,
    N,
    n_sumsq,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """As _matmul_kernel, for BLOCK_M rows of x, of which the first `rows` count; weights in tiles [BLOCK_N, BLOCK_K].

    x: [BLOCK_M, K] and weight: [N, K] (GATED: [2 * N, K]) as descriptors; the other arguments as there. STAGES tiles
    of each are in flight. Grid cdiv(N, BLOCK_N).
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
    some = tl.max((status == RUN).to(tl.int32), 0)
    mask_n = (offs_n < N)[None, :]
    extra_ptr = bias_ptr if HAS_BIAS else norm_ptr
    if HAS_BIAS or RESIDUAL:
        extra = tl.load(extra_ptr + offs_n[None, :], mask=mask_n, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if some == 0:
        return
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        x = x_desc.load([0, k])
        w = weight_desc.load([pid * BLOCK_N, k])
        if DOT_FP32:
            x, w = x.to(tl.float32), w.to(tl.float32)
        acc = tl.dot(x, w.T, acc, input_precision="ieee")
        if GATED:
            w = weight_desc.load([N + pid * BLOCK_N, k])
            if DOT_FP32:
                w = w.to(tl.float32)
            up = tl.dot(x, w.T, up, input_precision="ieee")
    mask = (status == RUN)[:, None] & mask_n
    out_ptrs = out_ptr + offs_m[:, None] * stride_om + offs_n[None, :]
    if NORMED:
        offs_s = tl.arange(0, SUMSQ_BLOCK)[None, :]
        mask_s = (offs_s < n_sumsq) & (offs_m < rows)[:, None]
        partials = tl.load(sumsq_ptr + offs_m[:, None] * stride_sumsq + offs_s, mask=mask_s, other=0.0)
        scale = tl.rsqrt(tl.sum(partials, 1) / K + eps)[:, None]
        acc = acc * scale
    if GATED:
        acc = acc * tl.sigmoid(acc) * (up * scale)
    if HAS_BIAS:
        acc += extra
    if RESIDUAL:
        acc += tl.load(out_ptrs, mask=mask, other=0.0)
        normed_ptrs = normed_ptr + offs_m[:, None] * stride_normed + offs_n[None, :]
        tl.store(normed_ptrs, (acc * extra).to(normed_ptr.dtype.element_ty), mask=mask)
        sumsq = tl.sum(tl.where(mask_n, acc * acc, 0.0), 1)
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, sumsq, mask=status == RUN)
    tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, gated, config, pdl):
    weight, bias = linear.weight, linear.bias
    rows, N = out.shape
    K, block_m = weight.shape[1], max(triton.next_power_of_2(rows), config.block_m)
    spare = out  # stands in for pointers this variant does not read
    # A tile that reached beyond the buffer would be slower than one whose last rows nobody needs.
    whole = torch.as_strided(x, (block_m, K), (x.stride(0), 1))
    _matmul_tiles_kernel[(triton.cdiv(N, config.block_n),)](
        meta,
        TensorDescriptor.from_tensor(whole, [block_m, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]),
        spare if bias is None else bias,
        out,
        norm if residual else spare,
        normed if residual else spare,
        sumsq,
        eps,
        out.stride(0),
        normed.stride(0) if residual else 0,
        sumsq.stride(0),
        rows,
        N,
        n_sumsq,
        K,
        n_sumsq > 0,
        triton.next_power_of_2(max(n_sumsq, 1)),
        bias is not None,
        residual,
        gated,
        block_m,
        config.block_n,
        config.block_k,
        config.stages,
        pdl,
        interpreted(),
        **options(config.num_warps, pdl),
    )


def tiles_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """matvec_normed for up to 64 rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, False, config, pdl)


def tiles_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, config, pdl=False):
    """matvec_residual for up to 64 rows at once; leaves `tiles_partials(N, config)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, False, config, pdl)


def tiles_gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """gate_up for up to 64 rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, True, config, pdl)


def tiles_partials(N: int, config) -> int:
    """Partial sums of squares that tiles_residual leaves: one a program."""
    return triton.cdiv(N, config.block_n)


_KERNELS = (_matmul_tiles_kernel,)
TILES_NORMED = Op(tiles_normed, matvec_normed_ref, matvec_bytes, _KERNELS, outputs=("out",))
TILES_RESIDUAL = Op(tiles_residual, matvec_residual_ref, matvec_bytes, _KERNELS, outputs=("hidden", "normed", "sumsq"))
TILES_GATE_UP = Op(tiles_gate_up, gate_up_ref, gate_up_bytes, _KERNELS, outputs=("out",))
