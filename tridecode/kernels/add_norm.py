"""add_norm: add to the residual stream of a prompt, and normalise it for the next matmul."""

import triton
import triton.language as tl

from .attention.rope import rms_norm
from .common import next_power_of_2, options
from .op import Op


@triton.jit
def _add_norm_kernel(
    hidden_ptr, delta_ptr, norm_ptr, out_ptr, eps, N: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    """hidden += delta; out = hidden * rsqrt(mean square + eps) * norm, a program a row.

    hidden: [rows, N] fp32 (output); delta: [rows, N], read with HAS_DELTA; norm: [N]; out: [rows, N] (output). All
    contiguous. Moves 8 bytes an element and delta's and out's. Grid (rows,).
    """
    row = tl.program_id(0).to(tl.int64) * N
    offs = tl.arange(0, BLOCK)
    mask = offs < N
    x = tl.load(hidden_ptr + row + offs, mask=mask, other=0.0)
    norm = tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        x += tl.load(delta_ptr + row + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(hidden_ptr + row + offs, x, mask=mask)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps) * norm
    tl.store(out_ptr + row + offs, x.to(out_ptr.dtype.element_ty), mask=mask)


def add_norm(hidden, delta, norm, out, eps):
    """hidden += delta, where there is one; out = rms_norm(hidden) * norm in out's dtype."""
    rows, N = hidden.shape
    spare = hidden  # stands in for an absent delta
    _add_norm_kernel[(rows,)](
        hidden, spare if delta is None else delta, norm, out, eps, N, delta is not None, next_power_of_2(N),
        **options(8),
    )  # fmt: skip


def add_norm_ref(hidden, delta, norm, out, eps):
    if delta is not None:
        hidden += delta
    out.copy_(rms_norm(hidden, norm, eps))


def add_norm_bytes(hidden, delta, norm, out, eps) -> int:
    """The residual stream is written only where something is added to it."""
    return hidden.nbytes + out.nbytes + (0 if delta is None else hidden.nbytes + delta.nbytes)


ADD_NORM = Op(add_norm, add_norm_ref, add_norm_bytes, (_add_norm_kernel,), outputs=("out",))
