"""Weights in host memory: the linears of the last layers. Passes read them through two buffers on the device."""

import math
import re
from dataclasses import dataclass

import torch

from ..tensors import aligned, host_memory

LAYER_BUFFERS = 2  # Number of device buffers of one layer each. One is filled while the other is read.
ALIGNED = 256  # Alignment in bytes of a matrix within its layer.
LINEAR = re.compile(r"layers\.(\d+)\.(\w+\.weight)")
Shapes = dict[str, tuple[int, ...]]  # Name of a tensor, such as "layers.3.qkv.weight" -> its shape.


@dataclass(frozen=True)
class HostLayers:
    """The last layers of a model, with linears in host memory.

    Args:
        first: the first of these layers.
        stored: name of each linear -> its weight in host memory.
        read: name of each linear -> the part of a buffer from which passes read it.
        source: for each layer, its linears in host memory as one tensor, [1, words] int64.
        target: for each layer, its buffer on the device, with the shape of `source`.
        places: [2] int32, the argument of `fetch` that selects the whole tensor.
    """

    first: int
    stored: dict[str, torch.Tensor]
    read: dict[str, torch.Tensor]
    source: tuple[torch.Tensor, ...]
    target: tuple[torch.Tensor, ...]
    places: torch.Tensor

    @property
    def end(self) -> int:
        """Index after the last of these layers."""
        return self.first + len(self.source)


def layer_sizes(shapes: Shapes, dtype: torch.dtype) -> list[int]:
    """Return the bytes of the linears of each layer."""
    return [_size(linears, dtype) for linears in _by_layer(shapes)]


def make_host_layers(shapes: Shapes, device: torch.device, dtype: torch.dtype, first: int) -> HostLayers:
    """Allocate the linears of the layers from `first` to the last one, and the buffers. Raises DeviceError."""
    layers = _by_layer(shapes)[first:]
    sizes = [_size(linears, dtype) for linears in layers]
    ring = torch.empty(LAYER_BUFFERS, max(sizes), dtype=torch.uint8, device=device)
    host = host_memory(len(layers), max(sizes), device, "weights_offload")
    stored: dict[str, torch.Tensor] = {}
    read: dict[str, torch.Tensor] = {}
    source, target = [], []
    for i, (row, own, size) in enumerate(zip(host, layers, sizes)):
        buffer, at = ring[i % LAYER_BUFFERS], 0
        for name, shape in own.items():
            length = math.prod(shape) * dtype.itemsize
            for tensors, memory in ((stored, row), (read, buffer)):
                tensors[name] = memory[at : at + length].view(dtype).view(shape)
            at += aligned(length, ALIGNED)
        source.append(row[:size].view(torch.int64)[None])
        target.append(buffer[:size].view(torch.int64)[None])
    places = torch.tensor([1, 0], dtype=torch.int32, device=device)
    return HostLayers(first, stored, read, tuple(source), tuple(target), places)


def _by_layer(shapes: Shapes) -> list[Shapes]:
    """Return the weights of the linears of each layer."""
    layers: dict[int, Shapes] = {}
    for name, shape in shapes.items():
        if match := LINEAR.fullmatch(name):
            layers.setdefault(int(match[1]), {})[name] = shape
    return [layers[number] for number in sorted(layers)]


def _size(linears: Shapes, dtype: torch.dtype) -> int:
    """Return the bytes of the linears of a layer, stored as one tensor."""
    return aligned(sum(aligned(math.prod(shape) * dtype.itemsize, ALIGNED) for shape in linears.values()))
