"""Adapters in the epilogue of matmul_hopper, in Gluon; see adapters.py.

B of a group of adapters, and A x of the rows, become operands of wgmma in the first stages of the rings, which are free
after the last tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..triton_compat import barrier, reinterpret
from .adapters import STEP, TOGETHER, begin_of


@gluon.constexpr_function
def _b_layout(warps):
    """Return the layout of B of a group: [rows of the weight, adapters, columns]. A lane has 16 adjacent bytes."""
    return gl.BlockedLayout([1, 1, 8], [4, 4, 2], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _y_layout(warps):
    """Return the layout of A x of a group: [rows of the pass, adapters, columns]."""
    return gl.BlockedLayout([1, 4, 4], [8, 1, 4], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def _lines(C: gl.constexpr, w, tile, L: gl.constexpr):
    """Return the rows [BLOCK_N] of a tile in the weight, and whether they exist."""
    in_tile = gl.arange(0, C.BLOCK_N, L)
    row = tile * C.OUT_N + in_tile % C.OUT_N
    return row + in_tile // C.OUT_N * w.N, row < w.N


@gluon.jit
def load_group(C: gl.constexpr, w, tile, first, r):
    """Load columns r to r + STEP - 1 of B of a group of adapters, for a tile of the weight; see adapters.load_group.

    Only the first of the programs that share the columns of a tile needs them.
    """
    A = w.adapters
    L: gl.constexpr = _b_layout(C.WARPS)
    line, exists = _lines(C, w, tile, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    place = first + gl.arange(0, TOGETHER, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    adapter = gl.load(A.groups_ptr + 1 + place, mask=place < gl.load(A.groups_ptr), other=0)
    rank = gl.multiple_of(gl.load(A.ranks_ptr + adapter), (STEP,))
    offs_r = r + gl.arange(0, STEP, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    ptrs = A.b_ptr + ((adapter - 1).to(gl.int64) * A.stride_b)[None, :, None]
    ptrs += line[:, None, None] * rank[None, :, None] + offs_r[None, None, :]
    mask = (exists & (w.pid < w.tiles))[:, None, None] & (r < rank)[None, :, None]
    return adapter, gl.load(ptrs, mask=mask, other=0.0)


@gluon.jit
def _load_y(C: gl.constexpr, w, tile, r, part: gl.constexpr):
    """Load columns r to r + STEP - 1 of A x of a part, as [BLOCK_M, STEP] in the dtype of the activations.

    They are 0 beyond the rank of a row's adapter, and if no row of the tile belongs to the part.
    """
    A = w.adapters
    L: gl.constexpr = gl.SliceLayout(1, _y_layout(C.WARPS))
    offs_m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(1, L))
    rank = gl.load(A.ranks_ptr + gl.load(A.numbers_ptr + offs_m, mask=offs_m < w.outputs.rows, other=0))
    mask = r < rank
    if C.A_PARTS > 1 and not C.GATED:
        mask &= _has(C, tile, part)
    offs_r = r + gl.arange(0, STEP, gl.SliceLayout(0, L))
    ptrs = A.y_ptr + (offs_m * A.stride_ym + part * gl.multiple_of(rank, (STEP,)))[:, None] + offs_r[None, :]
    y = gl.load(ptrs, mask=mask[:, None], other=0.0)
    for split in gl.static_range(1, C.A_SPLITS):
        y += gl.load(ptrs + split * A.stride_ys, mask=mask[:, None], other=0.0)
    return y.to(w.x_ring.dtype)


@gluon.jit
def _has(C: gl.constexpr, tile, part: gl.constexpr):
    """Return whether a row of the tile belongs to a part of the weight. "gated" is not supported."""
    first = tile * C.BLOCK_N
    return (first < begin_of(C.BEGIN_1, C.BEGIN_2, part + 1)) & (
        first + C.BLOCK_N > begin_of(C.BEGIN_1, C.BEGIN_2, part)
    )


@gluon.jit
def _store(C: gl.constexpr, w, tile, b, y, own, part: gl.constexpr, stage: gl.constexpr):
    """Store the rows of B that belong to a part, and A x of this part, in a stage of the rings.

    A row of A x has zeros for the columns of other adapters.
    """
    DEPTH: gl.constexpr = TOGETHER * STEP
    line, _ = _lines(C, w, tile, gl.SliceLayout(1, gl.SliceLayout(2, _b_layout(C.WARPS))))
    if C.A_PARTS > 1:
        begin: gl.constexpr = begin_of(C.BEGIN_1, C.BEGIN_2, part)
        end: gl.constexpr = begin_of(C.BEGIN_1, C.BEGIN_2, part + 1)
        b = gl.where(((line >= begin) & (line < end))[:, None, None], b, 0.0)
    y = gl.where(own[:, :, None], y[:, None, :], 0.0).to(w.x_ring.dtype)
    _b_stage(C, w, stage).store(gl.reshape(b.to(w.x_ring.dtype), [C.BLOCK_N, DEPTH]))
    _y_stage(C, w, stage).store(gl.reshape(y, [C.BLOCK_M, DEPTH]))


@gluon.jit
def _b_stage(C: gl.constexpr, w, stage: gl.constexpr):
    """Return the first 128 bytes of each row of a stage of the weight, as [BLOCK_N, 64]."""
    L: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    parts = reinterpret(w.w_ring.index(stage), w.x_ring.dtype, [C.STAGE_PARTS, C.BLOCK_N, TOGETHER * STEP], L)
    return parts.index(0)


@gluon.jit
def _y_stage(C: gl.constexpr, w, stage: gl.constexpr):
    """Return the first 128 bytes of each row of a stage of the activations, as [BLOCK_M, 64]."""
    DEPTH: gl.constexpr = TOGETHER * STEP
    shape: gl.constexpr = [C.BLOCK_K // DEPTH, C.BLOCK_M, DEPTH]
    return reinterpret(w.x_ring.index(stage), w.x_ring.dtype, shape, w.x_desc.layout).index(0)


@gluon.jit
def add_adapters(C: gl.constexpr, w, acc, group, tile):
    """Add B y of each row's adapter to the sums of a tile; see adapters.expand_rows.

    Args:
        acc: [BLOCK_N, BLOCK_M] fp32.
        group: the first group of adapters, from load_group.
    """
    A = w.adapters
    L: gl.constexpr = _y_layout(C.WARPS)
    AT_ONCE: gl.constexpr = 2 if C.GATED else 1  # A tile of "gated" has rows of both parts.
    gl.static_assert(C.STAGES >= AT_ONCE and C.X_STAGES >= AT_ONCE and not C.PERSISTENT)
    offs_m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    numbers = gl.load(A.numbers_ptr + offs_m, mask=offs_m < w.outputs.rows, other=0)
    count, largest = gl.load(A.groups_ptr), gl.max(gl.load(A.ranks_ptr + numbers), 0)
    barrier()  # All warps have multiplied the last tile.
    for r in range(0, largest, STEP):
        ys = ()
        for part in gl.static_range(C.A_PARTS):
            ys += (_load_y(C, w, tile, r, part),)
        for place in range(0, count, TOGETHER):
            adapter, b = group
            last = place + TOGETHER >= count
            group = load_group(C, w, tile, gl.where(last, 0, place + TOGETHER), gl.where(last, r + STEP, r))
            adapter = gl.convert_layout(adapter, gl.SliceLayout(0, gl.SliceLayout(2, L)))
            own = (numbers[:, None] == adapter[None, :]) & (adapter > 0)[None, :]
            if C.GATED:
                for part in gl.static_range(2):
                    _store(C, w, tile, b, ys[part], own, part, part)
                acc = _multiply_stages(C, w, acc, 2)
            else:
                for part in gl.static_range(C.A_PARTS):
                    if C.A_PARTS == 1 or _has(C, tile, part):
                        _store(C, w, tile, b, ys[part], own, part, 0)
                        acc = _multiply_stages(C, w, acc, 1)
    return acc


@gluon.jit
def _multiply_stages(C: gl.constexpr, w, acc, STAGES: gl.constexpr):
    """Multiply the operands in the first stages of the rings. Then the stages are free."""
    fence_async_shared()
    barrier()
    for stage in gl.static_range(STAGES):
        acc = warpgroup_mma(_b_stage(C, w, stage), _y_stage(C, w, stage).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    return acc
