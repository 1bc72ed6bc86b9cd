"""Rotary embedding of queries and keys, and the RMS norm before it, in kernels and references.

The first ROTARY columns of a head are rotated, usually all D. The partner of a column is the column ROTARY / 2 away.
rotated = x * cos + partner * sin, with sin negated in the lower half.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Rotary(NamedTuple):
    """The fields of arguments.Rope in a kernel."""

    cos_ptr: tl.tensor
    sin_ptr: tl.tensor
    q_norm_ptr: tl.tensor  # The kernel reads the weights of the norms of q and k only if the model has these norms.
    k_norm_ptr: tl.tensor
    eps: tl.tensor


@triton.jit
def partner_of(offs_d, D: tl.constexpr, ROTARY: tl.constexpr):
    """Return the partners of the columns offs_d. A column that is not rotated is its own partner."""
    partner = tl.where(offs_d < ROTARY // 2, offs_d + ROTARY // 2, offs_d - ROTARY // 2)
    if ROTARY < D:
        partner = tl.where(offs_d < ROTARY, partner, offs_d)
    return partner


@triton.jit
def load_angles(rotary, row, offs, offs_d, mask, D: tl.constexpr, ROTARY: tl.constexpr):
    """Load cos and sin of the columns offs_d, at `row` + offs in the tables."""
    other: tl.constexpr = 0.0 if ROTARY == D else 1.0
    if ROTARY < D:
        mask = mask & (offs_d < ROTARY)
    cos = tl.load(rotary.cos_ptr + row + offs, mask=mask, other=other)
    sin = tl.load(rotary.sin_ptr + row + offs, mask=mask, other=0.0)
    return cos, tl.where(offs_d < ROTARY // 2, -sin, sin)


@triton.jit
def rotation(rotary, norm_ptr, position, offs_d, D: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr):
    """Load the factors of columns offs_d, and those of their partners, at one position.

    If NORM, the factors include the weights of the norm.
    """
    mask_d = offs_d < D
    offs = tl.where(offs_d < ROTARY // 2, offs_d, offs_d - ROTARY // 2)
    cos, sin = load_angles(rotary, position.to(tl.int64) * (ROTARY // 2), offs, offs_d, mask_d, D, ROTARY)
    if NORM:
        cos *= tl.load(norm_ptr + offs_d, mask=mask_d, other=0.0).to(tl.float32)
        sin *= tl.load(norm_ptr + partner_of(offs_d, D, ROTARY), mask=mask_d, other=0.0).to(tl.float32)
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
    ptrs, positions, mask, rotary, norm_ptr, BLOCK_D: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Load rows [N, D padded] from ptrs [N], normalize them if NORM, and rotate each to its position [N]."""
    offs_d = tl.arange(0, BLOCK_D)
    partner = partner_of(offs_d, D, ROTARY)
    mask = mask[:, None] & (offs_d < D)[None, :]
    x = tl.load(ptrs[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)
    x_partner = tl.load(ptrs[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    offs = positions.to(tl.int64)[:, None] * (ROTARY // 2)
    offs += tl.where(offs_d < ROTARY // 2, offs_d, offs_d - ROTARY // 2)[None, :]
    cos, sin = load_angles(rotary, 0, offs, offs_d[None, :], mask, D, ROTARY)
    if NORM:
        cos *= tl.load(norm_ptr + offs_d, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
        sin *= tl.load(norm_ptr + partner, mask=offs_d < D, other=0.0).to(tl.float32)[None, :]
    return rms_rope(x, x_partner, (cos, sin), rotary.eps, D, NORM)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first n columns of x [..., head_dim] by cos, sin [..., n / 2]; halves are paired (transformers)."""
    half = cos.shape[-1]
    lo, hi, rest = x.split((half, half, x.shape[-1] - 2 * half), -1)
    return torch.cat((lo * cos - hi * sin, hi * cos + lo * sin, rest), -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMS norm of x [..., N] times weight [N]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def rotated(x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor, eps: float):
    """Normalize x [..., head_dim], if there are weights of a norm, and rotate it."""
    return rotate(x if norm is None else rms_norm(x, norm, eps), cos, sin)
