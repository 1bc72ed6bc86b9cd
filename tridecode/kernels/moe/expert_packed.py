"""expert_packed: the products of a few rows with packed weights of experts.

The pairs of a row and an expert are sorted into tiles of one expert or, in passes of one or two rows, each is a tile.
Tiles of a weight are loaded into the registers from which mma reads them, and the warps of a program share the columns,
as in linear/matmul.py.
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
from .arguments import TILE_FIELDS, Experts, PairTiles, Routes
from .expert_rows import expert_rows_bytes, gate_up_rows_ref
from .expert_tiles import down_tiles_ref, expert_tiles_bytes, gate_up_tiles_ref
from .expert_weight import LINES, PackedRowsConfig, add_tile, finish, rounds, warp_parts, weight_of_expert

_FIELDS = tl.constexpr(TILE_FIELDS)


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
    weight = weight_of_expert(T, experts, expert, ROWS)
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
            weight = weight_of_expert(T, experts, expert_next, ROWS)
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
            acc = add_tile(
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
        finish(T, y, pairs, mask_m, item % BLOCKS, norm, routes_ptr, out_ptr, GATED, NORMED, BLOCK_M)
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
        ROUNDS=rounds(linear, config), TILES=pairs, BLOCK_M=block_m, BLOCK_N=config.block_n, WARPS=config.num_warps,
        STAGES=min(config.stages, cdiv(k, linear.packed.tile * config.num_warps)),
        X_AHEAD=min(config.x_ahead, warp_parts(linear, k, config.num_warps)), PROGRAMS=programs, PDL=pdl,
        DOT_FP32=interpreted(), **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def gate_up_packed_rows(
    meta, x, linear: LoadedLinear, routes: Routes, out, gated: Gated, sizes: Experts, *, config: PackedRowsConfig,
    pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_rows`."""
    tiles = PairTiles(routes.ids, routes.ids, routes.ids)
    _expert_packed(
        meta, x, linear, tiles, routes, out, gated, True, sizes, config, pdl, sizes.intermediate, LINES,
        len(x) * sizes.used,
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


GATE_UP_PACKED_ROWS = Op(
    gate_up_packed_rows, gate_up_rows_ref, expert_rows_bytes, (_expert_packed_kernel,), outputs=("out",)
)
GATE_UP_PACKED_TILES = Op(
    gate_up_packed_tiles, gate_up_tiles_ref, expert_tiles_bytes, (_expert_packed_kernel,), outputs=("out",)
)
DOWN_PACKED_TILES = Op(
    down_packed_tiles, down_tiles_ref, expert_tiles_bytes, (_expert_packed_kernel,), outputs=("out",)
)
