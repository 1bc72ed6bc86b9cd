"""`tridecode bench`: times of the engine next to measured hardware limits, and times of servers."""

from .measure import ALL_FILTERS, GREEDY, preset_engine, step_bytes, time_decode
from .run import run

__all__ = ["ALL_FILTERS", "GREEDY", "preset_engine", "run", "step_bytes", "time_decode"]
