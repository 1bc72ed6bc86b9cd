"""prompt_attention of many rows on Hopper: one producer warp copies, two warpgroups compute.

Written in Gluon, the language below Triton, in which a kernel specifies layouts and copies. Source: FlashAttention-3
(Shah et al. 2024).
"""

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

from ..chunks import CHUNK_COUNT, CHUNK_FIRST, CHUNK_SLOT, CHUNK_START, CHUNK_WIDTH, MAX_CHUNKS
from ..common import cdiv
from ..triton_compat import async_load, barrier, reinterpret
from .arguments import Heads, KVLayer
from .pages import pool_rows
from .splits import EMPTY, LOG2E

PAGE = gl.constexpr(64)
# Columns that are adjacent in shared memory, 128 bytes. The next columns follow after all rows of these columns.
COLUMNS = gl.constexpr(64)
HALF = gl.constexpr(64)  # Number of rows of a warpgroup.
BLOCK_M = gl.constexpr(128)  # Number of rows of a work item.
THREADS = gl.constexpr(2 * 128 + 32)
# Head dimension -> positions of a tile, and tiles of K, and also of V, that are in flight or in use.
TILES = {64: (128, 3), 128: (128, 3), 256: (64, 2)}
# There is one named barrier for each stage, at which the warpgroups release it. Triton uses the barriers below 5.
K_READ = gl.constexpr(5)
V_READ = gl.constexpr(8)


@gluon.jit
def _arrive_and_wait(bar):
    """Wait at a named barrier until all threads have arrived."""
    gl.inline_asm_elementwise("bar.sync $1, $2; mov.b32 $0, 0;", "=r,r,r", [bar, THREADS], gl.int32, False, 1)


@gluon.jit
def _arrive(bar):
    """Arrive at a named barrier without waiting."""
    gl.inline_asm_elementwise("bar.arrive $1, $2; mov.b32 $0, 0;", "=r,r,r", [bar, THREADS], gl.int32, False, 1)


