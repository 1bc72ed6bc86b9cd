"""silu_mul: SiLU(gate) * up for the tokens of a prompt."""

import torch
import triton
import triton.language as tl

from .common import cdiv, options
from .op import Op

BLOCK = 1024


@triton.jit
def _silu_mul_kernel(x_ptr, out_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out = silu(x[:, :N]) * x[:, N:] in fp32. A program computes BLOCK columns of a row.

    Grid: (rows, cdiv(N, BLOCK)). Moves three elements for each element of out.

    Args:
        x_ptr: [rows, 2 * N], contiguous, gate first.
        out_ptr: [rows, N], contiguous (output).
    """
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < N
    gate = tl.load(x_ptr + row * 2 * N + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * N + N + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * N + offs, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(x, out):
    """Write silu(gate) * up to out.

    Args:
        x: [rows, 2 * N], gate first.
        out: [rows, N] (output).
    """
    rows, N = out.shape
    _silu_mul_kernel[(rows, cdiv(N, BLOCK))](x, out, N, BLOCK, **options(4))


def silu_mul_ref(x, out):
    """Compute `silu_mul` in torch."""
    gate, up = x.float().chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def silu_mul_bytes(x, out) -> int:
    """Return the bytes that a launch moves."""
    return x.nbytes + out.nbytes


SILU_MUL = Op(silu_mul, silu_mul_ref, silu_mul_bytes, (_silu_mul_kernel,), outputs=("out",))
