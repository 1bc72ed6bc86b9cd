"""dequantize: converts rows of a packed tensor to bf16, before a matrix product of many rows."""

import triton
import triton.language as tl

from ..common import cdiv, interpreted, options
from ..op import Op
from .bits import factor, pair, unpack

BLOCK_N = 32  # Number of rows of a program.
COLUMNS = 512  # Maximum number of columns that a program converts in each of its rows, in at most four tiles.


@triton.jit
def _dequantize_kernel(
    weight_ptr, scale_ptr, zero_ptr, order_ptr, out_ptr, first, end, minimum_ptr, over_ptr, K: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    MINIMUMS: tl.constexpr, OVER: tl.constexpr, BLOCK_N: tl.constexpr, TILES: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Dequantize the rows [first, end) of a weight.

    A program converts TILES tiles of BLOCK_N rows. Grid: (tiles of a row / TILES, cdiv(rows, BLOCK_N)). All words,
    scales and zero points of a program are in flight before the first is used. A lane writes 16 bytes at a time.

    Args:
        out_ptr: [end - first, K] (output).
        Others: see _matmul_kernel.
    """
    PARTS: tl.constexpr = 4 if FORM == "int4" else 8 if FORM == "int6" else 2
    PIECES: tl.constexpr = 3 if FORM == "int6" else 1
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    EACH: tl.constexpr = 1 if GROUP % (PARTS * 32) == 0 or GROUP >= K else PARTS  # Number of scales in a tile of a row.
    HALVES: tl.constexpr = 2 if GROUP == 16 else 1  # Number of scales in a part.
    OVERS: tl.constexpr = (K + OVER - 1) // OVER if OVER > 0 else 0
    LOWS: tl.constexpr = (K + GROUP * HALVES - 1) // (GROUP * HALVES)
    WORDS: tl.constexpr = (K + PARTS * 32 - 1) // (PARTS * 32) * 16 * PIECES
    tile = tl.program_id(0) * TILES
    rows = first + tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    mask = rows < end
    word = tile * 16 * PIECES + tl.arange(0, 16)[None, :]
    weights = weight_ptr + rows.to(tl.int64) * WORDS + word
    w, s, z, m, o = (), (), (), (), ()
    for i in tl.static_range(TILES):
        for piece in tl.static_range(PIECES):
            words = word + (i * PIECES + piece) * 16
            w += (tl.load(weights + (i * PIECES + piece) * 16, mask=mask & (words < WORDS), other=0),)
        for part in tl.static_range(EACH * HALVES):
            group = tl.minimum((tile + i) * PARTS * 32 + part * (32 // HALVES), K - 1) // GROUP
            s += (tl.load(scale_ptr + rows // SCALE_ROWS * GROUPS + group, mask=mask, other=0),)
            if ZEROS:
                z += (tl.load(zero_ptr + rows * GROUPS + group, mask=mask, other=0),)
            if MINIMUMS and part % HALVES == 0:
                m += (tl.load(minimum_ptr + rows * LOWS + group // HALVES, mask=mask, other=0),)
        if OVER > 0:
            factors = over_ptr + (rows * OVERS + tl.minimum((tile + i) * PARTS * 32, K - 1) // OVER) * (1 + MINIMUMS)
            for which in tl.static_range(1 + MINIMUMS):
                o += (tl.load(factors + which, mask=mask, other=0.0),)
    outs = out_ptr + (rows - first).to(tl.int64) * K
    for i in tl.static_range(TILES):
        for part in tl.static_range(PARTS):
            if MINIMUMS and FORM == "int4":
                value = unpack(w[i : i + 1], tl.full([1, 1], 0, tl.int32), part, FORM, True, INTERPRETED)
            else:
                zero = pair(z[i * EACH + part % EACH]) if ZEROS else 0
                value = unpack(w[i * PIECES : (i + 1) * PIECES], zero, part, FORM, ZEROS, INTERPRETED)
            value = value.to(tl.float32) * factor(FORM)
            if HALVES == 2:
                in_first = tl.arange(0, 32)[None, :] < 16
                scale = tl.where(in_first, s[(i * PARTS + part) * 2].to(tl.float32), s[(i * PARTS + part) * 2 + 1])
            else:
                scale = s[i * EACH + part % EACH].to(tl.float32)
            if OVER > 0:
                scale *= o[i * (1 + MINIMUMS)].to(tl.float32)
            if MINIMUMS:
                minimum = m[i * EACH + part % EACH].to(tl.float32)
                if OVER > 0:
                    minimum *= o[i * 2 + 1].to(tl.float32)
                value = value * scale - minimum
            else:
                value *= scale
            columns = (tile + i) * PARTS * 32 + part * 32 + tl.arange(0, 32)[None, :]
            within = mask & (columns < K)
            if ORDERED:
                columns = tl.load(order_ptr + columns, mask=columns < K, other=0)
            tl.store(outs + columns, value.to(out_ptr.dtype.element_ty), mask=within)


def dequantize(linear, first: int, end: int, out):
    """Dequantize rows `first` to `end` - 1 of a packed tensor into out [end - first, in_features]."""
    tiles = min(COLUMNS // linear.packed.tile, 4)
    grid = (cdiv(linear.in_features, tiles * linear.packed.tile), cdiv(end - first, BLOCK_N))
    _dequantize_kernel[grid](
        **linear.arguments(out), out_ptr=out, first=first, end=end, BLOCK_N=BLOCK_N, TILES=tiles,
        INTERPRETED=interpreted(), **options(4),
    )  # fmt: skip


def dequantize_ref(linear, first, end, out):
    """Compute `dequantize` in torch."""
    out.copy_(linear.matrix()[first:end])


def dequantize_bytes(linear, first, end, out) -> int:
    """Return the bytes that a launch moves."""
    return linear.nbytes * (end - first) // linear.out_features + out.nbytes


DEQUANTIZE = Op(dequantize, dequantize_ref, dequantize_bytes, (_dequantize_kernel,), outputs=("out",))
