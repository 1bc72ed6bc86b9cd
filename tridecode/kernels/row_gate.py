"""row_gate: multiplies each row by the sigmoid of one number, the product of its input with a vector."""

import torch
import triton
import triton.language as tl

from .common import (
    META_WIDTH,
    RUN,
    STATUS,
    cdiv,
    equal_sigmoid,
    gdc_launch_dependents,
    gdc_wait,
    next_power_of_2,
    options,
    running,
)
from .linear.epilogue import load_partials, norm_scale
from .linear.project import Normed
from .op import Op

BLOCK = 1024


@triton.jit(do_not_specialize=["n_sumsq"])
def _row_gate_kernel(
    meta_ptr, x_ptr, gate_ptr, out_ptr, sumsq_ptr, eps, stride_xm, stride_om, stride_sumsq, n_sumsq,
    N: tl.constexpr, K: tl.constexpr, HAS_META: tl.constexpr, NORMED: tl.constexpr, SUMSQ_BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply out by sigmoid(x . gate). A program computes BLOCK columns of a row; each computes the product again.

    Grid: (cdiv(N, BLOCK), rows).

    Args:
        meta_ptr: [rows, META_WIDTH] int32. Read only if HAS_META.
        x_ptr: [rows, K].
        gate_ptr: [K].
        out_ptr: [rows, N], updated in place.
        sumsq_ptr: partial sums of squares. Read only if NORMED.
    """
    pid, row = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    offs_k, offs = tl.arange(0, BLOCK_K), pid * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    if HAS_META:
        if tl.load(meta_ptr + row * META_WIDTH + STATUS) != RUN:
            return
    x = tl.load(x_ptr + row.to(tl.int64) * stride_xm + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    logit = tl.sum(x * gate, 0)
    if NORMED:
        partials = load_partials(sumsq_ptr, row, True, stride_sumsq, n_sumsq, SUMSQ_BLOCK)
        logit *= norm_scale(tl.sum(partials, 0), K, eps)
    out_ptrs = out_ptr + row.to(tl.int64) * stride_om + offs
    y = tl.load(out_ptrs, mask=offs < N, other=0.0).to(tl.float32) * tl.sigmoid(logit)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=offs < N)


def row_gate(meta, x, gate, normed: Normed | None, out, *, pdl=False):
    """Multiply each row of `out` by sigmoid(x . gate).

    Args:
        meta: int32 [rows, META_WIDTH], or None: all rows are computed.
        x: [rows, k]. With `normed`, the residual stream times the norm's weight, else normalized rows.
        gate: [1, k].
        normed: the partial sums for the division by the root mean square, or None.
        out: [rows, n], updated in place.
    """
    (rows, n), K = out.shape, x.shape[1]
    sumsq, n_sumsq, eps = (x, 0, 0.0) if normed is None else normed
    _row_gate_kernel[(cdiv(n, BLOCK), rows)](
        x if meta is None else meta, x, gate, out, sumsq, eps, x.stride(0), out.stride(0), sumsq.stride(0), n_sumsq, n,
        K, meta is not None, normed is not None, next_power_of_2(max(n_sumsq, 1)), next_power_of_2(K), BLOCK, pdl,
        **options(4, pdl),
    )  # fmt: skip


def row_gate_ref(meta, x, gate, normed: Normed | None, out) -> None:
    """Compute `row_gate` in torch in fp32."""
    rows = slice(None) if meta is None else torch.tensor(running(meta, len(out)), dtype=torch.long, device=out.device)
    logits = (x[rows].float() * gate[0].float()).sum(1)
    if normed is not None:
        sums = normed.sumsq[rows, : normed.partials].sum(1)
        logits = logits * torch.rsqrt(sums / x.shape[1] + normed.eps)
    out[rows] = (out[rows].float() * equal_sigmoid(logits)[:, None]).to(out.dtype)


def row_gate_bytes(meta, x, gate, normed: Normed | None, out) -> int:
    """Return the bytes that a launch moves."""
    return x.nbytes + gate.nbytes + 2 * out.nbytes


ROW_GATE = Op(row_gate, row_gate_ref, row_gate_bytes, (_row_gate_kernel,))
