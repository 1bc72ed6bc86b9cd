"""bench start: seconds from the start of a process to its first token, with an empty and a filled kernel cache."""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from ...errors import GenerationError
from ...plan.memory import free_memory
from .measure import median_p5_p95, need_gpu, run_facts
from .rows import Row, column

ROOT = Path(__file__).parents[3]  # The folder that contains the package, in a checkout or in site-packages.


@dataclass(kw_only=True)
class StartRow(Row):
    """The figures of process starts."""

    bench = "start"
    header = "start"
    runs: int
    first_start_s: float = column("first start, s", 1, kept=2, compared=True)
    second_start_s: float = column("later start, s", 1, kept=2, compared=True)
    second_start_s_p5: float = column(kept=2)
    second_start_s_p95: float = column(kept=2)
    import_s: float = column("import", 1, kept=2)
    build_s: float = column("build", 1, kept=2)
    prompt_s: float = column("prompt", 1, kept=2)
    first_start_kernels_compiled: int = column("kernels compiled at first")


def start(args, output) -> list[Row]:
    """Return one row: seconds of the first start, and of --runs later starts."""
    need_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    free_memory(device)  # The child process needs the memory that an earlier engine of this process used.
    with tempfile.TemporaryDirectory(prefix="tridecode-") as cache:
        output.note("first start, with an empty kernel cache:")
        first, first_parts = time_start(args.preset, cache)
        later = []
        for run in range(args.runs):
            output.note(f"start {run + 2}:")
            later.append(time_start(args.preset, cache))
    figures = start_figures(first, first_parts, later)
    return [StartRow(preset=args.preset, runs=args.runs, **figures, **run_facts(device))]


def time_start(preset: str, cache: str) -> tuple[float, dict]:
    """Return the seconds from the start of a process to its first token, and the JSON report of the process.

    Args:
        preset: name of the model shape
        cache: directory of Triton's kernel cache
    """
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, "-m", "tridecode.cli.bench.first_token", preset, str(time.time())]
    return time_to_first_line(command, environment)


def time_to_first_line(command: list[str], environment: dict) -> tuple[float, dict]:
    """Return the seconds until `command` writes its first line on stdout, and the JSON object in that line."""
    started = time.perf_counter()
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            seconds = time.perf_counter() - started
            process.wait()
        finally:
            # After an interrupt the process may still run. For a process that has ended this call has no effect.
            process.kill()
    if process.returncode or not line.strip():
        raise GenerationError(
            f"a process that the bench started ended with exit code {process.returncode} before its first token"
        )
    return seconds, json.loads(line)


def start_figures(first: float, first_parts: dict, later: list[tuple[float, dict]]) -> dict:
    """Return the figures of a row. The times of import, build and prompt come from the median later start."""
    median, p5, p95 = median_p5_p95([seconds for seconds, _ in later])
    _, parts = sorted(later, key=lambda run: run[0])[(len(later) - 1) // 2]
    return {
        "first_start_s": first,
        "first_start_kernels_compiled": first_parts["kernels_compiled"],
        "second_start_s": median,
        "second_start_s_p5": p5,
        "second_start_s_p95": p95,
        **{name: value for name, value in parts.items() if name.endswith("_s")},
    }
