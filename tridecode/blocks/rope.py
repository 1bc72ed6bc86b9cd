"""Rotary embedding: its settings, and the tables of cosines and sines that kernels read."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RopeConfig:
    """Settings of a rotary embedding.

    Args:
        theta: base of the frequencies.
        kind: "default" or "llama3". Only "llama3" reads the other fields.
        factor: factor by which the longest wavelengths are multiplied.
        low_freq_factor: wavelengths above original_max_position / low_freq_factor are multiplied by `factor`.
        high_freq_factor: wavelengths below original_max_position / high_freq_factor do not change.
        original_max_position: context of the model before it was extended.
        partial: share of the columns of a head that are rotated. These are the first columns.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0

    def columns(self, head_dim: int) -> int:
        """Return the number of columns of a head that are rotated."""
        return int(head_dim * self.partial)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the inverse frequencies, fp32 [rotated columns / 2].

    "llama3" stretches the long wavelengths as Llama 3.1 does.
    Source: `_compute_llama3_parameters` in transformers.
    """
    columns = rope.columns(head_dim)
    exponent = torch.arange(0, columns, 2, dtype=torch.int64).float() / columns
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "default":
        return frequency
    wavelength = 2 * math.pi / frequency
    long = rope.original_max_position / rope.low_freq_factor
    short = rope.original_max_position / rope.high_freq_factor
    ramp = rope.original_max_position / wavelength - rope.low_freq_factor
    ramp = ramp / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - ramp) * frequency / rope.factor + ramp * frequency
    scaled = torch.where(wavelength > long, frequency / rope.factor, frequency)
    return torch.where((wavelength <= long) & (wavelength >= short), blended, scaled)


def rope_tables(
    rope: RopeConfig, head_dim: int, capacity: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [capacity, rotated columns / 2]."""
    angle = torch.arange(capacity).float()[:, None] * inverse_frequencies(rope, head_dim)[None, :]
    return angle.cos().to(device), angle.sin().to(device)
