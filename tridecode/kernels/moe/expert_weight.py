"""expert_weight: parts of the kernels that multiply by packed weights of experts.

The weights of all experts are the rows of one packed tensor (linear/packed.py). They become bf16 in registers.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import cdiv
from ..linear.bits import factor, pair, raised, unpack
from ..linear.epilogue import silu
from ..linear.register_tiles import STEP_COLUMNS, Weight, operand, rounded, scale_of
from ..linear.weight import LoadedLinear

LINES = 8  # Minimum number of columns of mma.


@dataclass(frozen=True)
class PackedRowsConfig:
    """Launch config of a product of one row with the packed weights of its experts.

    Attributes:
        block_n: Rows of the weight in a block, a multiple of 16. gate_up counts gate and up together.
        x_ahead: Parts of 32 columns of the activations that a warp prefetches.
        registers: Maximum number of registers of a thread; 0: no limit.
        max_programs: Number of programs of gate_up, which share the blocks. 0 launches one for each block.
        stages: Tiles of the weight of gate_up that a warp has in flight. down loads all tiles at once.
        rounds: Scale integers and round them to bf16 before the product. Otherwise the scales multiply the sums of
            groups. Weights with minimums or groups of 16 columns are always rounded.
    """

    block_n: int = 16
    num_warps: int = 4
    x_ahead: int = 16
    registers: int = 0
    max_programs: int = 0
    stages: int = 64
    rounds: bool = False

    def programs(self, n: int) -> int:
        """Return the number of blocks of n rows of a weight. Each of down stores one partial sum of squares."""
        return cdiv(n, self.block_n)


@triton.jit
def weight_of_expert(T: tl.constexpr, w, expert, ROWS: tl.constexpr):
    """Return the Weight of one expert, of ROWS rows, from that of all."""
    first = expert.to(tl.int64) * ROWS
    return Weight(
        w.weight_ptr + first * T.LENGTH,
        w.scale_ptr + first // T.SCALE_ROWS * T.GROUPS,
        w.zero_ptr + first * T.GROUPS,
        w.minimum_ptr + first * T.LOWS,
        w.over_ptr + first * (T.OVERS * (1 + T.MINIMUMS)),
    )


@triton.jit
def codes(T: tl.constexpr, words, zeros, part: tl.constexpr, FORM: tl.constexpr, DOT_FP32: tl.constexpr):
    """Unpack a part of a tile, see `unpack`, and subtract the zero points."""
    if T.MINIMUMS and FORM == "int4":
        return unpack(words, tl.full([1, 1], 0, tl.int32), part, FORM, True, DOT_FP32)
    else:
        zero = pair(zeros[part % T.ZERO_PARTS]) if T.ZEROS else 0
        return unpack(words, zero, part, FORM, T.ZEROS, DOT_FP32)


@triton.jit
def add_tile(
    T: tl.constexpr, acc, words, scales, zeros, x, factors, FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_FACTORS: tl.constexpr, DTYPE: tl.constexpr, TYPE: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the products of the warps' tiles to acc [WARPS, BLOCK_N, BLOCK_M], without `factor(FORM)`.

    Args:
        words, scales, zeros: see `load_tile`.
        x: a tuple of the tile's parts of the activations.
        factors: [WARPS, BLOCK_N, 1], which multiply the products if HAS_FACTORS.
    """
    total = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32) if HAS_FACTORS else acc
    for part in tl.static_range(T.PARTS):
        columns = raised(x[part], FORM, DOT_FP32) if FORM == "e4m3" else x[part]
        columns = tl.permute(operand(columns, T.WARPS, BLOCK_M, True), (0, 2, 1)).to(TYPE)
        tile = codes(T, words, zeros, part, FORM, DOT_FP32)
        if T.ROUNDS:
            tile = rounded(T, tile, scales, part, factor(FORM), DTYPE)
        tile = operand(tile, T.WARPS, T.BLOCK_N, True).to(TYPE)
        if T.ROUNDS or not T.GROUPED:
            total = tl.dot(tile, columns, total, input_precision="ieee")
        else:
            if part % T.GROUP_PARTS == 0:
                group_sum = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32)
            group_sum = tl.dot(tile, columns, group_sum, input_precision="ieee")
            if (part + 1) % T.GROUP_PARTS == 0:
                total += group_sum * scale_of(T, scales, part // T.GROUP_PARTS, 0)
    return acc + total * factors if HAS_FACTORS else total


@triton.jit
def finish(
    T: tl.constexpr, y, pairs, mask_m, block, norm, routes_ptr, out_ptr, GATED: tl.constexpr, NORMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the results of pairs from the products y [BLOCK_N, BLOCK_M] with a block of rows of an expert's weight.

    Args:
        norm: [1, BLOCK_M] or a number, which multiplies the products if NORMED.
    """
    offs_n = block * T.OUT_N + tl.arange(0, T.OUT_N)[:, None]
    if GATED:
        if NORMED:
            y = y * norm
        gate, up = tl.split(tl.permute(y.reshape(2, T.OUT_N, BLOCK_M), (1, 2, 0)))
        y = silu(gate) * up
    else:
        y = y * tl.load(routes_ptr + pairs, mask=mask_m, other=0.0)[None, :]
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * T.N + offs_n
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_m[None, :] & (offs_n < T.N))


def rounds(linear: LoadedLinear, config: PackedRowsConfig) -> bool:
    """Return whether weights are scaled and rounded before the product."""
    packed = linear.packed
    assert packed is not None
    return config.rounds or packed.minimums or packed.group < STEP_COLUMNS.value


def warp_parts(linear: LoadedLinear, k: int, num_warps: int) -> int:
    """Return the number of parts of 32 columns that each warp multiplies of rows of k columns."""
    packed = linear.packed
    assert packed is not None
    return cdiv(k, packed.tile * num_warps) * (packed.tile // STEP_COLUMNS.value)
