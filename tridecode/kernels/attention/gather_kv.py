"""gather_kv: the K/V of a slot's first positions, out of its pages into one piece for torch's attention."""

import triton
import triton.language as tl

from ..common import interpreted, options
from ..op import Op
from .fp8_kv import from_e4m3, held, is_fp8, row_bytes, scales


@triton.jit(do_not_specialize=["positions"])
def _gather_kv_kernel(
    table_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    keys_ptr,
    values_ptr,
    positions,
    stride_kp,
    stride_kh,
    stride_sp,
    stride_sh,
    stride_out,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """keys[:, t], values[:, t] = K, V of position t, for t below `positions`; a program a page and K/V head.

    table: [max_pages] int32, the slot's; k, v: [pages, KV_HEADS, PAGE, D], if FP8 codes, with scales
    [pages, KV_HEADS, PAGE]; keys, values: [KV_HEADS, >= positions, D] (output). Moves 4 * positions * KV_HEADS * D
    elements. Grid (cdiv(positions, PAGE), KV_HEADS).
    """
    place = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(table_ptr + place).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = (offs < PAGE * D) & (place * PAGE + offs // D < positions)
    source = page * stride_kp + head * stride_kh + offs
    target = head * stride_out + place.to(tl.int64) * PAGE * D + offs
    keys, values = tl.load(k_ptr + source, mask=mask), tl.load(v_ptr + source, mask=mask)
    if FP8:
        cells = page * stride_sp + head * stride_sh + offs // D
        keys = from_e4m3(keys, INTERPRETED) * tl.load(k_scale_ptr + cells, mask=mask, other=0.0)
        values = from_e4m3(values, INTERPRETED) * tl.load(v_scale_ptr + cells, mask=mask, other=0.0)
    tl.store(keys_ptr + target, keys.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + target, values.to(values_ptr.dtype.element_ty), mask=mask)


def gather_kv(table, k_cache, v_cache, positions, keys, values):
    """keys, values [kv_heads, >= positions, D] get K/V of the first `positions` of the slot whose pages `table` names;
    k_cache, v_cache: [pages, kv_heads, page, D]."""
    _, kv_heads, page, D = k_cache.shape
    k_scale, v_scale = scales(k_cache), scales(v_cache)
    _gather_kv_kernel[(triton.cdiv(positions, page), kv_heads)](
        table,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        keys,
        values,
        positions,
        k_cache.stride(0),
        k_cache.stride(1),
        k_scale.stride(0),
        k_scale.stride(1),
        keys.stride(0),
        page,
        D,
        triton.next_power_of_2(page * D),
        is_fp8(k_cache),
        interpreted(),
        **options(8),
    )


def gather_kv_ref(table, k_cache, v_cache, positions, keys, values):
    page = k_cache.shape[2]
    for place in range(-(-positions // page)):
        first, end = place * page, min((place + 1) * page, positions)
        cells = table[place], slice(None), slice(0, end - first)
        keys[:, first:end], values[:, first:end] = held(k_cache, cells), held(v_cache, cells)


def gather_kv_bytes(table, k_cache, v_cache, positions, keys, values) -> int:
    return 2 * positions * k_cache.shape[1] * (row_bytes(k_cache) + k_cache.shape[3] * keys.itemsize)


GATHER_KV = Op(gather_kv, gather_kv_ref, gather_kv_bytes, (_gather_kv_kernel,), outputs=("keys", "values"))
