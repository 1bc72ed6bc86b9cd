"""Compiling what several lists launch, many kernels at a time: a first start waits for the longest, not for the sum."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from .run import Recorder, Run

MOST = 16  # threads; each compiles in LLVM and ptxas, outside of Python


def compile_ahead(lists: Iterable[Callable[[Run], None]], run: Run, device: torch.device) -> int:
    """Launch every distinct line of `lists` that is a kernel of ours once, by `run`, from several threads. Nothing may
    run, so that what is launched writes nothing. Returns how many there are. Raises what compiling raises."""
    recorder = Recorder()
    for lines in lists:
        lines(recorder)
    distinct = {}
    for launch in recorder.launches:
        if launch.op.kernels:
            distinct.setdefault(launch.key(), launch)

    @torch.inference_mode()  # which is, as the device, each thread's own
    def first_launch(launch) -> None:
        with torch.cuda.device(device):
            torch.cuda.mem_get_info(device)  # gives the thread a context, without which no tensor map can be made
            run(launch.role, launch.op, *launch.args, **launch.how)

    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST)) as pool:
        list(pool.map(first_launch, distinct.values()))
    torch.cuda.synchronize(device)
    return len(distinct)
