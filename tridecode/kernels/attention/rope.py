"""Rotary embedding with the norm before it: in a kernel, and the references.

A column's partner is the one D / 2 away, and rotated = x * cos + partner * sin, sin negative in the lower half.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _partner(offs_d, D: tl.constexpr):
    return tl.where(offs_d < D // 2, offs_d + D // 2, offs_d - D // 2)


@triton.jit
def _rotation(cos_ptr, sin_ptr, norm_ptr, offs_d, D: tl.constexpr, NORM: tl.constexpr):
    """What columns offs_d and their partners are multiplied by at one position, norm weights included. cos, sin:
    [D / 2] fp32; norm: [D], read if NORM."""
    mask_d = offs_d < D
    lower = offs_d < D // 2
    offs = tl.where(lower, offs_d, offs_d - D // 2)
    cos = tl.load(cos_ptr + offs, mask=mask_d, other=0.0)
    sin = tl.load(sin_ptr + offs, mask=mask_d, other=0.0)
    sin = tl.where(lower, -sin, sin)
    if NORM:
        cos *= tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        sin *= tl.load(norm_ptr + _partner(offs_d, D), mask=mask_d, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def _rms_rope(x, partner, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rows x [rows, D padded], normalised if NORM, and rotated by what _rotation gives."""
    y = x * cos[None, :] + partner * sin[None, :]
    if NORM:
        y *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return y


def rotate(x, cos, sin):
    """Rotary embedding of x [..., head_dim] by cos, sin [..., head_dim / 2], halves paired as transformers does."""
    lo, hi = x.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
