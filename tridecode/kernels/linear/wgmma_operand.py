"""Parts of the products in Gluon: what both kernels for Hopper share, the rings of matmul_hopper, and how weights in
fewer bits become the operand of wgmma that lies in registers.

A lane has of 16 columns two neighbours in either half, of two rows. In memory (packed.py) eight
neighbours are one word of four bits, or two of eight: so all four lanes of a row load the words of a row, and each
takes the pair out of them that is its own. The activations, which come by TMA, stay in their order.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate, base_value

COPIER_REGISTERS = gl.constexpr(24)
COLUMNS = gl.constexpr(64)  # of activations side by side in shared memory, 128 bytes; the next behind all rows of those
COLUMNS_OF = {"dense": 64, "e4m3": 128, "int8": 128, "int4": 256}  # of weights, that are 128 bytes
# Names that Triton has changed, 3.9's first.
copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

# A pair's four bits, moved to the low ones of both halves, added to 128.0 by their bits; and $4, less what they had.
_INT4 = gl.constexpr(
    """{
    .reg .b32 a, one;
    mov.b32 one, 0x3f803f80;
    shr.u32 a, $2, $3; lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 a, a, one, $4;
    mov.b32 {$0, $1}, a;
    }"""
)
# Of a pair's eight bits, two's complement, the low seven so, less 128.0, or 256.0 where the sign makes it that; and $4.
_INT8 = gl.constexpr(
    """{
    .reg .b32 a, b, one;
    mov.b32 one, 0x3f803f80; shr.u32 b, $2, $3;
    lop3.b32 a, b, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, b, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 a, a, one, $4;
    mov.b32 {$0, $1}, a;
    }"""
)
# A pair in place, $3 = 0, $4 = 0x87f087f0 and $5 = 0, or the one four bits off, $3 = 4, $4 = 0x80f080f0 and $5 =
# 0x07000700; times 2 ** 120.
_E4M3 = gl.constexpr(
    """{
    .reg .b32 a, b, up, nought;
    mov.b32 up, 0x7b807b80; mov.b32 nought, 0x80008000;
    shl.b32 a, $2, $3; shr.u32 b, $2, $3; and.b32 b, b, $5; lop3.b32 a, a, $4, b, 0xea;
    fma.rn.bf16x2 a, a, up, nought;
    mov.b32 {$0, $1}, a;
    }"""
)


def record(names: str):
    """A class of values that go from function to function as one; it is made of them in the order of their names."""

    def init(self, *values):
        for name, value in zip(names.split(), values, strict=True):
            setattr(self, name, value)

    init.__triton_builtin__ = True
    types = dict.fromkeys(names.split(), base_value)
    return _aggregate(type("_Record", (), {"__init__": init, "__annotations__": types}))


@gluon.jit
def barriers(STAGES: gl.constexpr):
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(found.index(i), count=1)
    return found


@gluon.constexpr_function
def columns_of(form):
    """Columns of the weights that lie side by side in shared memory, 128 bytes."""
    return COLUMNS_OF[str(form)]  # Triton's preload takes the text "int8" for its type of that name


@gluon.jit
def copy_weights(w, c):
    """Tile c of the weights into its stage, which also waits for that of the activations where both have as many. In
    shared memory a tile lies 128 bytes of its rows at a time, GATED the rows of the gate, then those of up."""
    HALVES: gl.constexpr = 2 if w.GATED else 1
    ROWS: gl.constexpr = w.BLOCK_N // HALVES
    PIECES: gl.constexpr = w.BLOCK_K // columns_of(w.FORM)
    SIDE: gl.constexpr = w.weight_desc.block_type.shape[1]
    X_ROWS: gl.constexpr = w.BLOCK_M if w.STAGES == w.X_STAGES else 0
    stage = c % w.STAGES
    if w.PERSISTENT:
        row, piece = (w.pid + c // w.n * gl.num_programs(0)) * ROWS, c % w.n * PIECES
    else:
        row, piece = w.pid % w.tiles * ROWS, (w.begin + c) * PIECES
    mbarrier.expect(w.w_full.index(stage), ROWS * HALVES * PIECES * 128 + X_ROWS * w.BLOCK_K * 2)
    parts = view(w.w_ring.index(stage), w.w_ring.dtype, [PIECES * HALVES, ROWS, SIDE], w.weight_desc.layout)
    for x in gl.static_range(PIECES):
        for half in gl.static_range(HALVES):
            place = [row + half * w.N, (piece + x) * SIDE]
            copy(w.weight_desc, place, w.w_full.index(stage), parts.index(x * HALVES + half))


@gluon.jit
def _copy_rows(w, c):
    """Tile c of the activations into its stage."""
    PIECES: gl.constexpr = w.BLOCK_K // COLUMNS
    stage = c % w.X_STAGES
    column = (c % w.n if w.PERSISTENT else w.begin + c) * w.BLOCK_K
    if w.STAGES != w.X_STAGES:
        mbarrier.expect(w.x_full.index(stage), w.BLOCK_M * w.BLOCK_K * 2)
    parts = view(w.x_ring.index(stage), w.x_ring.dtype, [PIECES, w.BLOCK_M, COLUMNS], w.x_desc.layout)
    for x in gl.static_range(PIECES):
        copy(w.x_desc, [0, column + x * COLUMNS], w.x_full.index(stage), parts.index(x))


@gluon.jit
def copy_first_rows(w):
    for c in gl.static_range(w.X_STAGES):
        if c < w.total:
            _copy_rows(w, c)


@gluon.jit
def copy_next(w, c):
    """The tiles that come into the places of tile c, if there are such."""
    if c + w.STAGES < w.total:
        copy_weights(w, c + w.STAGES)
    if c + w.X_STAGES < w.total:
        _copy_rows(w, c + w.X_STAGES)


@gluon.constexpr_function
def _rows_of(block_n, warps):
    """Registers and warps, as bases, of the rows of a tile: 16 of them a warp, as wgmma has them."""
    high = min(warps, block_n // 16)
    own = [16 << i for i in range(high.bit_length() - 1)] + [0] * ((warps // high).bit_length() - 1)
    return [8] + [16 * high << i for i in range((block_n // (16 * high)).bit_length() - 1)], own


@gluon.constexpr_function
def _words_layout(form, block_n, warps):
    """Of words [block_n, 32] as all lanes of a row load them; of e4m3 half of them, those that hold a lane's pairs."""
    rows, own = _rows_of(block_n, warps)
    lane = [[0, 0], [0, 0] if form == "int4" else [0, 1]]
    first = 0 if form == "int4" else 1
    regs = [[0, 1 << i] for i in range(first, 5)] + [[row, 0] for row in rows]
    lanes = [*lane, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[row, 0] for row in own], [], [block_n, 32])


