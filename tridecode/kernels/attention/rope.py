"""Rotary embedding of queries and keys, and the RMS norm before it, in kernels and references.

The partner of a column is the column D / 2 away. rotated = x * cos + partner * sin, with sin negated in the lower half.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Rotary(NamedTuple):
    """The fields of arguments.Rope in a kernel."""

    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    q_norm_ptr: tl.tensor  # read if the model has these norms
    k_norm_ptr: tl.tensor
    eps: tl.tensor


@triton.jit
def partner_of(offs_d, D: tl.constexpr):
    """Return the partners of the columns offs_d."""
    return tl.where(offs_d < D // 2, offs_d + D // 2, offs_d - D // 2)


@triton.jit
def rotation(rotary, norm_ptr, position, offs_d, D: tl.constexpr, NORM: tl.constexpr):
    """Load the factors of columns offs_d, and those of their partners, at one position.

    If NORM, the factors include the weights of the norm.
    """
    mask_d = offs_d < D
    lower = offs_d < D // 2
    row = position.to(tl.int64) * (D // 2)
    offs = tl.where(lower, offs_d, offs_d - D // 2)
    cos = tl.load(rotary.cos_ptr + row + offs, mask=mask_d, other=0.0)
    sin = tl.load(rotary.sin_ptr + row + offs, mask=mask_d, other=0.0)
    sin = tl.where(lower, -sin, sin)
    if NORM:
        cos *= tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        sin *= tl.load(norm_ptr + partner_of(offs_d, D), mask=mask_d, other=0.0).to(tl.float32)
    return cos, sin


@triton.jit
def rms_rope(x, partner, factors, eps, D: tl.constexpr, NORM: tl.constexpr):
    """Rotate the rows x [rows, D padded], after normalizing them if NORM.

    Args:
        partner: [rows, D padded], the partners of x's columns.
        factors: Result of `rotation`, or factors of each row.
    """
    cos, sin = factors
    if len(cos.shape) == 1:
        cos, sin = cos[None, :], sin[None, :]
    y = x * cos + partner * sin
    if NORM:
        y *= tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    return y


@triton.jit
def load_rotated(
    ptrs, positions, mask, rotary, norm_ptr, BLOCK_D: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr
):  # fmt: skip
    """Load rows [N, D padded] from ptrs [N], normalize them if NORM, and rotate each to its position [N]."""
    offs_d = tl.arange(0, BLOCK_D)
    lower, partner = offs_d < D // 2, partner_of(offs_d, D)
    mask = mask[:, None] & (offs_d < D)[None, :]
    x = tl.load(ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_partner = tl.load(ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    offs = positions.to(tl.int64)[:, None] * (D // 2) + tl.where(lower, offs_d, offs_d - D // 2)[None, :]
    cos = tl.load(rotary.cos_ptr + offs, mask=mask, other=0.0)
    sin = tl.load(rotary.sin_ptr + offs, mask=mask, other=0.0)
    sin = tl.where(lower[None, :], -sin, sin)
    if NORM:
        cos *= tl.load(norm_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
        sin *= tl.load(norm_ptr + partner, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
    return rms_rope(x, x_partner, (cos, sin), rotary.eps, D, NORM)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate x [..., head_dim] by cos, sin [..., head_dim / 2]; halves are paired, as in transformers."""
    lo, hi = x.chunk(2, -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x [..., N] times weight [N]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotated(x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float):
    """Normalize x [..., head_dim], if there are weights of a norm, and rotate it."""
    return rotate(x if norm is None else rms_norm(x, norm, eps), cos, sin)
