"""expand_kv: converts the fp8 K/V of a layer to which prompts attend to bf16 pages, once for all rows."""

import triton
import triton.language as tl

from ..chunks import CHUNK_COUNT, CHUNK_SLOT, CHUNK_START, CHUNK_WIDTH, MAX_CHUNKS, listed
from ..common import interpreted, options
from ..device import device_of
from ..op import Op
from .arguments import KVLayer
from .fp8_kv import load_cells, row_bytes, words_to_numbers

PROGRAMS = 8  # Number of programs for each multiprocessor.
WARPS = 4


@triton.jit
def _expand_kv_kernel(
    chunks_ptr,
    table_ptr, stride_table,
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, stride_kp, stride_kh, stride_sp, stride_sh,
    keys_ptr, values_ptr, stride_op, stride_oh,
    KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Write K and V of the pages that the chunks attend to, times their scales.

    Grid: (programs,). The programs share the items, each one page of one head. Moves three bytes per number.
    Entries after a chunk's last position are copied too. If several chunks share a page, each of them writes it, with
    the same numbers.

    Args:
        chunks_ptr: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        keys_ptr, values_ptr: [pages, KV_HEADS, PAGE, D] (outputs).
        Others: see arguments.KVLayer.
    """
    offs_c = tl.arange(0, MAX_CHUNKS)
    chunk_ptrs = chunks_ptr + offs_c * CHUNK_WIDTH
    counts = tl.load(chunk_ptrs + CHUNK_COUNT)
    pages = tl.where(counts > 0, (tl.load(chunk_ptrs + CHUNK_START) + counts + PAGE - 1) // PAGE, 0)
    ends = tl.cumsum(pages, 0)
    row, word = tl.arange(0, PAGE)[:, None], tl.arange(0, D // 4)[None, :]
    for item in range(tl.program_id(0), tl.sum(pages, 0) * KV_HEADS, tl.num_programs(0)):
        index, head = item // KV_HEADS, item % KV_HEADS
        chunk = tl.sum((ends <= index).to(tl.int32), 0)
        within = index - tl.sum(tl.where(offs_c == chunk, ends - pages, 0), 0)
        slot = tl.load(chunks_ptr + chunk * CHUNK_WIDTH + CHUNK_SLOT)
        page = tl.load(table_ptr + slot * stride_table + within).to(tl.int64)
        source = page * (stride_kp // 4) + head * (stride_kh // 4) + row * (D // 4) + word
        cells = page * stride_sp + head * stride_sh + row
        target = page * stride_op + head * stride_oh + row * D
        k = tl.load(k_ptr.to(tl.pointer_type(tl.int32)) + source)
        v = tl.load(v_ptr.to(tl.pointer_type(tl.int32)) + source)
        k_scale, v_scale = tl.load(k_scale_ptr + cells), tl.load(v_scale_ptr + cells)
        offs = tl.arange(0, D)[None, :]
        k = words_to_numbers(k, tl.bfloat16, False, INTERPRETED).reshape(PAGE, D)
        v = words_to_numbers(v, tl.bfloat16, False, INTERPRETED).reshape(PAGE, D)
        tl.store(keys_ptr + target + offs, (k * k_scale).to(keys_ptr.dtype.element_ty))
        tl.store(values_ptr + target + offs, (v * v_scale).to(values_ptr.dtype.element_ty))


def expand_kv(chunks, kv: KVLayer, keys, values):
    """Convert fp8 K and V of the pages that the chunks attend to.

    Args:
        chunks: [MAX_CHUNKS, CHUNK_WIDTH] int32.
        keys, values: [pages, kv_heads, page, head_dim] (outputs).
    """
    _, kv_heads, page, head_dim = kv.k.shape
    programs = PROGRAMS * max(device_of(keys.device).multiprocessors, 1)
    _expand_kv_kernel[(programs,)](
        chunks,
        *kv.kernel_arguments(),
        keys,
        values,
        *keys.stride()[:2],
        kv_heads,
        page,
        head_dim,
        interpreted(),
        **options(WARPS),
    )


def expand_kv_ref(chunks, kv: KVLayer, keys, values):
    """Compute `expand_kv` in torch."""
    for chunk in listed(chunks):
        pages = kv.table[chunk.slot, : -(-chunk.end // kv.page)].long()
        keys[pages], values[pages] = (load_cells(cache, (pages,)).to(keys.dtype) for cache in (kv.k, kv.v))


def expand_kv_bytes(chunks, kv: KVLayer, keys, values) -> int:
    """Return the bytes that a launch moves."""
    positions = sum(-(-chunk.end // kv.page) * kv.page for chunk in listed(chunks))
    return 2 * positions * kv.k.shape[1] * (row_bytes(kv.k) + kv.k.shape[3] * keys.itemsize)


EXPAND_KV = Op(expand_kv, expand_kv_ref, expand_kv_bytes, (_expand_kv_kernel,))
