"""matmul: the product of a few rows of activations and a weight on tensor cores. The weight is read once for all rows.

The warps of a program share the columns. Each multiplies its part of BLOCK_N whole rows of the weight, which it loads
from memory directly into the registers from which mma reads them (register_tiles.py). Packed tensors become bf16 there
(bits.py). The scale of a group multiplies the group's part of the sum.
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
from .bits import factor, half_of, pair, raised, unpack, zero_operand, zero_point
from .blocks import RowBlocks
from .epilogue import epilogue_arguments, finish, load_extra, load_partials, norm_scale, silu
from .project import MAX_ROWS, OUTPUTS, SHORT, LinearKernel, adapted_bytes, adapted_ref
from .register_tiles import (
    STEP_COLUMNS,
    STEP_K,
    Activations,
    Weight,
    block_of_rows,
    fetch_block,
    load_row_scales,
    load_tile,
    load_x,
    operand,
    places,
    rounded,
    scale_of,
    tiling,
)


@dataclass(frozen=True)
class MatmulConfig(RowBlocks):
    """Launch config of matmul.

    A program multiplies block_n rows of the weight at a time. Its warps divide the columns of these rows among them. A
    program prefetches its next rows while it multiplies.

    Attributes:
        block_n: Rows of the weight in a block, a multiple of 16. Gated counts gate and up rows together.
        ahead: Tiles of the weight that a warp prefetches. The first of them are loaded before the kernel waits for the
            launch before it. A tile has 32 columns, or 128 columns of 4 bits, or 64 of 8 bits.
        x_ahead: Tiles of 32 columns of the activations that a warp prefetches. If these are all columns, a program
            loads the activations only once.
        registers: Maximum number of registers of a thread; 0: no limit.
        block_m: Minimum number of rows of a tile of activations.
        programs: Number of programs that share the rows; 0: one for each block.
        fetch: Number of blocks of packed weights in flight to the L2 cache, including the one in registers.
        rounds: Scale packed weights of integers and round them to the dtype of the activations before the product.
            Otherwise the scales multiply the sums of groups, for each row of activations.
    """

    block_n: int = 16
    num_warps: int = 8
    ahead: int = 16
    x_ahead: int = 4
    registers: int = 0
    block_m: int = 8
    programs: int = 0
    fetch: int = 0
    rounds: bool = False


@triton.jit
def _halves(
    T: tl.constexpr, acc, tile, x, tile_scales, part: tl.constexpr, BLOCK_M: tl.constexpr, TYPE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the scaled sum of a part whose halves of 16 columns have different scales."""
    for half in tl.static_range(2):
        columns = tl.permute(operand(half_of(x, half, DOT_FP32), T.WARPS, BLOCK_M, True), (0, 2, 1)).to(TYPE)
        zeros = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32)
        acc += tl.dot(tile, columns, zeros, input_precision="ieee") * scale_of(T, tile_scales, part * 2 + half, 0)
    return acc


