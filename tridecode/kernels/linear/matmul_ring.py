"""matmul for one row on Hopper, in Gluon: packed tensors pass through a ring in shared memory.

A program multiplies 16 whole rows of the weight at a time. For Gated these are eight of gate and eight of up. Its warps
share the columns (mma_lanes.py). TMA copies the weight into STAGES stages of STAGE_TILES tiles for each warp, each
stage with its own barrier. As soon as all warps have multiplied a stage, TMA copies the one that is STAGES later to its
place.

The instruction multiplies eight rows of activations. Each of them is the one row of the pass. Only the first result is
stored.

Dependent launch: no kernel that may still run writes weights, so the whole ring is filled before `gdc_wait`.
"""

from collections import namedtuple
from dataclasses import dataclass
from typing import ClassVar

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common import RUN, gdc_launch_dependents, gdc_wait, options
from ..op import Op
from ..triton_compat import Constants, async_load, barrier, reinterpret
from .bits import factor
from .blocks import RowBlocks
from .epilogue import epilogue_arguments
from .gluon_epilogue import Outputs, any_row_runs, finish, load_partials, load_status, norm_scale, silu
from .mma_lanes import (
    WORDS,
    all_raised,
    both_rows,
    lanes_layout,
    load_shared_x,
    load_words,
    multiply,
    parts_of,
    raised,
    scaled,
    sums_of,
    zero_sum,
)
from .project import OUTPUTS, Gated, LinearKernel, project_bytes, project_ref
from .tma_ring import PRODUCER_REGISTERS, barriers


@dataclass(frozen=True)
class RingConfig(RowBlocks):
    """Launch config of matmul_ring.

    A program takes 16 whole rows of the weight at a time, gate and up rows together, and its warps share their columns.
    It has its next stages in flight while it multiplies.

    Attributes:
        tiles: Tiles of 64 bytes of a row in a stage, for each warp. A stage takes tiles * num_warps KiB of shared
            memory.
        stages: Stages in flight, before `gdc_wait` too.
        x_shared: Whether the activations are in shared memory instead of registers.
        programs: Number of programs that share the rows; 0: one for each 16 rows.
        producer: 1 for a producer warp, as in HopperConfig. Useful for programs that take several blocks, or one block
            of more stages than the ring has.
        registers: Maximum number of registers of a thread; 0: no limit.
    """

    block_n: ClassVar[int] = 16
    num_warps: int = 4
    tiles: int = 5
    stages: int = 2
    x_shared: bool = False
    programs: int = 0
    producer: int = 0
    registers: int = 0


@gluon.constexpr_function
def _out_layout(warps, gated):
    """Return the layout of outputs [rows of the weight, activations]: adjacent lanes have adjacent activations."""
    return gl.BlockedLayout([1, 1], [8, 4] if gated else [16, 2], [1, warps], [0, 1])


@gluon.constexpr_function
def _warps_layout(warps, gated):
    """Return the layout of the warps' sums, before `_out_layout`, in which each lane has the sums of all warps."""
    return gl.BlockedLayout([warps, 1, 1], [1, 8, 4] if gated else [1, 16, 2], [1, 1, warps], [0, 1, 2])


# The work of a program:
# - arguments of the kernel, and `outputs`, those of the epilogue
# - ring: STAGE_TILES buffers [stages, pairs of warps, 2, 8, 32] int32
# - full: barriers, one a stage, completed when the stage has arrived
# - free: barriers, one a stage, completed when all warps have multiplied it. Used with a producer warp.
# - kept_sums: shared memory for the sums of the warps
# - x_shared: shared memory for the activations
# - iterations: number of blocks of this program
# - total: number of stages of this program
_Work = namedtuple(
    "_Work", "x_ptr weight_desc scale_ptr stride_xm outputs ring full free kept_sums x_shared iterations total"
)


