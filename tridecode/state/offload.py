"""Offload: K/V pages in host memory. Passes copy one layer of them at a time to a ring of device buffers.

The ring and the device's pages are one tensor of cells. A cell is one page of one layer. Each layer has a table that
maps pages to cells. A cell belongs to a device page or to the ring, and attention reads both in the same way.
"""

import math
from dataclasses import dataclass, field

import torch

from ..blocks.spec import ModelSpec
from ..tensors import aligned, host_memory

WRITTEN = 3  # Device pages that the decode passes of a slot may write at a time. Prompt chunks need more.
BUFFERS = 2  # Number of buffers. One is filled while the other is read.


@dataclass(frozen=True)
class Offload:
    """Sizes of the storage in addition to the device's pages.

    Args:
        host: pages in host memory.
        ring: capacity of each buffer, in pages of one layer. It is less than `host`. All active requests together
            can have at most this many pages in host memory. With 0 all pages of active requests are on the
            device, and host memory stores only pages of waiting requests.
        buffers: buffers of the ring.
    """

    host: int
    ring: int
    buffers: int = BUFFERS


@dataclass(frozen=True)
class Offloaded:
    """Tensors of offloaded K/V.

    Args:
        cells: [device pages x layers + buffers x ring pages, 2, kv_heads, page, head_dim].
        host: [host pages, layers, 2, kv_heads, page, head_dim], in host memory.
        tables: [layers, slots, max_pages] int32, the cell of each page of each slot.
        fetched: [1 + ring pages] int32. The first element is the number of places of the ring in use, the others are
            the host page of each place, or -1.
        pages: pages on the device.
        plan: the sizes.

    For each layer, `source` is its part of the host's pages, [host pages, cell] int64, and `target` is its buffer of
    the ring, [ring pages, cell] int64.
    """

    cells: torch.Tensor
    host: torch.Tensor
    tables: torch.Tensor
    fetched: torch.Tensor
    pages: int
    plan: Offload
    source: tuple[torch.Tensor, ...] = field(init=False)
    target: tuple[torch.Tensor, ...] = field(init=False)
    _layer: torch.Tensor = field(init=False, repr=False, compare=False)  # [layers, 1] int32.
    # [layers, 1] int32, which is added to the places in the ring.
    _shift: torch.Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        layers, ring = self.host.shape[1], self.plan.ring
        rings = [self.pages * layers + i * ring for i in range(self.plan.buffers)]
        buffers = [self.cells[first : first + ring].flatten(1).view(torch.int64) for first in rings]
        source = self.host.flatten(2).view(torch.int64).unbind(1)
        numbers = torch.arange(layers, dtype=torch.int32)
        first = torch.tensor(rings, dtype=torch.int32)[numbers % self.plan.buffers]
        device = self.cells.device
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "target", tuple(buffers[i % self.plan.buffers] for i in range(layers)))
        object.__setattr__(self, "_layer", numbers[:, None].to(device))
        object.__setattr__(self, "_shift", (first - self.pages)[:, None].to(device))

    def resolve(self, page_table: torch.Tensor, slot: int, count: int) -> None:
        """Write the slot's first `count` entries of the tables of all layers.

        Args:
            page_table: [slots, max_pages] int32: a page of the device, or device pages + a place in the ring.
        """
        at = page_table[slot, :count]
        cells = torch.where(at < self.pages, at * len(self.tables) + self._layer, at + self._shift)
        self.tables[:, slot, :count] = cells


def make_offloaded(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, page_table: torch.Tensor, page: int, pages: int,
    plan: Offload,
) -> Offloaded:  # fmt: skip
    """Allocate `pages` device pages, the ring and the host's pages.

    Raises:
        DeviceError: the host memory cannot be allocated.
    """
    cell, layers = (2, spec.pages.kv_heads, page, spec.pages.head_dim), spec.page_layers
    cells = torch.zeros(pages * layers + plan.buffers * plan.ring, *cell, dtype=dtype, device=device)
    tables = torch.zeros(layers, *page_table.shape, dtype=torch.int32, device=device)
    fetched = torch.zeros(1 + plan.ring, dtype=torch.int32, device=device)
    host = host_pages(plan.host, (layers, *cell), dtype, torch.device(device))
    return Offloaded(cells, host, tables, fetched, pages, plan)


def min_pages(slots: int, page: int, chunk: int = 1) -> int:
    """Return the minimum number of device pages: those that slots write, and those of `chunk` prompt tokens."""
    return slots * WRITTEN + -(-chunk // page)


def page_bytes(layers: int, kv_size: int, page: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page in host memory, all layers."""
    return aligned(2 * layers * kv_size * page * dtype.itemsize)


def host_pages(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate [count, *shape] in host memory that kernels on `device` can read."""
    layers, _, kv_heads, page, head_dim = shape
    memory = host_memory(count, page_bytes(layers, kv_heads * head_dim, page, dtype), device, "kv_offload")
    return memory.view(dtype)[:, : math.prod(shape)].view(count, *shape)
