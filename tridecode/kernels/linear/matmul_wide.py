"""matmul for up to 64 rows: the weight is loaded directly into the registers where wgmma reads it, 64 rows at a time.

The activations are the columns of the product, and pass through shared memory one tile at a time. They take so little
of it that the next kernel fits next to this one, with its first weights in flight.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import (
    META_WIDTH,
    RUN,
    STATUS,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    next_power_of_2,
    options,
)
from ..op import Op
from .adapters import Adapters, adapter_arguments, expand_rows, load_b_group, parts_of
from .epilogue import epilogue_arguments, finish, load_extra, load_partials, norm_scale, silu
from .project import MAX_ROWS, OUTPUTS, SHORT, LinearKernel, adapted_bytes, adapted_ref


@dataclass(frozen=True)
class WideConfig:
    """Launch config of matmul_wide.

    A program takes block_n rows of the weight in tiles of block_k columns.

    Attributes:
        block_n: Rows of the weight, 16 for each warp or a multiple. Gated counts gate and up rows together.
        ahead: Tiles of the weight in flight, before `gdc_wait` too.
        x_ahead: Tiles of the activations in flight.
        split: Programs that share the columns.
        registers: Maximum number of registers of a thread; 0: no limit.
        block_m: Minimum number of rows of a tile of activations.
    """

    block_n: int = 64
    block_k: int = 64
    ahead: int = 4
    x_ahead: int = 1
    num_warps: int = 4
    split: int = 1
    registers: int = 0
    block_m: int = 8


@triton.jit
def _weight_lines(WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the places of the lines of a tile [BLOCK_N * BLOCK_K / 32, 32].

    For each line, these are the number of its eight rows, its place among them, and its first column, [lines, 1] each.
    A warp has eight lines of four lanes; the next warp has the next eight.
    """
    line = tl.arange(0, BLOCK_N * BLOCK_K // 32)[:, None]
    warp, own = line // 8 % WARPS, line // (8 * WARPS)
    column = own % (BLOCK_K // 32)
    half = own // (BLOCK_K // 32)  # A warp has 16 of 64 rows. This number selects one half of them.
    return (half // 2 * WARPS + warp) * 2 + half % 2, line % 8, column * 32


@triton.jit
def _weights(tile, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the tile as an operand [BLOCK_N, BLOCK_K] of the tensor cores.

    A lane has loaded eight adjacent columns of a row. The instruction takes two columns of a lane from each half of 16.
    The order of the columns is free if both operands agree, so the columns are renamed and no data moves.
    """
    # Dimensions: 64 rows, half, columns, warp, row, lane, instruction, half, element.
    tile = tile.reshape(BLOCK_N // (16 * WARPS), 2, BLOCK_K // 32, WARPS, 8, 4, 2, 2, 2)
    return tl.permute(tile, (0, 3, 1, 4, 2, 6, 7, 5, 8)).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _columns(x, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return activations [BLOCK_M, BLOCK_K] as the other operand [BLOCK_K, BLOCK_M], in _weights' order of columns."""
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
    """Load tile c. MASKED: some rows may not exist. The first WHOLE tiles are complete in every program."""
    k: tl.constexpr = c * BLOCK_K
    if c >= WHOLE:
        return tl.load(ptrs + k, mask=mask & (offs_k + k < K), other=0.0, eviction_policy=POLICY)
    elif MASKED:
        return tl.load(ptrs + k, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        return tl.load(ptrs + k, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["n_sumsq"])  # n_sumsq depends on the launch config of the previous kernel.
def _matmul_wide_kernel(
    meta_ptr, x_ptr, weight_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, sums_ptr, counter_ptr, eps, stride_xm,
    stride_om, stride_normed, stride_sumsq, stride_sums, rows, n_sumsq, b_ptr, ranks_ptr, numbers_ptr, listed_ptr,
    y_ptr, stride_b, stride_ys, stride_ym, BLOCK_M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    SUMSQ_BLOCK: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, X_AHEAD: tl.constexpr, SPLIT: tl.constexpr,
    ADAPTERS: tl.constexpr, A_SPLITS: tl.constexpr, A_PARTS: tl.constexpr, BEGIN_1: tl.constexpr, BEGIN_2: tl.constexpr,
    PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Compute `project` for up to BLOCK_M rows, in tiles [BLOCK_N, BLOCK_K] of the weight.

    Grid: (cdiv(N, outputs of a program), SPLIT). SPLIT programs share the columns. The last of them to finish adds the
    sums of all, in the order of the columns. Each tile of rows stores one partial sum of squares per row. AHEAD tiles
    of the weight are in flight, also before `gdc_wait`. X_AHEAD tiles of the activations are in flight. If "gated",
    half of a tile's rows belong to the gate and half to up.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        x_ptr: [rows, K].
        weight_ptr: [N, K], or [2 * N, K] if "gated".
        extra_ptr, out_ptr, normed_ptr, sumsq_ptr: see _matmul_kernel.
        sums_ptr: [rows, SPLIT * rows of all tiles] fp32 (scratch).
        counter_ptr: [tiles] int32, zero between launches (scratch).
        b_ptr and the following: see adapter_arguments.
    """
    pid, part = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    NORMED: tl.constexpr = EPILOGUE == "normed" or EPILOGUE == "gated"
    GATED: tl.constexpr = EPILOGUE == "gated"
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    # Number of tiles of a program along the columns.
    CHUNKS: tl.constexpr = (K + SPLIT * BLOCK_K - 1) // (SPLIT * BLOCK_K)
    MASKED: tl.constexpr = N % OUT_N != 0
    WHOLE: tl.constexpr = K // BLOCK_K - (SPLIT - 1) * CHUNKS  # Number of complete tiles of the last program.
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else weight_ptr.dtype.element_ty
    first_k = part * (CHUNKS * BLOCK_K)
    eight, line_n, line_k = _weight_lines(WARPS, BLOCK_N, BLOCK_K)
    if GATED:  # Each lane has a row of gate and the same row of up.
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
    extra = load_extra(extra_ptr, offs_n, N, EPILOGUE, HAS_BIAS)
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
    mask_m, residual = (offs_m < rows)[:, None], 0.0
    if NORMED and SPLIT == 1:
        partials = load_partials(sumsq_ptr, offs_m[:, None], mask_m, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
        scale = norm_scale(tl.sum(partials, 1), K, eps)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for c in tl.static_range(CHUNKS):
        if c + X_AHEAD < CHUNKS:
            x += (_load(xs, True, offs_xk, c + X_AHEAD, K, BLOCK_K, WHOLE, False, ""),)
        if (
            EPILOGUE == "residual" and SPLIT == 1 and c == CHUNKS - (AHEAD + 1) // 2
        ):  # from here on, weights take fewer registers
            residual = tl.load(out_ptrs, mask=mask, other=0.0)
        columns = _columns(x[c], BLOCK_M, BLOCK_K).to(TYPE)
        acc = tl.dot(_weights(w[c], WARPS, BLOCK_N, BLOCK_K).to(TYPE), columns, acc, input_precision="ieee")
        if c + AHEAD < CHUNKS:
            w += (_load(weights, lines, offs_wk, c + AHEAD, K, BLOCK_K, WHOLE, MASKED, "evict_first"),)
    if ADAPTERS:
        if SPLIT == 1 or part == 0:  # One of the programs that share the columns adds them.
            A = Adapters(b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym)
            P: tl.constexpr = parts_of(GATED, A_SPLITS, A_PARTS, BEGIN_1, BEGIN_2)
            line, half = tl.arange(0, BLOCK_N), 0
            if GATED:  # Eight rows of gate and the same rows of up follow each other.
                line, half = line // 16 * 8 + line % 8, line // 8 % 2 * N
            first_n, exists = pid * OUT_N, pid * OUT_N + line < N
            line += first_n + half
            numbers = tl.load(numbers_ptr + offs_m, mask=offs_m < rows, other=0)
            group = load_b_group(A, P, numbers, 0, 0, line, exists)
            acc += expand_rows(A, P, group, line, exists, first_n, first_n + OUT_N, numbers, offs_m, TYPE)
    if SPLIT > 1:
        offs_s = offs_m[None, :] * stride_sums + pid * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
        PART_N: tl.constexpr = (N + OUT_N - 1) // OUT_N * BLOCK_N
        tl.store(sums_ptr + offs_s + part * PART_N, acc, mask=runs)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + pid, 1) != SPLIT - 1:
            return
        tl.debug_barrier()
        tl.store(counter_ptr + pid, 0)
        if EPILOGUE == "residual":
            residual = tl.load(out_ptrs, mask=mask, other=0.0)
        if NORMED:
            partials = load_partials(sumsq_ptr, offs_m[:, None], mask_m, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
            scale = norm_scale(tl.sum(partials, 1), K, eps)
        acc = tl.load(sums_ptr + offs_s, mask=runs, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLIT):
            acc += tl.load(sums_ptr + offs_s + other * PART_N, mask=runs, other=0.0, cache_modifier=".cg")
    if NORMED:
        acc = acc * scale[None, :]
    y = acc
    if GATED:
        gate, up = tl.split(tl.permute(acc.reshape(OUT_N // 8, 2, 8, BLOCK_M), (0, 2, 3, 1)))
        y = (silu(gate) * up).reshape(OUT_N, BLOCK_M)
    normed_ptrs = normed_ptr + offs_m[None, :] * stride_normed + offs_n
    squares = finish(y, out_ptrs, normed_ptrs, extra, residual, mask, mask_n, EPILOGUE, HAS_BIAS)
    if EPILOGUE == "residual":
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, tl.sum(squares, 0), mask=status == RUN)


def matmul_wide(meta, x, linear, out, epilogue, scratch=None, adapters=None, *, config, pdl=False):
    """Compute `project` for up to 64 rows with any epilogue except Plain.

    Args:
        scratch: SplitBuffers if programs share the columns.
    """
    rows, N = out.shape
    K, split = linear.in_features, config.split
    chunks = cdiv(K, split * config.block_k)
    tiles = cdiv(linear.out_features, config.block_n)
    _matmul_wide_kernel[(tiles, split)](
        meta, x, linear.weight, **epilogue_arguments(linear, out, epilogue, 64), **adapter_arguments(adapters),
        sums_ptr=scratch.sums if split > 1 else out, counter_ptr=scratch.counter if split > 1 else out,
        stride_xm=x.stride(0), stride_sums=scratch.sums.stride(0) if split > 1 else 0, rows=rows,
        BLOCK_M=max(next_power_of_2(rows), config.block_m), N=N, K=K, BLOCK_N=config.block_n,
        BLOCK_K=config.block_k, WARPS=config.num_warps, AHEAD=min(config.ahead, chunks),
        X_AHEAD=min(config.x_ahead, chunks), SPLIT=split, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def _supports(case, rows, device) -> bool:
    """Return whether matmul_wide computes the case; see LinearKernel."""
    dense = case.weight_type in SHORT
    return dense and case.epilogue != "plain" and rows <= MAX_ROWS and not 0 < device.capability < 80


WIDE = LinearKernel(
    "wide",
    Op(matmul_wide, adapted_ref, adapted_bytes, (_matmul_wide_kernel,), OUTPUTS),
    WideConfig,
    _supports,
    lambda n, config: cdiv(n, config.block_n),
    adapts=lambda config: True,
)
