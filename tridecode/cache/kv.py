"""K/V storage: a pool of pages, and the table that says which page holds which positions of a slot."""

from dataclasses import dataclass, field

import torch

from ..model.config import ModelConfig
from ..model.weights import short_repr
from .offload import Offload, Offloaded, make_offloaded

PAGE = 64  # positions


@dataclass(frozen=True)
class KVCache:
    """pool: [pages, layers, 2, kv_heads, page, head_dim], K then V; page_table: [slots, max_pages] int32.

    k, v: of each layer [pages, kv_heads, page, head_dim] views, and tables: [slots, max_pages] int32, which of these
    pages a slot has. Without offload the pool's part of the layer and the page table; with it all cells (offload.py).
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    capacity: int
    offload: Offloaded | None = None
    k: tuple[torch.Tensor, ...] = field(init=False)
    v: tuple[torch.Tensor, ...] = field(init=False)
    tables: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self):
        layers = self.pool.shape[1]
        if self.rings:
            k, v = self.offload.cells.unbind(1)
            k, v, tables = [k] * layers, [v] * layers, self.offload.tables.unbind(0)
        else:
            k, v = (part.unbind(1) for part in self.pool.unbind(2))
            tables = [self.page_table] * layers
        for name, parts in (("k", k), ("v", v), ("tables", tables)):
            object.__setattr__(self, name, tuple(parts))

    def __repr__(self) -> str:
        return short_repr(self, self.pool, layers=len(self.k), pages=len(self.pool), capacity=self.capacity)

    @property
    def page(self) -> int:
        """Positions in a page."""
        return self.pool.shape[4]

    @property
    def positions(self) -> int:
        """Of the device, all slots together."""
        return len(self.pool) * self.page

    @property
    def pages(self) -> int:
        """Of the device and of the host."""
        return len(self.pool) + (len(self.offload.host) if self.offload else 0)

    @property
    def runnable(self) -> int:
        """Pages that requests which run can have together: the device's, and of the host as many as the ring holds."""
        return len(self.pool) + (self.offload.plan.ring if self.offload else 0)

    @property
    def rings(self) -> bool:
        """Whether passes read pages of the host, through the ring."""
        return self.offload is not None and self.offload.plan.ring > 0

    @property
    def buffers(self) -> int:
        """Of that ring."""
        return self.offload.plan.buffers if self.rings else 0

    def held(self, slot: int, end: int) -> torch.Tensor:
        """A copy of the K/V of a slot's first `end` positions: [layers, 2, kv_heads, end, head_dim]."""
        numbers = self.page_table[slot, : max(-(-end // self.page), 1)].tolist()
        pages = torch.stack([self._page(number).to(self.pool.device) for number in numbers])
        return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :end, :]

    def _page(self, number: int) -> torch.Tensor:
        """The page that an entry of page_table names."""
        if number < len(self.pool):
            return self.pool[number]
        return self.offload.host[self.offload.fetched[1 + number - len(self.pool)].item()]


def make_kv_cache(
    config: ModelConfig, capacity: int, device, dtype: torch.dtype, slots: int = 1, page: int | None = None,
    pages: int | None = None, offload: Offload | None = None,
) -> KVCache:  # fmt: skip
    """Allocate K/V for slots of `capacity` positions.

    page: positions in one, by default PAGE, and on a CPU all of a slot's, so that the references read slices. pages:
    of the whole pool, by default what all slots can have. offload: pages beside those, in the host's memory. Raises
    DeviceError where that cannot be had.
    """
    page = page or (capacity if torch.device(device).type == "cpu" else PAGE)
    longest = -(-capacity // page)
    pages = pages or slots * longest
    shape = (pages, config.num_layers, 2, config.num_kv_heads, page, config.head_dim)
    table = torch.arange(slots * longest, dtype=torch.int32, device=device).remainder_(pages).view(slots, longest)
    if offload is None:
        return KVCache(torch.zeros(shape, dtype=dtype, device=device), table, capacity)
    offloaded = make_offloaded(config, device, dtype, table, page, pages, offload)
    return KVCache(offloaded.cells[: pages * config.num_layers].view(shape), table, capacity, offloaded)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
