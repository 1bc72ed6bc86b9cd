"""LoRA in the linear kernels: a row x gets W x + B (A x), with A and B of its adapter.

1. adapter_rows.py writes the number of each row's adapter (`numbers`), and the distinct numbers (`listed`). Number 0
   means no adapter.
2. shrink.py computes y = A x, for tiles of rows with the same adapter.
3. The kernel that computes W x adds B y in its epilogue: with the functions below, or in matmul_hopper.py with those of
   gluon_adapters.py. In prompt passes, expand.py adds it to the product that torch computes.

Kernels of several rows use tensor cores (`load_b_group`, `expand_rows`): TOGETHER successive adapters of the list are a
group, whose columns of B are operands of one product. matvec.py computes each row in registers. There, B and y are
further columns of the weight and of x (`load_b_columns`, `load_y_columns`).

Names in kernels: n is a row of the weight, and thus a row of B. r is a column of B, and thus an element of y. A is a
tuple of pointers, Adapters, and P a tuple of constants (`parts_of`).
"""

from collections import namedtuple
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..sort_pairs import PairTiles
from ..triton_compat import Constants

RANK_STEP = 16  # Ranks are multiples of this number, which is the depth of one instruction of the tensor cores.
R_STEP = tl.constexpr(RANK_STEP)
TOGETHER = tl.constexpr(4)  # Number of adapters in a group.
MAX_PARTS = 3  # Maximum number of parts of a linear. Each part has a matrix A of its own.


