"""What a launch lacks, as compiling.missing tells it on a machine without a GPU; a script, not interpreted.

Prints the kernels that are missing, then what few_bits.specialized says of the same launch, and whether launches go
their way again.
"""

import sys
from pathlib import Path

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tridecode.step.compiling import missing

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import few_bits


def run(role, op, *args, **how) -> None:
    op.launch(*args, **how, pdl=True)


def main() -> None:
    driver.set_active(few_bits.NoGPU(GPUTarget("cuda", 90, 32)))
    case = few_bits.Case("int4", "o_proj", 256, 256, 1)
    linear = few_bits.random_linear(case.N, case.K, case.kind, "meta")
    line, _, _ = few_bits.product(case, "meta")
    shape = few_bits.in_use(linear, case.rows, False)
    found = missing(lambda: [line(run, linear, shape) for _ in range(2)])
    print(*(kernel.fn.__name__ for kernel, _ in found))
    print([few_bits.specialized(line, linear, shape, run)] == [text for _, text in found])
    print(missing(lambda: None) == [] and knobs.runtime.jit_cache_hook is None)


if __name__ == "__main__":
    main()
