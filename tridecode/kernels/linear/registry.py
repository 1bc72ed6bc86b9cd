"""The list of all linear kernels, in the order of preference."""

from .matmul import MATMUL
from .matmul_groups import GROUPS
from .matmul_hopper import HOPPER
from .matmul_ring import RING
from .matmul_tiles import TILES
from .matmul_wide import WIDE
from .matvec import MATVEC
from .project import LinearKernel
from .torch_linear import TORCH

LINEAR_KERNELS = (RING, GROUPS, MATVEC, HOPPER, MATMUL, WIDE, TILES, TORCH)


def kernel_named(name: str) -> LinearKernel:
    """Return the kernel with this name.

    Raises:
        KeyError: no kernel has this name.
    """
    return {kernel.name: kernel for kernel in LINEAR_KERNELS}[name]
