"""add_norm: adds to the residual stream of a prompt pass and normalizes it for the next linear."""

import triton
import triton.language as tl

from .attention.rope import rms_norm
from .common import next_power_of_2, options
from .op import Op


@triton.jit
def _add_norm_kernel(
    hidden_ptr, delta_ptr, norm_ptr, out_ptr, eps, N: tl.constexpr, HAS_DELTA: tl.constexpr, BLOCK: tl.constexpr
):
    """Add delta to the residual stream, and normalize the sum. A program computes one row.

    hidden += delta; out = hidden * rsqrt(mean square + eps) * norm.
    Grid: (rows,). Moves 8 bytes of hidden an element, and the bytes of delta and out. All tensors are contiguous.

    Args:
        hidden_ptr: [rows, N] fp32, updated in place if HAS_DELTA.
        delta_ptr: [rows, N]. Read only if HAS_DELTA.
        norm_ptr: [N], the norm's weight.
        out_ptr: [rows, N] (output).
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
    """Add delta to hidden, unless it is None, and write rms_norm(hidden) * norm to out in out's dtype.

    Args:
        hidden: [rows, N] fp32, updated in place.
        delta: [rows, N], or None.
        norm: [N].
        out: [rows, N] (output).
    """
    rows, N = hidden.shape
    unused = hidden  # The kernel needs a valid pointer even if there is no delta.
    _add_norm_kernel[(rows,)](
        hidden, unused if delta is None else delta, norm, out, eps, N, delta is not None, next_power_of_2(N),
        **options(8),
    )  # fmt: skip


def add_norm_ref(hidden, delta, norm, out, eps):
    """Compute `add_norm` in torch."""
    if delta is not None:
        hidden += delta
    out.copy_(rms_norm(hidden, norm, eps))


def add_norm_bytes(hidden, delta, norm, out, eps) -> int:
    """Return the bytes that a launch moves. Without a delta, the kernel does not write hidden."""
    return hidden.nbytes + out.nbytes + (0 if delta is None else hidden.nbytes + delta.nbytes)


ADD_NORM = Op(add_norm, add_norm_ref, add_norm_bytes, (_add_norm_kernel,), outputs=("out",))
