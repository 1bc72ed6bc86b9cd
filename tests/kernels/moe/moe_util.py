"""Arguments of the ops of mixtures of experts."""

import torch
from util import DEVICE, meta_rows, random

from tridecode import layout
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.kernels.moe.arguments import ExpertSizes, Routes
from tridecode.kernels.sort_pairs import TILE_FIELDS, PairTiles
from tridecode.layout import CHUNK_WIDTH, MAX_CHUNKS, Chunk

EPS = 1e-6
POISON = -(2**20)


def meta_of(rows: int, idle: tuple[int, ...] = ()) -> torch.Tensor:
    meta = meta_rows(*range(rows))
    meta[list(idle), layout.STATUS] = layout.WAIT
    return meta


def chunk_table(*chunks: Chunk) -> torch.Tensor:
    table = torch.zeros(MAX_CHUNKS, CHUNK_WIDTH, dtype=torch.int32)
    table[: len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
    return table.to(DEVICE)


def empty_routes(rows: int, sizes: ExpertSizes) -> Routes:
    ids = torch.full((rows, sizes.used), POISON, dtype=torch.int32, device=DEVICE)
    logits = torch.full((rows, sizes.stored), float("nan"), device=DEVICE)
    return Routes(logits, ids, torch.full((rows, sizes.used), float("nan"), device=DEVICE))


def random_routes(rows: int, sizes: ExpertSizes, without: tuple[int, ...] = (), seed: int = 0) -> Routes:
    """Return different random experts for each row. Rows in `without` have the id -1."""
    generator = torch.Generator().manual_seed(seed)
    routes = empty_routes(rows, sizes)
    for row in range(rows):
        chosen = torch.randperm(sizes.experts, generator=generator)[: sizes.top_k].tolist()
        ids = chosen + [sizes.experts] * sizes.shared
        routes.ids[row] = torch.tensor([-1] * sizes.used if row in without else ids, dtype=torch.int32)
    routes.weights.copy_(torch.rand(rows, sizes.used, generator=generator) * 0.9 + 0.1)
    return routes


def empty_tiles(rows: int, sizes: ExpertSizes) -> PairTiles:
    def integers(*shape):
        return torch.full(shape, POISON, dtype=torch.int32, device=DEVICE)

    return PairTiles(integers(rows, sizes.used), integers(rows, sizes.used, TILE_FIELDS), integers(rows, 1))


def dense(n: int, k: int, dtype: torch.dtype, seed: int = 0) -> LoadedLinear:
    return LoadedLinear(random(n, k, dtype=dtype, scale=k**-0.5, seed=seed))


def partial_sums(x: torch.Tensor, count: int = 3) -> torch.Tensor:
    """Return a buffer whose first `count` columns sum to about the squares of x, which has a mean square of 1."""
    sums = torch.full((len(x), 16), float("nan"), device=x.device)
    factors = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(len(x))).to(x.device).add(0.5)
    sums[:, :count] = x.float().square().sum(1, keepdim=True) / count * factors
    return sums
