"""Program that `bench start` runs: build an engine and sample one token, then print one JSON line on stdout.

Usage: python -m tridecode.cli.bench.first_token PRESET T, where T is the value of time.time() when the process was
started. The program logs the phases of its start on stderr.
"""

import json
import logging
import sys
import time
from dataclasses import replace

import torch
import triton

from .measure import GREEDY, preset_engine
from .prefill import prompt_ids

PROMPT_TOKENS = 16
CAPACITY = 4096


def main(preset: str, started: float) -> None:
    """Measure one start of an engine of a preset, and print the seconds of each phase as JSON.

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
