"""The table of chunks, which assigns the rows of a prompt pass to slots, as kernels and references read it."""

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
    """Look up the chunk of a row of the pass. Return whether it has one, the chunk's slot, and its token's position.

    chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
    """
    chunks_ptr += tl.arange(0, MAX_CHUNKS) * CHUNK_WIDTH
    first, count = tl.load(chunks_ptr + CHUNK_FIRST), tl.load(chunks_ptr + CHUNK_COUNT)
    slot, start = tl.load(chunks_ptr + CHUNK_SLOT), tl.load(chunks_ptr + CHUNK_START)
    inside = (row >= first) & (row < first + count)
    has_chunk = tl.sum(inside.to(tl.int32), 0) > 0
    return has_chunk, tl.sum(tl.where(inside, slot, 0), 0), tl.sum(tl.where(inside, start - first, 0), 0) + row


def listed(chunks) -> list[Chunk]:
    """Return the chunks of a table that have rows. Reading a table on a GPU waits for all work enqueued earlier."""
    return [Chunk(*fields) for fields in chunks.tolist() if fields[layout.CHUNK_COUNT]]
