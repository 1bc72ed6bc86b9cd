"""Qwen3-Next: the layers of Qwen3.5 with experts. The input projections store the rows of each head of K together."""

from ..blocks.spec import ModelSpec
from .experts import with_experts
from .qwen3_5 import parse_hybrid
from .reader import ConfigReader


def parse(read: ConfigReader) -> ModelSpec:
    """Return the specification that a config.json describes. Raises CheckpointError."""
    split = read.flag("linear_qkvz_split")  # No config.json has this key; gguf_config.py sets it.
    spec = parse_hybrid(read, "qwen3_next", grouped_qkvz=not split, grouped_ba=True)
    return with_experts(read, spec, shared=True)
