"""Linear: a weight matrix on the device, dense or packed, with its bias."""

from dataclasses import dataclass

import torch

from ...tensors import short_repr
from .packed import Packed


@dataclass(frozen=True)
class LoadedLinear:
    """A projection y = x @ weight.T + bias.

    weight: [out_features, in_features]; or words, with scale, zero and order, as `packed` describes them. bias:
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
        """Bytes of the weight, its scales, zero points and order, without the bias."""
        return sum(tensor.nbytes for name, tensor in self.tensors().items() if name != "bias")

    def tensors(self) -> dict[str, torch.Tensor]:
        names = ("weight", "bias", "scale", "zero", "order")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def arguments(self, spare: torch.Tensor) -> dict:
        """Return the arguments of a kernel that loads the weight, by name; `spare` replaces missing tensors.

        zero_ptr: the bits of the zero points, int16.
        """
        packed = self.packed
        return {
            "weight_ptr": self.weight,
            "scale_ptr": spare if packed is None else self.scale,
            "zero_ptr": spare if self.zero is None else self.zero.view(torch.int16),
            "order_ptr": spare if self.order is None else self.order,
            "K": self.in_features,
            "FORM": self.format,
            "GROUP": self.in_features if packed is None else packed.group,
            "SCALE_ROWS": 1 if packed is None else packed.rows,
            "ZEROS": self.zero is not None,
            "ORDERED": self.order is not None,
        }

    def matrix(self) -> torch.Tensor:
        """Return the weight in fp32 [out_features, in_features]."""
        return self.weight.float() if self.packed is None else self.packed.codes(self.tensors()).dequantized()
