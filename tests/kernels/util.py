"""Shared by the kernel tests: cases named once with two sets of sizes, poisoned outputs, one measure of error."""

from dataclasses import dataclass

import pytest
import torch

from tridecode import layout
from tridecode.kernels.attention.fp8_kv import head_rows, put

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# One rounding to bf16, beside a reference that rounds the same way up to fp32 noise. The interpreter truncates instead.
BF16_ROUNDING = 1e-3 if CUDA else 5e-3


@dataclass(frozen=True)
class Case:
    """`gpu` holds a real model's sizes, `small` the same oddness for the interpreter (2 ms a program and loop turn)."""

    name: str
    gpu: dict
    small: dict

    @property
    def sizes(self) -> dict:
        return self.gpu if CUDA else self.small


def cases(*entries: Case):
    return pytest.mark.parametrize("case", entries, ids=[c.name for c in entries])


def relative_rms(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||; NaN (an output left poisoned) never compares below a tolerance."""
    return ((out.double() - ref.double()).norm() / ref.double().norm()).item()


def assert_close(out: torch.Tensor, ref: torch.Tensor, tolerance: float, what: str = "") -> None:
    assert out.shape == ref.shape
    error = relative_rms(out, ref)
    assert error <= tolerance, f"{what}: relative RMS error {error:.2e}, tolerance {tolerance:.0e}"


def poisoned(*shape, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def random(*shape, dtype=torch.float32, scale=1.0, seed=0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def norm_weight(n: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.rand(n, generator=torch.Generator().manual_seed(n)) + 0.5).to(dtype).to(DEVICE)


def in_8_bits(pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a pool [pages, layers, 2, kv_heads, page, head_dim] the same in 8 bits, and K and V of its layer 1."""
    *shape, page, D = pool.shape
    found = torch.zeros(*shape, head_rows(page, D) * D, dtype=torch.uint8, device=pool.device)
    numbers = found[..., : page * D].unflatten(-1, (page, D))
    for layer in range(shape[1]):
        for part in range(2):
            put(numbers[:, layer, part], (slice(None),), pool[:, layer, part])
    return found, *numbers[:, 1].unbind(1)


def meta_rows(*positions: int, status: int = layout.RUN) -> torch.Tensor:
    rows = torch.zeros(len(positions), layout.META_WIDTH, dtype=torch.int32)
    rows[:, layout.POSITION] = torch.tensor(positions, dtype=torch.int32)
    rows[:, layout.SLOT] = torch.arange(len(positions), dtype=torch.int32)
    rows[:, layout.STATUS] = status
    return rows.to(DEVICE)
