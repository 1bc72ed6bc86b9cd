"""K/V storage: a pool of pages, and the table that says which page holds which positions of a slot."""

from dataclasses import dataclass, field

import torch

from ..model.config import ModelConfig
from ..model.weights import short_repr

PAGE = 64  # positions


@dataclass(frozen=True)
class KVCache:
    """pool: [pages, layers, 2, kv_heads, page, head_dim], K then V; page_table: [slots, max_pages] int32.

    k, v: the pool's part of each layer, [pages, kv_heads, page, head_dim] views.
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    capacity: int
    k: tuple[torch.Tensor, ...] = field(init=False)
    v: tuple[torch.Tensor, ...] = field(init=False)

    def __post_init__(self):
        k, v = self.pool.unbind(2)
        object.__setattr__(self, "k", k.unbind(1))
        object.__setattr__(self, "v", v.unbind(1))

    def __repr__(self) -> str:
        return short_repr(self, self.pool, layers=len(self.k), pages=len(self.pool), capacity=self.capacity)

    @property
    def page(self) -> int:
        """Positions in a page."""
        return self.pool.shape[4]

    def held(self, slot: int, end: int) -> torch.Tensor:
        """A copy of the K/V of a slot's first `end` positions: [layers, 2, kv_heads, end, head_dim]."""
        pages = self.pool[self.page_table[slot].long()]
        return pages.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[..., :end, :]


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
    shape = (pages, config.num_layers, 2, config.num_kv_heads, page, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype, device=device)
    table = torch.arange(slots * longest, dtype=torch.int32, device=device).remainder_(pages).view(slots, longest)
    return KVCache(pool, table, capacity)


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
