"""Qwen3.5 for train.py: layers with a gated delta net, and full attention in every fourth layer.

The parameters have the names of a Hugging Face Qwen3_5ForCausalLM checkpoint. The gated delta rule is computed in
chunks, as in "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024), with batched matrix products only.
"""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from model import Config, rotate
from torch import Tensor, nn

CHUNK = 64


@dataclass(frozen=True)
class HybridConfig(Config):
    """Shape of the model, named as in a Hugging Face config.json."""

    intermediate_size: int = 640
    full_attention_interval: int = 4
    linear_num_key_heads: int = 2
    linear_num_value_heads: int = 4
    linear_key_head_dim: int = 64
    linear_value_head_dim: int = 64
    linear_conv_kernel_dim: int = 4
    partial_rotary_factor: float = 0.25

    @property
    def rotated(self) -> int:
        """Columns of a head that rotary embedding rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    def described(self) -> dict:
        """Return the entries of config.json for this architecture."""
        values = asdict(self)
        rope = {key: values.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        return values | {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "rope_parameters": {"rope_type": "default"} | rope,
            "attn_output_gate": True,
            "mamba_ssm_dtype": "float32",
        }

    def norm(self) -> nn.Module:
        """Create a norm layer with the width of the hidden state."""
        return Norm(self.hidden_size, self.rms_norm_eps)

    def mixer(self, i: int) -> tuple[str, nn.Module]:
        """Return the mixer of layer `i`, and its name in a checkpoint."""
        if (i + 1) % self.full_attention_interval == 0:
            return "self_attn", GatedAttention(self)
        return "linear_attn", GatedDeltaNet(self)


class UnitLowerInverse(torch.autograd.Function):
    """The inverse of I + below, where `below` [..., n, n] is strictly lower triangular and n a power of two.

    Diagonal blocks are inverted in doubling sizes: the inverse of [[P, 0], [L, Q]] has -Q' L P' below the diagonal,
    where P' and Q' are the inverses of P and Q.
    """

    @staticmethod
    def forward(ctx, below: Tensor) -> Tensor:
        n, size = below.shape[-1], 1
        index = torch.arange(n, device=below.device)
        inverse = torch.eye(n, device=below.device)
        while size < n:
            block = index // size
            joined = (block[:, None] == block[None] + 1) & (block[:, None] % 2 == 1)
            inverse = inverse - inverse @ (below * joined) @ inverse
            size *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        return -(inverse.mT @ grad @ inverse.mT)


class Scan(torch.autograd.Function):
    """The states before each chunk: state[0] = 0, state[n + 1] = factors[n] @ state[n] + terms[n].

    Args:
        factors: [chunks, batch, k, k]
        terms: [chunks, batch, k, v]
    """

    @staticmethod
    def forward(ctx, factors: Tensor, terms: Tensor) -> Tensor:
        states = torch.zeros_like(terms)
        for n in range(len(terms) - 1):
            torch.baddbmm(terms[n], factors[n], states[n], out=states[n + 1])
        ctx.save_for_backward(factors, states)
        return states

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        factors, states = ctx.saved_tensors
        after = torch.zeros_like(grad)  # the gradient of the state after each chunk
        for n in range(len(grad) - 1, 0, -1):
            torch.baddbmm(grad[n], factors[n].mT, after[n], out=after[n - 1])
        return after @ states.mT, after


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return the outputs of the gated delta rule, fp32 [batch, length, value heads, v].

    Args:
        q, k: fp32 [batch, length, key heads, k], not normalized
        v: fp32 [batch, length, value heads, v]
        g: fp32 [batch, length, value heads], the logarithms of the decay
        beta: fp32 [batch, length, value heads], the strengths of the updates
    """
    heads, size = k.shape[2:]
    q, k = (F.rms_norm(x, (size,), eps=1e-6 / size) * size**-0.5 for x in (q, k))  # rows of length 1
    # Chunks come first: [chunks, batch, key heads, value heads of a key head, positions, ...].
    q, k, v, g, beta = (
        x.unflatten(2, (heads, -1)).unflatten(1, (-1, CHUNK)).movedim((1, 0, 3, 4, 2), (0, 1, 2, 3, 4)).contiguous()
        for x in (q, k, v, g, beta)
    )
    total = g.cumsum(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -math.inf).exp()
    since, left = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    below = (k @ k.mT * decay * beta[..., None]).masked_fill(~lower.tril(-1), 0)
    inverse = UnitLowerInverse.apply(below.flatten(0, 3)).view_as(below)
    written = inverse @ (v * beta[..., None])
    read = inverse @ (k * (beta[..., None] * since))
    kept = (k * left).mT
    factors = torch.eye(size, device=g.device) * since[..., -1:, :] - kept @ read
    states = Scan.apply(factors.flatten(1, 3), (kept @ written).flatten(1, 3)).view(*factors.shape[:-1], -1)
    written = written - read @ states
    out = (q * since) @ states + (q @ k.mT * decay) @ written
    return (out * size**-0.5).permute(1, 0, 4, 2, 3, 5).contiguous().flatten(3, 4).flatten(1, 2)


