"""Compile the kernels of benchmark suites into a Triton cache, on a machine without a GPU.

    TRITON_CACHE_DIR=/tmp/cache python -m benchmarks.precompile targets batch prompts
    TRITON_CACHE_DIR=/tmp/cache python -m benchmarks.precompile qwen3-4b,4096,1 qwen3-4b,1024,64,40960,int4 --count

An argument is the name of a suite, whose engines it compiles for, or an engine: preset, positions of a request, slots,
positions of all requests, and the scheme of `--quantize` or the type of `--gguf`. With --count the script only prints
the number of kernels.
Copy the cache to the other machine under the same path; only *.json and *.cubin are needed.

The key of a kernel in the cache contains a hash of Triton's own files, so both machines must have the same version of
Triton. If their Python versions differ, unpack the other machine's wheel of Triton and name the folder by --triton.
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
from tridecode.cli.bench.batch import adapters_of, sizes_of
from tridecode.cli.bench.decode import capacity_of
from tridecode.cli.bench.measure import preset_plan
from tridecode.cli.precompile import planned_kernels
from tridecode.errors import counted
from tridecode.kernels.device import GPUS, simulated
from tridecode.models.presets import GGUF_TYPES
from tridecode.step.compiler import OfflineDriver

KERNELS: list = []  # The list is filled before the processes are forked.


def engines_of(suite: str) -> list[tuple]:
    """Return the engine of each row of a suite that has one.

    An engine is (preset, positions of a request, slots, positions of all requests or None, quantize or gguf), and with
    adapters also their number and rank.
    """
    engines = []
    for args, _ in map(parse, lines_of(suite)):
        quantize = getattr(args, "gguf", None) or getattr(args, "quantize", None)
        if args.what == "batch":
            engines.append((args.preset, *sizes_of(args), quantize, *adapters_of(args).values()))
        elif args.what in ("decode", "stream"):
            engines.append((args.preset, capacity_of(args), 1, None, quantize))
        elif args.what == "prefill":
            engines.append((args.preset, args.capacity or args.cached + max(args.prompt_tokens) + 1, 1, None, quantize))
    return engines


def engine_of(words: str) -> tuple:
    preset, *numbers = words.split(",")
    quantize = numbers.pop() if numbers and not numbers[-1].isdecimal() else None
    capacity, slots, kv_tokens = [*map(int, numbers), None][:3]
    return preset, capacity, slots, kv_tokens, quantize


def kernels_of(
    preset: str, capacity: int, slots: int, kv_tokens: int | None, quantize: str | None, *adapters: int
) -> list:
    """Return the kernels that an engine compiles at load.

    Args:
        quantize: also a type of `--gguf`
        adapters: number and rank of the adapters
    """
    gguf, quantize = (quantize, None) if quantize in GGUF_TYPES else (None, quantize)
    options = {"max_seq_len": capacity, "slots": slots, "kv_tokens": kv_tokens, "quantize": quantize}
    return planned_kernels(preset_plan(preset, torch.device("cuda"), gguf, *adapters, **options))


def compile_one(index: int) -> None:
    function, specialization = KERNELS[index]
    function.preload(specialization)


def as_triton_of(folder: str) -> None:
    """Make Triton compute cache keys as the Triton in `folder` does."""
    key = inspect.unwrap(triton.runtime.cache.triton_key)
    names = key.__globals__
    here, names["__file__"] = (
        names["__file__"],
        os.path.join(folder, "triton/runtime/cache.py"),
    )  # The hash covers the files next to this path.
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
    named = [engines_of(words) if words in SUITES else [engine_of(words)] for words in args.engines]
    engines = dict.fromkeys(engine for each in named for engine in each)
    with simulated(gpu):
        KERNELS.extend(dict.fromkeys(kernel for engine in engines for kernel in kernels_of(*engine)))
    print(f"{counted(len(KERNELS), 'kernel')} of {counted(len(engines), 'engine')}", flush=True)
    if not args.count:
        with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
            pool.map(compile_one, range(len(KERNELS)), chunksize=1)


if __name__ == "__main__":
    main()
