"""expert_weight: what the kernels share that multiply by packed weights of experts.

The weights of all experts are the rows of one packed tensor (linear/packed.py). A kernel loads weight tiles: a weight
tile has 64 to 256 columns of BLOCK_N rows for each warp, in words, and its parts have 32 columns each
(linear/register_tiles.py). The words become bf16 in registers.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import cdiv
from ..linear.bits import factor, pair, raised, unpack
from ..linear.epilogue import silu
from ..linear.register_tiles import STEP_COLUMNS, Weight, operand, rounded, scale_of
from ..linear.weight import LoadedLinear

MIN_BLOCK_M = 8  # Minimum number of rows of activations of an mma instruction.


@dataclass(frozen=True)
class PackedRowsConfig:
    """Launch config of a product of each row with the packed weights of its experts.

    Attributes:
        block_n: Rows of the weight in a block, a multiple of 16. gate_up counts gate and up together.
        x_ahead: Parts of 32 columns of the activations that a warp prefetches.
        registers: Maximum number of registers of a thread. With 0, only the GPU limits it.
    """

    block_n: int = 16
    num_warps: int = 4
    x_ahead: int = 16
    registers: int = 0

    def programs(self, n: int) -> int:
        """Return the number of blocks of n rows of a weight. Each of down stores one partial sum of squares."""
        return cdiv(n, self.block_n)


@triton.jit
def weight_of_expert(T: tl.constexpr, experts, expert, ROWS: tl.constexpr):
    """Return the Weight of one expert.

    Args:
        experts: the Weight of all experts.
        expert: number of the expert.
        ROWS: rows of the weight of an expert.
    """
    first = expert.to(tl.int64) * ROWS
    return Weight(
        experts.weight_ptr + first * T.LENGTH,
        experts.scale_ptr + first // T.SCALE_ROWS * T.GROUPS,
        experts.zero_ptr + first * T.GROUPS,
        experts.minimum_ptr + first * T.LOWS,
        experts.over_ptr + first * (T.OVERS * (1 + T.MINIMUMS)),
    )


@triton.jit
def unpack_part(T: tl.constexpr, words, zeros, part: tl.constexpr, FORM: tl.constexpr, DOT_FP32: tl.constexpr):
    """Return the codes of a part of a weight tile, less their zero points: [lines, 32], see `unpack`.

    Args:
        words, zeros: see `load_tile`.
    """
    if T.MINIMUMS and FORM == "int4":  # Their zero point is 0. Without zeros, `unpack` subtracts 8.
        return unpack(words, tl.full([1, 1], 0, tl.int32), part, FORM, True, DOT_FP32)
    else:
        zero = pair(zeros[part % T.ZERO_PARTS]) if T.ZEROS else 0
        return unpack(words, zero, part, FORM, T.ZEROS, DOT_FP32)


@triton.jit
def add_tile(
    T: tl.constexpr, acc, words, scales, zeros, x, factors, FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_FACTORS: tl.constexpr, DTYPE: tl.constexpr, TYPE: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the products of the warps' weight tiles to acc [WARPS, BLOCK_N, BLOCK_M].

    The caller multiplies acc by `factor(FORM)` at the end.

    Args:
        words, scales, zeros: see `load_tile`.
        x: a tuple of the activations of each part, [WARPS * BLOCK_M, 32]; see `load_x`.
        factors: [WARPS, BLOCK_N, 1], which multiply the products if HAS_FACTORS.
        DTYPE: dtype of the activations.
        TYPE: dtype of the operands of the product: DTYPE, or fp32 in the interpreter (DOT_FP32).
    """
    total = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32) if HAS_FACTORS else acc
    for part in tl.static_range(T.PARTS):
        columns = raised(x[part], FORM, DOT_FP32) if FORM == "e4m3" else x[part]
        columns = tl.permute(operand(columns, T.WARPS, BLOCK_M, True), (0, 2, 1)).to(TYPE)
        codes = unpack_part(T, words, zeros, part, FORM, DOT_FP32)
        if T.ROUNDS:
            codes = rounded(T, codes, scales, part, factor(FORM), DTYPE)
        codes = operand(codes, T.WARPS, T.BLOCK_N, True).to(TYPE)
        if T.ROUNDS or not T.GROUPED:
            total = tl.dot(codes, columns, total, input_precision="ieee")
        else:
            if part % T.GROUP_PARTS == 0:
                group_sum = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32)
            group_sum = tl.dot(codes, columns, group_sum, input_precision="ieee")
            if (part + 1) % T.GROUP_PARTS == 0:
                total += group_sum * scale_of(T, scales, part // T.GROUP_PARTS, 0)
    return acc + total * factors if HAS_FACTORS else total


@triton.jit
def store_products(
    T: tl.constexpr, y, pairs, mask_m, block, norm, pair_weights_ptr, out_ptr, GATED: tl.constexpr,
    NORMED: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the results of pairs from their products with a block of rows of their expert's weight.

    With GATED, a result is silu(gate) * up. Otherwise it is the product times the weight of the pair.

    Args:
        y: fp32 [BLOCK_N, BLOCK_M], the products. With GATED, the first half of the rows is gate.
        pairs, mask_m: [BLOCK_M], the pairs, and whether they exist.
        block: number of the block.
        norm: [1, BLOCK_M] or a number, which multiplies the products if NORMED.
        pair_weights_ptr: [all pairs] fp32, the weights of the pairs. Read only without GATED.
        out_ptr: [all pairs, T.N] (output).
    """
    offs_n = block * T.OUT_N + tl.arange(0, T.OUT_N)[:, None]
    if GATED:
        if NORMED:
            y = y * norm
        gate, up = tl.split(tl.permute(y.reshape(2, T.OUT_N, BLOCK_M), (1, 2, 0)))
        y = silu(gate) * up
    else:
        y = y * tl.load(pair_weights_ptr + pairs, mask=mask_m, other=0.0)[None, :]
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * T.N + offs_n
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_m[None, :] & (offs_n < T.N))


def rounds(linear: LoadedLinear) -> bool:
    """Return whether weights are scaled and rounded to bf16 before the product.

    Otherwise the scales multiply the sums of groups. Kernels ignore it for e4m3 codes.
    """
    packed = linear.packed
    assert packed is not None
    return packed.minimums or packed.group < STEP_COLUMNS.value


def warp_parts(linear: LoadedLinear, k: int, num_warps: int) -> int:
    """Return the number of parts of 32 columns that each warp multiplies in rows of k columns."""
    packed = linear.packed
    assert packed is not None
    return cdiv(k, packed.tile * num_warps) * (packed.tile // STEP_COLUMNS.value)
