"""sort_pairs: sorts the pairs of rows and experts by expert, and divides them into tiles.

Adapters use it too: then a row is a pair, and its adapter is the expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .common import META_WIDTH, RUN, STATUS, cdiv, gdc_launch_dependents, gdc_wait, next_power_of_2, options, running
from .op import Op

# Fields of an entry of the table of tiles: the expert, the index of the first pair in `pairs`, the number of pairs.
TILE_FIELDS = 3
FIELDS = tl.constexpr(TILE_FIELDS)
MAX_PAIRS = 1024  # Maximum number of pairs that a program reads together, and that one launch sorts if two can.


class PairTiles(NamedTuple):
    """The pairs of all rows sorted by expert, and the table of tiles, which divides them.

    Routes in moe/arguments.py describes pairs. A tile of pairs has one expert, and its pairs are adjacent in `pairs`.
    The tensors have room for all pairs. Only the first elements of the flattened tensors are in use.
    """

    pairs: torch.Tensor  # int32 [..., used experts], numbers of pairs
    tiles: torch.Tensor  # int32 [..., used experts, TILE_FIELDS], an entry for each tile
    number: torch.Tensor  # int32: the first element is the number of tiles


@triton.jit
def load_entry(tiles_ptr, tile):
    """Return the expert of a tile of pairs, the index of its first pair in `pairs`, and its number of pairs.

    Args:
        tiles_ptr: the table of tiles.
        tile: number of the tile.
    """
    entry = tiles_ptr + tile * FIELDS
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def _load_ids(meta_ptr, ids_ptr, offs, pairs, USED: tl.constexpr, HAS_META: tl.constexpr):
    """Load the experts of pairs offs. The result is -1 for pairs that do not exist or whose row does not run."""
    mask = offs < pairs
    if HAS_META:
        status = tl.load(meta_ptr + offs // USED * META_WIDTH + STATUS, mask=mask, other=-1)
        mask = mask & (status == RUN)
    return tl.load(ids_ptr + offs, mask=mask, other=-1)


@triton.jit(do_not_specialize=["pairs"])
def _sort_pairs_kernel(
    meta_ptr, ids_ptr, pairs_ptr, tiles_ptr, count_ptr, pairs, USED: tl.constexpr, HAS_META: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the pairs of one expert, in their order, and its tiles.

    Grid: (EXPERTS,). Every program counts the pairs of all experts. The experts before its own determine the places of
    its pairs and tiles, so no program waits for another.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. Read only if HAS_META.
        ids_ptr: [pairs] int32, the experts of the pairs; see Routes.
        pairs_ptr: [pairs] int32 (output).
        tiles_ptr: [pairs, TILE_FIELDS] int32 (output).
        count_ptr: [1] int32 (output), the number of tiles.
        TILE: maximum number of pairs of a tile.
        BLOCK: number of pairs that are read together.
    """
    expert = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    offs_e = tl.arange(0, BLOCK_E)
    counts = tl.zeros([BLOCK_E], tl.int32)
    for begin in range(0, pairs, BLOCK):
        ids = _load_ids(meta_ptr, ids_ptr, begin + tl.arange(0, BLOCK), pairs, USED, HAS_META)
        counts += tl.histogram(tl.maximum(ids, 0), BLOCK_E, mask=ids >= 0)
    tiles = (counts + TILE - 1) // TILE
    first = tl.sum(tl.where(offs_e < expert, counts, 0), 0)
    first_tile = tl.sum(tl.where(offs_e < expert, tiles, 0), 0)
    own = tl.sum(tl.where(offs_e == expert, counts, 0), 0)
    if expert == 0:
        tl.store(count_ptr, tl.sum(tiles, 0))
    for begin in range(0, own, TILE):
        entry = tiles_ptr + (first_tile + begin // TILE) * FIELDS
        tl.store(entry, expert)
        tl.store(entry + 1, first + begin)
        tl.store(entry + 2, tl.minimum(own - begin, TILE))
    if own == 0:
        return
    for begin in range(0, pairs, BLOCK):
        offs = begin + tl.arange(0, BLOCK)
        ids = _load_ids(meta_ptr, ids_ptr, offs, pairs, USED, HAS_META)
        own_pairs = (ids == expert).to(tl.int32)
        tl.store(pairs_ptr + first + tl.cumsum(own_pairs, 0) - 1, offs, mask=own_pairs > 0)
        first += tl.sum(own_pairs, 0)


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs_kernel(
    meta_ptr, ids_ptr, counts_ptr, pairs, USED: tl.constexpr, HAS_META: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count the pairs of each expert in a block of pairs.

    Grid: (blocks of BLOCK pairs,).

    Args:
        counts_ptr: [blocks, BLOCK_E] int32 (output).
        meta_ptr and the others: see _sort_pairs_kernel.
    """
    block = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    ids = _load_ids(meta_ptr, ids_ptr, block * BLOCK + tl.arange(0, BLOCK), pairs, USED, HAS_META)
    counts = tl.histogram(tl.maximum(ids, 0), BLOCK_E, mask=ids >= 0)
    tl.store(counts_ptr + block * BLOCK_E + tl.arange(0, BLOCK_E), counts)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place_pairs_kernel(
    meta_ptr, ids_ptr, counts_ptr, pairs_ptr, tiles_ptr, count_ptr, pairs, blocks, USED: tl.constexpr,
    HAS_META: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write the places of the pairs of a block, and some of the tiles.

    Grid: (blocks,). The counts of the other blocks determine the places, so no program waits for another.

    Args:
        counts_ptr: [blocks, BLOCK_E] int32, what _count_pairs_kernel has counted.
        ROWS: number of blocks whose counts are read together.
        meta_ptr and the others: see _sort_pairs_kernel.
    """
    block = tl.program_id(0)
    if PDL:
        gdc_launch_dependents()
    offs_e, offs = tl.arange(0, BLOCK_E), block * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
    ids = _load_ids(meta_ptr, ids_ptr, offs, pairs, USED, HAS_META)
    # The pairs of each expert: all, and those of the blocks before this one.
    own, before = tl.zeros([BLOCK_E], tl.int32), tl.zeros([BLOCK_E], tl.int32)
    for begin in range(0, blocks, ROWS):
        row = begin + tl.arange(0, ROWS)[:, None]
        counts = tl.load(counts_ptr + row * BLOCK_E + offs_e[None, :], mask=row < blocks, other=0)
        own += tl.sum(counts, 0)
        before += tl.sum(tl.where(row < block, counts, 0), 0)
    tiles = (own + TILE - 1) // TILE
    first, first_tile = tl.cumsum(own, 0) - own, tl.cumsum(tiles, 0) - tiles
    places = tl.gather(first + before, tl.maximum(ids, 0), 0)
    for begin in range(block * BLOCK, (block + 1) * BLOCK, 32):  # Add the earlier pairs of the same expert.
        others = begin + tl.arange(0, 32)
        other_ids = _load_ids(meta_ptr, ids_ptr, others, pairs, USED, HAS_META)
        earlier = (other_ids[None, :] == ids[:, None]) & (others[None, :] < offs[:, None])
        places += tl.sum(earlier.to(tl.int32), 1)
    tl.store(pairs_ptr + places, offs, mask=ids >= 0)
    if block == 0:
        tl.store(count_ptr, tl.sum(tiles, 0))
    for tile in range(block, tl.max(tiles, 0), blocks):  # This tile of every expert.
        entry, begin, exists = tiles_ptr + (first_tile + tile) * FIELDS, tile * TILE, tile < tiles
        tl.store(entry, offs_e, mask=exists)
        tl.store(entry + 1, first + begin, mask=exists)
        tl.store(entry + 2, tl.minimum(own - begin, TILE), mask=exists)


def sort_pairs(meta, ids, sorted_pairs: PairTiles, experts: int, tile: int, counts=None, *, pdl=False):
    """Sort the pairs of all rows by expert. Pairs of one expert keep their order. Without pairs, there are 0 tiles.

    In one launch each program reads all pairs. More than MAX_PAIRS pairs are counted first, if there is room for it.

    Args:
        meta: int32 [rows, META_WIDTH]: rows that do not run have no pairs. None: rows without a token
            have the ids -1.
        ids: int32 [rows, used experts].
        sorted_pairs: the sorted pairs and their tiles (outputs).
        experts: number of experts: all stored ones, or for adapters one more than their number.
        tile: maximum number of pairs of a tile.
        counts: int32 [2 * pairs], scratch, or None.
    """
    pairs, used = ids.numel(), ids.shape[1]
    block_e, shared = next_power_of_2(experts), (ids if meta is None else meta, ids)
    if counts is not None and pairs > MAX_PAIRS:
        block = max(256, block_e)
        blocks = cdiv(pairs, block)
        assert counts.numel() >= blocks * block_e, f"counts has {counts.numel()} elements"
        constants = dict(USED=used, HAS_META=meta is not None, BLOCK_E=block_e, BLOCK=block, PDL=pdl)
        _count_pairs_kernel[(blocks,)](*shared, counts, pairs, **constants, **options(4, pdl))
        _place_pairs_kernel[(blocks,)](
            *shared, counts, *sorted_pairs, pairs, blocks, TILE=tile, ROWS=max(2**13 // block_e, 1), **constants,
            **options(8, pdl),
        )  # fmt: skip
        return
    warps, block = (4, MAX_PAIRS) if pairs <= MAX_PAIRS else (16, 4 * MAX_PAIRS)
    if meta is not None:  # Without meta, any number of rows is possible, so BLOCK has only two values.
        block = min(next_power_of_2(pairs), block)
    _sort_pairs_kernel[(experts,)](
        *shared, *sorted_pairs, pairs, used, meta is not None, experts, block_e, tile, block, pdl, **options(warps, pdl)
    )  # fmt: skip


def sort_pairs_ref(meta, ids, sorted_pairs: PairTiles, experts: int, tile: int, counts=None) -> None:
    """Compute `sort_pairs` in torch."""
    ids = ids.clone()
    if meta is not None:
        idle = torch.ones(len(ids), dtype=torch.bool, device=ids.device)
        idle[running(meta, len(ids))] = False
        ids[idle] = -1
    flat = ids.flatten().long()
    order = flat.sort(stable=True).indices[int((flat < 0).sum()) :]
    sorted_pairs.pairs.view(-1)[: len(order)] = order.int()
    counts = torch.bincount(flat[flat >= 0], minlength=experts).tolist()
    tiles, first = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, first + begin, min(count - begin, tile)) for begin in range(0, count, tile)]
        first += count
    sorted_pairs.number.view(-1)[0] = len(tiles)
    if tiles:
        sorted_pairs.tiles.view(-1, TILE_FIELDS)[: len(tiles)] = torch.tensor(
            tiles, dtype=torch.int32, device=ids.device
        )


def sort_pairs_bytes(meta, ids, sorted_pairs: PairTiles, experts: int, tile: int, counts=None) -> int:
    """Return the bytes that a launch moves."""
    return ids.nbytes + sorted_pairs.pairs.nbytes + sorted_pairs.tiles.nbytes


SORT_PAIRS = Op(
    sort_pairs, sort_pairs_ref, sort_pairs_bytes, (_sort_pairs_kernel, _count_pairs_kernel, _place_pairs_kernel),
    outputs=("sorted_pairs.pairs", "sorted_pairs.tiles", "sorted_pairs.number"),
)  # fmt: skip
