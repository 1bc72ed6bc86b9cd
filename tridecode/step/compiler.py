"""A child process that compiles kernels into Triton's cache. Arguments: backend, architecture, threads per warp.

It never creates a CUDA context, which would take half a gigabyte of the GPU. It reads requests from stdin and answers
each with one line of stdout, in JSON; compiling.py writes and reads them.
"""

import json
import sys
from contextlib import suppress
from importlib import import_module

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.driver import driver

from ..errors import brief


class OfflineDriver:
    """A Triton driver that compiles for a GPU that may be absent. It cannot launch kernels."""

    def __init__(self, target: GPUTarget):
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """Return the GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Return device 0."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return stream 0."""
        return 0


def build_launcher(compiled) -> None:
    """Build the C code with which Triton 3.6 launches a kernel, in Triton's cache. Newer versions do not need it."""
    # If the driver's library is absent, the process that launches the kernel builds the launcher.
    with suppress(Exception):
        CudaLauncher(compiled.src, compiled.metadata)


def main() -> None:
    """Compile the kernels that stdin requests, and answer each request on stdout."""
    backend, arch, warp_size = sys.argv[1:]
    driver.set_active(OfflineDriver(GPUTarget(backend, int(arch), int(warp_size))))
    for line in sys.stdin:
        module, name, specialization = json.loads(line)
        try:
            build_launcher(getattr(import_module(module), name).preload(specialization))
        except Exception as error:  # The parent process compiles the kernel again and reports the error.
            print(json.dumps({"error": brief(error)}), flush=True)
        else:
            print(json.dumps({"error": None}), flush=True)


if __name__ == "__main__":
    main()
