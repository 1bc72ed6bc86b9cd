"""take_rows: copies the rows of a prompt pass that sample a token to the decode pass that completes it."""

import triton
import triton.language as tl

from .common import META_WIDTH, OWN_ROW, RUN, SOURCE, STATUS, gdc_launch_dependents, options, running
from .op import Op


@triton.jit
def _copy_row(source_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Copy N contiguous elements and convert them to the output's dtype."""
    for first in tl.static_range(0, N, BLOCK):
        offs = first + tl.arange(0, BLOCK)
        x = tl.load(source_ptr + offs, mask=offs < N, other=0.0)
        tl.store(out_ptr + offs, x.to(out_ptr.dtype.element_ty), mask=offs < N)


@triton.jit
def _take_rows_kernel(
    meta_ptr,
    hidden_ptr,
    qkv_ptr,
    hidden_out_ptr,
    qkv_out_ptr,
    stride_hidden,
    stride_qkv,
    K: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the residual stream and the last layer's q, k and v of the row that each row continues.

    A program copies one row. Grid: (rows,). Moves 8 * K + (4 + itemsize) * N bytes per row.
    Launched without PDL in every pass. It therefore acts as a fence: later kernels may read meta and old K/V before
    they wait for their predecessor.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. The kernel reads SOURCE, a row of the pass, and sets it to OWN_ROW.
        hidden_ptr: [pass rows, K] fp32.
        qkv_ptr: [pass rows, N].
        hidden_out_ptr: [rows, K] fp32 (output).
        qkv_out_ptr: [rows, N] fp32 (output).
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    meta_ptr += row * META_WIDTH
    if tl.load(meta_ptr + STATUS) != RUN:
        return
    source = tl.load(meta_ptr + SOURCE)
    source = tl.where(source == OWN_ROW, row, source).to(tl.int64)
    _copy_row(hidden_ptr + source * K, hidden_out_ptr + row * stride_hidden, K, BLOCK)
    _copy_row(qkv_ptr + source * N, qkv_out_ptr + row * stride_qkv, N, BLOCK)
    tl.store(meta_ptr + SOURCE, OWN_ROW)


def take_rows(meta, hidden, qkv, hidden_out, qkv_out, *, pdl=False):
    """Copy the rows of hidden and qkv at meta's SOURCE to hidden_out and qkv_out.

    Args:
        meta: [rows, META_WIDTH] int32.
        hidden: [pass rows, K] fp32.
        qkv: [pass rows, N].
        hidden_out: [rows, K] fp32 (output).
        qkv_out: [rows, N] fp32 (output).
    """
    rows, K = hidden_out.shape
    _take_rows_kernel[(rows,)](
        meta, hidden, qkv, hidden_out, qkv_out, hidden_out.stride(0), qkv_out.stride(0), K, qkv.shape[1], 1024, pdl,
        **options(8),
    )  # fmt: skip


def take_rows_ref(meta, hidden, qkv, hidden_out, qkv_out):
    """Compute `take_rows` in torch."""
    for row in running(meta, len(hidden_out)):
        source = int(meta[row, SOURCE.value])
        source = row if source == OWN_ROW.value else source
        hidden_out[row], qkv_out[row] = hidden[source], qkv[source].float()
        meta[row, SOURCE.value] = OWN_ROW.value


def take_rows_bytes(meta, hidden, qkv, hidden_out, qkv_out) -> int:
    """Return the bytes that a launch moves."""
    return 2 * hidden_out.nbytes + qkv_out.numel() * (qkv_out.itemsize + qkv.itemsize)


TAKE_ROWS = Op(take_rows, take_rows_ref, take_rows_bytes, (_take_rows_kernel,), outputs=("hidden_out", "qkv_out"))
