"""List the kernels of passes that engines do not compile at load; a script, not interpreted.

It plans engines for absent GPUs, and lists all their decode passes, and prompt passes of many lengths. For each engine
it prints the number of kernels that are compiled at load, and the names of the kernels that are missing.
"""

from itertools import product

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tridecode.checkpoint.load import empty_weights
from tridecode.engine import model_of
from tridecode.kernels.device import GPUS, simulated
from tridecode.models.presets import PRESETS
from tridecode.options import EngineOptions
from tridecode.plan.resolve import resolve
from tridecode.step.compiler import OfflineDriver
from tridecode.step.compiling import kernels_of
from tridecode.step.dispatch import PromptDescriptor
from tridecode.step.graphs import decode_batches, decode_list, launcher
from tridecode.step.prompt_graphs import decoding_rows, finish_list, read_list
from tridecode.step.reachable import prompt_run, reachable_kernels
from tridecode.step.run import forked

META = torch.device("meta")
ENGINES = [
    ("h100", "qwen3-4b", {"slots": 16}),
    ("h200", "qwen3-4b", {"slots": 64, "quantize": "int4", "kv_dtype": "fp8"}),
    ("h100", "qwen3-0.6b", {"slots": 8, "batch_invariant": True}),
    ("rtx-4090", "qwen3-0.6b", {"slots": 4}),
    ("h200", "qwen3-0.6b", {"slots": 32, "adapter_memory": 1.0, "max_rank": 64}),
    ("h100", "qwen3-30b-a3b", {"slots": 16, "quantize": "int4"}),
    ("h200", "qwen3.6-35b-a3b", {"slots": 8}),
]


def main() -> None:
    for name, preset, options in ENGINES:
        gpu = GPUS[name]
        driver.set_active(OfflineDriver(GPUTarget("cuda", gpu.capability, 32)))
        with simulated(gpu):
            options = EngineOptions(max_seq_len=2048, dtype="bfloat16", **options)
            plan = resolve(options, PRESETS[preset], torch.device("cuda"))
            model = model_of(plan, empty_weights(plan.spec, META, plan.dtype, packs=True))
            graphs = plan.graphs
            compiled = set(reachable_kernels(model, graphs.sizes, graphs.prompt_attention))
            batches = decode_batches(model, graphs.sizes)
            steps = [decode_list(model, batch) for batch in batches]
            steps += [finish_list(model, batch) for batch in batches if batch.tokens == 1 and not model.fixed_chunk]
            lengths = sorted({*range(1, plan.chunk, 37), *graphs.prompt_sizes, plan.chunk})
            reads = [PromptDescriptor(*read) for read in product(lengths, decoding_rows(model), model.adapter_forms)]
            needed = kernels_of(steps, forked(model, launcher(model)), META)
            needed += kernels_of(
                [read_list(model, read) for read in reads], prompt_run(model, graphs.prompt_attention), META
            )
        print(name, preset, len(compiled), *sorted({kernel.fn.__name__ for kernel, _ in {*needed} - compiled}))


if __name__ == "__main__":
    main()
