"""Offload: K/V pages in the host's memory, and the ring of device buffers through which a layer's part of them comes.

The ring and the device's pages are one tensor of cells, a cell being one page of one layer. A table for each layer
names the cell of each page, be it on the device or in the ring, so attention reads both alike.
"""

import math
from dataclasses import dataclass, field

import torch

from ..blocks.spec import ModelSpec
from ..tensors import aligned, host_memory

WRITTEN = 3  # device pages that a slot's passes may write at a time, beside those of a chunk
BUFFERS = 2  # of the ring: one is filled while another is read


@dataclass(frozen=True)
class Offload:
    """How much there is beside the device's pages. host: pages in the host's memory; ring: pages of one layer that each
    of `buffers` buffers holds, and so host pages that the requests which run may have together, fewer than host; 0:
    none, what runs is all on the device and the host has what waits."""

    host: int
    ring: int
    buffers: int = BUFFERS


@dataclass(frozen=True)
class Offloaded:
    """cells: [device pages x layers + buffers x ring pages, 2, kv_heads, page, head_dim]; host: [host pages, layers, 2,
    kv_heads, page, head_dim]; tables: [layers, slots, max_pages] int32, cells; fetched: [1 + ring pages] int32, how
    many places of the ring are in use, and of each the host page that it holds, -1 for none.

    source, target: of each layer its part of the host's pages, [host pages, cell] int64, and its buffer of the ring,
    [ring pages, cell] int64.
    """

    cells: torch.Tensor
    host: torch.Tensor
    tables: torch.Tensor
    fetched: torch.Tensor
    pages: int  # of the device
    plan: Offload
    source: tuple[torch.Tensor, ...] = field(init=False)
    target: tuple[torch.Tensor, ...] = field(init=False)
    _layer: torch.Tensor = field(init=False, repr=False, compare=False)  # [layers, 1] int32
    _shift: torch.Tensor = field(init=False, repr=False, compare=False)  # [layers, 1] int32, added to ring places

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
        """Write the slot's first `count` entries of all tables. page_table: [slots, max_pages] int32, of each page that
        of the device, or device pages + its place in the ring."""
        at = page_table[slot, :count]
        cells = torch.where(at < self.pages, at * len(self.tables) + self._layer, at + self._shift)
        self.tables[:, slot, :count] = cells


def make_offloaded(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype, page_table: torch.Tensor, page: int, pages: int,
    plan: Offload,
) -> Offloaded:  # fmt: skip
    """Allocate `pages` of the device, the ring and the host's pages. Raises DeviceError where the host's memory cannot
    be had."""
    cell, layers = (2, spec.pages.kv_heads, page, spec.pages.head_dim), spec.page_layers
    cells = torch.zeros(pages * layers + plan.buffers * plan.ring, *cell, dtype=dtype, device=device)
    tables = torch.zeros(layers, *page_table.shape, dtype=torch.int32, device=device)
    fetched = torch.zeros(1 + plan.ring, dtype=torch.int32, device=device)
    host = host_pages(plan.host, (layers, *cell), dtype, torch.device(device))
    return Offloaded(cells, host, tables, fetched, pages, plan)


def least_pages(slots: int, page: int, chunk: int = 1) -> int:
    """Of the device: for what slots write, and for a pass that reads `chunk` tokens of a prompt."""
    return slots * WRITTEN + -(-chunk // page)


def page_bytes(layers: int, kv_size: int, page: int, dtype: torch.dtype) -> int:
    """Of a page in the host's memory, all layers."""
    return aligned(2 * layers * kv_size * page * dtype.itemsize)


def host_pages(count: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[count, *shape] in the host's memory, where kernels of `device` can read it."""
    layers, _, kv_heads, page, head_dim = shape
    memory = host_memory(count, page_bytes(layers, kv_heads * head_dim, page, dtype), device, "kv_offload")
    return memory.view(dtype)[:, : math.prod(shape)].view(count, *shape)
