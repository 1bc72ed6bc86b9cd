"""Qwen2 with experts: layers have a mixture of experts with a shared expert instead of an MLP."""

from ..blocks.spec import ModelSpec
from .dense import parse_dense
from .experts import with_experts
from .reader import ConfigReader


def parse(read: ConfigReader) -> ModelSpec:
    """Return the specification that a config.json describes. Raises CheckpointError."""
    spec = parse_dense(read, "qwen2_moe", qkv_bias=read.flag("qkv_bias", default=True), windows="even")
    return with_experts(read, spec, shared=True)