class Norm(nn.Module):
    """RMSNorm whose weight is stored minus one."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, self.eps)


class Convolution(nn.Module):
    """Causal convolution of each channel by itself."""

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width).uniform_(-(width**-0.5), width**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        length, width = x.shape[1], self.weight.shape[2]
        padded, weight = F.pad(x, (0, 0, width - 1, 0)), self.weight[:, 0].to(x.dtype)
        return sum(padded[:, i : i + length] * weight[:, i] for i in range(width))


class GatedNorm(nn.Module):
    """RMSNorm of each head, times silu of the gate."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate.float())


class GatedDeltaNet(nn.Module):
    """A gated delta net: a state [k, v] for each value head, with a decay and an update at each position."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        heads, hidden = config.linear_num_value_heads, config.hidden_size
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        self.keys, self.values = config.linear_num_key_heads * self.key_dim, heads * self.value_dim
        channels = 2 * self.keys + self.values
        self.in_proj_qkv = nn.Linear(hidden, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden, self.values, bias=False)
        self.in_proj_b = nn.Linear(hidden, heads, bias=False)
        self.in_proj_a = nn.Linear(hidden, heads, bias=False)
        self.conv1d = Convolution(channels, config.linear_conv_kernel_dim)
        # Decays between 0.2 and 0.9999 of a position: softplus(dt_bias) is in [0.001, 0.1], as in Mamba 2.
        step = torch.exp(torch.empty(heads).uniform_(math.log(1e-3), math.log(0.1)))
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(1, 16).log())
        self.norm = GatedNorm(self.value_dim, config.rms_norm_eps)
        self.out_proj = nn.Linear(self.values, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        mixed = F.silu(self.conv1d(self.in_proj_qkv(x)))
        z, b, a = self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        with torch.autocast(x.device.type, enabled=False):
            q, k, v = mixed.float().split((self.keys, self.keys, self.values), -1)
            q, k = (part.reshape(batch, length, -1, self.key_dim) for part in (q, k))
            g = -self.A_log.exp() * F.softplus(a.float() + self.dt_bias)
            out = delta_rule(q, k, v.reshape(batch, length, -1, self.value_dim), g, b.float().sigmoid())
            out = self.norm(out, z.view(batch, length, -1, self.value_dim))
        return self.out_proj(out.flatten(2))


class GatedAttention(nn.Module):
    """Causal self-attention with grouped queries, q/k norm, partial rotary embedding and an output gate."""

    def __init__(self, config: HybridConfig):
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, 2 * q_size, bias=False)  # A head's query, then its gate.
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = Norm(config.head_dim, config.rms_norm_eps)
        self.k_norm = Norm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * self.head_dim).chunk(2, dim=-1)
        k, v = (proj(x).view(batch, length, -1, self.head_dim) for proj in (self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q), cos, sin).to(v.dtype).transpose(1, 2)
        k = rotate(self.k_norm(k), cos, sin).to(v.dtype).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj((out.transpose(1, 2) * gate.sigmoid()).flatten(2))
