"""delta_gates: the projections `b` (of beta) and `a` (of the decay) of a prompt pass, by torch's matrix product."""

import torch

from ..op import Op
from .arguments import DeltaWeights


def delta_gates(x, weights: DeltaWeights, b, a):
    """Write `x @ weights.b.T` to `b` and `x @ weights.a.T` to `a`.

    Args:
        x: [rows, hidden].
        b, a: [rows, value heads] (outputs).
    """
    torch.mm(x, weights.b.T, out=b)
    torch.mm(x, weights.a.T, out=a)


def delta_gates_bytes(x, weights: DeltaWeights, b, a) -> int:
    """Return the bytes that a launch moves."""
    return 2 * x.nbytes + weights.b.nbytes + weights.a.nbytes + b.nbytes + a.nbytes


DELTA_GATES = Op(delta_gates, delta_gates, delta_gates_bytes, outputs=("b", "a"))
