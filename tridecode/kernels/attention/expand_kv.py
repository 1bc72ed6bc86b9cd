"""expand_kv: what prompts attend to of K/V in 8 bits, once for all of their rows, as bf16 on pages of a layer's own."""

import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT, CHUNK_SLOT, CHUNK_START, CHUNK_WIDTH, MAX_CHUNKS, listed
from ..common import interpreted, options
from ..op import Op
from .fp8_kv import held, row_bytes, scales, words_to_numbers

PROGRAMS = 8 * 132  # all that the largest GPUs run at once
WARPS = 4


@triton.jit
def _expand_kv_kernel(
    chunks_ptr,
    page_table_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    keys_ptr,
    values_ptr,
    stride_table,
    stride_p,
    stride_h,
    stride_sp,
    stride_sh,
    stride_op,
    stride_oh,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """keys, values [pages, KV_HEADS, PAGE, D] = K, V, with their scales, of the pages that the chunks attend to.

    chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32; page_table: [slots, max_pages] int32; k, v: codes
    [pages, KV_HEADS, PAGE, D] with scales [pages, KV_HEADS, PAGE] (see fp8_kv.py). Moves three bytes a number. Grid
    (programs,): they share items, a page and a head each. What lies behind a chunk's last position is copied too. Pages
    that chunks share are written by each of them, and get the same from all.
    """
    offs_c = tl.arange(0, MAX_CHUNKS)
    chunk_ptrs = chunks_ptr + offs_c * CHUNK_WIDTH
    counts = tl.load(chunk_ptrs + CHUNK_COUNT)
    pages = tl.where(counts > 0, (tl.load(chunk_ptrs + CHUNK_START) + counts + PAGE - 1) // PAGE, 0)
    ends = tl.cumsum(pages, 0)
    row, word = tl.arange(0, PAGE)[:, None], tl.arange(0, D // 4)[None, :]
    for item in range(tl.program_id(0), tl.sum(pages, 0) * KV_HEADS, tl.num_programs(0)):
        place, head = item // KV_HEADS, item % KV_HEADS
        chunk = tl.sum((ends <= place).to(tl.int32), 0)
        within = place - tl.sum(tl.where(offs_c == chunk, ends - pages, 0), 0)
        slot = tl.load(chunks_ptr + chunk * CHUNK_WIDTH + CHUNK_SLOT)
        page = tl.load(page_table_ptr + slot * stride_table + within).to(tl.int64)
        source = page * (stride_p // 4) + head * (stride_h // 4) + row * (D // 4) + word
        cells = page * stride_sp + head * stride_sh + row
        target = page * stride_op + head * stride_oh + row * D
        k = tl.load(k_ptr.to(tl.pointer_type(tl.int32)) + source)
        v = tl.load(v_ptr.to(tl.pointer_type(tl.int32)) + source)
        k_scale, v_scale = tl.load(k_scale_ptr + cells), tl.load(v_scale_ptr + cells)
        offs = tl.arange(0, D)[None, :]
        k = words_to_numbers(k, tl.bfloat16, False, INTERPRETED).reshape(PAGE, D)
        v = words_to_numbers(v, tl.bfloat16, False, INTERPRETED).reshape(PAGE, D)
        tl.store(keys_ptr + target + offs, (k * k_scale).to(keys_ptr.dtype.element_ty))
        tl.store(values_ptr + target + offs, (v * v_scale).to(values_ptr.dtype.element_ty))


def expand_kv(chunks, page_table, k_cache, v_cache, keys, values):
    """keys, values [pages, kv_heads, page, D]: K and V of k_cache, v_cache, in 8 bits, as far as chunks attend to."""
    _, kv_heads, page, D = k_cache.shape
    k_scale, v_scale = scales(k_cache), scales(v_cache)
    _expand_kv_kernel[(PROGRAMS,)](
        chunks,
        page_table,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        keys,
        values,
        page_table.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_scale.stride(0),
        k_scale.stride(1),
        keys.stride(0),
        keys.stride(1),
        kv_heads,
        page,
        D,
        interpreted(),
        **options(WARPS),
    )


def expand_kv_ref(chunks, page_table, k_cache, v_cache, keys, values):
    page = k_cache.shape[2]
    for chunk in listed(chunks):
        pages = page_table[chunk.slot, : -(-chunk.end // page)].long()
        keys[pages], values[pages] = (held(cache, (pages,)).to(keys.dtype) for cache in (k_cache, v_cache))


def expand_kv_bytes(chunks, page_table, k_cache, v_cache, keys, values) -> int:
    page, D = k_cache.shape[2:]
    positions = sum(-(-chunk.end // page) * page for chunk in listed(chunks))
    return 2 * positions * k_cache.shape[1] * (row_bytes(k_cache) + D * keys.itemsize)


EXPAND_KV = Op(expand_kv, expand_kv_ref, expand_kv_bytes, (_expand_kv_kernel,))
