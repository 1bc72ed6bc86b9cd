"""shrink: y = A x for the rows of a pass that have adapters, before the linear that adds B y."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import cdiv, gdc_launch_dependents, gdc_wait, interpreted, options
from ..op import Op
from ..sort_pairs import load_entry
from .adapters import R_STEP, RANK_STEP, LinearAdapters
from .register_tiles import STEP_COLUMNS, operand, places

MAX_SPLIT = 16  # Maximum number of programs that share the columns.


@dataclass(frozen=True)
class ShrinkConfig:
    """Launch config of shrink.

    Attributes:
        split: Number of programs that share the columns. Their sums are separate outputs.
        steps: Number of steps in which a program takes its columns. The tiles of A of one step are in flight.
        num_warps: Warps of a program, which share its columns.
    """

    split: int = 1
    steps: int = 1
    num_warps: int = 4


@triton.jit
def _load_a(rows, columns, mask, K: tl.constexpr, WIDTH: tl.constexpr, CHUNKS: tl.constexpr):
    """Load tiles of A.

    Args:
        rows: pointers to the first columns of the rows.
        columns: columns of the first tile. Each next tile begins WIDTH columns later.
        mask: which rows exist.
    """
    tiles = ()
    for c in tl.static_range(CHUNKS):
        at = columns + c * WIDTH
        tiles += (tl.load(rows + at, mask=mask & (at < K), other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, rows_ptr, tiles_ptr, count_ptr, y_ptr, stride_xm, stride_a, stride_ys, stride_ym,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply 16 rows of A by a tile of rows of x. A warp takes every WARPS-th 32 columns of a program.

    Grid: (blocks of 16 rows of A * SPLIT, maximum number of tiles of rows). The first tiles of A are in flight before
    `gdc_wait`. The order of the sums of a row does not depend on other rows.

    Args:
        x_ptr: [rows, K].
        a_ptr, ranks_ptr: see LinearAdapters.
        rows_ptr, tiles_ptr, count_ptr: the rows sorted by adapter; see LinearAdapters.ordered.
        y_ptr: [SPLIT, rows, ...] (output).
        BLOCK_M: maximum number of rows of a tile.
    """
    if PDL:
        gdc_launch_dependents()
    block, part, tile = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT, tl.program_id(1)
    tile_count = tl.load(count_ptr)
    adapter, first, count = load_entry(tiles_ptr, tl.maximum(tl.minimum(tile, tile_count - 1), 0))
    rank = tl.load(ranks_ptr + adapter)
    if (tile >= tile_count) | (block * R_STEP >= PARTS * rank):
        if PDL:
            if tile == 0:  # When this grid ends, its predecessors must have ended too, so some programs wait.
                gdc_wait()
        return
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = WARPS * STEP_COLUMNS
    line_n, warp_n = places(WARPS, R_STEP)
    line_m, warp_m = places(WARPS, BLOCK_M)
    columns = part * (STEPS * CHUNKS * WIDTH) + tl.arange(0, STEP_COLUMNS)[None, :]
    offs_ak, offs_xk = columns + warp_n * STEP_COLUMNS, columns + warp_m * STEP_COLUMNS
    a_rows = block * R_STEP + line_n
    mask_a = a_rows < PARTS * rank
    a_rows = a_ptr + (adapter - 1).to(tl.int64) * stride_a + a_rows * K
    tiles = _load_a(a_rows, offs_ak, mask_a, K, WIDTH, CHUNKS)
    x_rows = x_ptr + tl.load(rows_ptr + first + tl.minimum(line_m, count - 1)).to(tl.int64) * stride_xm
    offs_m = tl.arange(0, BLOCK_M)
    rows = tl.load(rows_ptr + first + offs_m, mask=offs_m < count, other=0)
    if PDL:
        gdc_wait()
    acc = tl.zeros([WARPS, R_STEP, BLOCK_M], tl.float32)
    for step in range(STEPS):
        done = step * (CHUNKS * WIDTH)
        for c in tl.static_range(CHUNKS):
            at = offs_xk + done + c * WIDTH
            x = operand(tl.load(x_rows + at, mask=at < K, other=0.0), WARPS, BLOCK_M, False)
            a = operand(tiles[c], WARPS, R_STEP, False)
            acc = tl.dot(a.to(TYPE), tl.permute(x, (0, 2, 1)).to(TYPE), acc, input_precision="ieee")
        if STEPS > 1:  # After the last step this loads zeros.
            tiles = _load_a(a_rows, offs_ak + done + CHUNKS * WIDTH, mask_a & (step < STEPS - 1), K, WIDTH, CHUNKS)
    offs_r = block * R_STEP + tl.arange(0, R_STEP)
    places_y = y_ptr + part * stride_ys + rows[None, :] * stride_ym + offs_r[:, None]
    tl.store(places_y, tl.sum(acc, 0), mask=(offs_m < count)[None, :])


def shrink(x, adapters, *, config=ShrinkConfig(), pdl=False):
    """Write A x of each row's adapter to adapters.y, as config.split sums over parts of the columns.

    Args:
        x: [rows, k].
        adapters: LinearAdapters. y is written for rows with an adapter.
    """
    assert len(adapters.y) == config.split, "y has a sum for each split"
    rows, K = x.shape
    parts = len(adapters.ends)
    blocks = parts * adapters.max_rank // RANK_STEP
    # Each adapter, and 0, has at most one tile that is not full.
    tiles = min(rows, rows // adapters.tile + len(adapters.ranks))
    _shrink_kernel[(blocks * config.split, tiles)](
        x, adapters.a, adapters.ranks, *adapters.ordered, adapters.y, x.stride(0), adapters.a.stride(0),
        adapters.y.stride(0), adapters.y.stride(1), K=K, PARTS=parts, BLOCK_M=adapters.tile, WARPS=config.num_warps,
        CHUNKS=cdiv(K, config.split * config.steps * config.num_warps * STEP_COLUMNS.value), STEPS=config.steps,
        SPLIT=config.split, PDL=pdl, DOT_FP32=interpreted(), **options(config.num_warps, pdl),
    )  # fmt: skip


def shrink_ref(x, adapters: LinearAdapters) -> None:
    """Compute `shrink` in torch. The first sum contains all columns."""
    numbers = adapters.numbers[: len(x)]
    for number in adapters.used():
        a, _ = adapters.matrices(number)
        rows = (numbers == number).nonzero()[:, 0]
        adapters.y[:, rows, : a.shape[0] * a.shape[1]] = 0
        product = x[rows].float() @ a.flatten(0, 1).float().T
        adapters.y[0, rows, : a.shape[0] * a.shape[1]] = product.to(adapters.y.dtype)


def shrink_bytes(x, adapters) -> int:
    """Return the bytes that a launch moves: A of each adapter, the rows in and out."""
    return adapters.nbytes(len(adapters.ends) * adapters.k) + x.nbytes + adapters.y[0, : len(x)].nbytes


SHRINK = Op(shrink, shrink_ref, shrink_bytes, (_shrink_kernel,), outputs=("adapters.y",))
