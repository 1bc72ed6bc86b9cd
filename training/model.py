"""Language models for train.py in plain PyTorch, with the parameter names of Hugging Face checkpoints: Qwen3."""

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE = -100


@dataclass(frozen=True)
class Config:
    """Shape of the model, named as in a Hugging Face config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6

    @property
    def rotated(self) -> int:
        """Columns of a head that rotary embedding rotates."""
        return self.head_dim

    def described(self) -> dict:
        """Return the entries of config.json for this architecture."""
        return asdict(self) | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "use_sliding_window": False,
        }

    def norm(self) -> nn.Module:
        """Return a norm of the hidden state."""
        return nn.RMSNorm(self.hidden_size, eps=self.rms_norm_eps)

    def mixer(self, i: int) -> tuple[str, nn.Module]:
        """Return the mixer of layer `i`, and its name in a checkpoint."""
        return "self_attn", Attention(self)

    def feed_forward(self) -> nn.Module:
        """Return the feed-forward block of a layer."""
        return MLP(self.hidden_size, self.intermediate_size)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary embedding to the first columns of x [batch, length, heads, head_dim].

    Args:
        cos, sin: [length, 1, half of the rotated columns]
    """
    half = cos.shape[-1]
    first, second, rest = x.split((half, half, x.shape[-1] - 2 * half), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with grouped queries, q/k norm and rotary embedding."""

    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (proj(x).view(batch, length, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = rotate(self.q_norm(q.float()), cos, sin).to(v.dtype).transpose(1, 2)
        k = rotate(self.k_norm(k.float()), cos, sin).to(v.dtype).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    """Feed-forward block with SiLU gate."""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer."""

    def __init__(self, config: Config, i: int, dropout: float):
        super().__init__()
        self.mixer, mixer = config.mixer(i)
        self.add_module(self.mixer, mixer)
        self.mlp, self.dropout = config.feed_forward(), dropout
        self.input_layernorm, self.post_attention_layernorm = config.norm(), config.norm()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        mixed = getattr(self, self.mixer)(self.input_layernorm(x), cos, sin)
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.post_attention_layernorm(x)), self.dropout, self.training)


class LanguageModel(nn.Module):
    """A language model with the output layer tied to the embedding."""

    def __init__(self, config: Config, dropout: float = 0.0):
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(config.vocab_size, config.hidden_size),
                "layers": nn.ModuleList(Layer(config, i, dropout) for i in range(config.num_hidden_layers)),
                "norm": config.norm(),
            }
        )
        frequencies = config.rope_theta ** (-torch.arange(0, config.rotated, 2) / config.rotated)
        angles = torch.outer(torch.arange(config.max_position_embeddings), frequencies)[:, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                branch_end = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * config.num_hidden_layers) if branch_end else 0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the cross-entropy over the targets that are not IGNORE.

        Args:
            tokens, targets: int64 [batch, length]. The length must be a multiple of 64 for Qwen3.5.
        """
        x = self.model["embed_tokens"](tokens)
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        for layer in self.model["layers"]:
            x = layer(x, cos, sin)
        logits = F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE, reduction="sum")
