"""Unpacking of weights in registers, from words of 32 bits to pairs of bf16 for the tensor cores.

One instruction unpacks two numbers, which are at the same bits of both halves of a word (packed.py).

Four bits: a bf16 whose high byte is 0 equals its low byte times 2 ** -133. (The highest bit of that byte is the lowest
bit of the exponent, which then counts like a bit of the mantissa.) So one `and` makes a number from either half of a
byte. One `fma` scales it and subtracts the zero point exactly. If many rows of the weight use the same activations, the
number stays small and keeps its zero point. Instead, the activations are scaled up (`raised`), and their products with
the zero points are computed once (`zero_operand`).

e4m3: if exponent and mantissa are moved to their bits in bf16, they represent a number that is too small by the factor
2 ** 120. The activations are multiplied by 2 ** 64, and the sum by the remaining factor.

The interpreter has no assembly. It computes the same numbers by arithmetic.
"""

import triton
import triton.language as tl

_RAISED = 64
# Takes v & 15 and v & 240 of both halves, also shifted by 8, times 2 ** 127 and 2 ** 123. Subtracts $9. The first
# output is columns 0 and 1.
_INT4 = tl.constexpr(
    """{
    .reg .b32 w, a, z, up, less;
    mov.b32 up, 0x7f007f00; mov.b32 less, 0x7d007d00; xor.b32 z, $9, 0x80008000; shr.u32 w, $8, 8;
    and.b32 a, $8, 0x000f000f; fma.rn.bf16x2 a, a, up, z; mov.b32 {$0, $1}, a;
    and.b32 a, $8, 0x00f000f0; fma.rn.bf16x2 a, a, less, z; mov.b32 {$2, $3}, a;
    and.b32 a, w, 0x000f000f; fma.rn.bf16x2 a, a, up, z; mov.b32 {$4, $5}, a;
    and.b32 a, w, 0x00f000f0; fma.rn.bf16x2 a, a, less, z; mov.b32 {$6, $7}, a;
    }"""
)
# Six bits: the low four bits of eight columns in $8, and the high two bits in the low bytes of both halves of $9. They
# become the mantissa of 128.0. Subtracts 160.0, since the zero point is 32.
_INT6 = tl.constexpr(
    """{
    .reg .b32 a, h, one, less;
    mov.b32 one, 0x3f803f80; mov.b32 less, 0xc320c320;
    shl.b32 h, $9, 4; lop3.b32 h, h, 0x00300030, 0x43004300, 0xea;
    lop3.b32 a, $8, 0x000f000f, h, 0xea; fma.rn.bf16x2 a, a, one, less; mov.b32 {$0, $1}, a;
    shl.b32 h, $9, 2; lop3.b32 h, h, 0x00300030, 0x43004300, 0xea; shr.u32 a, $8, 4;
    lop3.b32 a, a, 0x000f000f, h, 0xea; fma.rn.bf16x2 a, a, one, less; mov.b32 {$2, $3}, a;
    lop3.b32 h, $9, 0x00300030, 0x43004300, 0xea; shr.u32 a, $8, 8;
    lop3.b32 a, a, 0x000f000f, h, 0xea; fma.rn.bf16x2 a, a, one, less; mov.b32 {$4, $5}, a;
    shr.u32 h, $9, 2; lop3.b32 h, h, 0x00300030, 0x43004300, 0xea; shr.u32 a, $8, 12;
    lop3.b32 a, a, 0x000f000f, h, 0xea; fma.rn.bf16x2 a, a, one, less; mov.b32 {$6, $7}, a;
    }"""
)
# Two's complement: the low seven bits become the mantissa of 128.0. Subtracts 128.0, or 256.0 if the sign bit is set.
_INT8 = tl.constexpr(
    """{
    .reg .b32 w1, a, b, one;
    mov.b32 one, 0x3f803f80; shr.u32 w1, $4, 8;
    lop3.b32 a, $4, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, $4, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b; mov.b32 {$0, $1}, a;
    lop3.b32 a, w1, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, w1, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b; mov.b32 {$2, $3}, a;
    }"""
)
# Like _INT8, but subtracts $5 in addition.
_INT8_ZERO = tl.constexpr(
    """{
    .reg .b32 w1, a, b, z, one;
    mov.b32 one, 0x3f803f80; xor.b32 z, $5, 0x80008000;
    shr.u32 w1, $4, 8;
    lop3.b32 a, $4, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, $4, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 a, a, one, z; mov.b32 {$0, $1}, a;
    lop3.b32 a, w1, 0x007f007f, 0x43004300, 0xea; lop3.b32 b, w1, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 a, a, one, b; fma.rn.bf16x2 a, a, one, z; mov.b32 {$2, $3}, a;
    }"""
)
# One pair is already in place. The bits of the other pair are shifted by four, some to the left and some to the right.
_E4M3 = tl.constexpr(
    """{
    .reg .b32 a, t, u;
    and.b32 a, $4, 0x87f087f0; mov.b32 {$0, $1}, a;
    shl.b32 t, $4, 4; and.b32 t, t, 0x80f080f0; shr.u32 u, $4, 4; lop3.b32 a, u, 0x07000700, t, 0xea;
    mov.b32 {$2, $3}, a;
    }"""
)
# The same as _INT4 without its multiplication at the end. Therefore the results are scaled: those of the low four bits
# of a byte by 2 ** -133, and those of the high four bits by 2 ** -129.
_INT4_RAISED = tl.constexpr(
    """{
    .reg .b32 w, a; shr.u32 w, $8, 8;
    and.b32 a, $8, 0x000f000f; mov.b32 {$0, $1}, a; and.b32 a, $8, 0x00f000f0; mov.b32 {$2, $3}, a;
    and.b32 a, w, 0x000f000f; mov.b32 {$4, $5}, a; and.b32 a, w, 0x00f000f0; mov.b32 {$6, $7}, a;
    }"""
)
_TIMES = """{
    .reg .b32 up, minus_zero;
    mov.b32 up, %s; mov.b32 minus_zero, 0x80008000;
    fma.rn.bf16x2 $0, $1, up, minus_zero;
    }"""
