"""K/V storage: a pool of pages, and a page table that maps the positions of a slot to pages."""

from dataclasses import dataclass, field

import torch

from ..blocks.spec import ModelSpec
from ..kernels.attention.fp8_kv import head_rows, load_cells, scales
from ..tensors import short_repr
from .offload import Offload, Offloaded, make_offloaded

PAGE = 64  # Number of positions of a page.


@dataclass(frozen=True)
class KVCache:
    """The K/V of all slots.

    Args:
        pool: [pages, layers, 2, kv_heads, page, head_dim], K then V. In fp8 it is uint8 [pages, layers, 2, kv_heads,
            bytes of a head]. The bytes of a head are its codes, followed by their scales (fp8_kv.py).
        page_table: [slots, max_pages] int32, the pages of each slot.
        capacity: positions of one slot.
        page: positions in a page.
        offload: pages in host memory.

    `k` and `v` have one view [pages, kv_heads, page, head_dim] for each layer (in fp8 of the codes). `tables` has one
    [slots, max_pages] int32 table for each layer, which maps a slot's pages to indices of these views. Without a ring
    the views are the layer's part of the pool, and each table is the page table. With a ring the views have all cells
    (offload.py).
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    capacity: int
    page: int
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
        """Whether K/V are stored in fp8."""
        return self.pool.dtype == torch.uint8

    @property
    def numbers(self) -> torch.Tensor:
        """The pool without scales: [pages, layers, 2, kv_heads, page, head_dim]."""
        codes = self.pool[..., : self.page * self.head_dim] if self.fp8 else self.pool
        return codes.unflatten(-1, (self.page, self.head_dim)) if self.fp8 else codes

    @property
    def positions(self) -> int:
        """Number of positions on the device, for all slots together."""
        return len(self.pool) * self.page

    @property
    def pages(self) -> int:
        """Number of pages on the device and in host memory."""
        return len(self.pool) + (len(self.offload.host) if self.offload else 0)

    @property
    def runnable(self) -> int:
        """Number of pages that active requests can have together: those on the device and the places in the ring."""
        return len(self.pool) + (self.offload.plan.ring if self.offload else 0)

    @property
    def rings(self) -> bool:
        """Whether passes read pages in host memory through the ring."""
        return self.offload is not None and self.offload.plan.ring > 0

    @property
    def buffers(self) -> int:
        """Number of buffers of the ring; 0 without a ring."""
        return self.offload.plan.buffers if self.offload and self.rings else 0

    def gather(self, slot: int, end: int) -> torch.Tensor:
        """Return a copy of the K/V of a slot's first `end` positions: [layers, 2, kv_heads, end, head_dim]."""
        numbers = self.page_table[slot, : max(-(-end // self.page), 1)].tolist()
        pages = torch.stack([self._page(number).to(self.pool.device) for number in numbers])
        return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :end, :]

    def fill(self, generator: torch.Generator | None = None) -> None:
        """Fill the pool with random numbers of a magnitude of about 1, for benchmarks."""
        if not self.fp8:
            self.pool.normal_(generator=generator)
            return
        self.pool.random_(0, 256, generator=generator).bitwise_and_(0xBF)  # The values are below 2, and none is NaN.
        for cache in (*self.k, *self.v):
            scales(cache).fill_(1)

    def _page(self, number: int) -> torch.Tensor:
        """Return the K/V of the page that an entry of page_table refers to; fp8 is returned as fp32."""
        if self.fp8:
            return torch.stack(
                [torch.stack([load_cells(k, number), load_cells(v, number)]) for k, v in zip(self.k, self.v)]
            )
        if number < len(self.pool):
            return self.pool[number]
        assert self.offload is not None, f"page {number} is not in the pool"
        return self.offload.host[int(self.offload.fetched[1 + number - len(self.pool)])]


def make_kv_cache(
    spec: ModelSpec, capacity: int, device: torch.device | str, dtype: torch.dtype, slots: int = 1,
    page: int | None = None, pages: int | None = None, offload: Offload | None = None,
) -> KVCache:  # fmt: skip
    """Allocate K/V for slots of `capacity` positions.

    Args:
        capacity: positions of one slot.
        slots: number of slots.
        page: positions in a page. By default PAGE; on a CPU all positions of a slot, so that the
            references read K/V as a slice.
        pages: pages of the pool, by default enough for all slots.
        offload: additional pages in host memory.

    Raises:
        DeviceError: the host memory cannot be allocated.
    """
    page = page or (capacity if torch.device(device).type == "cpu" else PAGE)
    longest = -(-capacity // page)
    pages = pages or slots * longest
    assert offload is None or not spec.fp8_kv, "K/V in fp8 cannot be offloaded"
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
    """Return the K/V bytes of one position, in pages of PAGE positions."""
    dim = spec.pages.head_dim
    row = dim * dtype.itemsize
    if spec.fp8_kv:
        row = -(-head_rows(PAGE, dim) * dim // PAGE)
    return 2 * spec.page_layers * spec.pages.kv_heads * row
