"""Tiles of a weight and of activations, loaded into the registers from which mma reads them.

A tile of a weight is WARPS * BLOCK_N lines of 32 columns, or of the words of packed.py for 128 columns of four bits,
256 of six bits or 64 of eight bits. Four lanes of a warp have a line, 16 bytes each, or three times 16 bytes with six
bits. The warps of a program share the columns.
"""

from collections import namedtuple

import triton
import triton.language as tl

from ..triton_compat import Constants

STEP_K = 32  # Number of columns of four lanes, which load 16 bytes each.
STEP_COLUMNS = tl.constexpr(STEP_K)


# Pointers to a weight, its scales [N / SCALE_ROWS, GROUPS], its zero points [N, GROUPS], its minimums [N, LOWS], and
# the factors [N, OVERS, 1 + MINIMUMS] of scales and minimums; see packed.py.
Weight = namedtuple("Weight", "weight_ptr scale_ptr zero_ptr minimum_ptr over_ptr")
# Pointers to a block of rows of a weight:
# - weights: [lines, LINE], the first tile
# - scales, minimums, overs: [1, BLOCK_N, 1], the first group of the rows of the sums, or [lines, 1] if ROUNDS
# - zeros: like scales if ZEROS_AFTER, else [lines, 1]
# - mask_lines, mask_sums: whether the rows exist
Block = namedtuple("Block", "weights scales zeros minimums overs mask_lines mask_sums")
# Activations as tiles:
# - ptrs: [WARPS * BLOCK_M, 32], pointers to the first tile
# - order_ptr: [K] int32, the column of x for each column of the weight
# - offs_k: columns of the first tile
# - offs_m: [lines, 1], its rows
# - rows: number of rows that exist
Activations = namedtuple("Activations", "ptrs order_ptr offs_k offs_m rows")


