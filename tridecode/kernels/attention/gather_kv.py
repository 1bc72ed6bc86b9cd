"""gather_kv: copies K/V of a slot's first positions from their pages to contiguous tensors, for torch's attention."""

import triton
import triton.language as tl

from ..common import cdiv, interpreted, next_power_of_2, options
from ..op import Op
from .arguments import KVLayer
from .fp8_kv import from_e4m3, is_fp8, load_cells, row_bytes


@triton.jit(do_not_specialize=["positions"])
def _gather_kv_kernel(
    table_ptr, stride_table,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh,
    keys_ptr, values_ptr, stride_out,
    positions,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Copy K and V of each position below `positions`. A program copies one page of one head.

    Grid: (cdiv(positions, PAGE), KV_HEADS). Moves 4 * positions * KV_HEADS * D elements.

    Args:
        table_ptr: [max_pages] int32, the pages of the slot.
        keys_ptr, values_ptr: [KV_HEADS, >= positions, D] (outputs).
        Others: see arguments.KVLayer.
    """
    index = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    page = tl.load(table_ptr + index * stride_table).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = (offs < PAGE * D) & (index * PAGE + offs // D < positions)
    source = page * stride_kp + head * stride_kh + offs
    target = head * stride_out + index.to(tl.int64) * PAGE * D + offs
    keys, values = tl.load(k_ptr + source, mask=mask), tl.load(v_ptr + source, mask=mask)
    if FP8:
        cells = page * stride_sp + head * stride_sh + offs // D
        keys = from_e4m3(keys, INTERPRETED) * tl.load(k_scale_ptr + cells, mask=mask, other=0.0)
        values = from_e4m3(values, INTERPRETED) * tl.load(v_scale_ptr + cells, mask=mask, other=0.0)
    tl.store(keys_ptr + target, keys.to(keys_ptr.dtype.element_ty), mask=mask)
    tl.store(values_ptr + target, values.to(values_ptr.dtype.element_ty), mask=mask)


def gather_kv(table, k_cache, v_cache, positions, keys, values):
    """Copy K and V of a slot's first `positions` positions to contiguous tensors.

    Args:
        table: [max_pages] int32, the pages of the slot.
        k_cache, v_cache: [pages, kv_heads, page, head_dim].
        keys, values: [kv_heads, >= positions, head_dim] (outputs).
    """
    _, kv_heads, page, head_dim = k_cache.shape
    _gather_kv_kernel[(cdiv(positions, page), kv_heads)](
        *KVLayer(table, k_cache, v_cache).kernel_arguments(),
        keys,
        values,
        keys.stride(0),
        positions,
        page,
        head_dim,
        next_power_of_2(page * head_dim),
        is_fp8(k_cache),
        interpreted(),
        **options(8),
    )


def gather_kv_ref(table, k_cache, v_cache, positions, keys, values):
    """Compute `gather_kv` in torch."""
    page = k_cache.shape[2]
    for index in range(-(-positions // page)):
        first, end = index * page, min((index + 1) * page, positions)
        cells = table[index], slice(None), slice(0, end - first)
        keys[:, first:end], values[:, first:end] = load_cells(k_cache, cells), load_cells(v_cache, cells)


def gather_kv_bytes(table, k_cache, v_cache, positions, keys, values) -> int:
    """Return the bytes that a launch moves."""
    return 2 * positions * k_cache.shape[1] * (row_bytes(k_cache) + k_cache.shape[3] * keys.itemsize)


GATHER_KV = Op(gather_kv, gather_kv_ref, gather_kv_bytes, (_gather_kv_kernel,), outputs=("keys", "values"))
