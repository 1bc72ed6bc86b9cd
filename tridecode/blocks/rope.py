"""Rotary embedding: its settings, and the tables of cosines and sines that kernels read."""

import math
from dataclasses import dataclass

import torch

# Kinds of rotary embeddings, and the keys of rope_parameters that only some kinds read.
ROPE_KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip


@dataclass(frozen=True)
class RopeConfig:
    """Settings of a rotary embedding.

    Args:
        theta: base of the frequencies.
        kind: one of ROPE_KINDS. "default" reads no field below except `partial`.
        factor: factor by which the longest wavelengths are multiplied.
        low_freq_factor: of "llama3" and "yarn" ("beta_slow"): wavelengths that fit fewer times into
            original_max_position are multiplied by `factor`.
        high_freq_factor: of "llama3" and "yarn" ("beta_fast"): wavelengths that fit more often do not change.
        original_max_position: context of the model before it was extended.
        partial: share of the columns of a head that are rotated. These are the first columns.
        attention_factor: factor of cosines and sines.
        truncate: of "yarn": the columns at which the blend begins and ends are rounded to integers.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    partial: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True

    def columns(self, head_dim: int) -> int:
        """Return the number of columns of a head that are rotated."""
        return int(head_dim * self.partial)

    def max_position(self, configured: int) -> int:
        """Return the longest context of a model whose config.json has `configured` as max_position_embeddings.

        Files that set up a longer context may or may not change that key. For "llama3" it is always changed.
        """
        if self.kind in ("default", "llama3"):
            return configured
        return max(configured, min(int(self.factor * self.original_max_position), 2**31 - 1))

    def depends_on(self, capacity: int) -> bool:
        """Return whether the frequencies for contexts of `capacity` positions differ from those of short contexts."""
        return self.kind == "dynamic" and self.factor > 1 and capacity > self.original_max_position


def inverse_frequencies(rope: RopeConfig, head_dim: int, capacity: int) -> torch.Tensor:
    """Return the inverse frequencies, fp32 [rotated columns / 2], for contexts of up to `capacity` positions.

    Only "dynamic" depends on the capacity. transformers changes its base with the length of each text; here the base
    is the one for a text of `capacity` positions, because K of different texts and lengths share pages.
    Source: `modeling_rope_utils` in transformers.
    """
    columns, theta = rope.columns(head_dim), rope.theta
    if rope.depends_on(capacity):
        stretch = rope.factor * capacity / rope.original_max_position - (rope.factor - 1)
        theta *= stretch ** (columns / (columns - 2))
    exponent = torch.arange(0, columns, 2, dtype=torch.int64).float() / columns
    frequency = 1.0 / (theta**exponent)
    if rope.kind in ("default", "dynamic"):
        return frequency
    if rope.kind == "linear":
        return frequency / rope.factor
    kept = _yarn_kept(rope, columns) if rope.kind == "yarn" else _llama3_kept(rope, frequency)
    return (1 - kept) * frequency / rope.factor + kept * frequency


def _llama3_kept(rope: RopeConfig, frequency: torch.Tensor) -> torch.Tensor:
    """Return the share of each frequency that "llama3" does not divide by the factor, from 0 to 1."""
    rotations = rope.original_max_position / (2 * math.pi / frequency)
    ramp = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return ramp.clamp(0, 1)


def _yarn_kept(rope: RopeConfig, columns: int) -> torch.Tensor:
    """Return the share of each frequency that "yarn" does not divide by the factor, from 0 to 1."""

    def pair(rotations: float) -> float:
        """Return the pair of columns that rotates this often in the original context."""
        turns = math.log(rope.original_max_position / (rotations * 2 * math.pi))
        return columns * turns / (2 * math.log(rope.theta))

    low, high = pair(rope.high_freq_factor), pair(rope.low_freq_factor)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, columns - 1)
    if low == high:
        high += 0.001
    return 1 - ((torch.arange(columns // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)


def rope_tables(
    rope: RopeConfig, head_dim: int, capacity: int, device: torch.device | str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, fp32 [capacity, rotated columns / 2]."""
    angle = torch.arange(capacity).float()[:, None] * inverse_frequencies(rope, head_dim, capacity)[None, :]
    return (angle.cos() * rope.attention_factor).to(device), (angle.sin() * rope.attention_factor).to(device)
