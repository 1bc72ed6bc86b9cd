"""add_experts: adds the products of the experts of each row."""

import torch
import triton
import triton.language as tl

from ..common import META_WIDTH, RUN, STATUS, gdc_launch_dependents, gdc_wait, next_power_of_2, options, running
from ..linear.project import OUTPUTS, AddResidual
from ..op import Op
from .arguments import ExpertSizes, Routes
from .expert_rows import prepare_norm


@triton.jit
def _add_experts_kernel(
    meta_ptr, x_ptr, ids_ptr, shared_ptr, norm_ptr, out_ptr, normed_ptr, sumsq_ptr, stride_om, stride_normed,
    stride_sumsq, N: tl.constexpr, USED: tl.constexpr, HAS_SHARED: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the products of a row.

    With HAS_SHARED, add the output of a shared expert with linears of its own. With RESIDUAL, add the sum to the
    residual stream and prepare the next norm.

    Grid: (rows,).

    Args:
        x_ptr: [rows, USED, N].
        ids_ptr: [rows, USED] int32. A row whose first id is -1 has no products. Read only without RESIDUAL.
        shared_ptr: contiguous [rows, N], the output of the shared expert. Read only if HAS_SHARED.
        norm_ptr: [N], the weight of the next norm. Read only if RESIDUAL.
        out_ptr: [rows, N] (output).
    """
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    if RESIDUAL:
        status = tl.load(meta_ptr + row * META_WIDTH + STATUS)
        norm = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    out_ptrs = out_ptr + row.to(tl.int64) * stride_om + offs
    mask_x = mask
    if RESIDUAL:
        if status != RUN:
            return
        y = tl.load(out_ptrs, mask=mask, other=0.0)
    else:
        mask_x = offs < tl.where(tl.load(ids_ptr + row * USED) < 0, 0, N)
        y = tl.zeros([BLOCK], tl.float32)
    if HAS_SHARED:
        y += tl.load(shared_ptr + row.to(tl.int64) * N + offs, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(USED):
        x = tl.load(x_ptr + (row.to(tl.int64) * USED + i) * N + offs, mask=mask_x, other=0.0)
        y += x.to(tl.float32)
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)
    if RESIDUAL:
        normed = (y * norm).to(normed_ptr.dtype.element_ty)
        tl.store(normed_ptr + row * stride_normed + offs, normed, mask=mask)
        tl.store(sumsq_ptr + row * stride_sumsq, tl.sum(y * y, 0))


def add_experts(
    meta, x, routes: Routes, out, epilogue: AddResidual | None, sizes: ExpertSizes, shared=None, *, pdl=False
):
    """Add the products of the experts of each row.

    Args:
        meta: int32 [rows, META_WIDTH], or None without `epilogue`.
        x: contiguous [rows, used experts * n].
        routes: the experts of the rows. A row without a token has no products.
        out: [rows, n] (output). With `epilogue`, the residual stream in fp32, to which the products are added.
        epilogue: the next norm, or None.
        shared: contiguous [rows, n], which is added too, or None. It may be `out`.
    """
    rows, n = out.shape
    norm, normed, sumsq = (out, out, out) if epilogue is None else epilogue
    _add_experts_kernel[(rows,)](
        routes.ids if meta is None else meta, x, routes.ids, x if shared is None else shared, norm, out, normed, sumsq,
        out.stride(0), normed.stride(0), sumsq.stride(0), n, sizes.used, shared is not None, epilogue is not None,
        next_power_of_2(n), pdl, **options(8, pdl),
    )  # fmt: skip


def add_experts_ref(
    meta, x, routes: Routes, out, epilogue: AddResidual | None, sizes: ExpertSizes, shared=None
) -> None:
    """Compute `add_experts` in torch in fp32."""
    parts, other = x.view(len(out), sizes.used, -1), torch.zeros_like(out) if shared is None else shared
    if epilogue is None:
        has = routes.ids[:, :1] >= 0
        out.copy_(parts.float().sum(1).where(has, 0.0) + other)
        return
    for row in running(meta, len(out)):
        out[row] += parts[row].float().sum(0) + other[row]
        prepare_norm(row, out, epilogue)


def add_experts_bytes(
    meta, x, routes: Routes, out, epilogue: AddResidual | None, sizes: ExpertSizes, shared=None
) -> int:
    """Return the bytes that a launch moves."""
    return x.nbytes + out.nbytes * (1 if epilogue is None else 2) + (0 if shared is None else shared.nbytes)


ADD_EXPERTS = Op(add_experts, add_experts_ref, add_experts_bytes, (_add_experts_kernel,), OUTPUTS)
