"""Compile some kernels in child processes on a machine without a GPU; a script, not interpreted.

    python compile_children.py [BROKEN]

Prints the number of kernels that Triton's cache lacked, the number compiled in this process, the reported progress, and
the number compiled by a second call. With BROKEN, the children end at once.
"""

import sys

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tridecode.checkpoint.load import empty_weights
from tridecode.engine import model_of
from tridecode.kernels.device import GPUS, simulated
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan.resolve import resolve
from tridecode.step import compiling
from tridecode.step.compiler import OfflineDriver
from tridecode.step.dispatch import BatchDescriptor
from tridecode.step.graphs import decode_list, launcher

META = torch.device("meta")


def main() -> None:
    if len(sys.argv) > 1:
        sys.executable = "/bin/false"
    gpu = GPUS["h100"]
    driver.set_active(OfflineDriver(GPUTarget("cuda", gpu.capability, 32)))
    with simulated(gpu):
        options = EngineOptions(max_seq_len=512, dtype="bfloat16", speculate="off")
        plan = resolve(options, PRESETS["qwen3-0.6b"], torch.device("cuda"))
        model = model_of(plan, empty_weights(plan.spec, META, plan.dtype))
        kernels = compiling.kernels_of([decode_list(model, BatchDescriptor("greedy", 1))], launcher(model), META)
    here: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: here.append(cache_hit)
    progress: list[tuple[int, int]] = []
    kernels = kernels[: compiling.MAX_IN_PROCESS + 2]
    print(compiling.compile_kernels(kernels, META, lambda *done: progress.append(done)), "of", len(kernels))
    print(here.count(False), "here")
    print(*sorted(progress))
    print(compiling.compile_kernels(kernels, META), "again")


if __name__ == "__main__":
    main()
