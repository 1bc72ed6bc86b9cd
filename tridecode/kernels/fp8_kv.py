"""K/V in 8 bits: an e4m3 a number, and for each position and head a scale, a power of two in bf16.

A head's part of a page is its codes [page, head_dim], then its scales [page]; see cache/kv.py. A number with its scale
is a bf16 exactly, so what is attended to is the same wherever the scale is put on. A scale is NaN where a number was
not finite.
"""

import torch
import triton
import triton.language as tl

from .bits import e4m3_value
from .pages import page_rows, pages_at
from .splits import EMPTY

LARGEST = 448.0  # of e4m3
SCALE_BYTES = 2

# Codes go to the upper bytes of two halves, below the sign four places down, and are times 2 ** 120 (0x7b80) there.
_E4M3 = tl.constexpr(
    """{
    .reg .b32 w, t, up, nought;
    mov.b32 up, 0x7b807b80; mov.b32 nought, 0x80008000;
    prmt.b32 w, $2, 0, 0x1404; shr.u32 t, w, 4; and.b32 t, t, 0x07f007f0;
    lop3.b32 w, w, 0x80008000, t, 0xea; fma.rn.bf16x2 $0, w, up, nought;
    prmt.b32 w, $2, 0, 0x3424; shr.u32 t, w, 4; and.b32 t, t, 0x07f007f0;
    lop3.b32 w, w, 0x80008000, t, 0xea; fma.rn.bf16x2 $1, w, up, nought;
    }"""
)


@triton.jit
def from_e4m3(codes, INTERPRETED: tl.constexpr):
    """What codes (uint8) stand for without their scale, bf16 (fp32 if INTERPRETED)."""
    if INTERPRETED:
        return e4m3_value(codes.to(tl.int32))
    else:
        return tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def e4m3_scale(x, axis: tl.constexpr):
    """(scale, 1 / scale) of the rows of x, fp32: the smallest power of two with which none is beyond e4m3."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis)
    exponent = tl.maximum(((top + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 * 2 ** 8
    bits = tl.where(top > 0x7F7FFFFF, 0x7FC00000, exponent << 23)
    return bits.to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def to_e4m3(x):
    """(codes, what they stand for) of x, fp32 of at most 448, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = (size + 0x7FFFF + ((size >> 20) & 1)) & 0x7FF00000
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000  # subnormals: multiples of 1 / 512
    is_small = size < 0x3C800000
    code = tl.where(is_small, small, (normal >> 20) - 960) | ((bits >> 24) & 128)
    value = tl.where(is_small, small.to(tl.float32) * 0.001953125, normal.to(tl.float32, bitcast=True))
    return code.to(tl.uint8), tl.where(bits < 0, -value, value)


