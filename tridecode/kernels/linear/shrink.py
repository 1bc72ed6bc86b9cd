"""shrink: y = A x for the rows of a pass that have adapters, before the linear that adds B y."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import cdiv, gdc_launch_dependents, gdc_wait, interpreted, next_power_of_2, options
from ..op import Op
from .adapters import R_STEP, RANK_STEP, LinearAdapters
from .project import MAX_ROWS
from .register_tiles import STEP_COLUMNS, operand, places

MAX_SPLIT = 16  # Maximum number of programs that share the columns.


@dataclass(frozen=True)
class ShrinkConfig:
    """Launch config of shrink.

    Attributes:
        split: Number of programs that share the columns. Their sums are separate outputs.
        steps: Number of steps in which a program takes its columns. The tiles of A of one step are in flight.
        num_warps: Warps of a program, which share its columns.
        programs: Maximum number of programs that share the adapters of a pass.
        block_m: Minimum number of rows of a tile of activations.
    """

    split: int = 1
    steps: int = 1
    num_warps: int = 4
    programs: int = 64
    block_m: int = 8


@triton.jit
def _load_a(
    a_ptr, listed_ptr, ranks_ptr, place, count, offs_n, offs_k, stride_a, K: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """Load tiles of A of the adapter at a place of the list. Return its number, its rank and the tiles.

    Beyond the list the adapter is 0, and the tiles are 0.
    """
    adapter = tl.load(listed_ptr + 1 + place, mask=place < count, other=0)
    rank = tl.load(ranks_ptr + adapter)
    rows = a_ptr + (adapter - 1).to(tl.int64) * stride_a + offs_n * K
    mask = offs_n < PARTS * rank
    tiles = ()
    for c in tl.static_range(CHUNKS):
        columns = offs_k + c * WIDTH
        tiles += (tl.load(rows + columns, mask=mask & (columns < K), other=0.0),)  # type: ignore[assignment]
    return adapter, rank, tiles


@triton.jit(do_not_specialize=["rows"])
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_xm, stride_a, stride_ys, stride_ym, rows,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, WARPS: tl.constexpr, CHUNKS: tl.constexpr,
    STEPS: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply 16 rows of A by a tile of rows of x. A warp takes every WARPS-th 32 columns of a program.

    Grid: (blocks of 16 rows of A * SPLIT, programs that share the adapters, tiles of rows). The tiles of a program's
    first adapter are in flight before `gdc_wait`. The order of the sums of a row does not depend on other rows.

    Args:
        x_ptr: [rows, K].
        a_ptr, ranks_ptr, numbers_ptr, listed_ptr: see LinearAdapters.
        y_ptr: [SPLIT, rows, ...] fp32 (output).
    """
    if PDL:
        gdc_launch_dependents()
    block, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    first_place, programs = tl.program_id(1), tl.num_programs(1)
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    WIDTH: tl.constexpr = WARPS * STEP_COLUMNS
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = block * R_STEP + tl.arange(0, R_STEP)
    first_k = part * (STEPS * CHUNKS * WIDTH)
    line_n, warp_n = places(WARPS, R_STEP)
    line_m, warp_m = places(WARPS, BLOCK_M)
    columns = first_k + tl.arange(0, STEP_COLUMNS)[None, :]
    offs_n, offs_ak, offs_xk = block * R_STEP + line_n, columns + warp_n * STEP_COLUMNS, columns + warp_m * STEP_COLUMNS
    numbers = tl.load(numbers_ptr + offs_m, mask=offs_m < rows, other=0)
    count = tl.load(listed_ptr)
    adapter, rank, tiles = _load_a(
        a_ptr, listed_ptr, ranks_ptr, first_place, count, offs_n, offs_ak, stride_a, K, PARTS, WIDTH, CHUNKS
    )
    if PDL:
        gdc_wait()
    row = tl.minimum(tl.program_id(2) * BLOCK_M + line_m, rows - 1)
    xs = x_ptr + row.to(tl.int64) * stride_xm + offs_xk
    places_y = y_ptr + part * stride_ys + offs_m[None, :] * stride_ym + offs_r[:, None]
    acc = tl.zeros([WARPS, R_STEP, BLOCK_M], tl.float32)
    for i in range((count - first_place + programs - 1) // programs * STEPS):
        own, step = numbers == adapter, i % STEPS
        if (block * R_STEP < PARTS * rank) & (tl.max(own.to(tl.int32), 0) > 0):
            acc = tl.where(step == 0, 0.0, acc)
            done = step * CHUNKS * WIDTH
            for c in tl.static_range(CHUNKS):
                x = tl.load(xs + done + c * WIDTH, mask=offs_xk + done + c * WIDTH < K, other=0.0)
                x = tl.permute(operand(x, WARPS, BLOCK_M, False), (0, 2, 1)).to(TYPE)
                acc = tl.dot(operand(tiles[c], WARPS, R_STEP, False).to(TYPE), x, acc, input_precision="ieee")
            if step == STEPS - 1:
                tl.store(places_y, tl.sum(acc, 0), mask=own[None, :])
        place, next_k = first_place + (i + 1) // STEPS * programs, offs_ak + (i + 1) % STEPS * (CHUNKS * WIDTH)
        adapter, rank, tiles = _load_a(
            a_ptr, listed_ptr, ranks_ptr, place, count, offs_n, next_k, stride_a, K, PARTS, WIDTH, CHUNKS
        )


def shrink(x, adapters, *, config=ShrinkConfig(), pdl=False):
    """Write A x of each row's adapter to adapters.y, as config.split sums over parts of the columns.

    Args:
        x: [rows, k].
        adapters: LinearAdapters. y is written for rows with an adapter.
    """
    assert len(adapters.y) == config.split, "y has a sum for each split"
    rows, K = x.shape
    block_m = min(max(next_power_of_2(rows), config.block_m), MAX_ROWS)
    parts = len(adapters.ends)
    blocks = parts * adapters.max_rank // RANK_STEP
    programs = min(config.programs, rows, len(adapters.a))
    _shrink_kernel[(blocks * config.split, programs, cdiv(rows, block_m))](
        x, adapters.a, adapters.ranks, adapters.numbers, adapters.listed, adapters.y, x.stride(0),
        adapters.a.stride(0), adapters.y.stride(0), adapters.y.stride(1), rows, K=K, PARTS=parts, BLOCK_M=block_m,
        WARPS=config.num_warps, CHUNKS=cdiv(K, config.split * config.steps * config.num_warps * STEP_COLUMNS.value),
        STEPS=config.steps, SPLIT=config.split, PDL=pdl, DOT_FP32=interpreted(), **options(config.num_warps, pdl),
    )  # fmt: skip


def shrink_ref(x, adapters: LinearAdapters) -> None:
    """Compute `shrink` in torch. The first sum contains all columns."""
    numbers = adapters.numbers[: len(x)]
    for number in adapters.used():
        a, _ = adapters.matrices(number)
        rows = (numbers == number).nonzero()[:, 0]
        adapters.y[:, rows, : a.shape[0] * a.shape[1]] = 0
        adapters.y[0, rows, : a.shape[0] * a.shape[1]] = x[rows].float() @ a.flatten(0, 1).float().T


def shrink_bytes(x, adapters) -> int:
    """Return the bytes that a launch moves: A of each adapter, the rows in and out."""
    return adapters.nbytes(len(adapters.ends) * adapters.k) + x.nbytes + adapters.y[0, : len(x)].nbytes


SHRINK = Op(shrink, shrink_ref, shrink_bytes, (_shrink_kernel,), outputs=("adapters.y",))
