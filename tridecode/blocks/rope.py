"""Tables of the rotary embedding."""

import math

import torch

from ..models.config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """fp32 [head_dim / 2]; "llama3" stretches the long wavelengths as Llama 3.1 and later do."""
    rope = config.rope
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
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


def rope_tables(config: ModelConfig, capacity: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, fp32 [capacity, head_dim / 2]."""
    angle = torch.arange(capacity).float()[:, None] * inverse_frequencies(config)[None, :]
    return angle.cos().to(device), angle.sin().to(device)
