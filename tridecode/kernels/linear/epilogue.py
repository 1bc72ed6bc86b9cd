"""Epilogues of the linear kernels in Triton: the work that follows the sums of a product.

An epilogue applies the norm's scale, the gate, and the bias or the residual stream, and stores the outputs.
`gluon_epilogue.py` implements the same in Gluon.
"""

import triton
import triton.language as tl

from ..common import next_power_of_2
from .project import NAMES, AddResidual, Gated, Normed
from .weight import LoadedLinear


def epilogue_arguments(linear: LoadedLinear, out, epilogue, min_sumsq: int = 1) -> dict:
    """Return the arguments of a kernel that depend on the epilogue, by name.

    Pointers that the kernel does not read are set to `out`. extra_ptr, [n], is the bias if HAS_BIAS, and the
    weight of the next norm for AddResidual. SUMSQ_BLOCK is a power of two that is at least n_sumsq and `min_sumsq`.
    """
    normed, sumsq, n_sumsq, eps, extra = out, out, 0, 0.0, linear.bias
    if isinstance(epilogue, Gated | AddResidual) and linear.bias is not None:
        raise ValueError(f"a linear with a bias cannot have the epilogue {NAMES[type(epilogue)]}")
    if isinstance(epilogue, Normed | Gated):
        sumsq, n_sumsq, eps = epilogue
    elif isinstance(epilogue, AddResidual):
        extra, normed, sumsq = epilogue
    return {
        "extra_ptr": out if extra is None else extra,
        "out_ptr": out,
        "normed_ptr": normed,
        "sumsq_ptr": sumsq,
        "eps": eps,
        "stride_om": out.stride(0),
        "stride_normed": normed.stride(0),
        "stride_sumsq": sumsq.stride(0),
        "n_sumsq": n_sumsq,
        "SUMSQ_BLOCK": max(next_power_of_2(max(n_sumsq, 1)), min_sumsq),
        "EPILOGUE": NAMES[type(epilogue)],
        "HAS_BIAS": linear.bias is not None,
    }


@triton.jit
def load_extra(extra_ptr, offs_n, N, EPILOGUE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """Load the bias or the next norm's weight of columns offs_n. Return 0.0 if the epilogue has neither."""
    if HAS_BIAS or EPILOGUE == "residual":
        return tl.load(extra_ptr + offs_n, mask=offs_n < N, other=0.0)
    else:
        return 0.0


@triton.jit
def load_partials(sumsq_ptr, offs_m, mask_m, stride_sumsq, n_sumsq, SUMSQ_BLOCK: tl.constexpr):
    """Load the partial sums of squares of rows offs_m.

    For a scalar offs_m the result is [SUMSQ_BLOCK], for [m, 1] it is [m, SUMSQ_BLOCK].
    """
    offs_s = tl.arange(0, SUMSQ_BLOCK)
    mask = (offs_s < n_sumsq) & mask_m
    return tl.load(sumsq_ptr + offs_m * stride_sumsq + offs_s, mask=mask, other=0.0)


@triton.jit
def norm_scale(sumsq, K, eps):
    """Return 1 / root mean square of rows, from the sums of their squares."""
    return tl.rsqrt(sumsq / K + eps)


@triton.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x * tl.sigmoid(x)


@triton.jit
def finish(
    y,
    out_ptrs,
    normed_ptrs,
    extra,
    residual,
    mask,
    mask_n,
    EPILOGUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Add the bias or the residual stream to y, and store out and normed. Return the squares of y.

    Without a residual stream, the result is 0.0.
    """
    squares = 0.0
    if HAS_BIAS:
        y += extra.to(tl.float32)
    if EPILOGUE == "residual":
        y += residual
        tl.store(normed_ptrs, (y * extra.to(tl.float32)).to(normed_ptrs.dtype.element_ty), mask=mask)
        squares = tl.where(mask_n, y * y, 0.0)
    tl.store(out_ptrs, y.to(out_ptrs.dtype.element_ty), mask=mask)
    return squares
