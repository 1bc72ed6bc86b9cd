"""matmul_groups: the product of one row of activations and a packed tensor with scales of 16 or 32 columns.

The types of GGUF files have such scales. They multiply the sums of groups, as in matmul. An instruction of the tensor
cores multiplies 16 rows of the weight by eight rows of activations. With only one row, matmul scales eight sums of each
group, and uses one of them. Here eight successive groups have a row of activations each, which is zero in the columns
of the other groups. So a scale multiplies one sum, and a lane needs only the scales of two groups of two rows.
"""

from dataclasses import dataclass
from typing import ClassVar

import triton
import triton.language as tl

from ..common import RUN, STATUS, cdiv, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from .bits import factor, joined_pairs, masked_pairs, raised_pairs, unpack, zero_operand
from .blocks import RowBlocks
from .epilogue import epilogue_arguments, finish, load_extra, load_partials, norm_scale, silu
from .packed import Packed
from .project import OUTPUTS, LinearKernel, project_bytes, project_ref
from .register_tiles import Weight, as_words, block_of_rows, half_at, load_words, number_at, operand, places, tiling


@dataclass(frozen=True)
class GroupsConfig(RowBlocks):
    """Launch config of matmul_groups.

    A program multiplies 16 whole rows of the weight, and its warps share the columns.

    Attributes:
        ahead: Tiles of the weight that a warp has in flight. The first of them are loaded before `gdc_wait`.
        registers: Maximum number of registers of a thread; 0: no limit.
    """

    block_n: ClassVar[int] = 16
    programs: ClassVar[int] = 0
    num_warps: int
    ahead: int
    registers: int = 0


@triton.jit
def _load_bits(ptrs, at, mask, BYTES: tl.constexpr):
    """Load BYTES bytes (1, 2 or 4) as int32. `at` counts units of BYTES."""
    return tl.load(as_words(ptrs, BYTES) + at, mask=mask, other=0).to(tl.int32)


