"""torch_linear: a linear of many rows, computed by torch's matrix product. Prompt passes use it."""

from typing import NamedTuple

import torch

from ..op import Op
from .dequantize import dequantize
from .project import LinearKernel


class PromptScratch(NamedTuple):
    """Scratch of the linears of a prompt pass.

    Args:
        dequantized: 1-D buffer of the dtype of the activations.
        counter: as in SplitBuffers, for the kernels of few rows.
    """

    dequantized: torch.Tensor
    counter: torch.Tensor

    @property
    def sums(self) -> torch.Tensor:
        """The memory of `dequantized`, as in SplitBuffers."""
        return self.dequantized.view(torch.float32)


def torch_linear(meta, x, linear, out, epilogue, scratch=None, *, config=None, pdl=False):
    """Compute `project` with the epilogue Plain. All rows are computed; meta is not read.

    Args:
        scratch: PromptScratch. A packed tensor is dequantized into it, as many rows at a time as fit.
    """
    if linear.packed is None:
        _multiply(x, linear.weight, linear.bias, out)
        return
    n, k = linear.out_features, linear.in_features
    buffer = scratch.dequantized
    step = piece_rows(n, buffer.numel() // k)
    for first in range(0, n, step):
        end = min(first + step, n)
        weight = buffer[: (end - first) * k].view(-1, k)
        dequantize(linear, first, end, weight)
        _multiply(x, weight, linear.bias if linear.bias is None else linear.bias[first:end], out[:, first:end])


def piece_rows(rows: int, limit: int) -> int:
    """Return how many of a weight's `rows` rows to dequantize at a time, at most `limit`.

    The parts have equal sizes and consist of whole tiles, because cuBLAS takes several times as long for columns of
    `out` that do not begin at a multiple of 16 bytes.
    """
    each = -(-rows // -(-rows // limit))
    rounded = -(-each // 128) * 128
    return min(rounded, limit // 128 * 128 or limit)


def torch_linear_ref(meta, x, linear, out, epilogue, scratch=None) -> None:
    """Compute `torch_linear` in torch."""
    weight = linear.weight if linear.packed is None else linear.matrix().to(x.dtype)
    _multiply(x, weight, linear.bias, out)


def torch_linear_bytes(meta, x, linear, out, epilogue, scratch=None) -> int:
    """Return the bytes that a launch moves. A packed tensor is written and read again in x's dtype."""
    again = 0 if linear.packed is None else 2 * linear.out_features * linear.in_features * x.itemsize
    return x.nbytes + linear.nbytes + again + out.nbytes


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write x @ weight.T + bias to out."""
    if bias is None:
        torch.mm(x, weight.T, out=out)
    else:
        torch.addmm(bias, x, weight.T, out=out)


TORCH = LinearKernel(
    "torch",
    Op(torch_linear, torch_linear_ref, torch_linear_bytes, outputs=("out",)),
    type(None),
    lambda case, rows, device: case.epilogue == "plain",
    lambda n, config: 0,
)