class LinearAdapters(NamedTuple):
    """The adapters of one linear [n, k] on the device, and the adapters of the rows of a pass.

    A part of the linear is the rows that come from one module of the checkpoint, such as q of qkv.

    Args:
        a: [adapters, ...], in the dtype of the activations, as b. a[i - 1] begins with the matrices A of adapter i, one
            for each part: [parts * rank, k].
        b: [adapters, ...]. b[i - 1] begins with the matrix B of adapter i, [n, rank].
        ranks: int32 [adapters + 1], the rank of each adapter in this linear, by its number. 0: the adapter does not
            change this linear. ranks[0] is 0, so kernels load nothing for rows without an adapter.
        numbers: int32 [rows], the number of each row's adapter; 0: none.
        listed: int32 [1 + ...], the number of distinct adapters of the rows, then their numbers.
        ordered: the rows sorted by adapter and divided into tiles. Here a row is a pair, and its adapter is the expert.
            Rows without an adapter come first.
        tile: maximum number of rows of a tile.
        y: bf16 or fp32 [splits, rows, ...]. A row begins with parts * rank elements. A x is the sum over the splits,
            each of which has a range of the columns of x.
        k: columns of the linear.
        ends: for each part, the row of the weight after its last row.
    """

    a: torch.Tensor
    b: torch.Tensor
    ranks: torch.Tensor
    numbers: torch.Tensor
    listed: torch.Tensor
    ordered: PairTiles
    tile: int
    y: torch.Tensor
    k: int
    ends: tuple[int, ...]

    @property
    def n(self) -> int:
        """Rows of the linear."""
        return self.ends[-1]

    @property
    def max_rank(self) -> int:
        """Largest rank that fits into a row of b."""
        return self.b.shape[1] // self.n

    def matrices(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [parts, rank, k] and B [n, rank] of an adapter."""
        rank, parts = int(self.ranks[number]), len(self.ends)
        a = self.a[number - 1, : parts * rank * self.k].view(parts, rank, self.k)
        return a, self.b[number - 1, : self.n * rank].view(self.n, rank)

    def product(self, row: int) -> torch.Tensor:
        """Return B y of a row in fp32, [n]."""
        out = torch.zeros(self.n, device=self.b.device)
        if number := int(self.numbers[row]):
            _, b = self.matrices(number)
            begin, rank = 0, b.shape[1]
            for part, end in enumerate(self.ends):
                y = self.y[:, row, part * rank : (part + 1) * rank].float().sum(0)
                out[begin:end] = b[begin:end].float() @ y
                begin = end
        return out

    def used(self) -> list[int]:
        """Return the numbers of the distinct adapters of the rows."""
        count, *numbers = self.listed.tolist()
        return numbers[:count]

    def nbytes(self, size: int) -> int:
        """Return the bytes of `size` elements for each unit of rank of the distinct adapters of the rows."""
        return sum(int(self.ranks[number]) for number in self.used()) * size * self.a.itemsize


def adapter_arguments(adapters: LinearAdapters | None) -> dict:
    """Return the arguments of a linear kernel that concern adapters, by name.

    Without adapters they are None, so that the compiled kernel has no such arguments.
    """
    if adapters is None:
        names = "b_ptr", "ranks_ptr", "numbers_ptr", "listed_ptr", "y_ptr", "stride_b", "stride_ys", "stride_ym"
        return dict.fromkeys(names) | {"ADAPTERS": False, "A_SPLITS": 0, "A_PARTS": 0, "BEGIN_1": 0, "BEGIN_2": 0}
    return part_arguments(adapters) | {
        "b_ptr": adapters.b, "ranks_ptr": adapters.ranks, "numbers_ptr": adapters.numbers,
        "listed_ptr": adapters.listed, "y_ptr": adapters.y, "stride_b": adapters.b.stride(0),
        "stride_ys": adapters.y.stride(0), "stride_ym": adapters.y.stride(1), "ADAPTERS": True,
        "A_SPLITS": len(adapters.y),
    }  # fmt: skip


def part_arguments(adapters: LinearAdapters) -> dict:
    """Return the number of parts of a linear, and the rows at which the second and the third part begin."""
    begins = (*adapters.ends[:-1], adapters.n, adapters.n)
    return {"A_PARTS": len(adapters.ends), "BEGIN_1": begins[0], "BEGIN_2": begins[1]}


# Pointers and strides of adapter_arguments.
Adapters = namedtuple("Adapters", "b_ptr ranks_ptr numbers_ptr listed_ptr y_ptr stride_b stride_ys stride_ym")


@triton.constexpr_function
def parts_of(GATED, SPLITS, PARTS, BEGIN_1, BEGIN_2, SOME=False, TILES=0):
    """Return the constants P of a linear's adapters.

    Args:
        GATED: A tile contains rows of both halves of the weight.
        SPLITS: number of sums in y for each element of A x.
        PARTS, BEGIN_1, BEGIN_2: see part_arguments.
        SOME: A program has some of the rows of the pass, so it may have no row with an adapter of the list.
        TILES: number of tiles of `load_b_columns` and `load_y_columns`.
    """
    return Constants(GATED=GATED, SPLITS=SPLITS, PARTS=PARTS, BEGIN_1=BEGIN_1, BEGIN_2=BEGIN_2, SOME=SOME, TILES=TILES)


@triton.constexpr_function
def begin_of(BEGIN_1, BEGIN_2, part):
    """Return the row of the weight at which a part begins. The part after the last one begins at a very large row."""
    return (0, BEGIN_1, BEGIN_2, 2**30)[part]


@triton.jit
def _load_y(A, ptrs, mask, SPLITS: tl.constexpr):
    """Load elements of A x. Their SPLITS sums are added in order, so that the result does not vary."""
    y = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(1, SPLITS):
        y += tl.load(ptrs + split * A.stride_ys, mask=mask, other=0.0).to(tl.float32)
    return y


@triton.jit
def rank_of(A, adapter):
    """Load the rank of an adapter."""
    return tl.multiple_of(tl.load(A.ranks_ptr + adapter), R_STEP)


@triton.jit
def _matrix_b(A, adapter):
    """Return the pointer to the matrix B of an adapter."""
    return A.b_ptr + (adapter - 1).to(tl.int64) * A.stride_b


@triton.jit
def load_b_group(A, P: tl.constexpr, numbers, first, r, n, mask_n):
    """Load columns r to r + R_STEP - 1 of B of a group of adapters for rows n of the weight.

    Return the numbers of the adapters [TOGETHER], and their columns [BLOCK_N, TOGETHER, R_STEP]. Beyond the list, an
    adapter is 0. Columns beyond its rank are 0.

    Args:
        numbers: [BLOCK_M], the adapters of the rows.
        first: place of the first adapter in the list.
        n, mask_n: [BLOCK_N], rows of the weight, and whether they exist.
    """
    place = first + tl.arange(0, TOGETHER)
    adapter = tl.load(A.listed_ptr + 1 + place, mask=place < tl.load(A.listed_ptr), other=0)
    rank = tl.multiple_of(tl.load(A.ranks_ptr + adapter), (R_STEP,))
    offs_r = r + tl.arange(0, R_STEP)
    ptrs = A.b_ptr + ((adapter - 1).to(tl.int64) * A.stride_b)[None, :, None]
    ptrs += n[:, None, None] * rank[None, :, None] + offs_r[None, None, :]
    mask = r < rank
    if P.SOME:  # Do not load matrices of adapters that only rows of other programs have.
        mask &= tl.max((numbers[:, None] == adapter[None, :]).to(tl.int32), 0) > 0
    return adapter, tl.load(ptrs, mask=mask_n[:, None, None] & mask[None, :, None], other=0.0)


@triton.jit
def expand_rows(A, P: tl.constexpr, group, n, mask_n, first, end, numbers, offs_m, TYPE: tl.constexpr):
    """Return B y of each row's adapter for a tile of outputs, [BLOCK_N, BLOCK_M] fp32.

    One product has the columns of B of TOGETHER adapters. In the other operand, a row has its y at the columns of its
    adapter and zeros elsewhere. The loader refuses adapters with NaN or Inf, so other adapters do not change its sum.

    Args:
        group: the first group of adapters, from load_b_group. Each step loads the group of the next step.
        n, mask_n: [BLOCK_N], rows of the weight, and whether they exist.
        first, end: the rows n are those from first to end - 1, and parts without them are skipped. Not read if P.GATED.
        numbers: [BLOCK_M], the adapters of the rows.
        offs_m: [BLOCK_M], rows of the pass.
        TYPE: Dtype of the operands of the product.
    """
    DEPTH: tl.constexpr = TOGETHER * R_STEP
    BLOCK_N: tl.constexpr = n.shape[0]
    BLOCK_M: tl.constexpr = offs_m.shape[0]
    rank = tl.load(A.ranks_ptr + numbers)
    count, largest = tl.load(A.listed_ptr), tl.max(rank, 0)
    y_ptrs = A.y_ptr + offs_m[None, :] * A.stride_ym + tl.arange(0, R_STEP)[:, None]
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for r in range(0, largest, R_STEP):
        ys = ()
        for part in tl.static_range(P.PARTS):
            own_rank = rank
            if P.PARTS > 1 and not P.GATED:
                part_begin = begin_of(P.BEGIN_1, P.BEGIN_2, part)
                part_end = begin_of(P.BEGIN_1, P.BEGIN_2, part + 1)
                own_rank = tl.where((first < part_end) & (end > part_begin), rank, 0)
            ptrs = y_ptrs + part * rank[None, :] + r
            ys += (_load_y(A, ptrs, (r < own_rank)[None, :], P.SPLITS).to(TYPE),)  # type: ignore[assignment]
        for place in range(0, count, TOGETHER):
            adapter, b = group
            last = place + TOGETHER >= count
            group = load_b_group(
                A, P, numbers, tl.where(last, 0, place + TOGETHER), tl.where(last, r + R_STEP, r), n, mask_n
            )  # fmt: skip
            own = (numbers[None, :] == adapter[:, None]) & (adapter > 0)[:, None]
            if not P.SOME or tl.max(own.to(tl.int32).reshape(TOGETHER * BLOCK_M), 0) > 0:
                columns = b.reshape(BLOCK_N, DEPTH).to(TYPE)
                for part in tl.static_range(P.PARTS):
                    part_begin = begin_of(P.BEGIN_1, P.BEGIN_2, part)
                    part_end = begin_of(P.BEGIN_1, P.BEGIN_2, part + 1)
                    if P.PARTS == 1 or P.GATED or ((first < part_end) & (end > part_begin)):
                        y = tl.where(own[:, None, :], ys[part][None, :, :], 0.0).to(TYPE).reshape(DEPTH, BLOCK_M)
                        of_part = columns
                        if P.PARTS > 1:
                            of_part = tl.where(((n >= part_begin) & (n < part_end))[:, None], columns, 0.0)
                        sums = tl.dot(of_part, y, sums, input_precision="ieee")
    return sums


@triton.jit
def _columns(rank, begin, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr):
    """Return the split of y and the column of B of further columns of a weight, [1, BLOCK_K], and which of them exist.

    The further columns are the columns of B, repeated for each split. A multiplication replaces the division by the
    rank. It is exact, because there are at most 2 ** 12 columns and the rank is at most 2 ** 8.
    """
    columns = begin + tl.arange(0, BLOCK_K)[None, :]
    divisor = tl.maximum(rank, R_STEP)
    split = tl.max_constancy((columns * ((2**20 + divisor - 1) // divisor)) >> 20, (1, 8))
    r = tl.max_contiguous(tl.multiple_of(columns - split * rank, (1, 8)), (1, 8))
    return split, r, columns < SPLITS * rank


@triton.jit
def load_b_columns(A, P: tl.constexpr, adapter, rank, n, mask_n, BLOCK_K: tl.constexpr):
    """Load the further columns for rows n of the weight, as P.TILES tiles [BLOCK_N, BLOCK_K]."""
    tiles = ()
    for tile in tl.static_range(P.TILES):
        _, r, exists = _columns(rank, tile * BLOCK_K, BLOCK_K, P.SPLITS)
        ptrs = _matrix_b(A, adapter) + n[:, None] * rank + r
        tiles += (tl.load(ptrs, mask=mask_n[:, None] & exists, other=0.0),)  # type: ignore[assignment]
    return tiles


@triton.jit
def load_y_columns(A, P: tl.constexpr, rank, row, n, BLOCK_K: tl.constexpr):
    """Load A x of a row for the further columns, as P.TILES tiles [BLOCK_N, BLOCK_K].

    Args:
        n: [BLOCK_N], rows of the weight, which determine the part. If there is one part, BLOCK_N of the result is 1.
    """
    first = row * A.stride_ym
    if P.PARTS > 1:
        part = (n >= P.BEGIN_1).to(tl.int32) + (n >= P.BEGIN_2).to(tl.int32)
        first += part[:, None] * rank
    tiles = ()
    for tile in tl.static_range(P.TILES):
        split, r, exists = _columns(rank, tile * BLOCK_K, BLOCK_K, P.SPLITS)
        tiles += (tl.load(A.y_ptr + first + split * A.stride_ys + r, mask=exists, other=0.0),)  # type: ignore[assignment]
    return tiles
