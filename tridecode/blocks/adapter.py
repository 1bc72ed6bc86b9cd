"""Adapter: low-rank changes of the linears of a model, in host memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch

_serials = count(1)


class LowRank(NamedTuple):
    """The change B A of one linear.

    Args:
        a: [parts, rank, k]. Each part of the linear has a matrix A of its own.
        b: [n, rank]. It contains the factor of the adapter. A row is multiplied with the A of its part.
    """

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        """The rank, a multiple of adapters.RANK_STEP. It is rounded up with zeros."""
        return self.b.shape[1]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter.

    Args:
        name: the name by which requests select it.
        source: the directory or the Hugging Face id.
        linears: (layer, name of the linear) -> its change. Other linears are not changed.
        serial: the number of the adapter among all of this process. An adapter that is loaded again has another number.
    """

    name: str
    source: str
    linears: Mapping[tuple[int, str], LowRank]
    serial: int = field(default_factory=lambda: next(_serials))

    def __repr__(self) -> str:
        return f"Adapter(name={self.name!r}, rank={self.rank}, linears={len(self.linears)}, nbytes={self.nbytes})"

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max((each.rank for each in self.linears.values()), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        return sum(tensor.nbytes for each in self.linears.values() for tensor in each)
