"""Weights in fewer bits become numbers in registers: from words of 32 bits to pairs of bf16 for the tensor cores.

Two numbers an instruction. Both halves of a word hold a number at the same place, so one `lop3` masks both and sets
bits beside them: a number written into the mantissa of 128.0 is 128 more than itself, which one `fma` takes off,
exactly and together with the zero point; an e4m3's exponent and mantissa, moved to where bf16 has them, are 2 ** 120
too small. model/formats/packed.py says what stands where. The interpreter, which knows no assembly, does the same by
arithmetic.
"""

import triton
import triton.language as tl

# v & 15 of both halves into 128.0 (0x4300), less $9, of four places: columns 0 and 1, 2 and 3, ...
_INT4 = tl.constexpr(
    """{
    .reg .b32 w1, w2, w3, a, z, one;
    mov.b32 one, 0x3f803f80; xor.b32 z, $9, 0x80008000;
    shr.u32 w1, $8, 4; shr.u32 w2, $8, 8; shr.u32 w3, $8, 12;
    lop3.b32 a, $8, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 a, a, one, z; mov.b32 {$0, $1}, a;
    lop3.b32 a, w1, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 a, a, one, z; mov.b32 {$2, $3}, a;
    lop3.b32 a, w2, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 a, a, one, z; mov.b32 {$4, $5}, a;
    lop3.b32 a, w3, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 a, a, one, z; mov.b32 {$6, $7}, a;
    }"""
)
# Two's complement: the low seven bits into 128.0, less 128.0, or 256.0 where the sign, moved nowhere, makes it that.
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
# The same, less $5.
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
# Seven bits below the sign go four places down; times 2 ** 120 (0x7b80).
_E4M3 = tl.constexpr(
    """{
    .reg .b32 a, t, up, nought;
    mov.b32 up, 0x7b807b80; mov.b32 nought, 0x80008000;
    shl.b32 t, $4, 4; and.b32 t, t, 0x07f007f0; shl.b32 a, $4, 8; lop3.b32 a, a, 0x80008000, t, 0xea;
    fma.rn.bf16x2 a, a, up, nought; mov.b32 {$0, $1}, a;
    shr.u32 t, $4, 4; and.b32 t, t, 0x07f007f0; lop3.b32 a, $4, 0x80008000, t, 0xea;
    fma.rn.bf16x2 a, a, up, nought; mov.b32 {$2, $3}, a;
    }"""
)
_EVERY_4 = tl.constexpr("=h,=h,=h,=h,=h,=h,=h,=h,r,r")
_EVERY_8 = tl.constexpr("=h,=h,=h,=h,r")
_EVERY_8_ZERO = tl.constexpr("=h,=h,=h,=h,r,r")


@triton.jit
def pair(zero):
    """The bits of a bf16 (as int16) in both halves of a word."""
    bits = zero.to(tl.int32) & 0xFFFF
    return bits | (bits << 16)


@triton.jit
def unpack(words, zero, part: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Columns part * 32 to part * 32 + 31 of tiles, [lines, 32], bf16 (fp32 if INTERPRETED).

    words: [lines, 16] int32, the tiles; zero: [lines, 1] int32, `pair` of what to take off as packed.py has it, read if
    ZEROS. Nothing moves between lanes.
    """
    first, second = tl.split(words.reshape(words.shape[0], 4, 2, 2))
    if FORM == "int4":
        low, high = tl.split(first if part % 2 == 0 else second)
        return _eight(low if part < 2 else high, zero, ZEROS, INTERPRETED)
    else:
        low, high = tl.split(first)
        other_low, other_high = tl.split(second)
        a, b, c, d = _four(low if part == 0 else high, zero, FORM, ZEROS, INTERPRETED)
        e, f, g, h = _four(other_low if part == 0 else other_high, zero, FORM, ZEROS, INTERPRETED)
        return _in_order(a, b, c, d, e, f, g, h)


@triton.jit
def _in_order(a, b, c, d, e, f, g, h):
    """Eight columns of each word [lines, 4] in their order, [lines, 32]."""
    even = tl.join(tl.join(a, e), tl.join(c, g))
    odd = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.join(even, odd).reshape(a.shape[0], 32)


@triton.jit
def _bf16(bits):
    return bits.to(tl.bfloat16, bitcast=True)


@triton.jit
def _zero_value(zero):
    return ((zero & 0xFFFF) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _nibble(words, zero, PLACE: tl.constexpr):
    return ((words >> PLACE) & 15).to(tl.float32) + 128.0 - _zero_value(zero)


@triton.jit
def _eight(words, zero, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The columns of words [lines, 4] of four bits."""
    if not ZEROS:
        zero = tl.full([1, 1], 0x43084308, tl.int32)  # 128 + 8
    zero = tl.broadcast_to(zero, words.shape)
    if INTERPRETED:
        a, b = _nibble(words, zero, 0), _nibble(words, zero, 16)
        c, d = _nibble(words, zero, 4), _nibble(words, zero, 20)
        e, f = _nibble(words, zero, 8), _nibble(words, zero, 24)
        g, h = _nibble(words, zero, 12), _nibble(words, zero, 28)
        return _in_order(a, b, c, d, e, f, g, h)
    else:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _INT4, _EVERY_4, [words, zero],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        return _in_order(_bf16(a), _bf16(b), _bf16(c), _bf16(d), _bf16(e), _bf16(f), _bf16(g), _bf16(h))


@triton.jit
def e4m3_value(bits):
    """What codes, in int32, stand for, fp32."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = (mantissa + tl.where(exponent > 0, 8, 0)).to(tl.float32)
    size *= tl.exp2((tl.maximum(exponent, 1) - 10).to(tl.float32))
    return tl.where(bits > 127, -size, size)


@triton.jit
def _byte(words, zero, PLACE: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr):
    """Of eight bits, in fp32."""
    bits = (words >> PLACE) & 255
    if FORM == "e4m3":
        return e4m3_value(bits)
    else:
        value = (bits ^ 128).to(tl.float32) - 128.0
        return value - _zero_value(zero) if ZEROS else value


@triton.jit
def _four(words, zero, FORM: tl.constexpr, ZEROS: tl.constexpr, INTERPRETED: tl.constexpr):
    """The columns of words [lines, 4] of eight bits, each [lines, 4]."""
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
