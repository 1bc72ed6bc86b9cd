"""Which rows of a prompt pass are whose: the table of chunks, as kernels and references read it."""

import triton
import triton.language as tl

from .. import layout
from ..layout import Chunk

MAX_CHUNKS = tl.constexpr(layout.MAX_CHUNKS)
CHUNK_WIDTH = tl.constexpr(layout.CHUNK_WIDTH)
CHUNK_SLOT = tl.constexpr(layout.CHUNK_SLOT)
CHUNK_FIRST = tl.constexpr(layout.CHUNK_FIRST)
CHUNK_COUNT = tl.constexpr(layout.CHUNK_COUNT)
CHUNK_START = tl.constexpr(layout.CHUNK_START)


@triton.jit
def chunk_of(chunks_ptr, row):
    """Of a row of the pass: whether it is a chunk's, of which slot, and the position of its token."""
    chunks_ptr += tl.arange(0, MAX_CHUNKS) * CHUNK_WIDTH
    first, count = tl.load(chunks_ptr + CHUNK_FIRST), tl.load(chunks_ptr + CHUNK_COUNT)
    slot, start = tl.load(chunks_ptr + CHUNK_SLOT), tl.load(chunks_ptr + CHUNK_START)
    mine = (row >= first) & (row < first + count)
    held = tl.sum(mine.to(tl.int32), 0) > 0
    return held, tl.sum(tl.where(mine, slot, 0), 0), tl.sum(tl.where(mine, start - first, 0), 0) + row


def listed(chunks) -> list[Chunk]:
    """Those of a table that have rows; of one on a GPU it waits for what was enqueued."""
    return [Chunk(*fields) for fields in chunks.tolist() if fields[layout.CHUNK_COUNT]]
