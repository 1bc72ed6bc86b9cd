"""expert_ring: the products of a few rows with packed weights of experts on Hopper, in Gluon.

gate_up and down multiply tiles of at most eight pairs that `sort_pairs` lists. As in linear/matmul_ring.py, TMA copies
16 rows of the weight at a time into a ring in shared memory, and mma multiplies them by eight rows of activations. The
warps of a program share the columns.

Weights in flight are not in registers, so no other load of a program waits for them. In expert_packed.py they share the
six hardware counters (scoreboards) by which a warp waits for its loads.
"""

from collections import namedtuple
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common import gdc_launch_dependents, gdc_wait, next_power_of_2, options
from ..linear.gluon_epilogue import norm_scale, silu
from ..linear.matmul_ring import (
    add_tile,
    lane_sums,
    load_group_scales,
    load_tile_x,
    multiplies,
    out_layout,
    ring_descriptor,
    sum_of_warps,
)
from ..linear.mma_lanes import WORDS, all_raised, lanes_layout, load_words, parts_of, sums_of, zero_sum
from ..linear.packed import Packed
from ..linear.project import Normed
from ..linear.tma_ring import barriers
from ..linear.weight import LoadedLinear
from ..op import Op
from ..sort_pairs import FIELDS, PairTiles
from ..triton_compat import Constants, async_load, barrier, reinterpret
from .arguments import ExpertSizes, Routes
from .expert_tiles import down_tiles_ref, expert_tiles_bytes, gate_up_tiles_ref

RING_PAIRS = 8  # Maximum number of pairs of a tile.


@dataclass(frozen=True)
class RingTilesConfig:
    """Launch config of a product of expert_ring.

    Attributes:
        num_warps: Warps of a program: 2, 4 or 8.
        stages: Blocks of 16 rows of a weight in flight.
        programs: Number of programs, which share the products of a tile of pairs and a block.
        registers: Maximum number of registers of a thread; 0: no limit.
    """

    num_warps: int
    stages: int
    programs: int
    registers: int = 0

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return RING_PAIRS


