"""matmul for up to 64 rows on Hopper, written in Gluon, the language below Triton.

A program multiplies tiles of the weight, one after the other. The rows of a tile are the rows of wgmma; the rows of the
pass are its columns. Packed tensors pass from shared memory through registers, where they become bf16
(wgmma_operand.py).

Rings: TMA copies tiles of the weight into STAGES stages of shared memory, and tiles of the activations into X_STAGES. A
stage has a barrier that counts its bytes: tile c has arrived when the barrier of stage c % STAGES has completed
c // STAGES + 1 times. After a tile is multiplied, its stage is free for the tile that is STAGES later. Either all warps
synchronize and then start the copy, or they arrive at a second barrier, at which a producer warp waits that only
copies. With LAG 1, the stage of a tile is free only after the next product has begun, so that one is always in flight.

Dependent launch: no kernel that may still run writes weights (a kernel after a copy from the host is launched without
PDL). So the first STAGES tiles of the weight are in flight before `gdc_wait`. Data that other kernels of the pass write
is read after it.

Programs that share the columns (SPLIT) store their sums and increment a counter. The last one adds all sums, including
its own, in the order of the columns. The result does not depend on which program is last.

A TMA descriptor contains an address and sizes. The descriptor of a weight is made once, when the launch is captured,
and stays in the graph like all arguments. The data at the address may change, as in the buffers of offloaded layers.
"""

from collections import namedtuple
from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common import RUN, cdiv, gdc_launch_dependents, gdc_wait, next_power_of_2, options
from ..op import Op
from ..triton_compat import Constants, async_load, barrier, reinterpret
from .adapters import TOGETHER, Adapters, adapter_arguments
from .epilogue import epilogue_arguments
from .gluon_adapters import add_adapters, fetch_adapters
from .gluon_epilogue import Outputs, any_row_runs, finish, load_partials, load_status, norm_scale, silu
from .project import MAX_ROWS, OUTPUTS, Gated, LinearKernel, adapted_bytes, adapted_ref
from .tma_ring import PRODUCER_REGISTERS, barriers
from .wgmma_operand import COLUMNS, COLUMNS_OF, boxes_of, columns_of, unpack, unpack_scaled, zero_of


@dataclass(frozen=True)
class HopperConfig:
    """Launch config of matmul_hopper.

    A program takes block_n rows of the weight in tiles of block_k columns, and has its next tiles in flight while it
    multiplies.

    Attributes:
        block_n: Rows of the weight in a tile. Gated counts gate and up rows together.
        block_k: Columns of a tile: 128 bytes of a row, or a multiple of that.
        stages: Tiles of the weight in flight, before `gdc_wait` too.
        x_stages: Tiles of the activations in flight.
        split: Programs that share the columns. 1 for Gated.
        programs: Number of programs that share the rows; 0: one for each tile.
        lag: 1 if a tile's stage is free only after the next product has begun.
        producer: 1 for a producer warp. Three idle warps accompany it; the other warps get the registers that these
            four do not need.
        registers: Maximum number of registers of a thread.
    """

    block_n: int = 64
    block_k: int = 128
    stages: int = 4
    x_stages: int = 4
    split: int = 1
    num_warps: int = 4
    programs: int = 0
    lag: int = 0
    producer: int = 0
    registers: int = 128


MIN_ROWS = 16  # Minimum number of rows of a tile of the activations.
# The work of a program:
# - arguments of the kernel, and `outputs`, those of the epilogue
# - w_ring, x_ring: the rings [stages, rows, columns]
# - w_full, x_full: barriers, one a stage, completed when a tile has arrived. If both rings have the same number of
#   stages, they share the barriers.
# - free: barriers, one a stage, completed when a tile has been multiplied. Used with a producer warp.
# - tiles: number of tiles of all programs along the rows
# - begin, n: first tile along the columns, and number of tiles of this program
# - iterations: number of tiles of this program along the rows
# - total: iterations * n
# - adapters: see adapter_arguments
# - listed: shared memory for the distinct adapters of the pass, and for their ranks, [groups, TOGETHER] each
_Work = namedtuple(
    "_Work",
    "x_desc weight_desc scale_ptr zero_ptr minimum_ptr over_ptr sums_ptr counter_ptr outputs N K w_ring x_ring w_full "
    "x_full free pid tiles begin n iterations total adapters listed",
)


@gluon.constexpr_function
def _constants(**constexprs):
    """Return the constexprs of the kernel, with GATED, NORMED, and OUT_N, the outputs of a tile.

    TMA copies BOXES boxes of a tile of the weight, each with BOX_BYTES bytes of its rows.
    """
    gated, block_n = constexprs["EPILOGUE"] == "gated", constexprs["BLOCK_N"]
    normed = gated or constexprs["EPILOGUE"] == "normed"
    form = str(constexprs["FORM"])
    boxes, nbytes = boxes_of(form)
    return Constants(
        **constexprs, GATED=gated, NORMED=normed, OUT_N=block_n // 2 if gated else block_n, BOX_BYTES=nbytes,
        BOXES=constexprs["BLOCK_K"] // columns_of(form) * boxes,
    )  # fmt: skip