@triton.jit
def _ones(T: tl.constexpr, FORM: tl.constexpr, TYPE: tl.constexpr):
    """Return an operand [WARPS, BLOCK_N, 32] whose products, times `factor(FORM)`, are sums of activations."""
    half = tl.full([T.WARPS, T.BLOCK_N, STEP_COLUMNS // 2], 1 / factor(FORM), TYPE)
    # Joined as unpacked weights are: both products then take the activations in one layout.
    return tl.join(half, half).reshape(T.WARPS, T.BLOCK_N, STEP_COLUMNS)


@triton.jit
def _matmul_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, zero_ptr, order_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps,
    stride_xm, stride_om, stride_normed, stride_sumsq, rows, n_sumsq, minimum_ptr, over_ptr, b_ptr, ranks_ptr,
    numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym, BLOCK_M: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, MINIMUMS: tl.constexpr,
    OVER: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr, BLOCKS: tl.constexpr, PROGRAMS: tl.constexpr, FETCH: tl.constexpr, ADAPTERS: tl.constexpr,
    A_SPLITS: tl.constexpr, A_PARTS: tl.constexpr, BEGIN_1: tl.constexpr, BEGIN_2: tl.constexpr, PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Compute `project` for up to BLOCK_M rows.

    Grid: (PROGRAMS,). Each program takes every PROGRAMS-th of BLOCKS blocks of BLOCK_N rows of the weight, and stores
    one partial sum of squares per row. The first AHEAD tiles of the weight are in flight before `gdc_wait`. The
    activations stay in registers if all their tiles are in flight at once. The order in which a sum is added does not
    depend on the row or on other rows. A row is a column of the tensor cores' product, and the columns are independent.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        x_ptr: [rows, K].
        weight_ptr: [N, K], or [2 * N, K] if "gated". FORM is "dense" or a number type of packed.py.
        scale_ptr: [N / SCALE_ROWS, K / GROUP]. Read only if the weight is packed.
        zero_ptr: [N, K / GROUP] bf16 as int16. Read only if ZEROS.
        order_ptr: [K] int32, the column of x for each column of the weight. Read only if ORDERED.
        minimum_ptr: [N, K / max(GROUP, 32)]. Read only if MINIMUMS.
        over_ptr: [N, K / OVER, 1 + MINIMUMS] fp16, factors of scales and minimums. Read only if OVER > 0.
        extra_ptr: [N], see epilogue_arguments.
        out_ptr: [rows, N] (output).
        normed_ptr: [rows, N] (output of "residual").
        sumsq_ptr: [rows, n_sumsq] fp32, partial sums of squares (output of "residual").
        b_ptr and the following: see adapter_arguments.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    NORMED: tl.constexpr = EPILOGUE == "normed" or EPILOGUE == "gated"
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER,
        ROUNDS=ROUNDS and FORM != "e4m3", GATED=EPILOGUE == "gated", BLOCK_N=BLOCK_N, WARPS=WARPS, X_AHEAD=X_AHEAD,
        BLOCKS=BLOCKS, PROGRAMS=PROGRAMS,
    )  # fmt: skip
    OUT_N: tl.constexpr = T.OUT_N
    CHUNKS: tl.constexpr = T.CHUNKS
    PARTS: tl.constexpr = T.PARTS
    X_TILES: tl.constexpr = T.X_TILES
    PIECES: tl.constexpr = T.PIECES
    LOADED: tl.constexpr = T.LOADED
    ZERO_PARTS: tl.constexpr = T.ZERO_PARTS
    GROUP_PARTS: tl.constexpr = T.GROUP_PARTS
    ZEROS_AFTER: tl.constexpr = T.ZEROS_AFTER
    weight = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
    w, s, z = (), (), ()
    here = block_of_rows(T, weight, pid)
    for c in tl.static_range(AHEAD):
        first = load_tile(T, here, c)
        w, s, z = w + first[0], s + first[1], z + first[2]
    for i in tl.static_range(0 if AHEAD < CHUNKS else 1, FETCH):
        fetch_block(T, weight, pid + i * PROGRAMS)
    offs_m = tl.arange(0, BLOCK_M)
    status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
    runs = (status == RUN)[None, :]
    some = tl.max((status == RUN).to(tl.int32), 0)
    offs_n = pid * OUT_N + tl.arange(0, OUT_N)[:, None]
    # Also load the other arguments of a block's epilogue one block ahead.
    extra, row_scales = load_extra(extra_ptr, offs_n, N, EPILOGUE, HAS_BIAS), 0.0
    if T.ROW_SCALES:
        row_scales = load_row_scales(T, weight, pid)
    if ADAPTERS:
        A = Adapters(b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym)
        P: tl.constexpr = parts_of(EPILOGUE == "gated", A_SPLITS, A_PARTS, BEGIN_1, BEGIN_2)
        numbers = tl.load(numbers_ptr + offs_m, mask=offs_m < rows, other=0)
        # If "gated", the second half of the lines is up.
        line = tl.arange(0, BLOCK_N) % OUT_N
        line_n = line + tl.arange(0, BLOCK_N) // OUT_N * N
        group = load_b_group(A, P, numbers, 0, 0, pid * OUT_N + line_n, pid * OUT_N + line < N)
    if PDL:
        gdc_wait()
    line_m, warp_m = places(WARPS, BLOCK_M)
    offs_xk = warp_m * T.STEP + tl.arange(0, STEP_COLUMNS)[None, :]
    xs = x_ptr + tl.minimum(line_m, rows - 1) * stride_xm + offs_xk
    activations = Activations(xs, order_ptr, offs_xk, line_m, rows)
    first_x = ()
    for i in tl.static_range(X_AHEAD):
        first_x += (load_x(T, activations, i, ORDERED),)
    out_rows = out_ptr + offs_m[None, :] * stride_om
    residual, scale = 0.0, 1.0
    if EPILOGUE == "residual":
        residual = tl.load(out_rows + offs_n, mask=runs & (offs_n < N), other=0.0)
    if NORMED:
        mask_m = (offs_m < rows)[:, None]
        partials = load_partials(sumsq_ptr, offs_m[:, None], mask_m, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
    # The condition is tested after the loads. So no load waits for a branch, and all loads are in flight together.
    if some == 0:
        return
    if NORMED:
        scale = norm_scale(tl.sum(partials, 1), K, eps)
    zero_sums = ()
    if ZEROS_AFTER:
        whole = zero_operand(ZEROS, WARPS, BLOCK_N, DOT_FP32).to(TYPE)
        for i in tl.static_range(X_TILES):
            if i % GROUP_PARTS == 0:
                zero_sum = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
            columns = operand(raised(first_x[i], FORM, DOT_FP32), WARPS, BLOCK_M, True)
            columns = tl.permute(columns, (0, 2, 1)).to(TYPE)
            zero_sum = tl.dot(whole, columns, zero_sum, input_precision="ieee")
            if (i + 1) % GROUP_PARTS == 0:
                zero_sums += (zero_sum,)
    squares = tl.zeros([OUT_N, BLOCK_M], tl.float32)
    for iteration in range(1 if BLOCKS == PROGRAMS else (BLOCKS - pid + PROGRAMS - 1) // PROGRAMS):
        block = pid + iteration * PROGRAMS
        offs_n = block * OUT_N + tl.arange(0, OUT_N)[:, None]
        mask_n = offs_n < N
        x = first_x
        if X_AHEAD < X_TILES and T.SHARED:
            x = ()
            for i in tl.static_range(X_AHEAD):
                x += (load_x(T, activations, i, ORDERED),)
        following, extra_next, row_scales_next, residual_next = here, extra, row_scales, residual
        if T.SHARED:
            following = block_of_rows(T, weight, block + PROGRAMS)
            if FETCH > 0 and FETCH * PROGRAMS < BLOCKS:
                fetch_block(T, weight, block + FETCH * PROGRAMS)
            offs_next = offs_n + PROGRAMS * OUT_N
            extra_next = load_extra(extra_ptr, offs_next, N, EPILOGUE, HAS_BIAS)
            if EPILOGUE == "residual":
                residual_next = tl.load(out_rows + offs_next, mask=runs & (offs_next < N), other=0.0)
            if T.ROW_SCALES:
                row_scales_next = load_row_scales(T, weight, block + PROGRAMS)
        tiles, scales, zeros = w, s, z
        acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
        for c in tl.static_range(CHUNKS):
            for part in tl.static_range(PARTS):
                if c * PARTS + part + X_AHEAD < X_TILES:
                    x += (load_x(T, activations, c * PARTS + part + X_AHEAD, ORDERED),)
                columns = x[c * PARTS + part]
                if FORM == "e4m3" or ZEROS_AFTER:
                    columns = raised(columns, FORM, DOT_FP32)
                columns = tl.permute(operand(columns, WARPS, BLOCK_M, FORM != "dense"), (0, 2, 1)).to(TYPE)
                if FORM == "dense":
                    tile = tiles[c]
                elif MINIMUMS and FORM == "int4":
                    tile = unpack(tiles[c : c + 1], tl.full([1, 1], 0, tl.int32), part, FORM, True, DOT_FP32)
                else:
                    zero = pair(zeros[c * ZERO_PARTS + part % ZERO_PARTS]) if ZEROS and not ZEROS_AFTER else 0
                    words = tiles[c * PIECES : (c + 1) * PIECES]
                    tile = unpack(words, zero, part, FORM, ZEROS and not ZEROS_AFTER, DOT_FP32, ZEROS_AFTER)
                tile_scales = scales[c * LOADED : (c + 1) * LOADED]
                if T.ROUNDS:
                    tile = rounded(T, tile, tile_scales, part, factor(FORM), x_ptr.dtype.element_ty)
                tile = operand(tile, WARPS, BLOCK_N, FORM != "dense").to(TYPE)
                if T.ROUNDS:
                    acc = tl.dot(tile, columns, acc, input_precision="ieee")
                elif T.HALVES == 2:
                    acc = _halves(T, acc, tile, x[c * PARTS + part], tile_scales, part, BLOCK_M, TYPE, DOT_FP32)
                    if MINIMUMS:
                        zeros_m = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
                        x_sum = tl.dot(_ones(T, FORM, TYPE), columns, zeros_m, input_precision="ieee")
                        acc -= x_sum * scale_of(T, tile_scales, part, 1)
                else:
                    if part % GROUP_PARTS == 0:
                        group_sum = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32) if T.GROUPED else acc
                        x_sum = group_sum
                        if ZEROS_AFTER:
                            start = zero_sums[(c * PARTS + part) // GROUP_PARTS]
                            if ZEROS:
                                start *= zero_point(zeros[c * ZERO_PARTS + part // GROUP_PARTS % ZERO_PARTS])
                            group_sum = start if T.GROUPED else acc + start
                    group_sum = tl.dot(tile, columns, group_sum, input_precision="ieee")
                    if MINIMUMS:
                        x_sum = tl.dot(_ones(T, FORM, TYPE), columns, x_sum, input_precision="ieee")
                    if (part + 1) % GROUP_PARTS == 0:
                        if T.GROUPED:
                            acc += group_sum * scale_of(T, tile_scales, part // GROUP_PARTS, 0)
                            if MINIMUMS:
                                acc -= x_sum * scale_of(T, tile_scales, part // GROUP_PARTS, 1)
                        else:
                            acc = group_sum
            # The tile that is AHEAD tiles later belongs to this block or to the next one.
            if c + AHEAD < CHUNKS:
                loaded = load_tile(T, here, c + AHEAD)
                tiles, scales, zeros = tiles + loaded[0], scales + loaded[1], zeros + loaded[2]
            elif T.SHARED:
                loaded = (
                    tiles[c * PIECES : (c + 1) * PIECES],
                    scales[c * LOADED : (c + 1) * LOADED],
                    zeros[c * ZERO_PARTS : (c + 1) * ZERO_PARTS],
                )
                if block + PROGRAMS < BLOCKS:  # The branch keeps the compiler from moving loads of other tiles.
                    loaded = load_tile(T, following, c + AHEAD - CHUNKS)
                tiles, scales, zeros = tiles + loaded[0], scales + loaded[1], zeros + loaded[2]
        if T.SHARED:
            w, s, z = tiles[CHUNKS * PIECES :], scales[CHUNKS * LOADED :], zeros[CHUNKS * ZERO_PARTS :]
        y = tl.sum(acc, 0) * factor(FORM, ZEROS_AFTER or FORM == "e4m3")
        if T.ROW_SCALES:
            y *= row_scales.to(tl.float32)
        if ADAPTERS:
            first_n = block * OUT_N
            mask_line = first_n + line < N
            y += expand_rows(
                A, P, group, first_n + line_n, mask_line, first_n, first_n + OUT_N, numbers, offs_m, TYPE
            )  # fmt: skip
            if BLOCKS > PROGRAMS:
                first_n += PROGRAMS * OUT_N
                group = load_b_group(A, P, numbers, 0, 0, first_n + line_n, first_n + line < N)
        if NORMED:
            y = y * scale[None, :]
        if EPILOGUE == "gated":
            gate, up = tl.split(tl.permute(y.reshape(2, OUT_N, BLOCK_M), (1, 2, 0)))
            y = silu(gate) * up
        normed_ptrs = normed_ptr + offs_m[None, :] * stride_normed + offs_n
        block_squares = finish(
            y, out_rows + offs_n, normed_ptrs, extra, residual, runs & mask_n, mask_n, EPILOGUE, HAS_BIAS
        )
        if EPILOGUE == "residual":
            squares += block_squares
        here, extra, row_scales, residual = following, extra_next, row_scales_next, residual_next
    if EPILOGUE == "residual":
        tl.store(sumsq_ptr + offs_m * stride_sumsq + pid, tl.sum(squares, 0), mask=status == RUN)


def matmul(meta, x, linear, out, epilogue, scratch=None, adapters=None, *, config, pdl=False):
    """Compute `project` for up to 64 rows."""
    packed, (rows, N) = linear.packed, out.shape
    parts = 1 if packed is None else packed.tile // STEP_K
    tiles = cdiv(linear.in_features, parts * STEP_K * config.num_warps)  # Number of tiles of a row for each warp.
    blocks, programs = config.grid(linear.out_features)
    _matmul_kernel[(programs,)](
        meta, x, **linear.arguments(out), **adapter_arguments(adapters),
        # 64 is the minimum of SUMSQ_BLOCK. With tiles of 16 rows or more, the kernel always adds at least 64 partial
        # sums of squares, so that the order of the additions does not depend on the number of rows.
        **epilogue_arguments(linear, out, epilogue, 64 if config.block_m > 8 else 1), stride_xm=x.stride(0), rows=rows,
        BLOCK_M=max(next_power_of_2(rows), config.block_m), N=N, BLOCK_N=config.block_n, WARPS=config.num_warps,
        AHEAD=min(config.ahead, tiles), X_AHEAD=min(config.x_ahead, tiles * parts), BLOCKS=blocks, PROGRAMS=programs,
        ROUNDS=config.rounds,
        # Bulk copies need addresses that are multiples of 16 bytes. Devices with dependent launch support bulk copies.
        FETCH=config.fetch if pdl and packed is not None and N % 8 == 0 else 0, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def _supports(case, rows, device) -> bool:
    """Return whether matmul computes the case; see LinearKernel."""
    return rows <= MAX_ROWS and not 0 < device.capability < 80 and bool(case.packed or case.weight_type in SHORT)


MATMUL = LinearKernel(
    "matmul",
    Op(matmul, adapted_ref, adapted_bytes, (_matmul_kernel,), OUTPUTS),
    MatmulConfig,
    _supports,
    lambda n, config: config.grid(n)[1],
    adapts=lambda config: True,
)
