"""expert_packed: the products of rows with packed weights of experts, which become bf16 in registers.

The weights of all experts are the rows of one packed tensor (linear/packed.py). For a few rows, tiles of a weight are
loaded into the registers from which mma reads them, and the warps of a program share the columns, as in
linear/matmul.py. For many rows, the programs multiply larger tiles, whose weights are scaled and rounded first.
"""

from collections import namedtuple
from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import (
    META_WIDTH,
    RUN,
    STATUS,
    cdiv,
    gdc_launch_dependents,
    gdc_wait,
    interpreted,
    next_power_of_2,
    options,
)
from ..linear.bits import factor, pair, raised, raised_weights, unpack
from ..linear.epilogue import load_partials, norm_scale, silu
from ..linear.project import AddResidual, Gated, Normed
from ..linear.register_tiles import (
    STEP_COLUMNS,
    Activations,
    Block,
    Weight,
    block_of_rows,
    load_group,
    load_row_scales,
    load_scales,
    load_tile,
    load_x,
    operand,
    places,
    rounded,
    scale_of,
    tiling,
)
from ..linear.weight import LoadedLinear
from ..op import Op
from .arguments import TILE_FIELDS, Experts, PairTiles, Routes
from .expert_rows import OUTPUTS, down_rows_ref, expert_rows_bytes, gate_up_rows_ref
from .expert_tiles import down_tiles_ref, expert_tiles_bytes, gate_up_tiles_ref

_FIELDS = tl.constexpr(TILE_FIELDS)
_LINES = 8  # Minimum number of columns of mma.


@dataclass(frozen=True)
class PackedRowsConfig:
    """Launch config of a product of one row with the packed weights of its experts.

    Attributes:
        block_n: Rows of the weight in a block, a multiple of 16. gate_up counts gate and up together.
        x_ahead: Parts of 32 columns of the activations that a warp prefetches.
        registers: Maximum number of registers of a thread; 0: no limit.
        max_programs: Number of programs of gate_up, which share the blocks. 0 launches one for each block.
        stages: Tiles of the weight of gate_up that a warp has in flight. down loads all tiles at once.
        rounds: Scale integers and round them to bf16 before the product. Otherwise the scales multiply the sums of
            groups. Weights with minimums or groups of 16 columns are always rounded.
    """

    block_n: int = 16
    num_warps: int = 4
    x_ahead: int = 16
    registers: int = 0
    max_programs: int = 0
    stages: int = 64
    rounds: bool = False

    def programs(self, n: int) -> int:
        """Return the number of blocks of n rows of a weight. Each of down stores one partial sum of squares."""
        return cdiv(n, self.block_n)


@dataclass(frozen=True)
class PackedTilesConfig(PackedRowsConfig):
    """Launch config of a product with packed weights in tiles of pairs, for a few rows.

    Attributes:
        block_m: Maximum number of pairs of a tile, a multiple of 8.
        max_programs: Number of programs, which share the blocks of all tiles.
    """

    max_programs: int = 132
    block_m: int = 16

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return self.block_m


@dataclass(frozen=True)
class PackedPromptConfig:
    """Launch config of a product with packed weights in tiles of pairs, for many rows.

    Attributes:
        block_m: Maximum number of pairs of a tile, a multiple of 16.
        block_n: Rows of the weight of a tile. gate_up counts gate and up together.
        stages: Steps in flight. A step is a tile of the packed tensor.
        programs: Number of programs, which share the tiles.
    """

    block_m: int
    block_n: int
    stages: int
    num_warps: int
    programs: int

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return self.block_m


@triton.jit
def _expert_weight(T: tl.constexpr, w, expert, ROWS: tl.constexpr):
    """Return the Weight of one expert, of ROWS rows, from that of all."""
    first = expert.to(tl.int64) * ROWS
    return Weight(
        w.weight_ptr + first * T.LENGTH,
        w.scale_ptr + first // T.SCALE_ROWS * T.GROUPS,
        w.zero_ptr + first * T.GROUPS,
        w.minimum_ptr + first * T.LOWS,
        w.over_ptr + first * (T.OVERS * (1 + T.MINIMUMS)),
    )


@triton.jit
def _codes(T: tl.constexpr, words, zeros, part: tl.constexpr, FORM: tl.constexpr, DOT_FP32: tl.constexpr):
    """Unpack a part of a tile, see `unpack`, and subtract the zero points."""
    if T.MINIMUMS and FORM == "int4":
        return unpack(words, tl.full([1, 1], 0, tl.int32), part, FORM, True, DOT_FP32)
    else:
        zero = pair(zeros[part % T.ZERO_PARTS]) if T.ZEROS else 0
        return unpack(words, zero, part, FORM, T.ZEROS, DOT_FP32)


