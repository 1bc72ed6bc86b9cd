"""Weights as the step reads them: projections fused, every tensor on one device in one dtype."""

from dataclasses import dataclass

import torch

from .formats.packed import Packed
from .host_layers import HostLayers


def short_repr(holder, tensor: torch.Tensor, **facts) -> str:
    """The repr of what holds tensors: a short line of facts, with dtype and device of `tensor`, one of them."""
    facts |= {"dtype": str(tensor.dtype).removeprefix("torch."), "device": str(tensor.device)}
    return f"{type(holder).__name__}({', '.join(f'{name}={value}' for name, value in facts.items())})"


@dataclass(frozen=True)
class Linear:
    """A projection y = x @ weight.T + bias.

    weight: [out_features, in_features], or the words of `packed`, with scale, zero and order as that says; bias:
    [out_features] or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    packed: Packed | None = None

    def __repr__(self) -> str:
        shape = [self.out_features, self.in_features]
        return short_repr(self, self.weight, shape=shape, bias=self.bias is not None, format=self.format)

    @property
    def format(self) -> str:
        return "dense" if self.packed is None else self.packed.name

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1] if self.packed is None else self.packed.k

    @property
    def nbytes(self) -> int:
        """Of the weight and what is needed to read it, without the bias."""
        return sum(tensor.nbytes for name, tensor in self.tensors().items() if name != "bias")

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("weight", "bias", "scale", "zero", "order")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def matrix(self) -> torch.Tensor:
        """The weight in fp32 [out_features, in_features]."""
        return self.weight.float() if self.packed is None else self.packed.codes(self.tensors()).dequantised()


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
