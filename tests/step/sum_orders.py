"""Print in which order the kernels of a decode pass add, in the batch-invariant mode; a script, not interpreted.

    python sum_orders.py PRESET ROWS[,ROWS...] [ARCH]

A line for each number of rows and each kernel that adds floats: rows, kernel, the instructions of its products with
how many of them there are, and how the numbers that a reduction adds lie in the registers. The width of an instruction,
which is that of the rows, is left out. Compiled for the H200 if no other compute capability is named; no GPU is needed.
"""

import re
import sys
from collections import Counter
from dataclasses import replace
from functools import partial

import torch
import triton
from compile_step import gpu_of, meta_model, recorded
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from tridecode.step import decode
from tridecode.step.graphs import launcher
from tridecode.step.model import choose_configs


def orders(arch, kernel, signature, constants, attributes, options, pdl) -> str:
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, signature, constants, attributes)
    options = options | ({"launch_pdl": True} if pdl else {})
    asm = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options).asm
    products = Counter(re.sub(r"n\d+k", "nk", name) for name in re.findall(r"w?gmma[\w.]+|mma\.sync[\w.]+", asm["ptx"]))
    if kernel.__name__ == "_matmul_kernel":  # its instructions take eight rows each; what counts is those of one row
        products = {name: count * 8 // constants["BLOCK_M"] for name, count in products.items()}
    layouts = dict(re.findall(r"(?m)^(#\w+) = (.*)$", asm["ttgir"]))
    reduced = re.findall(r"\}\) : \(tensor<[\dx]*f32, ([^>]*)>+\) ->", asm["ttgir"])
    if kernel.is_gluon():  # it takes tiles and some of the rows in turn; which columns are whose, its shape says
        products, reduced = dict.fromkeys(products, 1), dict.fromkeys(reduced)
    return f"{dict(products)} {[re.sub(r'#[a-z]+[0-9]*$', lambda m: layouts[m[0]], name) for name in reduced]}"


def main() -> None:
    preset, rows = sys.argv[1], map(int, sys.argv[2].split(","))
    arch = int(sys.argv[3]) if len(sys.argv) > 3 else 90
    model = meta_model(preset, torch.bfloat16, arch)
    configs = choose_configs(model.spec, model.weights, gpu_of(arch), batch_invariant=True)
    model = replace(model, configs_by_rows=configs)
    for count in rows:
        of_rows = model.of_rows(count)
        for launch in recorded(partial(decode.decode_pass, launcher(of_rows), of_rows, "greedy")).values():
            found = orders(arch, *launch)
            if found != "{} []":
                print(count, launch[0].__name__, found, flush=True)


if __name__ == "__main__":
    main()
