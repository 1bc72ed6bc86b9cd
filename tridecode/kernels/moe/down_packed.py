"""down_packed: the product of down for passes of one or two rows, with packed weights of experts.

The warps of a program share the weight tiles of all experts of a row. A program loads all of them before its wait.
"""

import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, cdiv, gdc_launch_dependents, gdc_wait, interpreted, options
from ..linear.bits import factor
from ..linear.project import OUTPUTS, AddResidual
from ..linear.register_tiles import STEP_COLUMNS, Block, Weight, load_group, load_scales, places, tiling
from ..linear.weight import LoadedLinear
from ..op import Op
from .arguments import ExpertSizes, Routes
from .expert_rows import down_rows_ref, expert_rows_bytes
from .expert_weight import MIN_BLOCK_M, PackedRowsConfig, add_tile, rounds, warp_parts


@triton.constexpr_function
def _tile_is_whole(k, step, tiles, warps, used, c):
    """Return whether tile c of every warp exists and has no column beyond k; see `_place`.

    Args:
        step: columns of a tile.
        tiles: tiles of a row of an expert's weight.
        used: number of experts of a row of the pass.
    """
    chunks = -(-used * tiles // warps)
    exist = warps * (chunks // tiles) <= used if chunks % tiles == 0 else (c + 1) * warps <= used * tiles
    return exist and k % step == 0


@triton.jit
def _place(T: tl.constexpr, c: tl.constexpr, warp, USED: tl.constexpr):
    """Return the indices of tile c of each warp: of its expert in the row's USED experts, and of the tile in a row.

    If CHUNKS is a multiple of TILES, a warp takes all tiles of CHUNKS / TILES experts. Otherwise successive tiles go to
    successive warps.
    """
    TILES: tl.constexpr = T.LENGTH // T.LINE
    CHUNKS: tl.constexpr = (USED * TILES + T.WARPS - 1) // T.WARPS  # Tiles of a warp.
    if CHUNKS % TILES == 0:
        return warp * (CHUNKS // TILES) + c // TILES, warp * 0 + c % TILES
    else:
        return (c * T.WARPS + warp) // TILES, (c * T.WARPS + warp) % TILES


@triton.jit
def _rows_of_experts(T: tl.constexpr, ids, place, offs_n, USED: tl.constexpr):
    """Return the numbers of rows offs_n of an expert among the rows of all experts, and whether they exist.

    Args:
        ids: pointer to the ids of the USED experts.
        place: place of the expert's id.
    """
    expert = tl.load(ids + place, mask=place < USED, other=0).to(tl.int64)
    return expert * T.N + offs_n, (place < USED) & (offs_n < T.N)


@triton.jit
def _load_tiles(T: tl.constexpr, experts, ids, routes, c: tl.constexpr, first_n, USED: tl.constexpr):
    """Load tile c of each warp, for the experts of one row of the pass.

    Return words, scales and zero points as `load_tile` does, and a tuple of one tensor [WARPS, BLOCK_N, 1]: the factors
    of the products. A factor is the weight of the pair, times the scale of a row of the weight that has one scale.

    Args:
        experts: the Weight of all experts.
        ids, routes: pointers to the ids of the row's experts and to their weights.
        first_n: first row of the block in the weight of each expert.
    """
    WHOLE: tl.constexpr = _tile_is_whole(T.K, T.STEP, T.LENGTH // T.LINE, T.WARPS, USED, c)
    PIECE: tl.constexpr = T.LINE // T.PIECES
    line_n, warp = places(T.WARPS, T.BLOCK_N)
    place, tile = _place(T, c, warp, USED)
    rows, mask = _rows_of_experts(T, ids, place, first_n + line_n, USED)
    # The same for the layout of the sums, whose axes are the warps and the rows of the block.
    sum_place, sum_tile = _place(T, c, tl.arange(0, T.WARPS)[:, None, None], USED)
    sum_rows, mask_sums = _rows_of_experts(T, ids, sum_place, first_n + tl.arange(0, T.BLOCK_N)[None, :, None], USED)
    scale_tile, mask_scales, scale_rows = sum_tile, mask_sums, sum_rows
    if T.ROUNDS:
        scale_tile, mask_scales, scale_rows = tile, mask, rows
    block = Block(
        experts.weight_ptr + rows * T.LENGTH + tile * T.LINE + tl.arange(0, PIECE)[None, :],
        experts.scale_ptr + scale_rows // T.SCALE_ROWS * T.GROUPS,
        experts.zero_ptr + rows * T.GROUPS,
        experts.minimum_ptr + scale_rows * T.LOWS,
        experts.over_ptr + scale_rows * (T.OVERS * (1 + T.MINIMUMS)),
        mask,
        mask_sums,
    )
    words, zeros = (), ()
    for i in tl.static_range(T.PIECES):
        if WHOLE and not T.MASKED:
            words += (tl.load(block.weights + i * PIECE, eviction_policy="evict_first"),)
        else:
            words += (tl.load(block.weights + i * PIECE, mask=mask, other=0, eviction_policy="evict_first"),)
    scales = load_scales(T, block, scale_tile * T.STEP, mask_scales, WHOLE)
    for i in tl.static_range(T.ZERO_PARTS):
        zeros += (load_group(T, block.zeros, tile * T.STEP + i * STEP_COLUMNS, mask, WHOLE, T.GROUP),)
    factors = tl.load(routes + sum_place, mask=sum_place < USED, other=0.0)
    if T.ROW_SCALES:
        row_scales = tl.load(experts.scale_ptr + sum_rows // T.SCALE_ROWS, mask=mask_sums, other=0.0)
        factors = factors * row_scales.to(tl.float32)
    return words, scales, zeros, (factors,)


@triton.jit
def _load_x_of_tiles(
    T: tl.constexpr, xs, order_ptr, warp, i: tl.constexpr, USED: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """Load the activations for part i % PARTS of tile i // PARTS of each warp: [WARPS * BLOCK_M, 32].

    The operand of the tensor cores has BLOCK_M rows, all of which have the activations of this row of the pass. The
    kernel stores only the first column of the product.

    Args:
        xs: pointer to the activations of the row of the pass, [USED * K].
        warp: [WARPS * BLOCK_M, 1], the warp of each line; see `places`.
    """
    WHOLE: tl.constexpr = _tile_is_whole(T.K, T.STEP, T.LENGTH // T.LINE, T.WARPS, USED, i // T.PARTS)
    place, tile = _place(T, i // T.PARTS, warp, USED)
    column = tl.arange(0, STEP_COLUMNS)[None, :] + (tile * T.STEP + i % T.PARTS * STEP_COLUMNS)
    mask = (place < USED) & (column < T.K)
    if ORDERED:
        column = tl.load(order_ptr + column, mask=mask, other=0)
    x_ptrs = xs + place * T.K + column
    if WHOLE:
        return tl.load(x_ptrs)
    else:
        return tl.load(x_ptrs, mask=mask, other=0.0)


@triton.jit
def _down_packed_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, zero_ptr, order_ptr, minimum_ptr, over_ptr, ids_ptr, pair_weights_ptr,
    norm_ptr, out_ptr, normed_ptr, sumsq_ptr, stride_xm, stride_om, stride_normed, stride_sumsq, N: tl.constexpr,
    K: tl.constexpr, USED: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr, ORDERED: tl.constexpr, MINIMUMS: tl.constexpr, OVER: tl.constexpr, ROUNDS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WARPS: tl.constexpr, X_AHEAD: tl.constexpr, PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the weighted products of the experts of a row to the residual stream, and prepare the next norm.

    Grid: (cdiv(N, BLOCK_N), rows). A program computes BLOCK_N columns of the residual stream. It reads ids_ptr and
    pair_weights_ptr before gdc_wait; see _expert_packed_kernel.

    Args:
        x_ptr: [rows, USED * K].
        weight_ptr and the following: the weights of all experts, [experts, N, K]; see _matmul_kernel.
        ids_ptr, pair_weights_ptr: [rows, USED], the experts and their weights.
        norm_ptr: [N], the weight of the next norm.
        out_ptr: [rows, N] fp32, the residual stream, updated in place.
        normed_ptr: [rows, N] (output), out * norm.
        sumsq_ptr: [rows, programs] fp32 (output), partial sums of out ** 2.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else DTYPE
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER,
        ROUNDS=ROUNDS and FORM != "e4m3", GATED=False, BLOCK_N=BLOCK_N, WARPS=WARPS, X_AHEAD=X_AHEAD,
    )  # fmt: skip
    CHUNKS: tl.constexpr = (USED * (T.LENGTH // T.LINE) + WARPS - 1) // WARPS  # Weight tiles of a warp.
    pid, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    if status == RUN:
        offs_n, offs_m = pid * BLOCK_N + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
        norm = tl.load(norm_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        ids = ids_ptr + row * USED
        experts = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
        words, scales, zeros, factors = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            tile = _load_tiles(T, experts, ids, pair_weights_ptr + row * USED, c, pid * BLOCK_N, USED)
            words, scales, zeros, factors = words + tile[0], scales + tile[1], zeros + tile[2], factors + tile[3]
        if PDL:
            gdc_wait()
        _, warp_m = places(WARPS, BLOCK_M)
        xs = x_ptr + row * stride_xm
        x = ()
        for i in tl.static_range(X_AHEAD):
            x += (_load_x_of_tiles(T, xs, order_ptr, warp_m, i, USED, ORDERED),)
        mask = (offs_n < N) & (offs_m < 1)
        out_ptrs = out_ptr + row * stride_om + offs_n + offs_m * 0
        y = tl.load(out_ptrs, mask=mask, other=0.0)
        acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
        for c in tl.static_range(CHUNKS):
            for part in tl.static_range(T.PARTS):
                if c * T.PARTS + part + X_AHEAD < CHUNKS * T.PARTS:
                    x += (_load_x_of_tiles(T, xs, order_ptr, warp_m, c * T.PARTS + part + X_AHEAD, USED, ORDERED),)
            acc = add_tile(
                T, acc, words[c * T.PIECES : (c + 1) * T.PIECES], scales[c * T.LOADED : (c + 1) * T.LOADED],
                zeros[c * T.ZERO_PARTS : (c + 1) * T.ZERO_PARTS], x[c * T.PARTS : (c + 1) * T.PARTS], factors[c], FORM,
                BLOCK_M, True, DTYPE, TYPE, DOT_FP32,
            )  # fmt: skip
        y += tl.sum(acc, 0) * factor(FORM, FORM == "e4m3")
        tl.store(out_ptrs, y, mask=mask)
        normed_ptrs = normed_ptr + row * stride_normed + offs_n + offs_m * 0
        tl.store(normed_ptrs, (y * norm).to(normed_ptr.dtype.element_ty), mask=mask)
        tl.store(sumsq_ptr + row * stride_sumsq + pid, tl.sum(tl.where(mask, y * y, 0.0)))
    elif PDL:
        gdc_wait()


def down_packed_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, epilogue: AddResidual, sizes: ExpertSizes, *,
    config: PackedRowsConfig, pdl=False,
):  # fmt: skip
    """Add the products of each row with its experts, times their weights, to the residual stream, as `down_rows`."""
    rows, n = out.shape
    packed = linear.packed
    assert packed is not None
    tiles = cdiv(linear.in_features, packed.tile) * sizes.used
    _down_packed_kernel[(config.programs(n), rows)](
        meta, x, **linear.arguments(out), ids_ptr=routes.ids, pair_weights_ptr=routes.weights, norm_ptr=epilogue.norm,
        out_ptr=out, normed_ptr=epilogue.normed, sumsq_ptr=epilogue.sumsq, stride_xm=x.stride(0),
        stride_om=out.stride(0), stride_normed=epilogue.normed.stride(0), stride_sumsq=epilogue.sumsq.stride(0), N=n,
        USED=sizes.used, ROUNDS=rounds(linear), BLOCK_M=MIN_BLOCK_M, BLOCK_N=config.block_n,
        WARPS=config.num_warps,
        X_AHEAD=min(config.x_ahead, warp_parts(linear, tiles * packed.tile, config.num_warps)), PDL=pdl,
        DOT_FP32=interpreted(), **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


DOWN_PACKED_ROWS = Op(down_packed_rows, down_rows_ref, expert_rows_bytes, (_down_packed_kernel,), OUTPUTS)
