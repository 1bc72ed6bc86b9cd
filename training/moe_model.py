"""Qwen3 with mixtures of experts for train.py. The parameters have the names of a Qwen3MoeForCausalLM checkpoint."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from model import MLP, Config, LanguageModel
from torch import Tensor, nn


@dataclass(frozen=True)
class MoEConfig(Config):
    """Shape of the model, named as in a Hugging Face config.json."""

    num_hidden_layers: int = 6
    num_experts: int = 6
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128

    def described(self) -> dict:
        """Return the entries of config.json for this architecture."""
        experts = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return super().described() | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"} | experts

    def feed_forward(self) -> nn.Module:
        """Return the mixture of experts of a layer."""
        return Experts(self)


class Experts(nn.Module):
    """A mixture of experts. Every expert computes every row, and the weights of those that are not chosen are zero.

    Attributes:
        imbalance: the load balancing loss of the last forward pass, as in "Switch Transformers" (Fedus, Zoph and
            Shazeer, 2021): 1 if all experts get the same number of rows.
    """

    def __init__(self, config: MoEConfig):
        super().__init__()
        self.top_k, self.imbalance = config.num_experts_per_tok, torch.zeros(())
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=False)
        sizes = config.hidden_size, config.moe_intermediate_size
        self.experts = nn.ModuleList(MLP(*sizes) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            probabilities = F.linear(x.float(), self.gate.weight).softmax(-1)
        weights, ids = probabilities.topk(self.top_k, dim=-1)
        chosen = torch.zeros_like(probabilities).scatter(-1, ids, weights / weights.sum(-1, keepdim=True))
        shares = (chosen > 0).float().flatten(0, -2).mean(0) / self.top_k
        self.imbalance = len(self.experts) * (shares * probabilities.flatten(0, -2).mean(0)).sum()
        gate, up = (
            F.linear(x, torch.cat([getattr(expert, name).weight for expert in self.experts]))
            for name in ("gate_proj", "up_proj")
        )
        act = (F.silu(gate) * up).unflatten(-1, (len(self.experts), -1)) * chosen[..., None].to(gate.dtype)
        return F.linear(act.flatten(-2), torch.cat([expert.down_proj.weight for expert in self.experts], dim=1))


def imbalance(model: LanguageModel) -> Tensor | float:
    """Return the mean load balancing loss of the layers in the last forward pass; 0 without mixtures of experts."""
    losses = [module.imbalance for module in model.modules() if isinstance(module, Experts)]
    return torch.stack(losses).mean() if losses else 0.0