@gluon.constexpr_function
def _constants(**constexprs):
    """Return the constexprs of the kernel and the constants that follow from them.

    PARTS: parts of a tile.
    STEP: columns of the tiles of all warps together.
    TILES: tiles of a row for each warp.
    OF_BLOCK: stages of a block of rows.
    OUT_N: outputs of a block.
    SHARED: whether a program takes several blocks.
    GROUPS: scales of a row.
    GROUPED: whether rows have several scales.
    FRESH: whether each tile begins new sums. Otherwise two pairs of chains continue.
    """
    k, form, gated = constexprs["K"], constexprs["FORM"], constexprs["EPILOGUE"] == "gated"
    parts, groups = parts_of(form), -(-k // constexprs["GROUP"])
    step = constexprs["WARPS"] * parts * 32
    tiles = -(-k // step)
    return Constants(
        **constexprs, GATED=gated, PARTS=parts, STEP=step, TILES=tiles, OF_BLOCK=-(-tiles // constexprs["STAGE_TILES"]),
        OUT_N=8 if gated else 16, SHARED=constexprs["BLOCKS"] > constexprs["PROGRAMS"], GROUPS=groups,
        GROUPED=groups > 1, FRESH=groups > 1 or form == "int4",
    )  # fmt: skip


@gluon.jit
def _copy_stage(C: gl.constexpr, w, c):
    """Copy stage c of this program to its place in the ring. A block of rows has OF_BLOCK stages."""
    stage = c % C.STAGES
    row = (gl.program_id(0) + c // C.OF_BLOCK * C.PROGRAMS) * C.OUT_N
    pair = c % C.OF_BLOCK * (C.STAGE_TILES * C.WARPS // 2)
    mbarrier.expect(w.full.index(stage), C.STAGE_TILES * C.WARPS * 1024)
    for i in gl.static_range(C.STAGE_TILES):
        place = [pair + i * (C.WARPS // 2), 0, row, 0]
        async_load(w.weight_desc, place, w.full.index(stage), w.ring[i].index(stage))


@gluon.jit
def _copy_first(C: gl.constexpr, w):
    """Copy the first STAGES stages."""
    for c in gl.static_range(C.STAGES):
        if c < w.total:
            _copy_stage(C, w, c)


@gluon.jit
def _produce(C: gl.constexpr, w):
    """Run the producer warp."""
    _copy_first(C, w)
    if any_row_runs(w.outputs, 8, 1) != 0:
        for c in range(C.STAGES, w.total):
            mbarrier.wait(w.free.index(c % C.STAGES), (c // C.STAGES - 1) & 1)
            _copy_stage(C, w, c)


@gluon.jit
def _load_x(C: gl.constexpr, w, warp, lane, c: gl.constexpr, L: gl.constexpr):
    """Load the activations of the warps' tiles c: int32 [threads, 4] for each part, 0 beyond the last column."""
    column = (warp * (C.PARTS * 32) + lane % 4 * 8)[:, None]
    x_words = w.x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    words = column // 2 + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    xs = x_words + gl.minimum(lane // 4, w.outputs.rows - 1)[:, None] * (w.stride_xm // 2) + words
    loaded = ()
    for part in gl.static_range(C.PARTS):
        ptrs = xs + (c * C.STEP // 2 + part * 16)
        if (c + 1) * C.STEP > C.K:
            loaded += (gl.load(ptrs, mask=column + c * C.STEP < C.K, other=0),)
        else:
            loaded += (gl.load(ptrs),)
    return loaded


@gluon.jit
def _load_group_scales(C: gl.constexpr, scale_ptr, block, warp, row):
    """Load the scales of a block's groups: for each of the warps' tiles, the scales of both rows of a lane."""
    low_row = block * C.OUT_N + row
    low = scale_ptr + low_row // C.SCALE_ROWS * C.GROUPS
    high = scale_ptr + (low_row + (C.N if C.GATED else 8)) // C.SCALE_ROWS * C.GROUPS
    loaded = ()
    for c in gl.static_range(C.TILES):
        column = c * C.STEP + warp * (C.PARTS * 32)
        if (c + 1) * C.STEP > C.K:
            column = gl.minimum(column, C.K - 1)
        loaded += (gl.load(low + column // C.GROUP), gl.load(high + column // C.GROUP))
    return loaded


@gluon.jit
def _share_x(C: gl.constexpr, w):
    """Copy all activations to shared memory, scaled for the weight's form. Values beyond the last column are 0."""
    X_WORDS: gl.constexpr = C.STEP // 2
    words = gl.arange(0, X_WORDS, gl.SliceLayout(0, gl.BlockedLayout([1, 2], [1, 32], [1, C.WARPS], [1, 0])))
    ptrs = w.x_ptr.to(gl.pointer_type(gl.int32), bitcast=True) + words
    loaded = ()
    for c in gl.static_range(C.TILES):
        if (c + 1) * C.STEP > C.K:
            loaded += (gl.load(ptrs + c * X_WORDS, mask=words * 2 + c * C.STEP < C.K, other=0),)
        else:
            loaded += (gl.load(ptrs + c * X_WORDS),)
    for c in gl.static_range(C.TILES):
        w.x_shared[c].store(raised(loaded[c], C.FORM))


@gluon.jit
def _add_tile(C: gl.constexpr, w, acc, chains, words, x, zero_sums, scales, c: gl.constexpr, L: gl.constexpr):
    """Multiply the warps' tiles c. Add to acc if FRESH, else to the chains; return both. See `_block_sums`."""
    to: gl.constexpr = c % 2
    if C.X_SHARED:
        tile_x = load_shared_x(w.x_shared[c], C.WARPS, C.PARTS)
    else:
        tile_x = x[c] if C.SHARED else all_raised(x[c], C.FORM)
    if C.FRESH:
        b = gl.zeros([C.WARPS * 32, 4], gl.float32, L)
        a = b
        if C.FORM == "int4":
            a = both_rows(zero_sums[c] if len(zero_sums) > 0 else zero_sum(tile_x), L)
        a, b = multiply(words, tile_x, a, b, C.FORM)
        if C.GROUPED:
            now = scaled(acc[to], a, b, scales[2 * c].to(gl.float32), scales[2 * c + 1].to(gl.float32))
        else:
            now = acc[to] + (a + b)
        acc = acc[:to] + (now,) + acc[to + 1 :]
    else:
        now = multiply(words, tile_x, chains[to][0], chains[to][1], C.FORM)
        chains = chains[:to] + (now,) + chains[to + 1 :]
    return acc, chains


@gluon.jit
def _lane_sums(C: gl.constexpr, acc, chains):
    """Add what `_add_tile` returned: each lane's part of the products, fp32 [threads, 4]."""
    if C.FRESH:
        return acc[0] + acc[1]
    else:
        return (chains[0][0] + chains[0][1]) + (chains[1][0] + chains[1][1])


@gluon.jit
def _sum_of_warps(C: gl.constexpr, kept_sums, row_scales, half: gl.constexpr):
    """Return the sums of all warps, or of one half of the rows if GATED, [OUT_N, 8]. Without GROUPED, scale them."""
    y = gl.sum(kept_sums[half].load(_warps_layout(C.WARPS, C.GATED)), 0)
    y = gl.convert_layout(y, _out_layout(C.WARPS, C.GATED), assert_trivial=True) * factor(C.FORM, True)
    if C.GROUPED:
        return y
    else:
        return y * row_scales[half].to(gl.float32)


@gluon.jit
def _block_sums(C: gl.constexpr, w, iteration, x, zero_sums, scales, L: gl.constexpr):
    """Return each lane's part of the products of a block of rows, fp32 [threads, 4].

    Args:
        x: Activations of each tile, raised if SHARED, or () if they are in shared memory.
        zero_sums: `zero_sum` of each tile, or () to compute them here.
        scales: Scales of the groups, or ().
    """
    FLAT_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    zeros = gl.zeros([C.WARPS * 32, 4], gl.float32, L)
    acc, chains = (zeros, zeros), ((zeros, zeros), (zeros, zeros))
    for s in gl.static_range(C.OF_BLOCK):
        at = iteration * C.OF_BLOCK + s
        stage = at % C.STAGES
        mbarrier.wait(w.full.index(stage), at // C.STAGES & 1)
        tiles = ()
        for i in gl.static_range(C.STAGE_TILES):
            if s * C.STAGE_TILES + i < C.TILES:
                part = reinterpret(w.ring[i].index(stage), gl.int32, [8 * C.WARPS, WORDS], FLAT_L)
                tiles += (load_words(part, C.WARPS),)
        for i in gl.static_range(C.STAGE_TILES):
            if s * C.STAGE_TILES + i < C.TILES:
                acc, chains = _add_tile(C, w, acc, chains, tiles[i], x, zero_sums, scales, s * C.STAGE_TILES + i, L)
        if C.SHARED or C.OF_BLOCK > C.STAGES:  # Another stage will be copied to the place of this one.
            fence_async_shared()  # A barrier does not wait for loads in flight.
            if C.PRODUCER:
                mbarrier.arrive(w.free.index(stage), count=1)
            else:
                barrier()
                if at + C.STAGES < w.total:
                    _copy_stage(C, w, at + C.STAGES)
    return _lane_sums(C, acc, chains)


@gluon.jit
def _multiply(C: gl.constexpr, w):
    """Run the warps that multiply."""
    o = w.outputs
    L: gl.constexpr = lanes_layout(C.WARPS)
    OUT_L: gl.constexpr = _out_layout(C.WARPS, C.GATED)
    PARTIALS_L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [C.WARPS, 1], [1, 0])
    HALVES: gl.constexpr = 2 if C.GATED else 1
    NORMED: gl.constexpr = C.EPILOGUE == "normed" or C.GATED
    RESIDUAL: gl.constexpr = C.EPILOGUE == "residual"
    thread = gl.arange(0, C.WARPS * 32, gl.SliceLayout(1, L))
    warp, lane = thread // 32, thread % 32
    row = lane // 8 + lane // 4 % 2 * 4  # The first row of the lane. The second row is eight rows later.
    scales = ()
    if C.GROUPED:
        scales = _load_group_scales(C, w.scale_ptr, gl.program_id(0), warp, row)
    some = any_row_runs(o, 8, C.WARPS)
    if C.PDL:
        gdc_wait()
    if some == 0:  # The stages in flight must arrive before another program gets this memory.
        for c in gl.static_range(C.STAGES):
            if c < w.total:
                mbarrier.wait(w.full.index(c), 0)
    else:
        loaded, x, zero_sums = (), (), ()
        if not C.X_SHARED:
            for c in gl.static_range(C.TILES):
                loaded += (_load_x(C, w, warp, lane, c, L),)
        if NORMED:
            scale = norm_scale(load_partials(o, 0, 8, C.SUMSQ_BLOCK, PARTIALS_L), C.K, o.eps, gl.SliceLayout(0, OUT_L))
        if C.X_SHARED:
            _share_x(C, w)
        # Scale the activations once for all blocks. With a single block, they are scaled when their tile is multiplied.
        for c in gl.static_range(len(loaded)):
            x += (all_raised(loaded[c], C.FORM) if C.SHARED else loaded[c],)
        if C.FORM == "int4" and C.SHARED:
            for c in gl.static_range(C.TILES):
                if C.X_SHARED:
                    zero_sums += (zero_sum(load_shared_x(w.x_shared[c], C.WARPS, C.PARTS)),)
                else:
                    zero_sums += (zero_sum(x[c]),)
        squares = gl.zeros([C.OUT_N, 8], gl.float32, OUT_L)
        rows_m = gl.arange(0, 8, gl.SliceLayout(0, OUT_L))
        runs = load_status(o, rows_m) == RUN
        in_block = gl.arange(0, C.OUT_N, gl.SliceLayout(1, OUT_L))[:, None]
        offs_m = rows_m[None, :]
        mask = runs[None, :] & (in_block >= 0)
        for iteration in range(w.iterations):
            block = gl.program_id(0) + iteration * C.PROGRAMS
            offs_n = block * C.OUT_N + in_block
            # Load the other arguments of the block's epilogue, and the scales of the next block.
            extra, residual = 0.0, 0.0
            if C.HAS_BIAS or RESIDUAL:
                extra = gl.load(o.extra_ptr + offs_n)
            if RESIDUAL:
                residual = gl.load(o.out_ptr + offs_m * o.stride_om + offs_n, mask=offs_m < o.rows, other=0.0)
            row_scales, scales_next = (), scales
            if not C.GROUPED:
                for half in gl.static_range(HALVES):
                    row_scales += (gl.load(w.scale_ptr + (offs_n + half * C.N) // C.SCALE_ROWS),)
            elif C.SHARED:
                scales_next = _load_group_scales(
                    C, w.scale_ptr, gl.minimum(block + C.PROGRAMS, C.BLOCKS - 1), warp, row
                )
            parts = sums_of(_block_sums(C, w, iteration, x, zero_sums, scales, L), C.GATED, C.WARPS)
            for half in gl.static_range(HALVES):
                w.kept_sums[half].store(parts[half])
            ys = ()
            for half in gl.static_range(HALVES):
                y = _sum_of_warps(C, w.kept_sums, row_scales, half)
                if NORMED:
                    y *= scale[None, :]
                ys += (y,)
            y = ys[0]
            if C.GATED:
                y = silu(y) * ys[1]
            y = finish(C, o, y, extra, residual, offs_m, offs_n, mask)
            if RESIDUAL:
                squares += y * y
            scales = scales_next
        if RESIDUAL:
            gl.store(o.sumsq_ptr + rows_m * o.stride_sumsq + gl.program_id(0), gl.sum(squares, 0), mask=runs)


@gluon.jit(do_not_specialize=["n_sumsq", "rows"])  # n_sumsq depends on the launch config of the previous kernel.
def _matmul_ring_kernel(
    meta_ptr, x_ptr, weight_desc, scale_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps, stride_xm, stride_om,
    stride_normed, stride_sumsq, rows, n_sumsq, N: gl.constexpr, K: gl.constexpr, SUMSQ_BLOCK: gl.constexpr,
    EPILOGUE: gl.constexpr, HAS_BIAS: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    STAGE_TILES: gl.constexpr, STAGES: gl.constexpr, X_SHARED: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr,
    PROGRAMS: gl.constexpr, PRODUCER: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute `project` for one row (`rows` is 1) and a packed weight without zero points and order of columns.

    Grid: (PROGRAMS,). Each program takes every PROGRAMS-th block of 16 rows of the weight, and stores one partial sum
    of squares.

    Args:
        meta_ptr: [rows, META_WIDTH] int32.
        x_ptr: [rows, K].
        weight_desc: Tensor descriptor [pairs of tiles, 2, rows, 32] int32 of the weight [N, K], or [2 * N, K] if
            "gated". Two tiles of packed.py are 128 bytes of a row. The second dimension selects 8 rows, or the 8 rows
            that are 8 rows (N rows if "gated") later. The number of rows is a multiple of 16, and the number of columns
            a multiple of two tiles. If rows have several groups, these are whole tiles.
        scale_ptr: [N / SCALE_ROWS, K / GROUP].
        extra_ptr, out_ptr, normed_ptr, sumsq_ptr: see _matmul_kernel.
    """
    if PDL:
        gdc_launch_dependents()
    C: gl.constexpr = _constants(
        N=N, K=K, SUMSQ_BLOCK=SUMSQ_BLOCK, EPILOGUE=EPILOGUE, HAS_BIAS=HAS_BIAS, FORM=FORM, GROUP=GROUP,
        SCALE_ROWS=SCALE_ROWS, STAGE_TILES=STAGE_TILES, STAGES=STAGES, X_SHARED=X_SHARED, WARPS=WARPS, BLOCKS=BLOCKS,
        PROGRAMS=PROGRAMS, PRODUCER=PRODUCER, PDL=PDL,
    )  # fmt: skip
    KEPT: gl.constexpr = 2 if C.GATED else 1
    RING_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    SUMS_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    X_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # With separate allocations, the compiler knows that a store to one of them does not change another.
    ring, kept_sums, x_shared = (), (), ()
    for _ in gl.static_range(STAGE_TILES):
        ring += (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS // 2, 2, 8, WORDS], RING_L),)
    for _ in gl.static_range(KEPT):
        kept_sums += (gl.allocate_shared_memory(gl.float32, [WARPS, C.OUT_N, 8], SUMS_L),)
    if X_SHARED:
        for _ in gl.static_range(C.TILES):
            x_shared += (gl.allocate_shared_memory(gl.int32, [C.STEP // 2], X_L),)
    full = barriers(STAGES)
    free = barriers(STAGES) if PRODUCER else full
    fence_async_shared()
    barrier()
    iterations = (BLOCKS - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS if C.SHARED else 1
    outputs = Outputs(
        meta_ptr, extra_ptr, out_ptr, normed_ptr, sumsq_ptr, eps, stride_om, stride_normed, stride_sumsq, n_sumsq, rows
    )
    w = _Work(
        x_ptr, weight_desc, scale_ptr, stride_xm, outputs, ring, full, free, kept_sums, x_shared, iterations,
        iterations * C.OF_BLOCK,
    )  # fmt: skip
    if PRODUCER:
        gl.warp_specialize([(_multiply, (C, w)), (_produce, (C, w))], [1], [PRODUCER_REGISTERS])
    else:
        _copy_first(C, w)
        _multiply(C, w)


def ring_descriptor(linear, apart: int, pairs: int, lines: int = 8) -> TensorDescriptor:
    """Return a descriptor of the words of a weight: [pairs of tiles, 2, rows, 32].

    Args:
        apart: number of rows between the two rows that the second dimension selects.
        pairs: number of pairs of tiles that are copied together.
        lines: number of adjacent rows that are copied together, for each of the two rows.
    """
    rows, length = linear.weight.shape
    shape, strides = [length // WORDS.value, 2, rows - apart, WORDS.value], [WORDS.value, length * apart, length, 1]
    block = [pairs, 2, lines, WORDS.value]
    return TensorDescriptor(linear.weight, shape, strides, block, gl.NVMMASharedLayout(128, 32, 4))


def matmul_ring(meta, x, linear, out, epilogue, scratch=None, *, config, pdl=False):
    """Compute `project` for one row with any epilogue except Plain."""
    packed, (rows, N) = linear.packed, out.shape
    if rows != 1 or packed is None or not multiplies(packed):
        raise ValueError(
            f"matmul_ring does not support {rows} rows with weights of the form {packed or linear.weight.dtype}"
        )
    blocks, programs = config.grid(linear.out_features)
    _matmul_ring_kernel[(programs,)](
        meta, x, ring_descriptor(linear, N if isinstance(epilogue, Gated) else 8, config.num_warps // 2), linear.scale,
        **epilogue_arguments(linear, out, epilogue, 32), stride_xm=x.stride(0), rows=rows, N=N, K=linear.in_features,
        FORM=packed.number_type, GROUP=packed.group, SCALE_ROWS=packed.rows, STAGE_TILES=config.tiles,
        STAGES=config.stages, X_SHARED=config.x_shared > 0, WARPS=config.num_warps, BLOCKS=blocks, PROGRAMS=programs,
        PRODUCER=config.producer > 0, PDL=pdl, **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def multiplies(packed) -> bool:
    """Return whether the kernel reads packed tensors of this description."""
    return packed.plain and packed.number_type in ("int4", "e4m3") and not packed.zeros and not packed.ordered


def _supports(case, rows, device) -> bool:
    """Return whether matmul_ring computes the case; see LinearKernel.

    Scales of groups of e4m3, or of int4 groups of another size, need more registers than the configs have.
    """
    packed = case.packed
    if device.capability != 90 or rows != 1 or case.epilogue == "plain" or packed is None or case.n % 16:
        return False
    group = {"int4": 128, "e4m3": packed.k}.get(packed.number_type)
    return multiplies(packed) and packed.group == group and packed.k % (2 * packed.tile) == 0


RING = LinearKernel(
    "ring",
    Op(matmul_ring, project_ref, project_bytes, (_matmul_ring_kernel,), OUTPUTS),
    RingConfig,
    _supports,
    lambda n, config: config.grid(n)[1],
)
