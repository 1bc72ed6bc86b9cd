"""Rotary embedding with the norm before it: in a kernel, for heads as halves, and the references."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_rope(lo, hi, norm_lo, norm_hi, cos, sin, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
    """Normalise and rotate rows given as their lower and upper halves [rows, D / 2 padded]."""
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(lo * lo + hi * hi, 1) / D + eps)[:, None]
        lo = lo * scale * norm_lo[None, :]
        hi = hi * scale * norm_hi[None, :]
    return lo * cos[None, :] - hi * sin[None, :], hi * cos[None, :] + lo * sin[None, :]


def rotate(x, cos, sin):
    """Rotary embedding of x [..., head_dim] by cos, sin [..., head_dim / 2], halves paired as transformers does."""
    lo, hi = x.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
