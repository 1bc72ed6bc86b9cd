"""fetch: copies K/V pages or weights of one layer from host memory into a ring buffer on the device."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, next_power_of_2, options, running
from ..op import Op


@dataclass(frozen=True)
class FetchConfig:
    """Launch config of a copy from host memory.

    There are few programs, so that other kernels can run at the same time. Each has `tile` elements of 8 bytes in
    flight.
    """

    programs: int = 16
    num_warps: int = 16
    tile: int = 4096


@triton.jit
def _fetch_kernel(
    meta_ptr,
    places_ptr,
    host_ptr,
    ring_ptr,
    rows,
    stride_host,
    BLOCK_M: tl.constexpr,
    CELL: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copy pages of host memory to the ring: ring[i] = host[places[1 + i]] for i < places[0]. Programs share the tiles.

    A negative page number marks a place that no request needs. It is skipped. The next tile is in flight while one is
    stored, because the number of bytes in flight determines the speed.
    Grid: (programs,). Reads CELL * 8 bytes per page over PCIe. Launched without PDL, on a stream of its own.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. If no row runs, nothing is copied. With BLOCK_M = 0 it is not read.
        places_ptr: [1 + ring places] int32: the number of places, then a page number for each.
        host_ptr: [pages, CELL] int64 in mapped host memory.
        ring_ptr: [ring places, CELL] int64 (output).
    """
    if BLOCK_M > 0:
        offs_m = tl.arange(0, BLOCK_M)
        status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
        if tl.sum((status == RUN).to(tl.int32), 0) == 0:
            return
    TILES: tl.constexpr = (CELL + TILE - 1) // TILE
    items = tl.load(places_ptr) * TILES
    first = tl.program_id(0)
    tile, place, mask = _tile(host_ptr, places_ptr, first, items, stride_host, CELL, TILE, TILES)
    for item in range(first, items, tl.num_programs(0)):
        next_tile = _tile(host_ptr, places_ptr, item + tl.num_programs(0), items, stride_host, CELL, TILE, TILES)
        tl.store(ring_ptr + place, tile, mask=mask)
        tile, place, mask = next_tile


@triton.jit
def _tile(host_ptr, places_ptr, item, items, stride_host, CELL: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Load the data of an item. Return the data, their offsets in the ring, and their mask, each [TILE]."""
    place, offs = item // TILES, item % TILES * TILE + tl.arange(0, TILE)
    page = tl.load(places_ptr + 1 + place, mask=item < items, other=-1).to(tl.int64)
    mask = offs < tl.where(page < 0, 0, CELL)
    return tl.load(host_ptr + page * stride_host + offs, mask=mask, other=0), place.to(tl.int64) * CELL + offs, mask


def fetch(meta, places, host, ring, *, config):
    """Copy the pages of host that places lists into ring, unless no row of meta runs.

    Args:
        meta: [rows, META_WIDTH] int32. None to copy in any case.
        places: [1 + ring places] int32: the number of places, then a page number for each.
        host: [pages, cell] int64 in host memory.
        ring: [ring places, cell] int64 (output).
    """
    rows = 0 if meta is None else len(meta)
    _fetch_kernel[(config.programs,)](
        places if meta is None else meta,
        places,
        host,
        ring,
        rows,
        host.stride(0),
        next_power_of_2(rows) if rows else 0,
        ring.shape[1],
        config.tile,
        **options(config.num_warps),
    )


def fetch_ref(meta, places, host, ring):
    """Compute `fetch` in torch."""
    if meta is not None and not running(meta, len(meta)):
        return
    used, *pages = places.tolist()
    for place, page in enumerate(pages[:used]):
        if page >= 0:
            ring[place] = host[page].to(ring.device)


def fetch_bytes(meta, places, host, ring) -> int:
    """Return the bytes that cross PCIe."""
    used, *pages = places.tolist()
    return 8 * ring.shape[1] * sum(page >= 0 for page in pages[:used])


FETCH = Op(fetch, fetch_ref, fetch_bytes, (_fetch_kernel,))


def fetched(ring):
    """Mark where a list of launches begins to read `ring`. A runner that fetches on another stream waits here."""


FETCHED = Op(fetched, fetched, lambda ring: 0)
