"""Weights as the step reads them: projections fused, every tensor on one device in one dtype."""

from dataclasses import dataclass

import torch

from ..kernels.linear.weight import Linear
from ..tensors import short_repr
from .host_layers import HostLayers


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer.

    input_norm, post_norm: [hidden]; qkv: rows are q | k | v; q_norm, k_norm: [head_dim] or None;
    o_proj: [hidden, q_size]; gate_up: rows are gate | up; down: [hidden, intermediate].
    """

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o_proj: Linear
    post_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    def __repr__(self) -> str:
        return short_repr(self, self.input_norm, hidden=self.down.out_features, intermediate=self.down.in_features)


@dataclass(frozen=True)
class Weights:
    """A whole model. A tied lm_head shares the storage of `embed` ([vocab, hidden]). host: layers whose projections
    have their places in buffers, several in each: what is there is a layer's once it was fetched for it."""

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: Linear
    host: HostLayers | None = None

    def __repr__(self) -> str:
        return short_repr(self, self.embed, layers=len(self.layers), nbytes=self.nbytes())

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding itself."""
        return self.lm_head.packed is None and self.lm_head.weight.data_ptr() == self.embed.data_ptr()

    def formats(self) -> list[str]:
        """Those of its projections, without repetition."""
        linears = [v for layer in self.layers for v in vars(layer).values() if isinstance(v, Linear)]
        return list(dict.fromkeys(linear.format for linear in (*linears, self.lm_head)))

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by a dotted name, a tied lm_head once."""
        found = {"embed": self.embed, "final_norm": self.final_norm}
        if not self.tied:
            found |= {f"lm_head.{name}": tensor for name, tensor in self.lm_head.tensors().items()}
        for i, layer in enumerate(self.layers):
            for name, value in vars(layer).items():
                if isinstance(value, Linear):
                    found |= {f"layers.{i}.{name}.{part}": tensor for part, tensor in value.tensors().items()}
                elif value is not None:
                    found[f"layers.{i}.{name}"] = value
        return found

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())
