"""The new token of a row in decode attention: its query, key and value, and their place in the cache."""

import triton
import triton.language as tl

from .fp8_kv import store_cells_fp8
from .rope import partner_of


@triton.jit
def load_key(k_ptr, offs_g, mask, D: tl.constexpr, BLOCK_D: tl.constexpr, ROTARY: tl.constexpr):
    """Load a new key and the partners of its columns: fp32 [len(offs_g), BLOCK_D] each.

    Every row contains the same key, so that its scores with a group's queries need no exchange between warps.
    """
    offs_d = tl.arange(0, BLOCK_D)
    k_ptrs = k_ptr + (offs_g * 0)[:, None]
    k = tl.load(k_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    partner = tl.load(k_ptrs + partner_of(offs_d, D, ROTARY)[None, :], mask=mask, other=0.0).to(tl.float32)
    return k, partner


@triton.jit
def load_token(row_ptr, head, TYPE: tl.constexpr, SIZES: tl.constexpr):
    """Load the queries of a K/V head, its new key and its new value.

    Returns the queries, their partners, the key and its partners, fp32 [COLUMNS, BLOCK_D] each, and the value [BLOCK_D]
    as TYPE.
    """
    D: tl.constexpr = SIZES.D
    offs_g, offs_d = tl.arange(0, SIZES.COLUMNS), tl.arange(0, SIZES.BLOCK_D)
    mask = (offs_g < SIZES.GROUP)[:, None] & (offs_d < D)[None, :]
    q_ptrs = row_ptr + (head * SIZES.GROUP + offs_g)[:, None] * SIZES.Q_COLUMNS
    k_ptr = row_ptr + (SIZES.KV_HEADS * SIZES.GROUP * (SIZES.Q_COLUMNS // D) + head) * D
    q = tl.load(q_ptrs + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    q_partner = tl.load(q_ptrs + partner_of(offs_d, D, SIZES.ROTARY)[None, :], mask=mask, other=0.0).to(tl.float32)
    k, k_partner = load_key(k_ptr, offs_g, mask, D, SIZES.BLOCK_D, SIZES.ROTARY)
    v = tl.load(k_ptr + SIZES.KV_HEADS * D + offs_d, mask=offs_d < D, other=0.0).to(TYPE)
    return q, q_partner, k, k_partner, v


@triton.jit
def store_token(cache, page, cell, position, k, v, write, PAGE: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr):
    """Store the key and the value of a position at `cell` of one head, if `write`.

    Returns both as the cache stores them.

    Args:
        k: [rows, D padded]. Every row contains the key.
        v: [D padded].
    """
    offs_g, offs_d = tl.arange(0, k.shape[0]), tl.arange(0, k.shape[1])
    mask_d = offs_d < D
    mask_k = (offs_g == 0)[:, None] & mask_d[None, :]
    k_ptrs, v_ptrs = cache.k_ptr + cell + (offs_g * 0)[:, None] + offs_d[None, :], cache.v_ptr + cell + offs_d
    if FP8:
        scale = page * cache.stride_sp + position % PAGE
        k, v = store_cells_fp8(
            k, v, k_ptrs, v_ptrs, cache.k_scale_ptr + scale, cache.v_scale_ptr + scale, mask_k, mask_d, write
        )
    else:
        k, v = k.to(cache.k_ptr.dtype.element_ty), v.to(cache.v_ptr.dtype.element_ty)
        if write:
            tl.store(k_ptrs, k, mask=mask_k)
            tl.store(v_ptrs, v, mask=mask_d)
    return k, v
