"""Adapters in the epilogue of matmul_hopper, in Gluon; see adapters.py.

B of a group of adapters, and A x of the rows, become operands of wgmma in the first stages of the rings, which are free
after the last tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..triton_compat import async_load_pointers, barrier, reinterpret
from .adapters import R_STEP, TOGETHER, begin_of

MAX_COPIES = 4  # Maximum number of copies of B in shared memory.


@gluon.constexpr_function
def _copy_layout(warps):
    """Return the layout of copies of B: [rows of the weight, adapters, columns]. A lane copies 16 bytes at a time."""
    return gl.BlockedLayout([1, 1, 8], [4, 4, 2], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _y_layout(warps):
    """Return the layout of A x of a group: [rows of the pass, adapters, columns]."""
    return gl.BlockedLayout([1, 4, 4], [8, 1, 4], [warps, 1, 1], [2, 1, 0])


@gluon.jit
def fetch_adapters(C: gl.constexpr, w, tile):
    """Store the listed adapters and their ranks in shared memory, and prefetch a tile of B of each one into L2.

    A thread prefetches that of one adapter. If several programs share the columns of a tile, only the first one adds
    adapters, so the others prefetch nothing.
    """
    A = w.adapters
    place = gl.arange(0, 32 * C.WARPS, gl.BlockedLayout([1], [32], [C.WARPS], [0]))
    count = gl.load(A.listed_ptr)
    adapter = gl.load(A.listed_ptr + 1 + place, mask=place < count, other=0)
    rank = gl.load(A.ranks_ptr + adapter)
    rows = gl.minimum(w.N - tile * C.OUT_N, C.OUT_N)
    size = gl.where(w.pid < w.tiles, 2 * rows * rank, 0)  # Bytes; an element has two.
    ptrs = A.b_ptr + (adapter - 1).to(gl.int64) * A.stride_b
    for half in gl.static_range(2 if C.GATED else 1):
        gl.inline_asm_elementwise(
            """{
            .reg .pred some;
            mov.u32 $0, 0; setp.gt.s32 some, $2, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
            }""",
            "=r,l,r", [(ptrs + (tile * C.OUT_N + half * w.N) * rank).to(gl.uint64), size], dtype=gl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    places = gl.arange(0, C.BLOCK_M, gl.BlockedLayout([1], [32], [C.WARPS], [0]))
    adapter = gl.load(A.listed_ptr + 1 + places, mask=places < count, other=0)
    reinterpret(w.listed[0], gl.int32, [C.BLOCK_M], w.listed[0].layout).store(adapter)
    reinterpret(w.listed[1], gl.int32, [C.BLOCK_M], w.listed[1].layout).store(gl.load(A.ranks_ptr + adapter))


@gluon.jit
def _begin(C: gl.constexpr, part):
    """Return the row of the weight at which a part begins. The part after the last one begins at a very large row."""
    row = gl.where(part == 0, 0, gl.where(part == 1, C.BEGIN_1, C.BEGIN_2))
    return gl.where(part == C.A_PARTS, begin_of(0, 0, 3), row)


@gluon.jit
def _copy_b(C: gl.constexpr, w, tile, part, first, r, stage):
    """Start to copy columns r to r + R_STEP - 1 of B of a group of adapters to a stage of the weight.

    Rows of other parts of the weight become 0, and so do columns beyond the rank of an adapter.

    Args:
        first: place of the first adapter in the list.
    """
    A = w.adapters
    L: gl.constexpr = _copy_layout(C.WARPS)
    G: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    in_tile = gl.arange(0, C.BLOCK_N, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    row = tile * C.OUT_N + in_tile % C.OUT_N
    line = row + in_tile // C.OUT_N * w.N
    exists = (row < w.N) & (line >= _begin(C, part)) & (line < _begin(C, part + 1))
    adapter = w.listed[0].index(first // TOGETHER).load(G)
    rank = w.listed[1].index(first // TOGETHER).load(G)
    columns = gl.arange(0, R_STEP, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    ptrs = A.b_ptr + ((adapter - 1).to(gl.int64) * A.stride_b + r)[None, :, None]
    ptrs += line[:, None, None] * rank[None, :, None] + columns[None, None, :]
    mask = exists[:, None, None] & ((r < rank)[None, :, None] & (columns >= 0)[None, None, :])
    ptrs = gl.reshape(ptrs, [C.BLOCK_N, TOGETHER * R_STEP])
    mask = gl.reshape(mask, [C.BLOCK_N, TOGETHER * R_STEP])
    # The rows of B are multiples of 32 bytes.
    ptrs = gl.max_contiguous(gl.multiple_of(ptrs, [16, 16]), [1, 8])
    async_load_pointers(_b_stage(C, w, stage), ptrs, mask=gl.max_constancy(mask, [1, 8]))
    async_copy.commit_group()


@gluon.jit
def _following(part, place, r, count, first, last):
    """Return the part, the place in the list and the column of B of the copy after this one."""
    of_part = place + TOGETHER < count
    next_part = gl.where(of_part, part, gl.where(part == last, first, part + 1))
    return next_part, gl.where(of_part, place + TOGETHER, 0), gl.where(of_part | (part < last), r, r + R_STEP)


@gluon.jit
def _load_y(C: gl.constexpr, w, r, part):
    """Load columns r to r + R_STEP - 1 of A x of a part, as [BLOCK_M, R_STEP] in the dtype of the activations.

    Columns beyond the rank of a row's adapter are 0.
    """
    A = w.adapters
    L: gl.constexpr = gl.SliceLayout(1, _y_layout(C.WARPS))
    offs_m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(1, L))
    rank = gl.load(A.ranks_ptr + gl.load(A.numbers_ptr + offs_m, mask=offs_m < w.outputs.rows, other=0))
    ptrs = A.y_ptr + (offs_m * A.stride_ym + part * gl.multiple_of(rank, (R_STEP,)))[:, None]
    ptrs += r + gl.arange(0, R_STEP, gl.SliceLayout(0, L))[None, :]
    y = gl.load(ptrs, mask=(r < rank)[:, None], other=0.0).to(gl.float32)
    for split in gl.static_range(1, C.A_SPLITS):
        y += gl.load(ptrs + split * A.stride_ys, mask=(r < rank)[:, None], other=0.0).to(gl.float32)
    return y.to(w.x_ring.dtype)


@gluon.jit
def _parts(C: gl.constexpr, w, tile):
    """Return the first and the last part of the weight that rows of a tile belong to."""
    begin, end = tile * C.OUT_N, gl.minimum((tile + 1) * C.OUT_N, w.N) - 1
    if C.GATED:
        return 0, 1
    first, last = 0, 0
    for part in gl.static_range(1, C.A_PARTS):
        first += (begin >= begin_of(C.BEGIN_1, C.BEGIN_2, part)).to(gl.int32)
        last += (end >= begin_of(C.BEGIN_1, C.BEGIN_2, part)).to(gl.int32)
    return first, last


@gluon.constexpr_function
def _b_stages(C):
    """Return the number of copies of B whose memory is in use at a time."""
    return min(C.STAGES * C.BOXES * C.BOX_BYTES // 128, MAX_COPIES)


@gluon.jit
def _b_stage(C: gl.constexpr, w, stage):
    """Return one of the buffers [BLOCK_N, 64] for B in the memory of the weight, whose tiles are no longer needed."""
    L: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PARTS: gl.constexpr = C.STAGES * C.BOXES * C.BOX_BYTES // 128
    return reinterpret(w.w_ring, w.x_ring.dtype, [PARTS, C.BLOCK_N, TOGETHER * R_STEP], L).index(stage)


@gluon.jit
def _y_stage(C: gl.constexpr, w, stage):
    """Return the first 128 bytes of each row of a stage of the activations, as [BLOCK_M, 64]."""
    DEPTH: gl.constexpr = TOGETHER * R_STEP
    shape: gl.constexpr = [C.BLOCK_K // DEPTH, C.BLOCK_M, DEPTH]
    return reinterpret(w.x_ring.index(stage), w.x_ring.dtype, shape, w.x_desc.layout).index(0)


@gluon.jit
def add_adapters(C: gl.constexpr, w, acc, tile):
    """Add B y of each row's adapter to the sums acc [BLOCK_N, BLOCK_M] of a tile; see adapters.expand_rows."""
    A = w.adapters
    L: gl.constexpr = _y_layout(C.WARPS)
    G: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, L))
    COPIES: gl.constexpr = _b_stages(C)
    gl.static_assert(min(C.STAGES, C.X_STAGES) > 1 and not C.PERSISTENT)
    offs_m = gl.arange(0, C.BLOCK_M, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    numbers = gl.load(A.numbers_ptr + offs_m, mask=offs_m < w.outputs.rows, other=0)
    count, largest = gl.load(A.listed_ptr), gl.max(gl.load(A.ranks_ptr + numbers), 0)
    first, last = _parts(C, w, tile)
    barrier()  # All warps have multiplied the last tile.
    # The next copy to start, and the number of copies that have been started.
    next_part, next_place, next_r, copied = first, 0, 0, 0
    for _ in gl.static_range(COPIES - 1):
        _copy_b(C, w, tile, next_part, next_place, next_r, copied)
        next_part, next_place, next_r = _following(next_part, next_place, next_r, count, first, last)
        copied += 1
    for r in range(0, largest, R_STEP):
        if C.GATED:  # Both loads are in flight at a time.
            gate, up = _load_y(C, w, r, 0), _load_y(C, w, r, 1)
        for part in range(first, last + 1):
            if C.GATED:
                y = gl.where(part == 0, gate, up)
            else:
                y = _load_y(C, w, r, part)
            for place in range(0, count, TOGETHER):
                adapter = w.listed[0].index(place // TOGETHER).load(G)
                own = numbers[:, None] == adapter[None, :]
                columns = gl.where(own[:, :, None], y[:, None, :], 0.0).to(w.x_ring.dtype)
                y_stage = _y_stage(C, w, copied % 2)
                y_stage.store(gl.reshape(columns, [C.BLOCK_M, TOGETHER * R_STEP]))
                async_copy.wait_group(COPIES - 2)
                fence_async_shared()
                # All warps have stored y, and have ended the product before this one, whose buffer the next copy
                # overwrites.
                barrier()
                b_stage = _b_stage(C, w, (copied + 1) % COPIES)  # Its copy was started COPIES - 1 copies ago.
                acc = warpgroup_mma(b_stage, y_stage.permute((1, 0)), acc, is_async=True)
                _copy_b(C, w, tile, next_part, next_place, next_r, copied % COPIES)
                next_part, next_place, next_r = _following(next_part, next_place, next_r, count, first, last)
                copied += 1
                acc = warpgroup_mma_wait(0, deps=[acc])
    async_copy.wait_group(0)
    return acc
