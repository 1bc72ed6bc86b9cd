"""Compilation of the kernels of several lists in parallel: a first start waits for the slowest one, not for the sum."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from triton import JITFunction, knobs

from .run import Lines, Recorder, Run

MOST = 16  # threads; each compiles in LLVM and ptxas, outside of Python
_hooking = threading.Lock()  # the hook is global to the process, so its user restores the previous one


def threads() -> int:
    """Return the number of kernels that are compiled in parallel."""
    return min(os.cpu_count() or 1, MOST)


def compile_ahead(lists: Iterable[Lines], run: Run, device: torch.device) -> int:
    """Compile the kernels that the lines of `lists` need, in several threads. Return the number of compiled kernels.

    `run` launches the lines whose kernels exist already. Therefore no row may have the status RUN: such launches write
    nothing.
    The threads only compile. Triton loads a compiled kernel at its first launch, and only one thread at a time may.

    Raises:
        Exception: any error of Triton's compiler.
    """
    recorder = Recorder()
    for lines in lists:
        lines(recorder)
    distinct = {launch.key(): launch for launch in recorder.launches if launch.op.kernels}

    def launches() -> None:
        for launch in distinct.values():
            run(launch.role, launch.op, *launch.args, **launch.how)

    with torch.cuda.device(device):
        wanted = missing(launches)

    def compile_one(entry: tuple[JITFunction, str]) -> None:
        function, specialization = entry
        with torch.cuda.device(device):  # every thread has its own current device
            function.preload(specialization)

    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(compile_one, wanted))
    return len(wanted)


def missing(launches: Callable[[], None]) -> list[tuple[JITFunction, str]]:
    """Return the kernels that these launches lack, each with the argument of its `preload`.

    Launches that lack their kernel are skipped; all others run.
    """
    found, me = {}, threading.get_ident()

    def note(*, key, fn, compile, **_) -> bool:
        if threading.get_ident() == me:  # launches of other threads, of other engines, are not affected
            found[fn.jit_function, key] = compile["specialization_data"]
        return threading.get_ident() == me  # True: neither compile nor launch

    with _hooking, knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launches()
    return [(function, specialization) for (function, _), specialization in found.items()]
