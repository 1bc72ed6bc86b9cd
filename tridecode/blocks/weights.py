"""Weights of a model on its device, as the passes read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..kernels.linear.weight import LoadedLinear
from ..tensors import short_repr
from .host_layers import HostLayers
from .spec import ModelSpec


class LayerWeights(NamedTuple):
    """The linears of one layer, and its other weights, by their declared names."""

    linears: Mapping[str, LoadedLinear]
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Weights:
    """The weights of a model.

    Args:
        embed: [vocab, hidden].
        layers: the weights of each layer.
        final_norm: [hidden].
        lm_head: the LM head. If it is tied, it shares the storage of `embed`.
        host: the layers whose linears are in host memory, or None. Every pass copies these linears to a ring of buffers
            on the device.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    lm_head: LoadedLinear
    host: HostLayers | None = None

    def __repr__(self) -> str:
        return short_repr(self, self.embed, layers=len(self.layers), nbytes=self.nbytes())

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the embedding."""
        return self.embed.dtype

    @property
    def tied(self) -> bool:
        """Whether the LM head is the embedding itself."""
        return self.lm_head.weight is self.embed

    def linears(self) -> list[LoadedLinear]:
        """Return the linears of all layers, then the LM head."""
        return [*(linear for layer in self.layers for linear in layer.linears.values()), self.lm_head]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by its dotted name. A tied LM head occurs once."""
        tensors = {"embed": self.embed, "final_norm": self.final_norm}
        if not self.tied:
            tensors |= {f"lm_head.{name}": tensor for name, tensor in self.lm_head.tensors().items()}
        for i, layer in enumerate(self.layers):
            tensors |= {f"layers.{i}.{name}": tensor for name, tensor in layer.weights.items()}
            for name, linear in layer.linears.items():
                tensors |= {f"layers.{i}.{name}.{part}": tensor for part, tensor in linear.tensors().items()}
        return tensors

    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())


def bytes_read(spec: ModelSpec, weights: Weights, rows: int) -> float:
    """Return the bytes of the weights that a decode pass of `rows` rows reads.

    Experts count by the expected number of distinct ones. The embedding counts only if it is also the LM head, because
    a pass reads one row of it per token.
    """
    total = float(weights.nbytes() - (0 if weights.tied else weights.embed.nbytes))
    for layer, loaded in zip(spec.layers, weights.layers):
        for linear in layer.linears():
            if linear.experts:
                total -= loaded.linears[linear.name].nbytes * (1 - linear.experts_of(rows) / linear.experts)
    return total