_TIMES_2_64, _TIMES_2_60 = tl.constexpr(_TIMES % "0x5f805f80"), tl.constexpr(_TIMES % "0x5d805d80")
_TIMES_2_120 = tl.constexpr(_TIMES % "0x7b807b80")
_EVERY_4_RAISED = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r")
_EVERY_4 = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_EVERY_8 = tl.constexpr("=h,=h,=h,=h,r")
_EVERY_8_ZERO = tl.constexpr("=h,=h,=h,=h,r,r")


@triton.jit
def pair(zero):
    """Return the bits of a bf16 (as int16) in both halves of a word."""
    bits = zero.to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.constexpr_function
def factor(form: str, raised: bool = False) -> float:
    """Return the factor that unpacked weights, or their products with `raised` activations, must be multiplied by."""
    if raised:
        return 2.0 ** ({"int4": 133, "e4m3": 120}.get(form, _RAISED) - _RAISED)
    return 2.0 ** {"int4": 6, "e4m3": 120}.get(form, 0)


@triton.jit
def raised(x, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Scale activations [lines, 32], bf16, for weights of a form that `unpack` leaves too small."""
    if FORM == "e4m3":
        if INTERPRETED:
            return x.to(tl.float32) * 2.0**64
        else:
            return _times(x, _TIMES_2_64)
    elif FORM == "int4" and not INTERPRETED:
        return joined_pairs(raised_pairs(x, FORM, INTERPRETED))
    else:
        return x


@triton.jit
def raised_pairs(x, FORM: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return the activations of `raised`, for other forms than e4m3, as two tiles [lines, 8, 2] for `joined_pairs`."""
    low, high = tl.split(tl.permute(x.reshape(x.shape[0], 8, 2, 2), (0, 1, 3, 2)))
    if FORM == "int4" and not INTERPRETED:
        low, high = _times(low, _TIMES_2_64), _times(high, _TIMES_2_60)
    return (low, high)


@triton.jit
def joined_pairs(pairs):
    """Return [lines, 32] of two tiles, whose pairs of columns alternate."""
    return tl.permute(tl.join(pairs[0], pairs[1]), (0, 1, 3, 2)).reshape(pairs[0].shape[0], 32)


@triton.jit
def masked_pairs(pairs, keep, INTERPRETED: tl.constexpr):
    """Return pairs in which only the lines are not zero for which `keep`, [lines, 1, 1], is true."""
    return (_masked(pairs[0], keep, INTERPRETED), _masked(pairs[1], keep, INTERPRETED))


@triton.jit
def _masked(x, keep, INTERPRETED: tl.constexpr):
    """Return x, or zeros where `keep` is false."""
    if INTERPRETED:
        return tl.where(keep, x, 0.0)
    else:  # The compiler would select each number alone.
        mask = tl.broadcast_to(tl.where(keep, -1, 0), x.shape)
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r,r", [x, mask], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def raised_weights(tile, INTERPRETED: tl.constexpr):
    """Multiply unpacked e4m3 weights, bf16, by `factor("e4m3")`. The result is exact."""
    if INTERPRETED:
        return tile * 2.0**120
    else:
        return _times(tile, _TIMES_2_120)


@triton.jit
def _times(x, ASM: tl.constexpr):
    """Multiply pairs of bf16 by the constant of ASM."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def half_of(x, half: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return activations [lines, 32], bf16, in which only the columns half * 16 to half * 16 + 15 are not zero."""
    inside = tl.broadcast_to(tl.arange(0, 32)[None, :] // 16 == half, x.shape)
    if INTERPRETED:
        return tl.where(inside, x, 0.0)
    else:  # The compiler would select each number alone.
        mask = tl.where(inside, -1, 0).to(tl.int16)
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [x, mask], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def zero_operand(ZEROS: tl.constexpr, WARPS: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return an operand [WARPS, BLOCK_N, 32] of weights of four bits that are all -8, or -1 if ZEROS.

    Its products (with zero points, if ZEROS) complete the sums of RAISED weights.
    """
    if INTERPRETED:
        return tl.full([WARPS, BLOCK_N, 32], (-1.0 if ZEROS else -8.0) * 2.0**-69, tl.float32)
    else:
        one: tl.constexpr = 1 if ZEROS else 8
        # The columns have the order of `operand`.
        bits = tl.where(tl.arange(0, 32)[None, None, :] < 16, -32768 + one, -32768 + one * 16)
        return _bf16(tl.broadcast_to(bits, (WARPS, BLOCK_N, 32)).to(tl.int16))


@triton.jit
def zero_point(bits):
    """Return the zero point of four bits, from the bits of a bf16 (as int16) that packed.py stores."""
    return bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 64


@triton.jit
def unpack(
    words,
    zero,
    part: tl.constexpr,
    FORM: tl.constexpr,
    ZEROS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    RAISED: tl.constexpr = False,
):
    """Unpack columns part * 32 to part * 32 + 31 of tiles to [lines, 32] bf16 (fp32 if INTERPRETED).

    No data moves between lanes. The caller multiplies the result by `factor(FORM)` or, if RAISED, by `raised`
    activations. RAISED weights of four bits still contain their zero points.

    Args:
        words: the tiles as a tuple of [lines, 16] int32: three for codes of six bits, else one.
        zero: [lines, 1] int32, `pair` of the zero point that packed.py stores. Read only if ZEROS.
    """
    if FORM == "int6":
        first, second = tl.split(words[2].reshape(words[2].shape[0], 4, 2, 2))
        even, odd = tl.split(first if part // 2 % 2 == 0 else second)
        high = even if part < 4 else odd
        return _six(_word_of(words[part // 4], part % 4), high if part % 2 == 0 else high >> 8, INTERPRETED)
    elif FORM == "int4":
        return _eight(_word_of(words[0], part), zero, ZEROS, INTERPRETED, RAISED)
    else:
        first, second = tl.split(words[0].reshape(words[0].shape[0], 4, 2, 2))
        low, high = tl.split(first)
        other_low, other_high = tl.split(second)
        a, b, c, d = _four(low if part == 0 else high, zero, FORM, ZEROS, INTERPRETED)
        e, f, g, h = _four(other_low if part == 0 else other_high, zero, FORM, ZEROS, INTERPRETED)
        return _in_order(a, b, c, d, e, f, g, h)


@triton.jit
def _word_of(words, part: tl.constexpr):
    """Return the words [lines, 4] of a part from tiles [lines, 16] of four bits."""
    first, second = tl.split(words.reshape(words.shape[0], 4, 2, 2))
    low, high = tl.split(first if part % 2 == 0 else second)
    return low if part < 2 else high


@triton.jit
def _in_order(a, b, c, d, e, f, g, h):
    """Return eight columns of each word [lines, 4] in their order: [lines, 32]."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).reshape(a.shape[0], 32)


@triton.jit
def _bf16(bits):
    """Return the bf16 numbers with these bits."""
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _zero_value(zero):
    """Return the fp32 value of a `pair`."""
    return ((zero & 0xFFFF) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _nibble(words, zero, PLACE: tl.constexpr, RAISED: tl.constexpr):
    """Unpack one column of four bits to fp32, as the assembly does."""
    value = ((words >> PLACE) & 15).to(tl.float32)
    return value * 2.0**-69 if RAISED else value / 64 - _zero_value(zero)


@triton.jit
def _eight(words, zero, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr, RAISED: tl.constexpr):
    """Unpack the columns of words [lines, 4] of four bits."""
    if not ZEROS:
        zero = tl.full([1, 1], 0x3E003E00, tl.int32)  # Two bf16 numbers of 8 / 64: the zero point is 8.
    zero = tl.broadcast_to(zero, words.shape)
    if INTERPRETED:
        a, b = _nibble(words, zero, 0, RAISED), _nibble(words, zero, 16, RAISED)
        c, d = _nibble(words, zero, 4, RAISED), _nibble(words, zero, 20, RAISED)
        e, f = _nibble(words, zero, 8, RAISED), _nibble(words, zero, 24, RAISED)
        g, h = _nibble(words, zero, 12, RAISED), _nibble(words, zero, 28, RAISED)
        return _in_order(a, b, c, d, e, f, g, h)
    elif RAISED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4_RAISED, _EVERY_4_RAISED, [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4, _EVERY_4, [words, zero],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
    return _in_order(_bf16(a), _bf16(b), _bf16(c), _bf16(d), _bf16(e), _bf16(f), _bf16(g), _bf16(h))


@triton.jit
def _six_bits(words, high, PLACE: tl.constexpr, HIGH: tl.constexpr):
    """Unpack one column of six bits to fp32."""
    return (((words >> PLACE) & 15) + ((high >> HIGH) & 3) * 16).to(tl.float32) - 32.0


@triton.jit
def _six(words, high, INTERPRETED: tl.constexpr):
    """Unpack eight columns of each word [lines, 4] of six bits; see _INT6."""
    if INTERPRETED:
        a, b = _six_bits(words, high, 0, 0), _six_bits(words, high, 16, 16)
        c, d = _six_bits(words, high, 4, 2), _six_bits(words, high, 20, 18)
        e, f = _six_bits(words, high, 8, 4), _six_bits(words, high, 24, 20)
        g, h = _six_bits(words, high, 12, 6), _six_bits(words, high, 28, 22)
        return _in_order(a, b, c, d, e, f, g, h)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT6, _EVERY_4, [words, high],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        return _in_order(_bf16(a), _bf16(b), _bf16(c), _bf16(d), _bf16(e), _bf16(f), _bf16(g), _bf16(h))


@triton.jit
def e4m3_value(bits):
    """Return the fp32 values of e4m3 codes in int32."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = (mantissa + tl.where(exponent > 0, 8, 0)).to(tl.float32)
    size *= tl.exp2((tl.maximum(exponent, 1) - 10).to(tl.float32))
    return tl.where(bits > 127, -size, size)


@triton.jit
def _byte(words, zero, PLACE: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr):
    """Unpack one column of eight bits to fp32."""
    if FORM == "e4m3":
        half = words >> (PLACE // 16 * 16)
        if PLACE % 16 == 0:
            return e4m3_value((half >> 8 & 128) | (half >> 4 & 127)) * 2.0**-120
        else:
            return e4m3_value((half >> 4 & 128) | (half >> 8 & 112) | (half & 15)) * 2.0**-120
    else:
        value = (((words >> PLACE) & 255) ^ 128).to(tl.float32) - 128.0
        return value - _zero_value(zero) if ZEROS else value


@triton.jit
def _four(words, zero, FORM: tl.constexpr, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack the columns of words [lines, 4] of eight bits, each [lines, 4]."""
    if INTERPRETED:
        a, b = _byte(words, zero, 0, FORM, ZEROS), _byte(words, zero, 16, FORM, ZEROS)
        c, d = _byte(words, zero, 8, FORM, ZEROS), _byte(words, zero, 24, FORM, ZEROS)
        return a, b, c, d
    elif ZEROS:
        a, b, c, d = tl.inline_asm_elementwise(
            _INT8_ZERO, _EVERY_8_ZERO, [words, tl.broadcast_to(zero, words.shape)],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            _E4M3 if FORM == "e4m3" else _INT8, _EVERY_8, [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
    return _bf16(a), _bf16(b), _bf16(c), _bf16(d)
