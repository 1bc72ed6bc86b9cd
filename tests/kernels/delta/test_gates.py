"""Gates of gated delta net layers in references."""

import pytest
import torch
from util import random

from tridecode.kernels.delta.gates import rates


class Weights:
    """The weights that `rates` reads."""

    def __init__(self, heads: int):
        self.a_log, self.dt_bias = random(heads, seed=2).cpu(), random(heads, seed=3).cpu()


@pytest.mark.parametrize("heads", [1, 3, 16, 48])
def test_gates_of_a_row_do_not_depend_on_the_number_of_rows(heads):
    """On a CPU, torch computes most numbers by vector instructions, and rounds the remaining ones differently."""
    b, a, weights = 3 * random(70, heads).cpu(), 3 * random(70, heads, seed=1).cpu(), Weights(heads)
    alone = [torch.stack(parts) for parts in zip(*(rates(*row, weights) for row in zip(b, a)))]
    for rows in range(1, 71):
        assert all(map(torch.equal, rates(b[:rows], a[:rows], weights), [part[:rows] for part in alone])), rows


def test_gates_match_double_precision():
    """The gates have the precision of fp32, also where they are very small."""
    heads = 201
    x, weights = torch.linspace(-40, 40, heads), Weights(heads)
    beta, g = rates(x, x, weights)
    decay = torch.nn.functional.softplus(x.double() + weights.dt_bias.double(), threshold=100)
    torch.testing.assert_close(beta.double(), x.double().sigmoid(), rtol=1e-6, atol=0)
    # Sums of x and the bias near 40 are rounded.
    torch.testing.assert_close(g.double(), -weights.a_log.double().exp() * decay, rtol=4e-6, atol=0)
