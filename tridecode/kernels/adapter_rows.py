"""adapter_rows: finds the adapter of each row of a pass, and the distinct adapters, and sorts the rows by adapter."""

import torch
import triton
import triton.language as tl

from ..layout import CHUNK_COUNT, CHUNK_FIRST, CHUNK_SLOT, CHUNK_WIDTH, MAX_CHUNKS
from .common import META_WIDTH, RUN, SLOT, STATUS, cdiv, next_power_of_2, options, running
from .op import Op
from .sort_pairs import SORT_PAIRS, PairTiles, sort_pairs

BLOCK_M = 128
_SLOT, _FIRST, _COUNT = tl.constexpr(CHUNK_SLOT), tl.constexpr(CHUNK_FIRST), tl.constexpr(CHUNK_COUNT)
_WIDTH = tl.constexpr(CHUNK_WIDTH)


@triton.jit
def _row_adapters(meta_ptr, slots_ptr, offs_m, decoding):
    """Return the adapters of the first `decoding` rows. For rows whose status is not RUN it is 0."""
    mask = offs_m < decoding
    status = tl.load(meta_ptr + offs_m * META_WIDTH + STATUS, mask=mask, other=-1)
    slot = tl.load(meta_ptr + offs_m * META_WIDTH + SLOT, mask=mask, other=0)
    return tl.load(slots_ptr + slot, mask=mask & (status == RUN), other=0)


@triton.jit(do_not_specialize=["rows", "decoding"])
def _adapter_rows_kernel(
    meta_ptr, chunks_ptr, slots_ptr, numbers_ptr, listed_ptr, rows, decoding, BLOCK_M: tl.constexpr,
    DECODING: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Write the adapters of BLOCK_M rows. The last program writes the list of distinct adapters.

    Grid: (cdiv(rows, BLOCK_M) + 1,). The kernel does not start its dependents early, because later kernels of the pass
    read the outputs before their wait. The list has the order in which the adapters first occur.

    Args:
        meta_ptr: [decoding, META_WIDTH] int32, the decoding rows, which are the first rows. Not read if DECODING is 0.
        chunks_ptr: [CHUNKS, CHUNK_WIDTH] int32, the chunks of prompts. Not read if CHUNKS is 0.
        slots_ptr: [slots] int32, the adapter of each slot.
        numbers_ptr: [rows] int32 (output).
        listed_ptr: [1 + ...] int32 (output), the number of distinct adapters, then the adapters.
    """
    pid = tl.program_id(0)
    if pid < tl.num_programs(0) - 1:
        offs_m = pid * BLOCK_M + tl.arange(0, BLOCK_M)
        numbers = tl.zeros([BLOCK_M], tl.int32)
        if DECODING > 0:
            numbers += _row_adapters(meta_ptr, slots_ptr, offs_m, decoding)
        if CHUNKS > 0:
            chunk = tl.arange(0, CHUNKS)[None, :] * _WIDTH
            first, count = tl.load(chunks_ptr + chunk + _FIRST), tl.load(chunks_ptr + chunk + _COUNT)
            adapter = tl.load(slots_ptr + tl.load(chunks_ptr + chunk + _SLOT))
            within = (offs_m[:, None] >= first) & (offs_m[:, None] < first + count)
            numbers += tl.sum(tl.where(within, adapter, 0), 1)
        tl.store(numbers_ptr + offs_m, numbers, mask=offs_m < rows)
    else:
        # The adapters of decoding rows come first, then those of chunks.
        SIZE: tl.constexpr = DECODING + CHUNKS
        offs = tl.arange(0, SIZE)
        adapters = tl.zeros([SIZE], tl.int32)
        if DECODING > 0:
            adapters += _row_adapters(meta_ptr, slots_ptr, offs, decoding)
        if CHUNKS > 0:
            entries, mask = chunks_ptr + (offs - DECODING) * _WIDTH, offs >= DECODING
            sizes = tl.load(entries + _COUNT, mask=mask, other=0)
            slots = tl.load(entries + _SLOT, mask=mask, other=0)
            adapters += tl.load(slots_ptr + slots, mask=sizes > 0, other=0)
        earlier = (adapters[None, :] == adapters[:, None]) & (offs[None, :] < offs[:, None])
        distinct = (adapters > 0) & (tl.max(earlier.to(tl.int32), 1) == 0)
        place = tl.cumsum(distinct.to(tl.int32), 0)
        tl.store(listed_ptr + place, adapters, mask=distinct)
        tl.store(listed_ptr, tl.sum(distinct.to(tl.int32), 0))


def adapter_rows(meta, chunks, slots, numbers, listed, ordered: PairTiles, adapters: int, tile: int, *, pdl=False):
    """Write the adapter of each row, the list of distinct adapters, and the rows sorted by adapter.

    Args:
        meta: [decoding, META_WIDTH] int32, the first rows. None: no rows decode.
        chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32, or None in a decode pass.
        slots: [slots] int32, the adapter of each slot.
        numbers: [rows] int32 (output). Rows of no request, and rows that do not run, have adapter 0.
        listed: [1 + ...] int32 (output). Elements after the list keep their values.
        ordered: the rows sorted by adapter, and their tiles (output); see LinearAdapters.ordered.
        adapters: number of adapters on the device.
        tile: maximum number of rows of a tile.
    """
    rows, decoding, chunk_count = len(numbers), 0 if meta is None else len(meta), 0 if chunks is None else MAX_CHUNKS
    # The sum of both sizes is a power of two.
    size = chunk_count or next_power_of_2(decoding)
    _adapter_rows_kernel[(cdiv(rows, BLOCK_M) + 1,)](
        slots if meta is None else meta, slots if chunks is None else chunks, slots, numbers, listed, rows, decoding,
        BLOCK_M=BLOCK_M, DECODING=size if decoding else 0, CHUNKS=chunk_count, **options(4),
    )  # fmt: skip
    # Without pdl, because later kernels read the tiles before their wait.
    sort_pairs(None, numbers[:, None], ordered, adapters + 1, tile)


def adapter_rows_ref(meta, chunks, slots, numbers, listed, ordered: PairTiles, adapters: int, tile: int) -> None:
    """Compute `adapter_rows` in torch."""
    numbers.zero_()
    used = []
    for row in [] if meta is None else running(meta, len(meta)):
        numbers[row] = slots[meta[row, SLOT.value]]
        used.append(int(numbers[row]))
    for slot, first, count, _ in [] if chunks is None else chunks.tolist():
        if count:
            numbers[first : first + count] = slots[slot]
            used.append(int(slots[slot]))
    distinct = [number for number in dict.fromkeys(used) if number]
    listed[: 1 + len(distinct)] = torch.tensor([len(distinct), *distinct], dtype=torch.int32)
    SORT_PAIRS.ref(None, numbers[:, None], ordered, adapters + 1, tile)


def adapter_rows_bytes(meta, chunks, slots, numbers, listed, ordered: PairTiles, adapters: int, tile: int) -> int:
    """Return the bytes that the launches move."""
    tensors = meta, chunks, slots, numbers, listed, *ordered
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


ADAPTER_ROWS = Op(
    adapter_rows, adapter_rows_ref, adapter_rows_bytes, (_adapter_rows_kernel, *SORT_PAIRS.kernels),
    outputs=("numbers", "listed", "ordered.pairs", "ordered.tiles", "ordered.number"),
)  # fmt: skip
