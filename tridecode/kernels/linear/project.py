"""project: a matrix product with a weight, followed by an epilogue. Every linear kernel implements it.

A kernel is launched as `op.launch(meta, x, linear, out, epilogue, scratch, config=..., pdl=...)`. Kernels that support
adapters (`LinearKernel.adapts`) take `adapters` after scratch.

Args:
    meta: int32 [rows, META_WIDTH], the rows of the pass.
    x: [rows, k].
    linear: the weight.
    out: [rows, n]; with Gated [rows, n / 2]. Output.
    epilogue: one of the types below.
    scratch: buffers for split-k sums or for a dequantized weight. None if the kernel needs none.
    adapters: LinearAdapters whose y `shrink` has written. Each row's B y is added to x @ weight.T. None: no adapters.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..common import running
from ..device import Device
from ..op import Op
from .packed import Packed


class Plain(NamedTuple):
    """out = x @ weight.T + bias."""


class Normed(NamedTuple):
    """out = (x @ weight.T) * s + bias, where s = 1 / sqrt(sum(sumsq[:partials]) / k + eps) of each row.

    x is the residual stream times the norm's weight. sumsq: [rows, hidden] fp32, `partials` partial sums of the squares
    of the residual stream.
    """

    sumsq: torch.Tensor
    partials: int
    eps: float


class Gated(NamedTuple):
    """out = silu(gate) * up, where gate and up are the two halves of (x @ weight.T) * s, with s as in Normed.

    The first half of the weight's rows is gate, the second up. There is no bias.
    """

    sumsq: torch.Tensor
    partials: int
    eps: float


class AddResidual(NamedTuple):
    """out += x @ weight.T, where out is the residual stream, fp32; prepares the next norm. There is no bias.

    Args:
        norm: [n], the weight of the next norm.
        normed: [rows, n], out * norm. Output.
        sumsq: fp32 [rows, n]. Its first `LinearKernel.partials` columns are partial sums of out ** 2. Output.
    """

    norm: torch.Tensor
    normed: torch.Tensor
    sumsq: torch.Tensor


MAX_ROWS = 64  # Maximum number of rows of a pass whose kernels read each weight once for all rows.
SHORT = (torch.bfloat16, torch.float16)  # 16-bit dtypes that tensor cores multiply.
Epilogue = Plain | Normed | Gated | AddResidual
OUTPUTS = ("out", "epilogue.normed", "epilogue.sumsq")  # Arguments that a kernel writes; see Op.
NAMES = {Plain: "plain", Normed: "normed", Gated: "gated", AddResidual: "residual"}


class Case(NamedTuple):
    """The properties of a linear that the choice of a kernel depends on, with the rows of the pass and the device.

    Args:
        n, k: rows and columns of the weight. With Gated, n counts gate and up together.
        weight_type: the description of the packed tensor, or the dtype of a dense weight.
        epilogue: a value of NAMES.
    """

    n: int
    k: int
    weight_type: Packed | torch.dtype
    epilogue: str

    @property
    def packed(self) -> Packed | None:
        """The description of the packed tensor, or None for a dense weight."""
        return self.weight_type if isinstance(self.weight_type, Packed) else None

    @property
    def hidden(self) -> int:
        """Size of the residual stream that the product reads or writes."""
        return self.n if self.epilogue == "residual" else self.k


@dataclass(frozen=True)
class LinearKernel:
    """A kernel that multiplies by a weight.

    Args:
        name: name in tables and in `info --kernels`.
        config: type of its launch config.
        supports: supports(case, rows, device) returns whether the kernel computes the case in passes of `rows` rows on
            the device. x has the dtype of a dense weight.
        partials: partials(n, config) returns the number of partial sums that AddResidual writes for n outputs.
        adapts: adapts(config) returns whether the epilogue can add adapters.
    """

    name: str
    op: Op
    config: type
    supports: Callable[[Case, int, Device], bool]
    partials: Callable[[int, Any], int]
    adapts: Callable[[Any], bool] = lambda config: False


def project_ref(meta, x, linear, out, epilogue, scratch=None) -> None:
    """Compute `project` in torch in fp32, row by row, for all linear kernels."""
    adapted_ref(meta, x, linear, out, epilogue)


def adapted_ref(meta, x, linear, out, epilogue, scratch=None, adapters=None) -> None:
    """Compute `project` with adapters, or without them, in torch in fp32, row by row."""
    for row in running(meta, out.shape[0]):
        y = linear.matrix() @ x[row].float()
        if adapters is not None:
            y += adapters.product(row)
        if isinstance(epilogue, Normed | Gated):
            y *= torch.rsqrt(epilogue.sumsq[row, : epilogue.partials].sum() / x.shape[1] + epilogue.eps)
        if isinstance(epilogue, Gated):
            gate, up = y.chunk(2)
            y = torch.nn.functional.silu(gate) * up
        if linear.bias is not None:
            y = y + linear.bias.float()
        if isinstance(epilogue, AddResidual):
            out[row] += y
            epilogue.normed[row] = (out[row] * epilogue.norm.float()).to(epilogue.normed.dtype)
            epilogue.sumsq[row] = 0
            epilogue.sumsq[row, 0] = out[row].square().sum()
        else:
            out[row] = y.to(out.dtype)


def project_bytes(meta, x, linear, out, epilogue, scratch=None) -> int:
    """Return the bytes that a launch moves: the weight once for all rows, the rows in and out."""
    return linear.nbytes + x.nbytes + out.nbytes


def adapted_bytes(meta, x, linear, out, epilogue, scratch=None, adapters=None) -> int:
    """Return the bytes that a launch moves: those of `project_bytes`, and B of each adapter."""
    own = 0 if adapters is None else adapters.nbytes(adapters.n)
    return project_bytes(meta, x, linear, out, epilogue) + own