@triton.jit
def _add_tile(
    T: tl.constexpr, acc, words, scales, zeros, x, factors, FORM: tl.constexpr, BLOCK_M: tl.constexpr,
    HAS_FACTORS: tl.constexpr, DTYPE: tl.constexpr, TYPE: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the products of the warps' tiles to acc [WARPS, BLOCK_N, BLOCK_M], without `factor(FORM)`.

    Args:
        words, scales, zeros: see `load_tile`.
        x: a tuple of the tile's parts of the activations.
        factors: [WARPS, BLOCK_N, 1], which multiply the products if HAS_FACTORS.
    """
    total = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32) if HAS_FACTORS else acc
    for part in tl.static_range(T.PARTS):
        columns = raised(x[part], FORM, DOT_FP32) if FORM == "e4m3" else x[part]
        columns = tl.permute(operand(columns, T.WARPS, BLOCK_M, True), (0, 2, 1)).to(TYPE)
        tile = _codes(T, words, zeros, part, FORM, DOT_FP32)
        if T.ROUNDS:
            tile = rounded(T, tile, scales, part, factor(FORM), DTYPE)
        tile = operand(tile, T.WARPS, T.BLOCK_N, True).to(TYPE)
        if T.ROUNDS or not T.GROUPED:
            total = tl.dot(tile, columns, total, input_precision="ieee")
        else:
            if part % T.GROUP_PARTS == 0:
                group_sum = tl.zeros([T.WARPS, T.BLOCK_N, BLOCK_M], tl.float32)
            group_sum = tl.dot(tile, columns, group_sum, input_precision="ieee")
            if (part + 1) % T.GROUP_PARTS == 0:
                total += group_sum * scale_of(T, scales, part // T.GROUP_PARTS, 0)
    return acc + total * factors if HAS_FACTORS else total


@triton.jit
def _finish(
    T: tl.constexpr, y, pairs, mask_m, block, norm, routes_ptr, out_ptr, GATED: tl.constexpr, NORMED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store the results of pairs from the products y [BLOCK_N, BLOCK_M] with a block of rows of an expert's weight.

    Args:
        norm: [1, BLOCK_M] or a number, which multiplies the products if NORMED.
    """
    offs_n = block * T.OUT_N + tl.arange(0, T.OUT_N)[:, None]
    if GATED:
        if NORMED:
            y = y * norm
        gate, up = tl.split(tl.permute(y.reshape(2, T.OUT_N, BLOCK_M), (1, 2, 0)))
        y = silu(gate) * up
    else:
        y = y * tl.load(routes_ptr + pairs, mask=mask_m, other=0.0)[None, :]
    out_ptrs = out_ptr + pairs.to(tl.int64)[None, :] * T.N + offs_n
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask_m[None, :] & (offs_n < T.N))


# Pointers that select the pairs of a tile; see _expert_packed_kernel.
Pairs = namedtuple("Pairs", "meta_ptr pairs_ptr tiles_ptr")
# Activations and the partial sums of their squares.
Inputs = namedtuple("Inputs", "x_ptr order_ptr sumsq_ptr stride_xm stride_sumsq n_sumsq eps")


