"""Gates, norms and the convolution of a gated delta net layer, in kernels and references."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .arguments import DeltaHeads, DeltaWeights

L2_EPS = tl.constexpr(1e-6)  # epsilon of the l2 norm of q and k; transformers fixes it too
MAX_FP16 = tl.constexpr(65504.0)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), with the relative precision of fp32 also where exp(x) is small."""
    y = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + y
    # log(one), corrected by the ratio of y to the part of it that was not lost in 1 + y
    log = tl.log(one) * (y / tl.where(one == 1.0, 1.0, one - 1.0))
    return tl.where(x > 20.0, x, tl.where(one == 1.0, y, log))


@triton.jit
def log_decay(a, a_log, dt_bias):
    """Return the log decay g = -exp(`a_log`) * softplus(`a` + `dt_bias`). A position multiplies the state by exp(g)."""
    return -tl.exp(a_log) * softplus(a + dt_bias)


@triton.jit
def key_head_of(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, TILED: tl.constexpr):
    """Return the head of q and k that a V head uses; see DeltaHeads.tiled."""
    if TILED:
        key_head = head % KEY_HEADS
    else:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
    return key_head


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def norm_and_gate(o, squares, z, norm, eps, V: tl.constexpr, SIGMOID: tl.constexpr):
    """Return the RMS norm of the heads' outputs `o`, multiplied by the weight `norm` and by the gate of `z`.

    squares: for each head, the sum of the squares of its V outputs.
    """
    gate = tl.sigmoid(z)
    if not SIGMOID:
        gate = z * gate
    return o * tl.rsqrt(squares / V + eps) * norm * gate


@triton.jit
def rounded(state, state_ptr):
    """Round a state to the dtype of the records. Then it has the same bits as a state that a later pass loads.

    Values that exceed the range of fp16 become the largest value.
    """
    if state_ptr.dtype.element_ty == tl.float16:
        state = tl.clamp(state, -MAX_FP16, MAX_FP16).to(tl.float16).to(tl.float32)
    return state


def rounded_ref(state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Compute `rounded` in torch."""
    if dtype == torch.float16:
        state = state.clamp(-MAX_FP16.value, MAX_FP16.value).to(dtype).float()
    return state


def rates(b: torch.Tensor, a: torch.Tensor, weights: DeltaWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """Return beta and the log decay g, both fp32, of projections `b` and `a`, both [..., value heads].

    One row at a time: with several rows, torch on a CPU rounds some numbers differently (see equal_sigmoid).
    """
    softplus = _by_row(torch.nn.functional.softplus, a.float() + weights.dt_bias.float())
    return _by_row(torch.sigmoid, b.float()), -weights.a_log.float().exp() * softplus


def _by_row(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return the results of a function for the rows of x [..., n]."""
    return torch.stack([function(row) for row in x.reshape(-1, x.shape[-1])]).view(x.shape)


def l2_norm(x: torch.Tensor) -> torch.Tensor:
    """Return x [..., n] divided by its length."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS.value)


def gated_norm(o: torch.Tensor, z: torch.Tensor, norm: torch.Tensor, heads: DeltaHeads) -> torch.Tensor:
    """Return the RMS norm of `o`, [..., value heads, value_dim], times the weight `norm` and the gate of `z`."""
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + heads.eps) * norm.float()
    return o * (z.sigmoid() if heads.sigmoid else torch.nn.functional.silu(z))


def split_heads(x: torch.Tensor, heads: DeltaHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v by head from x [..., channels]; q and k once for each V head."""
    q, k, v = x.split((heads.key_size, heads.key_size, heads.value_size), -1)
    q, k = (heads.of_values(part.unflatten(-1, (heads.key, heads.key_dim)), -2) for part in (q, k))
    return q, k, v.unflatten(-1, (heads.value, heads.value_dim))
