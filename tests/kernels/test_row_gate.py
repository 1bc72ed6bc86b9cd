"""row_gate against its reference."""

import pytest
import torch
from check import check_op
from util import BF16_ROUNDING, meta_rows, random

from tridecode import layout
from tridecode.kernels.linear.project import Normed
from tridecode.kernels.row_gate import BLOCK, ROW_GATE

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: BF16_ROUNDING}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows, n, k", [(1, 208, 96), (5, BLOCK + 24, 80)])
@pytest.mark.parametrize("decode", [True, False], ids=["decode", "prompt"])
def test_rows_are_multiplied_by_their_sigmoid(dtype, rows, n, k, decode):
    x, gate = random(rows, k, dtype=dtype), random(1, k, dtype=dtype, scale=2 * k**-0.5, seed=1)
    sums = torch.full((rows, 16), float("nan"), device=x.device)
    sums[:, :3] = x.float().square().sum(1, keepdim=True) / 3
    meta, normed = (meta_rows(*range(rows)), Normed(sums, 3, 1e-6)) if decode else (None, None)
    if decode and rows > 1:
        meta[2, layout.STATUS] = layout.WAIT
    args = meta, x, gate, normed, random(rows, n, dtype=dtype, seed=2)
    check_op(ROW_GATE, args, tolerance=TOLERANCE[dtype], outputs=("out",), accumulates=("out",))


def test_reference_of_a_row_does_not_depend_on_the_number_of_rows():
    """On a CPU, torch would compute most rows by vector instructions, and round the remaining rows differently."""
    x, gate, out = random(70, 96).cpu(), random(1, 96, seed=1).cpu(), random(70, 32, seed=2).cpu()
    alone = out.clone()
    for row in range(len(x)):
        ROW_GATE.ref(None, x[row : row + 1], gate, None, alone[row : row + 1])
    for rows in range(1, len(x) + 1):
        together = out.clone()
        ROW_GATE.ref(None, x[:rows], gate, None, together[:rows])
        assert torch.equal(together[:rows], alone[:rows]), rows
