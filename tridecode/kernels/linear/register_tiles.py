"""Parts of matmul: which lane has what of the weights and of the activations, and how it is loaded."""

import triton
import triton.language as tl

STEP_K = 32  # columns of a row that four lanes hold, 16 bytes each
STEP_COLUMNS = tl.constexpr(STEP_K)


@triton.jit
def places(WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Of each line of a tile [WARPS * ROWS, STEP_K], [lines, 1]: its row, and the warp whose registers hold it."""
    line = tl.arange(0, WARPS * ROWS)[:, None]
    return line // (8 * WARPS) * 8 + line % 8, line // 8 % WARPS


@triton.jit
def operand(tile, WARPS: tl.constexpr, ROWS: tl.constexpr, FOUR: tl.constexpr):
    """The tile as an operand [WARPS, ROWS, STEP_K] of the tensor cores.

    A lane has loaded eight neighbours of a row, and the instruction wants two and two of a lane in each half of 16
    columns; as the compiler lays operands out that were joined, FOUR: two of each four in each half of 32. The order of
    the columns is free as long as both operands agree: so what a lane has is renamed, and nothing moves: neighbours in
    memory stay neighbours in the registers.
    """
    tile = tl.permute(tile.reshape(ROWS // 8, WARPS, 8, STEP_COLUMNS), (1, 0, 2, 3))
    tile = tile.reshape(WARPS, ROWS, 4, 2, 2, 2)  # lane, instruction, half, element
    if FOUR:
        return tl.permute(tile, (0, 1, 4, 2, 3, 5)).reshape(WARPS, ROWS, STEP_COLUMNS)
    else:
        return tl.permute(tile, (0, 1, 3, 4, 2, 5)).reshape(WARPS, ROWS, STEP_COLUMNS)


@triton.jit
def _load(
    ptrs,
    offs,
    lines,
    begin: tl.constexpr,
    width: tl.constexpr,
    LENGTH: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """What stands from `begin` on, in rows of LENGTH; the warps' parts of it are `width` wide together. MASKED where a
    line may not exist: it is anything then, which no other line's sum sees."""
    if begin + width > LENGTH:
        return tl.load(ptrs + begin, mask=lines & (offs + begin < LENGTH), other=0.0, eviction_policy=POLICY)
    elif MASKED:
        return tl.load(ptrs + begin, mask=lines, eviction_policy=POLICY)
    else:
        return tl.load(ptrs + begin, eviction_policy=POLICY)


@triton.jit
def load_x(
    xs,
    order_ptr,
    offs_xk,
    lines,
    i: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    PARTS: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """The columns of activations that the i-th parts of the warps' tiles multiply; in the weights' order if ORDERED."""
    begin: tl.constexpr = i // PARTS * WARPS * PARTS * STEP_COLUMNS + i % PARTS * STEP_COLUMNS
    if ORDERED:
        within = offs_xk + begin < K
        column = tl.load(order_ptr + offs_xk + begin, mask=within, other=0)
        return tl.load(xs - offs_xk + column, mask=lines & within, other=0.0)
    else:
        return _load(xs, offs_xk, lines, begin, WARPS * PARTS * STEP_COLUMNS, K, False, "")


@triton.jit
def block_of_rows(
    weight_ptr,
    scale_ptr,
    zero_ptr,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OUT_N: tl.constexpr,
    LINE: tl.constexpr,
    WARPS: tl.constexpr,
    OF_SUMS: tl.constexpr,
):
    """Where a block of rows begins: its tiles' lines, and the groups' scales [1, BLOCK_N, 1] and zeros of its rows, as
    the scales if OF_SUMS, else of the lines; and which of them exist."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    line, warp = places(WARPS, BLOCK_N)
    sum_n = tl.arange(0, BLOCK_N)[None, :, None]
    rows, sum_rows = line, sum_n
    if OUT_N < BLOCK_N:
        rows, sum_rows = line % OUT_N + line // OUT_N * N, sum_n % OUT_N + sum_n // OUT_N * N
    weights = weight_ptr + (rows + block * OUT_N).to(tl.int64) * LENGTH + (warp * LINE + tl.arange(0, LINE)[None, :])
    scales = scale_ptr + (sum_rows + block * OUT_N) // SCALE_ROWS * GROUPS
    zeros = zero_ptr + ((sum_rows if OF_SUMS else rows) + block * OUT_N) * GROUPS
    return weights, scales, zeros, block * OUT_N + line % OUT_N < N, block * OUT_N + sum_n % OUT_N < N


@triton.jit
def _load_group(
    ptrs,
    warp,
    rows,
    c: tl.constexpr,
    part: tl.constexpr,
    K: tl.constexpr,
    WARPS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Of the group of each row in which a part of a warp's tile c lies."""
    column = (c * WARPS + warp) * STEP + part * STEP_COLUMNS
    if (c + 1) * WARPS * STEP > K:
        return tl.load(ptrs + column // GROUP, mask=rows & (column < K), other=0)
    elif MASKED:
        return tl.load(ptrs + column // GROUP, mask=rows, other=0)
    else:
        return tl.load(ptrs + column // GROUP)


@triton.jit
def load_tile(
    of,
    c: tl.constexpr,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    STEP: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    ZERO_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINE: tl.constexpr,
    WARPS: tl.constexpr,
    MASKED: tl.constexpr,
    OF_SUMS: tl.constexpr,
):
    """The warps' tiles c of a block, as tuples: of the weights, of the scales of groups and of their zeros."""
    weights, scales, zeros, lines, rows = of
    _, warp = places(WARPS, BLOCK_N)
    offs_k = warp * LINE + tl.arange(0, LINE)[None, :]
    sum_warp = tl.arange(0, WARPS)[:, None, None]
    w, s, z = (_load(weights, offs_k, lines, c * WARPS * LINE, WARPS * LINE, LENGTH, MASKED, "evict_first"),), (), ()
    for part in tl.static_range(SCALES):
        s += (_load_group(scales, sum_warp, rows, c, part, K, WARPS, STEP, GROUP, MASKED),)
    for part in tl.static_range(ZERO_PARTS):
        if OF_SUMS:
            z += (_load_group(zeros, sum_warp, rows, c, part, K, WARPS, STEP, GROUP, MASKED),)
        else:
            z += (_load_group(zeros, warp, lines, c, part, K, WARPS, STEP, GROUP, MASKED),)
    return w, s, z


@triton.jit
def load_row_scales(ptr, block, N, SCALE_ROWS: tl.constexpr, BLOCK_N: tl.constexpr, OUT_N: tl.constexpr):
    """Of rows that have one scale: [BLOCK_N, 1]."""
    row = tl.arange(0, BLOCK_N)[:, None]
    of_row = (block * OUT_N + row % OUT_N + row // OUT_N * N) // SCALE_ROWS
    return tl.load(ptr + of_row, mask=block * OUT_N + row % OUT_N < N, other=0.0)


@triton.jit
def fetch_block(
    weight_ptr,
    scale_ptr,
    zero_ptr,
    block,
    N: tl.constexpr,
    K: tl.constexpr,
    LENGTH: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    OUT_N: tl.constexpr,
    GATED: tl.constexpr,
):
    """Bring a block of rows of packed weights into the L2 cache, if there is one, and what scales groups of them."""
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    rows = tl.minimum(N - block * OUT_N, OUT_N)
    for half in tl.static_range(2 if GATED else 1):
        first = (block * OUT_N + half * N).to(tl.int64)
        _fetch(weight_ptr + first * LENGTH, rows * (LENGTH * 4))
        if GROUP < K and SCALE_ROWS == 1:
            _fetch(scale_ptr + first * GROUPS, rows * (GROUPS * scale_ptr.dtype.element_ty.primitive_bitwidth // 8))
        if ZEROS:
            _fetch(zero_ptr + first * GROUPS, rows * (GROUPS * 2))


@triton.jit
def _fetch(ptr, size):
    """One thread asks, for a multiple of 16 bytes."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 thread;
        mov.u32 thread, %tid.x; mov.u32 $0, 0; setp.eq.u32 one, thread, 0; setp.gt.and.s32 one, $2, 0, one;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        }""",
        "=r,l,r", [ptr.to(tl.uint64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