@gluon.jit
def _box(C: gl.constexpr, w, stage, i: gl.constexpr):
    """Return box i of a stage of the weight, [BLOCK_N, columns]."""
    SIDE: gl.constexpr = w.weight_desc.block_type.shape[1]
    if C.FORM == "int6":
        return w.w_ring.index(stage * C.BOXES + i)
    else:
        shape: gl.constexpr = [C.BOXES, C.BLOCK_N, SIDE]
        return reinterpret(w.w_ring.index(stage), w.w_ring.dtype, shape, w.weight_desc.layout).index(i)


@gluon.jit
def _copy_weights(C: gl.constexpr, w, c):
    """Copy tile c of the weight into its stage.

    The stage's barrier also counts the activations if both rings have the same number of stages. In shared memory, a
    tile is stored in boxes. If "gated", the rows of gate precede those of up.
    """
    HALVES: gl.constexpr = 2 if C.GATED else 1
    SIDE: gl.constexpr = w.weight_desc.block_type.shape[1]
    X_ROWS: gl.constexpr = C.BLOCK_M if C.STAGES == C.X_STAGES else 0
    stage = c % C.STAGES
    if C.PERSISTENT:
        row, part = (w.pid + c // w.n * gl.num_programs(0)) * C.OUT_N, c % w.n * C.BOXES
    else:
        row, part = w.pid % w.tiles * C.OUT_N, (w.begin + c) * C.BOXES
    mbarrier.expect(w.w_full.index(stage), C.OUT_N * HALVES * C.BOXES * C.BOX_BYTES + X_ROWS * C.BLOCK_K * 2)
    shape: gl.constexpr = [HALVES, C.OUT_N, SIDE]
    for i in gl.static_range(C.BOXES):
        halves = reinterpret(_box(C, w, stage, i), w.w_ring.dtype, shape, w.weight_desc.layout)
        for half in gl.static_range(HALVES):
            place = [row + half * w.N, (part + i) * SIDE]
            async_load(w.weight_desc, place, w.w_full.index(stage), halves.index(half))


@gluon.jit
def _copy_rows(C: gl.constexpr, w, c):
    """Copy tile c of the activations into its stage."""
    PARTS: gl.constexpr = C.BLOCK_K // COLUMNS
    stage = c % C.X_STAGES
    column = (c % w.n if C.PERSISTENT else w.begin + c) * C.BLOCK_K
    if C.STAGES != C.X_STAGES:
        mbarrier.expect(w.x_full.index(stage), C.BLOCK_M * C.BLOCK_K * 2)
    parts = reinterpret(w.x_ring.index(stage), w.x_ring.dtype, [PARTS, C.BLOCK_M, COLUMNS], w.x_desc.layout)
    for x in gl.static_range(PARTS):
        async_load(w.x_desc, [0, column + x * COLUMNS], w.x_full.index(stage), parts.index(x))


@gluon.jit
def _copy_first_rows(C: gl.constexpr, w):
    """Copy the first X_STAGES tiles of the activations."""
    for c in gl.static_range(C.X_STAGES):
        if c < w.total:
            _copy_rows(C, w, c)


@gluon.jit
def _copy_next(C: gl.constexpr, w, c):
    """Copy the next tiles into the stages of tile c, if there are any."""
    if c + C.STAGES < w.total:
        _copy_weights(C, w, c + C.STAGES)
    if c + C.X_STAGES < w.total:
        _copy_rows(C, w, c + C.X_STAGES)


@gluon.jit
def _await(C: gl.constexpr, w, c):
    """Wait until tile c of the weight and of the activations has arrived."""
    mbarrier.wait(w.w_full.index(c % C.STAGES), c // C.STAGES & 1)
    if C.STAGES != C.X_STAGES:
        mbarrier.wait(w.x_full.index(c % C.X_STAGES), c // C.X_STAGES & 1)


@gluon.constexpr_function
def _rows_at_once(block_m, block_n, split, warps):
    """Return the number of rows whose sums per program adds at a time, in at most 96 registers of each thread."""
    rows = block_m
    while split > 1 and rows > 8 and (split + 2) * rows * block_n > 96 * 32 * warps:
        rows //= 2
    return rows


@gluon.constexpr_function
def _sums_layout(block_m, block_n, warps):
    """Return the layout of the sums: 16 rows of the weight for each warp. Additional warps share the columns."""
    high = min(warps, block_n // 16)
    return gl.NVMMADistributedLayout([3, 0], [high, warps // high], [16, block_m * high // warps, 16])


@gluon.jit
def _sums(C: gl.constexpr, w, first, ACC_L: gl.constexpr):
    """Multiply the tiles of an output tile, from tile `first` on: [BLOCK_N, BLOCK_M] fp32."""
    acc = gl.zeros([C.BLOCK_N, C.BLOCK_M], gl.float32, ACC_L)
    for c in range(first, first + w.n):
        stage, x_stage = c % C.STAGES, c % C.X_STAGES
        _await(C, w, c)
        acc = warpgroup_mma(w.w_ring.index(stage), w.x_ring.index(x_stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(C.LAG, deps=[acc])
        if C.PRODUCER:
            if c >= C.LAG:
                mbarrier.arrive(w.free.index((c - C.LAG) % C.STAGES), count=1)
        else:
            barrier()  # All warps have multiplied that tile.
            if c >= C.LAG:
                _copy_next(C, w, c - C.LAG)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _rows_and_groups(C: gl.constexpr, w, tile, L: gl.constexpr):
    """Return the rows [BLOCK_N] of a tile in the weight, and the number of groups of their columns."""
    in_tile = gl.arange(0, C.BLOCK_N, L)
    row = gl.minimum(tile * C.OUT_N + in_tile % C.OUT_N, w.N - 1) + in_tile // C.OUT_N * w.N
    return row, w.K // C.GROUP if C.GROUP > 0 else 1


@gluon.jit
def _scale_of(C: gl.constexpr, w, tile, group, L: gl.constexpr):
    """Load the scales of a group of the rows of a tile: fp32 [BLOCK_N]."""
    row, groups = _rows_and_groups(C, w, tile, L)
    return gl.load(w.scale_ptr + row // C.SCALE_ROWS * groups + gl.minimum(group, groups - 1)).to(gl.float32)


@gluon.jit
def _offset_of(C: gl.constexpr, w, tile, group, L: gl.constexpr):
    """Load the zero points of a group as offsets for `unpack`, equal in both halves of a word: int32 [BLOCK_N]."""
    row, groups = _rows_and_groups(C, w, tile, L)
    zero = gl.load(w.zero_ptr + row * groups + gl.minimum(group, groups - 1)).to(gl.float32)
    # packed.py stores zero / 64 for int4, and zero - 128 for int8.
    offset = -128.0 - 64.0 * zero if C.FORM == "int4" else -zero
    bits = offset.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | bits << 16


@gluon.jit
def _all_groups(C: gl.constexpr, w, tile, c, LOAD: gl.constexpr, L: gl.constexpr):
    """Call LOAD, which is _scale_of or _offset_of, for all groups of tile c of the weight. Return a tuple.

    If GROUP is 0, all columns are one group.
    """
    GROUPS: gl.constexpr = C.BLOCK_K // C.GROUP if C.GROUP > 0 else 1
    loaded = ()
    for group in gl.static_range(GROUPS):
        loaded += (LOAD(C, w, tile, c * GROUPS + group if C.GROUP > 0 else 0, L),)
    return loaded


@gluon.jit
def _offsets(C: gl.constexpr, zeros, first, L: gl.constexpr):
    """Return a tuple with the offsets for each operand of a part. The part begins with operand `first` of its tile.

    Args:
        zeros: Results of `_offset_of` for all groups. Read only if ZEROS.
    """
    OPERANDS: gl.constexpr = columns_of(C.FORM) // COLUMNS
    PER_GROUP: gl.constexpr = max(C.GROUP // COLUMNS, 1)
    offsets = ()
    for j in gl.static_range(OPERANDS):
        if C.ZEROS:
            offsets += (zeros[(first + j) // PER_GROUP if C.GROUP > 0 else 0],)
        else:  # The number is -136.0 for int4. Otherwise it is -0.0, which changes nothing.
            offsets += (gl.full([C.BLOCK_N], -0x3CF73CF8 if C.FORM == "int4" else -0x7FFF8000, gl.int32, L),)
    return offsets


@gluon.jit
def _packed_sums(C: gl.constexpr, w, tile, first, ACC_L: gl.constexpr):
    """Compute `_sums` for a packed weight, which becomes bf16 in registers.

    The sums of a group of columns are scaled before they are added.
    """
    A_L: gl.constexpr = gl.DotOperandLayout(0, ACC_L, 2)
    ROWS_L: gl.constexpr = gl.SliceLayout(1, ACC_L)
    PARTS: gl.constexpr = C.BLOCK_K // columns_of(C.FORM)
    OPERANDS: gl.constexpr = columns_of(C.FORM) // COLUMNS
    PER_GROUP: gl.constexpr = max(C.GROUP // COLUMNS, 1)
    acc = gl.zeros([C.BLOCK_N, C.BLOCK_M], gl.float32, ACC_L)
    scales = _all_groups(C, w, tile, w.begin, _scale_of, ROWS_L)
    zeros = _all_groups(C, w, tile, w.begin, _offset_of, ROWS_L) if C.ZEROS else scales
    for c in range(first, first + w.n):
        stage, x_stage = c % C.STAGES, c % C.X_STAGES
        next_scales, next_zeros = scales, zeros
        if C.GROUP > 0:  # The next scales and zero points are in flight while this tile is multiplied.
            following = w.begin + c - first + 1
            next_scales = _all_groups(C, w, tile, following, _scale_of, ROWS_L)
            next_zeros = _all_groups(C, w, tile, following, _offset_of, ROWS_L) if C.ZEROS else next_scales
        _await(C, w, c)
        x_shape: gl.constexpr = [PARTS * OPERANDS, C.BLOCK_M, COLUMNS]
        xs = reinterpret(w.x_ring.index(x_stage), w.x_ring.dtype, x_shape, w.x_desc.layout)
        for i in gl.static_range(PARTS):
            offsets = _offsets(C, zeros, i * OPERANDS, ROWS_L)
            operands = unpack(_box(C, w, stage, i), offsets, C.FORM, C.BLOCK_N, C.WARPS, A_L)
            for j in gl.static_range(OPERANDS):
                x = xs.index(i * OPERANDS + j).permute((1, 0))
                if C.GROUP > 0:
                    if j % PER_GROUP == 0:
                        group_sum = gl.zeros([C.BLOCK_N, C.BLOCK_M], gl.float32, ACC_L)
                    group_sum = warpgroup_mma(operands[j], x, group_sum, use_acc=j % PER_GROUP > 0, is_async=True)
                    if (j + 1) % PER_GROUP == 0:
                        group_sum = warpgroup_mma_wait(0, deps=[group_sum])
                        acc += group_sum * scales[(i * OPERANDS + j) // PER_GROUP][:, None]
                else:
                    acc = warpgroup_mma(operands[j], x, acc, is_async=True)
        if C.GROUP == 0:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if C.PRODUCER:
            mbarrier.arrive(w.free.index(stage), count=1)
        else:
            barrier()
            _copy_next(C, w, c)
        scales, zeros = next_scales, next_zeros
    return acc if C.GROUP > 0 else acc * scales[0][:, None]


@gluon.jit
def _load_words(C: gl.constexpr, w, ptr, row, c, BYTES: gl.constexpr, GROUP: gl.constexpr):
    """Load the numbers of BYTES bytes, one for each GROUP columns, of tile c along the columns, as words."""
    WORDS: gl.constexpr = C.BLOCK_K * BYTES // (GROUP * 4)
    ptrs = ptr.to(gl.pointer_type(gl.int32), bitcast=True) + row * (w.K * BYTES // (GROUP * 4)) + c * WORDS
    loaded = ()
    for i in gl.static_range(WORDS):
        loaded += (gl.load(ptrs + i),)
    return loaded


@gluon.jit
def _load_scales(C: gl.constexpr, w, tile, c, L: gl.constexpr):
    """Load the scales of small groups, the minimums and the factors of both for tile c along the columns.

    Returns a tuple of three tuples of int32 [BLOCK_N].
    """
    row, _ = _rows_and_groups(C, w, tile, L)
    c = gl.minimum(c, w.K // C.BLOCK_K - 1)
    BYTES: gl.constexpr = 1 if C.OVER > 0 else 2
    scales, minimums, overs = _load_words(C, w, w.scale_ptr, row, c, BYTES, C.GROUP), (), ()
    if C.MINIMUMS:
        minimums = _load_words(C, w, w.minimum_ptr, row, c, BYTES, C.MIN_GROUP)
    if C.OVER > 0:
        gl.static_assert(C.OVER % C.BLOCK_K == 0, "a tile has several factors")
        at = row * (w.K // C.OVER) + c * C.BLOCK_K // C.OVER
        if C.MINIMUMS:
            overs = (gl.load(w.over_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + at),)
        else:
            overs = (gl.load(w.over_ptr.to(gl.pointer_type(gl.int16), bitcast=True) + at).to(gl.int32),)
    return scales, minimums, overs


@gluon.jit
def _half(word, which: gl.constexpr):
    """Return one of the two fp16 numbers of a word, fp32."""
    return (word >> (which * 16)).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)


@gluon.jit
def _number(C: gl.constexpr, words, i: gl.constexpr, over):
    """Return scale or minimum i of `_load_words`, fp32 [BLOCK_N]. over: its factor."""
    if C.OVER > 0:
        # The code with 128 added becomes the mantissa of 2 ** 23.
        code = ((words[i // 4] >> (i % 4 * 8)) & 255) ^ 0x4B000080
        return (code.to(gl.float32, bitcast=True) - (2.0**23 + 128)) * over
    else:
        return _half(words[i // 2], i % 2)


@gluon.jit
def _scales_and_lows(C: gl.constexpr, loaded):
    """Return the arguments of `unpack_scaled` for all groups of a tile, from the result of `_load_scales`."""
    over, minimum_over = 0.0, 0.0
    if C.OVER > 0:
        over = _half(loaded[2][0], 0)
        minimum_over = _half(loaded[2][0], 1)
    scales, lows = (), ()
    for i in gl.static_range(C.BLOCK_K // C.GROUP):
        scale = _number(C, loaded[0], i, over)
        low = scale * -zero_of(C.FORM, C.MINIMUMS)
        if C.MINIMUMS:
            low -= _number(C, loaded[1], i * C.GROUP // C.MIN_GROUP, minimum_over)
        scales, lows = scales + (scale,), lows + (low,)
    return scales, lows


@gluon.jit
def _scaled_sums(C: gl.constexpr, w, tile, first, ACC_L: gl.constexpr):
    """Compute `_sums` for a packed weight of small groups, which is scaled and becomes bf16 in registers."""
    A_L: gl.constexpr = gl.DotOperandLayout(0, ACC_L, 2)
    ROWS_L: gl.constexpr = gl.SliceLayout(1, ACC_L)
    PARTS: gl.constexpr = C.BLOCK_K // columns_of(C.FORM)
    BOXES: gl.constexpr = C.BOXES // PARTS
    OPERANDS: gl.constexpr = columns_of(C.FORM) // COLUMNS
    GROUPS: gl.constexpr = columns_of(C.FORM) // C.GROUP
    acc = gl.zeros([C.BLOCK_N, C.BLOCK_M], gl.float32, ACC_L)
    loaded = _load_scales(C, w, tile, w.begin, ROWS_L)
    for c in range(first, first + w.n):
        stage, x_stage = c % C.STAGES, c % C.X_STAGES
        # The next scales are in flight while this tile is multiplied.
        next_loaded = _load_scales(C, w, tile, w.begin + c - first + 1, ROWS_L)
        _await(C, w, c)
        x_shape: gl.constexpr = [PARTS * OPERANDS, C.BLOCK_M, COLUMNS]
        xs = reinterpret(w.x_ring.index(x_stage), w.x_ring.dtype, x_shape, w.x_desc.layout)
        scales, lows = _scales_and_lows(C, loaded)
        for i in gl.static_range(PARTS):
            boxes = ()
            for box in gl.static_range(BOXES):
                boxes += (_box(C, w, stage, i * BOXES + box),)
            own, low = scales[i * GROUPS : (i + 1) * GROUPS], lows[i * GROUPS : (i + 1) * GROUPS]
            operands = unpack_scaled(boxes, own, low, C.FORM, C.GROUP, C.BLOCK_N, C.WARPS, A_L)
            for j in gl.static_range(OPERANDS):
                x = xs.index(i * OPERANDS + j).permute((1, 0))
                acc = warpgroup_mma(operands[j], x, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if C.PRODUCER:
            mbarrier.arrive(w.free.index(stage), count=1)
        else:
            barrier()
            _copy_next(C, w, c)
        loaded = next_loaded
    return acc


@gluon.constexpr_function
def _partials_layout(warps):
    """Return the layout of the partial sums of squares."""
    return gl.BlockedLayout([1, 1], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def _end(C: gl.constexpr, w, acc, tile, partials, ACC_L: gl.constexpr):
    """Apply the epilogue to the sums acc [BLOCK_N, C.BLOCK_M] of an output tile, and store the outputs."""
    o = w.outputs
    # The registers hold the sums of all programs for only some rows at a time.
    ROWS: gl.constexpr = _rows_at_once(C.BLOCK_M, C.BLOCK_N, C.SPLIT, C.WARPS)
    LANES: gl.constexpr = min(C.OUT_N // 4, 32)
    # Each lane stores 16 bytes along a row of out, which is a column of the product.
    OUT_L: gl.constexpr = gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, C.WARPS], [0, 1])
    OUT_M: gl.constexpr = gl.SliceLayout(0, OUT_L)
    last = True
    if C.SPLIT > 1:  # Store the sums in the order in which the last program of the tile loads them.
        sums_m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(0, ACC_L))[None, :]
        to = w.sums_ptr + (w.pid * o.rows + sums_m) * C.BLOCK_N
        gl.store(to + gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, ACC_L))[:, None], acc, mask=sums_m < o.rows)
        barrier()
        last = gl.atomic_add(w.counter_ptr + tile, 1) == C.SPLIT - 1
        barrier()
    if last:
        in_tile = gl.arange(0, C.OUT_N, gl.SliceLayout(1, OUT_L))
        offs_n = tile * C.OUT_N + in_tile
        mask_n = (offs_n < w.N)[:, None]
        extra, residual = 0.0, 0.0
        if C.EPILOGUE == "residual" or C.HAS_BIAS:
            extra = gl.load(o.extra_ptr + offs_n, mask=offs_n < w.N, other=0.0)[:, None]
        if C.SPLIT > 1:
            gl.store(w.counter_ptr + tile, 0)
        for first_m in gl.static_range(0, C.BLOCK_M, ROWS):
            offs_m = first_m + gl.arange(0, ROWS, OUT_M)
            status = load_status(o, offs_m)
            mask = (status == RUN)[None, :] & mask_n
            if C.EPILOGUE == "residual":
                residual = gl.load(o.out_ptr + offs_m[None, :] * o.stride_om + offs_n[:, None], mask=mask, other=0.0)
            if C.SPLIT > 1:
                if C.NORMED:
                    row_partials = load_partials(o, first_m, ROWS, C.SUMSQ_BLOCK, _partials_layout(C.WARPS))
                ptrs = w.sums_ptr + (tile * o.rows + offs_m[None, :]) * C.BLOCK_N + in_tile[:, None]
                exist = (offs_m < o.rows)[None, :]
                y = gl.load(ptrs, mask=exist, other=0.0, cache_modifier=".cg")
                for part in gl.static_range(1, C.SPLIT):
                    sums = ptrs + part * w.tiles * o.rows * C.BLOCK_N
                    y += gl.load(sums, mask=exist, other=0.0, cache_modifier=".cg")
            if C.GATED:
                y = acc * norm_scale(partials, w.K, o.eps, gl.SliceLayout(0, ACC_L))[None, :]
                halves = gl.permute(gl.reshape(y, [2, C.OUT_N, C.BLOCK_M]), (1, 2, 0))
                # One warp has rows of gate, and another warp has the rows of up.
                if C.BLOCK_N < 32 * min(C.WARPS, C.BLOCK_N // 16):
                    HALF_L: gl.constexpr = gl.BlockedLayout([1, 2, 2], [8, 4, 1], [C.WARPS, 1, 1], [2, 1, 0])
                    halves = gl.convert_layout(halves, HALF_L)
                gate, up = gl.split(halves)
                y = gl.convert_layout((silu(gate) * up).to(o.out_ptr.dtype.element_ty), OUT_L)
            else:
                if C.SPLIT == 1:
                    y, row_partials = gl.convert_layout(acc, OUT_L), partials
                if C.NORMED:
                    y = y * norm_scale(row_partials, w.K, o.eps, OUT_M)[None, :]
            y = finish(C, o, y, extra, residual, offs_m[None, :], offs_n[:, None], mask)
            if C.EPILOGUE == "residual":
                sumsq = gl.sum(gl.where(mask_n, y * y, 0.0), 0)
                gl.store(o.sumsq_ptr + offs_m * o.stride_sumsq + tile, sumsq, mask=status == RUN)


@gluon.jit
def _produce(C: gl.constexpr, w):
    """Run the producer warp. The first tiles of the weight are already in flight."""
    some = any_row_runs(w.outputs, C.BLOCK_M, 1)
    if C.PDL:
        gdc_wait()
    _copy_first_rows(C, w)
    if some != 0:
        for c in range(w.total - min(C.STAGES, C.X_STAGES)):  # No tile follows in the remaining stages.
            mbarrier.wait(w.free.index(c % C.STAGES), c // C.STAGES & 1)
            _copy_next(C, w, c)


@gluon.jit
def _multiply(C: gl.constexpr, w):
    """Run the warps that multiply."""
    ACC_L: gl.constexpr = _sums_layout(C.BLOCK_M, C.BLOCK_N, C.WARPS)
    some = any_row_runs(w.outputs, C.BLOCK_M, C.WARPS)
    if C.ADAPTERS:
        fetch_adapters(C, w, w.pid % w.tiles)
    if C.PDL:
        gdc_wait()
    if not C.PRODUCER:
        _copy_first_rows(C, w)
    if some == 0:  # The tiles in flight must arrive before another program gets this memory.
        for c in gl.static_range(C.STAGES):
            if c < w.total:
                mbarrier.wait(w.w_full.index(c), 0)
        if C.STAGES != C.X_STAGES:
            for c in gl.static_range(C.X_STAGES):
                if c < w.total:
                    mbarrier.wait(w.x_full.index(c), 0)
    else:
        partials = w.outputs.eps
        if C.NORMED and C.SPLIT == 1:  # The partial sums are in flight while weights are multiplied.
            partials = load_partials(w.outputs, 0, C.BLOCK_M, C.SUMSQ_BLOCK, _partials_layout(C.WARPS))
        for iteration in range(w.iterations):
            tile = w.pid % w.tiles + iteration * gl.num_programs(0)
            if C.FORM == "dense":
                acc = _sums(C, w, iteration * w.n, ACC_L)
            elif C.ROUNDS:
                acc = _scaled_sums(C, w, tile, iteration * w.n, ACC_L)
            else:
                acc = _packed_sums(C, w, tile, iteration * w.n, ACC_L)
            squares = partials
            if C.ADAPTERS:
                if C.NORMED and C.SPLIT == 1:  # Their sums take fewer registers.
                    squares = gl.sum(partials, 1)[:, None]
                if C.SPLIT == 1 or w.pid < w.tiles:
                    acc = add_adapters(C, w, acc, tile)
            _end(C, w, acc, tile, squares, ACC_L)


@gluon.jit(do_not_specialize=["n_sumsq"])  # n_sumsq depends on the launch config of the previous kernel.
def _matmul_hopper_kernel(
    meta_ptr, x_desc, weight_desc, scale_ptr, zero_ptr, minimum_ptr, over_ptr, extra_ptr, out_ptr, normed_ptr,
    sumsq_ptr, sums_ptr, counter_ptr, eps, stride_om, stride_normed, stride_sumsq, rows, N, K, n_sumsq, b_ptr,
    ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym, BLOCK_M: gl.constexpr,
    SUMSQ_BLOCK: gl.constexpr, EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr,
    SCALE_ROWS: gl.constexpr, ZEROS: gl.constexpr, MINIMUMS: gl.constexpr, OVER: gl.constexpr, ROUNDS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    X_STAGES: gl.constexpr, SPLIT: gl.constexpr, PERSISTENT: gl.constexpr, PRODUCER: gl.constexpr, LAG: gl.constexpr,
    WARPS: gl.constexpr, ADAPTERS: gl.constexpr, A_SPLITS: gl.constexpr, A_PARTS: gl.constexpr, BEGIN_1: gl.constexpr,
    BEGIN_2: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute `project` for `rows` rows, in tiles [BLOCK_N, BLOCK_K] of the weight.

    Grid: (SPLIT * tiles,), a program for a part of the columns of a tile. If PERSISTENT, any number of programs, each
    of which computes every num_programs-th tile and has the next one in flight. Each tile stores one partial sum of
    squares per row. If "gated", half of a tile's rows are gate and half up.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        x_desc: Tensor descriptor of [BLOCK_M, K] in blocks of 64 columns. The first `rows` rows exist.
        weight_desc: Tensor descriptor of [N, K], or [2 * N, K] if "gated", in blocks of 128 bytes. FORM is "dense" or a
            number type of packed.py. A packed weight has no order of columns.
        scale_ptr: [N / SCALE_ROWS, K / GROUP]. GROUP is 64, 128, or 0 for all columns; 16 or 32 if ROUNDS.
        zero_ptr: [N, K / GROUP]. Read only if ZEROS.
        minimum_ptr, over_ptr: see _matmul_kernel. Read only if ROUNDS.
        extra_ptr, out_ptr, normed_ptr, sumsq_ptr: see _matmul_kernel.
        sums_ptr: [SPLIT * tiles, rows, BLOCK_N] fp32 (scratch).
        counter_ptr: [tiles] int32, zero between launches (scratch).
        b_ptr and the following: see adapter_arguments. Not if PERSISTENT.
    """
    if PDL:
        gdc_launch_dependents()
    gl.static_assert(SPLIT == 1 or not (PERSISTENT or EPILOGUE == "gated"))
    C: gl.constexpr = _constants(
        BLOCK_M=BLOCK_M, SUMSQ_BLOCK=SUMSQ_BLOCK, EPILOGUE=EPILOGUE, HAS_BIAS=HAS_BIAS, FORM=FORM, GROUP=GROUP,
        SCALE_ROWS=SCALE_ROWS, ZEROS=ZEROS, MINIMUMS=MINIMUMS, MIN_GROUP=GROUP if GROUP > 32 else 32, OVER=OVER,
        ROUNDS=ROUNDS, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, X_STAGES=X_STAGES,
        SPLIT=SPLIT, PERSISTENT=PERSISTENT, PRODUCER=PRODUCER, LAG=LAG, WARPS=WARPS, ADAPTERS=ADAPTERS,
        A_SPLITS=A_SPLITS, A_PARTS=A_PARTS, BEGIN_1=BEGIN_1, BEGIN_2=BEGIN_2, PDL=PDL,
    )  # fmt: skip
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS_L: gl.constexpr = gl.NVMMASharedLayout(C.BOX_BYTES, 16 if FORM == "dense" else 32, 2)
    # The number of boxes of six bits is not a power of two.
    APART: gl.constexpr = C.BOXES if FORM == "int6" else 1
    LENGTH: gl.constexpr = C.BOXES // APART * weight_desc.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight_desc.dtype, [STAGES * APART, BLOCK_N, LENGTH], WEIGHTS_L)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, BLOCK_M, BLOCK_K], TILE_L)
    w_full = barriers(STAGES)
    x_full = barriers(X_STAGES) if STAGES != X_STAGES else w_full
    free = barriers(STAGES) if PRODUCER else w_full
    LISTED_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    listed = ()
    for _ in gl.static_range(2 if ADAPTERS else 0):
        listed += (gl.allocate_shared_memory(gl.int32, [BLOCK_M // TOGETHER, TOGETHER], LISTED_L),)
    fence_async_shared()
    barrier()
    pid = gl.program_id(0)
    tiles = (N + C.OUT_N - 1) // C.OUT_N
    chunks = (K + BLOCK_K - 1) // BLOCK_K
    part = pid // tiles if SPLIT > 1 else 0
    begin = part * chunks // SPLIT
    n = (part + 1) * chunks // SPLIT - begin
    iterations = (tiles - pid + gl.num_programs(0) - 1) // gl.num_programs(0) if PERSISTENT else 1
    outputs = Outputs(
        meta_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps, stride_om, stride_normed, stride_sumsq, n_sumsq, rows
    )
    w = _Work(
        x_desc, weight_desc, scale_ptr, zero_ptr, minimum_ptr, over_ptr, sums_ptr, counter_ptr, outputs, N, K, w_ring,
        x_ring, w_full, x_full, free, pid, tiles, begin, n, iterations, iterations * n,
        Adapters(b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym), listed,
    )  # fmt: skip
    for c in gl.static_range(STAGES):
        if c < w.total:
            _copy_weights(C, w, c)
    if PRODUCER:
        gl.warp_specialize([(_multiply, (C, w)), (_produce, (C, w))], [1], [PRODUCER_REGISTERS])
    else:
        _multiply(C, w)


def matmul_hopper(meta, x, linear, out, epilogue, scratch=None, adapters=None, *, config, pdl=False):
    """Compute `project` for up to 64 rows. The epilogue Plain is only for packed tensors.

    Args:
        x: The first rows of a buffer that has at least as many rows as a tile.
        scratch: SplitBuffers if programs share the columns.
    """
    packed, (rows, N), K = linear.packed, out.shape, linear.in_features
    if packed is not None and not multiplies(packed):
        raise ValueError(f"matmul_hopper does not support weights of the form {packed}")
    block_m, block_n = max(next_power_of_2(rows), MIN_ROWS), config.block_n
    split, tiles, form = config.split, cdiv(linear.out_features, block_n), linear.number_type
    # If a tile exceeded the buffer, the copy would be slower. It is faster to include rows that are not used.
    whole = torch.as_strided(x, (block_m, K), (x.stride(0), 1))
    _matmul_hopper_kernel[(config.programs or tiles * split,)](
        meta, _descriptor(whole, block_m),
        _descriptor(linear.weight, block_n // 2 if isinstance(epilogue, Gated) else block_n, boxes_of(form)[1]),
        out if packed is None else linear.scale, out if linear.zero is None else linear.zero,
        out if linear.minimum is None else linear.minimum, out if linear.over is None else linear.over,
        **epilogue_arguments(linear, out, epilogue, 64), **adapter_arguments(adapters),
        sums_ptr=scratch.sums if split > 1 else out,
        counter_ptr=scratch.counter if split > 1 else out, rows=rows, N=N, K=K, BLOCK_M=block_m, BLOCK_N=block_n,
        GROUP=packed.group % K if packed else 0, SCALE_ROWS=packed.rows if packed else 1, ZEROS=linear.zero is not None,
        MINIMUMS=linear.minimum is not None, OVER=packed.over_group if packed else 0,
        ROUNDS=packed is not None and packed.group in (16, 32), FORM=form, BLOCK_K=config.block_k,
        STAGES=config.stages, X_STAGES=config.x_stages, SPLIT=split, PERSISTENT=config.programs > 0,
        PRODUCER=config.producer > 0, LAG=config.lag, WARPS=config.num_warps, PDL=pdl,
        **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def _descriptor(tensor, rows: int, nbytes: int = 128):
    """Return a descriptor of boxes of `rows` rows of `nbytes` bytes."""
    block = [rows, nbytes // tensor.itemsize]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout(nbytes, 8 * tensor.itemsize, 2))


def multiplies(packed) -> bool:
    """Return whether the kernel reads packed tensors of this description."""
    if packed.number_type not in COLUMNS_OF or packed.k % COLUMNS_OF[packed.number_type]:
        return False
    if packed.ordered:
        return False
    if packed.group in (16, 32):
        return packed.number_type != "e4m3" and not packed.zeros and packed.scale_dtype in (torch.float16, torch.int8)
    return packed.plain and packed.number_type != "int6" and packed.group in (64, 128, packed.k)


def _supports(case, rows, device) -> bool:
    """Return whether matmul_hopper computes the case; see LinearKernel."""
    if device.capability != 90 or rows > MAX_ROWS:
        return False
    if case.packed is not None:
        return multiplies(case.packed)
    if case.epilogue == "plain":
        return False
    return case.weight_type == torch.bfloat16 and case.k % 8 == 0  # TMA needs rows that begin at multiples of 16 bytes.


HOPPER = LinearKernel(
    "hopper",
    Op(matmul_hopper, adapted_ref, adapted_bytes, (_matmul_hopper_kernel,), OUTPUTS),
    HopperConfig,
    _supports,
    lambda n, config: cdiv(n, config.block_n),
    lambda config: not config.programs and min(config.stages, config.x_stages) > 1,
)
