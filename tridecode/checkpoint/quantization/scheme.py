"""What describes every format of a checkpoint: a Scheme of a module, the tensors it needs, the Codes they hold."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

import torch

from ...kernels.linear.packed import Codes, Packed

TILE = 128  # columns: kernels read four bits by so many, eight by half


@dataclass(frozen=True)
class Stored:
    """A tensor of a module in the file. dtypes: safetensors' names. per: how many rows of the weight one row of it is
    about; 0 where its rows are something else, and it is read whole."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    per: int = 1


@dataclass(frozen=True)
class Scheme:
    """How the weight of a module stands in a checkpoint.

    bits: 4 or 8; floating: e4m3, else integers. group: columns that share a scale, 0 for all; rows: that do, 0 for all.
    zeros: zero points stand beside; ordered: the group of each column does. read says the rest.
    """

    bits: int
    floating: bool
    group: int
    rows: int
    zeros: bool
    ordered: bool
    read: "Reading"

    @property
    def name(self) -> str:
        """Of the packed form, as kernels call it."""
        return "e4m3" if self.floating else f"int{self.bits}"

    def groups(self, k: int) -> int:
        return -(-k // self.group) if self.group else 1

    def blocks(self, n: int) -> int:
        return -(-n // self.rows) if self.rows else 1

    def describe(self) -> str:
        shared = f"blocks of {self.rows} x {self.group}" if self.rows > 1 else f"groups of {self.group}"
        if not self.group:
            shared = "a scale a row" if self.rows else "one scale"
        return f"{self.name}, {shared}{', ordered columns' if self.ordered else ''}"


@dataclass(frozen=True)
class Reading:
    """tensors(scheme, n, k): suffix of a module's tensor -> Stored. codes(scheme, tensors, n, k): the Codes that they
    hold, n rows of them; what the file says wrongly is a ValueError. harmless: suffixes of tensors that are not needed.
    """

    tensors: Callable[[Scheme, int, int], dict[str, Stored]]
    codes: Callable[[Scheme, dict[str, torch.Tensor], int, int], Codes]
    harmless: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quantization:
    """What a checkpoint says of its weights. rules: the first whose pattern is found in a module's name says its
    scheme; None, or no rule: the weight stands there as it is."""

    method: str
    rules: tuple[tuple[str, Scheme | None], ...]

    def scheme(self, module: str) -> Scheme | None:
        return next((scheme for pattern, scheme in self.rules if _compiled(pattern).search(module)), None)

    @property
    def schemes(self) -> list[Scheme]:
        return list(dict.fromkeys(scheme for _, scheme in self.rules if scheme is not None))


_compiled = lru_cache(re.compile)


def unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """uint8: the 32 / bits numbers of each int32, from the lowest on, one after another along `dim` (0 or 1)."""
    places = range(0, 32, bits)
    parts = [((words >> place) & (2**bits - 1)).to(torch.uint8) for place in places]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def sorted_columns(groups: torch.Tensor, group: int) -> torch.Tensor | None:
    """The order that puts columns of one group beside each other, given the group of each; None where they are already.
    Raises ValueError where a group has not `group` columns."""
    groups = groups.long()
    k = len(groups)
    expected = torch.arange(k, device=groups.device) // group
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise ValueError(f"each of its {-(-k // group)} groups must have {group} columns")
    return order


def packed_form(scheme: Scheme, k: int, starts: list[int], scale_dtype: torch.dtype) -> Packed:
    """Of a weight that pieces of `scheme` make up, from the rows `starts` on."""
    rows = gcd(*starts, scheme.rows) if scheme.rows > 1 else 1
    zeros, ordered = scheme.zeros, scheme.ordered
    return Packed(scheme.name, scheme.bits, k, scheme.group or k, rows, zeros, ordered, scale_dtype)
