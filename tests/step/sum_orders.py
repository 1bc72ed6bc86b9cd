"""Print the order in which the kernels of a decode pass add in batch-invariant mode; a script, not interpreted.

    python sum_orders.py MODEL ROWS[,ROWS...] [GPU]

Prints a line for each number of rows and each kernel that adds floats: rows, kernel, the instructions of its products
with their numbers, and the layouts of the tensors that reductions add. The width of an instruction, which is the number
of rows, is omitted. MODEL and GPU (default h100) are names as for compile_step.py. No GPU is needed.
"""

import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

from compile_step import GPUS, Launch, meta_model, recorded

from tridecode.step import decode
from tridecode.step.graphs import launcher
from tridecode.step.model import choose_configs


def orders(capability: int, launch: Launch) -> str:
    kernel, asm = launch.kernel, launch.compile(capability).asm
    products = Counter(re.sub(r"n\d+k", "nk", name) for name in re.findall(r"w?gmma[\w.]+|mma\.sync[\w.]+", asm["ptx"]))
    # One instruction multiplies eight rows. Divide by the number of instructions of BLOCK_M rows.
    if kernel.__name__ == "_matmul_kernel":
        products = {name: count * 8 // launch.constants["BLOCK_M"] for name, count in products.items()}
    layouts = dict(re.findall(r"(?m)^(#\w+) = (.*)$", asm["ttgir"]))
    reduced = re.findall(r"\}\) : \(tensor<[\dx]*f32, ([^>]*)>+\) ->", asm["ttgir"])
    # Loops over tiles and rows repeat these instructions. The launch config determines the order of sums.
    if kernel.is_gluon():
        products, reduced = dict.fromkeys(products, 1), dict.fromkeys(reduced)
    return f"{dict(products)} {[re.sub(r'#[a-z]+[0-9]*$', lambda m: layouts[m[0]], name) for name in reduced]}"


def main() -> None:
    name, rows = sys.argv[1], map(int, sys.argv[2].split(","))
    gpu = GPUS[sys.argv[3] if len(sys.argv) > 3 else "h100"]
    model = meta_model(name, gpu)
    configs = choose_configs(model.spec, model.weights, gpu, batch_invariant=True)
    model = replace(model, configs_by_rows=configs)
    for count in rows:
        for_rows = model.for_rows(count)
        for launch in recorded(partial(decode.decode_pass, launcher(for_rows), for_rows, "greedy")).values():
            found = orders(gpu.capability, launch)
            if found != "{} []":
                print(count, launch.kernel.__name__, found, flush=True)


if __name__ == "__main__":
    main()
