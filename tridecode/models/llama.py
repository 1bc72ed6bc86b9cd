"""Llama."""

from ..blocks.spec import ModelSpec
from .dense import parse_dense
from .reader import ConfigReader


def parse(read: ConfigReader) -> ModelSpec:
    """Return the specification that a config.json describes. Raises CheckpointError."""
    return parse_dense(read, "llama")
