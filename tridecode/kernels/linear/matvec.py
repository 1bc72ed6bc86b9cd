"""matvec: one row of activations times a weight matrix, with the work around it fused.

qkv: norm scale in, bias. o_proj and down: residual add, and the next norm prepared. lm_head: norm scale in.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, options, running
from ..op import Op
from .blocks import RowBlocks
from .tiles import dot_tiles, load_rows, load_tiles


@dataclass(frozen=True)
class MatvecConfig(RowBlocks):
    """A program takes block_n whole rows at a time.

    registers: the most a thread may use, 0 for no bound. programs: how many share the rows, each taking its next ones
    while it sums; 0 for one program each block_n rows.
    """

    block_n: int
    num_warps: int
    registers: int = 0
    programs: int = 0


@triton.jit
def _matvec_kernel(
    meta_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    norm_ptr,
    normed_ptr,
    sumsq_ptr,
    eps,
    stride_xm,
    stride_om,
    stride_normed,
    stride_sumsq,
    N: tl.constexpr,
    K: tl.constexpr,
    N_SUMSQ: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """out = x @ weight.T, scaled by the norm of x's source, plus bias; or out += it, preparing the next norm.

    meta: [rows, META_WIDTH] int32; x: [rows, K]; weight: [N, K]; bias: [N]; sumsq: [rows, partials] fp32, read when
    N_SUMSQ > 0; out: [rows, N] fp32 (output). RESIDUAL: out is the residual stream; norm: [N]; outputs normed:
    [rows, N] = out * norm, and sumsq, one partial sum a program, in fixed order so that steps are bit-equal. There is
    no bias then. Moves N * K weight bytes. Grid (PROGRAMS, rows).
    All of a program's first rows are in flight before the wait. BLOCK_K is one 16-byte load a thread, so that the tiles
    of x [1, BLOCK_K] have the weights' own layout: anything else would be converted through shared memory.
    """
    pid = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    offs_n = pid * BLOCK_N + tl.arange(0, BLOCK_N)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    w = load_rows(weight_ptr, offs_n, N, K, BLOCK_K, N % BLOCK_N != 0)
    extra_ptr = bias_ptr if HAS_BIAS else norm_ptr
    if HAS_BIAS or RESIDUAL:
        extra = tl.load(extra_ptr + offs_n, mask=offs_n < N, other=0.0)
    if PDL:
        gdc_wait()
    if status != RUN:
        return
    # Every load that depends on the predecessor is issued here, so that their latencies overlap.
    x = load_tiles(x_ptr + row * stride_xm, True, K, BLOCK_K, False, "")
    if N_SUMSQ > 0:
        offs_s = tl.arange(0, SUMSQ_BLOCK)
        partials = tl.load(sumsq_ptr + row * stride_sumsq + offs_s, mask=offs_s < N_SUMSQ, other=0.0)
        scale = tl.rsqrt(tl.sum(partials, 0) / K + eps)
    sumsq = 0.0
    for turn in range((BLOCKS + PROGRAMS - 1) // PROGRAMS):
        offs_n = (pid + turn * PROGRAMS) * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_n = offs_n < N
        out_ptrs = out_ptr + row * stride_om + offs_n
        if RESIDUAL:
            residual = tl.load(out_ptrs, mask=mask_n, other=0.0)
        w_next = w
        if HAS_BIAS or RESIDUAL:
            extra_next = extra
        if BLOCKS > PROGRAMS:  # the next rows are in flight while these are summed
            offs_next = offs_n + PROGRAMS * BLOCK_N
            w_next = load_rows(weight_ptr, offs_next, N, K, BLOCK_K, True)
            if HAS_BIAS or RESIDUAL:
                extra_next = tl.load(extra_ptr + offs_next, mask=offs_next < N, other=0.0)
        y = dot_tiles(w, x, BLOCK_N, K, BLOCK_K)
        if N_SUMSQ > 0:
            y = y * scale
        if HAS_BIAS:
            y += extra.to(tl.float32)
        if RESIDUAL:
            y += residual
            normed = (y * extra.to(tl.float32)).to(normed_ptr.dtype.element_ty)
            tl.store(normed_ptr + row * stride_normed + offs_n, normed, mask=mask_n)
            sumsq += tl.sum(tl.where(mask_n, y * y, 0.0), 0)
        tl.store(out_ptrs, y, mask=mask_n)
        w = w_next
        if HAS_BIAS or RESIDUAL:
            extra = extra_next
    if RESIDUAL:
        tl.store(sumsq_ptr + row * stride_sumsq + pid, sumsq)


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, config, pdl):
    weight, bias = linear.weight, linear.bias
    N, K = weight.shape
    spare = out  # stands in for pointers this variant does not read
    blocks, programs = config.grid(N)
    _matvec_kernel[(programs, out.shape[0])](
        meta,
        x,
        weight,
        spare if bias is None else bias,
        out,
        norm if residual else spare,
        normed if residual else spare,
        sumsq if sumsq is not None else spare,
        eps,
        x.stride(0),
        out.stride(0),
        normed.stride(0) if residual else 0,
        sumsq.stride(0) if sumsq is not None else 0,
        N,
        K,
        n_sumsq,
        triton.next_power_of_2(max(n_sumsq, 1)),
        bias is not None,
        residual,
        config.block_n,
        256 * config.num_warps,
        blocks,
        programs,
        pdl,
        **options(config.num_warps, pdl, config.registers),
    )


def matvec_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """out[row] = linear(normed[row] * rsqrt(mean square)), the mean square from n_sumsq partial sums of squares."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, config, pdl)


def matvec_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, config, pdl=False):
    """hidden[row] += linear(x[row]); normed = hidden * norm; leaves `residual_partials(N, config)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, config, pdl)


def residual_partials(N: int, config) -> int:
    """Partial sums of squares that matvec_residual leaves: one a program."""
    return config.grid(N)[1]


def matvec_normed_ref(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None):
    for row in running(meta, out.shape[0]):
        x = normed[row].float()
        scale = torch.rsqrt(sumsq[row, :n_sumsq].sum() / x.numel() + eps)
        y = (linear.matrix() @ x) * scale
        out[row] = y if linear.bias is None else y + linear.bias.float()


def matvec_residual_ref(meta, x, linear, hidden, norm, normed, sumsq, split=None):
    for row in running(meta, hidden.shape[0]):
        hidden[row] += linear.matrix() @ x[row].float()
        normed[row] = (hidden[row] * norm.float()).to(normed.dtype)
        sumsq[row] = 0
        sumsq[row, 0] = hidden[row].square().sum()


def matvec_bytes(meta, x, linear, out, *rest) -> int:
    """The weights once for all rows, the rows in and out."""
    return linear.nbytes + x.nbytes + out.nbytes


MATVEC_NORMED = Op(matvec_normed, matvec_normed_ref, matvec_bytes, (_matvec_kernel,), outputs=("out",))
MATVEC_RESIDUAL = Op(
    matvec_residual, matvec_residual_ref, matvec_bytes, (_matvec_kernel,), outputs=("hidden", "normed", "sumsq")
)
