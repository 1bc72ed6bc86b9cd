"""prompt_packed: the products of many rows with packed weights of experts, in tiles of pairs of one expert.

A fixed number of programs walks the tiles that `sort_pairs` lists. The weights of groups are scaled and rounded to bf16
before the products, once for all pairs of a tile.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import gdc_launch_dependents, gdc_wait, interpreted, next_power_of_2, options
from ..linear.bits import factor, raised_weights
from ..linear.epilogue import load_partials, norm_scale
from ..linear.project import Normed
from ..linear.register_tiles import (
    STEP_COLUMNS,
    Weight,
    block_of_rows,
    load_group,
    load_row_scales,
    load_scales,
    rounded,
    tiling,
)
from ..linear.weight import LoadedLinear
from ..op import Op
from ..sort_pairs import PairTiles, load_entry
from .arguments import ExpertSizes, Routes
from .expert_tiles import down_tiles_ref, expert_tiles_bytes, gate_up_tiles_ref
from .expert_weight import store_products, unpack_part, weight_of_expert


@dataclass(frozen=True)
class PackedPromptConfig:
    """Launch config of a product with packed weights in tiles of pairs, for many rows.

    Attributes:
        block_m: Maximum number of pairs of a tile, a multiple of 16.
        block_n: Rows of the weight in a block. gate_up counts gate and up together.
        stages: Steps in flight. A step is the columns of a tile of the packed tensor.
        programs: Number of programs, which share the products of a tile of pairs and a block.
    """

    block_m: int
    block_n: int
    stages: int
    num_warps: int
    programs: int

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return self.block_m


@triton.jit
def _load_groups(T: tl.constexpr, block, column, WHOLE: tl.constexpr):
    """Load the scales and the zero points of a step of a block, for `rounded` and `unpack_part`.

    Args:
        block: a Block.
        column: [1, 1] int32, the first column of the step.
        WHOLE: all columns of the step exist.
    """
    scales, zeros = load_scales(T, block, column, block.mask_lines, WHOLE), ()
    for i in tl.static_range(T.ZERO_PARTS):
        zeros += (load_group(T, block.zeros, column + i * STEP_COLUMNS, block.mask_lines, WHOLE, T.GROUP),)
    return scales, zeros


@triton.jit
def _weights_of_part(
    T: tl.constexpr, words, scales, zeros, part: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Return the weights of a part of a step, [BLOCK_N, 32].

    They are scaled and rounded to DTYPE. If a row has one scale, they are unscaled.
    """
    codes = unpack_part(T, words, zeros, part, FORM, DOT_FP32)
    if T.ROUNDS:
        return rounded(T, codes, scales, part, 1.0, DTYPE, factor(FORM))
    elif FORM == "e4m3":
        return raised_weights(codes, DOT_FP32)
    else:
        return codes


