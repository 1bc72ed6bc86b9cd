"""expert_packed: the products of a few rows with packed weights of experts.

gate_up and down multiply tiles of pairs that `sort_pairs` lists. In passes of one or two rows, each pair is a tile of
gate_up, and nothing is sorted (SINGLE_PAIRS); down is in down_packed.py.

Weight tiles are loaded into the registers from which mma reads them, and the warps of a program share the columns, as
in linear/matmul.py.
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
from ..linear.bits import factor
from ..linear.epilogue import load_partials, norm_scale
from ..linear.project import Gated, Normed
from ..linear.register_tiles import (
    STEP_COLUMNS,
    Activations,
    Weight,
    block_of_rows,
    load_row_scales,
    load_tile,
    load_x,
    places,
    tiling,
)
from ..linear.weight import LoadedLinear
from ..op import Op
from ..sort_pairs import PairTiles, load_entry
from .arguments import ExpertSizes, Routes
from .expert_rows import expert_rows_bytes, gate_up_rows_ref
from .expert_tiles import down_tiles_ref, expert_tiles_bytes, gate_up_tiles_ref
from .expert_weight import (
    MIN_BLOCK_M,
    PackedRowsConfig,
    add_tile,
    rounds,
    store_products,
    warp_parts,
    weight_of_expert,
)


@dataclass(frozen=True)
class PackedTilesConfig:
    """Launch config of a product with packed weights in tiles of pairs, for a few rows.

    Attributes:
        block_m: Maximum number of pairs of a tile, a multiple of 8.
        block_n, x_ahead, registers: see PackedRowsConfig.
        stages: Weight tiles that a warp has in flight.
        programs: Number of programs, which share the products of a tile of pairs and a block.
    """

    block_m: int
    block_n: int
    x_ahead: int
    stages: int
    num_warps: int
    programs: int
    registers: int = 0

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return self.block_m


# Pointers that select the pairs of a tile; see _expert_packed_kernel.
PairPointers = namedtuple("PairPointers", "meta_ptr pairs_ptr tiles_ptr")
# Activations and the partial sums of their squares.
Inputs = namedtuple("Inputs", "x_ptr order_ptr sumsq_ptr stride_xm stride_sumsq n_sumsq eps")


@triton.jit
def _entry(P, tile, USED: tl.constexpr, SORTED: tl.constexpr):
    """Return the expert of a tile of pairs, the place of its first pair, and its number of pairs.

    Without SORTED, tile i consists of pair i. If the row of this pair does not run, the tile has no pairs, and its
    expert is arbitrary.
    """
    if SORTED:
        return load_entry(P.tiles_ptr, tile)
    else:
        runs = tl.load(P.meta_ptr + tile // USED * META_WIDTH + STATUS) == RUN
        return tl.where(runs, tl.load(P.tiles_ptr + tile), 0), tile, tl.where(runs, 1, 0)


@triton.jit
def _load_pairs(
    T: tl.constexpr, P, X, first, count, USED: tl.constexpr, GATED: tl.constexpr, SORTED: tl.constexpr,
    ORDERED: tl.constexpr, BLOCK_M: tl.constexpr, X_PARTS: tl.constexpr,
):  # fmt: skip
    """Load the pairs of a tile, and the first parts of their activations.

    Return the pairs [BLOCK_M], pointers to the first part of the activations [WARPS * BLOCK_M, 32], and a tuple of the
    first X_PARTS parts. Elements beyond the pairs of the tile have number 0, or that of the only pair without SORTED.
    They have the activations of the last pair.

    Args:
        T: see `tiling`. P, X: PairPointers and Inputs.
        first, count: see `_entry`.
    """
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
    for i in tl.static_range(X_PARTS):
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
    count_ptr, pair_weights_ptr, sumsq_ptr, eps, stride_xm, stride_sumsq, n_sumsq, N: tl.constexpr, K: tl.constexpr,
    USED: tl.constexpr, GATED: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr, FORM: tl.constexpr,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr, MINIMUMS: tl.constexpr,
    OVER: tl.constexpr, ROUNDS: tl.constexpr, SINGLE_PAIRS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WARPS: tl.constexpr, STAGES: tl.constexpr, X_AHEAD: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
    DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile of pairs by the weight of its expert, and store the results by pair.

    With GATED, the weight of an expert is [2 * N, K], the rows are rows of the pass, and the result is
    silu(gate) * up. Otherwise it is [N, K], there is a row for each pair, and the result is multiplied by the weight
    of the pair.

    Grid: (PROGRAMS,). An item is the product of a tile of pairs and a block of BLOCK_N rows of the weight. The items of
    a program follow each other; with SINGLE_PAIRS > 0, each program has one item. STAGES weight tiles are in flight:
    while a program multiplies the last tiles of an item, it loads the first of the next one.

    gate_up calls gdc_launch_dependents only after gdc_wait. So `route` and `sort_pairs` have ended before any later
    kernel starts, and later kernels may read their results before their own gdc_wait. down reads its tiles and its
    first weights before gdc_wait, and its activations after it.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. Read only if SINGLE_PAIRS > 0.
        x_ptr: [rows, K] if GATED, else [pairs, K].
        weight_ptr and the following: the weights of all experts; see _matmul_kernel.
        out_ptr: [pairs, N] (output).
        pairs_ptr, tiles_ptr, count_ptr: see PairTiles. If SINGLE_PAIRS > 0, only tiles_ptr is read. It is then the
            experts of the pairs, [SINGLE_PAIRS] int32.
        pair_weights_ptr: [pairs] fp32. Read only without GATED.
        sumsq_ptr: partial sums of squares of the rows. Read only if NORMED.
        SINGLE_PAIRS: number of pairs, each of which is a tile. 0: the pairs are sorted into tiles.
    """
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else DTYPE
    T: tl.constexpr = tiling(
        N, K, FORM, GROUP, SCALE_ROWS, scale_ptr.dtype.element_ty, ZEROS, MINIMUMS, OVER,
        ROUNDS=ROUNDS and FORM != "e4m3", GATED=GATED, BLOCK_N=BLOCK_N, WARPS=WARPS, X_AHEAD=X_AHEAD,
    )  # fmt: skip
    BLOCKS: tl.constexpr = (N + T.OUT_N - 1) // T.OUT_N
    ROWS: tl.constexpr = 2 * N if GATED else N
    SORTED: tl.constexpr = SINGLE_PAIRS == 0
    # Whether activations are loaded once for all items of a tile of pairs. If X_AHEAD is less than all parts, only the
    # parts in flight fit into registers, and each item loads them again.
    X_KEPT: tl.constexpr = X_AHEAD == T.X_TILES or not SORTED
    X_PARTS: tl.constexpr = X_AHEAD if X_KEPT else 0
    # Numbers of tensors of a weight tile; see load_tile.
    PIECES: tl.constexpr = T.PIECES
    LOADED: tl.constexpr = T.LOADED
    ZERO_PARTS: tl.constexpr = T.ZERO_PARTS
    experts = Weight(weight_ptr, scale_ptr, zero_ptr, minimum_ptr, over_ptr)
    P = PairPointers(meta_ptr, pairs_ptr, tiles_ptr)
    X = Inputs(x_ptr, order_ptr, sumsq_ptr, stride_xm, stride_sumsq, n_sumsq, eps)
    _, warp_m = places(WARPS, BLOCK_M)
    offs_k = warp_m * T.STEP + tl.arange(0, STEP_COLUMNS)[None, :]
    pid = tl.program_id(0)
    if PDL:
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    total = tl.load(count_ptr) * BLOCKS if SORTED else SINGLE_PAIRS * BLOCKS
    # The numbers of items of programs differ by at most one.
    begin, end = pid * total // PROGRAMS, (pid + 1) * total // PROGRAMS
    if begin >= end:
        if PDL and not GATED:
            gdc_wait()
        return
    expert, first, count = _entry(P, begin // BLOCKS, USED, SORTED)
    if not SORTED:
        pairs, xs, first_x = _load_pairs(T, P, X, first, count, USED, GATED, SORTED, ORDERED, BLOCK_M, X_PARTS)
    weight = weight_of_expert(T, experts, expert, ROWS)
    block, row_scales = block_of_rows(T, weight, begin % BLOCKS), 0.0
    # The weight tiles of the next item that are in flight.
    next_words, next_scales, next_zeros = (), (), ()
    for c in tl.static_range(STAGES):
        loaded = load_tile(T, block, c)
        next_words, next_scales, next_zeros = next_words + loaded[0], next_scales + loaded[1], next_zeros + loaded[2]
    if T.ROW_SCALES:
        row_scales = load_row_scales(T, weight, begin % BLOCKS)
    if SORTED:  # The activations wait for the numbers of the pairs. So the loads of the weight start first.
        if PDL and not GATED:
            gdc_wait()
        pairs, xs, first_x = _load_pairs(T, P, X, first, count, USED, GATED, SORTED, ORDERED, BLOCK_M, X_PARTS)
    norm = tl.zeros([1, BLOCK_M], tl.float32)
    if NORMED:
        norm = _norms(X, pairs, count, K, USED, SORTED, SUMSQ_BLOCK, BLOCK_M)
    # The condition is tested after the loads. The branch keeps the compiler from moving loads behind products.
    if not SORTED:
        if count == 0:
            return
    next_expert = expert
    if SORTED:  # An expert is loaded one item before its weight.
        next_expert, _, _ = _entry(P, tl.minimum(begin + 1, end - 1) // BLOCKS, USED, SORTED)
    for item in range(begin, end):
        x, activations = first_x, Activations(xs, order_ptr, offs_k, 0, 1)
        if not X_KEPT:
            x = ()
            for i in tl.static_range(X_AHEAD):
                x += (load_x(T, activations, i, ORDERED),)
        # After the last item these repeat this item, and nothing reads them.
        next_block, next_row_scales, next_item = block, row_scales, tl.minimum(item + 1, end - 1)
        if SORTED:
            weight = weight_of_expert(T, experts, next_expert, ROWS)
            next_block = block_of_rows(T, weight, next_item % BLOCKS)
            if T.ROW_SCALES:
                next_row_scales = load_row_scales(T, weight, next_item % BLOCKS)
            next_expert, _, _ = _entry(P, tl.minimum(item + 2, end - 1) // BLOCKS, USED, SORTED)
        words, scales, zeros = next_words, next_scales, next_zeros
        acc = tl.zeros([WARPS, BLOCK_N, BLOCK_M], tl.float32)
        for c in tl.static_range(T.CHUNKS):
            for part in tl.static_range(T.PARTS):
                if c * T.PARTS + part + X_AHEAD < T.X_TILES:
                    x += (load_x(T, activations, c * T.PARTS + part + X_AHEAD, ORDERED),)
            tile = (
                words[c * PIECES : (c + 1) * PIECES],
                scales[c * LOADED : (c + 1) * LOADED],
                zeros[c * ZERO_PARTS : (c + 1) * ZERO_PARTS],
            )
            acc = add_tile(
                T, acc, tile[0], tile[1], tile[2], x[c * T.PARTS : (c + 1) * T.PARTS], 1.0, FORM, BLOCK_M, False,
                DTYPE, TYPE, DOT_FP32,
            )  # fmt: skip
            # The tile that is STAGES tiles later belongs to this item or to the next one.
            if c + STAGES < T.CHUNKS:
                tile = load_tile(T, block, c + STAGES)
                words, scales, zeros = words + tile[0], scales + tile[1], zeros + tile[2]
            elif SORTED:
                # Without a next item, the tile just multiplied takes its place, and nothing reads it. The branch keeps
                # the compiler from moving this load behind products.
                if item + 1 < end:
                    tile = load_tile(T, next_block, c + STAGES - T.CHUNKS)
                words, scales, zeros = words + tile[0], scales + tile[1], zeros + tile[2]
        if SORTED:
            next_words, next_scales = words[T.CHUNKS * PIECES :], scales[T.CHUNKS * LOADED :]
            next_zeros = zeros[T.CHUNKS * ZERO_PARTS :]
        y = tl.sum(acc, 0) * factor(FORM, FORM == "e4m3")
        if T.ROW_SCALES:
            y *= row_scales.to(tl.float32)
        mask_m = tl.arange(0, BLOCK_M) < count
        store_products(T, y, pairs, mask_m, item % BLOCKS, norm, pair_weights_ptr, out_ptr, GATED, NORMED, BLOCK_M)
        row_scales = next_row_scales
        if SORTED:
            block = next_block
            if next_item // BLOCKS != item // BLOCKS:  # The next item has another tile of pairs.
                _, first, count = _entry(P, next_item // BLOCKS, USED, SORTED)
                pairs, xs, first_x = _load_pairs(
                    T, P, X, first, count, USED, GATED, SORTED, ORDERED, BLOCK_M, X_PARTS
                )  # fmt: skip
                if NORMED:
                    norm = _norms(X, pairs, count, K, USED, SORTED, SUMSQ_BLOCK, BLOCK_M)


def _launch(
    meta, x, linear, tiles, routes, out, norm: Gated | Normed | None, sizes,
    config: PackedRowsConfig | PackedTilesConfig, pdl, gated: bool,
) -> None:  # fmt: skip
    """Launch the kernel. With PackedRowsConfig, each pair is a tile.

    Args:
        meta: read only with PackedRowsConfig.
        norm: the partial sums for the division by the root mean square, or None.
        gated: True for gate_up, False for down.
    """
    sumsq, n_sumsq, eps = norm or (out, 0, 0.0)
    k, n = linear.in_features, out.shape[1] // sizes.used
    weight_tiles = cdiv(k, linear.packed.tile * config.num_warps)  # Number of tiles of a row for each warp.
    if isinstance(config, PackedTilesConfig):
        single_pairs, block_m, stages, programs = 0, config.block_m, config.stages, config.programs
    else:
        single_pairs, block_m, stages = len(x) * sizes.used, MIN_BLOCK_M, weight_tiles
        programs = single_pairs * config.programs(2 * n)
    _expert_packed_kernel[(programs,)](
        meta, x, **linear.arguments(out), out_ptr=out, pairs_ptr=tiles.pairs, tiles_ptr=tiles.tiles,
        count_ptr=tiles.number, pair_weights_ptr=routes.weights, sumsq_ptr=sumsq, eps=eps,
        stride_xm=x.stride(0) if gated else k, stride_sumsq=sumsq.stride(0), n_sumsq=n_sumsq, N=n, USED=sizes.used,
        GATED=gated, NORMED=norm is not None, SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 1)), ROUNDS=rounds(linear),
        SINGLE_PAIRS=single_pairs, BLOCK_M=block_m, BLOCK_N=config.block_n, WARPS=config.num_warps,
        STAGES=min(stages, weight_tiles), X_AHEAD=min(config.x_ahead, warp_parts(linear, k, config.num_warps)),
        PROGRAMS=programs, PDL=pdl, DOT_FP32=interpreted(), **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def gate_up_packed_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, gated: Gated, sizes: ExpertSizes, *, config: PackedRowsConfig,
    pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_rows`."""
    tiles = PairTiles(routes.ids, routes.ids, routes.ids)  # Only `tiles` is read.
    _launch(meta, x, linear, tiles, routes, out, gated, sizes, config, pdl, True)


def gate_up_packed_tiles(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: ExpertSizes, *,
    config: PackedTilesConfig, pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_tiles`, for a few rows."""
    _launch(routes.ids, x, linear, tiles, routes, out, normed, sizes, config, pdl, True)


def down_packed_tiles(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, sizes: ExpertSizes, *, config: PackedTilesConfig,
    pdl=False,
):  # fmt: skip
    """Multiply silu(gate) * up of each pair by its expert's weight and its own, as `down_tiles`, for a few rows."""
    _launch(routes.ids, x, linear, tiles, routes, out, None, sizes, config, pdl, False)


GATE_UP_PACKED_ROWS = Op(
    gate_up_packed_rows, gate_up_rows_ref, expert_rows_bytes, (_expert_packed_kernel,), outputs=("out",)
)
GATE_UP_PACKED_TILES = Op(
    gate_up_packed_tiles, gate_up_tiles_ref, expert_tiles_bytes, (_expert_packed_kernel,), outputs=("out",)
)
DOWN_PACKED_TILES = Op(
    down_packed_tiles, down_tiles_ref, expert_tiles_bytes, (_expert_packed_kernel,), outputs=("out",)
)
