"""matmul: the few rows of a pass times a weight matrix, which is read once for all of them, by tensor cores.

The forms and arguments of matvec and gate_up. The warps of a program share the columns: each multiplies its own part of
BLOCK_N whole rows of the weights, loaded from memory straight into the registers where the tensor cores want them.
"""

import triton
import triton.language as tl

from .common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from .gate_up import gate_up_bytes, gate_up_ref
from .matvec import matvec_bytes, matvec_normed_ref, matvec_residual_ref
from .op import Op

STEP_K = 32  # columns of a row that four lanes hold, 16 bytes each
_STEP_K = tl.constexpr(STEP_K)


@triton.jit
def _places(WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Of each line of a tile [WARPS * ROWS, STEP_K], [lines, 1]: its row, and the warp whose registers hold it."""
    line = tl.arange(0, WARPS * ROWS)[:, None]
    return line // (8 * WARPS) * 8 + line % 8, line // 8 % WARPS


@triton.jit
def _operand(tile, WARPS: tl.constexpr, ROWS: tl.constexpr):
    """The tile as an operand [WARPS, ROWS, STEP_K] of the tensor cores.

    A lane has loaded eight neighbours of a row, and the instruction wants two and two of a lane in each half of 16
    columns. The order of the columns is free as long as both operands agree: so what a lane has is renamed, and nothing
    moves.
    """
    tile = tl.permute(tile.reshape(ROWS // 8, WARPS, 8, _STEP_K), (1, 0, 2, 3))
    tile = tile.reshape(WARPS, ROWS, 4, 2, 2, 2)  # lane, instruction, half, element
    return tl.permute(tile, (0, 1, 3, 4, 2, 5)).reshape(WARPS, ROWS, _STEP_K)


@triton.jit
def _load(
    ptrs,
    offs_k,
    lines,
    c: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Columns from c * WARPS * STEP_K on; MASKED where a line may not exist."""
    k: tl.constexpr = c * WARPS * _STEP_K
    if k + WARPS * _STEP_K > K:
        return tl.load(ptrs + k, mask=lines & (offs_k + k < K), other=0.0, eviction_policy=POLICY)
    elif MASKED:
        return tl.load(ptrs + k, mask=lines, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(ptrs + k, eviction_policy=POLICY)


@triton.jit
def _matmul_kernel(
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
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """out = x @ weight.T, scaled by the norm of x's source, plus bias; or out += it, preparing the next norm; or gated.

    meta: [rows, META_WIDTH] int32; x: [rows, K]; weight: [N, K], if GATED [2 * N, K], gate rows then up rows; bias:
    [N]; sumsq: [rows, partials] fp32, read if NORMED; out: [rows, N] (output), if GATED silu(gate(x)) * up(x).
    RESIDUAL: out is the residual stream, fp32; norm: [N]; outputs normed: [rows, N] = out * norm, and sumsq, one
    partial sum a program. Rows that do not run are not written. Moves the weights' bytes. Grid cdiv(N, outputs a
    program).
    The first AHEAD tiles of the weights are in flight before the wait. Sums are in one fixed order whatever the row and
    its neighbours: a row is a column of the tensor cores' product, and sees no other.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    CHUNKS: tl.constexpr = (K + WARPS * _STEP_K - 1) // (WARPS * _STEP_K)
    MASKED: tl.constexpr = N % OUT_N != 0
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else weight_ptr.dtype.element_ty
    line, warp = _places(WARPS, BLOCK_N)
    offs_k = warp * _STEP_K + tl.arange(0, _STEP_K)[None, :]
    lines_n = pid * OUT_N + line % OUT_N
    weights = weight_ptr + (lines_n + line // OUT_N * N).to(tl.int64) * K + offs_k
    w = ()
    for c in tl.static_range(min(AHEAD, CHUNKS)):
        w += (_load(weights, offs_k, lines_n < N, c, K, WARPS, MASKED, "evict_first"),)
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
    line_m, warp_m = _places(WARPS, BLOCK_M)
    offs_xk = warp_m * _STEP_K + tl.arange(0, _STEP_K)[None, :]
    xs = x_ptr + tl.minimum(line_m, rows - 1) * stride_xm + offs_xk
    x = ()
    for c in tl.static_range(min(X_AHEAD, CHUNKS)):
        x += (_load(xs, offs_xk, line_m < rows, c, K, WARPS, False, ""),)
    out_ptrs = out_ptr + offs_m[None, :] * stride_om + offs_n
    mask = runs & mask_n
    if RESIDUAL:
        residual = tl.load(out_ptrs, mask=mask, other=0.0)
    if NORMED:
        offs_s = tl.arange(0, SUMSQ_BLOCK)[None, :]
        mask_s = (offs_s < n_sumsq) & (offs_m < rows)[:, None]
        partials = tl.load(sumsq_ptr + offs_m[:, None] * stride_sumsq + offs_s, mask=mask_s, other=0.0)
        scale = tl.rsqrt(tl.sum(partials, 1) / K + eps)
    acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
    for c in tl.static_range(CHUNKS):
        if c + X_AHEAD < CHUNKS:
            x += (_load(xs, offs_xk, line_m < rows, c + X_AHEAD, K, WARPS, False, ""),)
        columns = tl.permute(_operand(x[c], WARPS, BLOCK_M), (0, 2, 1)).to(TYPE)
        acc = tl.dot(_operand(w[c], WARPS, BLOCK_N).to(TYPE), columns, acc, input_precision="ieee")
        if c + AHEAD < CHUNKS:
            w += (_load(weights, offs_k, lines_n < N, c + AHEAD, K, WARPS, MASKED, "evict_first"),)
    y = tl.sum(acc, 0)
    if NORMED:
        y = y * scale[None, :]
    if GATED:
        gate, up = tl.split(tl.permute(y.reshape(2, OUT_N, BLOCK_M), (1, 2, 0)))
        y = gate * tl.sigmoid(gate) * up
    if HAS_BIAS:
        y += extra
    if RESIDUAL:
        y += residual
        normed_ptrs = normed_ptr + offs_m[None, :] * stride_normed + offs_n
        tl.store(normed_ptrs, (y * extra).to(normed_ptr.dtype.element_ty), mask=mask)
        sumsq = tl.sum(tl.where(mask_n, y * y, 0.0), 0)
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, sumsq, mask=status == RUN)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, gated, shape, pdl):
    weight, bias = linear.weight, linear.bias
    rows, N = out.shape
    tiles = triton.cdiv(weight.shape[1], STEP_K * shape.num_warps)  # of a row that a warp has
    spare = out  # stands in for pointers this variant does not read
    _matmul_kernel[(triton.cdiv(N, shape.block_n // 2 if gated else shape.block_n),)](
        meta,
        x,
        weight,
        spare if bias is None else bias,
        out,
        norm if residual else spare,
        normed if residual else spare,
        sumsq,
        eps,
        x.stride(0),
        out.stride(0),
        normed.stride(0) if residual else 0,
        sumsq.stride(0),
        rows,
        n_sumsq,
        max(triton.next_power_of_2(rows), 8),
        N,
        weight.shape[1],
        n_sumsq > 0,
        triton.next_power_of_2(max(n_sumsq, 1)),
        bias is not None,
        residual,
        gated,
        shape.block_n,
        shape.num_warps,
        min(shape.ahead, tiles),
        min(shape.x_ahead, tiles),
        pdl,
        interpreted(),
        **options(shape.num_warps, pdl, shape.registers),
    )


def matmul_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, shape, pdl=False):
    """matvec_normed for a few rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, False, shape, pdl)


def matmul_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, shape, pdl=False):
    """matvec_residual for a few rows at once; leaves `matmul_partials(N, shape)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, False, shape, pdl)


def matmul_gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, shape, pdl=False):
    """gate_up for a few rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, True, shape, pdl)


def matmul_partials(N: int, shape) -> int:
    """Partial sums of squares that matmul_residual leaves: one a program."""
    return triton.cdiv(N, shape.block_n)


_KERNELS = (_matmul_kernel,)
MATMUL_NORMED = Op(matmul_normed, matvec_normed_ref, matvec_bytes, _KERNELS, outputs=("out",))
MATMUL_RESIDUAL = Op(
    matmul_residual, matvec_residual_ref, matvec_bytes, _KERNELS, outputs=("hidden", "normed", "sumsq")
)
MATMUL_GATE_UP = Op(matmul_gate_up, gate_up_ref, gate_up_bytes, _KERNELS, outputs=("out",))
