"""Compiling what several lists launch, many kernels at a time: a first start waits for the longest, not for the sum."""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch
from triton import knobs

from .run import Recorder, Run

MOST = 16  # threads; each compiles in LLVM and ptxas, outside of Python
_hooking = threading.Lock()  # the hook is the whole process's: who sets it puts back what was there


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
    missing, me = {}, threading.get_ident()

    def note(*, key, fn, compile, **_) -> bool:
        if threading.get_ident() == me:  # another thread's launch, of another engine, goes its way
            missing[fn.jit_function, key] = compile["specialization_data"]
        return threading.get_ident() == me  # True means: neither compile nor launch it

    with _hooking, torch.cuda.device(device), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        for launch in distinct.values():
            run(launch.role, launch.op, *launch.args, **launch.how)

    def compile_one(entry) -> None:
        (function, _), specialization = entry
        with torch.cuda.device(device):  # which is each thread's own
            function.preload(specialization)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST)) as pool:
        list(pool.map(compile_one, missing.items()))
    return len(missing)
