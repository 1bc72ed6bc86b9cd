"""Helpers of the kernel tests: named cases, random and poisoned tensors, relative RMS error."""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations, product

import pytest
import torch

from tridecode import layout
from tridecode.kernels.attention.fp8_kv import head_rows, store_cells

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if CUDA else (0, 0)
HOPPER, PDL = CAPABILITY == (9, 0), CAPABILITY >= (9, 0)  # PDL: kernels can start before their predecessor has ended.
hopper_only = pytest.mark.skipif(
    not HOPPER, reason="the kernel needs a GPU of compute capability 9.0, because Gluon has no interpreter"
)
# Tolerance of a bf16 output if the reference is also rounded to bf16. The interpreter truncates instead of rounding.
BF16_ROUNDING = 1e-3 if CUDA else 5e-3


@dataclass(frozen=True)
class Case:
    """A named case: sizes of a real model, and small sizes with the same irregularities.

    The interpreter takes 2 ms a program and iteration, so it uses the small sizes.
    """

    name: str
    gpu: dict
    small: dict

    @property
    def sizes(self) -> dict:
        return self.gpu if CUDA else self.small


def covering(together: int, **axes):
    """Parametrize a test by combinations of the values of some arguments, fewer than their product.

    On a GPU most combinations are compiled, which takes seconds.

    Args:
        together: each combination of values of this number of arguments occurs. With 2, this is all-pairs testing.
        axes: the values of each argument, in a list or by name.
    """
    values = [axis if isinstance(axis, dict) else {_name_of(value): value for value in axis} for axis in axes.values()]
    parts_of = {
        names: {part for size in range(1, together + 1) for part in combinations(enumerate(names), size)}
        for names in product(*values)
    }
    chosen, uses, missing = [], Counter(), set().union(*parts_of.values())
    while missing:
        best = max(
            parts_of, key=lambda names: (len(parts_of[names] & missing), -sum(uses[n] for n in enumerate(names)))
        )
        chosen.append(best)
        uses.update(enumerate(best))
        missing -= parts_of[best]
    rows = [[axis[name] for axis, name in zip(values, names)] for names in chosen]
    return pytest.mark.parametrize(list(axes), rows, ids=map("-".join, chosen))


def _name_of(value) -> str:
    return str(getattr(value, "name", None) or getattr(value, "__name__", value)).removeprefix("torch.")


def cases(*entries: Case):
    """Parametrize a test by `case`."""
    return covering(1, case=entries)


def relative_rms(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Return ||out - ref|| / ||ref||. If `out` is still poisoned, the result is NaN, which no tolerance accepts."""
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def assert_close(out: torch.Tensor, ref: torch.Tensor, tolerance: float, name: str = "") -> None:
    assert out.shape == ref.shape
    error = relative_rms(out, ref)
    assert error <= tolerance, f"{name}: relative RMS error {error:.2e}, tolerance {tolerance:.0e}"


def poisoned(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def random(*shape, dtype=torch.float32, scale=1.0, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def norm_weight(n: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5).to(dtype).to(DEVICE)


def in_8_bits(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a pool [pages, layers, 2, kv_heads, page, head_dim] in 8 bits, and K and V of its layer 1."""
    *shape, page, D = pool.shape
    pool_8_bits = torch.zeros(*shape, head_rows(page, D) * D, dtype=torch.uint8, device=pool.device)
    numbers = pool_8_bits[..., : page * D].unflatten(-1, (page, D))
    for layer in range(shape[1]):
        for part in range(2):
            store_cells(numbers[:, layer, part], (slice(None),), pool[:, layer, part])
    return pool_8_bits, *numbers[:, 1].unbind(1)


def meta_rows(*positions: int, status: int = layout.RUN) -> torch.Tensor:
    """Return meta with a row, in the slot of the same number, for each position."""
    rows = torch.zeros(len(positions), layout.META_WIDTH, dtype=torch.int32)
    rows[:, layout.POSITION] = torch.tensor(positions, dtype=torch.int32)
    rows[:, layout.SLOT] = torch.arange(len(positions), dtype=torch.int32)
    rows[:, layout.STATUS] = status
    return rows.to(DEVICE)
