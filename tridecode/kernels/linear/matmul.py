"""matmul: the few rows of a pass times a weight matrix, which is read once for all of them, by tensor cores.

The forms and arguments of matvec and gate_up. The warps of a program share the columns: each multiplies its own part of
BLOCK_N whole rows of the weights, loaded from memory straight into the registers where the tensor cores want them.
Weights in fewer bits become bf16 there (bits.py); what scales a group of them is put on the group's part of the sum.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from .bits import factor, pair, raised, taken_off, unpack, zero_point
from .blocks import RowBlocks
from .gate_up import gate_up_bytes, gate_up_ref
from .matvec import matvec_bytes, matvec_normed_ref, matvec_residual_ref
from .register_tiles import (
    STEP_COLUMNS,
    STEP_K,
    block_of_rows,
    fetch_block,
    load_row_scales,
    load_tile,
    load_x,
    operand,
    places,
)


@dataclass(frozen=True)
class MatmulConfig(RowBlocks):
    """Launch config of a product of few rows: a program takes block_n rows of the weights (a multiple of 16, gate and
    up rows together) at a time, its warps share their columns.

    ahead: tiles of 32 columns (of 4 bits 128, of 8 bits 64) a warp in flight, of the weights, before the wait. x_ahead:
    tiles of 32 columns of the activations; if these are all, they are loaded once a program. registers: the most a
    thread may use, 0 for no bound. block_m: rows of a tile, if a pass has fewer. programs: how many share the rows,
    each taking its next ones while it multiplies; 0 for one program each block_n rows. fetch: blocks of
    packed weights that are on their way to the L2 cache, with the one in registers.
    """

    block_n: int = 16
    num_warps: int = 8
    ahead: int = 16
    x_ahead: int = 4
    registers: int = 0
    block_m: int = 8
    programs: int = 0
    fetch: int = 0


@triton.jit
def _matmul_kernel(
    meta_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
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
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FETCH: tl.constexpr,
    PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """out = x @ weight.T, scaled by the norm of x's source, plus bias; or out += it, preparing the next norm; or gated.

    meta: [rows, META_WIDTH] int32; x: [rows, K]; weight: [N, K], if GATED [2 * N, K], gate rows then up rows; bias:
    [N]; sumsq: [rows, partials] fp32, read if NORMED; out: [rows, N] (output), if GATED silu(gate(x)) * up(x).
    FORM is "dense", or weight holds words of packed.py: then scale: [N / SCALE_ROWS, K / GROUP]; zero:
    [N, K / GROUP] bf16 as int16, read if ZEROS; order: [K] int32, the columns of x that theirs are, read if ORDERED.
    RESIDUAL: out is the residual stream, fp32; norm: [N]; outputs normed: [rows, N] = out * norm, and sumsq, one
    partial sum a program. Rows that do not run are not written. Moves the weights' bytes. Grid PROGRAMS, of which each
    takes its next BLOCK_N rows of the weights, of BLOCKS, while it multiplies; its activations stay in registers if all
    tiles of them are in flight at once.
    The first AHEAD tiles of the weights are in flight before the wait. Sums are in one fixed order whatever the row and
    its neighbours: a row is a column of the tensor cores' product, and sees no other.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    PARTS: tl.constexpr = 1 if FORM == "dense" else 4 if FORM == "int4" else 2  # of 32 columns in a warp's tile
    LINE: tl.constexpr = STEP_COLUMNS if FORM == "dense" else 16  # elements of the weights that are a row of it
    STEP: tl.constexpr = PARTS * STEP_COLUMNS
    CHUNKS: tl.constexpr = (K + WARPS * STEP - 1) // (WARPS * STEP)
    TILES_X: tl.constexpr = CHUNKS * PARTS
    LENGTH: tl.constexpr = K if FORM == "dense" else (K + STEP - 1) // STEP * LINE
    MASKED: tl.constexpr = N % OUT_N != 0
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    # Groups that hold more than a tile scale its sum, smaller ones that of their part; one group a row, all of it.
    GROUPED: tl.constexpr = FORM != "dense" and GROUP < K
    SCALES: tl.constexpr = (PARTS if GROUP < STEP else 1) if GROUPED else 0
    GROUP_PARTS: tl.constexpr = PARTS // SCALES if GROUPED else PARTS  # of a tile, that are summed before the scale
    # Zero points of four bits are taken off the sums where the sums of activations, computed once, serve many blocks.
    OFF: tl.constexpr = FORM == "int4" and X_AHEAD == TILES_X and BLOCKS > PROGRAMS
    ZERO_PARTS: tl.constexpr = (PARTS if GROUP < STEP else 1) if ZEROS else 0
    w, s, z = (), (), ()
    of = block_of_rows(
        weight_ptr, scale_ptr, zero_ptr, pid, N, K, LENGTH, GROUP, SCALE_ROWS, BLOCK_N, OUT_N, LINE, WARPS,
        OFF,
    )  # fmt: skip
    for c in tl.static_range(AHEAD):
        first = load_tile(
            of, c, K, LENGTH, STEP, GROUP, SCALES, ZERO_PARTS, BLOCK_N, LINE, WARPS, MASKED, OFF
        )  # fmt: skip
        w, s, z = w + first[0], s + first[1], z + first[2]
    for i in tl.static_range(0 if AHEAD < CHUNKS else 1, FETCH):
        fetch_block(
            weight_ptr, scale_ptr, zero_ptr, pid + i * PROGRAMS, N, K, LENGTH, GROUP, SCALE_ROWS, ZEROS, OUT_N, GATED
        )  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)
    status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
    runs = (status == RUN)[None, :]
    some = tl.max((status == RUN).to(tl.int32), 0)
    offs_n = pid * OUT_N + tl.arange(0, OUT_N)[:, None]
    # What the end of a block needs beside its sums is loaded a block ahead too.
    extra_ptr = bias_ptr if HAS_BIAS else norm_ptr
    extra, of_row = 0.0, 0.0
    if HAS_BIAS or RESIDUAL:
        extra = tl.load(extra_ptr + offs_n, mask=offs_n < N, other=0.0)
    if FORM != "dense" and not GROUPED:
        of_row = load_row_scales(scale_ptr, pid, N, SCALE_ROWS, BLOCK_N, OUT_N)
    if PDL:
        gdc_wait()
    line_m, warp_m = places(WARPS, BLOCK_M)
    offs_xk = warp_m * STEP + tl.arange(0, STEP_COLUMNS)[None, :]
    xs = x_ptr + tl.minimum(line_m, rows - 1) * stride_xm + offs_xk
    first_x = ()
    for i in tl.static_range(X_AHEAD):
        first_x += (load_x(xs, order_ptr, offs_xk, line_m < rows, i, K, WARPS, PARTS, ORDERED),)
    out_rows = out_ptr + offs_m[None, :] * stride_om
    residual, scale = 0.0, 1.0
    if RESIDUAL:
        residual = tl.load(out_rows + offs_n, mask=runs & (offs_n < N), other=0.0)
    if NORMED:
        offs_s = tl.arange(0, SUMSQ_BLOCK)[None, :]
        mask_s = (offs_s < n_sumsq) & (offs_m < rows)[:, None]
        partials = tl.load(sumsq_ptr + offs_m[:, None] * stride_sumsq + offs_s, mask=mask_s, other=0.0)
    if some == 0:  # asked here, as no load is put behind a branch: all are on their way together
        return
    if NORMED:
        scale = tl.rsqrt(tl.sum(partials, 1) / K + eps)
    off = ()
    if OFF:
        whole = taken_off(ZEROS, WARPS, BLOCK_N, DOT_FP32).to(TYPE)
        for i in tl.static_range(TILES_X):
            if i % GROUP_PARTS == 0:
                off_group = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
            columns = operand(raised(first_x[i], FORM, DOT_FP32), WARPS, BLOCK_M, True)
            columns = tl.permute(columns, (0, 2, 1)).to(TYPE)
            off_group = tl.dot(whole, columns, off_group, input_precision="ieee")
            if (i + 1) % GROUP_PARTS == 0:
                off += (off_group,)
    squares = tl.zeros([OUT_N, BLOCK_M], tl.float32)
    for turn in range(1 if BLOCKS == PROGRAMS else (BLOCKS - pid + PROGRAMS - 1) // PROGRAMS):
        block = pid + turn * PROGRAMS
        offs_n = block * OUT_N + tl.arange(0, OUT_N)[:, None]
        mask_n = offs_n < N
        mask = runs & mask_n
        x = first_x
        if X_AHEAD < TILES_X and BLOCKS > PROGRAMS:
            x = ()
            for i in tl.static_range(X_AHEAD):
                x += (load_x(xs, order_ptr, offs_xk, line_m < rows, i, K, WARPS, PARTS, ORDERED),)
        of_next, extra_next, of_row_next, residual_next = of, extra, of_row, residual
        if BLOCKS > PROGRAMS:
            of_next = block_of_rows(
                weight_ptr, scale_ptr, zero_ptr, block + PROGRAMS, N, K, LENGTH, GROUP, SCALE_ROWS, BLOCK_N, OUT_N,
                LINE, WARPS, OFF,
            )  # fmt: skip
            if FETCH > 0 and FETCH * PROGRAMS < BLOCKS:
                fetch_block(
                    weight_ptr, scale_ptr, zero_ptr, block + FETCH * PROGRAMS, N, K, LENGTH, GROUP,
                    SCALE_ROWS, ZEROS, OUT_N, GATED,
                )  # fmt: skip
            offs_next = offs_n + PROGRAMS * OUT_N
            if HAS_BIAS or RESIDUAL:
                extra_next = tl.load(extra_ptr + offs_next, mask=offs_next < N, other=0.0)
            if RESIDUAL:
                residual_next = tl.load(out_rows + offs_next, mask=runs & (offs_next < N), other=0.0)
            if FORM != "dense" and not GROUPED:
                of_row_next = load_row_scales(scale_ptr, block + PROGRAMS, N, SCALE_ROWS, BLOCK_N, OUT_N)
        tiles, scales, zeros = w, s, z
        acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
        for c in tl.static_range(CHUNKS):
            for part in tl.static_range(PARTS):
                if c * PARTS + part + X_AHEAD < TILES_X:
                    x += (
                        load_x(
                            xs, order_ptr, offs_xk, line_m < rows, c * PARTS + part + X_AHEAD, K, WARPS, PARTS, ORDERED
                        ),
                    )  # fmt: skip
                columns = x[c * PARTS + part]
                if FORM == "e4m3" or OFF:
                    columns = raised(columns, FORM, DOT_FP32)
                columns = tl.permute(operand(columns, WARPS, BLOCK_M, FORM != "dense"), (0, 2, 1)).to(TYPE)
                if FORM == "dense":
                    tile = tiles[c]
                else:
                    zero = pair(zeros[c * ZERO_PARTS + part % ZERO_PARTS]) if ZEROS and not OFF else 0
                    tile = unpack(tiles[c], zero, part, FORM, ZEROS and not OFF, DOT_FP32, OFF)
                tile = operand(tile, WARPS, BLOCK_N, FORM != "dense").to(TYPE)
                if part % GROUP_PARTS == 0:
                    of_group = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32) if GROUPED else acc
                    if OFF:
                        start = off[(c * PARTS + part) // GROUP_PARTS]
                        if ZEROS:
                            start *= zero_point(zeros[c * ZERO_PARTS + part // GROUP_PARTS % ZERO_PARTS])
                        of_group = start if GROUPED else acc + start
                of_group = tl.dot(tile, columns, of_group, input_precision="ieee")
                if (part + 1) % GROUP_PARTS == 0:
                    if GROUPED:
                        acc += of_group * scales[c * SCALES + part // GROUP_PARTS].to(tl.float32)
                    else:
                        acc = of_group
            # AHEAD tiles later there is one of this block, or of the next one.
            if c + AHEAD < CHUNKS:
                following = load_tile(
                    of, c + AHEAD, K, LENGTH, STEP, GROUP, SCALES, ZERO_PARTS, BLOCK_N, LINE, WARPS, MASKED,
                    OFF,
                )  # fmt: skip
                tiles, scales, zeros = tiles + following[0], scales + following[1], zeros + following[2]
            elif BLOCKS > PROGRAMS:
                following = (
                    tiles[c : c + 1],
                    scales[c * SCALES : (c + 1) * SCALES],
                    zeros[c * ZERO_PARTS : (c + 1) * ZERO_PARTS],
                )
                # A branch keeps the tiles apart: each is loaded where it is said here.
                if block + PROGRAMS < BLOCKS:
                    following = load_tile(
                        of_next, c + AHEAD - CHUNKS, K, LENGTH, STEP, GROUP, SCALES, ZERO_PARTS, BLOCK_N, LINE, WARPS,
                        MASKED, OFF,
                    )  # fmt: skip
                tiles, scales, zeros = tiles + following[0], scales + following[1], zeros + following[2]
        if BLOCKS > PROGRAMS:
            w, s, z = tiles[CHUNKS:], scales[CHUNKS * SCALES :], zeros[CHUNKS * ZERO_PARTS :]
        y = tl.sum(acc, 0) * factor(FORM, OFF or FORM == "e4m3")
        if FORM != "dense" and not GROUPED:
            y *= of_row.to(tl.float32)
        if NORMED:
            y = y * scale[None, :]
        if GATED:
            gate, up = tl.split(tl.permute(y.reshape(2, OUT_N, BLOCK_M), (1, 2, 0)))
            y = gate * tl.sigmoid(gate) * up
        if HAS_BIAS:
            y += extra.to(tl.float32)
        if RESIDUAL:
            y += residual
            normed_ptrs = normed_ptr + offs_m[None, :] * stride_normed + offs_n
            tl.store(normed_ptrs, (y * extra.to(tl.float32)).to(normed_ptr.dtype.element_ty), mask=mask)
            squares += tl.where(mask_n, y * y, 0.0)
        tl.store(out_rows + offs_n, y.to(out_ptr.dtype.element_ty), mask=mask)
        of, extra, of_row, residual = of_next, extra_next, of_row_next, residual_next
    if RESIDUAL:
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, tl.sum(squares, 0), mask=status == RUN)


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, gated, config, pdl):
    weight, bias, packed = linear.weight, linear.bias, linear.packed
    (rows, N), K = out.shape, linear.in_features
    parts = 1 if packed is None else packed.tile // STEP_K
    tiles = triton.cdiv(K, parts * STEP_K * config.num_warps)  # of a row that a warp has
    blocks, programs = config.grid(2 * N if gated else N)
    spare = out  # stands in for pointers this variant does not read
    # With tiles of 16 rows and more, 64 partial sums are added in the same order whatever the rows.
    sumsq_block = max(triton.next_power_of_2(max(n_sumsq, 1)), 64 if config.block_m > 8 else 1)
    _matmul_kernel[(programs,)](
        meta,
        x,
        weight,
        spare if packed is None else linear.scale,
        linear.zero.view(torch.int16) if linear.zero is not None else spare,
        spare if linear.order is None else linear.order,
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
        max(triton.next_power_of_2(rows), config.block_m),
        N,
        K,
        n_sumsq > 0,
        sumsq_block,
        bias is not None,
        residual,
        gated,
        linear.format,
        K if packed is None else packed.group,
        1 if packed is None else packed.rows,
        linear.zero is not None,
        linear.order is not None,
        config.block_n,
        config.num_warps,
        min(config.ahead, tiles),
        min(config.x_ahead, tiles * parts),
        blocks,
        programs,
        # Pieces begin at multiples of 16 bytes; and what has dependent launch has copies in bulk.
        config.fetch if pdl and packed is not None and N % 8 == 0 else 0,
        pdl,
        interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )


def matmul_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """matvec_normed for a few rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, False, config, pdl)


def matmul_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, config, pdl=False):
    """matvec_residual for a few rows at once; leaves `matmul_partials(N, config)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, False, config, pdl)


def matmul_gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """gate_up for a few rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, True, config, pdl)


def matmul_partials(N: int, config) -> int:
    """Partial sums of squares that matmul_residual leaves: one a program."""
    return config.grid(N)[1]


_KERNELS = (_matmul_kernel,)
MATMUL_NORMED = Op(matmul_normed, matvec_normed_ref, matvec_bytes, _KERNELS, outputs=("out",))
MATMUL_RESIDUAL = Op(
    matmul_residual, matvec_residual_ref, matvec_bytes, _KERNELS, outputs=("hidden", "normed", "sumsq")
)
MATMUL_GATE_UP = Op(matmul_gate_up, gate_up_ref, gate_up_bytes, _KERNELS, outputs=("out",))
