"""matmul for one row on Hopper, in Gluon: weights in fewer bits come through a ring in shared memory.

The forms and arguments of matvec and gate_up. A program multiplies 16 whole rows of the weights at a time, if gated
eight of gate and eight of up; its warps share the columns (mma_lanes.py). The weights come by TMA into STAGES
stages of STAGE_TILES tiles a warp: so many are on their way at any time, whatever registers hold, and a stage is waited
for alone, by its own barrier. As soon as all warps have a stage in registers, the one STAGES later is asked for.

The instruction multiplies eight rows of activations. Each of them is the one row there is, and what comes of the first
is written.

Dependent launch: no kernel that may still run writes weights, so the whole ring is filled before the wait.
"""

from dataclasses import dataclass
from typing import ClassVar

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, options
from ..op import Op
from .bits import factor
from .blocks import RowBlocks
from .gate_up import gate_up_bytes, gate_up_ref
from .matvec import matvec_bytes, matvec_normed_ref, matvec_residual_ref
from .mma_lanes import (
    WORDS,
    add_tile,
    all_raised,
    lanes_layout,
    load_scales,
    load_shared_x,
    load_words,
    load_x,
    off_of,
    parts_of,
    share_x,
    sums_of,
)
from .wgmma_operand import COPIER_REGISTERS, barrier, barriers, copy, record, view


@dataclass(frozen=True)
class RingConfig(RowBlocks):
    """Launch config of a product of one row on Hopper, of weights in fewer bits: a program takes 16 whole rows of the
    weights at a time (gate and up rows together), its warps share their columns.

    tiles: of 64 bytes of a row, that each warp has of a stage. stages: in flight, before the wait too; a stage is
    tiles * num_warps KiB of shared memory. x_shared: the activations are in shared memory, else in registers.
    programs: how many share the rows, each taking its next ones while it multiplies; 0 for one each 16 rows. copier: 1
    where a warp of its own copies, as in HopperConfig; for programs that take several blocks, or one of more stages
    than the ring has. registers: the most a thread may use, 0 for no bound.
    """

    block_n: ClassVar[int] = 16
    num_warps: int = 4
    tiles: int = 5
    stages: int = 2
    x_shared: bool = False
    programs: int = 0
    copier: int = 0
    registers: int = 0


@gluon.constexpr_function
def _out_layout(warps, gated):
    """Of outputs [rows of the weights, activations]: a lane's neighbour has the next of those."""
    return gl.BlockedLayout([1, 1], [8, 4] if gated else [16, 2], [1, warps], [0, 1])


@gluon.constexpr_function
def _warps_layout(warps, gated):
    """Of the warps' sums, in front of `_out_layout`: each lane has all warps'."""
    return gl.BlockedLayout([warps, 1, 1], [1, 8, 4] if gated else [1, 16, 2], [1, 1, warps], [0, 1, 2])


# What a program has: the arguments of the kernel and what follows from them, then its ring, of which a stage is
# STAGE_TILES pieces [pairs of warps, 2, 8, 32] int32, and its barriers, one a stage: full says that it has come, free,
# with a copier, that all warps have it in registers. total: stages of this program.
_Work = record(
    "meta_ptr x_ptr weight_desc scale_ptr bias_ptr out_ptr norm_ptr normed_ptr sumsq_ptr eps stride_xm stride_om "
    "stride_normed stride_sumsq rows n_sumsq N K NORMED SUMSQ_BLOCK HAS_BIAS RESIDUAL GATED FORM GROUP SCALE_ROWS "
    "STAGE_TILES STAGES X_SHARED WARPS BLOCKS PROGRAMS COPIER PDL PARTS TILES OF_BLOCK OUT_N ring full free kept_sums "
    "x_shared turns total"
)