@triton.jit
def scales_at(k_scale_ptr, v_scale_ptr, pages, t, mask, stride_sp, PAGE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Scales of K and V of the BLOCK_T positions from t on `pages`, [BLOCK_T, 1] bf16; 0 where mask is false."""
    places = page_rows(pages, t, stride_sp, PAGE, 1, BLOCK_T)
    return tl.load(k_scale_ptr + places, mask=mask, other=0.0), tl.load(v_scale_ptr + places, mask=mask, other=0.0)


@triton.jit
def paired_scales_at(scale_ptr, pages, t, end, stride_sp, PAGE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Of K or V, two in a word: int32 [BLOCK_T // 2, 1]. Copies on their way through shared memory are of words."""
    offs = tl.arange(0, BLOCK_T // 2)
    page = pages[0]
    for i in tl.static_range(1, BLOCK_T // PAGE):
        page = tl.where(offs < i * PAGE // 2, page, pages[i])
    within = t % PAGE // 2 + offs if BLOCK_T <= PAGE else offs % (PAGE // 2)
    places = page.to(tl.int64) * (stride_sp // 2) + within
    pairs = scale_ptr.to(tl.pointer_type(tl.int32)) + places
    return tl.load(pairs[:, None], mask=(t + 2 * offs < end)[:, None], other=0)


@triton.jit
def unpaired(pairs):
    """Scales fp32 [BLOCK_T, 1] of such words."""
    low, high = (pairs << 16).to(tl.float32, bitcast=True), (pairs & -65536).to(tl.float32, bitcast=True)
    return tl.reshape(tl.join(low, high), [2 * pairs.shape[0], 1])


@triton.jit
def put_fp8(new_k, new_v, k_ptrs, v_ptrs, k_scale_ptr, v_scale_ptr, mask_k, mask_d, write):
    """A token's K (in every row) and V, fp32, as the cache will hold them; stored if `write`."""
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


@triton.jit
def fp8_turns(
    m,
    l_t,
    acc,
    dot_q,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    rest,
    end,
    stride_kp,
    stride_sp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    DEPTH: tl.constexpr,
    TYPE: tl.constexpr,
    DOT_FP32: tl.constexpr,
):
    """Attend to the positions [rest, end) of K/V in 8 bits: DEPTH turns are in flight."""
    offs_t = tl.arange(0, BLOCK_T)
    if rest < end:
        tiles = ()
        for i in tl.static_range(DEPTH):
            tiles += fp8_tile(
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, rest + i * BLOCK_T, end, stride_kp, stride_sp, PAGE,
                D, BLOCK_D, BLOCK_T,
            )  # fmt: skip
        for t in range(rest, end, BLOCK_T):
            tiles += fp8_tile(
                k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, t + DEPTH * BLOCK_T, end, stride_kp, stride_sp, PAGE,
                D, BLOCK_D, BLOCK_T,
            )  # fmt: skip
            s = tl.dot(from_e4m3(tiles[0], DOT_FP32).to(TYPE), dot_q, input_precision="ieee") * tiles[2].to(tl.float32)
            s = tl.where((t + offs_t < end)[:, None], s, EMPTY)
            m_new = tl.maximum(m, tl.max(s, 0))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[None, :])
            l_t = l_t * alpha[None, :] + p
            p = (p * tiles[3].to(tl.float32)).to(tl.bfloat16).to(TYPE)
            v_t = tl.trans(from_e4m3(tiles[1], DOT_FP32).to(TYPE))
            acc = tl.dot(v_t, p, acc * alpha[None, :], input_precision="ieee")
            m = m_new
            tiles = tiles[4:]
    return m, l_t, acc


@triton.jit
def fp8_tile(
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    t,
    end,
    stride_kp,
    stride_sp,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Codes of K and V [BLOCK_T, BLOCK_D] of the positions from t that lie before end, and their scales."""
    offs_d = tl.arange(0, BLOCK_D)
    pages = pages_at(table_ptr, t, end, PAGE, BLOCK_T)
    tiles = page_rows(pages, t, stride_kp, PAGE, D, BLOCK_T) + offs_d[None, :]
    seen = (t + tl.arange(0, BLOCK_T) < end)[:, None]
    mask = seen & (offs_d < D)[None, :]
    ks, vs = scales_at(k_scale_ptr, v_scale_ptr, pages, t, seen, stride_sp, PAGE, BLOCK_T)
    return tl.load(k_ptr + tiles, mask=mask, other=0), tl.load(v_ptr + tiles, mask=mask, other=0), ks, vs


def is_fp8(cache: torch.Tensor) -> bool:
    return cache.dtype == torch.uint8


def scales(cache: torch.Tensor) -> torch.Tensor:
    """Of K or V of a layer, [pages, kv_heads, page, head_dim] uint8: [pages, kv_heads, page] bf16, which stand behind
    each head's codes. Other K/V have none, and give themselves."""
    if not is_fp8(cache):
        return cache
    pages, heads, page, D = cache.shape
    size, strides = (pages, heads, SCALE_BYTES * page), (*cache.stride()[:2], 1)
    return cache.as_strided(size, strides, cache.storage_offset() + page * D).view(torch.bfloat16)


def head_rows(page: int, head_dim: int) -> int:
    """Rows of head_dim bytes that a head's part of a page has."""
    return -(-page * (head_dim + SCALE_BYTES) // head_dim)


def row_bytes(cache: torch.Tensor) -> int:
    """Bytes of a position of a head."""
    return cache.shape[3] * cache.itemsize + (SCALE_BYTES if is_fp8(cache) else 0)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of x [..., head_dim] fp32: uint8 like it, and [...] bf16."""
    top = x.abs().amax(-1, keepdim=True)
    mantissa, exponent = torch.frexp(top)
    exponent = (exponent - 9 + (mantissa > LARGEST / 512)).clamp(-126, 127)
    scale = torch.where(top.isfinite(), torch.ldexp(torch.ones_like(top), exponent), torch.nan)
    return (x / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale[..., 0].bfloat16()


def held(cache: torch.Tensor, index) -> torch.Tensor:
    """cache[index], in fp32 if in 8 bits; index: of pages, heads and positions."""
    if not is_fp8(cache):
        return cache[index]
    return cache[index].contiguous().view(torch.float8_e4m3fn).float() * scales(cache)[index].float()[..., None]


def put(cache: torch.Tensor, index, x: torch.Tensor) -> None:
    """cache[index] = x, fp32."""
    if not is_fp8(cache):
        cache[index] = x.to(cache.dtype)
        return
    cache[index], scales(cache)[index] = quantised(x.float())
