"""Scheme: how one weight is quantized. Quantization: the rules that choose a scheme for each weight."""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd
from typing import ClassVar

import torch

from ...arguments import shown
from ...kernels.linear.packed import Packed, QuantizedWeight
from .patterns import Names, Pattern


@dataclass(frozen=True)
class Stored:
    """A tensor of a module in a checkpoint.

    Args:
        shape: its shape.
        dtypes: the dtypes that it may have, as safetensors names them.
        per: number of rows of the weight to which one row of the tensor belongs. With 0, the tensor is read as a whole.
    """

    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    per: int = 1


@dataclass(frozen=True)
class Scheme(ABC):
    """How one weight is quantized. The file of each method defines how its schemes are stored.

    Args:
        bits: bits of a code: 4, 6 or 8.
        floating: the codes are e4m3. Otherwise they are integers.
        group: columns that share a scale; 0 for all.
        rows: rows that share a scale; 0 for all.
        zeros: each row of a group has a zero point.
        ordered: the checkpoint stores the group of each column.
    """

    bits: int
    floating: bool = False
    group: int = 0
    rows: int = 1
    zeros: bool = False
    ordered: bool = False

    unused: ClassVar[tuple[str, ...]] = ()  # Suffixes of tensors that a module may have and that the loader ignores.

    @abstractmethod
    def tensors(self, n: int, k: int) -> dict[str, Stored]:
        """Return the tensors that store a weight [n, k], by their suffixes. The largest comes first."""

    @abstractmethod
    def read(self, tensors: dict[str, torch.Tensor], n: int, k: int) -> QuantizedWeight:
        """Return the weight [n, k] that the tensors store. Raises ValueError if they contradict the scheme."""

    @property
    def number_type(self) -> str:
        """The number type of the codes, as a packed tensor names it."""
        return "e4m3" if self.floating else f"int{self.bits}"

    def groups(self, k: int) -> int:
        """Return the number of groups of columns in a row."""
        return -(-k // self.group) if self.group else 1

    def blocks(self, n: int) -> int:
        """Return the number of blocks of rows."""
        return -(-n // self.rows) if self.rows else 1

    def describe(self) -> str:
        """Return a short description, for example "int4, groups of 128"."""
        shared = f"blocks of {self.rows} x {self.group}" if self.rows > 1 else f"groups of {self.group}"
        if not self.group:
            shared = "a scale a row" if self.rows else "one scale"
        return f"{self.number_type}, {shared}{', ordered columns' if self.ordered else ''}"

    def packed(self, k: int, starts: list[int], scale_dtype: torch.dtype) -> Packed:
        """Return the packed tensor for a weight of k columns whose slices begin at the rows `starts`."""
        rows = gcd(*starts, self.rows) if self.rows > 1 else 1
        return Packed(self.number_type, self.bits, k, self.group or k, rows, self.zeros, self.ordered, scale_dtype)

    def common(self, others: "set[Scheme]", k: int) -> Packed | None:
        """Return the packed tensor for a weight of k columns whose parts have several schemes, or None."""
        return None


Rule = tuple[str | Names | Pattern, Scheme | None]


@dataclass(frozen=True)
class Quantization:
    """The rules that choose a scheme for each weight, from config.json or from `--quantize`.

    Args:
        name: the method of config.json, or the scheme that `--quantize` names.
        rules: pairs of a pattern and a scheme. The first pattern found in the name of a module decides. If its scheme
            is None, or if no pattern is found, the weight is not quantized. Patterns that a checkpoint contains are
            Names, or a Pattern, which must match at the start of the name.
    """

    name: str
    rules: tuple[Rule, ...]
    packs_tied_head: ClassVar[bool] = False  # A tied LM head is a packed copy of the embedding in the file.

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of the weight of a module. None: it is not quantized."""
        if module not in self._known:
            rules = self.rules
            self._known[module] = next((scheme for pattern, scheme in rules if _matches(pattern, module)), None)
        return self._known[module]

    @cached_property
    def _known(self) -> dict[str, Scheme | None]:
        """The schemes of the modules that were looked up before. Models with experts have tens of thousands."""
        return {}

    @property
    def schemes(self) -> list[Scheme]:
        """The distinct schemes."""
        return list(dict.fromkeys(scheme for _, scheme in self.rules if scheme is not None))


def _matches(pattern: str | Names | Pattern, module: str) -> bool:
    return bool(_compiled(pattern).search(module)) if isinstance(pattern, str) else pattern.match(module)


_compiled = lru_cache(re.compile)


def untrusted(read, key: str, text: str) -> Pattern:
    """Return the pattern of a checkpoint. Raises CheckpointError, which names the key, if it is invalid."""
    try:
        return Pattern(text)
    except ValueError as error:
        problem = f"names or valid regular expressions (invalid: {shown(text)}; {error})"
        raise read.fail(key, problem) from None


def unpack_words(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Return the codes, uint8, of a checkpoint's int32 words.

    Each word has 32 / bits codes, the first in its lowest bits.

    The codes of a word follow each other along `dim` (0 or 1).
    """
    parts = [((words >> place) & (2**bits - 1)).to(torch.uint8) for place in range(0, 32, bits)]
    return torch.stack(parts, dim + 1).flatten(dim, dim + 1)


def column_order(groups: torch.Tensor, size: int) -> torch.Tensor | None:
    """Return the order of columns in which the columns of a group are neighbors.

    Args:
        groups: [k], the group of each column.
        size: columns of a group.

    Returns:
        [k] int64, or None if the columns are in order.

    Raises:
        ValueError: a group has more or fewer than `size` columns.
    """
    groups = groups.long()
    k = len(groups)
    expected = torch.arange(k, device=groups.device) // size
    if torch.equal(groups, expected):
        return None
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], expected):
        raise ValueError(f"each of its {-(-k // size)} groups must have {size} columns")
    return order
