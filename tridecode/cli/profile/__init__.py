"""`tridecode profile`: one decode step and one prefill chunk, from the GPU's own activity records."""

from .command import run

__all__ = ["run"]