@triton.jit(do_not_specialize=["n_sumsq"])
def _prompt_packed_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, order_ptr, minimum_ptr, over_ptr, out_ptr, pairs_ptr, tiles_ptr, count_ptr,
    pair_weights_ptr, sumsq_ptr, eps, stride_xm, stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr,
    USED: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, MINIMUMS: tl.constexpr,
    OVER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr,
    PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile of pairs by the weight of its expert, and store the results by pair.

    With GATED, the weight of an expert is [2 * N, K], the rows are rows of the pass, and the result is
    silu(gate) * up. Otherwise it is [N, K], there is a row for each pair, and the result is multiplied by the weight
    of the pair.

    Grid: (PROGRAMS,). Each program takes every PROGRAMS-th product of a tile of pairs and a block of BLOCK_N rows of
    the weight.

    Args:
        x_ptr: [rows, K] if GATED, else [pairs, K].
        weight_ptr and the following: the weights of all experts; see _matmul_kernel.
        out_ptr: [pairs, N] (output).
        pairs_ptr, tiles_ptr, count_ptr: see PairTiles.
        pair_weights_ptr: [pairs] fp32. Read only without GATED.
        sumsq_ptr: partial sums of squares of the rows. Read only if NORMED.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else DTYPE
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER, ROUNDS=True, GATED=GATED,
        BLOCK_N=BLOCK_N, WARPS=1, X_AHEAD=0,
    )  # fmt: skip
    BLOCKS: tl.constexpr = (N + T.OUT_N - 1) // T.OUT_N
    ROWS: tl.constexpr = 2 * N if GATED else N
    WHOLE: tl.constexpr = K % T.STEP == 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    experts = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, 2 * STEP_COLUMNS)[None, :]
    for item in range(tl.program_id(0), tl.load(count_ptr) * BLOCKS, PROGRAMS):
        expert, first, count = load_entry(tiles_ptr, item // BLOCKS)
        block_number, mask_m = item % BLOCKS, offs_m < count
        pairs = tl.load(pairs_ptr + first + offs_m, mask=mask_m, other=0)
        rows = pairs // USED if GATED else pairs
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_xm
        weight = weight_of_expert(T, experts, expert, ROWS)
        block = block_of_rows(T, weight, block_number)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        column_0 = tl.zeros([1, 1], tl.int32)
        scales, zeros = _load_groups(T, block, column_0, WHOLE)
        for k in tl.range(0, K, T.STEP, num_stages=STAGES):
            # The weights are scaled before the product, so the scales are loaded one step ahead. The last step loads
            # its own again.
            next_groups = _load_groups(T, block, tl.minimum(column_0 + (k + T.STEP), (T.CHUNKS - 1) * T.STEP), WHOLE)
            words = ()
            for i in tl.static_range(T.PIECES):
                words_ptrs = block.weights + (k // T.STEP * T.LINE + i * (T.LINE // T.PIECES))
                words += (tl.load(words_ptrs, mask=block.mask_lines, other=0),)
            for two_parts in tl.static_range(T.PARTS // 2):  # One product multiplies 64 columns.
                column = k + two_parts * (2 * STEP_COLUMNS) + offs_k
                mask = mask_m[:, None]
                if not WHOLE:
                    mask = mask & (column < K)
                if ORDERED:
                    column = tl.load(order_ptr + column, mask=column < K, other=0)
                x = tl.load(x_ptrs + column, mask=mask, other=0.0)
                first_part = _weights_of_part(T, words, scales, zeros, two_parts * 2, FORM, DTYPE, DOT_FP32)
                second_part = _weights_of_part(T, words, scales, zeros, two_parts * 2 + 1, FORM, DTYPE, DOT_FP32)
                w = tl.permute(tl.join(first_part, second_part), (0, 2, 1)).reshape(BLOCK_N, 2 * STEP_COLUMNS)
                acc = tl.dot(w.to(TYPE), tl.trans(x.to(TYPE)), acc, input_precision="ieee")
            scales, zeros = next_groups[0], next_groups[1]
        y = acc
        if T.ROW_SCALES:
            row_scales = load_row_scales(T, weight, block_number).to(tl.float32)
            # The weights of e4m3 codes already have the factor; see _weights_of_part.
            y = y * (row_scales if FORM == "e4m3" else row_scales * factor(FORM))
        norm = 1.0
        if NORMED:
            rows_m = (pairs // USED)[:, None]
            partials = load_partials(sumsq_ptr, rows_m, mask_m[:, None], stride_sumsq, n_sumsq, SUMSQ_BLOCK)
            norm = norm_scale(tl.sum(partials, 1), K, eps)[None, :]
        store_products(T, y, pairs, mask_m, block_number, norm, pair_weights_ptr, out_ptr, GATED, NORMED, BLOCK_M)


def _launch(x, linear, tiles, routes, out, normed, sizes, config, pdl, gated) -> None:
    sumsq, n_sumsq, eps = normed or (out, 0, 0.0)
    _prompt_packed_kernel[(config.programs,)](
        x, **linear.arguments(out), out_ptr=out, pairs_ptr=tiles.pairs, tiles_ptr=tiles.tiles, count_ptr=tiles.number,
        pair_weights_ptr=routes.weights, sumsq_ptr=sumsq, eps=eps,
        stride_xm=x.stride(0) if gated else linear.in_features, stride_sumsq=sumsq.stride(0), n_sumsq=n_sumsq,
        N=out.shape[1] // sizes.used, USED=sizes.used, GATED=gated, NORMED=normed is not None,
        SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 1)), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        STAGES=config.stages, PROGRAMS=config.programs, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl),
    )  # fmt: skip


def gate_up_packed_prompt(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: ExpertSizes, *,
    config: PackedPromptConfig, pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_tiles`, for many rows."""
    _launch(x, linear, tiles, routes, out, normed, sizes, config, pdl, True)


def down_packed_prompt(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, sizes: ExpertSizes, *, config: PackedPromptConfig,
    pdl=False,
):  # fmt: skip
    """Multiply silu(gate) * up of each pair by its expert's weight and its own, as `down_tiles`, for many rows."""
    _launch(x, linear, tiles, routes, out, None, sizes, config, pdl, False)


GATE_UP_PACKED_PROMPT = Op(
    gate_up_packed_prompt, gate_up_tiles_ref, expert_tiles_bytes, (_prompt_packed_kernel,), outputs=("out",)
)
DOWN_PACKED_PROMPT = Op(
    down_packed_prompt, down_tiles_ref, expert_tiles_bytes, (_prompt_packed_kernel,), outputs=("out",)
)
