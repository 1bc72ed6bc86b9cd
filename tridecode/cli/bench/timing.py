"""Timers of the GPU. Every figure is the median of several runs, which follow WARM_UP runs that are not counted."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

WARM_UP = 2  # Number of runs before the measurement.


def gpu_seconds(work: Callable[[], object]) -> float:
    """Return the seconds that the GPU takes for the work that `work()` enqueues, measured by CUDA events.

    On a machine without a GPU, return the seconds that `work()` takes.
    """
    if not torch.cuda.is_available():
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def time_runs(
    work: Callable[[], object], runs: int, prepare: Callable[[], object] = lambda: None, passes: int = 1
) -> list[float]:
    """Return the seconds of the GPU for each call of `work()`, as one mean for each run.

    Args:
        work: enqueues work
        runs: number of timed runs
        prepare: called before each run, outside the timed region
        passes: number of calls in a run
    """

    def run() -> None:
        for _ in range(passes):
            work()

    times = []
    for _ in range(WARM_UP + runs):
        prepare()
        times.append(gpu_seconds(run) / passes)
    return times[WARM_UP:]


def captured(device: torch.device, work: Callable[[], object]) -> Callable[[], object]:
    """Capture what `work()` enqueues in one CUDA graph and return the function that replays it.

    Without a GPU, the returned function calls `work`.
    """
    if device.type != "cuda":
        return torch.inference_mode()(work)
    work()  # The first run loads the kernels.
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def spread(name: str, values: Sequence[float], scale: float = 1.0, short: str = "") -> dict[str, float]:
    """Return the median of `values` as the figure `name`, and the figures of the 5th and the 95th percentile.

    Args:
        name: name of the median
        values: one value for each run
        scale: factor from the values to the unit of the figures
        short: first part of the names of the percentiles, by default `name`
    """
    p5, p95 = (float(value) * scale for value in np.percentile(values, (5, 95)))
    return {name: median(values) * scale, f"{short or name}_p5": p5, f"{short or name}_p95": p95}
