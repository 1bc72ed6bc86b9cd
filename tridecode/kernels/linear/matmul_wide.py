"""matmul for up to 64 rows: the weights go from memory into the registers where wgmma wants them, 64 rows at a time.

The forms and arguments of matvec and gate_up. The activations are the columns of the product, few as they are, and pass
through shared memory a tile at a time: so little of it is needed that the next kernel fits beside, with its first
weights in flight.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from .gate_up import gate_up_bytes, gate_up_ref
from .matvec import matvec_bytes, matvec_normed_ref, matvec_residual_ref

MAX_SPLIT = 8  # programs that share the columns of a weight matrix
MAX_BLOCK_N = 256


@dataclass(frozen=True, repr=False)
class SplitBuffers:
    """What programs leave that share the columns, for the last of them to add; only `counter` must be zero between
    launches (it is left so)."""

    sums: torch.Tensor  # fp32 [rows, MAX_SPLIT * (outputs + MAX_BLOCK_N)]
    counter: torch.Tensor  # int32 [rows, outputs / 16]: programs that arrived


@dataclass(frozen=True)
class WideConfig:
    """Launch config of a product of up to 64 rows: a program takes block_n rows of the weights (16 a warp or a
    multiple; gate and up rows together), in tiles of block_k columns.

    ahead, x_ahead: tiles in flight, of the weights (before the wait) and of the activations. split: programs that share
    the columns. registers: the most a thread may use, 0 for no bound. block_m: rows of a tile, if a pass has fewer.
    """

    block_n: int = 64
    block_k: int = 64
    ahead: int = 4
    x_ahead: int = 1
    num_warps: int = 4
    split: int = 1
    registers: int = 0
    block_m: int = 8


def make_buffers(outputs: int, rows: int, device) -> SplitBuffers:
    """For matrices of up to so many rows."""
    return SplitBuffers(
        torch.zeros(rows, MAX_SPLIT * (outputs + MAX_BLOCK_N), device=device),
        torch.zeros(rows, triton.cdiv(outputs, 16), dtype=torch.int32, device=device),
    )


@triton.jit
def _weight_lines(WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Of each line of a tile [BLOCK_N * BLOCK_K / 32, 32], [lines, 1]: the number of its eight rows, its place among
    them, and its first column. Eight lines of four lanes are a warp's; the next eight are the next warp's."""
    line = tl.arange(0, BLOCK_N * BLOCK_K // 32)[:, None]
    warp, turn = line // 8 % WARPS, line // (8 * WARPS)
    column = turn % (BLOCK_K // 32)
    half = turn // (BLOCK_K // 32)  # of the 16 rows that a warp has of 64
    return (half // 2 * WARPS + warp) * 2 + half % 2, line % 8, column * 32


@triton.jit
def _weights(tile, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The tile as an operand [BLOCK_N, BLOCK_K] of the tensor cores.

    A lane has loaded eight neighbours of a row, and the instruction wants two and two of a lane in each half of 16
    columns. The order of the columns is free as long as both operands agree: so what a lane has is renamed, and nothing
    moves.
    """
    # 64 rows, half, columns, warp, row; lane, instruction, half, element
    tile = tile.reshape(BLOCK_N // (16 * WARPS), 2, BLOCK_K // 32, WARPS, 8, 4, 2, 2, 2)
    return tl.permute(tile, (0, 3, 1, 4, 2, 6, 7, 5, 8)).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _columns(x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Activations [BLOCK_M, BLOCK_K] as the other operand [BLOCK_K, BLOCK_M], the columns in the order of _weights."""
    x = tl.permute(x.reshape(BLOCK_M, BLOCK_K // 32, 4, 2, 2, 2), (0, 1, 3, 4, 2, 5))
    return tl.permute(x.reshape(BLOCK_M, BLOCK_K), (1, 0))


@triton.jit
def _load(
    ptrs,
    mask,
    offs_k,
    c: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Tile c; MASKED where a row may not exist. The first WHOLE tiles have all their columns in every program."""
    k: tl.constexpr = c * BLOCK_K
    if c >= WHOLE:
        return tl.load(ptrs + k, mask=mask & (offs_k + k < K), other=0.0, eviction_policy=POLICY)
    elif MASKED:
        return tl.load(ptrs + k, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(ptrs + k, eviction_policy=POLICY)


@triton.jit
def _scale(sumsq_ptr, offs_m, stride_sumsq, rows, n_sumsq, eps, K: tl.constexpr, SUMSQ_BLOCK: tl.constexpr):
    """1 / root mean square of each row, from the partial sums of its squares."""
    offs_s = tl.arange(0, SUMSQ_BLOCK)[None, :]
    mask = (offs_s < n_sumsq) & (offs_m < rows)[:, None]
    partials = tl.load(sumsq_ptr + offs_m[:, None] * stride_sumsq + offs_s, mask=mask, other=0.0)
    return tl.rsqrt(tl.sum(partials, 1) / K + eps)


@triton.jit(do_not_specialize=["n_sumsq"])  # else it is compiled again for every shape of the kernel before it
def _matmul_wide_kernel(
    meta_ptr,
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    norm_ptr,
    normed_ptr,
    sumsq_ptr,
    sums_ptr,
    counter_ptr,
    eps,
    stride_xm,
    stride_om,
    stride_normed,
    stride_sumsq,
    stride_sums,
    rows,
    n_sumsq,
    BLOCK_M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    NORMED: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """As _matmul_kernel, with tiles [BLOCK_N, BLOCK_K] of weights, GATED half of their rows gate and half up.

    AHEAD tiles of the weights are in flight before the wait and from there on, X_AHEAD of the activations. SPLIT
    programs share the columns; the last of them to arrive adds what all left, in the order of the columns. sums: fp32
    [rows, SPLIT * rows of all tiles]; counter: [tiles] int32, zero before and after. Grid (cdiv(N, outputs a program),
    SPLIT).
    """
    pid, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    CHUNKS: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K)  # a program
    MASKED: tl.constexpr = N % OUT_N != 0
    WHOLE: tl.constexpr = K // BLOCK_K - (SPLIT - 1) * CHUNKS  # of the last program
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else weight_ptr.dtype.element_ty
    first_k = part * (CHUNKS * BLOCK_K)
    eight, line_n, line_k = _weight_lines(WARPS, BLOCK_N, BLOCK_K)
    if GATED:  # a lane has a gate's row and the same of up
        line_n += pid * OUT_N + eight // 2 * 8
        row = line_n + eight % 2 * N
    else:
        line_n += pid * OUT_N + eight * 8
        row = line_n
    lines = line_n < N
    offs_wk = first_k + line_k + tl.arange(0, 32)[None, :]
    weights = weight_ptr + row.to(tl.int64) * K + offs_wk
    w = ()
    for c in tl.static_range(AHEAD):
        w += (_load(weights, lines, offs_wk, c, K, BLOCK_K, WHOLE, MASKED, "evict_first"),)
    offs_m = tl.arange(0, BLOCK_M)
    status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
    runs = (status == RUN)[None, :]
    some = tl.max((status == RUN).to(tl.int32), 0)
    offs_n = pid * OUT_N + tl.arange(0, OUT_N)[:, None]
    mask_n = offs_n < N
    extra_ptr = bias_ptr if HAS_BIAS else norm_ptr
    if HAS_BIAS or RESIDUAL:
        extra = tl.load(extra_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if some == 0:
        return
    offs_xk = first_k + tl.arange(0, BLOCK_K)[None, :]
    xs = x_ptr + tl.minimum(offs_m, rows - 1)[:, None] * stride_xm + offs_xk
    x = ()
    for c in tl.static_range(X_AHEAD):
        x += (_load(xs, True, offs_xk, c, K, BLOCK_K, WHOLE, False, ""),)
    out_ptrs = out_ptr + offs_m[None, :] * stride_om + offs_n
    mask = runs & mask_n
    if NORMED and SPLIT == 1:
        scale = _scale(sumsq_ptr, offs_m, stride_sumsq, rows, n_sumsq, eps, K, SUMSQ_BLOCK)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for c in tl.static_range(CHUNKS):
        if c + X_AHEAD < CHUNKS:
            x += (_load(xs, True, offs_xk, c + X_AHEAD, K, BLOCK_K, WHOLE, False, ""),)
        if RESIDUAL and SPLIT == 1 and c == CHUNKS - (AHEAD + 1) // 2:  # where weights have left registers free
            residual = tl.load(out_ptrs, mask=mask, other=0.0)
        columns = _columns(x[c], BLOCK_M, BLOCK_K).to(TYPE)
        acc = tl.dot(_weights(w[c], WARPS, BLOCK_N, BLOCK_K).to(TYPE), columns, acc, input_precision="ieee")
        if c + AHEAD < CHUNKS:
            w += (_load(weights, lines, offs_wk, c + AHEAD, K, BLOCK_K, WHOLE, MASKED, "evict_first"),)
    if SPLIT > 1:
        offs_s = offs_m[None, :] * stride_sums + pid * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        PART_N: tl.constexpr = (N + OUT_N - 1) // OUT_N * BLOCK_N
        tl.store(sums_ptr + offs_s + part * PART_N, acc, mask=runs)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + pid, 1) != SPLIT - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr + pid, 0)
        if RESIDUAL:
            residual = tl.load(out_ptrs, mask=mask, other=0.0)
        if NORMED:
            scale = _scale(sumsq_ptr, offs_m, stride_sumsq, rows, n_sumsq, eps, K, SUMSQ_BLOCK)
        acc = tl.load(sums_ptr + offs_s, mask=runs, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(sums_ptr + offs_s + other * PART_N, mask=runs, other=0.0, cache_modifier=".cg")
    if NORMED:
        acc = acc * scale[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(acc.reshape(OUT_N // 8, 2, 8, BLOCK_M), (0, 2, 3, 1)))
        y = (gate * tl.sigmoid(gate) * up).reshape(OUT_N, BLOCK_M)
    else:
        y = acc
    if HAS_BIAS:
        y += extra
    if RESIDUAL:
        y += residual
        normed_ptrs = normed_ptr + offs_m[None, :] * stride_normed + offs_n
        tl.store(normed_ptrs, (y * extra).to(normed_ptr.dtype.element_ty), mask=mask)
        sumsq = tl.sum(tl.where(mask_n, y * y, 0.0), 0)
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, sumsq, mask=status == RUN)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, gated, split, config, pdl):
    weight, bias = linear.weight, linear.bias
    rows, N = out.shape
    spare = out  # stands in for pointers this variant does not read
    chunks = triton.cdiv(weight.shape[1], config.split * config.block_k)
    tiles = triton.cdiv(N, config.block_n // 2 if gated else config.block_n)
    _matmul_wide_kernel[(tiles, config.split)](
        meta,
        x,
        weight,
        spare if bias is None else bias,
        out,
        norm if residual else spare,
        normed if residual else spare,
        sumsq,
        split.sums if config.split > 1 else spare,
        split.counter if config.split > 1 else spare,
        eps,
        x.stride(0),
        out.stride(0),
        normed.stride(0) if residual else 0,
        sumsq.stride(0),
        split.sums.stride(0) if config.split > 1 else 0,
        rows,
        n_sumsq,
        max(triton.next_power_of_2(rows), config.block_m),
        N,
        weight.shape[1],
        n_sumsq > 0,
        max(triton.next_power_of_2(n_sumsq), 64),
        bias is not None,
        residual,
        gated,
        config.block_n,
        config.block_k,
        config.num_warps,
        min(config.ahead, chunks),
        min(config.x_ahead, chunks),
        config.split,
        pdl,
        interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )


def wide_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """matvec_normed for up to 64 rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, False, split, config, pdl)


def wide_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, config, pdl=False):
    """matvec_residual for up to 64 rows at once; leaves `wide_partials(N, config)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, False, split, config, pdl)


def wide_gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """gate_up for up to 64 rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, True, split, config, pdl)


def wide_partials(N: int, config) -> int:
    """Partial sums of squares that wide_residual leaves: one for each block_n columns."""
    return triton.cdiv(N, config.block_n)


_KERNELS = (_matmul_wide_kernel,)
WIDE_NORMED = Op(wide_normed, matvec_normed_ref, matvec_bytes, _KERNELS, outputs=("out",))
WIDE_RESIDUAL = Op(wide_residual, matvec_residual_ref, matvec_bytes, _KERNELS, outputs=("hidden", "normed", "sumsq"))
WIDE_GATE_UP = Op(wide_gate_up, gate_up_ref, gate_up_bytes, _KERNELS, outputs=("out",))
