"""List what a launch would compile, as compiling.missing does it on a machine without a GPU; a script, not interpreted.

Prints the kernels that two equal launches lack, and whether launches run as usual afterwards.
"""

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from tridecode import layout
from tridecode.kernels.linear.matmul import MATMUL, MatmulConfig
from tridecode.kernels.linear.project import AddResidual
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.step.compiler import OfflineDriver
from tridecode.step.compiling import missing


def main() -> None:
    driver.set_active(OfflineDriver(GPUTarget("cuda", 90, 32)))
    meta = torch.empty(1, layout.META_WIDTH, dtype=torch.int32, device="meta")
    linear = LoadedLinear(torch.empty(256, 256, dtype=torch.bfloat16, device="meta"))
    x, norm, normed, out, sumsq = (
        torch.empty(*shape, dtype=dtype, device="meta")
        for shape, dtype in [((1, 256), torch.bfloat16), ((256,), torch.bfloat16), ((1, 256), torch.bfloat16),
                             ((1, 256), torch.float32), ((1, 256), torch.float32)]
    )  # fmt: skip

    def launch() -> None:
        MATMUL.op.launch(meta, x, linear, out, AddResidual(norm, normed, sumsq), config=MatmulConfig(), pdl=True)

    found = missing(lambda: [launch() for _ in range(2)])
    print(*(kernel.fn.__name__ for kernel, _ in found))
    print(missing(lambda: None) == [] and knobs.runtime.jit_cache_hook is None)


if __name__ == "__main__":
    main()
