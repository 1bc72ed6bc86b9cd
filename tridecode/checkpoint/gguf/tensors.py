"""Tensors of GGUF files, by the names that they have in Hugging Face checkpoints."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ...arguments import shown
from ...errors import CheckpointError
from ...models import gguf_config
from ...models.experts import MAX_EXPERTS
from ...models.gguf import BlockType, GGUFTensor, read_gguf
from ...models.gguf_config import NONE, Change, Order
from ..tensor_info import FLOATS, TensorInfo
from .dequantize import NAMES, dequantize


@dataclass(frozen=True)
class GGUFInfo(TensorInfo):
    """A tensor of a GGUF file. `dtype` is the name of its type.

    Args:
        name: its name in the file.
        block: its type.
        change: what the converter did to it.
    """

    name: str
    block: BlockType
    change: Change

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) // self.block.columns * self.block.nbytes

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.nbytes // self.shape[0]

    def rows(self, first: int, count: int, fill: Callable[[int, torch.Tensor], None]) -> torch.Tensor:
        """Return the bytes of rows in the order of the Hugging Face checkpoint, uint8 [count, row_bytes].

        Args:
            first: the first row.
            fill: fill(first, part) reads rows of the file into a tensor.
        """
        order = self.change.rows
        if order is None:
            data = torch.empty(count, self.row_bytes, dtype=torch.uint8)
            fill(first, data)
            return data
        places = original_order(order, self.shape[0])[first : first + count]
        begin, end = int(places.min()), int(places.max()) + 1
        data = torch.empty(end - begin, self.row_bytes, dtype=torch.uint8)
        fill(begin, data)
        return data[places - begin]

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the numbers in rows of bytes, in the dtype of the file or fp32, on the device of the rows.

        All of the change is undone, except its offset.

        Raises:
            CheckpointError: a number of a quantized tensor is not finite.
        """
        if self.dtype in FLOATS:
            values = rows.view(FLOATS[self.dtype]).view(len(rows), *self.shape[1:])
        else:
            try:
                values = dequantize(rows, self.dtype, self.block.nbytes)
            except ValueError as error:
                raise CheckpointError(
                    f"{self.file}: tensor {self.name} {error}; use another copy of the file"
                ) from None
        if self.change.negated_exp:
            values = (-values.float()).log()
            if not values.isfinite().all():
                raise CheckpointError(f"{self.file}: tensor {self.name} must hold negative numbers")
        if self.change.columns is not None:
            values = values[:, original_order(self.change.columns, self.shape[1]).to(values.device)]
        return values


def original_order(order: Order, count: int) -> torch.Tensor:
    """Return the place in the file of each of `count` rows or columns of the Hugging Face checkpoint, int64 [count]."""
    moved = torch.arange(order.kept, count).view(-1, order.b, order.a, order.size).transpose(1, 2).reshape(-1)
    return torch.cat((torch.arange(order.kept), moved))


def gguf_tensors(path: Path, as_stored: bool = True) -> dict[str, TensorInfo]:
    """Return the tensors of a GGUF file by their names in a Hugging Face checkpoint.

    Args:
        as_stored: as for `config_values`.

    Raises:
        CheckpointError: the file is malformed, or the model is not supported.
    """
    gguf = read_gguf(path)
    config = gguf_config.config_values(gguf, as_stored)
    infos: dict[str, TensorInfo] = {}
    for stored, name in gguf_config.names(gguf).items():
        if name is None:
            continue
        tensor = gguf.tensors[stored]
        prefix, modules = gguf_config.stacked_modules(stored)
        if modules and len(tensor.shape) == 3:
            infos |= _expert_matrices(stored, tensor, prefix, modules)
            continue
        change = gguf_config.change(gguf, name, config) if name != stored else NONE
        for order, count in ((change.rows, tensor.shape[0]), (change.columns, tensor.shape[-1])):
            if order and (count - order.kept) % (order.a * order.b * order.size):
                raise CheckpointError(f"{path}: tensor {shown(stored)} cannot have the shape {list(tensor.shape)}")
        # The gate of a shared expert is stored with one dimension.
        shape = (1, *tensor.shape) if name.endswith("shared_expert_gate.weight") else tensor.shape
        infos[name] = GGUFInfo(tensor.file, tensor.type.name, shape, tensor.begin, stored, tensor.type, change)
    return infos


def _expert_matrices(name: str, tensor: GGUFTensor, prefix: str, modules: tuple[str, ...]) -> dict[str, TensorInfo]:
    """Return the matrices of a tensor that stacks those of all experts, by their names in a checkpoint.

    Args:
        prefix, modules: see `stacked_modules`.
    """
    count, n, k = tensor.shape
    if count > MAX_EXPERTS or n % len(modules):
        raise CheckpointError(f"{tensor.file}: tensor {shown(name)} cannot have the shape {list(tensor.shape)}")
    n //= len(modules)
    size = tensor.nbytes // (count * len(modules))
    places = ((expert, i) for expert in range(count) for i in range(len(modules)))
    return {
        f"{prefix}{expert}.{modules[i]}.weight": GGUFInfo(
            tensor.file, tensor.type.name, (n, k), tensor.begin + (expert * len(modules) + i) * size, name,
            tensor.type, NONE,
        )
        for expert, i in places
    }  # fmt: skip


def check_type(info: TensorInfo, dimensions: int) -> None:
    """Check that the type of a tensor is supported. Raises CheckpointError.

    Args:
        dimensions: number of axes that the model expects.
    """
    known = (*FLOATS, *NAMES) if dimensions == 2 else tuple(FLOATS)
    if isinstance(info, GGUFInfo) and info.dtype not in known:
        raise CheckpointError(
            f"{info.file}: tensor {info.name} has the type {info.dtype}, which is not supported; supported are "
            f"{', '.join(known)}"
        )
