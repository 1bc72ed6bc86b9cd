"""Layers whose projections lie in the host's memory: the model's last ones, read through buffers of the device."""

import math
import re
from dataclasses import dataclass

import torch

from ..tensors import aligned, host_memory

LAYER_BUFFERS = 2  # of the device, of a layer each: one is filled while the other is read
ALIGNED = 256  # bytes: of a matrix within its layer
PROJECTION = re.compile(r"layers\.(\d+)\.(\w+\.weight)")
Shapes = dict[str, tuple[int, ...]]  # of a model's tensors, by the names that Weights gives them


@dataclass(frozen=True)
class HostLayers:
    """first: the first of these layers; those after it follow.

    stored, read: each projection, by its name, where it lies and where products read it. source, target: the same of
    each layer in one piece, [1, words] int64; places: [2] int32, by which `fetch` brings it.
    """

    first: int
    stored: dict[str, torch.Tensor]
    read: dict[str, torch.Tensor]
    source: tuple[torch.Tensor, ...]
    target: tuple[torch.Tensor, ...]
    places: torch.Tensor

    @property
    def end(self) -> int:
        return self.first + len(self.source)


def layer_bytes(shapes: Shapes, dtype: torch.dtype) -> int:
    """Of a layer's projections in the host's memory, or in a buffer."""
    return aligned(sum(aligned(math.prod(shape) * dtype.itemsize, ALIGNED) for shape in _projections(shapes).values()))


def make_host_layers(shapes: Shapes, device: torch.device, dtype: torch.dtype, first: int, layers: int) -> HostLayers:
    """Allocate the projections of layers `first` to `layers` - 1, and the buffers. Raises DeviceError."""
    size = layer_bytes(shapes, dtype)
    ring = torch.empty(LAYER_BUFFERS, size, dtype=torch.uint8, device=device)
    host = host_memory(layers - first, size, device, "weights_offload")
    stored, read = {}, {}
    buffers = [ring[i % LAYER_BUFFERS] for i in range(layers - first)]
    for layer, (ours, buffer) in enumerate(zip(host, buffers), first):
        at = 0
        for name, shape in _projections(shapes).items():
            length = math.prod(shape) * dtype.itemsize
            for found, of in ((stored, ours), (read, buffer)):
                found[f"layers.{layer}.{name}"] = of[at : at + length].view(dtype).view(shape)
            at += aligned(length, ALIGNED)
    source, target = (tuple(row.view(torch.int64)[None] for row in rows) for rows in (host, buffers))
    return HostLayers(first, stored, read, source, target, torch.tensor([1, 0], dtype=torch.int32, device=device))


def _projections(shapes: Shapes) -> Shapes:
    """Those of one layer, all of which are alike, by their names in it."""
    found = ((PROJECTION.fullmatch(name), shape) for name, shape in shapes.items() if len(shape) == 2)
    return {match[2]: shape for match, shape in found if match and match[1] == "0"}
