"""`tridecode bench`: decode, prefill, stream, start and peers, each against a limit measured in the same run."""

from .measure import ALL_FILTERS, GREEDY, preset_engine, step_bytes, time_decode
from .run import run

__all__ = ["ALL_FILTERS", "GREEDY", "preset_engine", "run", "step_bytes", "time_decode"]
