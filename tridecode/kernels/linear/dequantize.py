"""dequantise: rows of a weight in fewer bits become bf16, in front of a matrix product of many rows."""

import torch
import triton
import triton.language as tl

from ..common import interpreted, options
from ..op import Op
from .bits import factor, pair, unpack

BLOCK_N = 32  # rows of a program
TILES = 4  # of each of them


@triton.jit
def _dequantise_kernel(
    weight_ptr,
    scale_ptr,
    zero_ptr,
    order_ptr,
    out_ptr,
    first,
    end,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ZEROS: tl.constexpr,
    ORDERED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """out[row - first] = the weight's row, for rows first to end - 1.

    weight, scale, zero, order: as _matmul_kernel has them; out: [rows, K] (output). Moves the rows' words, and 2 * K
    bytes a row. Grid (parts of a row, TILES tiles of 16 words each, cdiv(rows, BLOCK_N)). All of a program's words,
    scales and zero points are in flight before the first is used; a lane writes 16 bytes at a time.
    """
    PARTS: tl.constexpr = 4 if FORM == "int4" else 2
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    EACH: tl.constexpr = 1 if GROUP % (PARTS * 32) == 0 or GROUP >= K else PARTS  # scales of a tile of a row
    WORDS: tl.constexpr = (K + PARTS * 32 - 1) // (PARTS * 32) * 16
    tile = tl.program_id(0) * TILES
    rows = first + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    mask = rows < end
    word = tl.arange(0, 16)[None, :]
    weights = weight_ptr + rows.to(tl.int64) * WORDS + tile * 16 + word
    w, s, z = (), (), ()
    for i in tl.static_range(TILES):
        w += (tl.load(weights + i * 16, mask=mask & ((tile + i) * 16 + word < WORDS), other=0),)
        for part in tl.static_range(EACH):
            group = tl.minimum((tile + i) * PARTS * 32 + part * 32, K - 1) // GROUP
            s += (tl.load(scale_ptr + rows // SCALE_ROWS * GROUPS + group, mask=mask, other=0.0),)
            if ZEROS:
                z += (tl.load(zero_ptr + rows * GROUPS + group, mask=mask, other=0),)
    outs = out_ptr + (rows - first).to(tl.int64) * K
    for i in tl.static_range(TILES):
        for part in tl.static_range(PARTS):
            zero = pair(z[i * EACH + part % EACH]) if ZEROS else 0
            value = unpack(w[i], zero, part, FORM, ZEROS, INTERPRETED).to(tl.float32) * factor(FORM)
            value *= s[i * EACH + part % EACH].to(tl.float32)
            columns = (tile + i) * PARTS * 32 + part * 32 + tl.arange(0, 32)[None, :]
            within = mask & (columns < K)
            if ORDERED:
                columns = tl.load(order_ptr + columns, mask=columns < K, other=0)
            tl.store(outs + columns, value.to(out_ptr.dtype.element_ty), mask=within)


def dequantise(linear, first: int, end: int, out):
    """out [end - first, in_features] = rows first to end - 1 of the weight of a packed Linear."""
    packed = linear.packed
    _dequantise_kernel[(triton.cdiv(packed.k, TILES * packed.tile), triton.cdiv(end - first, BLOCK_N))](
        linear.weight,
        linear.scale,
        out if linear.zero is None else linear.zero.view(torch.int16),
        out if linear.order is None else linear.order,
        out,
        first,
        end,
        packed.k,
        packed.name,
        packed.group,
        packed.rows,
        linear.zero is not None,
        linear.order is not None,
        BLOCK_N,
        TILES,
        interpreted(),
        **options(4),
    )


def dequantise_ref(linear, first, end, out):
    out.copy_(linear.matrix()[first:end])


def dequantise_bytes(linear, first, end, out) -> int:
    return linear.nbytes * (end - first) // linear.out_features + out.nbytes


DEQUANTISE = Op(dequantise, dequantise_ref, dequantise_bytes, (_dequantise_kernel,), outputs=("out",))