@triton.jit
def _entry(P, tile, USED: tl.constexpr, SORTED: tl.constexpr):
    """Return the expert of a tile of pairs, the place of its first pair, and the number of pairs."""
    if SORTED:
        entry = P.tiles_ptr + tile * _FIELDS
        return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
    else:
        runs = tl.load(P.meta_ptr + tile // USED * META_WIDTH + STATUS) == RUN
        return tl.where(runs, tl.load(P.tiles_ptr + tile), 0), tile, tl.where(runs, 1, 0)


@triton.jit
def _load_pairs(
    T: tl.constexpr, P, X, first, count, USED: tl.constexpr, GATED: tl.constexpr, SORTED: tl.constexpr,
    ORDERED: tl.constexpr, BLOCK_M: tl.constexpr, X_AHEAD: tl.constexpr,
):  # fmt: skip
    """Return the pairs of a tile, [BLOCK_M], their activations, and the first X_AHEAD parts of these."""
    line_m, warp_m = places(T.WARPS, BLOCK_M)
    offs_m, offs_k = tl.arange(0, BLOCK_M), warp_m * T.STEP + tl.arange(0, STEP_COLUMNS)[None, :]
    if SORTED:
        pairs = tl.load(P.pairs_ptr + first + offs_m, mask=offs_m < count, other=0)
        pairs_x = tl.load(P.pairs_ptr + first + tl.minimum(line_m, count - 1))
    else:
        pairs = first + offs_m * 0
        pairs_x = first
    rows_x = pairs_x // USED if GATED else pairs_x
    xs = X.x_ptr + rows_x.to(tl.int64) * X.stride_xm + offs_k
    x = ()
    for i in tl.static_range(X_AHEAD):
        x += (load_x(T, Activations(xs, X.order_ptr, offs_k, 0, 1), i, ORDERED),)
    return pairs, xs, x


@triton.jit
def _norms(
    X, pairs, count, K: tl.constexpr, USED: tl.constexpr, SORTED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Return 1 / root mean square of the rows of pairs, [1, BLOCK_M]."""
    mask_m, rows = tl.arange(0, BLOCK_M) < count, pairs // USED
    if not SORTED:  # There is one pair.
        mask_m, rows = True, tl.max(rows, 0)
        partials = load_partials(X.sumsq_ptr, rows, mask_m, X.stride_sumsq, X.n_sumsq, SUMSQ_BLOCK)
        return norm_scale(tl.sum(partials, 0), K, X.eps) + tl.zeros([1, BLOCK_M], tl.float32)
    else:
        partials = load_partials(
            X.sumsq_ptr, rows[:, None], mask_m[:, None], X.stride_sumsq, X.n_sumsq, SUMSQ_BLOCK
        )  # fmt: skip
        return norm_scale(tl.sum(partials, 1), K, X.eps)[None, :]


@triton.jit(do_not_specialize=["n_sumsq"])
def _expert_packed_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, zero_ptr, order_ptr, minimum_ptr, over_ptr, out_ptr, pairs_ptr, tiles_ptr,
    count_ptr, routes_ptr, sumsq_ptr, eps, stride_xm, stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr,
    USED: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, MINIMUMS: tl.constexpr,
    OVER: tl.constexpr, ROUNDS: tl.constexpr, TILES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, X_AHEAD: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of pairs by the weights of their experts, and store the results by pair.

    With GATED, the weight of an expert is [2 * N, K], the rows are rows of the pass, and the result is
    silu(gate) * up. Otherwise it is [N, K], there is a row for each pair, and the result is multiplied by the weight
    of the pair.

    Grid: (PROGRAMS,). The programs share the blocks of BLOCK_N rows of the weights of all tiles of pairs. The blocks of
    a program follow each other. STAGES tiles of the weight are in flight: while a program multiplies one block, it
    loads the next one. If all parts of the activations are in flight at once, they stay in registers for the blocks of
    a tile. The kernel lets its successor start after its own wait, so the successor may read the ids before its
    own wait.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. Read only if TILES > 0.
        x_ptr: [rows, K] if GATED, else [pairs, K].
        weight_ptr and the following: the weights of all experts; see _matmul_kernel.
        out_ptr: [pairs, N] (output).
        pairs_ptr, tiles_ptr, count_ptr: see PairTiles. If TILES > 0, each of TILES pairs is a tile, and tiles_ptr
            is the experts of the pairs, int32.
        routes_ptr: [pairs] fp32. Read only without GATED.
        sumsq_ptr: partial sums of squares of the rows. Read only if NORMED.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else DTYPE
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER, ROUNDS and FORM != "e4m3",
        GATED, BLOCK_N, WARPS, X_AHEAD, 1, 1,
    )  # fmt: skip
    BLOCKS: tl.constexpr = (N + T.OUT_N - 1) // T.OUT_N
    ROWS: tl.constexpr = 2 * N if GATED else N
    SORTED: tl.constexpr = TILES == 0
    SHARED: tl.constexpr = SORTED or TILES * BLOCKS > PROGRAMS
    CARRIED: tl.constexpr = X_AHEAD == T.X_TILES or not SHARED
    FIRST: tl.constexpr = X_AHEAD if CARRIED else 0
    PIECES: tl.constexpr = T.PIECES
    LOADED: tl.constexpr = T.LOADED
    ZERO_PARTS: tl.constexpr = T.ZERO_PARTS
    experts = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
    P = Pairs(meta_ptr, pairs_ptr, tiles_ptr)
    X = Inputs(x_ptr, order_ptr, sumsq_ptr, stride_xm, stride_sumsq, n_sumsq, eps)
    _, warp_m = places(WARPS, BLOCK_M)
    offs_k = warp_m * T.STEP + tl.arange(0, STEP_COLUMNS)[None, :]
    pid = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.load(count_ptr) * BLOCKS if SORTED else TILES * BLOCKS
    each = (total + PROGRAMS - 1) // PROGRAMS
    begin, end = pid * each, tl.minimum(pid * each + each, total)
    if begin >= end:
        return
    expert, first, count = _entry(P, begin // BLOCKS, USED, SORTED)
    if not SORTED:
        pairs, xs, first_x = _load_pairs(T, P, X, first, count, USED, GATED, SORTED, ORDERED, BLOCK_M, FIRST)
    weight = _expert_weight(T, experts, expert, ROWS)
    here, row_scales = block_of_rows(T, weight, begin % BLOCKS), 0.0
    w, s, z = (), (), ()
    for c in tl.static_range(STAGES):
        tile = load_tile(T, here, c)
        w, s, z = w + tile[0], s + tile[1], z + tile[2]
    if T.ROW_SCALES:
        row_scales = load_row_scales(T, weight, begin % BLOCKS)
    if SORTED:
        pairs, xs, first_x = _load_pairs(T, P, X, first, count, USED, GATED, SORTED, ORDERED, BLOCK_M, FIRST)
    norm = tl.zeros([1, BLOCK_M], tl.float32)
    if NORMED:
        norm = _norms(X, pairs, count, K, USED, SORTED, SUMSQ_BLOCK, BLOCK_M)
    # The condition is tested after the loads. The branch keeps the compiler from moving loads behind products.
    if not SHARED:
        if count == 0:
            return
    expert_next = expert
    if SHARED:
        expert_next, _, _ = _entry(P, tl.minimum(begin + 1, end - 1) // BLOCKS, USED, SORTED)
    for item in range(begin, end):
        x, activations = first_x, Activations(xs, order_ptr, offs_k, 0, 1)
        if not CARRIED:
            x = ()
            for i in tl.static_range(X_AHEAD):
                x += (load_x(T, activations, i, ORDERED),)
        following, row_scales_next, after = here, row_scales, tl.minimum(item + 1, end - 1)
        if SHARED:
            weight = _expert_weight(T, experts, expert_next, ROWS)
            following = block_of_rows(T, weight, after % BLOCKS)
            if T.ROW_SCALES:
                row_scales_next = load_row_scales(T, weight, after % BLOCKS)
            expert_next, _, _ = _entry(P, tl.minimum(item + 2, end - 1) // BLOCKS, USED, SORTED)
        tiles, scales, zeros = w, s, z
        acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
        for c in tl.static_range(T.CHUNKS):
            for part in tl.static_range(T.PARTS):
                if c * T.PARTS + part + X_AHEAD < T.X_TILES:
                    x += (load_x(T, activations, c * T.PARTS + part + X_AHEAD, ORDERED),)
            loaded = (
                tiles[c * PIECES : (c + 1) * PIECES],
                scales[c * LOADED : (c + 1) * LOADED],
                zeros[c * ZERO_PARTS : (c + 1) * ZERO_PARTS],
            )
            acc = _add_tile(
                T, acc, loaded[0], loaded[1], loaded[2], x[c * T.PARTS : (c + 1) * T.PARTS], 1.0, FORM, BLOCK_M, False,
                DTYPE, TYPE, DOT_FP32,
            )  # fmt: skip
            # The tile that is STAGES tiles later belongs to this block or to the next one.
            if c + STAGES < T.CHUNKS:
                loaded = load_tile(T, here, c + STAGES)
                tiles, scales, zeros = tiles + loaded[0], scales + loaded[1], zeros + loaded[2]
            elif SHARED:
                if item + 1 < end:  # The branch keeps the compiler from moving loads of other tiles.
                    loaded = load_tile(T, following, c + STAGES - T.CHUNKS)
                tiles, scales, zeros = tiles + loaded[0], scales + loaded[1], zeros + loaded[2]
        if SHARED:
            w, s, z = tiles[T.CHUNKS * PIECES :], scales[T.CHUNKS * LOADED :], zeros[T.CHUNKS * ZERO_PARTS :]
        y = tl.sum(acc, 0) * factor(FORM, FORM == "e4m3")
        if T.ROW_SCALES:
            y *= row_scales.to(tl.float32)
        mask_m = tl.arange(0, BLOCK_M) < count
        _finish(T, y, pairs, mask_m, item % BLOCKS, norm, routes_ptr, out_ptr, GATED, NORMED, BLOCK_M)
        row_scales = row_scales_next
        if SHARED:
            here = following
            if after // BLOCKS != item // BLOCKS:
                _, first, count = _entry(P, after // BLOCKS, USED, SORTED)
                pairs, xs, first_x = _load_pairs(
                    T, P, X, first, count, USED, GATED, SORTED, ORDERED, BLOCK_M, FIRST
                )  # fmt: skip
                if NORMED:
                    norm = _norms(X, pairs, count, K, USED, SORTED, SUMSQ_BLOCK, BLOCK_M)


@triton.jit
def _down_packed_kernel(
    meta_ptr, x_ptr, weight_ptr, scale_ptr, zero_ptr, order_ptr, minimum_ptr, over_ptr, ids_ptr, routes_ptr, norm_ptr,
    out_ptr, normed_ptr, sumsq_ptr, stride_xm, stride_om, stride_normed, stride_sumsq, N: tl.constexpr, K: tl.constexpr,
    USED: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr,
    ORDERED: tl.constexpr, MINIMUMS: tl.constexpr, OVER: tl.constexpr, ROUNDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, WARPS: tl.constexpr, X_AHEAD: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add the weighted products of the experts of a row to the residual stream, and prepare the next norm.

    The warps of a program share the tiles of the rows of all experts.

    Grid: (cdiv(N, BLOCK_N), rows). A program computes BLOCK_N columns. It reads the ids before its wait: the kernel
    before it started it after they were written.

    Args:
        x_ptr: [rows, USED * K].
        weight_ptr and the following: the weights of all experts, [experts, N, K]; see _matmul_kernel.
        ids_ptr, routes_ptr: [rows, USED], the experts and their weights.
        norm_ptr: [N], the weight of the next norm.
        out_ptr: [rows, N] fp32, the residual stream, updated in place.
        normed_ptr: [rows, N] (output), out * norm.
        sumsq_ptr: [rows, programs] fp32 (output), partial sums of out ** 2.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else DTYPE
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER, ROUNDS and FORM != "e4m3",
        False, BLOCK_N, WARPS, X_AHEAD, 1, 1,
    )  # fmt: skip
    CHUNKS: tl.constexpr = (USED * (T.LENGTH // T.LINE) + WARPS - 1) // WARPS
    pid, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
    if status == RUN:
        offs_n, offs_m = pid * BLOCK_N + tl.arange(0, BLOCK_N)[:, None], tl.arange(0, BLOCK_M)[None, :]
        norm = tl.load(norm_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)
        ids = ids_ptr + row * USED
        experts = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
        w, s, z, r = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            loaded = _load_tiles(T, experts, ids, routes_ptr + row * USED, c, pid * BLOCK_N, USED)
            w, s, z, r = w + loaded[0], s + loaded[1], z + loaded[2], r + loaded[3]
        if PDL:
            gdc_wait()
        _, warp_m = places(WARPS, BLOCK_M)
        xs = x_ptr + row * stride_xm
        x = ()
        for i in tl.static_range(X_AHEAD):
            x += (_load_x_of_tiles(T, xs, order_ptr, warp_m, i, USED, ORDERED),)
        mask = (offs_n < N) & (offs_m < 1)
        out_ptrs = out_ptr + row * stride_om + offs_n + offs_m * 0
        y = tl.load(out_ptrs, mask=mask, other=0.0)
        acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
        for c in tl.static_range(CHUNKS):
            for part in tl.static_range(T.PARTS):
                if c * T.PARTS + part + X_AHEAD < CHUNKS * T.PARTS:
                    x += (_load_x_of_tiles(T, xs, order_ptr, warp_m, c * T.PARTS + part + X_AHEAD, USED, ORDERED),)
            acc = _add_tile(
                T, acc, w[c * T.PIECES : (c + 1) * T.PIECES], s[c * T.LOADED : (c + 1) * T.LOADED],
                z[c * T.ZERO_PARTS : (c + 1) * T.ZERO_PARTS], x[c * T.PARTS : (c + 1) * T.PARTS], r[c], FORM, BLOCK_M,
                True, DTYPE, TYPE, DOT_FP32,
            )  # fmt: skip
        y += tl.sum(acc, 0) * factor(FORM, FORM == "e4m3")
        tl.store(out_ptrs, y, mask=mask)
        normed_ptrs = normed_ptr + row * stride_normed + offs_n + offs_m * 0
        tl.store(normed_ptrs, (y * norm).to(normed_ptr.dtype.element_ty), mask=mask)
        tl.store(sumsq_ptr + row * stride_sumsq + pid, tl.sum(tl.where(mask, y * y, 0.0)))
    elif PDL:
        gdc_wait()


@triton.constexpr_function
def _tile_is_whole(k, step, tiles, warps, used, c):
    """Return whether tile c of every warp exists and has no column beyond k; see `_place`."""
    chunks = -(-used * tiles // warps)
    exist = warps * (chunks // tiles) <= used if chunks % tiles == 0 else (c + 1) * warps <= used * tiles
    return exist and k % step == 0


@triton.jit
def _place(T: tl.constexpr, c: tl.constexpr, warp, USED: tl.constexpr):
    """Return the place of tile c of a warp: the number of the expert in the row, and that of the tile in its row.

    If the numbers allow, a warp takes whole rows. Otherwise all warps share the tiles of each row.
    """
    TILES: tl.constexpr = T.LENGTH // T.LINE
    CHUNKS: tl.constexpr = (USED * TILES + T.WARPS - 1) // T.WARPS
    if CHUNKS % TILES == 0:
        return warp * (CHUNKS // TILES) + c // TILES, warp * 0 + c % TILES
    else:
        return (c * T.WARPS + warp) // TILES, (c * T.WARPS + warp) % TILES


@triton.jit
def _rows_of_experts(T: tl.constexpr, ids, place, offs_n, USED: tl.constexpr):
    """Return the numbers of rows offs_n of an expert among the rows of all experts, and whether they exist.

    Args:
        ids: pointer to the ids of the USED experts.
        place: number of the id.
    """
    expert = tl.load(ids + place, mask=place < USED, other=0).to(tl.int64)
    return expert * T.N + offs_n, (place < USED) & (offs_n < T.N)


@triton.jit
def _load_tiles(T: tl.constexpr, experts, ids, routes, c: tl.constexpr, first_n, USED: tl.constexpr):
    """Load the warps' tiles c of rows of all experts of a row of the pass; see `load_tile`.

    The result also has the factors of the products: the weights of the experts, times the scales of rows that have one.
    """
    WHOLE: tl.constexpr = _tile_is_whole(T.K, T.STEP, T.LENGTH // T.LINE, T.WARPS, USED, c)
    PIECE: tl.constexpr = T.LINE // T.PIECES
    line_n, warp = places(T.WARPS, T.BLOCK_N)
    place, tile = _place(T, c, warp, USED)
    rows, mask = _rows_of_experts(T, ids, place, first_n + line_n, USED)
    sum_place, sum_tile = _place(T, c, tl.arange(0, T.WARPS)[:, None, None], USED)
    sum_rows, mask_sums = _rows_of_experts(T, ids, sum_place, first_n + tl.arange(0, T.BLOCK_N)[None, :, None], USED)
    scale_tile, mask_scales, scale_rows = sum_tile, mask_sums, sum_rows
    if T.ROUNDS:
        scale_tile, mask_scales, scale_rows = tile, mask, rows
    here = Block(
        experts.weight_ptr + rows * T.LENGTH + tile * T.LINE + tl.arange(0, PIECE)[None, :],
        experts.scale_ptr + scale_rows // T.SCALE_ROWS * T.GROUPS,
        experts.zero_ptr + rows * T.GROUPS,
        experts.minimum_ptr + scale_rows * T.LOWS,
        experts.over_ptr + scale_rows * (T.OVERS * (1 + T.MINIMUMS)),
        mask,
        mask_sums,
    )
    words, zeros = (), ()
    for i in tl.static_range(T.PIECES):
        if WHOLE and not T.MASKED:
            words += (tl.load(here.weights + i * PIECE, eviction_policy="evict_first"),)
        else:
            words += (tl.load(here.weights + i * PIECE, mask=mask, other=0, eviction_policy="evict_first"),)
    scales = load_scales(T, here, scale_tile * T.STEP, mask_scales, WHOLE)
    for i in tl.static_range(T.ZERO_PARTS):
        zeros += (load_group(T, here.zeros, tile * T.STEP + i * STEP_COLUMNS, mask, WHOLE, T.GROUP),)
    factors = tl.load(routes + sum_place, mask=sum_place < USED, other=0.0)
    if T.ROW_SCALES:
        row_scales = tl.load(experts.scale_ptr + sum_rows // T.SCALE_ROWS, mask=mask_sums, other=0.0)
        factors = factors * row_scales.to(tl.float32)
    return words, scales, zeros, (factors,)


@triton.jit
def _load_x_of_tiles(
    T: tl.constexpr, xs, order_ptr, warp, i: tl.constexpr, USED: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """Load the activations for part i % PARTS of the warps' tiles i // PARTS; see `_load_tiles`.

    Args:
        xs: pointer to the activations, [USED * K].
    """
    WHOLE: tl.constexpr = _tile_is_whole(T.K, T.STEP, T.LENGTH // T.LINE, T.WARPS, USED, i // T.PARTS)
    place, tile = _place(T, i // T.PARTS, warp, USED)
    column = tl.arange(0, STEP_COLUMNS)[None, :] + (tile * T.STEP + i % T.PARTS * STEP_COLUMNS)
    mask = (place < USED) & (column < T.K)
    if ORDERED:
        column = tl.load(order_ptr + column, mask=mask, other=0)
    x_ptrs = xs + place * T.K + column
    if WHOLE:
        return tl.load(x_ptrs)
    else:
        return tl.load(x_ptrs, mask=mask, other=0.0)


@triton.jit
def _load_groups(T: tl.constexpr, block, column, WHOLE: tl.constexpr):
    """Load the scales and the zero points of lines that begin at `column`."""
    scales, zeros = load_scales(T, block, column, block.mask_lines, WHOLE), ()
    for i in tl.static_range(T.ZERO_PARTS):
        zeros += (load_group(T, block.zeros, column + i * STEP_COLUMNS, block.mask_lines, WHOLE, T.GROUP),)
    return scales, zeros


@triton.jit
def _weights(
    T: tl.constexpr, words, scales, zeros, part: tl.constexpr, FORM: tl.constexpr, DTYPE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Return a part of lines, [lines, 32], scaled and rounded, or unscaled if a row has one scale."""
    tile = _codes(T, words, zeros, part, FORM, DOT_FP32)
    if T.ROUNDS:
        return rounded(T, tile, scales, part, 1.0, DTYPE, factor(FORM))
    elif FORM == "e4m3":
        return raised_weights(tile, DOT_FP32)
    else:
        return tile


@triton.jit(do_not_specialize=["n_sumsq"])
def _prompt_packed_kernel(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, order_ptr, minimum_ptr, over_ptr, out_ptr, pairs_ptr, tiles_ptr, count_ptr,
    routes_ptr, sumsq_ptr, eps, stride_xm, stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr, USED: tl.constexpr,
    GATED: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, FORM: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, MINIMUMS: tl.constexpr, OVER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile of pairs by the weight of its expert; see _expert_packed_kernel.

    The weights of groups are scaled and rounded before the product. Grid: (PROGRAMS,).
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else DTYPE
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER, True, GATED, BLOCK_N, 1, 0,
        1, 1,
    )  # fmt: skip
    BLOCKS: tl.constexpr = (N + T.OUT_N - 1) // T.OUT_N
    ROWS: tl.constexpr = 2 * N if GATED else N
    WHOLE: tl.constexpr = K % T.STEP == 0
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    experts = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
    offs_m, offs_k = tl.arange(0, BLOCK_M), tl.arange(0, 2 * STEP_COLUMNS)[None, :]
    for item in range(tl.program_id(0), tl.load(count_ptr) * BLOCKS, PROGRAMS):
        entry = tiles_ptr + item // BLOCKS * _FIELDS
        expert, first, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
        block, mask_m = item % BLOCKS, offs_m < count
        pairs = tl.load(pairs_ptr + first + offs_m, mask=mask_m, other=0)
        rows = pairs // USED if GATED else pairs
        x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_xm
        weight = _expert_weight(T, experts, expert, ROWS)
        here = block_of_rows(T, weight, block)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        begin = tl.zeros([1, 1], tl.int32)
        scales, zeros = _load_groups(T, here, begin, WHOLE)
        for k in tl.range(0, K, T.STEP, num_stages=STAGES):
            following = _load_groups(T, here, tl.minimum(begin + (k + T.STEP), (T.CHUNKS - 1) * T.STEP), WHOLE)
            words = ()
            for i in tl.static_range(T.PIECES):
                words_ptrs = here.weights + (k // T.STEP * T.LINE + i * (T.LINE // T.PIECES))
                words += (tl.load(words_ptrs, mask=here.mask_lines, other=0),)
            for pair_of_parts in tl.static_range(T.PARTS // 2):
                column = k + pair_of_parts * (2 * STEP_COLUMNS) + offs_k
                mask = mask_m[:, None]
                if not WHOLE:
                    mask = mask & (column < K)
                if ORDERED:
                    column = tl.load(order_ptr + column, mask=column < K, other=0)
                x = tl.load(x_ptrs + column, mask=mask, other=0.0)
                first_part = _weights(T, words, scales, zeros, pair_of_parts * 2, FORM, DTYPE, DOT_FP32)
                second_part = _weights(T, words, scales, zeros, pair_of_parts * 2 + 1, FORM, DTYPE, DOT_FP32)
                tile = tl.permute(tl.join(first_part, second_part), (0, 2, 1)).reshape(BLOCK_N, 2 * STEP_COLUMNS)
                acc = tl.dot(tile.to(TYPE), tl.trans(x.to(TYPE)), acc, input_precision="ieee")
            scales, zeros = following[0], following[1]
        y = acc
        if T.ROW_SCALES:
            row_scales = load_row_scales(T, weight, block).to(tl.float32)
            y = y * (row_scales if FORM == "e4m3" else row_scales * factor(FORM))
        norm = 1.0
        if NORMED:
            rows_m = (pairs // USED)[:, None]
            partials = load_partials(sumsq_ptr, rows_m, mask_m[:, None], stride_sumsq, n_sumsq, SUMSQ_BLOCK)
            norm = norm_scale(tl.sum(partials, 1), K, eps)[None, :]
        _finish(T, y, pairs, mask_m, block, norm, routes_ptr, out_ptr, GATED, NORMED, BLOCK_M)


def _rounds(linear: LoadedLinear, config: PackedRowsConfig) -> bool:
    """Return whether weights are scaled and rounded before the product."""
    packed = linear.packed
    assert packed is not None
    return config.rounds or packed.minimums or packed.group < STEP_COLUMNS.value


def _warp_parts(linear: LoadedLinear, k: int, num_warps: int) -> int:
    """Return the number of parts of 32 columns that each warp multiplies of rows of k columns."""
    packed = linear.packed
    assert packed is not None
    return cdiv(k, packed.tile * num_warps) * (packed.tile // STEP_COLUMNS.value)


def _expert_packed(meta, x, linear, tiles, routes, out, norm, gated, sizes, config, pdl, n, block_m, pairs) -> None:
    sumsq, n_sumsq, eps = norm or (out, 0, 0.0)
    k = linear.in_features
    programs = config.max_programs
    if pairs:
        blocks = pairs * config.programs(2 * n if gated else n)
        programs = min(programs or blocks, blocks)
    _expert_packed_kernel[(programs,)](
        meta, x, **linear.arguments(out), out_ptr=out, pairs_ptr=tiles.pairs, tiles_ptr=tiles.tiles,
        count_ptr=tiles.number, routes_ptr=routes.weights, sumsq_ptr=sumsq, eps=eps,
        stride_xm=x.stride(0) if gated else k, stride_sumsq=sumsq.stride(0), n_sumsq=n_sumsq, N=n, USED=sizes.used,
        GATED=gated, NORMED=norm is not None, SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 1)),
        ROUNDS=_rounds(linear, config), TILES=pairs, BLOCK_M=block_m, BLOCK_N=config.block_n, WARPS=config.num_warps,
        STAGES=min(config.stages, cdiv(k, linear.packed.tile * config.num_warps)),
        X_AHEAD=min(config.x_ahead, _warp_parts(linear, k, config.num_warps)), PROGRAMS=programs, PDL=pdl,
        DOT_FP32=interpreted(), **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def gate_up_packed_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, gated: Gated, sizes: Experts, *, config: PackedRowsConfig,
    pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_rows`."""
    tiles = PairTiles(routes.ids, routes.ids, routes.ids)
    _expert_packed(
        meta, x, linear, tiles, routes, out, gated, True, sizes, config, pdl, sizes.intermediate, _LINES,
        len(x) * sizes.used,
    )  # fmt: skip


def down_packed_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, epilogue: AddResidual, sizes: Experts, *,
    config: PackedRowsConfig, pdl=False,
):  # fmt: skip
    """Add the products of each row with its experts, times their weights, to the residual stream, as `down_rows`."""
    rows, n = out.shape
    packed = linear.packed
    assert packed is not None
    tiles = cdiv(linear.in_features, packed.tile) * sizes.used
    _down_packed_kernel[(config.programs(n), rows)](
        meta, x, **linear.arguments(out), ids_ptr=routes.ids, routes_ptr=routes.weights, norm_ptr=epilogue.norm,
        out_ptr=out, normed_ptr=epilogue.normed, sumsq_ptr=epilogue.sumsq, stride_xm=x.stride(0),
        stride_om=out.stride(0), stride_normed=epilogue.normed.stride(0), stride_sumsq=epilogue.sumsq.stride(0), N=n,
        USED=sizes.used, ROUNDS=_rounds(linear, config), BLOCK_M=_LINES, BLOCK_N=config.block_n,
        WARPS=config.num_warps,
        X_AHEAD=min(config.x_ahead, _warp_parts(linear, tiles * packed.tile, config.num_warps)), PDL=pdl,
        DOT_FP32=interpreted(), **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def gate_up_packed_tiles(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: Experts, *,
    config: PackedTilesConfig, pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_tiles`, for a few rows."""
    _expert_packed(
        routes.ids, x, linear, tiles, routes, out, normed, True, sizes, config, pdl, sizes.intermediate,
        config.block_m, 0,
    )  # fmt: skip


def down_packed_tiles(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, sizes: Experts, *, config: PackedTilesConfig,
    pdl=False,
):  # fmt: skip
    """Multiply silu(gate) * up of each pair by its expert's weight and its own, as `down_tiles`, for a few rows."""
    _expert_packed(
        routes.ids, x, linear, tiles, routes, out, None, False, sizes, config, pdl, out.shape[1] // sizes.used,
        config.block_m, 0,
    )  # fmt: skip


def _prompt_packed(x, linear, tiles, routes, out, normed, gated, sizes, config, pdl, n) -> None:
    sumsq, n_sumsq, eps = normed or (out, 0, 0.0)
    _prompt_packed_kernel[(config.programs,)](
        x, **linear.arguments(out), out_ptr=out, pairs_ptr=tiles.pairs, tiles_ptr=tiles.tiles, count_ptr=tiles.number,
        routes_ptr=routes.weights, sumsq_ptr=sumsq, eps=eps, stride_xm=x.stride(0) if gated else linear.in_features,
        stride_sumsq=sumsq.stride(0), n_sumsq=n_sumsq, N=n, USED=sizes.used, GATED=gated, NORMED=normed is not None,
        SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 1)), BLOCK_M=config.block_m, BLOCK_N=config.block_n,
        STAGES=config.stages, PROGRAMS=config.programs, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl),
    )  # fmt: skip


def gate_up_packed_prompt(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: Experts, *,
    config: PackedPromptConfig, pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_tiles`, for many rows."""
    _prompt_packed(x, linear, tiles, routes, out, normed, True, sizes, config, pdl, sizes.intermediate)


def down_packed_prompt(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, sizes: Experts, *, config: PackedPromptConfig,
    pdl=False,
):  # fmt: skip
    """Multiply silu(gate) * up of each pair by its expert's weight and its own, as `down_tiles`, for many rows."""
    _prompt_packed(x, linear, tiles, routes, out, None, False, sizes, config, pdl, out.shape[1] // sizes.used)


GATE_UP_PACKED_ROWS = Op(
    gate_up_packed_rows, gate_up_rows_ref, expert_rows_bytes, (_expert_packed_kernel,), outputs=("out",)
)
DOWN_PACKED_ROWS = Op(down_packed_rows, down_rows_ref, expert_rows_bytes, (_down_packed_kernel,), OUTPUTS)
GATE_UP_PACKED_TILES = Op(
    gate_up_packed_tiles, gate_up_tiles_ref, expert_tiles_bytes, (_expert_packed_kernel,), outputs=("out",)
)
DOWN_PACKED_TILES = Op(
    down_packed_tiles, down_tiles_ref, expert_tiles_bytes, (_expert_packed_kernel,), outputs=("out",)
)
GATE_UP_PACKED_PROMPT = Op(
    gate_up_packed_prompt, gate_up_tiles_ref, expert_tiles_bytes, (_prompt_packed_kernel,), outputs=("out",)
)
DOWN_PACKED_PROMPT = Op(
    down_packed_prompt, down_tiles_ref, expert_tiles_bytes, (_prompt_packed_kernel,), outputs=("out",)
)