@triton.jit
def load_numbers(T: tl.constexpr, weight, rows, column, mask):
    """Load the numbers of two adjacent groups of the rows, the first of which begins at `column`, where mask is true.

    Returns:
        A tuple of int32 [WARPS * 32]. The first are the bits of both scales. The second are the bits of both minimums,
        or of the one that the groups share. The third are the factor of the scales and then that of the minimums.
    """
    scales = _load_bits(weight.scale_ptr + rows * T.GROUPS, column // (2 * T.GROUP), mask, 2 * T.SIZE)
    minimums, factors = scales, scales
    if T.MINIMUMS:
        SHARED_BY: tl.constexpr = T.MIN_GROUP // T.GROUP
        lows = weight.minimum_ptr + rows * T.LOWS
        minimums = _load_bits(lows, column // (2 * T.GROUP), mask, 2 // SHARED_BY * T.SIZE)
    if T.OVER > 0:
        EACH: tl.constexpr = 1 + T.MINIMUMS
        factors = _load_bits(weight.over_ptr + rows * (T.OVERS * EACH), column // T.OVER, mask, 2 * EACH)
    return (scales, minimums, factors)


@triton.jit
def _load_span(T: tl.constexpr, weight, pid, span: tl.constexpr):
    """Load the numbers of a span of eight groups, as lanes need them for their sums, for both rows of a lane."""
    lane = tl.arange(0, T.WARPS * 32)
    own = span * T.SPAN + lane % 4 * (2 * T.GROUP)  # The column among those of the warp.
    column = (own // T.STEP * T.WARPS + lane // 32) * T.STEP + own % T.STEP
    row = pid * T.OUT_N + lane % 32 // 4
    second = row + (T.N if T.GATED else 8)
    mask = (row < T.N * (1 + T.GATED)) & (column < T.K)
    mask_second = (second < T.N * (1 + T.GATED)) & (column < T.K)
    return (load_numbers(T, weight, row, column, mask), load_numbers(T, weight, second, column, mask_second))


@triton.jit
def load_tile_of_groups(T: tl.constexpr, weight, block, pid, c: tl.constexpr):
    """Load the warps' tiles c of the weight, and the spans of groups that begin in these tiles, as two tuples."""
    spans = ()
    for span in tl.static_range((c * T.STEP + T.SPAN - 1) // T.SPAN, ((c + 1) * T.STEP + T.SPAN - 1) // T.SPAN):
        spans += (_load_span(T, weight, pid, span),)
    return load_words(T, block, c), spans


@triton.jit
def _row_scales(T: tl.constexpr, numbers, MINIMUM: tl.constexpr):
    """Return the scales or, with MINIMUM, the minimums of eight rows, fp32 [WARPS, 8, 8]."""
    bits = numbers[MINIMUM]
    low = number_at(T, bits, 0)
    if MINIMUM and T.MIN_GROUP > T.GROUP:
        high = low
    else:
        high = number_at(T, bits, 1)
    if T.OVER > 0:
        each = half_at(numbers[2], MINIMUM, True)
        low, high = low * each, high * each
    return tl.join(low, high).reshape(T.WARPS, 8, 8)


@triton.jit
def _scales(T: tl.constexpr, span, MINIMUM: tl.constexpr):
    """Return the scales or minimums of the groups of a span in the order of the sums, fp32 [WARPS, 16, 8]."""
    both = tl.join(_row_scales(T, span[0], MINIMUM), _row_scales(T, span[1], MINIMUM))
    return tl.permute(both, (0, 3, 1, 2)).reshape(T.WARPS, 16, 8)


@triton.jit
def load_x_of_groups(T: tl.constexpr, x_ptr, span: tl.constexpr):
    """Load the activations of a span, [WARPS * 8, 32]. A line has the columns of its group, and otherwise zeros."""
    line, warp = places(T.WARPS, 8)
    column = tl.arange(0, 32)[None, :]
    own = span * T.SPAN + line * T.GROUP // 32 * 32
    first = tl.multiple_of((own // T.STEP * T.WARPS + warp) * T.STEP + own % T.STEP, (32, 32))
    mask = first + column < T.K
    if T.GROUP == 16:
        mask = mask & (column // 16 == line % 2)
    return tl.load(x_ptr + first + column, mask=mask, other=0.0)


@triton.jit
def _columns(T: tl.constexpr, pairs, TYPE: tl.constexpr):
    """Return activations as the second operand of a product, [WARPS, 32, 8]."""
    return tl.permute(operand(joined_pairs(pairs), T.WARPS, 8, True), (0, 2, 1)).to(TYPE)


@triton.jit
def no_groups(T: tl.constexpr, x, FORM: tl.constexpr, DOT_FP32: tl.constexpr):
    """Return the first state of `add_groups`: the sums, those of a span, those of its activations, and these.

    The sums are fp32 [WARPS, 16, 8]. The caller adds their columns, and multiplies them by `factor`.

    Args:
        x: the activations of the first span.
    """
    zeros = tl.zeros([T.WARPS, 16, 8], tl.float32)
    return (zeros, zeros, zeros, raised_pairs(x, FORM, DOT_FP32))


@triton.jit
def add_groups(
    T: tl.constexpr, state, words, spans, xs, c: tl.constexpr, END: tl.constexpr, FORM: tl.constexpr,
    MINIMUMS: tl.constexpr, TYPE: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the products of the warps' tiles c.

    Args:
        state: see `no_groups`.
        words: the tiles, see `load_words`.
        spans, xs: the numbers and the activations of all spans until these tiles.
        END: number of parts of all tiles.
    """
    RAISED: tl.constexpr = FORM == "int4"
    if RAISED:
        ones = -zero_operand(True, T.WARPS, 16, DOT_FP32).to(TYPE)
    else:
        ones = tl.full([T.WARPS, 16, 32], 1 / factor(FORM), TYPE)
    zeros = tl.zeros([T.WARPS, 16, 8], tl.float32)
    line, _ = places(T.WARPS, 8)
    part_of_line = (line * T.GROUP // 32)[:, :, None]
    acc, sums, x_sums, x = state[0], state[1], state[2], state[3]
    for part in tl.static_range(T.PARTS):
        if (c * T.PARTS + part) % T.SPAN_PARTS == 0:
            x = raised_pairs(xs[(c * T.PARTS + part) // T.SPAN_PARTS], FORM, DOT_FP32)
            if MINIMUMS or RAISED:
                x_sums = tl.dot(ones, _columns(T, x, TYPE), zeros, input_precision="ieee")
            sums = zeros
        tile = operand(unpack(words, 0, part, FORM, False, DOT_FP32, RAISED), T.WARPS, 16, True).to(TYPE)
        own = masked_pairs(x, part_of_line == (c * T.PARTS + part) % T.SPAN_PARTS, DOT_FP32)
        sums = tl.dot(tile, _columns(T, own, TYPE), sums, input_precision="ieee")
        if (c * T.PARTS + part + 1) % T.SPAN_PARTS == 0 or c * T.PARTS + part + 1 == END:
            span = spans[(c * T.PARTS + part) // T.SPAN_PARTS]
            if RAISED and not MINIMUMS:
                sums -= x_sums * 8  # The zero point.
            acc += sums * _scales(T, span, 0)
            if MINIMUMS:
                acc -= x_sums * _scales(T, span, 1)
    return (acc, sums, x_sums, x)


@triton.jit(do_not_specialize=["n_sumsq"])  # n_sumsq depends on the launch config of the previous kernel.
def _matmul_groups_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, minimum_ptr, over_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps,
    stride_om, stride_normed, stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
    EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, MINIMUMS: tl.constexpr,
    OVER: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Compute `project` for one row.

    Grid: (blocks of 16 rows of the weight,). If "gated", a block has eight rows of gate and eight of up. Each program
    stores one partial sum of squares.

    Args:
        meta_ptr: [META_WIDTH] int32.
        x_ptr: [K].
        weight_ptr, scale_ptr, minimum_ptr, over_ptr: see _matmul_kernel.
        extra_ptr, out_ptr, normed_ptr, sumsq_ptr: see _matmul_kernel.
    """
    pid = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    NORMED: tl.constexpr = EPILOGUE == "normed" or EPILOGUE == "gated"
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, 1, scale_ptr.dtype.element_ty, False, MINIMUMS, OVER, ROUNDS=False,
        GATED=EPILOGUE == "gated", BLOCK_N=16, WARPS=WARPS, X_AHEAD=0,
    )  # fmt: skip
    weight = Weight(weight_ptr, scale_ptr, scale_ptr, minimum_ptr, over_ptr)
    block = block_of_rows(T, weight, pid)
    w, spans = (), ()
    for c in tl.static_range(AHEAD):
        loaded = load_tile_of_groups(T, weight, block, pid, c)
        w, spans = w + loaded[0], spans + loaded[1]
    status = tl.load(meta_ptr + STATUS)
    offs_n = pid * T.OUT_N + tl.arange(0, T.OUT_N)
    mask_n = offs_n < N
    extra, residual = load_extra(extra_ptr, offs_n, N, EPILOGUE, HAS_BIAS), 0.0
    if PDL:
        gdc_wait()
    xs = ()
    for span in tl.static_range(T.SPANS):
        xs += (load_x_of_groups(T, x_ptr, span),)
    if EPILOGUE == "residual":
        residual = tl.load(out_ptr + offs_n, mask=mask_n, other=0.0)
    if NORMED:
        partials = load_partials(sumsq_ptr, 0, True, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
    tl.debug_barrier()  # Otherwise the compiler moves loads of activations behind products.
    if status != RUN:
        return
    state = no_groups(T, xs[0], FORM, DOT_FP32)
    for c in tl.static_range(T.CHUNKS):
        words = w[c * T.PIECES : (c + 1) * T.PIECES]
        state = add_groups(T, state, words, spans, xs, c, T.X_TILES, FORM, MINIMUMS, TYPE, DOT_FP32)
        if c + AHEAD < T.CHUNKS:
            loaded = load_tile_of_groups(T, weight, block, pid, c + AHEAD)
            w, spans = w + loaded[0], spans + loaded[1]
    acc = state[0]
    y = tl.sum(tl.sum(acc, 0), 1) * factor(FORM, FORM == "int4")
    if NORMED:
        y = y * norm_scale(tl.sum(partials, 0), K, eps)
    if EPILOGUE == "gated":
        gate, up = tl.split(tl.permute(y.reshape(2, 8), (1, 0)))
        y = silu(gate) * up
    squares = finish(y, out_ptr + offs_n, normed_ptr + offs_n, extra, residual, mask_n, mask_n, EPILOGUE, HAS_BIAS)
    if EPILOGUE == "residual":
        tl.store(sumsq_ptr + pid, tl.sum(squares, 0))


def matmul_groups(meta, x, linear, out, epilogue, scratch=None, *, config, pdl=False):
    """Compute `project` for one row."""
    rows, N = out.shape
    if rows != 1 or linear.packed is None or not multiplies(linear.packed):
        raise ValueError(f"matmul_groups does not support {rows} rows with {linear.packed or linear.weight.dtype}")
    tiles = cdiv(linear.in_features, linear.packed.tile * config.num_warps)  # Tiles of a row for each warp.
    _matmul_groups_kernel[(config.grid(linear.out_features)[0],)](
        meta, x, **weight_arguments(linear, out), **epilogue_arguments(linear, out, epilogue), N=N,
        WARPS=config.num_warps, AHEAD=min(config.ahead, tiles), PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def weight_arguments(linear, placeholder) -> dict:
    """Return the arguments of the kernels that describe the weight. The kernels read neither zero points nor an order.

    Args:
        linear: the LoadedLinear.
        placeholder: a tensor that replaces those that the weight does not have.
    """
    arguments = linear.arguments(placeholder)
    for name in ("zero_ptr", "order_ptr", "SCALE_ROWS", "ZEROS", "ORDERED"):
        del arguments[name]
    return arguments


def multiplies(packed: Packed) -> bool:
    """Return whether the kernel reads packed tensors of this description."""
    two_groups = packed.over_group or packed.scale_dtype.itemsize == 2  # Their numbers are loaded as one word.
    plain = packed.number_type != "e4m3" and packed.rows == 1 and not packed.zeros and not packed.ordered
    return plain and packed.group in (16, 32) and packed.k % packed.tile == 0 and bool(two_groups)


def _supports(case, rows, device) -> bool:
    """Return whether matmul_groups computes the case; see LinearKernel."""
    return rows == 1 and not 0 < device.capability < 80 and case.packed is not None and multiplies(case.packed)


GROUPS = LinearKernel(
    "groups",
    Op(matmul_groups, project_ref, project_bytes, (_matmul_groups_kernel,), OUTPUTS),
    GroupsConfig,
    _supports,
    lambda n, config: config.grid(n)[1],
)