@gluon.jit
def _arrive_after(l, bar):
    """Arrive at a named barrier after the sums l of the rows, two per thread, are computed.

    Otherwise ptxas moves the wait for the products with V before the exponentials, which should overlap with these
    products. ptxas does not move the wait past a barrier, and it cannot prove that the number of this barrier is
    independent of l. No sum is -0.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 x; or.b32 x, $2, $3; setp.eq.u32 p, x, 0x80000000; selp.b32 x, 0, $4, p; "
        "bar.arrive x, $6; mov.b32 $0, 0; mov.b32 $1, 0; }",
        "=r,=r,r,r,r,r,r,r", [l.to(gl.int32, bitcast=True), bar, THREADS], gl.int32, False, 2,
    )  # fmt: skip


@gluon.jit
def _uniform(x):
    """Return x, which is equal in all threads, in a form that lets ptxas prove that it is equal.

    Otherwise, with Triton 3.9, ptxas does not keep values derived from x in uniform registers, and spills.
    """
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, 0, 31, -1;", "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _item_count(items):
    """Return the number of work items of this program."""
    place = gl.program_id(0)
    rounds = items // gl.num_programs(0)
    if rounds % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    return rounds + (rounds * gl.num_programs(0) + place < items).to(gl.int32)


@gluon.jit
def _item(i, chunk, before, chunks_ptr, total, HEADS: gl.constexpr):
    """Return the `i`-th work item of this program.

    `chunk` and `before` are the values that the call for the previous work item returned.

    Returns the head, the block within its chunk, the chunk, and the number of blocks of the earlier chunks.
    """
    place = gl.program_id(0)
    # Odd rounds run in reverse order. The program with the longest work item of a round then has the shortest work item
    # of the next round.
    if i % 2 == 1:
        place = gl.num_programs(0) - 1 - place
    item = i * gl.num_programs(0) + place
    block = total - 1 - item // HEADS
    while block < before:
        chunk -= 1
        before -= (gl.load(chunks_ptr + chunk * CHUNK_WIDTH + CHUNK_COUNT) + BLOCK_M - 1) // BLOCK_M
    return item % HEADS, block - before, chunk, before


@gluon.jit
def _copy_tile(pool_desc, row0, row1, full, tile):
    """Copy K or V of one or two pages, from rows row0 and row1 of the pool, to a tile of shared memory [BLOCK_N, D]."""
    BLOCK_N: gl.constexpr = tile.shape[0]
    PIECES: gl.constexpr = tile.shape[1] // COLUMNS
    PAGES: gl.constexpr = BLOCK_N // PAGE
    mbarrier.expect(full, BLOCK_N * tile.shape[1] * 2)
    parts = reinterpret(tile, tile.dtype, [PIECES * PAGES, PAGE, COLUMNS], pool_desc.layout)
    for x in gl.static_range(PIECES):
        async_load(pool_desc, [row0, x * COLUMNS], full, parts.index(x * PAGES))
        if PAGES == 2:
            async_load(pool_desc, [row1, x * COLUMNS], full, parts.index(x * PAGES + 1))


@gluon.jit
def _copy_items(
    chunks_ptr, table_ptr, q_desc, pool_desc, stride_table, k_row, v_row, rows_of_page, total, shared,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr,
):  # fmt: skip
    """Copy q of each work item, then its K and V tile by tile, from the last position to the first (producer warp)."""
    q_smem, k_smem, v_smem, q_full, q_read, k_full, v_full = shared
    D: gl.constexpr = q_smem.shape[2]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    PAGES: gl.constexpr = BLOCK_N // PAGE
    c = 0  # Number of tiles that were copied.
    chunk = MAX_CHUNKS + 0
    before = total
    for i in range(0, _item_count(total * HEADS)):
        head, block, chunk, before = _item(i, chunk, before, chunks_ptr, total, HEADS)
        chunk_ptr = chunks_ptr + chunk * CHUNK_WIDTH
        slot, first_row = gl.load(chunk_ptr + CHUNK_SLOT), gl.load(chunk_ptr + CHUNK_FIRST)
        count, start = gl.load(chunk_ptr + CHUNK_COUNT), gl.load(chunk_ptr + CHUNK_START)
        end = start + gl.minimum(block * BLOCK_M + BLOCK_M, count)
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        head_row = head // (HEADS // KV_HEADS) * PAGE
        own_table_ptr = table_ptr + slot * stride_table
        last = (end - 1) // PAGE
        for half in gl.static_range(2):
            mbarrier.wait(q_read.index(half), (i & 1) ^ 1)
            mbarrier.expect(q_full.index(half), HALF * D * 2)
            row = first_row + block * BLOCK_M + half * HALF
            async_load(q_desc, [row, head * D], q_full.index(half), q_smem.index(half))
        for tile in range(tiles - 1, -1, -1):
            stage = c % STAGES
            row0 = gl.load(own_table_ptr + gl.minimum(tile * PAGES, last)) * rows_of_page + head_row
            row1 = row0
            if PAGES == 2:
                row1 = gl.load(own_table_ptr + gl.minimum(tile * PAGES + 1, last)) * rows_of_page + head_row
            if c >= STAGES:
                _arrive_and_wait(K_READ + stage)
            _copy_tile(pool_desc, row0 + k_row, row1 + k_row, k_full.index(stage), k_smem.index(stage))
            if c >= STAGES:
                _arrive_and_wait(V_READ + stage)
            _copy_tile(pool_desc, row0 + v_row, row1 + v_row, v_full.index(stage), v_smem.index(stage))
            c += 1
    for i in range(gl.maximum(c - STAGES, 0), c):  # Wait until all barriers are complete.
        _arrive_and_wait(K_READ + i % STAGES)
        _arrive_and_wait(V_READ + i % STAGES)


@gluon.jit
def _softmax(s, l, m, scale, first_t, positions, MASKED: gl.constexpr):
    """Return p, l, m and the factor of the earlier sums, for scores s [HALF, BLOCK_N] of the positions from first_t."""
    S_L: gl.constexpr = s.type.layout
    BLOCK_N: gl.constexpr = s.shape[1]
    if MASKED:
        offs_t = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_L))
        s = gl.where(offs_t[None, :] <= (positions - first_t)[:, None], s, float("-inf"))
    # Compute the maximum in parts, because one chain of all maxima of a row has a longer latency.
    largest = gl.max(gl.max(gl.max(gl.reshape(s, [HALF, 4, BLOCK_N // 32, 8]), 2), 1), 1)
    m_new = gl.maximum(m, gl.convert_layout(largest, gl.SliceLayout(1, S_L)) * scale)
    p = gl.exp2(s * scale - m_new[:, None])
    alpha = gl.exp2(m - m_new)
    return p, l * alpha + gl.sum(p, 1), m_new, alpha


@gluon.jit
def _tiles(acc, l, m, p, c, q, scale, first, end, tiles, positions, shared, MASKED: gl.constexpr):
    """Attend to the tiles [first, end), counted from the last position.

    Each iteration multiplies q with a tile of K, and the weights of the previous tile with V, so that exponentials
    overlap with products.
    """
    _, k_smem, v_smem, _, _, k_full, v_full = shared
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_L: gl.constexpr = acc.type.layout
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, S_L)
    for i in range(first, end):
        stage, earlier = c % STAGES, (c - 1) % STAGES
        mbarrier.wait(k_full.index(stage), c // STAGES & 1)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(earlier), (c - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_smem.index(earlier), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        x, l, m, alpha = _softmax(s, l, m, scale, (tiles - 1 - i) * BLOCK_N, positions, MASKED)
        _arrive_after(l, K_READ + stage)
        p_next = gl.convert_layout(x.to(p.dtype), p.type.layout)
        acc, p, p_next = warpgroup_mma_wait(0, deps=[acc, p, p_next])
        _arrive(V_READ + earlier)
        acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, O_L))[:, None]
        p = p_next
        c += 1
    return acc, l, m, p, c


@gluon.jit
def _clear(v_tile, first_t, end):
    """Clear the entries of V at `end` or later, which are arbitrary, possibly NaN. Both warpgroups write the same."""
    BLOCK_N: gl.constexpr = v_tile.shape[0]
    D: gl.constexpr = v_tile.shape[1]
    V_L: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [4, 1], [1, 0])
    for g in gl.static_range(BLOCK_N // 16):
        rows = first_t + g * 16
        if rows + 16 > end:
            part = v_tile.slice(g * 16, 16)
            v = part.load(V_L)
            mask = rows + gl.arange(0, 16, gl.SliceLayout(1, V_L)) < end
            part.store(gl.where(mask[:, None], v, gl.zeros_like(v)))
    fence_async_shared()
    barrier()


@gluon.jit
def _attend_items(chunks_ptr, out_ptr, scale, total, shared, HEADS: gl.constexpr, WARPGROUP: gl.constexpr):
    """Consumer warpgroup: compute attention for its half of the rows of each work item."""
    q_smem, k_smem, v_smem, q_full, q_read, k_full, v_full = shared
    TYPE: gl.constexpr = k_smem.dtype
    D: gl.constexpr = q_smem.shape[2]
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    S_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O_L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROW_S: gl.constexpr = gl.SliceLayout(1, S_L)
    ROW_O: gl.constexpr = gl.SliceLayout(1, O_L)
    zero = gl.zeros([HALF, BLOCK_N], gl.float32, S_L)
    q = q_smem.index(WARPGROUP)
    c = 0
    chunk = MAX_CHUNKS + 0
    before = total
    for i in range(0, _item_count(total * HEADS)):
        head, block, chunk, before = _item(i, chunk, before, chunks_ptr, total, HEADS)
        chunk_ptr = chunks_ptr + chunk * CHUNK_WIDTH
        first_row = gl.load(chunk_ptr + CHUNK_FIRST)
        count, start = gl.load(chunk_ptr + CHUNK_COUNT), gl.load(chunk_ptr + CHUNK_START)
        first = block * BLOCK_M + WARPGROUP * HALF
        end = start + gl.minimum(block * BLOCK_M + BLOCK_M, count)
        tiles = (end + BLOCK_N - 1) // BLOCK_N
        lowest = gl.minimum(start + first, end - 1)
        masked = gl.maximum(tiles - (lowest + 1) // BLOCK_N, 1)  # Number of tiles that some rows must mask.
        positions = gl.minimum(start + first + gl.arange(0, HALF, ROW_S), end - 1)
        stage = c % STAGES
        mbarrier.wait(q_full.index(WARPGROUP), i & 1)
        mbarrier.wait(k_full.index(stage), c // STAGES & 1)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False)
        _arrive(K_READ + stage)
        m = gl.full([HALF], EMPTY, gl.float32, ROW_S)
        l = gl.zeros([HALF], gl.float32, ROW_S)
        x, l, m, _ = _softmax(s, l, m, scale, (tiles - 1) * BLOCK_N, positions, True)
        p = gl.convert_layout(x.to(TYPE), gl.DotOperandLayout(0, O_L, 2))
        if end % BLOCK_N != 0:
            mbarrier.wait(v_full.index(stage), c // STAGES & 1)
            _clear(v_smem.index(stage), (tiles - 1) * BLOCK_N, end)
        acc = gl.zeros([HALF, D], gl.float32, O_L)
        c += 1
        acc, l, m, p, c = _tiles(acc, l, m, p, c, q, scale, 1, masked, tiles, positions, shared, True)
        acc, l, m, p, c = _tiles(acc, l, m, p, c, q, scale, masked, tiles, tiles, positions, shared, False)
        mbarrier.arrive(q_read.index(WARPGROUP), count=1)
        stage = (c - 1) % STAGES
        mbarrier.wait(v_full.index(stage), (c - 1) // STAGES & 1)
        acc = warpgroup_mma(p, v_smem.index(stage), acc)
        _arrive(V_READ + stage)
        acc = acc * (1.0 / gl.convert_layout(l, ROW_O))[:, None]
        offs_m = first + gl.arange(0, HALF, ROW_O)
        offs_d = gl.arange(0, D, gl.SliceLayout(0, O_L))
        places = ((first_row + offs_m).to(gl.int64) * HEADS + head)[:, None] * D + offs_d[None, :]
        gl.store(out_ptr + places, acc.to(TYPE), mask=(offs_m < count)[:, None] & (offs_d < D)[None, :])


@gluon.jit
def _prompt_attention_hopper_kernel(
    chunks_ptr, q_desc, out_ptr, scale,
    table_ptr, stride_table,
    pool_desc, k_row, v_row, rows_of_page,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute attention of each row to the positions of its slot up to its own.

    Grid: (programs,), one for each multiprocessor. The programs share the work items. A work item is BLOCK_M rows of
    a chunk in one head. One warp copies q, K and V of one work item after another to shared memory, up to STAGES tiles
    before they are used. Two warpgroups compute attention for half of the rows each, and both read every tile. The
    result of a work item does not depend on other work items. Rows outside all chunks are not written.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        q_desc: Tensor descriptor of [rows, HEADS * D] bf16.
        out_ptr: [rows, HEADS * D] bf16 (output).
        table_ptr: [slots, max_pages] int32.
        pool_desc: Tensor descriptor of the whole pool, [pages * rows_of_page, D] bf16.
        k_row, v_row: Rows of the pool at which K and V of this layer begin, head by head.
        BLOCK_N: Positions of a tile, one or two pages.
        STAGES: Number of tiles of K, and also of V, that are in flight or in use.
    """
    TYPE: gl.constexpr = out_ptr.dtype.element_ty
    TILE_L: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, D], TYPE)
    q_smem = gl.allocate_shared_memory(TYPE, [2, HALF, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(TYPE, [STAGES, BLOCK_N, D], TILE_L)
    v_smem = gl.allocate_shared_memory(TYPE, [STAGES, BLOCK_N, D], TILE_L)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_read = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for half in gl.static_range(2):
        mbarrier.init(q_full.index(half), count=1)
        mbarrier.init(q_read.index(half), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
    fence_async_shared()
    offs_c = gl.arange(0, MAX_CHUNKS, gl.BlockedLayout([1], [32], [4], [0]))
    counts = gl.load(chunks_ptr + offs_c * CHUNK_WIDTH + CHUNK_COUNT)
    total = _uniform(gl.sum((counts + BLOCK_M - 1) // BLOCK_M, 0))
    shared = q_smem, k_smem, v_smem, q_full, q_read, k_full, v_full
    gl.warp_specialize(
        [
            (_attend_items, (chunks_ptr, out_ptr, scale * LOG2E, total, shared, HEADS, 0)),
            (_attend_items, (chunks_ptr, out_ptr, scale * LOG2E, total, shared, HEADS, 1)),
            (_copy_items, (
                chunks_ptr, table_ptr, q_desc, pool_desc, stride_table, k_row, v_row, rows_of_page, total, shared,
                HEADS, KV_HEADS,
            )),
        ],
        # Warps, and registers of a thread. The first partition has the kernel's warps and the remaining registers.
        [4, 1],
        [240, 24],
    )  # fmt: skip


def fits(q, k_cache, window: int, multiprocessors: int) -> bool:
    """Return whether the kernel supports the launch, and is faster than prompt_attention.

    It has at least two work items per multiprocessor, or one with heads of 256. With fewer work items, many
    multiprocessors would be idle.
    """
    rows, heads, D = q.shape
    items = cdiv(rows, BLOCK_M.value) * heads
    bf16 = q.dtype == k_cache.dtype == torch.bfloat16
    supported = bf16 and D in TILES and k_cache.shape[2] == PAGE.value and window == 0
    return supported and items >= (1 if D > 128 else 2) * multiprocessors


def _descriptor(x, block: list[int]) -> TensorDescriptor:
    """Return a tensor descriptor of x in blocks of this shape."""
    return TensorDescriptor.from_tensor(x, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def launch(chunks, q, out, kv: KVLayer, heads: Heads, programs: int) -> None:
    """Launch prompt_attention with this number of programs. `fits` must be true."""
    pool, rows_of_page = pool_rows(kv.k)
    _prompt_attention_hopper_kernel[(programs,)](
        chunks,
        _descriptor(q.view(len(q), heads.query * heads.dim), [HALF.value, heads.dim]),
        out,
        heads.scale,
        kv.table,
        kv.table.stride(0),
        _descriptor(pool, [PAGE.value, COLUMNS.value]),
        kv.k.storage_offset() // heads.dim,
        kv.v.storage_offset() // heads.dim,
        rows_of_page,
        heads.query,
        heads.kv,
        heads.dim,
        *TILES[heads.dim],
        num_warps=4,
        enable_fp_fusion=True,
    )
