"""fp8 K/V. Each number has an e4m3 code. Each position of a head has a scale, which is a power of two in bf16.

The part of a page that belongs to a head contains codes [page, head_dim], then scales [page]; see state/kv.py. The
product of a number and its scale is exact in bf16, so the result does not depend on when the scale is applied. The
scale of a position with
a number that is not finite is NaN.
"""

import torch
import triton
import triton.language as tl

from ..linear.bits import e4m3_value

LARGEST = 448.0  # The largest number of e4m3.
SCALE_BYTES = 2

# dtype: (distance of a shift, mask of the moved bits, the factor 2 ** 8 or 2 ** 120)
_PLACES = {
    "f16": (1, "0x3f803f80", "0x5c005c00"),
    "bf16": (4, "0x07f007f0", "0x7b807b80"),
}  # These numbers are 2 ** 8 and 2 ** 120 in the dtype of the key.


def _conversion(kind: str, source: str, *pairs: tuple[str, str]) -> tl.constexpr:
    """Return assembly that converts the codes in `source`, two registers (0 if there is no second one).

    Two codes are moved to the upper bytes of the halves of a word, shifted down below the sign, and multiplied.

    Args:
        pairs: For each word of output, the bytes that prmt selects and the target registers.
    """
    places, bits, up = _PLACES[kind]
    text = f".reg .b32 w, t, up, zero; mov.b32 up, {up}; mov.b32 zero, 0x80008000;"
    for chosen, target in pairs:
        text += f"""
    prmt.b32 w, {source}, {chosen}; shr.u32 t, w, {places}; and.b32 t, t, {bits};
    lop3.b32 w, w, 0x80008000, t, 0xea; fma.rn.{kind}x2 w, w, up, zero; mov.b32 {target}, w;"""
    return tl.constexpr(f"{{ {text} }}")


_CODES_BF16 = _conversion("bf16", "$2, 0", ("0x1404", "$0"), ("0x3424", "$1"))
_WORD_BF16 = _conversion("bf16", "$4, 0", ("0x1404", "{$0, $1}"), ("0x3424", "{$2, $3}"))
_WORD_FP16 = _conversion("f16", "$4, 0", ("0x1404", "{$0, $1}"), ("0x3424", "{$2, $3}"))
# This conversion uses an instruction of newer GPUs.
_WORD_FP16_89 = tl.constexpr(
    """{
    .reg .b16 l, h; .reg .b32 w;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 w, l; mov.b32 {$0, $1}, w;
    cvt.rn.f16x2.e4m3x2 w, h; mov.b32 {$2, $3}, w;
    }"""
)
# Each output word contains the same byte of both input words.
_TWO_WORDS_BF16 = _conversion(
    "bf16", "$8, $9",
    ("0x4000", "{$0, $1}"), ("0x5010", "{$2, $3}"), ("0x6020", "{$4, $5}"), ("0x7030", "{$6, $7}"),
)  # fmt: skip


