"""Choice of the number of CPU threads, unless the user sets it."""

import ctypes
import os
import time
from collections.abc import Callable

import torch

from . import cgroup

TINY = 64 << 20  # Bytes of weights below which one thread is as fast as several.
PAUSE = 0.1  # Minimum seconds of a measurement, because CPU time has ticks of 10 ms.
DEFAULT = torch.get_num_threads()
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_last_set: int | None = None  # The number that `use` set last.


def _own_number() -> Callable[[int], int] | None:
    """Return the MKL function that returns the number that this thread set by torch.set_num_threads, else 0."""
    try:
        library = ctypes.CDLL("libtorch_cpu.so", os.RTLD_NOLOAD | os.RTLD_NOW)
        function: Callable[[int], int] = library.MKL_Set_Num_Threads_Local
        return function
    except (OSError, AttributeError):  # This build of torch has no MKL.
        return None


_set_local = _own_number()


class FreeCores:
    """A measurement of the CPU time that other programs leave. It begins when the object is created."""

    def __init__(self) -> None:
        self._began = _idle_seconds(), time.process_time(), time.monotonic()

    def count(self) -> int:
        """Return the number of cores, at least 1, that this process may use and that other programs leave idle."""
        allowed = int(min(len(os.sched_getaffinity(0)), DEFAULT, max(cgroup.cpus(), 1)))
        idle, own, began = self._began
        if allowed == 1 or idle is None:
            return allowed
        time.sleep(max(began + PAUSE - time.monotonic(), 0))
        elapsed = time.monotonic() - began
        left = ((_idle_seconds() or idle) - idle + time.process_time() - own) / elapsed
        return max(min(int(left + 0.25), allowed), 1)  # A quarter of a core is tolerated as noise.


def choose(weights: int, cores: FreeCores) -> int:
    """Return the number of threads for a model of `weights` bytes.

    Threads wait for each other after each operation. Therefore one busy core delays all of them. Operations of a tiny
    model are so short that several threads do not help.
    """
    return 1 if weights < TINY else cores.count()


def use(number: int | None) -> None:
    """Set the number of torch's threads, unless `number` is None or the user set a number."""
    global _last_set
    if number is None or chosen_by_user():
        return
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)
    _last_set = number


def chosen_by_user() -> bool:
    """Return whether the environment or torch.set_num_threads sets the number of threads."""
    if any(os.environ.get(name) for name in VARIABLES):
        return True
    number = torch.get_num_threads()  # This call also applies a number that another thread has set.
    if number == _last_set:
        return False
    if _set_local is None:
        return number != DEFAULT
    own = _set_local(0)
    _set_local(own)
    return own != 0


def _idle_seconds() -> float | None:
    """Return the total idle seconds since boot of the cores that this process may use. None if unknown."""
    own_cpus = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    try:
        with open("/proc/stat") as file:
            lines = [line.split() for line in file]
    except OSError:
        return None
    return sum(int(line[4]) + int(line[5]) for line in lines if line and line[0] in own_cpus) / os.sysconf("SC_CLK_TCK")