@triton.constexpr_function
def tiling(
    N, K, FORM, GROUP, SCALE_ROWS, SCALE_TYPE, ZEROS, MINIMUMS, OVER, ROUNDS, GATED, BLOCK_N, WARPS, X_AHEAD, BLOCKS=1,
    PROGRAMS=1,
):  # fmt: skip
    """Return the constants of a kernel that follow from the weight and the launch config.

    The weight is [N, K], or [2 * N, K] if GATED. A *line* is what a warp loads of one row of the weight at a time, a
    *part* is 32 columns of it, and a *tile* is the lines of all warps for a block of BLOCK_N rows.

    Blocks of rows:
        OUT_N: outputs of a block of BLOCK_N rows.
        MASKED: whether the last block exceeds the rows.
        SHARED: whether a program takes several blocks.
        CHUNKS: tiles of a block.
        X_TILES: parts of the activations that a warp needs.
    Lines:
        STEP: columns of a line.
        PARTS: parts of a line.
        LINE: elements of a line in memory.
        PIECES: loads of a line, each of LINE / PIECES elements.
        LENGTH: elements of a row in memory.
    Groups of columns, which share a scale, a minimum or a zero point:
        GROUPED: whether a row has several scales. They multiply the sums of tiles or, for smaller groups, of parts of
            tiles, or the weights if ROUNDS.
        ROW_SCALES: whether a row has one scale, which multiplies the whole sum.
        ROUNDS: whether weights are scaled and rounded before the product.
        GROUPS, LOWS, OVERS: groups of a row with the same scale, minimum, and factors of both.
        MIN_GROUP: columns that share a minimum.
        EACH: columns of a line that share a scale.
        GROUP_PARTS: parts that share a scale.
        HALVES: scales of a part, which is multiplied once for each: 2 for groups of 16 columns.
        SCALES, MINS, ZERO_PARTS: scales, minimums and zero points of a line.
        SIZE: bytes of a scale and of a minimum if they are loaded as words, else 0.
        FP16: whether scales of two bytes are fp16, not bf16.
        SCALE_LOADS: numbers that are loaded for the scales of a line.
        LOADED: numbers that are loaded for the scales, the minimums and their factors.
        ZEROS_AFTER: whether zero points are subtracted from the sums instead of from the weight.
    Spans of eight groups, as in matmul_groups.py:
        SPAN, SPAN_PARTS, SPANS: columns and parts of a span, and spans of a warp.
    """
    dense, shared = FORM == "dense", BLOCKS > PROGRAMS
    out_n = BLOCK_N // 2 if GATED else BLOCK_N
    parts = 1 if dense else {"int4": 4, "int6": 8}.get(FORM, 2)
    pieces, step = 3 if FORM == "int6" else 1, parts * 32
    line = 32 if dense else 16 * pieces
    chunks = -(-K // (WARPS * step))
    grouped, groups_of_line = not dense and GROUP < K, parts if GROUP < step else 1
    halves = 2 if GROUP == STEP_K // 2 else 1
    scales = groups_of_line * halves if grouped else 0
    mins = groups_of_line if MINIMUMS else 0
    words = scales > 1 and scales * GROUP == step and SCALE_TYPE in (tl.float16, tl.bfloat16) and K % step == 0
    size = 1 if OVER else 2 if words else 0
    scale_loads, min_loads = (-(-scales * size // 4), -(-mins * size // 4)) if size else (scales, mins)
    return Constants(
        N=N, K=K, GROUP=GROUP, SCALE_ROWS=SCALE_ROWS, ZEROS=ZEROS, GATED=GATED, BLOCK_N=BLOCK_N, WARPS=WARPS,
        OUT_N=out_n, MASKED=N % out_n != 0, SHARED=shared, PARTS=parts, LINE=line, STEP=step, PIECES=pieces,
        LENGTH=K if dense else -(-K // step) * line, CHUNKS=chunks, X_TILES=chunks * parts, GROUPS=-(-K // GROUP),
        GROUPED=grouped, ROUNDS=ROUNDS and grouped, ROW_SCALES=not dense and not grouped,
        SCALES=scales, HALVES=halves, EACH=step // max(scales, 1), MINIMUMS=MINIMUMS, OVER=OVER, MINS=mins,
        MIN_GROUP=GROUP * halves, LOWS=-(-K // (GROUP * halves)), OVERS=-(-K // OVER) if OVER else 0,
        SIZE=size, FP16=SCALE_TYPE == tl.float16, SCALE_LOADS=scale_loads, LOADED=scale_loads + min_loads + (OVER > 0),
        SPAN=8 * GROUP, SPAN_PARTS=GROUP // 4, SPANS=-(-chunks * step // (8 * GROUP)),
        ZERO_PARTS=groups_of_line if ZEROS else 0, GROUP_PARTS=parts // groups_of_line if grouped else parts,
        # The kernel then sums the activations once for many blocks of four bits.
        ZEROS_AFTER=FORM == "int4" and not (MINIMUMS or ROUNDS) and X_AHEAD == chunks * parts and shared,
    )  # fmt: skip


@triton.jit
def places(WARPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the row of each line of a tile, and the warp whose registers hold the line: [WARPS * ROWS, 1] each."""
    line = tl.arange(0, WARPS * ROWS)[:, None]
    return line // (8 * WARPS) * 8 + line % 8, line // 8 % WARPS


@triton.jit
def operand(tile, WARPS: tl.constexpr, ROWS: tl.constexpr, FOUR: tl.constexpr):
    """Return a tile [WARPS * ROWS, 32] as an operand [WARPS, ROWS, 32] of the tensor cores.

    A lane has loaded eight adjacent columns of a row. An instruction multiplies 16 columns. It takes from each lane two
    of its first eight columns and two of its last eight. With FOUR, a lane has four of the first 16 columns of the tile
    and four of the last 16, and each instruction takes two of each four. The compiler gives this layout to joined
    operands. The order of the columns is free if both operands have the same order. Therefore the columns are renamed
    and no data moves. Adjacent columns in memory remain adjacent in the registers.
    """
    tile = tl.permute(tile.reshape(ROWS // 8, WARPS, 8, STEP_COLUMNS), (1, 0, 2, 3))
    tile = tile.reshape(
        WARPS, ROWS, 4, 2, 2, 2
    )  # [warp, row, lane, instruction, half of the columns, column]. A half has 8 columns, or 16 with FOUR.
    if FOUR:
        return tl.permute(tile, (0, 1, 4, 2, 3, 5)).reshape(WARPS, ROWS, STEP_COLUMNS)
    else:
        return tl.permute(tile, (0, 1, 3, 4, 2, 5)).reshape(WARPS, ROWS, STEP_COLUMNS)


@triton.jit
def _load(
    ptrs,
    offs,
    mask,
    begin: tl.constexpr,
    width: tl.constexpr,
    LENGTH: tl.constexpr,
    MASKED: tl.constexpr,
    POLICY: tl.constexpr,
):
    """Load the warps' parts, `width` elements together, from element `begin` of rows of LENGTH.

    The values of a line that does not exist are arbitrary, because no other line's sum depends on them.
    """
    if begin + width > LENGTH:
        return tl.load(ptrs + begin, mask=mask & (offs + begin < LENGTH), other=0.0, eviction_policy=POLICY)
    elif MASKED:
        return tl.load(ptrs + begin, mask=mask, eviction_policy=POLICY)
    else:
        return tl.load(ptrs + begin, eviction_policy=POLICY)


@triton.jit
def load_x(T: tl.constexpr, x, i: tl.constexpr, ORDERED: tl.constexpr):
    """Load the activations for part i % PARTS of the warps' tiles i // PARTS, in the weight's order if ORDERED."""
    begin: tl.constexpr = i // T.PARTS * T.WARPS * T.STEP + i % T.PARTS * STEP_COLUMNS
    if ORDERED:
        within = x.offs_k + begin < T.K
        column = tl.load(x.order_ptr + x.offs_k + begin, mask=within, other=0)
        return tl.load(x.ptrs - x.offs_k + column, mask=(x.offs_m < x.rows) & within, other=0.0)
    else:
        return _load(x.ptrs, x.offs_k, x.offs_m < x.rows, begin, T.WARPS * T.STEP, T.K, False, "")


@triton.jit
def block_of_rows(T: tl.constexpr, w, block):
    """Return the Block with this number."""
    line, warp = places(T.WARPS, T.BLOCK_N)
    sum_n = tl.arange(0, T.BLOCK_N)[None, :, None]
    rows, sum_rows = line, sum_n
    if T.GATED:
        rows, sum_rows = line % T.OUT_N + line // T.OUT_N * T.N, sum_n % T.OUT_N + sum_n // T.OUT_N * T.N
    lines = w.weight_ptr + (rows + block * T.OUT_N).to(tl.int64) * T.LENGTH
    scale_rows = rows if T.ROUNDS else sum_rows
    return Block(
        lines + (warp * T.LINE + tl.arange(0, T.LINE // T.PIECES)[None, :]),
        w.scale_ptr + (scale_rows + block * T.OUT_N) // T.SCALE_ROWS * T.GROUPS,
        w.zero_ptr + ((sum_rows if T.ZEROS_AFTER else rows) + block * T.OUT_N) * T.GROUPS,
        w.minimum_ptr + (scale_rows + block * T.OUT_N) * T.LOWS,
        w.over_ptr + (scale_rows + block * T.OUT_N) * (T.OVERS * (1 + T.MINIMUMS)),
        block * T.OUT_N + line % T.OUT_N < T.N,
        block * T.OUT_N + sum_n % T.OUT_N < T.N,
    )


@triton.jit
def load_group(T: tl.constexpr, ptrs, column, mask, WHOLE: tl.constexpr, GROUP: tl.constexpr):
    """Load the values of the groups of GROUP columns that contain `column`. WHOLE: the columns exist."""
    if not WHOLE:
        return tl.load(ptrs + column // GROUP, mask=mask & (column < T.K), other=0)
    elif T.MASKED:
        return tl.load(ptrs + column // GROUP, mask=mask)
    else:
        return tl.load(ptrs + column // GROUP)


@triton.jit
def as_words(ptrs, BYTES: tl.constexpr):
    """Return pointers to words of BYTES bytes: 1, 2 or 4."""
    if BYTES == 4:
        return ptrs.to(tl.pointer_type(tl.int32), bitcast=True)
    elif BYTES == 2:
        return ptrs.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return ptrs


@triton.jit
def _load_words(
    T: tl.constexpr, ptrs, column, mask, WHOLE: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Load COUNT numbers of SIZE bytes, one for each GROUP columns from `column` on, as words of 2 or 4 bytes."""
    BYTES: tl.constexpr = 4 if COUNT * SIZE > 2 else 2
    COLUMNS: tl.constexpr = BYTES // SIZE * GROUP
    words, loaded = as_words(ptrs, BYTES), ()
    for i in tl.static_range(COUNT * SIZE // BYTES):
        loaded += (load_group(T, words, column + i * COLUMNS, mask, WHOLE, COLUMNS),)
    return loaded


@triton.jit
def load_scales(T: tl.constexpr, block, column, mask, WHOLE: tl.constexpr):
    """Load the scales of lines that begin at `column`, then the minimums, then the factors of both. See `scale_of`.

    Args:
        block: a Block, which contains the pointers to these numbers.
        mask: whether the rows exist.
        WHOLE: all columns of the lines exist.
    """
    scales = ()
    if T.SIZE > 0:
        scales = _load_words(T, block.scales, column, mask, WHOLE, T.SCALES, T.SIZE, T.GROUP)
        if T.MINIMUMS:
            scales += _load_words(T, block.minimums, column, mask, WHOLE, T.MINS, T.SIZE, T.MIN_GROUP)
        if T.OVER > 0:
            PAIR: tl.constexpr = 1 + T.MINIMUMS
            scales += _load_words(T, block.overs, column, mask, WHOLE, PAIR, 2, T.OVER // PAIR)
    else:
        for i in tl.static_range(T.SCALES):
            scales += (load_group(T, block.scales, column + i * T.EACH, mask, WHOLE, T.GROUP),)
        if T.MINIMUMS:
            for i in tl.static_range(T.MINS):
                scales += (load_group(T, block.minimums, column + i * T.MIN_GROUP, mask, WHOLE, T.MIN_GROUP),)
    return scales


@triton.jit
def half_at(word, place: tl.constexpr, FP16: tl.constexpr):
    """Return the fp16 or bf16 number at a place of a word as fp32."""
    bits = (word >> (16 * place)).to(tl.int16)
    return bits.to(tl.float16 if FP16 else tl.bfloat16, bitcast=True).to(tl.float32)


@triton.jit
def number_at(T: tl.constexpr, word, place: tl.constexpr):
    """Return the number of T.SIZE bytes at a place of a word of scales or minimums as fp32."""
    if T.SIZE == 1:
        # The code with 128 added becomes the mantissa of 2 ** 23. This is faster than an instruction that converts it.
        code = ((word.to(tl.int32) >> (8 * place)) & 255) ^ 0x4B000080
        return code.to(tl.float32, bitcast=True) - (2.0**23 + 128)
    else:
        return half_at(word, place, T.FP16)


@triton.jit
def scale_of(T: tl.constexpr, loaded, group: tl.constexpr, which: tl.constexpr):
    """Return the scale (which = 0) or the minimum (1) of a group of a tile, fp32 [WARPS, BLOCK_N, 1] or [lines, 1].

    Args:
        loaded: the numbers that `load_tile` returned for the tile.
    """
    if T.OVER > 0:
        code = number_at(T, loaded[group // 4 + which * T.SCALE_LOADS], group % 4)
        return code * half_at(loaded[T.LOADED - 1], which, True)
    elif T.SIZE == 2:
        return number_at(T, loaded[group // 2 + which * T.SCALE_LOADS], group % 2)
    else:
        return loaded[which * T.SCALE_LOADS + group].to(tl.float32)


@triton.jit
def load_words(T: tl.constexpr, block, c: tl.constexpr):
    """Load the warps' tiles c of the weight of a block as a tuple of PIECES tiles."""
    WIDTH: tl.constexpr = T.WARPS * T.LINE
    _, warp = places(T.WARPS, T.BLOCK_N)
    PIECE: tl.constexpr = T.LINE // T.PIECES
    offs_k = warp * T.LINE + tl.arange(0, PIECE)[None, :]
    tile = ()
    for i in tl.static_range(T.PIECES):
        tile += (
            _load(
                block.weights, offs_k, block.mask_lines, c * WIDTH + i * PIECE, WIDTH - i * PIECE, T.LENGTH, T.MASKED,
                "evict_first",
            ),
        )  # fmt: skip
    return tile


@triton.jit
def load_tile(T: tl.constexpr, block, c: tl.constexpr):
    """Load the warps' tiles c of a block: tuples of the weight, of the groups' scales and of their zero points.

    The scales are followed by the minimums, then by the factors of scales and minimums.
    """
    _, warp = places(T.WARPS, T.BLOCK_N)
    sum_warp, mask = tl.arange(0, T.WARPS)[:, None, None], block.mask_sums
    if T.ROUNDS:
        sum_warp, mask = warp, block.mask_lines
    tile, zeros = load_words(T, block, c), ()
    WHOLE: tl.constexpr = (c + 1) * T.WARPS * T.STEP <= T.K
    scales = load_scales(T, block, (c * T.WARPS + sum_warp) * T.STEP, mask, WHOLE)
    for part in tl.static_range(T.ZERO_PARTS):
        if T.ZEROS_AFTER:
            column = (c * T.WARPS + sum_warp) * T.STEP + part * STEP_COLUMNS
            zeros += (load_group(T, block.zeros, column, block.mask_sums, WHOLE, T.GROUP),)
        else:
            column = (c * T.WARPS + warp) * T.STEP + part * STEP_COLUMNS
            zeros += (load_group(T, block.zeros, column, block.mask_lines, WHOLE, T.GROUP),)
    return tile, scales, zeros


@triton.jit
def rounded(
    T: tl.constexpr, tile, loaded, part: tl.constexpr, FACTOR: tl.constexpr, DTYPE: tl.constexpr,
    RAISE: tl.constexpr = 1.0,
):  # fmt: skip
    """Return the weights of a part in DTYPE, each rounded once.

    Args:
        tile: the unpacked codes [lines, 32].
        loaded: as for `scale_of`.
        FACTOR: number by which the caller multiplies the products.
        RAISE: number by which the codes are multiplied.
    """
    scale = scale_of(T, loaded, part * T.HALVES // T.GROUP_PARTS, 0)
    if T.HALVES == 2:
        scale = tl.where(tl.arange(0, 32)[None, :] < 16, scale, scale_of(T, loaded, part * 2 + 1, 0))
    if RAISE != 1:
        scale *= RAISE
    weights = tile.to(tl.float32) * scale
    if T.MINIMUMS:
        weights -= scale_of(T, loaded, part // T.GROUP_PARTS, 1) * (1 / FACTOR)
    return weights.to(DTYPE)


@triton.jit
def load_row_scales(T: tl.constexpr, w, block):
    """Load the scales of a block whose rows have one scale: [BLOCK_N, 1]."""
    row = tl.arange(0, T.BLOCK_N)[:, None]
    scale_row = (block * T.OUT_N + row % T.OUT_N + row // T.OUT_N * T.N) // T.SCALE_ROWS
    return tl.load(w.scale_ptr + scale_row, mask=block * T.OUT_N + row % T.OUT_N < T.N, other=0.0)


@triton.jit
def fetch_block(T: tl.constexpr, w, block):
    """Copy a block of rows of a packed weight, with its scales and zero points of groups, to the L2 cache."""
    SCALE_BYTES: tl.constexpr = w.scale_ptr.dtype.element_ty.primitive_bitwidth // 8  # A minimum has as many.
    rows = tl.minimum(T.N - block * T.OUT_N, T.OUT_N)
    for half in tl.static_range(2 if T.GATED else 1):
        first = (block * T.OUT_N + half * T.N).to(tl.int64)
        _fetch(w.weight_ptr + first * T.LENGTH, rows * (T.LENGTH * 4))
        if T.GROUPED and T.SCALE_ROWS == 1:
            _fetch(w.scale_ptr + first * T.GROUPS, rows * (T.GROUPS * SCALE_BYTES))
        if T.ZEROS:
            _fetch(w.zero_ptr + first * T.GROUPS, rows * (T.GROUPS * 2))
        if T.MINIMUMS:
            _fetch(w.minimum_ptr + first * T.LOWS, rows * (T.LOWS * SCALE_BYTES))
        if T.OVER > 0:
            _fetch(w.over_ptr + first * (T.OVERS * (1 + T.MINIMUMS)), rows * (T.OVERS * (1 + T.MINIMUMS) * 2))


@triton.jit
def _fetch(ptr, size):
    """Prefetch `size` bytes, a multiple of 16, by one thread. Do nothing if `size` is not positive."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred one; .reg .b32 thread;
        mov.u32 thread, %tid.x; mov.u32 $0, 0; setp.eq.u32 one, thread, 0; setp.gt.and.s32 one, $2, 0, one;
        @one cp.async.bulk.prefetch.L2.global [$1], $2;
        }""",
        "=r,l,r", [ptr.to(tl.uint64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
