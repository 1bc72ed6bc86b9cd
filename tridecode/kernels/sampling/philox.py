"""Philox 4x32-10, the counter-based random number generator of the draw, as a kernel function and in Python."""

import triton
import triton.language as tl

MASK = 0xFFFFFFFF


@triton.jit
def philox_bits(seed_lo, seed_hi, position, stream):
    """Return 64 random bits (uint64) for a step of a slot. The seed is the key; position and stream are the counter."""
    seed = (seed_hi.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | seed_lo.to(tl.uint32, bitcast=True).to(tl.uint64)
    zero = position * 0
    high, low, _, _ = tl.philox(seed, position, stream, zero, zero)
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


def philox_words(seed: int, counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of Philox 4x32-10 for a 64-bit seed."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & MASK, seed >> 32 & MASK
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & MASK, (a >> 32) ^ c3 ^ k1, a & MASK
        k0, k1 = k0 + 0x9E3779B9 & MASK, k1 + 0xBB67AE85 & MASK
    return c0, c1, c2, c3


def philox_bits_ref(seed_lo: int, seed_hi: int, position: int, stream: int) -> int:
    """Compute `philox_bits` in Python. The halves of the seed may be signed, as in meta."""
    high, low, _, _ = philox_words((seed_hi & MASK) << 32 | (seed_lo & MASK), (position & MASK, stream, 0, 0))
    return high << 32 | low
