"""Epilogues of the linear kernels in Gluon, with the functions of epilogue.py."""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..common import META_WIDTH, RUN, STATUS

# The kernel arguments that the epilogue reads (see epilogue_arguments). `rows` is the number of rows of the pass.
Outputs = namedtuple(
    "Outputs",
    "meta_ptr extra_ptr out_ptr normed_ptr sumsq_ptr eps stride_om stride_normed stride_sumsq n_sumsq rows",
)


@gluon.jit
def load_status(o, offs_m):
    """Load the status of the rows `offs_m`. For rows beyond the pass, the status is -1."""
    return gl.load(o.meta_ptr + offs_m * META_WIDTH + STATUS, mask=offs_m < o.rows, other=-1)


@gluon.jit
def any_row_runs(o, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return whether one of the first ROWS rows has status RUN.

    A kernel may call this before `gdc_wait`, because only the last kernels of a pass change the status of rows.
    """
    status = load_status(o, gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [WARPS], [0])))
    return gl.max((status == RUN).to(gl.int32), 0)


@gluon.jit
def load_partials(o, first_m, ROWS: gl.constexpr, SUMSQ_BLOCK: gl.constexpr, L: gl.constexpr):
    """Load the partial sums of squares of ROWS rows: [ROWS, SUMSQ_BLOCK] in layout L."""
    offs_m = first_m + gl.arange(0, ROWS, gl.SliceLayout(1, L))[:, None]
    offs_s = gl.arange(0, SUMSQ_BLOCK, gl.SliceLayout(0, L))[None, :]
    mask = (offs_s < o.n_sumsq) & (offs_m < o.rows)
    return gl.load(o.sumsq_ptr + offs_m * o.stride_sumsq + offs_s, mask=mask, other=0.0)


@gluon.jit
def norm_scale(partials, K, eps, L: gl.constexpr):
    """Return 1 / root mean square of rows, in layout L, from the partial sums of their squares."""
    return gl.convert_layout(gl.rsqrt(gl.sum(partials, 1) / K + eps), L)


@gluon.jit
def silu(x):
    """Return x * sigmoid(x)."""
    return x * (1.0 / (1.0 + gl.exp(-x)))


@gluon.jit
def finish(C: gl.constexpr, o, y, extra, residual, offs_m, offs_n, mask):
    """Add the bias or the residual stream to y [n, m], store out and normed, and return y.

    `C` holds the compile-time constants of the kernel, among them EPILOGUE and HAS_BIAS.
    """
    if C.HAS_BIAS:
        y += extra.to(gl.float32)
    if C.EPILOGUE == "residual":
        y += residual
        normed = (y * extra.to(gl.float32)).to(o.normed_ptr.dtype.element_ty)
        gl.store(o.normed_ptr + offs_m * o.stride_normed + offs_n, normed, mask=mask)
    gl.store(o.out_ptr + offs_m * o.stride_om + offs_n, y.to(o.out_ptr.dtype.element_ty), mask=mask)
    return y
