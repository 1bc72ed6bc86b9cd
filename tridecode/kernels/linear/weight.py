"""LoadedLinear: the weight of a linear on the device, dense or as a packed tensor, and its bias."""

from dataclasses import dataclass

import torch

from ...tensors import short_repr
from .packed import Packed


@dataclass(frozen=True)
class LoadedLinear:
    """A linear y = x @ weight.T + bias.

    Args:
        weight: [out_features, in_features], or the words of a packed tensor.
        bias: [out_features] or None.
        scale, zero, order, minimum, over: the other parts of a packed tensor, or None.
        packed: the description of the packed tensor. None: the weight is dense.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    zero: torch.Tensor | None = None
    order: torch.Tensor | None = None
    packed: Packed | None = None
    minimum: torch.Tensor | None = None
    over: torch.Tensor | None = None

    def __repr__(self) -> str:
        shape = [self.out_features, self.in_features]
        return short_repr(self, self.weight, shape=shape, bias=self.bias is not None, number_type=self.number_type)

    @property
    def number_type(self) -> str:
        """The number type of the codes of a quantized weight, or "dense"."""
        return "dense" if self.packed is None else self.packed.number_type

    @property
    def out_features(self) -> int:
        """Number of rows of the weight."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """Number of columns of the weight."""
        return self.weight.shape[1] if self.packed is None else self.packed.k

    @property
    def nbytes(self) -> int:
        """Bytes of the weight with its scales, zero points and order, without the bias."""
        return sum(tensor.nbytes for name, tensor in self.tensors().items() if name != "bias")

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are not None, by name."""
        names = ("weight", "bias", "scale", "zero", "order", "minimum", "over")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def arguments(self, placeholder: torch.Tensor) -> dict:
        """Return the arguments of a kernel that loads the weight, by name. `placeholder` replaces missing tensors.

        FORM is the number type. zero_ptr points to the bits of the zero points, int16.
        """
        packed = self.packed
        return {
            "weight_ptr": self.weight,
            "scale_ptr": placeholder if packed is None else self.scale,
            "zero_ptr": placeholder if self.zero is None else self.zero.view(torch.int16),
            "order_ptr": placeholder if self.order is None else self.order,
            "minimum_ptr": placeholder if self.minimum is None else self.minimum,
            "over_ptr": placeholder if self.over is None else self.over,
            "K": self.in_features,
            "FORM": self.number_type,
            "GROUP": self.in_features if packed is None else packed.group,
            "SCALE_ROWS": 1 if packed is None else packed.rows,
            "ZEROS": self.zero is not None,
            "ORDERED": self.order is not None,
            "MINIMUMS": self.minimum is not None,
            "OVER": 0 if packed is None else packed.over_group,
        }

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return `count` rows of the weight in fp32, from row `first` on. Both are multiples of packed.rows."""
        if self.packed is None:
            return self.weight[first : first + count].float()
        part = {name: tensor[first : first + count] for name, tensor in self.tensors().items() if name != "order"}
        assert self.scale is not None
        part["scale"] = self.scale[first // self.packed.rows : -(-(first + count) // self.packed.rows)]
        return self.packed.unpack(part | ({} if self.order is None else {"order": self.order})).dequantize()

    def matrix(self) -> torch.Tensor:
        """Return the weight in fp32, [out_features, in_features]. A packed tensor is dequantized."""
        return self.weight.float() if self.packed is None else self.packed.unpack(self.tensors()).dequantize()
