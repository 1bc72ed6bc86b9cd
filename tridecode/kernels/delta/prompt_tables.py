"""The tables of a prompt pass as the ops of gated delta net layers read them: chunks, their records, and snapshots.

A block is the positions of a chunk within [n * SCAN, (n + 1) * SCAN). Blocks are at absolute multiples, so that a
position is in the same block in any pass. Prompts that are cut at multiples of SCAN therefore have bit-equal results.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ... import layout
from ...layout import SCAN, Chunk
from ..chunks import CHUNK_COUNT, CHUNK_FIRST, CHUNK_SLOT, CHUNK_START, CHUNK_WIDTH, MAX_CHUNKS, listed

MAX_SNAPSHOTS = tl.constexpr(layout.MAX_SNAPSHOTS)
SNAPSHOT_WIDTH = tl.constexpr(layout.SNAPSHOT_WIDTH)
SNAPSHOT_SLOT = tl.constexpr(layout.SNAPSHOT_SLOT)
SNAPSHOT_POSITION = tl.constexpr(layout.SNAPSHOT_POSITION)
SNAPSHOT_RECORD = tl.constexpr(layout.SNAPSHOT_RECORD)
RECORDS_WIDTH = tl.constexpr(layout.RECORDS_WIDTH)
RECORD_SOURCE = tl.constexpr(layout.RECORD_SOURCE)
RECORD_TARGET = tl.constexpr(layout.RECORD_TARGET)
BLOCK = tl.constexpr(SCAN)


class PromptTables(NamedTuple):
    """The tables of a prompt pass."""

    chunks: torch.Tensor  # int32 [MAX_CHUNKS, CHUNK_WIDTH]
    records: torch.Tensor  # int32 [MAX_CHUNKS, RECORDS_WIDTH], of each chunk. Its two records differ.
    snapshots: torch.Tensor  # int32 [MAX_SNAPSHOTS, SNAPSHOT_WIDTH]


@triton.jit
def load_field(chunks_ptr, FIELD: tl.constexpr):
    """Load a field of all chunks: [MAX_CHUNKS]."""
    return tl.load(chunks_ptr + tl.arange(0, MAX_CHUNKS) * CHUNK_WIDTH + FIELD)


@triton.jit
def pick(values, index):
    """Return values[index]."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit
def chunk_fields(chunks_ptr, chunk):
    """Return slot, first row, first position and end of a chunk."""
    chunks_ptr += chunk * CHUNK_WIDTH
    start = tl.load(chunks_ptr + CHUNK_START)
    end = start + tl.load(chunks_ptr + CHUNK_COUNT)
    return tl.load(chunks_ptr + CHUNK_SLOT), tl.load(chunks_ptr + CHUNK_FIRST), start, end


@triton.jit
def blocks_of(chunks_ptr):
    """Return the number of blocks of each chunk: [MAX_CHUNKS]."""
    start, count = load_field(chunks_ptr, CHUNK_START), load_field(chunks_ptr, CHUNK_COUNT)
    return tl.where(count > 0, tl.cdiv(start + count, BLOCK) - start // BLOCK, 0)


@triton.jit
def snapshot_record(snapshots_ptr, slot, position):
    """Return the record of the snapshot of a slot at `position`, or -1."""
    snapshots_ptr += tl.arange(0, MAX_SNAPSHOTS) * SNAPSHOT_WIDTH
    slots, positions = tl.load(snapshots_ptr + SNAPSHOT_SLOT), tl.load(snapshots_ptr + SNAPSHOT_POSITION)
    matches = (slots == slot) & (positions == position)
    return tl.max(tl.where(matches, tl.load(snapshots_ptr + SNAPSHOT_RECORD), -1), 0)


class Read(NamedTuple):
    """A chunk as references read it.

    Args:
        chunk: the chunk.
        source, target: its records.
        snapshots: pairs of a position and a record.
    """

    chunk: Chunk
    source: int
    target: int
    snapshots: list[tuple[int, int]]

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Yield the first position of each block and the position after its last one."""
        at = self.chunk.start
        while at < self.chunk.end:
            end = min((at // SCAN + 1) * SCAN, self.chunk.end)
            yield at, end
            at = end

    def rows(self, start: int, end: int) -> slice:
        """Return the rows of the pass with the positions from start to end - 1."""
        offset = self.chunk.first - self.chunk.start
        return slice(start + offset, end + offset)


def read_tables(tables: PromptTables) -> list[Read]:
    """Return the chunks of a pass with their records and snapshots."""
    snapshots, reads = tables.snapshots.tolist(), []
    for chunk, (source, target) in zip(listed(tables.chunks), tables.records.tolist()):
        own = [(at, record) for slot, at, record in snapshots if slot == chunk.slot and chunk.start < at <= chunk.end]
        reads.append(Read(chunk, source, target, own))
    return reads
