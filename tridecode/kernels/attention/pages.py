"""Where positions of a slot lie in the pages of the K/V cache; for kernels and launchers."""

import triton
import triton.language as tl


@triton.jit
def pages_at(table_ptr, t, end, PAGE: tl.constexpr, BLOCK_T: tl.constexpr):
    """The pages of the BLOCK_T positions from t, a multiple of it; page 0 for those from `end` on."""
    place = t // PAGE
    pages = (tl.load(table_ptr + place, mask=t < end, other=0),)
    for i in tl.static_range(1, BLOCK_T // PAGE):
        pages += (tl.load(table_ptr + place + i, mask=t + i * PAGE < end, other=0),)
    return pages


@triton.jit
def page_rows(pages, t, stride_kp, PAGE: tl.constexpr, D: tl.constexpr, BLOCK_T: tl.constexpr):
    """Where each of these positions begins in a K/V head of the cache: int64 [BLOCK_T, 1]."""
    offs_t = tl.arange(0, BLOCK_T)
    page = pages[0]
    for i in tl.static_range(1, BLOCK_T // PAGE):
        page = tl.where(offs_t < i * PAGE, page, pages[i])
    within = t % PAGE + offs_t if BLOCK_T <= PAGE else offs_t % PAGE
    return (page.to(tl.int64) * stride_kp + within * D)[:, None]


def pool_rows(cache):
    """(the whole pool as [pages * rows, D], a row being a position of a head; rows of a page), from any layer's part
    of it."""
    rows = cache.stride(0) // cache.shape[3]
    return cache.as_strided((len(cache) * rows, cache.shape[3]), (cache.shape[3], 1), 0), rows
