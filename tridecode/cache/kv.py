"""K/V storage: a pool of pages, and the table that says which page holds which positions of a slot."""

from dataclasses import dataclass, field

import torch

from ..kernels.fp8_kv import head_rows, held, scales
from ..model.config import ModelConfig
from ..model.weights import short_repr

PAGE = 64  # positions


@dataclass(frozen=True)
class KVCache:
    """pool: [pages, layers, 2, kv_heads, page, head_dim], K then V, or of 8 bits uint8 [pages, layers, 2, kv_heads,
    bytes of a head], its codes and then its scales, see kernels/fp8_kv.py; page_table: [slots, max_pages] int32.

    k, v: the pool's part of each layer, [pages, kv_heads, page, head_dim] views, of 8 bits the codes.
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    capacity: int
    page: int  # positions in a page
    head_dim: int
    k: tuple[torch.Tensor, ...] = field(init=False)
    v: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self):
        k, v = self.numbers.unbind(2)
        object.__setattr__(self, "k", k.unbind(1))
        object.__setattr__(self, "v", v.unbind(1))

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

    def held(self, slot: int, end: int) -> torch.Tensor:
        """A copy of the K/V of a slot's first `end` positions: [layers, 2, kv_heads, end, head_dim]."""
        pages = self.page_table[slot].long()
        layers = [torch.stack([held(k, (pages,)), held(v, (pages,))]) for k, v in zip(self.k, self.v)]
        return torch.stack(layers).transpose(2, 3).flatten(3, 4)[..., :end, :]

    def fill(self, generator: torch.Generator | None = None) -> None:
        """Random numbers of about unit size everywhere, for benchmarks."""
        if not self.fp8:
            self.pool.normal_(generator=generator)
            return
        self.pool.random_(0, 256, generator=generator).bitwise_and_(0xBF)  # below 2, and no NaN
        for cache in (*self.k, *self.v):
            scales(cache).fill_(1)


def make_kv_cache(
    config: ModelConfig, capacity: int, device, dtype: torch.dtype, slots: int = 1, page: int | None = None,
    pages: int | None = None,
) -> KVCache:  # fmt: skip
    """Allocate K/V for slots of `capacity` positions.

    page: positions in one, by default PAGE, and on a CPU all of a slot's, so that the references read slices. pages:
    of the whole pool, by default what all slots can have.
    """
    page = page or (capacity if torch.device(device).type == "cpu" else PAGE)
    longest = -(-capacity // page)
    pages = pages or slots * longest
    shape = (pages, config.num_layers, 2, config.num_kv_heads)
    if config.fp8_kv:
        shape, dtype = (*shape, head_rows(page, config.head_dim) * config.head_dim), torch.uint8
    else:
        shape = (*shape, page, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    table = torch.arange(slots * longest, dtype=torch.int32, device=device).remainder_(pages).view(slots, longest)
    return KVCache(pool, table, capacity, page, config.head_dim)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    """In pages of the usual size."""
    row = config.head_dim * dtype.itemsize
    if config.fp8_kv:
        row = -(-head_rows(PAGE, config.head_dim) * config.head_dim // PAGE)
    return 2 * config.num_layers * config.num_kv_heads * row
