"""The sampler's arithmetic: distances from the maximum on a grid, and probability mass in fixed point.

A token's distance is (largest logit - its logit) / temperature in units of 2**-17 nat, rounded up, and at most 32 nats.
The maximum itself has distance 0, exactly. Tokens at equal distances are tied. A token's weight is exp(-distance) in
units of 2**-42, and zero from 29 nats on.

Every operation is exact or rounded once (no fused multiply-add, no library exp). A GPU, the interpreter and torch
therefore compute the same integers, and integer sums do not depend on their order. Therefore the filters keep the same
tokens, and the same token is sampled, on every device.
"""

import torch
import triton
import triton.language as tl

BINS = 2048  # Number of bins of one histogram level. Two levels resolve a distance.
LOW_BITS = 11
FARTHEST = BINS * BINS - 1
WEIGHT_BITS = 42  # The weight of the most likely token is 2**42, so that sums over 2**21 tokens fit in int64.
GRID = 131072.0  # Number of distance units in a nat.
LOG2E = 1549082005  # log2(e) * 2**30
COEFFICIENTS = (1.14980677e-04, -1.29178894e-03, 9.59716851e-03, -5.54992773e-02, 2.40226097e-01, -6.93147175e-01, 1.0)

MAX_FP32 = tl.constexpr(3.4028234663852886e38)  # The largest finite fp32 number.
_FARTHEST, _GRID, _LOG2E = tl.constexpr(FARTHEST), tl.constexpr(GRID), tl.constexpr(LOG2E)
_ONE = tl.constexpr(float(2**WEIGHT_BITS))
_C6, _C5, _C4, _C3, _C2, _C1, _C0 = (tl.constexpr(c) for c in COEFFICIENTS)


@triton.jit
def grid_scale(temperature):
    """Return the units of distance in a unit of logit, at a temperature above 0."""
    return tl.minimum(tl.div_rn(_GRID, tl.where(temperature > 0, temperature, 1.0)), MAX_FP32)


@triton.jit
def distance(y, largest, scale):
    """Return the int32 distances of logits y from the largest one."""
    return tl.minimum(tl.ceil((largest - y) * scale), _FARTHEST).to(tl.int32)


@triton.jit
def weight(d):
    """Return the int64 weight of a distance. It decreases monotonically.

    A polynomial computes the fraction of d * log2(e), a shift the whole part.
    """
    t = d.to(tl.int64) * _LOG2E  # Unit: 2**-47.
    f = ((t >> 23).to(tl.int32) & 0xFFFFFF).to(tl.float32) * 5.9604644775390625e-08
    p = f * _C6 + _C5
    p = p * f + _C4
    p = p * f + _C3
    p = p * f + _C2
    p = p * f + _C1
    p = p * f + _C0
    return (p * _ONE).to(tl.int64) >> (t >> 47)


@triton.jit
def share(fraction, total):
    """Return the smallest int64 mass that is at least fraction (fp32) of total, and at least 1."""
    return tl.maximum(tl.ceil(fraction.to(tl.float64) * total.to(tl.float64)).to(tl.int64), 1)


def distance_ref(y: torch.Tensor, largest: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Compute `distance` in torch, at a temperature above 0 (fp32, no dimensions). Returns int64 [vocab]."""
    scale = (torch.full_like(temperature, GRID) / temperature).clamp_(max=MAX_FP32.value)
    return (largest - y).mul_(scale).ceil_().clamp_(max=float(FARTHEST)).long()


def weight_ref(d: torch.Tensor) -> torch.Tensor:
    """Compute `weight` in torch."""
    t = d * LOG2E
    f = (t >> 23).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)
    p = f * COEFFICIENTS[0]
    for c in COEFFICIENTS[1:-1]:
        p.add_(c).mul_(f)
    return p.add_(COEFFICIENTS[-1]).mul_(float(2**WEIGHT_BITS)).long() >> (t >> 47)
