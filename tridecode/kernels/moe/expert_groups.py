"""expert_groups: the products of each row with packed weights of its experts that have scales of 16 or 32 columns.

Passes of one or two rows use them. Each pair is a product of one row, computed as in linear/matmul_groups.py.
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
from ..linear.bits import factor
from ..linear.epilogue import load_partials, norm_scale, silu
from ..linear.matmul_groups import (
    add_groups,
    load_numbers,
    load_tile_of_groups,
    load_x_of_groups,
    multiplies,
    no_groups,
    weight_arguments,
)
from ..linear.packed import Packed
from ..linear.project import OUTPUTS, AddResidual, Gated
from ..linear.register_tiles import Weight, block_of_rows, places, tiling
from ..linear.weight import LoadedLinear
from ..op import Op
from .arguments import ExpertSizes, Routes
from .expert_rows import down_rows_ref, expert_rows_bytes, gate_up_rows_ref
from .expert_weight import weight_of_expert

BLOCK_N = 16  # Rows of the weight of a program. In gate_up, eight are rows of gate and eight are rows of up.


@dataclass(frozen=True)
class ExpertGroupsConfig:
    """Launch config of a product of expert_groups. The warps of a program share the columns, or of down the experts."""

    num_warps: int
    registers: int = 0

    def programs(self, n: int) -> int:
        """Return the number of programs for n rows of a weight. Each of down stores one partial sum of squares."""
        return cdiv(n, BLOCK_N)


def down_multiplies(packed: Packed) -> bool:
    """Return whether down reads packed tensors of this description: a row has only whole spans of eight groups."""
    return multiplies(packed) and packed.k % (8 * packed.group) == 0


@triton.jit(do_not_specialize=["n_sumsq"])
def _gate_up_groups_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, minimum_ptr, over_ptr, ids_ptr, out_ptr, sumsq_ptr, eps, stride_xm,
    stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr, USED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, MINIMUMS: tl.constexpr, OVER: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of a row. A program computes eight columns of one expert.

    Grid: (blocks of eight columns, USED, rows). The kernel calls gdc_launch_dependents only after gdc_wait. So `route`
    has ended before any later kernel of the pass starts, and later kernels may read the ids before their own gdc_wait.

    Args:
        x_ptr: [rows, K], the residual stream times the norm's weight.
        weight_ptr and the following: the weights of all experts, [experts, 2 * N, K]; see _matmul_kernel.
        ids_ptr: [rows, USED] int32.
        out_ptr: [rows, USED * N] (output).
        sumsq_ptr: partial sums of squares of the rows.
    """
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, 1, scale_ptr.dtype.element_ty, False, MINIMUMS, OVER, ROUNDS=False, GATED=True, BLOCK_N=16,
        WARPS=WARPS, X_AHEAD=0,
    )  # fmt: skip
    pid, row = tl.program_id(0), tl.program_id(2)
    pair = row * USED + tl.program_id(1)
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if status != RUN:
        return
    experts = Weight(weight_ptr, scale_ptr, scale_ptr, minimum_ptr, over_ptr)
    weight = weight_of_expert(T, experts, tl.load(ids_ptr + pair), 2 * N)
    block = block_of_rows(T, weight, pid)
    w, spans, xs = (), (), ()
    for c in tl.static_range(T.CHUNKS):
        loaded = load_tile_of_groups(T, weight, block, pid, c)
        w, spans = w + loaded[0], spans + loaded[1]
    for span in tl.static_range(T.SPANS):
        xs += (load_x_of_groups(T, x_ptr + row * stride_xm, span),)
    partials = load_partials(sumsq_ptr, row, True, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
    tl.debug_barrier()  # Otherwise the compiler moves loads behind products.
    state = no_groups(T, xs[0], FORM, DOT_FP32)
    for c in tl.static_range(T.CHUNKS):
        words = w[c * T.PIECES : (c + 1) * T.PIECES]
        state = add_groups(T, state, words, spans, xs, c, T.X_TILES, FORM, MINIMUMS, TYPE, DOT_FP32)
    scale = norm_scale(tl.sum(partials, 0), K, eps) * factor(FORM, FORM == "int4")
    y = tl.sum(tl.sum(state[0], 0), 1) * scale
    gate, up = tl.split(tl.permute(y.reshape(2, 8), (1, 0)))
    offs_n = pid * T.OUT_N + tl.arange(0, T.OUT_N)
    tl.store(out_ptr + pair * N + offs_n, (silu(gate) * up).to(out_ptr.dtype.element_ty), mask=offs_n < N)


@triton.jit
def _load_expert(T: tl.constexpr, experts, ids, first_n, e: tl.constexpr, USED: tl.constexpr):
    """Load a block of rows of one expert for each warp: two tuples, the words of all tiles, and the spans of groups.

    Args:
        experts: the Weight of all experts.
        ids: pointer to the ids of the experts. Warp w has expert e * WARPS + w of the row.
        first_n: first row of the block in the weight of each expert.
    """
    PIECE: tl.constexpr = T.LINE // T.PIECES
    line, warp = places(T.WARPS, 16)
    place = e * T.WARPS + warp
    expert = tl.load(ids + place, mask=place < USED, other=0).to(tl.int64)
    mask = (place < USED) & (first_n + line < T.N)
    lines = experts.weight_ptr + (expert * T.N + first_n + line) * T.LENGTH + tl.arange(0, PIECE)[None, :]
    words, spans = (), ()
    for i in tl.static_range(T.LENGTH // PIECE):
        words += (tl.load(lines + i * PIECE, mask=mask, other=0, eviction_policy="evict_first"),)
    lane = tl.arange(0, T.WARPS * 32)
    place = e * T.WARPS + lane // 32
    row = first_n + lane % 32 // 4
    rows = tl.load(ids + place, mask=place < USED, other=0).to(tl.int64) * T.N + row
    mask, mask_second = (place < USED) & (row < T.N), (place < USED) & (row + 8 < T.N)
    for span in tl.static_range(T.K // T.SPAN):
        column = span * T.SPAN + lane % 4 * (2 * T.GROUP)
        numbers = load_numbers(T, experts, rows, column, mask)
        spans += ((numbers, load_numbers(T, experts, rows + 8, column, mask_second)),)
    return words, spans


@triton.jit
def _load_x_of_expert(T: tl.constexpr, x_ptr, e: tl.constexpr, span: tl.constexpr, USED: tl.constexpr):
    """Load the activations of a span of one expert for each warp, as `load_x_of_groups`. x_ptr: [USED, K]."""
    line, warp = places(T.WARPS, 8)
    place, column = e * T.WARPS + warp, tl.arange(0, 32)[None, :]
    first = tl.multiple_of(place * T.K + span * T.SPAN + line * T.GROUP // 32 * 32, (32, 32))
    mask = place < USED
    if T.GROUP == 16:
        mask = mask & (column // 16 == line % 2)
    return tl.load(x_ptr + first + column, mask=mask, other=0.0)


@triton.jit
def _down_groups_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, minimum_ptr, over_ptr, ids_ptr, pair_weights_ptr, norm_ptr, out_ptr,
    normed_ptr, sumsq_ptr, stride_xm, stride_om, stride_normed, stride_sumsq, N: tl.constexpr, K: tl.constexpr,
    USED: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, MINIMUMS: tl.constexpr, OVER: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the weighted products of the experts of a row to the residual stream, and prepare the next norm.

    Grid: (blocks of 16 rows of the weight, rows). A warp multiplies every WARPS-th expert of a row. ids_ptr and
    pair_weights_ptr are read before gdc_wait; see _gate_up_groups_kernel.

    Args: see _down_packed_kernel.
    """
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, 1, scale_ptr.dtype.element_ty, False, MINIMUMS, OVER, ROUNDS=False, GATED=False, BLOCK_N=16,
        WARPS=WARPS, X_AHEAD=0,
    )  # fmt: skip
    EACH: tl.constexpr = (USED + WARPS - 1) // WARPS
    TILES: tl.constexpr = K // T.STEP  # Tiles of a row of an expert.
    pid, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    if status == RUN:
        offs_n = pid * 16 + tl.arange(0, 16)
        mask = offs_n < N
        norm = tl.load(norm_ptr + offs_n, mask=mask, other=0.0).to(tl.float32)
        experts = Weight(weight_ptr, scale_ptr, scale_ptr, minimum_ptr, over_ptr)
        w, spans, weights, xs = (), (), (), ()
        for e in tl.static_range(EACH):
            loaded = _load_expert(T, experts, ids_ptr + row * USED, pid * 16, e, USED)
            w, spans = w + loaded[0], spans + loaded[1]
            place = e * WARPS + tl.arange(0, WARPS)[:, None, None]
            weights += (tl.load(pair_weights_ptr + row * USED + place, mask=place < USED, other=0.0),)
        if PDL:
            gdc_wait()
        for e in tl.static_range(EACH):
            for span in tl.static_range(K // T.SPAN):
                xs += (_load_x_of_expert(T, x_ptr + row * stride_xm, e, span, USED),)
        out_ptrs = out_ptr + row * stride_om + offs_n
        residual = tl.load(out_ptrs, mask=mask, other=0.0)
        tl.debug_barrier()  # Otherwise the compiler moves loads behind products.
        total = tl.zeros([WARPS, 16, 8], tl.float32)
        for e in tl.static_range(EACH):
            state = no_groups(T, xs[0], FORM, DOT_FP32)
            for c in tl.static_range(e * TILES, (e + 1) * TILES):
                words = w[c * T.PIECES : (c + 1) * T.PIECES]
                state = add_groups(T, state, words, spans, xs, c, 0, FORM, MINIMUMS, TYPE, DOT_FP32)
            total += state[0] * weights[e]
        y = residual + tl.sum(tl.sum(total, 0), 1) * factor(FORM, FORM == "int4")
        tl.store(out_ptrs, y, mask=mask)
        normed_ptrs = normed_ptr + row * stride_normed + offs_n
        tl.store(normed_ptrs, (y * norm).to(normed_ptr.dtype.element_ty), mask=mask)
        tl.store(sumsq_ptr + row * stride_sumsq + pid, tl.sum(tl.where(mask, y * y, 0.0), 0))
    elif PDL:
        gdc_wait()


def gate_up_groups(
    meta, x, linear: LoadedLinear, routes: Routes, out, gated: Gated, sizes: ExpertSizes, *, config: ExpertGroupsConfig,
    pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_rows`."""
    n = out.shape[1] // sizes.used
    _gate_up_groups_kernel[(config.programs(2 * n), sizes.used, len(x))](
        meta, x, **weight_arguments(linear, out), ids_ptr=routes.ids, out_ptr=out, sumsq_ptr=gated.sumsq, eps=gated.eps,
        stride_xm=x.stride(0), stride_sumsq=gated.sumsq.stride(0), n_sumsq=gated.partials, N=n, USED=sizes.used,
        SUMSQ_BLOCK=next_power_of_2(max(gated.partials, 1)), WARPS=config.num_warps, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def down_groups(
    meta, x, linear: LoadedLinear, routes: Routes, out, epilogue: AddResidual, sizes: ExpertSizes, *,
    config: ExpertGroupsConfig, pdl=False,
):  # fmt: skip
    """Add the products of each row with its experts, times their weights, to the residual stream, as `down_rows`."""
    rows, n = out.shape
    _down_groups_kernel[(config.programs(n), rows)](
        meta, x, **weight_arguments(linear, out), ids_ptr=routes.ids, pair_weights_ptr=routes.weights,
        norm_ptr=epilogue.norm, out_ptr=out, normed_ptr=epilogue.normed, sumsq_ptr=epilogue.sumsq,
        stride_xm=x.stride(0), stride_om=out.stride(0), stride_normed=epilogue.normed.stride(0),
        stride_sumsq=epilogue.sumsq.stride(0), N=n, USED=sizes.used, WARPS=config.num_warps, PDL=pdl,
        DOT_FP32=interpreted(), **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


GATE_UP_GROUPS = Op(gate_up_groups, gate_up_rows_ref, expert_rows_bytes, (_gate_up_groups_kernel,), outputs=("out",))
DOWN_GROUPS = Op(down_groups, down_rows_ref, expert_rows_bytes, (_down_groups_kernel,), OUTPUTS)
