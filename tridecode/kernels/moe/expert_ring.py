"""expert_ring: the products of a few rows with packed weights of experts on Hopper, in Gluon.

gate_up and down multiply tiles of at most eight pairs that `sort_pairs` lists. TMA copies the weight into a ring in
shared memory, and mma multiplies 16 rows of it by eight rows of activations (linear/mma_lanes.py). Each warp has rows
of its own and all their columns, so the warps never add their sums. The activations are in shared memory, because every
warp reads all of them.

Weights in flight are not in registers, so no other load of a program waits for them. In expert_packed.py they share the
six hardware counters (scoreboards) by which a warp waits for its loads.
"""

from collections import namedtuple
from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ..common import gdc_launch_dependents, gdc_wait, next_power_of_2, options
from ..linear.bits import factor
from ..linear.gluon_epilogue import norm_scale, silu
from ..linear.matmul_ring import multiplies, ring_descriptor
from ..linear.mma_lanes import (
    WORDS,
    all_raised,
    both_rows,
    lanes_layout,
    load_row_words,
    multiply,
    parts_of,
    scaled,
    zero_sum,
)
from ..linear.packed import Packed
from ..linear.project import Normed
from ..linear.tma_ring import barriers
from ..linear.weight import LoadedLinear
from ..op import Op
from ..sort_pairs import FIELDS, PairTiles, load_entry
from ..triton_compat import Constants, async_load, barrier, reinterpret
from .arguments import ExpertSizes, Routes
from .expert_tiles import down_tiles_ref, expert_tiles_bytes, gate_up_tiles_ref

RING_PAIRS = 8  # Maximum number of pairs of a tile.


@dataclass(frozen=True)
class RingTilesConfig:
    """Launch config of a product of expert_ring.

    Attributes:
        num_warps: Warps of a program: 2, 4 or 8. Each multiplies 16 rows of the weight.
        columns: Columns of a stage, in units of 128 bytes of a row. A row is a multiple of them.
        stages: Stages of the ring. One of them is being multiplied, and the others are in flight.
        programs: Number of programs, which share the products of a tile of pairs and a block.
        registers: Maximum number of registers of a thread; 0: no limit.
    """

    num_warps: int
    columns: int
    stages: int
    programs: int
    registers: int = 0

    @property
    def tile(self) -> int:
        """Maximum number of pairs of a tile."""
        return RING_PAIRS

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        return self.columns * self.num_warps * 2048


