"""K/V storage: pages of positions per layer, and the table that says which page holds which positions."""

from dataclasses import dataclass

import torch

from .config import ModelConfig
from .weights import brief

PAGE_MULTIPLE = 128  # a page holds whole attention blocks


@dataclass(frozen=True)
class KVCache:
    """k, v: one [pages, kv_heads, page, head_dim] tensor a layer; page_table: [slots, max_pages] int32."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    page_table: torch.Tensor
    capacity: int

    def __repr__(self) -> str:
        return brief(self, self.k[0], layers=len(self.k), pages=self.k[0].shape[0], capacity=self.capacity)

    @property
    def page(self) -> int:
        """Positions in a page."""
        return self.k[0].shape[2]


def make_kv_cache(
    config: ModelConfig, capacity: int, device, dtype: torch.dtype, slots: int = 1, page: int | None = None
) -> KVCache:
    """Allocate K/V for `capacity` positions a slot; by default one page a slot, so that prefill sees one slice."""
    page = page or page_size(capacity)
    pages = -(-capacity // page)
    shape = (config.num_layers, slots * pages, config.num_kv_heads, page, config.head_dim)
    k = torch.zeros(shape, dtype=dtype, device=device)
    v = torch.zeros(shape, dtype=dtype, device=device)
    table = torch.arange(slots * pages, dtype=torch.int32, device=device).view(slots, pages)
    return KVCache(tuple(k), tuple(v), table, capacity)


def page_size(capacity: int) -> int:
    return -(-capacity // PAGE_MULTIPLE) * PAGE_MULTIPLE


def kv_bytes_per_token(config: ModelConfig, dtype: torch.dtype) -> int:
    return 2 * config.num_layers * config.kv_size * dtype.itemsize
