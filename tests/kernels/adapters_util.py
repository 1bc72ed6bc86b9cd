"""Adapters of one linear for kernel tests, with poison in every element that a launch must not read."""

import torch
from util import DEVICE, poisoned, random

from tridecode.kernels.linear.adapters import LinearAdapters
from tridecode.kernels.sort_pairs import SORT_PAIRS, TILE_FIELDS, PairTiles


def unsorted(rows: int) -> PairTiles:
    """Return a table of tiles that `sort_pairs` has not written yet. A kernel that reads such an entry fails."""
    sizes = (rows,), (rows, TILE_FIELDS), (1,)
    return PairTiles(*(torch.full(size, 10**6, dtype=torch.int32, device=DEVICE) for size in sizes))


def make_adapters(
    ends: tuple[int, ...], k: int, ranks: list[int], numbers: list[int], dtype=torch.bfloat16, splits: int = 1,
    tile: int = 8,
) -> LinearAdapters:  # fmt: skip
    """Return random adapters whose y contains A x for x = 1, as `splits` sums.

    Args:
        ends: as in LinearAdapters.
        ranks: the rank of each adapter, from number 1 on.
        numbers: the adapter of each row.
        tile: maximum number of rows of a tile.
    """
    n, parts, max_rank = ends[-1], len(ends), max(64, *ranks)
    a = poisoned(len(ranks), parts * max_rank * k + 16, dtype=dtype)
    b = poisoned(len(ranks), n * max_rank + 32, dtype=dtype)
    for number, rank in enumerate(ranks):
        a[number, : parts * rank * k] = random(parts * rank * k, dtype=dtype, scale=k**-0.5, seed=number)
        b[number, : n * rank] = random(n * rank, dtype=dtype, scale=max(rank, 1) ** -0.5, seed=number + 50)
    y = poisoned(splits, len(numbers), parts * max_rank + 16, dtype=dtype)
    distinct = [number for number in dict.fromkeys(numbers) if number]
    listed = torch.full((1 + len(numbers),), 10**6, dtype=torch.int32)
    listed[: 1 + len(distinct)] = torch.tensor([len(distinct), *distinct])
    ranks_, index_ = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in ([0, *ranks], numbers))
    ordered = unsorted(len(numbers))
    SORT_PAIRS.ref(None, index_[:, None], ordered, len(ranks_), tile)
    adapters = LinearAdapters(a, b[:, : n * max_rank], ranks_, index_, listed.to(DEVICE), ordered, tile, y, k, ends)
    for row, number in enumerate(numbers):
        if number:
            y[:, row, : parts * ranks[number - 1]] = random(splits, parts * ranks[number - 1], dtype=dtype, seed=row)
    return adapters
