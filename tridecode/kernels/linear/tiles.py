"""Whole rows of a weight matrix as register tiles, so that all their bytes are in flight before the wait."""

import triton
import triton.language as tl


@triton.jit
def load_tiles(row_ptrs, mask_n, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr, POLICY: tl.constexpr):
    """K columns of the rows at row_ptrs [n, 1], as a tuple of [n, BLOCK_K] tiles; MASKED where a row may not exist."""
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    tiles = ()
    for k in tl.static_range(0, K, BLOCK_K):
        if k + BLOCK_K > K:
            tiles += (
                tl.load(row_ptrs + k + offs_k, mask=mask_n & (k + offs_k < K), other=0.0, eviction_policy=POLICY),
            )
        elif MASKED:
            tiles += (tl.load(row_ptrs + k + offs_k, mask=mask_n, other=0.0, eviction_policy=POLICY),)
        else:
            tiles += (tl.load(row_ptrs + k + offs_k, eviction_policy=POLICY),)
    return tiles


@triton.jit
def load_rows(weight_ptr, offs_n, N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, MASKED: tl.constexpr):
    """Rows offs_n of weight [N, K] as tiles; MASKED where offs_n may pass N. Each weight is read once in a step."""
    rows = weight_ptr + offs_n.to(tl.int64)[:, None] * K
    return load_tiles(rows, (offs_n < N)[:, None], K, BLOCK_K, MASKED, "evict_first")


@triton.jit
def dot_tiles(w, x, BLOCK_N: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Row sums [BLOCK_N] of the products of w's tiles [BLOCK_N, BLOCK_K] and x's [1, BLOCK_K], fp32.

    A thread keeps eight sums a row; of many rows one, for the registers: it first adds the elements it loads at once.
    """
    GROUP: tl.constexpr = 8 if BLOCK_N > 2 else 1
    acc = tl.zeros([BLOCK_N, BLOCK_K // GROUP], tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        product = w[k // BLOCK_K].to(tl.float32) * x[k // BLOCK_K].to(tl.float32)
        if GROUP == 1:
            acc += product
        else:
            acc += tl.sum(product.reshape(BLOCK_N, BLOCK_K // GROUP, GROUP), 2)
    return tl.sum(acc, 1)
