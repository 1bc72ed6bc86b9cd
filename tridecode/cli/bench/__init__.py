"""`tridecode bench`: the engine against limits measured in the same run, and servers as their clients see them."""

from .measure import ALL_FILTERS, GREEDY, preset_engine, step_bytes, time_decode
from .run import run

__all__ = ["ALL_FILTERS", "GREEDY", "preset_engine", "run", "step_bytes", "time_decode"]
