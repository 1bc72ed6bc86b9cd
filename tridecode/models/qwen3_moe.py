"""Qwen3 with experts: layers have a mixture of experts instead of an MLP."""

from ..blocks.spec import ModelSpec
from .dense import parse_dense
from .experts import with_experts
from .reader import ConfigReader


def parse(read: ConfigReader) -> ModelSpec:
    """Return the specification that a config.json describes. Raises CheckpointError."""
    spec = parse_dense(read, "qwen3_moe", qk_norm=True, windows="used")
    return with_experts(read, spec, shared=False)
