"""expand: out += B y for the rows of a prompt pass that have adapters, after torch's matrix product."""

import triton
import triton.language as tl

from ..common import cdiv, interpreted, options
from ..op import Op
from .adapters import Adapters, adapter_arguments, expand_rows, load_b_group, parts_of

BLOCK_M, BLOCK_N = 64, 128


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    out_ptr, b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym, stride_om, rows,
    N: tl.constexpr, ADAPTERS: tl.constexpr, A_SPLITS: tl.constexpr, A_PARTS: tl.constexpr, BEGIN_1: tl.constexpr,
    BEGIN_2: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT_FP32: tl.constexpr,
):  # fmt: skip
    """Add B y to a tile of outputs. Grid: (cdiv(N, BLOCK_N), cdiv(rows, BLOCK_M)).

    Args:
        out_ptr: [rows, N] (input and output).
        b_ptr and the following: see adapter_arguments.
    """
    A = Adapters(b_ptr, ranks_ptr, numbers_ptr, listed_ptr, y_ptr, stride_b, stride_ys, stride_ym)
    P: tl.constexpr = parts_of(False, A_SPLITS, A_PARTS, BEGIN_1, BEGIN_2, SOME=True)
    TYPE: tl.constexpr = tl.float32 if DOT_FP32 else b_ptr.dtype.element_ty
    first = tl.program_id(0) * BLOCK_N
    n = first + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    numbers = tl.load(numbers_ptr + offs_m, mask=offs_m < rows, other=0)
    if tl.max(numbers, 0) == 0:
        return
    group = load_b_group(A, P, numbers, 0, 0, n, n < N)
    product = expand_rows(A, P, group, n, n < N, first, first + BLOCK_N, numbers, offs_m, TYPE)
    out_ptrs = out_ptr + offs_m.to(tl.int64)[None, :] * stride_om + n[:, None]
    mask = (numbers > 0)[None, :] & (n < N)[:, None]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32) + product
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


def expand(out, adapters, *, pdl=False):
    """Add B y of each row's adapter to out.

    Args:
        out: [rows, n], contiguous rows. Rows without an adapter keep their bits.
        adapters: LinearAdapters whose y `shrink` has written.
    """
    rows, N = out.shape
    _expand_kernel[(cdiv(N, BLOCK_N), cdiv(rows, BLOCK_M))](
        out, **adapter_arguments(adapters), stride_om=out.stride(0), rows=rows, N=N, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        DOT_FP32=interpreted(), **options(8),
    )  # fmt: skip


def expand_ref(out, adapters) -> None:
    """Compute `expand` in torch."""
    for row in adapters.numbers[: len(out)].nonzero()[:, 0].tolist():
        out[row] = (out[row].float() + adapters.product(row)).to(out.dtype)


def expand_bytes(out, adapters) -> int:
    """Return the bytes that a launch moves: B of each adapter, the rows in and out."""
    return adapters.nbytes(adapters.n) + 2 * out.nbytes


EXPAND = Op(expand, expand_ref, expand_bytes, (_expand_kernel,))