@gluon.constexpr_function
def _pairs_layout(block_n, warps):
    """Of pairs [block_n, 8, 4]: the pieces of eight neighbours, and the lanes that have their pairs."""
    rows, own = _rows_of(block_n, warps)
    regs = [[0, 1 << i, 0] for i in range(3)] + [[row, 0, 0] for row in rows]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[row, 0, 0] for row in own], [], [block_n, 8, 4])


@gluon.constexpr_function
def _halves_layout(block_n, warps):
    """As `_pairs_layout`, a word's own pairs apart: [block_n, 8, 2, 2]."""
    rows, own = _rows_of(block_n, warps)
    regs = [[0, 1 << i, 0, 0] for i in range(3)] + [[row, 0, 0, 0] for row in rows]
    lanes = [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[row, 0, 0, 0] for row in own], [], [block_n, 8, 2, 2])


@gluon.jit
def _operand(low, high, BLOCK_N: gl.constexpr, A_L: gl.constexpr):
    """Pairs' numbers, as int16 [BLOCK_N, 4 lanes that had them, 2 parts of 32 columns, 4 pairs], as [BLOCK_N, 64]."""
    both = gl.join(low.to(gl.bfloat16, bitcast=True), high.to(gl.bfloat16, bitcast=True))
    both = gl.permute(gl.reshape(both, [BLOCK_N, 4, 2, 4, 2]), (0, 2, 1, 3, 4))
    return gl.convert_layout(gl.reshape(both, [BLOCK_N, 64]), A_L, assert_trivial=True)


