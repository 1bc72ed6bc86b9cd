"""Packed tensors as the operand of wgmma that is in registers.

A lane needs two adjacent columns of either half of each 16 columns, for two rows. In memory (packed.py) eight adjacent
columns are one word of four bits, or two words of eight bits. All four lanes of a row load the words of the row, and
each extracts its own pair. The activations, which TMA copies, stay in their order.

Weights whose groups are small are scaled and rounded to bf16 here (`unpack_scaled`). The sums of such groups would take
more instructions and registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

COLUMNS = gl.constexpr(64)  # Number of activations that are adjacent in shared memory: 128 bytes.
# Number of columns of a weight in 128 bytes, or in 192 bytes of six bits.
COLUMNS_OF = {"dense": 64, "e4m3": 128, "int8": 128, "int4": 256, "int6": 256}

# Moves the four bits of a pair to the low bits of both halves, as the mantissa of 128.0. Adds $4.
_INT4 = gl.constexpr(
    """{
    .reg .b32 a, one;
    mov.b32 one, 0x3f803f80;
    shr.u32 a, $2, $3; lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 a, a, one, $4;
    mov.b32 {$0, $1}, a;
    }"""
)
# Two's complement: the low seven bits of a pair become the mantissa of 128.0. Subtracts 128.0, or 256.0 if the sign
# bit is set. Adds $4.
_INT8 = gl.constexpr(
    """{
    .reg .b32 a, b, one;
    mov.b32 one, 0x3f803f80; shr.u32 b, $2, $3;
    lop3.b32 a, b, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, b, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 a, a, one, $4;
    mov.b32 {$0, $1}, a;
    }"""
)
# Takes the pair that is in place ($3 = 0, $4 = 0x87f087f0, $5 = 0), or the pair that is shifted by four bits
# ($3 = 4, $4 = 0x80f080f0, $5 = 0x07000700), times 2 ** 120.
_E4M3 = gl.constexpr(
    """{
    .reg .b32 a, b, up, minus_zero;
    mov.b32 up, 0x7b807b80; mov.b32 minus_zero, 0x80008000;
    shl.b32 a, $2, $3; shr.u32 b, $2, $3; and.b32 b, b, $5; lop3.b32 a, a, $4, b, 0xea;
    fma.rn.bf16x2 a, a, up, minus_zero;
    mov.b32 {$0, $1}, a;
    }"""
)


# The numbers of a pair, bf16 in `a`, times the scale, plus an offset: rounded once to bf16.
_SCALED = """
    .reg .b32 l, h; .reg .f32 low, high;
    shl.b32 l, a, 16; and.b32 h, a, 0xffff0000; mov.b32 low, l; mov.b32 high, h;
    fma.rn.f32 low, low, %s, %s; fma.rn.f32 high, high, %s, %s; cvt.rn.bf16x2.f32 a, high, low;
    mov.b32 {$0, $1}, a;
    }"""
# Adds 128 to the numbers.
_INT4_SCALED = gl.constexpr(
    """{
    .reg .b32 a;
    shr.u32 a, $2, $3; lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea;"""
    + _SCALED % ("$4", "$5", "$4", "$5")
)
# $4 has the high two bits of the first pair at bits 4 and 5, and those of the other pairs above them. Adds 128 to the
# numbers.
_INT6_SCALED = gl.constexpr(
    """{
    .reg .b32 a, b, p;
    shr.u32 p, $3, 1; shr.u32 b, $4, p; lop3.b32 b, b, 0x00300030, 0x43004300, 0xea;
    shr.u32 a, $2, $3; lop3.b32 a, a, 0x000f000f, b, 0xea;"""
    + _SCALED % ("$5", "$6", "$5", "$6")
)
_INT8_SCALED = gl.constexpr(
    """{
    .reg .b32 a, b, one;
    mov.b32 one, 0x3f803f80; shr.u32 b, $2, $3;
    lop3.b32 a, b, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, b, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b;"""
    + _SCALED % ("$4", "$5", "$4", "$5")
)


@gluon.constexpr_function
def columns_of(form):
    """Return the number of columns of a weight in the boxes that are unpacked together."""
    return COLUMNS_OF[str(form)]  # Triton's preload would read the text "int8" as its type of that name.


@gluon.constexpr_function
def _rows_of(block_n, warps):
    """Return the bases of registers and of warps for the rows of a tile: 16 rows for each warp, as wgmma requires."""
    high = min(warps, block_n // 16)
    own = [16 << i for i in range(high.bit_length() - 1)] + [0] * ((warps // high).bit_length() - 1)
    return [8] + [16 * high << i for i in range((block_n // (16 * high)).bit_length() - 1)], own


@gluon.constexpr_function
def boxes_of(form):
    """Return the number of boxes that are unpacked together, and the bytes of a row in each."""
    return (3, 64) if str(form) == "int6" else (1, 128)


@gluon.constexpr_function
def zero_of(form, minimums):
    """Return what is subtracted from the numbers before they are scaled; see _INT4_SCALED."""
    return {"int4": 128 if minimums else 136, "int6": 160}.get(str(form), 0)


@gluon.constexpr_function
def _words_layout(form, block_n, warps):
    """Return the layout of words [block_n, 32], or [block_n, 16] of six bits.

    Each lane of a row has all words of four or six bits. With eight bits it has only the words that contain its pairs.
    """
    rows, own = _rows_of(block_n, warps)
    all_words, words = str(form) in ("int4", "int6"), 16 if str(form) == "int6" else 32
    lane = [[0, 0], [0, 0] if all_words else [0, 1]]
    first = 0 if all_words else 1
    regs = [[0, 1 << i] for i in range(first, words.bit_length() - 1)] + [[row, 0] for row in rows]
    lanes = [*lane, [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[row, 0] for row in own], [], [block_n, words])


@gluon.constexpr_function
def _pairs_layout(block_n, warps):
    """Return the layout of pairs [block_n, 8, 4]: groups of eight adjacent columns, and the lanes of their pairs."""
    rows, own = _rows_of(block_n, warps)
    regs = [[0, 1 << i, 0] for i in range(3)] + [[row, 0, 0] for row in rows]
    lanes = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[row, 0, 0] for row in own], [], [block_n, 8, 4])


@gluon.constexpr_function
def _halves_layout(block_n, warps):
    """Return `_pairs_layout` with the two pairs of a word as the last dimension: [block_n, 8, 2, 2]."""
    rows, own = _rows_of(block_n, warps)
    regs = [[0, 1 << i, 0, 0] for i in range(3)] + [[row, 0, 0, 0] for row in rows]
    lanes = [[0, 0, 0, 1], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [[row, 0, 0, 0] for row in own], [], [block_n, 8, 2, 2])


@gluon.jit
def _operand(low, high, BLOCK_N: gl.constexpr, A_L: gl.constexpr):
    """Join the numbers of pairs, int16 [BLOCK_N, 4 source lanes, 2 parts of 32 columns, 4 pairs]."""
    both = gl.join(low.to(gl.bfloat16, bitcast=True), high.to(gl.bfloat16, bitcast=True))
    both = gl.permute(gl.reshape(both, [BLOCK_N, 4, 2, 4, 2]), (0, 2, 1, 3, 4))
    return gl.convert_layout(gl.reshape(both, [BLOCK_N, 64]), A_L, assert_trivial=True)


@gluon.jit
def _unpack_four(words, offset, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """Unpack 64 columns from words [BLOCK_N, 8]."""
    L: gl.constexpr = _pairs_layout(BLOCK_N, WARPS)
    WORDS_L: gl.constexpr = gl.SliceLayout(2, L)
    words = gl.convert_layout(words, WORDS_L, assert_trivial=True)[:, :, None]
    offset = gl.convert_layout(offset, gl.SliceLayout(1, WORDS_L), assert_trivial=True)[:, None][:, :, None]
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :][None, :, :] * 4
    like = gl.zeros([BLOCK_N, 8, 4], gl.int32, L)
    words, place, offset = gl.broadcast(words, like)[0], gl.broadcast(place, like)[0], gl.broadcast(offset, like)[0]
    low, high = gl.inline_asm_elementwise(
        _INT4, "=h,=h,r,r,r", [words, place, offset], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return _operand(low, high, BLOCK_N, A_L)


@gluon.jit
def _unpack_eight(words, offset, FORM: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """Unpack 64 columns from words [BLOCK_N, 8, 2]. A lane has the word with its pair of each eight columns."""
    L: gl.constexpr = _halves_layout(BLOCK_N, WARPS)
    WORDS_L: gl.constexpr = gl.SliceLayout(3, L)
    words = gl.convert_layout(words, WORDS_L, assert_trivial=True)[:, :, :, None]
    like = gl.zeros([BLOCK_N, 8, 2, 2], gl.int32, L)
    plane = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L))))
    plane = gl.broadcast(plane[None, :][None, :, :][None, :, :, :], like)[0]
    words = gl.broadcast(words, like)[0]
    if FORM == "e4m3":
        mask, other = plane * -0x07000700 - 0x780F7810, plane * 0x07000700
        low, high = gl.inline_asm_elementwise(
            _E4M3, "=h,=h,r,r,r,r", [words, plane * 4, mask, other], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
    else:
        offset = gl.convert_layout(offset, gl.SliceLayout(1, gl.SliceLayout(2, WORDS_L)), assert_trivial=True)
        offset = gl.broadcast(offset[:, None][:, :, None][:, :, :, None], like)[0]
        low, high = gl.inline_asm_elementwise(
            _INT8, "=h,=h,r,r,r", [words, plane * 8, offset], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
    return _operand(low, high, BLOCK_N, A_L)


@gluon.jit
def _selected(numbers, LIKE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return the number of each group of eight columns of an operand, [BLOCK_N, 8] in the layout LIKE.

    Args:
        numbers: fp32 [BLOCK_N] for each group of 16 or 32 columns of 64.
    """
    like = gl.zeros([BLOCK_N, 8], gl.float32, LIKE)
    eight = gl.broadcast(gl.arange(0, 8, gl.SliceLayout(0, LIKE))[None, :], like)[0]  # lane * 2 + part of 32 columns
    if len(numbers) == 2:
        first, second = _along_columns(numbers[0], like), _along_columns(numbers[1], like)
    else:
        first = gl.where(eight < 4, _along_columns(numbers[0], like), _along_columns(numbers[1], like))
        second = gl.where(eight < 4, _along_columns(numbers[2], like), _along_columns(numbers[3], like))
    return gl.where(eight % 2 == 0, first, second)


@gluon.jit
def _along_columns(number, like):
    """Repeat a number of each row along the columns of `like`."""
    number = gl.convert_layout(number, gl.SliceLayout(1, like.type.layout), assert_trivial=True)
    return gl.broadcast(number[:, None], like)[0]


@gluon.jit
def _scale_pairs(
    words, high, scales, lows, FORM: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr
):
    """Unpack and scale 64 columns from words [BLOCK_N, 8], for six bits with their high bits [BLOCK_N, 8]."""
    L: gl.constexpr = _pairs_layout(BLOCK_N, WARPS)
    WORDS_L: gl.constexpr = gl.SliceLayout(2, L)
    like = gl.zeros([BLOCK_N, 8, 4], gl.int32, L)
    place = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, L)))[None, :][None, :, :] * 4
    place = gl.broadcast(place, like)[0]
    words = gl.broadcast(gl.convert_layout(words, WORDS_L, assert_trivial=True)[:, :, None], like)[0]
    scale = gl.broadcast(_selected(scales, WORDS_L, BLOCK_N)[:, :, None], like)[0]
    low = gl.broadcast(_selected(lows, WORDS_L, BLOCK_N)[:, :, None], like)[0]
    if FORM == "int6":
        high = gl.broadcast(gl.convert_layout(high, WORDS_L, assert_trivial=True)[:, :, None], like)[0]
        even, odd = gl.inline_asm_elementwise(
            _INT6_SCALED, "=h,=h,r,r,r,f,f", [words, place, high, scale, low], dtype=(gl.int16, gl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even, odd = gl.inline_asm_elementwise(
            _INT4_SCALED, "=h,=h,r,r,f,f", [words, place, scale, low], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
        )
    return _operand(even, odd, BLOCK_N, A_L)


@gluon.jit
def _scale_eight(words, scales, lows, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """Unpack and scale 64 columns from words [BLOCK_N, 8, 2] of eight bits."""
    L: gl.constexpr = _halves_layout(BLOCK_N, WARPS)
    WORDS_L: gl.constexpr = gl.SliceLayout(3, L)
    EIGHT_L: gl.constexpr = gl.SliceLayout(2, WORDS_L)
    like = gl.zeros([BLOCK_N, 8, 2, 2], gl.int32, L)
    plane = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(0, L))))
    plane = gl.broadcast(plane[None, :][None, :, :][None, :, :, :], like)[0]
    words = gl.broadcast(gl.convert_layout(words, WORDS_L, assert_trivial=True)[:, :, :, None], like)[0]
    scale = gl.broadcast(_selected(scales, EIGHT_L, BLOCK_N)[:, :, None][:, :, :, None], like)[0]
    low = gl.broadcast(_selected(lows, EIGHT_L, BLOCK_N)[:, :, None][:, :, :, None], like)[0]
    even, odd = gl.inline_asm_elementwise(
        _INT8_SCALED, "=h,=h,r,r,f,f", [words, plane * 8, scale, low], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    return _operand(even, odd, BLOCK_N, A_L)


@gluon.jit
def _four_words(words, BLOCK_N: gl.constexpr):
    """Return the words [BLOCK_N, 8] of four operands from 128 bytes of four bits, [BLOCK_N, 32]."""
    words = gl.reshape(words, [BLOCK_N, 2, 4, 2, 2])  # Dimensions: tile, lane, half of the tile, part of the half.
    return _split_twice(gl.permute(words, (0, 2, 4, 1, 3)), BLOCK_N)


@gluon.jit
def _split_twice(words, BLOCK_N: gl.constexpr):
    """Split words [BLOCK_N, lane, part, tile, half of the tile] by the tile and its half. Return four [BLOCK_N, 8]."""
    even, odd = gl.split(gl.reshape(words, [BLOCK_N, 8, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _two_words(words, BLOCK_N: gl.constexpr):
    """Return the words [BLOCK_N, 8] of two operands from 64 bytes of four bits, [BLOCK_N, 16]."""
    words = gl.permute(gl.reshape(words, [BLOCK_N, 4, 2, 2]), (0, 1, 3, 2))  # Dimensions: lane, part, half of the tile.
    return gl.split(gl.reshape(words, [BLOCK_N, 8, 2]))


@gluon.jit
def _high_words(words, BLOCK_N: gl.constexpr):
    """Return words [BLOCK_N, 8] with the high two bits of four operands, from 64 bytes of six bits, [BLOCK_N, 16]."""
    both = gl.join(words << 4, words >> 4)  # The bits of the first and of the second part of 32 columns.
    both = gl.reshape(both, [BLOCK_N, 4, 2, 2, 2])  # Dimensions: lane, tile, half of the tile, part of the half.
    return _split_twice(gl.permute(both, (0, 1, 4, 2, 3)), BLOCK_N)


@gluon.jit
def unpack_scaled(
    boxes, scales, lows, FORM: gl.constexpr, GROUP: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr,
    A_L: gl.constexpr,
):  # fmt: skip
    """Unpack and scale the weights of boxes to bf16: a tuple of operands [BLOCK_N, 64].

    Args:
        boxes: `boxes_of` the form, [BLOCK_N, 32] or [BLOCK_N, 16] int32 in shared memory.
        scales: fp32 [BLOCK_N] for each group of columns.
        lows: fp32 [BLOCK_N] for each group, added after the multiplication. They undo what the form adds (`zero_of`).
    """
    EACH: gl.constexpr = 64 // GROUP
    W_L: gl.constexpr = _words_layout(FORM, BLOCK_N, WARPS)
    if FORM == "int6" or FORM == "int4":
        if FORM == "int6":
            first, second = _two_words(boxes[0].load(W_L), BLOCK_N)
            third, fourth = _two_words(boxes[1].load(W_L), BLOCK_N)
            words, highs = (first, second, third, fourth), _high_words(boxes[2].load(W_L), BLOCK_N)
        else:
            words = _four_words(boxes[0].load(W_L), BLOCK_N)
            highs = words
        return (
            _scale_pairs(words[0], highs[0], scales[:EACH], lows[:EACH], FORM, BLOCK_N, WARPS, A_L),
            _scale_pairs(words[1], highs[1], scales[EACH : 2 * EACH], lows[EACH : 2 * EACH], FORM, BLOCK_N, WARPS, A_L),
            _scale_pairs(
                words[2], highs[2], scales[2 * EACH : 3 * EACH], lows[2 * EACH : 3 * EACH], FORM, BLOCK_N, WARPS, A_L
            ),
            _scale_pairs(words[3], highs[3], scales[3 * EACH :], lows[3 * EACH :], FORM, BLOCK_N, WARPS, A_L),
        )
    else:
        words = gl.reshape(boxes[0].load(W_L), [BLOCK_N, 2, 8, 2])
        first, second = gl.split(gl.permute(words, (0, 2, 3, 1)))
        return (
            _scale_eight(first, scales[:EACH], lows[:EACH], BLOCK_N, WARPS, A_L),
            _scale_eight(second, scales[EACH:], lows[EACH:], BLOCK_N, WARPS, A_L),
        )


@gluon.jit
def unpack(part, offsets, FORM: gl.constexpr, BLOCK_N: gl.constexpr, WARPS: gl.constexpr, A_L: gl.constexpr):
    """Unpack 128 bytes of the rows of a weight to bf16: a tuple of operands [BLOCK_N, 64].

    Args:
        part: [BLOCK_N, 32] int32 in shared memory.
        offsets: Added to the numbers of each operand, except e4m3: two bf16 in an int32 [BLOCK_N].
    """
    words = part.load(_words_layout(FORM, BLOCK_N, WARPS))
    if FORM == "int4":
        first, second, third, fourth = _four_words(words, BLOCK_N)
        return (
            _unpack_four(first, offsets[0], BLOCK_N, WARPS, A_L),
            _unpack_four(second, offsets[1], BLOCK_N, WARPS, A_L),
            _unpack_four(third, offsets[2], BLOCK_N, WARPS, A_L),
            _unpack_four(fourth, offsets[3], BLOCK_N, WARPS, A_L),
        )
    else:
        words = gl.reshape(words, [BLOCK_N, 2, 8, 2])  # Dimensions: tile, group of eight columns, word of the group.
        first, second = gl.split(gl.permute(words, (0, 2, 3, 1)))
        return (
            _unpack_eight(first, offsets[0], FORM, BLOCK_N, WARPS, A_L),
            _unpack_eight(second, offsets[1], FORM, BLOCK_N, WARPS, A_L),
        )
