"""Addresses of positions in the paged K/V cache, for kernels and launchers."""

from typing import NamedTuple

import triton
import triton.language as tl


class Cache(NamedTuple):
    """K and V of one layer in a kernel, [pages, KV_HEADS, PAGE, D], or of one of its heads.

    The scale pointers are read for fp8 K/V only. Strides are in elements.
    """

    k_ptr: tl.tensor
    v_ptr: tl.tensor
    k_scale_ptr: tl.tensor
    v_scale_ptr: tl.tensor
    stride_kp: tl.tensor  # Stride of K and V between pages.
    stride_kh: tl.tensor  # Stride of K and V between heads.
    stride_sp: tl.tensor  # Stride of the scales between pages.
    stride_sh: tl.tensor  # Stride of the scales between heads.


@triton.jit
def head_of(cache, head):
    """Return the Cache of one K/V head."""
    head = head.to(tl.int64)
    offs_h, offs_s = head * cache.stride_kh, head * cache.stride_sh
    return Cache(
        cache.k_ptr + offs_h, cache.v_ptr + offs_h, cache.k_scale_ptr + offs_s, cache.v_scale_ptr + offs_s,
        cache.stride_kp, cache.stride_kh, cache.stride_sp, cache.stride_sh,
    )  # fmt: skip


@triton.jit
def cell_of(cache, page, position, PAGE: tl.constexpr, D: tl.constexpr):
    """Return the offset of a position within a K/V head. page is int64."""
    return page * cache.stride_kp + (position % PAGE) * D


@triton.jit
def pages_at(table_ptr, t, end, PAGE: tl.constexpr, BLOCK_T: tl.constexpr):
    """Load the pages of BLOCK_T positions from t, a multiple of BLOCK_T. Pages that begin at `end` or later are 0."""
    index = t // PAGE
    pages = (tl.load(table_ptr + index, mask=t < end, other=0),)
    for i in tl.static_range(1, BLOCK_T // PAGE):
        pages += (tl.load(table_ptr + index + i, mask=t + i * PAGE < end, other=0),)
    return pages


@triton.jit
def page_rows(pages, t, stride_kp, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr):
    """Return the offsets of BLOCK_T positions from t within a K/V head, int64 [BLOCK_T, 1]. pages: see pages_at."""
    offs_t = tl.arange(0, BLOCK_T)
    page = pages[0]
    for i in tl.static_range(1, BLOCK_T // PAGE):
        page = tl.where(offs_t < i * PAGE, page, pages[i])
    within = t % PAGE + offs_t if BLOCK_T <= PAGE else offs_t % PAGE
    return (page.to(tl.int64) * stride_kp + within * D)[:, None]


def pool_rows(cache):
    """Return the whole pool as a matrix [pages * rows, D], and the number of rows of a page.

    Each row of the matrix is one position of a head.

    Args:
        cache: K or V of any layer.
    """
    rows = cache.stride(0) // cache.shape[3]
    return cache.as_strided((len(cache) * rows, cache.shape[3]), (cache.shape[3], 1), 0), rows
