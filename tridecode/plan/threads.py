"""How many CPU threads a model's operations take, where the user has not said so."""

import ctypes
import os
import time
from collections.abc import Callable

import torch

from . import cgroup

TINY = 64 << 20  # bytes of weights; below, one thread is as fast as several
PAUSE = 0.1  # seconds that CPU time is watched at least: it is counted in ticks of 10 ms
DEFAULT = torch.get_num_threads()
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_given: int | None = None  # the number that `use` set last


def _own_number() -> Callable[[int], int] | None:
    """MKL's function that returns what torch.set_num_threads has said in this thread, 0 where it was not called."""
    try:
        found: Callable[[int], int] = ctypes.CDLL(
            "libtorch_cpu.so", os.RTLD_NOLOAD | os.RTLD_NOW
        ).MKL_Set_Num_Threads_Local
        return found
    except (OSError, AttributeError):  # a build without MKL
        return None


_set_local = _own_number()


class FreeCores:
    """Watches from its construction on how much of the cores' time other programs leave."""

    def __init__(self) -> None:
        self._began = _idle_seconds(), time.process_time(), time.monotonic()

    def count(self) -> int:
        """Cores that this process may use and that are free: idle, or busy with this process. At least 1."""
        allowed = int(min(len(os.sched_getaffinity(0)), DEFAULT, max(cgroup.cpus(), 1)))
        idle, own, began = self._began
        if allowed == 1 or idle is None:
            return allowed
        time.sleep(max(began + PAUSE - time.monotonic(), 0))
        elapsed = time.monotonic() - began
        left = ((_idle_seconds() or idle) - idle + time.process_time() - own) / elapsed
        return max(min(int(left + 0.25), allowed), 1)  # a quarter of a core goes to noise


def choose(weights: int, cores: FreeCores) -> int:
    """The number for a model of `weights` bytes.

    Threads wait for each other after each operation: where cores are busy, for the slowest. A tiny model's operations
    are so short that more than one thread gains nothing.
    """
    return 1 if weights < TINY else cores.count()


def use(number: int | None) -> None:
    """Give torch's operations `number` threads, unless it is None or the user has chosen a number."""
    global _given
    if number is None or chosen_by_user():
        return
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
    _given = number


def chosen_by_user() -> bool:
    """Whether the environment or torch.set_num_threads said how many threads to take."""
    if any(os.environ.get(name) for name in VARIABLES):
        return True
    number = torch.get_num_threads()  # makes this thread take over what another one has set
    if number == _given:
        return False
    if _set_local is None:
        return number != DEFAULT
    said = _set_local(0)
    _set_local(said)
    return said != 0


def _idle_seconds() -> float | None:
    """Seconds for which the cores that this process may use were idle, since the machine started."""
    mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    return sum(int(line[4]) + int(line[5]) for line in lines if line and line[0] in mine) / os.sysconf("SC_CLK_TCK")
