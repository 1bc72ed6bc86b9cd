"""Weights as the step reads them: projections fused, every tensor on one device in one dtype."""

from dataclasses import dataclass

import torch

from .host_layers import HostLayers


def short_repr(holder, tensor: torch.Tensor, **facts) -> str:
    """The repr of what holds tensors: a short line of facts, with dtype and device of `tensor`, one of them."""
    facts |= {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
    return f"{type(holder).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"


@dataclass(frozen=True)
class Linear:
    """A projection y = x @ weight.T + bias.

    weight: [out_features, in_features]; bias: [out_features] or None; scale is for quantised formats, None today.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    format: str = "dense"

    def __repr__(self) -> str:
        return short_repr(self, self.weight, shape=list(self.weight.shape), bias=self.bias is not None)

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by a dotted name, a tied lm_head once."""
        found = {"embed": self.embed, "final_norm": self.final_norm}
        if self.lm_head.weight.data_ptr() != self.embed.data_ptr():
            found["lm_head"] = self.lm_head.weight
        for i, layer in enumerate(self.layers):
            for name, value in vars(layer).items():
                if isinstance(value, Linear):
                    found[f"layers.{i}.{name}.weight"] = value.weight
                    if value.bias is not None:
                        found[f"layers.{i}.{name}.bias"] = value.bias
                elif value is not None:
                    found[f"layers.{i}.{name}"] = value
        return found

    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors().values())