@triton.jit
def from_e4m3(codes, INTERPRETED: tl.constexpr):
    """Convert codes (uint8) to numbers without their scale, bf16 (fp32 if INTERPRETED)."""
    if INTERPRETED:
        return e4m3_value(codes.to(tl.int32))
    else:
        return tl.inline_asm_elementwise(_CODES_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def words_to_numbers(words, NUMBERS: tl.constexpr, CONVERTS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert words of four codes to [..., 2, 2] NUMBERS, fp16 or bf16.

    If CONVERTS, the GPU has an instruction that converts to fp16. Words are loaded instead of bytes, because the
    compiler might unpack and pack bytes again.
    """
    if INTERPRETED:
        a, b = e4m3_value(words & 255), e4m3_value((words >> 8) & 255)
        c, d = e4m3_value((words >> 16) & 255), e4m3_value((words >> 24) & 255)
        return tl.join(tl.join(a, c), tl.join(b, d))
    else:
        FP16: tl.constexpr = _WORD_FP16_89 if CONVERTS else _WORD_FP16
        a, b, c, d = tl.inline_asm_elementwise(
            FP16 if NUMBERS == tl.float16 else _WORD_BF16, "=h,=h,=h,=h,r", [words],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=1,
        )  # fmt: skip
        return tl.join(tl.join(a, c), tl.join(b, d)).to(NUMBERS, bitcast=True)


@triton.jit
def two_words_to_bf16(first, second, INTERPRETED: tl.constexpr):
    """Convert two words to [..., 2, 2, 2] bf16. The last dimension is the word.

    Each register contains one number of each word.
    """
    if INTERPRETED:
        one = words_to_numbers(first, tl.bfloat16, False, True)
        return tl.join(one, words_to_numbers(second, tl.bfloat16, False, True))
    else:
        a, e, b, f, c, g, d, h = tl.inline_asm_elementwise(
            _TWO_WORDS_BF16, "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [first, second],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        one = tl.join(tl.join(a, c), tl.join(b, d))
        return tl.join(one, tl.join(tl.join(e, g), tl.join(f, h))).to(tl.bfloat16, bitcast=True)


@triton.jit
def e4m3_scale(x, axis: tl.constexpr):
    """Return scale and 1 / scale of the rows of x, fp32. The scale is the smallest power of two that e4m3 needs."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 * 2 ** 8.
    bits = tl.where(top > 0x7F7FFFFF, 0x7FC00000, exponent << 23)
    return bits.to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """Round x, fp32 of at most 448, to nearest, ties to even. Return codes and their values."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) & 0x7FF00000
    # Subnormal numbers are multiples of 1 / 512.
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
    is_small = size < 0x3C800000
    code = tl.where(is_small, small, (normal >> 20) - 960) | ((bits >> 24) & 128)
    value = tl.where(is_small, small.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))
    return code.to(tl.uint8), tl.where(bits < 0, -value, value)


@triton.jit
def store_cells_fp8(new_k, new_v, k_ptrs, v_ptrs, k_scale_ptr, v_scale_ptr, mask_k, mask_d, write):
    """If `write`, store K (equal in every row) and V of a token, fp32. Return both as the cache stores them."""
    k_scale, k_inverse = e4m3_scale(new_k, 1)
    v_scale, v_inverse = e4m3_scale(new_v, 0)
    k_codes, new_k = to_e4m3(new_k * k_inverse[:, None])
    v_codes, new_v = to_e4m3(new_v * v_inverse)
    if write:
        tl.store(k_ptrs, k_codes, mask=mask_k)
        tl.store(v_ptrs, v_codes, mask=mask_d)
        rows = tl.arange(0, k_scale.shape[0])
        tl.store(k_scale_ptr + rows * 0, k_scale.to(tl.bfloat16), mask=rows == 0)
        tl.store(v_scale_ptr, v_scale.to(tl.bfloat16))
    return new_k * k_scale[:, None], new_v * v_scale


def is_fp8(cache: torch.Tensor) -> bool:
    """Return whether a K/V cache contains fp8 codes."""
    return cache.dtype == torch.uint8


def scales(cache: torch.Tensor) -> torch.Tensor:
    """Return the scales [pages, kv_heads, page] bf16 of K or V of a layer, which follow each head's codes.

    Args:
        cache: [pages, kv_heads, page, head_dim]. If it is not uint8, it has no scales and is returned itself.
    """
    if not is_fp8(cache):
        return cache
    pages, heads, page, D = cache.shape
    size, strides = (pages, heads, SCALE_BYTES * page), (*cache.stride()[:2], 1)
    return cache.as_strided(size, strides, cache.storage_offset() + page * D).view(torch.bfloat16)


def head_rows(page: int, head_dim: int) -> int:
    """Return the number of rows of head_dim bytes in a head's part of a page."""
    return -(-page * (head_dim + SCALE_BYTES) // head_dim)


def row_bytes(cache: torch.Tensor) -> int:
    """Return the bytes of a position of a head."""
    return cache.shape[3] * cache.itemsize + (SCALE_BYTES if is_fp8(cache) else 0)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [..., head_dim] uint8 and scales [...] bf16 of x [..., head_dim] fp32."""
    top = x.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(top)
    exponent = (exponent - 9 + (mantissa > LARGEST / 512)).clamp(-126, 127)
    scale = torch.where(top.isfinite(), torch.ldexp(torch.ones_like(top), exponent), torch.nan)
    return (x / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale[..., 0].bfloat16()


def load_cells(cache: torch.Tensor, index) -> torch.Tensor:
    """Return cache[index], in fp32 if the cache is fp8. index selects pages, heads and positions."""
    if not is_fp8(cache):
        return cache[index]
    return cache[index].contiguous().view(torch.float8_e4m3fn).float() * scales(cache)[index].float()[..., None]


def store_cells(cache: torch.Tensor, index, x: torch.Tensor) -> None:
    """Set cache[index] = x, where x is fp32."""
    if not is_fp8(cache):
        cache[index] = x.to(cache.dtype)
        return
    cache[index], scales(cache)[index] = quantize(x.float())