@gluon.jit
def _copy_stage(w, c):
    """Stage c of this program, of which each block of rows has OF_BLOCK, into its place."""
    stage = c % w.STAGES
    row = (gl.program_id(0) + c // w.OF_BLOCK * w.PROGRAMS) * w.OUT_N
    pair = c % w.OF_BLOCK * (w.STAGE_TILES * w.WARPS // 2)
    mbarrier.expect(w.full.index(stage), w.STAGE_TILES * w.WARPS * 1024)
    for i in gl.static_range(w.STAGE_TILES):
        place = [pair + i * (w.WARPS // 2), 0, row, 0]
        copy(w.weight_desc, place, w.full.index(stage), w.ring[i].index(stage))


@gluon.jit
def _copy_first(w):
    for c in gl.static_range(w.STAGES):
        if c < w.total:
            _copy_stage(w, c)


@gluon.jit
def _some_run(w, WARPS: gl.constexpr):
    """Whether the row runs. May be asked before the wait: only the last kernels of a pass change it."""
    offs_m = gl.arange(0, 8, gl.BlockedLayout([1], [32], [WARPS], [0]))
    status = gl.load(w.meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < w.rows, other=-1)
    return gl.max((status == RUN).to(gl.int32), 0)


@gluon.jit
def _copy_all(w):
    """What the copying warp does."""
    _copy_first(w)
    if _some_run(w, 1) != 0:
        for c in range(w.STAGES, w.total):
            mbarrier.wait(w.free.index(c % w.STAGES), (c // w.STAGES - 1) & 1)
            _copy_stage(w, c)


@gluon.jit
def _scale(w, L: gl.constexpr):
    """1 / root mean square of the row, from the partial sums of its squares."""
    SUMS_L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [w.WARPS, 1], [1, 0])
    offs_m = gl.arange(0, 8, gl.SliceLayout(1, SUMS_L))[:, None]
    offs_s = gl.arange(0, w.SUMSQ_BLOCK, gl.SliceLayout(0, SUMS_L))[None, :]
    mask = (offs_s < w.n_sumsq) & (offs_m < w.rows)
    partials = gl.load(w.sumsq_ptr + offs_m * w.stride_sumsq + offs_s, mask=mask, other=0.0)
    return gl.convert_layout(gl.rsqrt(gl.sum(partials, 1) / w.K + w.eps), gl.SliceLayout(0, L))


@gluon.jit
def _block_sums(w, turn, x, off, scales, L: gl.constexpr):
    """Each lane's part of the products of a block of rows, fp32 [threads, 4]. x: of each tile, for several blocks
    raised already, or (); off: what its zero points make of them, or (); scales: of its groups, or ()."""
    GROUPED: gl.constexpr = w.GROUP < w.K
    FRESH: gl.constexpr = GROUPED or w.FORM == "int4"  # sums begin with each tile
    TURNS: gl.constexpr = w.BLOCKS > w.PROGRAMS
    FLAT_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    acc, chains = (), ()
    for _ in gl.static_range(2):
        acc += (gl.zeros([w.WARPS * 32, 4], gl.float32, L),)
        chains += ((gl.zeros([w.WARPS * 32, 4], gl.float32, L), gl.zeros([w.WARPS * 32, 4], gl.float32, L)),)
    for s in gl.static_range(w.OF_BLOCK):
        at = turn * w.OF_BLOCK + s
        stage = at % w.STAGES
        mbarrier.wait(w.full.index(stage), at // w.STAGES & 1)
        tiles = ()
        for i in gl.static_range(w.STAGE_TILES):
            if s * w.STAGE_TILES + i < w.TILES:
                piece = view(w.ring[i].index(stage), gl.int32, [8 * w.WARPS, WORDS], FLAT_L)
                tiles += (load_words(piece, w.WARPS),)
        if TURNS or w.OF_BLOCK > w.STAGES:  # as soon as all warps have it
            if w.COPIER:
                mbarrier.arrive(w.free.index(stage), count=1)
            else:
                barrier()
                if at + w.STAGES < w.total:
                    _copy_stage(w, at + w.STAGES)
        for i in gl.static_range(w.STAGE_TILES):
            if s * w.STAGE_TILES + i < w.TILES:
                if w.X_SHARED:
                    of_tile = load_shared_x(w.x_shared[s * w.STAGE_TILES + i], w.WARPS, w.PARTS)
                else:
                    of_tile = x[s * w.STAGE_TILES + i] if TURNS else all_raised(x[s * w.STAGE_TILES + i], w.FORM)
                acc, chains = add_tile(
                    acc, chains, tiles[i], of_tile, off, scales, s * w.STAGE_TILES + i, FRESH, GROUPED, w.FORM, L
                )
    if FRESH:
        return acc[0] + acc[1]
    else:
        return (chains[0][0] + chains[0][1]) + (chains[1][0] + chains[1][1])


@gluon.jit
def _multiply(w):
    """What all other warps do."""
    WARPS: gl.constexpr = w.WARPS
    L: gl.constexpr = lanes_layout(WARPS)
    OUT_L: gl.constexpr = _out_layout(WARPS, w.GATED)
    WARPS_L: gl.constexpr = _warps_layout(WARPS, w.GATED)
    GROUPED: gl.constexpr = w.GROUP < w.K
    TURNS: gl.constexpr = w.BLOCKS > w.PROGRAMS
    HALVES: gl.constexpr = 2 if w.GATED else 1
    FACTOR: gl.constexpr = factor(w.FORM, True)
    thread = gl.arange(0, WARPS * 32, gl.SliceLayout(1, L))
    warp, lane = thread // 32, thread % 32
    row = lane // 8 + lane // 4 % 2 * 4  # of the weights; the other one is eight rows on
    scales = ()
    if GROUPED:
        scales = load_scales(w, gl.program_id(0), warp, row)
    some = _some_run(w, WARPS)
    if w.PDL:
        gdc_wait()
    if some == 0:  # what is on its way must have come before this memory is another program's
        for c in gl.static_range(w.STAGES):
            if c < w.total:
                mbarrier.wait(w.full.index(c), 0)
    else:
        loaded, x, off = (), (), ()
        if not w.X_SHARED:
            for c in gl.static_range(w.TILES):
                loaded += (load_x(w, warp, lane, c, L),)
        if w.NORMED:
            scale = _scale(w, OUT_L)
        if w.X_SHARED:
            share_x(w)
        for c in gl.static_range(len(loaded)):  # for one block: as each tile wants them
            x += (all_raised(loaded[c], w.FORM) if TURNS else loaded[c],)
        if w.FORM == "int4" and TURNS:
            for c in gl.static_range(w.TILES):
                if w.X_SHARED:
                    off += (off_of(load_shared_x(w.x_shared[c], WARPS, w.PARTS)),)
                else:
                    off += (off_of(x[c]),)
        squares = gl.zeros([w.OUT_N, 8], gl.float32, OUT_L)
        of_m = gl.arange(0, 8, gl.SliceLayout(0, OUT_L))
        runs = gl.load(w.meta_ptr + of_m * META_WIDTH + STATUS, mask=of_m < w.rows, other=-1) == RUN
        in_block = gl.arange(0, w.OUT_N, gl.SliceLayout(1, OUT_L))[:, None]
        offs_m = of_m[None, :]
        mask = runs[None, :] & (in_block >= 0)
        for turn in range(w.turns):
            block = gl.program_id(0) + turn * w.PROGRAMS
            offs_n = block * w.OUT_N + in_block
            # What the end of a block needs beside its sums, and what the next block's sums need.
            if w.HAS_BIAS or w.RESIDUAL:
                extra = gl.load((w.norm_ptr if w.RESIDUAL else w.bias_ptr) + offs_n)
            if w.RESIDUAL:
                residual = gl.load(w.out_ptr + offs_m * w.stride_om + offs_n, mask=offs_m < w.rows, other=0.0)
            of_row, scales_next = (), scales
            if not GROUPED:
                for half in gl.static_range(HALVES):
                    of_row += (gl.load(w.scale_ptr + (offs_n + half * w.N) // w.SCALE_ROWS).to(gl.float32),)
            elif TURNS:
                scales_next = load_scales(w, gl.minimum(block + w.PROGRAMS, w.BLOCKS - 1), warp, row)
            parts = sums_of(_block_sums(w, turn, x, off, scales, L), w.GATED, WARPS)
            for half in gl.static_range(HALVES):
                w.kept_sums[half].store(parts[half])
            ys = ()
            for half in gl.static_range(HALVES):
                y = gl.sum(w.kept_sums[half].load(WARPS_L), 0)
                y = gl.convert_layout(y, OUT_L, assert_trivial=True) * FACTOR
                if not GROUPED:
                    y *= of_row[half]
                if w.NORMED:
                    y *= scale[None, :]
                ys += (y,)
            y = ys[0]
            if w.GATED:
                y = y * (1.0 / (1.0 + gl.exp(-y))) * ys[1]
            if w.HAS_BIAS:
                y += extra.to(gl.float32)
            if w.RESIDUAL:
                y += residual
                normed_ptrs = w.normed_ptr + offs_m * w.stride_normed + offs_n
                gl.store(normed_ptrs, (y * extra.to(gl.float32)).to(w.normed_ptr.dtype.element_ty), mask=mask)
                squares += y * y
            gl.store(w.out_ptr + offs_m * w.stride_om + offs_n, y.to(w.out_ptr.dtype.element_ty), mask=mask)
            scales = scales_next
        if w.RESIDUAL:
            gl.store(w.sumsq_ptr + of_m * w.stride_sumsq + gl.program_id(0), gl.sum(squares, 0), mask=runs)


@gluon.jit(do_not_specialize=["n_sumsq", "rows"])  # else it is compiled again for every shape of the kernel before it
def _matmul_ring_kernel(
    meta_ptr, x_ptr, weight_desc, scale_ptr, bias_ptr, out_ptr, norm_ptr, normed_ptr, sumsq_ptr, eps, stride_xm,
    stride_om, stride_normed, stride_sumsq, rows, n_sumsq, N: gl.constexpr, K: gl.constexpr, NORMED: gl.constexpr,
    SUMSQ_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, GATED: gl.constexpr, FORM: gl.constexpr,
    GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr, STAGE_TILES: gl.constexpr, STAGES: gl.constexpr,
    X_SHARED: gl.constexpr, WARPS: gl.constexpr, BLOCKS: gl.constexpr, PROGRAMS: gl.constexpr, COPIER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """As _matmul_kernel, of one row, without zero points and orders of columns.

    weight: [N, K] in words of packed.py, of which two tiles are 128 bytes of a row, as a descriptor
    [pairs of tiles, 2, rows, 32] int32: of blocks of 8 rows, and 8 rows that are 8 rows on, or N if GATED.
    N (of both halves): a multiple of 16; K: of two tiles; groups, if rows have several, are whole tiles. rows: 1.
    Grid: PROGRAMS.
    """
    if PDL:
        gdc_launch_dependents()
    PARTS: gl.constexpr = parts_of(FORM)
    TILES: gl.constexpr = (K + WARPS * PARTS * 32 - 1) // (WARPS * PARTS * 32)  # that a warp has of a row
    OF_BLOCK: gl.constexpr = (TILES + STAGE_TILES - 1) // STAGE_TILES
    OUT_N: gl.constexpr = 8 if GATED else 16
    RING_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    SUMS_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    X_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Pieces apart, so that the compiler sees that one does not overwrite another.
    ring = ()
    for _ in gl.static_range(STAGE_TILES):
        ring += (gl.allocate_shared_memory(gl.int32, [STAGES, WARPS // 2, 2, 8, WORDS], RING_L),)
    kept_sums = ()
    for _ in gl.static_range(16 // OUT_N):
        kept_sums += (gl.allocate_shared_memory(gl.float32, [WARPS, OUT_N, 8], SUMS_L),)
    x_shared = ()
    if X_SHARED:
        for _ in gl.static_range(TILES):
            x_shared += (gl.allocate_shared_memory(gl.int32, [WARPS * PARTS * 16], X_L),)
    full = barriers(STAGES)
    free = barriers(STAGES) if COPIER else full
    fence_async_shared()
    barrier()
    turns = (BLOCKS - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS if BLOCKS > PROGRAMS else 1
    w = _Work(
        meta_ptr, x_ptr, weight_desc, scale_ptr, bias_ptr, out_ptr, norm_ptr, normed_ptr, sumsq_ptr, eps, stride_xm,
        stride_om, stride_normed, stride_sumsq, rows, n_sumsq, N, K, NORMED, SUMSQ_BLOCK, HAS_BIAS, RESIDUAL, GATED,
        FORM, GROUP, SCALE_ROWS, STAGE_TILES, STAGES, X_SHARED, WARPS, BLOCKS, PROGRAMS, COPIER, PDL, PARTS, TILES,
        OF_BLOCK, OUT_N, ring, full, free, kept_sums, x_shared, turns, turns * OF_BLOCK,
    )  # fmt: skip
    if COPIER:
        gl.warp_specialize([(_multiply, (w,)), (_copy_all, (w,))], [1], [COPIER_REGISTERS])
    else:
        _copy_first(w)
        _multiply(w)


def _descriptor(linear, n: int, gated: bool, warps: int) -> TensorDescriptor:
    """Of the words of a weight, n rows of it or of each half of it."""
    length, block = linear.weight.shape[1], [warps // 2, 2, 8, WORDS.value]
    shape, strides = [length // WORDS.value, 2, n if gated else n - 8, WORDS.value], [WORDS.value, 0, length, 1]
    strides[1] = length * (n if gated else 8)
    return TensorDescriptor(linear.weight, shape, strides, block, gl.NVMMASharedLayout(128, 32, 4))


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, gated, config, pdl):
    bias, packed = linear.bias, linear.packed
    (rows, N), K = out.shape, linear.in_features
    carried = packed and packed.name in ("int4", "e4m3") and not packed.zeros and not packed.ordered
    assert rows == 1 and carried, "not what the kernel multiplies"
    blocks, programs = config.grid(2 * N if gated else N)
    spare = out  # stands in for pointers this variant does not read
    _matmul_ring_kernel[(programs,)](
        meta, x, _descriptor(linear, N, gated, config.num_warps), linear.scale, spare if bias is None else bias, out,
        norm if residual else spare, normed if residual else spare, sumsq, eps,
        x.stride(0), out.stride(0), normed.stride(0) if residual else 0, sumsq.stride(0), rows, n_sumsq, N, K,
        n_sumsq > 0, max(triton.next_power_of_2(n_sumsq), 32), bias is not None, residual, gated, packed.name,
        packed.group, packed.rows, config.tiles, config.stages, config.x_shared > 0, config.num_warps, blocks, programs,
        config.copier > 0, pdl,
        **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def ring_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """matvec_normed for one row."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, False, config, pdl)


def ring_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, config, pdl=False):
    """matvec_residual for one row; leaves `ring_partials(N, config)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, False, config, pdl)


def ring_gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """gate_up for one row."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, True, config, pdl)


def ring_partials(N: int, config) -> int:
    """Partial sums of squares that ring_residual leaves: one a program."""
    return config.grid(N)[1]


_OURS = (_matmul_ring_kernel,)
RING_NORMED = Op(ring_normed, matvec_normed_ref, matvec_bytes, _OURS, outputs=("out",))
RING_RESIDUAL = Op(ring_residual, matvec_residual_ref, matvec_bytes, _OURS, outputs=("hidden", "normed", "sumsq"))
RING_GATE_UP = Op(ring_gate_up, gate_up_ref, gate_up_bytes, _OURS, outputs=("out",))
