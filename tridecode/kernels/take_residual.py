"""take_residual: after the last layer of a prompt pass, copies the rows that sample a token, for the LM head."""

import torch
import triton
import triton.language as tl

from .common import META_WIDTH, OWN_ROW, RUN, SOURCE, STATUS, gdc_launch_dependents, next_power_of_2, options, running
from .op import Op


@triton.jit
def _take_residual_kernel(
    meta_ptr,
    hidden_ptr,
    delta_ptr,
    norm_ptr,
    out_ptr,
    normed_ptr,
    sumsq_ptr,
    stride_out,
    stride_normed,
    stride_sumsq,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy hidden + delta of the row that each row continues, and prepare the next norm. A program computes one row.

    Grid: (rows,). Launched without PDL in every pass. It therefore acts as a fence: later kernels may read meta and old
    K/V before they wait for their predecessor.

    Args:
        meta_ptr: [rows, META_WIDTH] int32. The kernel reads SOURCE, a row of the pass, and sets it to OWN_ROW.
        hidden_ptr: [pass rows, K] fp32.
        delta_ptr: [pass rows, K].
        norm_ptr: [K].
        out_ptr: [rows, K] fp32 (output).
        normed_ptr: [rows, K] (output), out * norm.
        sumsq_ptr: [rows, 1] fp32 (output), sum of the squares of out.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0)
    meta_ptr += row * META_WIDTH
    if tl.load(meta_ptr + STATUS) != RUN:
        return
    source = tl.load(meta_ptr + SOURCE)
    source = tl.where(source == OWN_ROW, row, source).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < K
    x = tl.load(hidden_ptr + source * K + offs, mask=mask, other=0.0)
    x += tl.load(delta_ptr + source * K + offs, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + offs, x, mask=mask)
    tl.store(normed_ptr + row * stride_normed + offs, (x * norm).to(normed_ptr.dtype.element_ty), mask=mask)
    tl.store(sumsq_ptr + row * stride_sumsq, tl.sum(x * x, 0))
    tl.store(meta_ptr + SOURCE, OWN_ROW)


def take_residual(meta, hidden, delta, norm, out, normed, sumsq, *, pdl=False):
    """Fill out, normed and one partial sum in sumsq from the rows of hidden + delta at meta's SOURCE."""
    rows, K = out.shape
    _take_residual_kernel[(rows,)](
        meta, hidden, delta, norm, out, normed, sumsq, out.stride(0), normed.stride(0), sumsq.stride(0), K,
        next_power_of_2(K), pdl, **options(8),
    )  # fmt: skip


def take_residual_ref(meta, hidden, delta, norm, out, normed, sumsq):
    """Compute `take_residual` in torch."""
    for row in running(meta, len(out)):
        source = int(meta[row, SOURCE.value])
        source = row if source == OWN_ROW.value else source
        out[row] = hidden[source] + delta[source].float()
        normed[row] = (out[row] * norm.float()).to(normed.dtype)
        sumsq[row, 0] = torch.sum(out[row].square())
        meta[row, SOURCE.value] = OWN_ROW.value


def take_residual_bytes(meta, hidden, delta, norm, out, normed, sumsq) -> int:
    """Return the bytes that a launch moves."""
    return 2 * out.nbytes + out.numel() * delta.itemsize + normed.nbytes


TAKE_RESIDUAL = Op(
    take_residual, take_residual_ref, take_residual_bytes, (_take_residual_kernel,), outputs=("out", "normed")
)