@gluon.constexpr_function
def stage_places(k, tile, warps):
    """Return the number of places of a stage for tiles of a row, for each warp.

    It is a power of two. TMA fills places beyond a row with zeros. A place has 1,024 bytes, for 16 rows.

    Args:
        k: columns of the weight.
        tile: columns of a tile of the weight.
    """
    return 1 << (-(-k // (tile * warps)) - 1).bit_length()


# The work of a program:
# - arguments of the kernel
# - ring: [STAGES, TILE_PAIRS, 2, 8, 32] int32
# - full: barriers, one a stage, completed when the stage has arrived
# - kept_sums: shared memory for the sums of the warps
# - begin, end: the items of this program. An item is the product of a tile of pairs and a block.
_Work = namedtuple(
    "_Work",
    "x_ptr weight_desc scale_ptr out_ptr pairs_ptr tiles_ptr pair_weights_ptr sumsq_ptr eps stride_xm stride_sumsq"
    " n_sumsq ring full kept_sums begin end",
)


@gluon.constexpr_function
def _constants(**constexprs):
    """Return the constexprs of the kernel and the constants that follow from them.

    PARTS: parts of a tile of the weight.
    STEP: columns of the tiles of all warps together.
    TILES: tiles of a row for each warp.
    PLACES: see `stage_places`.
    TILE_PAIRS: pairs of places of a row in a stage.
    OUT_N: outputs of a block.
    BLOCKS: blocks of the weight of an expert.
    ROWS: rows of the weight of an expert.
    HALVES: 2 with GATED, for the rows of gate and of up; otherwise 1.
    GROUPS, GROUPED, FRESH: see matmul_ring.
    SHARED, X_SHARED: the activations are raised, and in registers. `add_tile` reads these constants.
    """
    k, n, form, gated = constexprs["K"], constexprs["N"], constexprs["FORM"], constexprs["GATED"]
    parts, groups, out_n = parts_of(form), -(-k // constexprs["GROUP"]), 8 if gated else 16
    step = constexprs["WARPS"] * parts * 32
    tiles = -(-k // step)
    places = stage_places(k, parts * 32, constexprs["WARPS"])
    return Constants(
        **constexprs, PARTS=parts, STEP=step, TILES=tiles, PLACES=places, TILE_PAIRS=places * constexprs["WARPS"] // 2,
        OUT_N=out_n, BLOCKS=n // out_n, ROWS=2 * n if gated else n, HALVES=2 if gated else 1, GROUPS=groups,
        GROUPED=groups > 1, FRESH=groups > 1 or form == "int4", SHARED=True, X_SHARED=False,
    )  # fmt: skip


@gluon.jit
def _expert_of(C: gl.constexpr, w, item):
    """Load the expert of an item, or of the last item of the program."""
    return gl.load(w.tiles_ptr + gl.minimum(item, w.end - 1) // C.BLOCKS * FIELDS)


@gluon.jit
def _copy_item(C: gl.constexpr, w, item, expert):
    """Copy the rows of the weight for an item to its place in the ring."""
    stage = (item - w.begin) % C.STAGES
    row = expert * C.ROWS + item % C.BLOCKS * C.OUT_N
    mbarrier.expect(w.full.index(stage), C.TILE_PAIRS * 2048)
    async_load(w.weight_desc, [0, 0, row, 0], w.full.index(stage), w.ring.index(stage))


@gluon.jit
def _load_scales(C: gl.constexpr, w, expert, block, warp, row, OUT_L: gl.constexpr):
    """Load the scales of a block.

    With GROUPED, see `load_group_scales`. Otherwise they are the scales of the rows of gate and of up, or of all rows,
    [OUT_N, 1].
    """
    scale_ptr = w.scale_ptr + expert.to(gl.int64) * (C.ROWS // C.SCALE_ROWS * C.GROUPS)
    if C.GROUPED:
        return load_group_scales(C, scale_ptr, block, warp, row)
    else:
        offs_n = block * C.OUT_N + gl.arange(0, C.OUT_N, gl.SliceLayout(1, OUT_L))[:, None]
        loaded = ()
        for half in gl.static_range(C.HALVES):
            loaded += (gl.load(scale_ptr + (offs_n + half * C.N) // C.SCALE_ROWS),)
        return loaded


@gluon.jit
def _load_pairs(C: gl.constexpr, w, tile, warp, lane, L: gl.constexpr, OUT_L: gl.constexpr):
    """Load the pairs of a tile and their activations.

    Returns:
        The pairs and whether they exist, [8] each.
        Factors of the sums of the pairs, [8]: 1 / root mean square of its row if NORMED, the weight of the pair
        without GATED.
        A tuple of the raised activations of each part: int32 [threads, 4].
        A tuple of the `zero_sum` of each tile of the weight, or ().
    """
    entry = w.tiles_ptr + tile * FIELDS
    first, count = gl.load(entry + 1), gl.load(entry + 2)
    pair_x = gl.load(w.pairs_ptr + first + gl.minimum(lane // 4, count - 1))
    row = pair_x // C.USED if C.GATED else pair_x
    column = (warp * (C.PARTS * 32) + lane % 4 * 8)[:, None]
    x_words = w.x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    xs = x_words + (row.to(gl.int64) * (w.stride_xm // 2))[:, None] + column // 2
    xs = xs + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    loaded, x, zero_sums = (), (), ()
    for c in gl.static_range(C.TILES):
        loaded += (load_tile_x(C, xs, column, c),)
    offs_m = gl.arange(0, 8, gl.SliceLayout(0, OUT_L))
    pairs = gl.load(w.pairs_ptr + first + gl.minimum(offs_m, count - 1))
    scale = 1.0 + gl.zeros([8], gl.float32, gl.SliceLayout(0, OUT_L))
    if not C.GATED:
        scale = gl.load(w.pair_weights_ptr + pairs)
    if C.NORMED:
        PARTIALS_L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [C.WARPS, 1], [1, 0])
        offs_p = gl.arange(0, 8, gl.SliceLayout(1, PARTIALS_L))
        rows = gl.load(w.pairs_ptr + first + gl.minimum(offs_p, count - 1)) // C.USED
        offs_s = gl.arange(0, C.SUMSQ_BLOCK, gl.SliceLayout(0, PARTIALS_L))[None, :]
        ptrs = w.sumsq_ptr + rows[:, None] * w.stride_sumsq + offs_s
        partials = gl.load(ptrs, mask=(offs_s < w.n_sumsq) & (rows[:, None] >= 0), other=0.0)
        scale = scale * norm_scale(partials, C.K, w.eps, gl.SliceLayout(0, OUT_L))
    for c in gl.static_range(C.TILES):
        tile_x = all_raised(loaded[c], C.FORM)
        x += tile_x
        if C.FORM == "int4":
            zero_sums += (zero_sum(tile_x),)
    return pairs, offs_m < count, scale, x, zero_sums


@gluon.jit
def _item_sums(C: gl.constexpr, w, number, x, zero_sums, scales, L: gl.constexpr):
    """Return each lane's part of the products of an item, fp32 [threads, 4].

    Args:
        number: number of the item among those of the program.
        x, zero_sums, scales: see `_load_pairs` and `_load_scales`.
    """
    FLAT_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    zeros = gl.zeros([C.WARPS * 32, 4], gl.float32, L)
    acc, chains = (zeros, zeros), ((zeros, zeros), (zeros, zeros))
    stage = number % C.STAGES
    mbarrier.wait(w.full.index(stage), number // C.STAGES & 1)
    places = reinterpret(w.ring.index(stage), gl.int32, [C.PLACES, 8 * C.WARPS, WORDS], FLAT_L)
    tiles, tile_x = (), ()
    for i in gl.static_range(C.TILES):
        tiles += (load_words(places.index(i), C.WARPS),)
        tile_x += (x[i * C.PARTS : (i + 1) * C.PARTS],)
    for i in gl.static_range(C.TILES):
        acc, chains = add_tile(C, w, acc, chains, tiles[i], tile_x, zero_sums, scales, i, L)
    return lane_sums(C, acc, chains)


@gluon.jit
def _multiply(C: gl.constexpr, w):
    """Compute the items of the program."""
    L: gl.constexpr = lanes_layout(C.WARPS)
    OUT_L: gl.constexpr = out_layout(C.WARPS, C.GATED)
    thread = gl.arange(0, C.WARPS * 32, gl.SliceLayout(1, L))
    warp, lane = thread // 32, thread % 32
    row = lane // 8 + lane // 4 % 2 * 4  # The first row of the lane. The second row is eight rows later.
    first_experts = ()
    for i in gl.static_range(C.STAGES):
        first_experts += (_expert_of(C, w, w.begin + i),)
    for i in gl.static_range(C.STAGES):
        if w.begin + i < w.end:
            _copy_item(C, w, w.begin + i, first_experts[i])
    scales = _load_scales(C, w, first_experts[0], w.begin % C.BLOCKS, warp, row, OUT_L)
    next_expert = _expert_of(C, w, w.begin + 1)
    if C.PDL and not C.GATED:
        gdc_wait()
    pairs, mask_m, scale, x, zero_sums = _load_pairs(C, w, w.begin // C.BLOCKS, warp, lane, L, OUT_L)
    in_block = gl.arange(0, C.OUT_N, gl.SliceLayout(1, OUT_L))[:, None]
    for item in range(w.begin, w.end):
        # After the last item these repeat it, and nothing reads them.
        next_item = gl.minimum(item + 1, w.end - 1)
        next_scales = _load_scales(C, w, next_expert, next_item % C.BLOCKS, warp, row, OUT_L)
        next_expert, later_expert = _expert_of(C, w, item + 2), _expert_of(C, w, item + C.STAGES)
        summed = _item_sums(C, w, item - w.begin, x, zero_sums, scales, L)
        parts = sums_of(summed, C.GATED, C.WARPS)
        for half in gl.static_range(C.HALVES):
            w.kept_sums[half].store(parts[half])
        fence_async_shared()
        barrier()  # All warps have read the stage.
        if item + C.STAGES < w.end:
            _copy_item(C, w, item + C.STAGES, later_expert)
        ys = ()
        for half in gl.static_range(C.HALVES):
            ys += (sum_of_warps(C, w.kept_sums, scales, half) * scale[None, :],)
        y = ys[0]
        if C.GATED:
            y = silu(y) * ys[1]
        offs_n = item % C.BLOCKS * C.OUT_N + in_block
        out_ptrs = w.out_ptr + pairs.to(gl.int64)[None, :] * C.N + offs_n
        gl.store(out_ptrs, y.to(w.out_ptr.dtype.element_ty), mask=mask_m[None, :] & (in_block >= 0))
        scales = next_scales
        if next_item // C.BLOCKS != item // C.BLOCKS:
            pairs, mask_m, scale, x, zero_sums = _load_pairs(C, w, next_item // C.BLOCKS, warp, lane, L, OUT_L)


@gluon.jit(do_not_specialize=["n_sumsq"])
def _expert_ring_kernel(
    x_ptr, weight_desc, scale_ptr, out_ptr, pairs_ptr, tiles_ptr, count_ptr, pair_weights_ptr, sumsq_ptr, eps,
    stride_xm, stride_sumsq, n_sumsq, N: gl.constexpr, K: gl.constexpr, USED: gl.constexpr, GATED: gl.constexpr,
    NORMED: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile of pairs by the weight of its expert, and store the results by pair.

    With GATED, the weight of an expert is [2 * N, K], the rows are rows of the pass, and the result is
    silu(gate) * up. Otherwise it is [N, K], there is a row for each pair, and the result is multiplied by the weight
    of the pair.

    Grid: (PROGRAMS,). An item is the product of a tile of pairs and 16 rows of the weight. The items of a program
    follow each other, and the numbers of items of programs differ by at most one. gate_up calls gdc_launch_dependents
    after gdc_wait, and down begins to copy weights before gdc_wait; see _expert_packed_kernel.

    Args:
        x_ptr: [rows, K] if GATED, else [pairs, K].
        weight_desc: tensor descriptor of the weights of all experts; see _matmul_ring_kernel.
        scale_ptr: [rows of all experts / SCALE_ROWS, GROUPS].
        out_ptr: [pairs, N] (output).
        pairs_ptr, tiles_ptr, count_ptr: see PairTiles.
        pair_weights_ptr: [pairs] fp32. Read only without GATED.
        sumsq_ptr: partial sums of squares of the rows. Read only if NORMED.
    """
    if PDL:
        if GATED:
            gdc_wait()
        gdc_launch_dependents()
    C: gl.constexpr = _constants(
        N=N, K=K, USED=USED, GATED=GATED, NORMED=NORMED, SUMSQ_BLOCK=SUMSQ_BLOCK, FORM=FORM, GROUP=GROUP,
        SCALE_ROWS=SCALE_ROWS, STAGES=STAGES, WARPS=WARPS, PDL=PDL,
    )  # fmt: skip
    RING_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    SUMS_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ring = gl.allocate_shared_memory(gl.int32, [STAGES, C.TILE_PAIRS, 2, 8, WORDS], RING_L)
    kept_sums = ()
    for _ in gl.static_range(C.HALVES):
        kept_sums += (gl.allocate_shared_memory(gl.float32, [WARPS, C.OUT_N, 8], SUMS_L),)
    full = barriers(STAGES)
    fence_async_shared()
    barrier()
    pid, total = gl.program_id(0), gl.load(count_ptr) * C.BLOCKS
    w = _Work(
        x_ptr, weight_desc, scale_ptr, out_ptr, pairs_ptr, tiles_ptr, pair_weights_ptr, sumsq_ptr, eps, stride_xm,
        stride_sumsq, n_sumsq, ring, full, kept_sums, pid * total // PROGRAMS, (pid + 1) * total // PROGRAMS,
    )  # fmt: skip
    if w.begin < w.end:
        _multiply(C, w)
    elif PDL and not GATED:
        gdc_wait()


def _launch(x, linear, tiles, routes, out, normed: Normed | None, sizes, config, pdl, gated: bool) -> None:
    n, k, packed = out.shape[1] // sizes.used, linear.in_features, linear.packed
    if not ring_supports(packed, n):
        raise ValueError(f"expert_ring does not support {n} rows with weights of the form {packed}")
    sumsq, n_sumsq, eps = normed or (routes.weights, 0, 0.0)
    places = stage_places(k, packed.tile, config.num_warps)
    weight = ring_descriptor(linear, n if gated else 8, places * config.num_warps // 2)
    _expert_ring_kernel[(config.programs,)](
        x, weight, linear.scale, out, *tiles, routes.weights, sumsq, eps, x.stride(0) if gated else k, sumsq.stride(0),
        n_sumsq, N=n, K=k, USED=sizes.used, GATED=gated, NORMED=normed is not None,
        SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 32)), FORM=packed.number_type, GROUP=packed.group,
        SCALE_ROWS=packed.rows, STAGES=config.stages, WARPS=config.num_warps,
        PROGRAMS=config.programs, PDL=pdl, **options(config.num_warps, pdl, config.registers),
    )  # fmt: skip


def ring_supports(packed: Packed, n: int) -> bool:
    """Return whether expert_ring multiplies by packed weights of experts with n outputs."""
    return multiplies(packed) and packed.group in (128, packed.k) and packed.k % (2 * packed.tile) == 0 and n % 16 == 0


def gate_up_ring(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, normed: Normed | None, sizes: ExpertSizes, *,
    config: RingTilesConfig, pdl=False,
):  # fmt: skip
    """Compute silu(gate) * up of the experts of each row, as `gate_up_tiles`, for tiles of at most eight pairs."""
    _launch(x, linear, tiles, routes, out, normed, sizes, config, pdl, True)


def down_ring(
    x, linear: LoadedLinear, tiles: PairTiles, routes: Routes, out, sizes: ExpertSizes, *, config: RingTilesConfig,
    pdl=False,
):  # fmt: skip
    """Multiply silu(gate) * up of each pair by its expert's weight and its own, for tiles of at most eight pairs."""
    _launch(x, linear, tiles, routes, out, None, sizes, config, pdl, False)


GATE_UP_RING = Op(gate_up_ring, gate_up_tiles_ref, expert_tiles_bytes, (_expert_ring_kernel,), outputs=("out",))
DOWN_RING = Op(down_ring, down_tiles_ref, expert_tiles_bytes, (_expert_ring_kernel,), outputs=("out",))
