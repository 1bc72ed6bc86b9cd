"""bench start: a process from nothing to its first token, with an empty kernel cache and with a filled one."""

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
from .measure import need_gpu, run_facts, spread
from .rows import Row, column

ROOT = Path(__file__).parents[3]  # what holds the package, installed or not


@dataclass(kw_only=True)
class StartRow(Row):
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
    """One row: seconds of the first start, and of --runs starts after it."""
    need_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    free_memory(device)  # the child needs what an engine before this one held
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
    """Seconds from before a process is started to its first token, with Triton's cache in directory `cache`."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"TRITON_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, "-m", "tridecode.cli.bench.first_token", preset, str(time.time())]
    return time_to_first_line(command, environment)


def time_to_first_line(command: list[str], environment: dict) -> tuple[float, dict]:
    """Seconds until `command` writes its first line on stdout, and the JSON object that the line is."""
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
            process.kill()  # after an interrupt; nothing happens to one that has ended
    if process.returncode or not line.strip():
        raise GenerationError(f"a started process ended with exit code {process.returncode} before its first token")
    return seconds, json.loads(line)


def start_figures(first: float, first_parts: dict, later: list[tuple[float, dict]]) -> dict:
    """Seconds; the parts (import, build, prompt) are those of the median later start."""
    median, p5, p95 = spread([seconds for seconds, _ in later])
    _, parts = sorted(later, key=lambda run: run[0])[(len(later) - 1) // 2]
    return {
        "first_start_s": first,
        "first_start_kernels_compiled": first_parts["kernels_compiled"],
        "second_start_s": median,
        "second_start_s_p5": p5,
        "second_start_s_p95": p95,
        **{name: value for name, value in parts.items() if name.endswith("_s")},
    }
