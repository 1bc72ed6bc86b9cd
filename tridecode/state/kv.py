"""K/V storage: a pool of pages, and the table that says which page holds which positions of a slot."""

from dataclasses import dataclass, field

import torch

from ..blocks.spec import ModelSpec
from ..kernels.attention.fp8_kv import head_rows, held, scales
from ..tensors import short_repr
from .offload import Offload, Offloaded, make_offloaded

PAGE = 64  # positions


@dataclass(frozen=True)
class KVCache:
    """pool: [pages, layers, 2, kv_heads, page, head_dim], K then V, or of 8 bits uint8 [pages, layers, 2, kv_heads,
    bytes of a head], its codes and then its scales, see fp8_kv.py; page_table: [slots, max_pages] int32.

    k, v: of each layer [pages, kv_heads, page, head_dim] views, of 8 bits the codes, and tables: [slots, max_pages]
    int32, which of these pages a slot has. Without offload the pool's part of the layer and the page table; with it all
    cells (offload.py).
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    capacity: int
    page: int  # positions in a page
    head_dim: int
    offload: Offloaded | None = None
    k: tuple[torch.Tensor, ...] = field(init=False)
    v: tuple[torch.Tensor, ...] = field(init=False)
    tables: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self) -> None:
        offload, layers = self.offload, self.pool.shape[1]
        if offload is not None and self.rings:
            k, v = ((cells,) * layers for cells in offload.cells.unbind(1))
            tables = offload.tables.unbind(0)
        else:
            k, v = (part.unbind(1) for part in self.numbers.unbind(2))
            tables = (self.page_table,) * layers
        for name, parts in (("k", k), ("v", v), ("tables", tables)):
            object.__setattr__(self, name, parts)

    def __repr__(self) -> str:
        return short_repr(self, self.pool, layers=len(self.k), pages=len(self.pool), capacity=self.capacity)

    @property
    def fp8(self) -> bool:
        return self.pool.dtype == torch.uint8

    @property
    def numbers(self) -> torch.Tensor:
        """The pool without scales: [pages, layers, 2, kv_heads, page, head_dim]."""
        codes = self.pool[..., : self.page * self.head_dim] if self.fp8 else self.pool
        return codes.unflatten(-1, (self.page, self.head_dim)) if self.fp8 else codes

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
        """Number of buffers of the ring; 0 without one."""
        return self.offload.plan.buffers if self.offload and self.rings else 0

    def held(self, slot: int, end: int) -> torch.Tensor:
        """A copy of the K/V of a slot's first `end` positions: [layers, 2, kv_heads, end, head_dim]."""
        numbers = self.page_table[slot, : max(-(-end // self.page), 1)].tolist()
        pages = torch.stack([self._page(number).to(self.pool.device) for number in numbers])
        return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :end, :]

    def fill(self, generator: torch.Generator | None = None) -> None:
        """Random numbers of about unit size everywhere, for benchmarks."""
        if not self.fp8:
            self.pool.normal_(generator=generator)
            return
        self.pool.random_(0, 256, generator=generator).bitwise_and_(0xBF)  # below 2, and no NaN
        for cache in (*self.k, *self.v):
            scales(cache).fill_(1)

    def _page(self, number: int) -> torch.Tensor:
        """The numbers of the page that an entry of page_table names, of 8 bits in fp32."""
        if self.fp8:
            return torch.stack([torch.stack([held(k, number), held(v, number)]) for k, v in zip(self.k, self.v)])
        if number < len(self.pool):
            return self.pool[number]
        assert self.offload is not None, f"page {number} is not in the pool"
        return self.offload.host[int(self.offload.fetched[1 + number - len(self.pool)])]


def make_kv_cache(
    spec: ModelSpec, capacity: int, device: torch.device | str, dtype: torch.dtype, slots: int = 1,
    page: int | None = None, pages: int | None = None, offload: Offload | None = None,
) -> KVCache:  # fmt: skip
    """Allocate K/V for slots of `capacity` positions.

    page: positions in one, by default PAGE, and on a CPU all of a slot's, so that the references read slices. pages:
    of the whole pool, by default what all slots can have. offload: pages beside those, in the host's memory. Raises
    DeviceError where that cannot be had.
    """
    page = page or (capacity if torch.device(device).type == "cpu" else PAGE)
    longest = -(-capacity // page)
    pages = pages or slots * longest
    assert offload is None or not spec.fp8_kv, "K/V in 8 bits are on the device"
    layers, heads, dim = spec.page_layers, spec.pages.kv_heads, spec.pages.head_dim
    shape: tuple[int, ...] = (pages, layers, 2, heads, page, dim)
    if spec.fp8_kv:
        shape, dtype = (pages, layers, 2, heads, head_rows(page, dim) * dim), torch.uint8
    table = torch.arange(slots * longest, dtype=torch.int32, device=device).remainder_(pages).view(slots, longest)
    if offload is None:
        pool = torch.zeros(shape, dtype=dtype, device=device)
        return KVCache(pool, table, capacity, page, dim)
    offloaded = make_offloaded(spec, device, dtype, table, page, pages, offload)
    pool = offloaded.cells[: pages * layers].view(shape)
    return KVCache(pool, table, capacity, page, dim, offloaded)


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """In pages of the usual size."""
    dim = spec.pages.head_dim
    row = dim * dtype.itemsize
    if spec.fp8_kv:
        row = -(-head_rows(PAGE, dim) * dim // PAGE)
    return 2 * spec.page_layers * spec.pages.kv_heads * row
