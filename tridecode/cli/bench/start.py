"""bench start: seconds from the start of a process to its first token, with an empty and a filled kernel cache.

The started process runs this module as a program: python -m tridecode.cli.bench.start PRESET T, where T is the value of
time.time() when it was started. It prints one JSON line on stdout, and logs the phases of its start on stderr.
"""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import triton

from ...errors import GenerationError
from ...plan.memory import free_memory
from .measure import GREEDY, need_gpu, preset_engine, run_facts
from .prefill import prompt_ids
from .rows import Row, column
from .timing import spread

ROOT = Path(__file__).parents[3]  # The folder that contains the package, in a checkout or in site-packages.
PROMPT_TOKENS = 16
CAPACITY = 4096


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
    device = need_gpu()
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
    command = [sys.executable, "-m", "tridecode.cli.bench.start", preset, str(time.time())]
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
    _, parts = sorted(later, key=lambda run: run[0])[(len(later) - 1) // 2]
    return {
        "first_start_s": first,
        "first_start_kernels_compiled": first_parts["kernels_compiled"],
        **spread("second_start_s", [seconds for seconds, _ in later]),
        **{name: value for name, value in parts.items() if name.endswith("_s")},
    }


# ---- the started process


def main(preset: str, started: float) -> None:
    """Build an engine of a preset, sample one token, and print the seconds of each phase as JSON.

    Args:
        preset: name of the model's shape.
        started: the time.time() at which the process was started.
    """
    imported, compiled = time.time(), []

    def report(*, metadata, cache_hit, **_) -> None:
        if not cache_hit:
            compiled.append(metadata["name"])
            log(f"compiled {metadata['name'].strip('_')} ({len(compiled)})", started)

    triton.knobs.compilation.listener = report
    logging.basicConfig(format="          %(message)s")
    logging.getLogger("tridecode").setLevel(logging.INFO)  # The engine logs the phases of its start.
    log(f"imported torch {torch.__version__}; making the weights and the step", started)
    engine = preset_engine(preset, CAPACITY)
    built = time.time()
    log("captured; waiting for the first token", started)
    chunks = engine.stream(prompt_ids(engine.config, PROMPT_TOKENS), replace(GREEDY, max_tokens=2, ignore_eos=True))
    token = next(chunks).token_id
    parts = {"import_s": imported - started, "build_s": built - imported, "prompt_s": time.time() - built}
    print(json.dumps({"token": token, "kernels_compiled": len(compiled)} | parts), flush=True)


def log(message: str, started: float) -> None:
    """Print a message on stderr with the seconds since `started`."""
    print(f"{time.time() - started:6.1f} s  {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
