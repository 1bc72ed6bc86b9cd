"""fetch: one layer's part of what lies in host memory, K/V pages or weights, into a ring buffer on the device."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, next_power_of_2, options, running
from ..op import Op


@dataclass(frozen=True)
class FetchConfig:
    """Launch config of what comes from the host's memory: few programs, so that others run beside them, each with
    `tile` elements of 8 bytes in flight."""

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
    """ring[i] = host[places[1 + i]] for i below places[0]; where the page is negative, nobody needs that place.

    meta: [rows, META_WIDTH] int32: with rows, none of which runs, nothing is brought (without rows there is no such
    question); places: [1 + ring places] int32; host: [pages, CELL] int64 in the host's memory, mapped; ring:
    [ring places, CELL] int64 (output). Reads CELL * 8 bytes a page over PCIe. Grid (programs,).
    The next tile is in flight while one is stored: what counts is how many bytes are on their way. Never launched with
    PDL: it runs on a stream of its own.
    """
    if BLOCK_M > 0:
        offs_m = tl.arange(0, BLOCK_M)
        status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < rows, other=-1)
        if tl.sum((status == RUN).to(tl.int32), 0) == 0:
            return
    TILES: tl.constexpr = (CELL + TILE - 1) // TILE
    items = tl.load(places_ptr) * TILES
    first = tl.program_id(0)
    tile, place, held = _tile(host_ptr, places_ptr, first, items, stride_host, CELL, TILE, TILES)
    for item in range(first, items, tl.num_programs(0)):
        coming = _tile(host_ptr, places_ptr, item + tl.num_programs(0), items, stride_host, CELL, TILE, TILES)
        tl.store(ring_ptr + place, tile, mask=held)
        tile, place, held = coming


@triton.jit
def _tile(host_ptr, places_ptr, item, items, stride_host, CELL: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr):
    """Of an item: its data, where in the ring they belong, and which of them there are; int64 [TILE]."""
    place, offs = item // TILES, item % TILES * TILE + tl.arange(0, TILE)
    page = tl.load(places_ptr + 1 + place, mask=item < items, other=-1).to(tl.int64)
    held = offs < tl.where(page < 0, 0, CELL)
    return tl.load(host_ptr + page * stride_host + offs, mask=held, other=0), place.to(tl.int64) * CELL + offs, held


def fetch(meta, places, host, ring, *, config):
    """ring [places, cell] int64 = the pages of host [pages, cell] int64 that places [1 + places] int32 names, unless
    none of meta's rows runs; meta None: whatever runs."""
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
    if meta is not None and not running(meta, len(meta)):
        return
    used, *pages = places.tolist()
    for place, page in enumerate(pages[:used]):
        if page >= 0:
            ring[place] = host[page].to(ring.device)


def fetch_bytes(meta, places, host, ring) -> int:
    """What comes over PCIe."""
    used, *pages = places.tolist()
    return 8 * ring.shape[1] * sum(page >= 0 for page in pages[:used])


FETCH = Op(fetch, fetch_ref, fetch_bytes, (_fetch_kernel,))


def fetched(ring):
    """From here on `ring` is read: whoever has fetches run beside the list waits for the last one into it."""


FETCHED = Op(fetched, fetched, lambda ring: 0)