@gluon.constexpr_function
def _records(k, tile, warps, int4):
    """Return the number of records of 512 bytes in shared memory that the activations of each warp take.

    Each warp stores every WARPS-th tile of the columns: a record for each part, and for int4 one for the zero points.
    """
    return -(-k // (tile * warps)) * (tile // 32 + (1 if int4 else 0))


def activation_bytes(packed: Packed, warps: int) -> int:
    """Return the shared memory that the activations take, for a weight of this description."""
    return _records(packed.k, packed.tile, warps, packed.number_type == "int4") * warps * 512


# The work of a program:
# - arguments of the kernel
# - ring: [STAGES * COLUMNS, 1, 2, 8 * WARPS, 32] int32
# - full: barriers, one a stage, completed when the stage has arrived
# - x_shared: [RECORDS, 32 * WARPS, 4] int32, the activations; see `_load_pairs`
# - begin, end: the items of this program. An item is the product of a tile of pairs and a block.
_Work = namedtuple(
    "_Work",
    "x_ptr weight_desc scale_ptr out_ptr pairs_ptr tiles_ptr pair_weights_ptr sumsq_ptr eps stride_xm stride_sumsq"
    " n_sumsq ring full x_shared begin end",
)


@gluon.constexpr_function
def _constants(**constexprs):
    """Return the constexprs of the kernel and the constants that follow from them.

    A *tile* of the weight is 64 bytes of a row, and has PARTS parts of 32 columns. A *unit* is two tiles.

    TILES: tiles of a row.
    OF_ITEM: stages of an item, each with COLUMNS units.
    OUT_N: outputs of a block.
    APART: rows of the weight between the two rows of a lane.
    BLOCKS: blocks of the weight of an expert.
    ROWS: rows of the weight of an expert.
    GROUPS: scales of a row. UNIT_GROUPS: scales of a unit; 0: a row has one scale.
    ZEROS: 1 if the zero points have a record, else 0.
    RECORDS: see `_records`.
    """
    k, n, form, gated = constexprs["K"], constexprs["N"], constexprs["FORM"], constexprs["GATED"]
    warps, parts, groups = constexprs["WARPS"], parts_of(form), k // constexprs["GROUP"]
    tile, zeros = parts * 32, 1 if form == "int4" else 0
    out_n, of_item = warps * (8 if gated else 16), k // (2 * tile * constexprs["COLUMNS"])
    return Constants(
        **constexprs, PARTS=parts, TILES=k // tile, OF_ITEM=of_item, OUT_N=out_n, APART=n if gated else 8 * warps,
        BLOCKS=n // out_n, ROWS=2 * n if gated else n, GROUPS=groups,
        UNIT_GROUPS=2 * tile // constexprs["GROUP"] if groups > 1 else 0, ZEROS=zeros,
        RECORDS=_records(k, tile, warps, zeros > 0),
    )  # fmt: skip


@gluon.constexpr_function
def _scales_layout(warps):
    """Return the layout of two scales for each lane, [threads, 2]."""
    return gl.BlockedLayout([1, 2], [32, 1], [warps, 1], [1, 0])


@gluon.constexpr_function
def _sums_layout(warps):
    """Return the layout of the sums of eight rows of each warp with eight pairs, [8 * warps, 8]."""
    return gl.BlockedLayout([1, 2], [8, 4], [warps, 1], [1, 0])


@gluon.jit
def _row_of(line):
    """Return the row of the weight for line 8 * warp + i, whose sums are in lanes 4 * i to 4 * i + 3 of the warp."""
    return line // 8 * 8 + line % 8 // 2 + line % 2 * 4


@gluon.jit
def _expert_of(C: gl.constexpr, w, at):
    """Load the expert of stage `at` of the program, or of its last stage."""
    item = gl.minimum(w.begin + at // C.OF_ITEM, w.end - 1)
    return gl.load(w.tiles_ptr + item // C.BLOCKS * FIELDS)


@gluon.jit
def _copy_stage(C: gl.constexpr, w, at, expert):
    """Copy stage `at` of the program to its place in the ring."""
    stage = at % C.STAGES
    row = expert * C.ROWS + (w.begin + at // C.OF_ITEM) % C.BLOCKS * C.OUT_N
    mbarrier.expect(w.full.index(stage), C.COLUMNS * C.WARPS * 2048)
    for i in gl.static_range(C.COLUMNS):
        place = [at % C.OF_ITEM * C.COLUMNS + i, 0, row, 0]
        async_load(w.weight_desc, place, w.full.index(stage), w.ring.index(stage * C.COLUMNS + i))


@gluon.jit
def _load_scales(C: gl.constexpr, w, at, expert):
    """Load the scales of stage `at` of the program.

    For each unit, the result has two tuples of UNIT_GROUPS tensors [threads]: the scales of the two rows of each lane.
    With one scale for a row it has one tensor for each of the two rows.
    """
    L: gl.constexpr = gl.SliceLayout(1, lanes_layout(C.WARPS))
    S_L: gl.constexpr = _scales_layout(C.WARPS)
    ROWS_L: gl.constexpr = gl.SliceLayout(1, _scales_layout(C.WARPS) if C.UNIT_GROUPS > 0 else _sums_layout(C.WARPS))
    LINES: gl.constexpr = C.WARPS * (32 if C.UNIT_GROUPS > 0 else 8)
    scale_ptr = w.scale_ptr + expert.to(gl.int64) * (C.ROWS // C.SCALE_ROWS * C.GROUPS)
    line = gl.arange(0, LINES, ROWS_L) // (LINES // (8 * C.WARPS))
    row = (w.begin + at // C.OF_ITEM) % C.BLOCKS * C.OUT_N + _row_of(line)
    loaded = ()
    for i in gl.static_range(C.COLUMNS if C.UNIT_GROUPS > 0 else 1):
        for which in gl.static_range(2):
            group = (at % C.OF_ITEM * C.COLUMNS + i) * C.UNIT_GROUPS
            ptrs = scale_ptr + ((row + which * C.APART) // C.SCALE_ROWS * C.GROUPS + group)
            if C.UNIT_GROUPS == 2:
                both = gl.load(ptrs[:, None] + gl.arange(0, 2, gl.SliceLayout(0, S_L))[None, :])
                first, second = gl.split(both)
                first = gl.convert_layout(first, L, assert_trivial=True)
                loaded += ((first, gl.convert_layout(second, L, assert_trivial=True)),)
            elif C.UNIT_GROUPS == 1:
                loaded += ((gl.convert_layout(gl.load(ptrs), L, assert_trivial=True),),)
            else:
                loaded += (gl.load(ptrs),)
    return loaded


@gluon.jit
def _load_pairs(C: gl.constexpr, w, tile):
    """Store the activations of a tile of pairs in shared memory, as the lanes of a warp read them.

    Warp i stores tiles i, i + WARPS, ... of the columns. A record has 16 bytes for each lane: a part of the raised
    activations, or the `zero_sum` of the tile as the initial value of its sums.

    Returns:
        Pointers to the outputs of the pairs, and whether the pairs exist, [8] each.
        Factors of the sums of the pairs, [8]: 1 / root mean square of its row if NORMED, the weight of the pair
        without GATED.
    """
    L: gl.constexpr = lanes_layout(C.WARPS)
    OUT_L: gl.constexpr = _sums_layout(C.WARPS)
    _, first, count = load_entry(w.tiles_ptr, tile)
    thread = gl.arange(0, C.WARPS * 32, gl.SliceLayout(1, L))
    warp, lane = thread // 32, thread % 32
    pair_x = gl.load(w.pairs_ptr + first + gl.minimum(lane // 4, count - 1))
    row = pair_x // C.USED if C.GATED else pair_x
    x_words = w.x_ptr.to(gl.pointer_type(gl.int32), bitcast=True)
    xs = x_words + (row.to(gl.int64) * (w.stride_xm // 2) + warp * (C.PARTS * 16) + lane % 4 * 4)[:, None]
    xs = xs + gl.arange(0, 4, gl.SliceLayout(0, L))[None, :]
    EACH: gl.constexpr = C.PARTS + C.ZEROS
    loaded = ()
    for i in gl.static_range(C.RECORDS // EACH):
        for part in gl.static_range(C.PARTS):
            ptrs = xs + (i * C.WARPS * C.PARTS + part) * 16
            if (i + 1) * C.WARPS > C.TILES:
                loaded += (gl.load(ptrs, mask=(i * C.WARPS + warp < C.TILES)[:, None], other=0),)
            else:
                loaded += (gl.load(ptrs),)
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
    barrier()  # All warps have read the previous activations.
    for i in gl.static_range(C.RECORDS // EACH):
        x = all_raised(loaded[i * C.PARTS : (i + 1) * C.PARTS], C.FORM)
        for part in gl.static_range(C.PARTS):
            w.x_shared.index(i * EACH + part).store(x[part])
        if C.ZEROS:
            w.x_shared.index(i * EACH + C.PARTS).store(both_rows(zero_sum(x), L).to(gl.int32, bitcast=True))
    barrier()
    return w.out_ptr + pairs.to(gl.int64) * C.N, offs_m < count, scale


@gluon.jit
def _record(C: gl.constexpr, w, number):
    """Read a record of the activations in every warp: int32 [threads, 4]."""
    X_L: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 32, 1], [C.WARPS, 1, 1], [2, 1, 0])
    FLAT_L: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    records = reinterpret(w.x_shared, gl.int32, [C.RECORDS * C.WARPS, 32, 4], FLAT_L)
    x = records.index(number).load(gl.SliceLayout(0, X_L))[None, :, :] + gl.zeros([C.WARPS, 32, 4], gl.int32, X_L)
    return gl.convert_layout(gl.reshape(x, [C.WARPS * 32, 4]), lanes_layout(C.WARPS), assert_trivial=True)


@gluon.jit
def _add_unit(C: gl.constexpr, w, sums, words, unit, low, high):
    """Add the products of a unit to the sums of each lane.

    Args:
        sums: two tensors [threads, 4]. With scales of groups, only the first is in use.
        words: see `load_row_words`.
        low, high: scales of the lanes' rows, a tuple of UNIT_GROUPS for each of the two rows.
    """
    L: gl.constexpr = lanes_layout(C.WARPS)
    # Warps store tiles in turn, so a record of the next tile follows, and one of the next part is WARPS records later.
    first = unit * 2 // C.WARPS * ((C.PARTS + C.ZEROS) * C.WARPS) + unit * 2 % C.WARPS
    a, b = sums[0], sums[1]
    for i in gl.static_range(2):
        x = ()
        for part in gl.static_range(C.PARTS):
            x += (_record(C, w, first + (part * C.WARPS + i)),)
        if C.ZEROS:
            a = _record(C, w, first + (C.PARTS * C.WARPS + i)).to(gl.float32, bitcast=True)
            b = gl.zeros([C.WARPS * 32, 4], gl.float32, L)
        elif C.UNIT_GROUPS > 0 and i == 0:
            a = gl.zeros([C.WARPS * 32, 4], gl.float32, L)
            b = a
        a, b = multiply(words[i], x, a, b, C.FORM)
        if C.UNIT_GROUPS == 2 or (C.UNIT_GROUPS == 1 and i == 1):
            sums = (scaled(sums[0], a, b, low[i * C.ZEROS].to(gl.float32), high[i * C.ZEROS].to(gl.float32)), sums[1])
        elif C.ZEROS:
            sums = (sums[0] + a, sums[1] + b)
        elif C.UNIT_GROUPS == 0:
            sums = (a, b)
    return sums


@gluon.jit
def _store(C: gl.constexpr, w, sums, scales, block, outs, mask_m, scale):
    """Store the results of an item.

    Args:
        sums: [threads, 4].
        scales: see `_load_scales`.
        outs, mask_m, scale: see `_load_pairs`.
    """
    OUT_L: gl.constexpr = _sums_layout(C.WARPS)
    # Dimensions: line, lane of the line, one of two rows, one of two pairs.
    y = gl.permute(gl.reshape(sums, [8 * C.WARPS, 4, 2, 2]), (0, 1, 3, 2))
    low, high = gl.split(gl.reshape(y, [8 * C.WARPS, 8, 2]))
    low = gl.convert_layout(low, OUT_L, assert_trivial=True) * factor(C.FORM, True)
    high = gl.convert_layout(high, OUT_L, assert_trivial=True) * factor(C.FORM, True)
    if C.UNIT_GROUPS == 0:
        low *= scales[0].to(gl.float32)[:, None]
        high *= scales[1].to(gl.float32)[:, None]
    low, high = low * scale[None, :], high * scale[None, :]
    line = gl.arange(0, 8 * C.WARPS, gl.SliceLayout(1, OUT_L))
    ptrs = outs[None, :] + (block * C.OUT_N + _row_of(line))[:, None]
    mask = mask_m[None, :] & (line >= 0)[:, None]
    if C.GATED:
        gl.store(ptrs, (silu(low) * high).to(w.out_ptr.dtype.element_ty), mask=mask)
    else:
        gl.store(ptrs, low.to(w.out_ptr.dtype.element_ty), mask=mask)
        gl.store(ptrs + C.APART, high.to(w.out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply(C: gl.constexpr, w):
    """Compute the items of the program, in one loop over all their stages."""
    L: gl.constexpr = lanes_layout(C.WARPS)
    OUT_L: gl.constexpr = gl.SliceLayout(0, _sums_layout(C.WARPS))
    FLAT_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    IN_FLIGHT: gl.constexpr = C.STAGES - 1
    total = (w.end - w.begin) * C.OF_ITEM
    for early in range(gl.minimum(IN_FLIGHT, total)):
        _copy_stage(C, w, early, _expert_of(C, w, early))
    scales = _load_scales(C, w, 0, _expert_of(C, w, 0))
    # Experts of the next stage and of the next stage to copy.
    next_expert, copied_expert = _expert_of(C, w, 1), _expert_of(C, w, IN_FLIGHT)
    if C.PDL and not C.GATED:
        gdc_wait()
    tile = w.begin // C.BLOCKS - 1  # The tile of pairs whose activations are in shared memory: none yet.
    offs_m = gl.arange(0, 8, OUT_L)
    outs, mask_m, scale = w.out_ptr + offs_m, offs_m < 0, gl.zeros([8], gl.float32, OUT_L)
    zeros = gl.zeros([C.WARPS * 32, 4], gl.float32, L)
    first_sum, second_sum = zeros, zeros
    for at in range(total):
        item = w.begin + at // C.OF_ITEM
        if item // C.BLOCKS != tile:
            tile = item // C.BLOCKS
            outs, mask_m, scale = _load_pairs(C, w, tile)
        mbarrier.wait(w.full.index(at % C.STAGES), at // C.STAGES & 1)
        fence_async_shared()
        barrier()  # All warps have read the previous stage. Another one is copied to its place.
        if at + IN_FLIGHT < total:
            _copy_stage(C, w, at + IN_FLIGHT, copied_expert)
        next_scales = _load_scales(C, w, gl.minimum(at + 1, total - 1), next_expert)
        next_expert, copied_expert = _expert_of(C, w, at + 2), _expert_of(C, w, at + 1 + IN_FLIGHT)
        sums = (first_sum, second_sum)
        for i in gl.static_range(C.COLUMNS):
            low, high = (), ()
            if C.UNIT_GROUPS > 0:
                low, high = scales[2 * i], scales[2 * i + 1]
            unit = w.ring.index(at % C.STAGES * C.COLUMNS + i)
            words = load_row_words(reinterpret(unit, gl.int32, [16 * C.WARPS, WORDS], FLAT_L), C.WARPS)
            sums = _add_unit(C, w, sums, words, at % C.OF_ITEM * C.COLUMNS + i, low, high)
        first_sum, second_sum = sums[0], sums[1]
        if (at + 1) % C.OF_ITEM == 0:
            _store(C, w, first_sum + second_sum, scales, item % C.BLOCKS, outs, mask_m, scale)
            first_sum, second_sum = zeros, zeros
        scales = next_scales


@gluon.jit(do_not_specialize=["n_sumsq"])
def _expert_ring_kernel(
    x_ptr, weight_desc, scale_ptr, out_ptr, pairs_ptr, tiles_ptr, count_ptr, pair_weights_ptr, sumsq_ptr, eps,
    stride_xm, stride_sumsq, n_sumsq, N: gl.constexpr, K: gl.constexpr, USED: gl.constexpr, GATED: gl.constexpr,
    NORMED: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, FORM: gl.constexpr, GROUP: gl.constexpr, SCALE_ROWS: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Multiply the rows of each tile of pairs by the weight of its expert, and store the results by pair.

    With GATED, the weight of an expert is [2 * N, K], the rows are rows of the pass, and the result is
    silu(gate) * up. Otherwise it is [N, K], there is a row for each pair, and the result is multiplied by the weight
    of the pair.

    Grid: (PROGRAMS,). An item is the product of a tile of pairs and 16 * WARPS rows of the weight. The items of a
    program follow each other, and the numbers of items of programs differ by at most one. gate_up calls
    gdc_launch_dependents after gdc_wait, and down begins to copy weights before gdc_wait; see _expert_packed_kernel.

    Args:
        x_ptr: [rows, K] if GATED, else [pairs, K].
        weight_desc: tensor descriptor of the weights of all experts; see `ring_descriptor`.
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
        SCALE_ROWS=SCALE_ROWS, COLUMNS=COLUMNS, STAGES=STAGES, WARPS=WARPS, PDL=PDL,
    )  # fmt: skip
    RING_L: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    ring = gl.allocate_shared_memory(gl.int32, [STAGES * COLUMNS, 1, 2, 8 * WARPS, WORDS], RING_L)
    x_shared = gl.allocate_shared_memory(
        gl.int32, [C.RECORDS, 32 * WARPS, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )  # fmt: skip
    full = barriers(STAGES)
    fence_async_shared()
    barrier()
    pid, total = gl.program_id(0), gl.load(count_ptr) * C.BLOCKS
    w = _Work(
        x_ptr, weight_desc, scale_ptr, out_ptr, pairs_ptr, tiles_ptr, pair_weights_ptr, sumsq_ptr, eps, stride_xm,
        stride_sumsq, n_sumsq, ring, full, x_shared, pid * total // PROGRAMS, (pid + 1) * total // PROGRAMS,
    )  # fmt: skip
    if w.begin < w.end:
        _multiply(C, w)
    elif PDL and not GATED:
        gdc_wait()


def _launch(x, linear, tiles, routes, out, normed: Normed | None, sizes, config, pdl, gated: bool) -> None:
    n, k, packed, warps = out.shape[1] // sizes.used, linear.in_features, linear.packed, config.num_warps
    if not ring_supports(packed, n, gated, warps) or k // (2 * packed.tile) % config.columns:
        raise ValueError(f"expert_ring does not support {n} rows with weights of the form {packed} and {config}")
    sumsq, n_sumsq, eps = normed or (routes.weights, 0, 0.0)
    weight = ring_descriptor(linear, n if gated else 8 * warps, 1, 8 * warps)
    _expert_ring_kernel[(config.programs,)](
        x, weight, linear.scale, out, *tiles, routes.weights, sumsq, eps, x.stride(0) if gated else k, sumsq.stride(0),
        n_sumsq, N=n, K=k, USED=sizes.used, GATED=gated, NORMED=normed is not None,
        SUMSQ_BLOCK=next_power_of_2(max(n_sumsq, 32)), FORM=packed.number_type, GROUP=packed.group,
        SCALE_ROWS=packed.rows, COLUMNS=config.columns, STAGES=config.stages, WARPS=warps, PROGRAMS=config.programs,
        PDL=pdl, **options(warps, pdl, config.registers),
    )  # fmt: skip


def ring_supports(packed: Packed, n: int, gated: bool, warps: int) -> bool:
    """Return whether expert_ring multiplies by packed weights of experts.

    Args:
        packed: the description of the weight.
        n: outputs of an expert.
        gated: True for gate_up, False for down.
        warps: warps of a program.
    """
    fits = packed.group in (128, packed.k) and packed.k % (2 * packed.tile) == 0
    return multiplies(packed) and fits and n % ((8 if gated else 16) * warps) == 0


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
