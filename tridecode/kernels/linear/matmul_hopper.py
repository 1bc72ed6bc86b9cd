"""matmul for up to 64 rows on Hopper, in Gluon, Triton's own language one level lower.

The forms and arguments of matvec and gate_up, as in matmul_wide. A program multiplies tiles of the weights, one after
the other; these are the rows of wgmma, and the rows of the pass are its columns. Weights in fewer bits go from shared
memory through registers, where they become numbers (wgmma_operand.py).

The ring: tiles of the weights come by TMA into STAGES places in shared memory, those of the activations into X_STAGES.
A place has a barrier that counts its bytes; tile c is there when that of place c % STAGES has been full c // STAGES + 1
times. A tile that is multiplied leaves its place to the one STAGES later: all warps meet and then copy, or, with a
COPIER, come by at a second barrier, at which a warp that does nothing else waits. With LAG 1 a tile counts as
multiplied when the next product has begun, so that one is always on its way.

Dependent launch: no kernel that may still run writes weights (what follows a fetch from the host is launched plainly),
so their first STAGES tiles are on their way before the wait. What other kernels of the pass write is read behind it.

Programs that share the columns (SPLIT) leave their sums in memory and count themselves; the last one adds all, its own
too, in the order of the columns. So it does not matter who was last: results are the same every time.

A descriptor for TMA holds an address and sizes: of a weight it is made once, when its line is captured, and stays in
the graph as all arguments do. What lies there may change, as in the buffers of layers that lie on the host.
"""

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, options
from ..op import Op
from .gate_up import gate_up_bytes, gate_up_ref
from .matvec import matvec_bytes, matvec_normed_ref, matvec_residual_ref
from .wgmma_operand import (
    COLUMNS_OF,
    COPIER_REGISTERS,
    barrier,
    barriers,
    columns_of,
    copy_first_rows,
    copy_next,
    copy_weights,
    packed_sums,
    record,
)


@dataclass(frozen=True)
class HopperConfig:
    """Launch config of a product of up to 64 rows on Hopper: a program takes block_n rows of the weights (gate and up
    rows together), in tiles of block_k columns: 128 bytes of a row, or a multiple of that.

    stages, x_stages: tiles in flight, of the weights (before the wait) and of the activations. split: programs that
    share the columns, not of gate and up. programs: how many share the rows, each taking its next ones while it
    multiplies; 0 for one each block_n rows. lag: 1 where a tile's place is free only when the next one is multiplied.
    copier: 1 where a warp of its own copies; three that idle go along, and what these four leave of their registers
    those who multiply have. registers: the most a thread may use.
    """

    block_n: int = 64
    block_k: int = 128
    stages: int = 4
    x_stages: int = 4
    split: int = 1
    num_warps: int = 4
    programs: int = 0
    lag: int = 0
    copier: int = 0
    registers: int = 128


LEAST_ROWS = 16  # of a tile of the activations
# What a program has: the arguments of the kernel, then its rings [stages, rows, columns] and their barriers, one a
# stage: w_full and x_full say that a tile has come (one for both where both have as many stages), free, with a copier,
# that it has been multiplied. tiles: along the rows, of all programs; begin, n: the first one along the columns, and so
# many, of this one; turns: how often, each time of other rows; total: turns * n.
_Work = record(
    "meta_ptr x_desc weight_desc scale_ptr zero_ptr bias_ptr out_ptr norm_ptr normed_ptr sumsq_ptr sums_ptr "
    "counter_ptr eps stride_om stride_normed stride_sumsq rows N K n_sumsq BLOCK_M NORMED SUMSQ_BLOCK HAS_BIAS "
    "RESIDUAL GATED FORM GROUP SCALE_ROWS ZEROS BLOCK_N BLOCK_K STAGES X_STAGES SPLIT PERSISTENT COPIER LAG WARPS PDL "
    "w_ring x_ring w_full x_full free pid tiles begin n turns total"
)


@gluon.constexpr_function
def _rows_at_once(block_m, block_n, split, warps):
    """Rows of which a program adds what others left: so many that a thread needs at most 96 registers for it."""
    rows = block_m
    while split > 1 and rows > 8 and (split + 2) * rows * block_n > 96 * 32 * warps:
        rows //= 2
    return rows


