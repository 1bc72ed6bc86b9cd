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
def dot_tiles(w, x, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Row sums [n] of the products of w's tiles [n, BLOCK_K] and x's [1, BLOCK_K], fp32."""
    acc = w[0].to(tl.float32) * x[0].to(tl.float32)
    for k in tl.static_range(BLOCK_K, K, BLOCK_K):
        acc += w[k // BLOCK_K].to(tl.float32) * x[k // BLOCK_K].to(tl.float32)
    return tl.sum(acc, 1)
