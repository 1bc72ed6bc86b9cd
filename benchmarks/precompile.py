"""Compile the kernels of benchmark suites into a Triton cache, on a machine without a GPU.

    TRITON_CACHE_DIR=/tmp/cache python -m benchmarks.precompile targets batch prompts
    TRITON_CACHE_DIR=/tmp/cache python -m benchmarks.precompile qwen3-4b,4096,1 qwen3-4b,1024,64,40960,int4 --count

An argument is the name of a suite, whose engines it compiles for, or an engine: preset, positions of a
request, slots, positions of all, and the scheme of `--quantize`. With --count it only prints the number of kernels. The
cache goes to the other machine with its path unchanged, and needs *.json and *.cubin only.

Triton finds a kernel by a key that holds a hash of its own files: the version must be the one that runs there. Where
the Python there is another one than here, its wheel of that version, unpacked, is named by --triton.
"""

import argparse
import inspect
import multiprocessing
import os

import torch
import triton.runtime.cache
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from benchmarks.suite import SUITES, lines_of, parse
from tridecode.cli.bench.batch import cases_of, room_of
from tridecode.cli.bench.decode import capacity_of
from tridecode.cli.precompile import planned_kernels
from tridecode.errors import counted
from tridecode.kernels.device import GPUS, simulated
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan.resolve import resolve
from tridecode.step.compiler import OfflineDriver

FOUND: list = []  # filled before the processes fork


def engines_of(suite: str) -> list[tuple]:
    """(preset, positions of a request, slots, positions of all or None, quantize) of each row that has an engine."""
    found = []
    for args, _ in map(parse, lines_of(suite)):
        quantize = getattr(args, "quantize", None)
        if args.what == "batch":
            room = [[room_of(context, args.steps) for context in contexts] for _, contexts in cases_of(args)]
            found.append((args.preset, max(map(max, room)), max(map(len, room)), max(map(sum, room)), quantize))
        elif args.what in ("decode", "stream"):
            found.append((args.preset, capacity_of(args), 1, None, quantize))
        elif args.what == "prefill":
            found.append((args.preset, args.capacity or args.cached + max(args.prompt_tokens) + 1, 1, None, quantize))
    return found


def engine_of(words: str) -> tuple:
    preset, *numbers = words.split(",")
    quantize = numbers.pop() if numbers and not numbers[-1].isdecimal() else None
    capacity, slots, kv_tokens = [*map(int, numbers), None][:3]
    return preset, capacity, slots, kv_tokens, quantize


def kernels_of(preset: str, capacity: int, slots: int, kv_tokens: int | None, quantize: str | None) -> list:
    """Return the kernels that such an engine compiles at load."""
    options = EngineOptions(
        max_seq_len=capacity, slots=slots, kv_tokens=kv_tokens, quantize=quantize, dtype="bfloat16", speculate="off"
    )
    return planned_kernels(resolve(options, PRESETS[preset], torch.device("cuda")))


def compile_one(index: int) -> None:
    function, specialization = FOUND[index]
    function.preload(specialization)


def as_triton_of(folder: str) -> None:
    """Keys as the Triton in this folder makes them."""
    key = inspect.unwrap(triton.runtime.cache.triton_key)
    names = key.__globals__
    here, names["__file__"] = names["__file__"], os.path.join(folder, "triton/runtime/cache.py")  # beside what it reads
    there = key()
    names["__file__"], names["triton_key"] = here, lambda: there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", nargs="+", metavar="SUITE|ENGINE")
    parser.add_argument("--triton", metavar="DIR")
    parser.add_argument("--gpu", default="h200", choices=GPUS)
    parser.add_argument("--count", action="store_true")
    args = parser.parse_args()
    gpu = GPUS[args.gpu]
    driver.set_active(OfflineDriver(GPUTarget("cuda", gpu.capability, 32)))
    if args.triton:
        as_triton_of(args.triton)
    wanted = [engines_of(words) if words in SUITES else [engine_of(words)] for words in args.engines]
    engines = dict.fromkeys(engine for each in wanted for engine in each)
    with simulated(gpu):
        FOUND.extend(dict.fromkeys(kernel for engine in engines for kernel in kernels_of(*engine)))
    print(f"{counted(len(FOUND), 'kernel')} of {counted(len(engines), 'engine')}", flush=True)
    if not args.count:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            pool.map(compile_one, range(len(FOUND)), chunksize=1)


if __name__ == "__main__":
    main()