@gluon.constexpr_function
def _sums_layout(block_m, block_n, warps):
    """16 rows of the weights a warp; where there are more warps, they share the columns."""
    high = min(warps, block_n // 16)
    return gl.NVMMADistributedLayout([3, 0], [high, warps // high], [16, block_m * high // warps, 16])


@gluon.jit
def _sums(w, first, ACC_L: gl.constexpr):
    """The products of an item's tiles, from `first` on, added up: [BLOCK_N, BLOCK_M] fp32."""
    acc = gl.zeros([w.BLOCK_N, w.BLOCK_M], gl.float32, ACC_L)
    for c in range(first, first + w.n):
        stage, x_stage = c % w.STAGES, c % w.X_STAGES
        mbarrier.wait(w.w_full.index(stage), c // w.STAGES & 1)
        if w.STAGES != w.X_STAGES:
            mbarrier.wait(w.x_full.index(x_stage), c // w.X_STAGES & 1)
        acc = warpgroup_mma(w.w_ring.index(stage), w.x_ring.index(x_stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(w.LAG, deps=[acc])
        if w.COPIER:
            if c >= w.LAG:
                mbarrier.arrive(w.free.index((c - w.LAG) % w.STAGES), count=1)
        else:
            barrier()  # all warps are done with that tile
            if c >= w.LAG:
                copy_next(w, c - w.LAG)
    return warpgroup_mma_wait(0, deps=[acc])


@gluon.jit
def _partials(w, first_m, ROWS: gl.constexpr):
    """Partial sums of the squares of ROWS rows."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [w.WARPS, 1], [1, 0])
    offs_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
    offs_s = gl.arange(0, w.SUMSQ_BLOCK, gl.SliceLayout(0, L))[None, :]
    mask = (offs_s < w.n_sumsq) & (offs_m < w.rows)
    return gl.load(w.sumsq_ptr + offs_m * w.stride_sumsq + offs_s, mask=mask, other=0.0)


@gluon.jit
def _scale(partials, K, eps, L: gl.constexpr):
    """1 / root mean square of each row, from the partial sums of its squares."""
    return gl.convert_layout(gl.rsqrt(gl.sum(partials, 1) / K + eps), L)


@gluon.jit
def _end(w, acc, tile, partials, ACC_L: gl.constexpr):
    """What becomes of a tile's sums acc [BLOCK_N, BLOCK_M]."""
    OUT_N: gl.constexpr = w.BLOCK_N // 2 if w.GATED else w.BLOCK_N
    # Of sums that others left, no more rows at a time than registers hold.
    ROWS: gl.constexpr = _rows_at_once(w.BLOCK_M, w.BLOCK_N, w.SPLIT, w.WARPS)
    LANES: gl.constexpr = min(OUT_N // 4, 32)
    # As outputs go to memory: 16 bytes a lane along a row of out, which is a column of the product.
    OUT_L: gl.constexpr = gl.BlockedLayout([4, 1], [LANES, 32 // LANES], [1, w.WARPS], [0, 1])
    OUT_M: gl.constexpr = gl.SliceLayout(0, OUT_L)
    last = True
    if w.SPLIT > 1:  # what this program has, as the last one of the tile will read it
        sums_m = gl.arange(0, w.BLOCK_M, gl.SliceLayout(0, ACC_L))[None, :]
        to = w.sums_ptr + (w.pid * w.rows + sums_m) * w.BLOCK_N
        gl.store(to + gl.arange(0, w.BLOCK_N, gl.SliceLayout(1, ACC_L))[:, None], acc, mask=sums_m < w.rows)
        barrier()
        last = gl.atomic_add(w.counter_ptr + tile, 1) == w.SPLIT - 1
        barrier()
    if last:
        in_tile = gl.arange(0, OUT_N, gl.SliceLayout(1, OUT_L))
        offs_n = tile * OUT_N + in_tile
        mask_n = (offs_n < w.N)[:, None]
        if w.RESIDUAL or w.HAS_BIAS:
            extra_ptr = w.norm_ptr if w.RESIDUAL else w.bias_ptr
            extra = gl.load(extra_ptr + offs_n, mask=offs_n < w.N, other=0.0).to(gl.float32)[:, None]
        if w.SPLIT > 1:
            gl.store(w.counter_ptr + tile, 0)
        for first_m in gl.static_range(0, w.BLOCK_M, ROWS):
            offs_m = first_m + gl.arange(0, ROWS, OUT_M)
            status = gl.load(w.meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < w.rows, other=-1)
            mask = (status == RUN)[None, :] & mask_n
            out_ptrs = w.out_ptr + offs_m[None, :] * w.stride_om + offs_n[:, None]
            if w.RESIDUAL:
                residual = gl.load(out_ptrs, mask=mask, other=0.0)
            if w.SPLIT > 1:
                if w.NORMED:
                    squares = _partials(w, first_m, ROWS)
                ptrs = w.sums_ptr + (tile * w.rows + offs_m[None, :]) * w.BLOCK_N + in_tile[:, None]
                there = (offs_m < w.rows)[None, :]
                y = gl.load(ptrs, mask=there, other=0.0, cache_modifier=".cg")
                for part in gl.static_range(1, w.SPLIT):
                    left = ptrs + part * w.tiles * w.rows * w.BLOCK_N
                    y += gl.load(left, mask=there, other=0.0, cache_modifier=".cg")
            if w.GATED:
                y = acc * _scale(partials, w.K, w.eps, gl.SliceLayout(0, ACC_L))[None, :]
                halves = gl.permute(gl.reshape(y, [2, OUT_N, w.BLOCK_M]), (1, 2, 0))
                if w.BLOCK_N < 32 * min(w.WARPS, w.BLOCK_N // 16):  # one warp has the gate, another one the same of up
                    HALF_L: gl.constexpr = gl.BlockedLayout([1, 2, 2], [8, 4, 1], [w.WARPS, 1, 1], [2, 1, 0])
                    halves = gl.convert_layout(halves, HALF_L)
                gate, up = gl.split(halves)
                y = gate * (1.0 / (1.0 + gl.exp(-gate))) * up
                y = gl.convert_layout(y.to(w.out_ptr.dtype.element_ty), OUT_L)
            else:
                if w.SPLIT == 1:
                    y = gl.convert_layout(acc, OUT_L)
                    squares = partials
                if w.NORMED:
                    y = y * _scale(squares, w.K, w.eps, OUT_M)[None, :]
                if w.HAS_BIAS:
                    y += extra
                if w.RESIDUAL:
                    y += residual
                    normed_ptrs = w.normed_ptr + offs_m[None, :] * w.stride_normed + offs_n[:, None]
                    gl.store(normed_ptrs, (y * extra).to(w.normed_ptr.dtype.element_ty), mask=mask)
                    sumsq = gl.sum(gl.where(mask_n, y * y, 0.0), 0)
                    gl.store(w.sumsq_ptr + offs_m * w.stride_sumsq + tile, sumsq, mask=status == RUN)
            gl.store(out_ptrs, y.to(w.out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _some_run(w, WARPS: gl.constexpr):
    """Whether a row of the pass runs. May be asked before the wait: only the last kernels of a pass change it."""
    offs_m = gl.arange(0, w.BLOCK_M, gl.BlockedLayout([1], [32], [WARPS], [0]))
    status = gl.load(w.meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < w.rows, other=-1)
    return gl.max((status == RUN).to(gl.int32), 0)


@gluon.jit
def _copy_all(w):
    """What the copying warp does; the first tiles of the weights are on their way."""
    some = _some_run(w, 1)
    if w.PDL:
        gdc_wait()
    copy_first_rows(w)
    if some != 0:
        for c in range(w.total - min(w.STAGES, w.X_STAGES)):  # no tile follows into the other places
            mbarrier.wait(w.free.index(c % w.STAGES), c // w.STAGES & 1)
            copy_next(w, c)


@gluon.jit
def _multiply(w):
    """What all other warps do."""
    ACC_L: gl.constexpr = _sums_layout(w.BLOCK_M, w.BLOCK_N, w.WARPS)
    some = _some_run(w, w.WARPS)
    if w.PDL:
        gdc_wait()
    if not w.COPIER:
        copy_first_rows(w)
    if some == 0:  # what is on its way must have come before this memory is another program's
        for c in gl.static_range(w.STAGES):
            if c < w.total:
                mbarrier.wait(w.w_full.index(c), 0)
        if w.STAGES != w.X_STAGES:
            for c in gl.static_range(w.X_STAGES):
                if c < w.total:
                    mbarrier.wait(w.x_full.index(c), 0)
    else:
        partials = w.eps
        if w.NORMED and w.SPLIT == 1:  # on their way while weights are multiplied
            partials = _partials(w, 0, w.BLOCK_M)
        for turn in range(w.turns):
            tile = w.pid % w.tiles + turn * gl.num_programs(0)
            if w.FORM == "dense":
                acc = _sums(w, turn * w.n, ACC_L)
            else:
                acc = packed_sums(w, tile, turn * w.n, ACC_L)
            _end(w, acc, tile, partials, ACC_L)


@gluon.jit(do_not_specialize=["n_sumsq"])  # else it is compiled again for every shape of the kernel before it
def _matmul_hopper_kernel(
    meta_ptr, x_desc, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr, norm_ptr, normed_ptr, sumsq_ptr, sums_ptr,
    counter_ptr, eps, stride_om, stride_normed, stride_sumsq, rows, N, K, n_sumsq, BLOCK_M: gl.constexpr,
    NORMED: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr,
    GATED: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr, ZEROS: gl.constexpr,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, X_STAGES: gl.constexpr, SPLIT: gl.constexpr,
    PERSISTENT: gl.constexpr, COPIER: gl.constexpr, LAG: gl.constexpr, WARPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As _matmul_kernel, with tiles [BLOCK_N, BLOCK_K] of weights, GATED half of their rows gate and half up.

    x: [BLOCK_M, K], of which the first `rows` rows count, as a descriptor of blocks of 64 columns; weight: [N, K]
    (GATED: [2 * N, K]), as one of blocks of 128 bytes: FORM is "dense", or of packed.py, without an order
    of columns: then scale: [N / SCALE_ROWS, K / GROUP], zero: [N, K / GROUP], read if ZEROS; GROUP 64, 128, or 0 for
    all columns.
    sums: fp32 [SPLIT * tiles, rows, BLOCK_N]; counter: [tiles] int32, zero before and after.
    Grid: SPLIT * tiles; or, PERSISTENT, any number of programs, of which each takes its next rows while it multiplies.
    """
    if PDL:
        gdc_launch_dependents()
    gl.static_assert(SPLIT == 1 or not (PERSISTENT or GATED))
    OUT_N: gl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    TILE_L: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    WEIGHTS_L: gl.constexpr = gl.NVMMASharedLayout(128, 16 if FORM == "dense" else 32, 2)
    LENGTH: gl.constexpr = BLOCK_K // columns_of(FORM) * weight_desc.block_type.shape[1]
    w_ring = gl.allocate_shared_memory(weight_desc.dtype, [STAGES, BLOCK_N, LENGTH], WEIGHTS_L)
    x_ring = gl.allocate_shared_memory(x_desc.dtype, [X_STAGES, BLOCK_M, BLOCK_K], TILE_L)
    w_full = barriers(STAGES)
    x_full = barriers(X_STAGES) if STAGES != X_STAGES else w_full
    free = barriers(STAGES) if COPIER else w_full
    fence_async_shared()
    barrier()
    pid = gl.program_id(0)
    tiles = (N + OUT_N - 1) // OUT_N
    chunks = (K + BLOCK_K - 1) // BLOCK_K
    part = pid // tiles if SPLIT > 1 else 0
    begin = part * chunks // SPLIT
    n = (part + 1) * chunks // SPLIT - begin
    turns = (tiles - pid + gl.num_programs(0) - 1) // gl.num_programs(0) if PERSISTENT else 1
    w = _Work(
        meta_ptr, x_desc, weight_desc, scale_ptr, zero_ptr, bias_ptr, out_ptr, norm_ptr, normed_ptr, sumsq_ptr,
        sums_ptr, counter_ptr, eps, stride_om, stride_normed, stride_sumsq, rows, N, K, n_sumsq, BLOCK_M, NORMED,
        SUMSQ_BLOCK, HAS_BIAS, RESIDUAL, GATED, FORM, GROUP, SCALE_ROWS, ZEROS, BLOCK_N, BLOCK_K, STAGES, X_STAGES,
        SPLIT, PERSISTENT, COPIER, LAG, WARPS, PDL, w_ring, x_ring, w_full, x_full, free, pid, tiles, begin, n, turns,
        turns * n,
    )  # fmt: skip
    for c in gl.static_range(STAGES):
        if c < w.total:
            copy_weights(w, c)
    if COPIER:
        gl.warp_specialize([(_multiply, (w,)), (_copy_all, (w,))], [1], [COPIER_REGISTERS])
    else:
        _multiply(w)


def _launch(meta, x, linear, out, norm, normed, sumsq, n_sumsq, eps, residual, gated, split, config, pdl):
    weight, bias, packed = linear.weight, linear.bias, linear.packed
    rows, N = out.shape
    K, block_m = linear.in_features, max(triton.next_power_of_2(rows), LEAST_ROWS)
    tiles = triton.cdiv(N, config.block_n // 2 if gated else config.block_n)
    assert packed is None or multiplies(packed), "not what the kernel multiplies"
    spare = out  # stands in for pointers this variant does not read
    shared = config.split > 1
    # A tile that reached beyond the buffer would be slower than one whose last rows nobody needs.
    whole = torch.as_strided(x, (block_m, K), (x.stride(0), 1))
    _matmul_hopper_kernel[(config.programs or tiles * config.split,)](
        meta, _descriptor(whole, block_m), _descriptor(weight, config.block_n // 2 if gated else config.block_n),
        spare if packed is None else linear.scale, spare if linear.zero is None else linear.zero,
        spare if bias is None else bias, out, norm if residual else spare, normed if residual else spare, sumsq,
        split.sums if shared else spare, split.counter if shared else spare, eps, out.stride(0),
        normed.stride(0) if residual else 0, sumsq.stride(0), rows, N, K, n_sumsq, block_m, n_sumsq > 0,
        max(triton.next_power_of_2(n_sumsq), 64), bias is not None, residual, gated, linear.format,
        packed.group % K if packed else 0, packed.rows if packed else 1, bool(packed and packed.zeros), config.block_n,
        config.block_k, config.stages, config.x_stages, config.split, config.programs > 0, config.copier > 0,
        config.lag, config.num_warps, pdl, **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def multiplies(packed) -> bool:
    """Whether these kernels read weights that are packed so; packed: see packed.py."""
    if packed.name not in COLUMNS_OF or packed.k % COLUMNS_OF[packed.name]:
        return False
    return not packed.ordered and packed.group in (64, 128, packed.k)


def _descriptor(tensor, rows: int):
    """Of tiles of so many rows, 128 bytes each."""
    block = [rows, 128 // tensor.itemsize]
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout(128, 8 * tensor.itemsize, 2))


def hopper_normed(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """matvec_normed for up to 64 rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, False, split, config, pdl)


def hopper_residual(meta, x, linear, hidden, norm, normed, sumsq, split=None, *, config, pdl=False):
    """matvec_residual for up to 64 rows at once; leaves `hopper_partials(N, config)` sums in sumsq."""
    _launch(meta, x, linear, hidden, norm, normed, sumsq, 0, 0.0, True, False, split, config, pdl)


def hopper_gate_up(meta, normed, linear, out, sumsq, n_sumsq, eps, split=None, *, config, pdl=False):
    """gate_up for up to 64 rows at once."""
    _launch(meta, normed, linear, out, None, None, sumsq, n_sumsq, eps, False, True, split, config, pdl)


def hopper_partials(N: int, config) -> int:
    """Partial sums of squares that hopper_residual leaves: one for each block_n columns."""
    return triton.cdiv(N, config.block_n)


_OURS = (_matmul_hopper_kernel,)
HOPPER_NORMED = Op(hopper_normed, matvec_normed_ref, matvec_bytes, _OURS, outputs=("out",))
HOPPER_RESIDUAL = Op(hopper_residual, matvec_residual_ref, matvec_bytes, _OURS, outputs=("hidden", "normed", "sumsq"))
HOPPER_GATE_UP = Op(hopper_gate_up, gate_up_ref, gate_up_bytes, _OURS, outputs=("out",))
