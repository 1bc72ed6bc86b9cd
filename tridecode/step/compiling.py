"""Compiling what several lists launch, many kernels at a time: a first start waits for the longest, not for the sum."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from triton import JITFunction, knobs

from .run import Recorder, Run

MOST = 16  # threads; each compiles in LLVM and ptxas, outside of Python
_hooking = threading.Lock()  # the hook is the whole process's: who sets it puts back what was there


def threads() -> int:
    """Kernels that are compiled at a time."""
    return min(os.cpu_count() or 1, MOST)


def compile_ahead(lists: Iterable[Callable[[Run], None]], run: Run, device: torch.device) -> int:
    """Compile what every distinct line of `lists` that is a kernel of ours needs, from several threads. Lines whose
    kernels are there already are launched by `run`: nothing may run, so that they write nothing. Returns how many were
    compiled. Raises what compiling raises.

    Threads only compile: Triton's loading of what was compiled, at its first launch, is for one thread at a time.
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
        with torch.cuda.device(device):  # which is each thread's own
            function.preload(specialization)

    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(compile_one, wanted))
    return len(wanted)


def missing(launches: Callable[[], None]) -> list[tuple[JITFunction, str]]:
    """What Triton would have to compile for these launches: kernels, each with what its `preload` takes. Launches that
    lack their kernel are not made."""
    found, me = {}, threading.get_ident()

    def note(*, key, fn, compile, **_) -> bool:
        if threading.get_ident() == me:  # another thread's launch, of another engine, goes its way
            found[fn.jit_function, key] = compile["specialization_data"]
        return threading.get_ident() == me  # True means: neither compile nor launch it

    with _hooking, knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launches()
    return [(function, specialization) for (function, _), specialization in found.items()]