@gluon.jit
def _of_four_bits(words, less, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """64 columns from words [BLOCK_N, 8]."""
    L: gl.constexpr = _pairs_layout(BLOCK_N, WARPS)
    WORDS_L: gl.constexpr = gl.SliceLayout(2, L)
    words = gl.convert_layout(words, WORDS_L, assert_trivial=True)[:, :, None]
    less = gl.convert_layout(less, gl.SliceLayout(1, WORDS_L), assert_trivial=True)[:, None][:, :, None]
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :][None, :, :] * 4
    nought = gl.zeros([BLOCK_N, 8, 4], gl.int32, L)
    words, place, less = gl.broadcast(words, nought)[0], gl.broadcast(place, nought)[0], gl.broadcast(less, nought)[0]
    low, high = gl.inline_asm_elementwise(
        _INT4, "=h,=h,r,r,r", [words, place, less], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return _operand(low, high, BLOCK_N, A_L)


@gluon.jit
def _of_eight_bits(words, less, FORM: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """64 columns from words [BLOCK_N, 8, 2]: of eight neighbours a lane has the word in which its pair is."""
    L: gl.constexpr = _halves_layout(BLOCK_N, WARPS)
    WORDS_L: gl.constexpr = gl.SliceLayout(3, L)
    words = gl.convert_layout(words, WORDS_L, assert_trivial=True)[:, :, :, None]
    nought = gl.zeros([BLOCK_N, 8, 2, 2], gl.int32, L)
    plane = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L))))
    plane = gl.broadcast(plane[None, :][None, :, :][None, :, :, :], nought)[0]
    words = gl.broadcast(words, nought)[0]
    if FORM == "e4m3":
        mask, other = plane * -0x07000700 - 0x780F7810, plane * 0x07000700
        low, high = gl.inline_asm_elementwise(
            _E4M3, "=h,=h,r,r,r,r", [words, plane * 4, mask, other], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
    else:
        less = gl.convert_layout(less, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_L)), assert_trivial=True)
        less = gl.broadcast(less[:, None][:, :, None][:, :, :, None], nought)[0]
        low, high = gl.inline_asm_elementwise(
            _INT8, "=h,=h,r,r,r", [words, plane * 8, less], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
    return _operand(low, high, BLOCK_N, A_L)


@gluon.jit
def _numbers(piece, less, FORM: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """Weights in bf16, a tuple of operands [BLOCK_N, 64]: of a piece [BLOCK_N, 32] int32 in shared memory; less: of
    each operand, see `_less`."""
    words = piece.load(_words_layout(FORM, BLOCK_N, WARPS))
    if FORM == "int4":
        words = gl.reshape(words, [BLOCK_N, 2, 4, 2, 2])  # tile, lane, half of the tile, part of it
        words = gl.reshape(gl.permute(words, (0, 2, 4, 1, 3)), [BLOCK_N, 8, 2, 2])
        even, odd = gl.split(words)  # by the halves
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        return (
            _of_four_bits(first, less[0], BLOCK_N, WARPS, A_L),
            _of_four_bits(second, less[1], BLOCK_N, WARPS, A_L),
            _of_four_bits(third, less[2], BLOCK_N, WARPS, A_L),
            _of_four_bits(fourth, less[3], BLOCK_N, WARPS, A_L),
        )
    else:
        words = gl.reshape(words, [BLOCK_N, 2, 8, 2])  # tile, eight neighbours, word of theirs
        first, second = gl.split(gl.permute(words, (0, 2, 3, 1)))
        return (
            _of_eight_bits(first, less[0], FORM, BLOCK_N, WARPS, A_L),
            _of_eight_bits(second, less[1], FORM, BLOCK_N, WARPS, A_L),
        )


@gluon.jit
def _rows_and_groups(w, tile, L: gl.constexpr):
    """The rows [BLOCK_N] of a tile in the matrix, and the groups of its columns."""
    OUT_N: gl.constexpr = w.BLOCK_N // 2 if w.GATED else w.BLOCK_N
    in_tile = gl.arange(0, w.BLOCK_N, L)
    row = gl.minimum(tile * OUT_N + in_tile % OUT_N, w.N - 1) + in_tile // OUT_N * w.N
    return row, w.K // w.GROUP if w.GROUP > 0 else 1


@gluon.jit
def _scale_of(w, tile, group, L: gl.constexpr):
    """What scales a group of the rows of a tile, fp32 [BLOCK_N]."""
    row, groups = _rows_and_groups(w, tile, L)
    return gl.load(w.scale_ptr + row // w.SCALE_ROWS * groups + gl.minimum(group, groups - 1)).to(gl.float32)


@gluon.jit
def _less_of(w, tile, group, L: gl.constexpr):
    """What the numbers of a group are less than those that their bits make, negated: of both halves of a word, int32
    [BLOCK_N]."""
    row, groups = _rows_and_groups(w, tile, L)
    zero = gl.load(w.zero_ptr + row * groups + gl.minimum(group, groups - 1)).to(gl.float32)
    less = -128.0 - 64.0 * zero if w.FORM == "int4" else -zero  # as packed.py has it
    bits = less.to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return bits | bits << 16


@gluon.jit
def _of_groups(w, tile, c, OF: gl.constexpr, L: gl.constexpr):
    """`OF` of all groups of tile c of the weights, or of all columns."""
    found = ()
    for group in gl.static_range(w.BLOCK_K // w.GROUP if w.GROUP > 0 else 1):
        found += (OF(w, tile, c * (w.BLOCK_K // w.GROUP) + group if w.GROUP > 0 else 0, L),)
    return found


@gluon.jit
def _less(w, zeros, first, L: gl.constexpr):
    """A tuple, of each operand of a piece that begins with operand `first` of its tile; zeros: as `_less_of` has them,
    of groups."""
    OF_GROUP: gl.constexpr = max(w.GROUP // COLUMNS, 1)
    found = ()
    for j in gl.static_range(columns_of(w.FORM) // COLUMNS):
        if w.ZEROS:
            found += (zeros[(first + j) // OF_GROUP if w.GROUP > 0 else 0],)
        else:  # 136.0, or nothing
            found += (gl.full([w.BLOCK_N], -0x3CF73CF8 if w.FORM == "int4" else -0x7FFF8000, gl.int32, L),)
    return found


@gluon.jit
def packed_sums(w, tile, first, ACC_L: gl.constexpr):
    """As `_sums`, of weights in fewer bits: they become numbers in registers, and the products of a group of columns
    are scaled before they are added."""
    A_L: gl.constexpr = gl.DotOperandLayout(0, ACC_L, 2)
    ROWS_L: gl.constexpr = gl.SliceLayout(1, ACC_L)
    PIECES: gl.constexpr = w.BLOCK_K // columns_of(w.FORM)
    OF_PIECE: gl.constexpr = columns_of(w.FORM) // COLUMNS
    GROUPED: gl.constexpr = w.GROUP > 0
    OF_GROUP: gl.constexpr = max(w.GROUP // COLUMNS, 1)
    acc = gl.zeros([w.BLOCK_N, w.BLOCK_M], gl.float32, ACC_L)
    scales = _of_groups(w, tile, w.begin, _scale_of, ROWS_L)
    zeros = _of_groups(w, tile, w.begin, _less_of, ROWS_L) if w.ZEROS else scales
    for c in range(first, first + w.n):
        stage, x_stage = c % w.STAGES, c % w.X_STAGES
        next_scales, next_zeros = scales, zeros
        if GROUPED:  # on their way while this tile is multiplied
            next_scales = _of_groups(w, tile, w.begin + c - first + 1, _scale_of, ROWS_L)
            next_zeros = _of_groups(w, tile, w.begin + c - first + 1, _less_of, ROWS_L) if w.ZEROS else next_scales
        mbarrier.wait(w.w_full.index(stage), c // w.STAGES & 1)
        if w.STAGES != w.X_STAGES:
            mbarrier.wait(w.x_full.index(x_stage), c // w.X_STAGES & 1)
        pieces = view(w.w_ring.index(stage), gl.int32, [PIECES, w.BLOCK_N, 32], w.weight_desc.layout)
        xs = view(w.x_ring.index(x_stage), w.x_ring.dtype, [PIECES * OF_PIECE, w.BLOCK_M, COLUMNS], w.x_desc.layout)
        for i in gl.static_range(PIECES):
            less = _less(w, zeros, i * OF_PIECE, ROWS_L)
            of_piece = _numbers(pieces.index(i), less, w.FORM, w.BLOCK_N, w.WARPS, A_L)
            for j in gl.static_range(OF_PIECE):
                x = xs.index(i * OF_PIECE + j).permute((1, 0))
                if GROUPED:
                    if j % OF_GROUP == 0:
                        of_group = gl.zeros([w.BLOCK_N, w.BLOCK_M], gl.float32, ACC_L)
                    of_group = warpgroup_mma(of_piece[j], x, of_group, use_acc=j % OF_GROUP > 0, is_async=True)
                    if (j + 1) % OF_GROUP == 0:
                        of_group = warpgroup_mma_wait(0, deps=[of_group])
                        acc += of_group * scales[(i * OF_PIECE + j) // OF_GROUP][:, None]
                else:
                    acc = warpgroup_mma(of_piece[j], x, acc, is_async=True)
        if not GROUPED:
            acc = warpgroup_mma_wait(0, deps=[acc])
        if w.COPIER:
            mbarrier.arrive(w.free.index(stage), count=1)
        else:
            barrier()
            copy_next(w, c)
        scales, zeros = next_scales, next_zeros
    return acc if GROUPED else acc * scales[0][:, None]
