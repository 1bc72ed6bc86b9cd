"""shrink: y = A x for the rows of a pass that have adapters, before the linear that adds B y."""

from dataclasses import dataclass

import triton
import triton.language as tl

from ..common import cdiv, gdc_launch_dependents, gdc_wait, interpreted, next_power_of_2, options
from ..op import Op
from .adapters import RANK_STEP, STEP, LinearAdapters

MAX_SPLIT = 16  # Maximum number of programs that share the columns.


@dataclass(frozen=True)
class ShrinkConfig:
    """Launch config of shrink.

    Attributes:
        split: Number of programs that share the columns. Their sums are separate outputs.
        block_k: Columns of a tile of A.
        groups: Maximum number of programs that share the adapters of a pass.
        block_m: Minimum number of rows of a tile of activations. 1 also allows a form for one row.
    """

    split: int = 1
    block_k: int = 128
    num_warps: int = 4
    groups: int = 16
    block_m: int = 1


@triton.jit
def _load_a(a_ptr, groups_ptr, ranks_ptr, group, count, offs_r, offs_k, stride_a, K: tl.constexpr, PARTS: tl.constexpr,
            BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr):  # fmt: skip
    """Load a tile of A of the adapter at place `group` of the list. Return its number, its rank and the tile.

    Beyond the list the adapter is 0, and the tile is 0.
    """
    adapter = tl.load(groups_ptr + 1 + group, mask=group < count, other=0)
    rank = tl.load(ranks_ptr + adapter)
    mask = (offs_r < PARTS * rank)[:, None]
    rows = a_ptr + (adapter - 1).to(tl.int64) * stride_a + offs_r[:, None] * K
    tiles: tuple = ()
    for c in tl.static_range(CHUNKS):
        columns = offs_k + c * BLOCK_K
        tiles += (tl.load(rows + columns[None, :], mask=mask & (columns < K)[None, :], other=0.0),)
    return adapter, rank, tiles


@triton.jit
def _shrink_kernel(
    x_ptr, a_ptr, ranks_ptr, numbers_ptr, groups_ptr, y_ptr, stride_xm, stride_a, stride_ys, stride_ym, rows,
    K: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, CHUNKS: tl.constexpr,
    SPLIT: tl.constexpr, PDL: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Multiply 16 rows of A by a tile of rows of x. A program takes CHUNKS tiles of BLOCK_K columns.

    Grid: (blocks of 16 rows of A * SPLIT, programs that share the adapters, tiles of rows). The tiles of a program's
    first adapter are in flight before `gdc_wait`. The order of the sums of a row does not depend on other rows.

    Args:
        x_ptr: [rows, K].
        a_ptr, ranks_ptr, numbers_ptr, groups_ptr: see LinearAdapters.
        y_ptr: [SPLIT, rows, ...] fp32 (output).
    """
    if PDL:
        gdc_launch_dependents()
    block, part = tl.program_id(0) // SPLIT, tl.program_id(0) % SPLIT
    group, programs = tl.program_id(1), tl.num_programs(1)
    offs_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_r = block * STEP + tl.arange(0, STEP)
    offs_k = part * (CHUNKS * BLOCK_K) + tl.arange(0, BLOCK_K)
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else x_ptr.dtype.element_ty
    numbers = tl.load(numbers_ptr + offs_m, mask=offs_m < rows, other=0)
    count = tl.load(groups_ptr)
    adapter, rank, tiles = _load_a(
        a_ptr, groups_ptr, ranks_ptr, group, count, offs_r, offs_k, stride_a, K, PARTS, BLOCK_K, CHUNKS
    )
    if PDL:
        gdc_wait()
    xs = x_ptr + offs_m.to(tl.int64)[:, None] * stride_xm
    while group < count:
        own = numbers == adapter
        if (block * STEP < PARTS * rank) & (tl.max(own.to(tl.int32), 0) > 0):
            if BLOCK_M == 1:
                sums = tl.zeros([STEP, BLOCK_K], tl.float32)
            else:
                sums = tl.zeros([STEP, BLOCK_M], tl.float32)
            for c in tl.static_range(CHUNKS):
                columns = offs_k + c * BLOCK_K
                x = tl.load(xs + columns[None, :], mask=own[:, None] & (columns < K)[None, :], other=0.0)
                if BLOCK_M == 1:
                    sums += tiles[c].to(tl.float32) * x.to(tl.float32)
                else:
                    sums = tl.dot(tiles[c].to(TYPE), tl.trans(x.to(TYPE)), sums, input_precision="ieee")
            if BLOCK_M == 1:
                sums = tl.sum(sums, 1)[:, None]
            places = y_ptr + part * stride_ys + offs_m[None, :] * stride_ym + offs_r[:, None]
            tl.store(places, sums, mask=own[None, :])
        group += programs
        adapter, rank, tiles = _load_a(
            a_ptr, groups_ptr, ranks_ptr, group, count, offs_r, offs_k, stride_a, K, PARTS, BLOCK_K, CHUNKS
        )


def shrink(x, adapters, *, config=ShrinkConfig(), pdl=False):
    """Write A x of each row's adapter to adapters.y, as config.split sums over parts of the columns.

    Args:
        x: [rows, k].
        adapters: LinearAdapters. y is written for rows with an adapter.
    """
    rows, K = x.shape
    block_m = min(max(next_power_of_2(rows), config.block_m), 64)
    if block_m > 1:  # The tensor cores multiply at least eight columns.
        block_m = max(block_m, 8)
    parts = len(adapters.ends)
    blocks = parts * (adapters.b.shape[1] // adapters.n) // RANK_STEP
    programs = min(config.groups, rows, len(adapters.a))
    _shrink_kernel[(blocks * config.split, programs, cdiv(rows, block_m))](
        x, adapters.a, adapters.ranks, adapters.numbers, adapters.groups, adapters.y, x.stride(0), adapters.a.stride(0),
        adapters.y.stride(0), adapters.y.stride(1), rows, K=K, PARTS=parts, BLOCK_M=block_m, BLOCK_K=config.block_k,
        CHUNKS=cdiv(K, config.split * config.block_k), SPLIT=config.split, PDL=pdl, DOT_FP32=interpreted(),
        **options(config.num_warps, pdl),
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
