"""Rings of stages in shared memory that TMA fills, for matmul_hopper, matmul_ring and expert_ring."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

PRODUCER_REGISTERS = gl.constexpr(24)  # Number of registers of a thread of the producer warp.


@gluon.jit
def barriers(STAGES: gl.constexpr):
    """Allocate a barrier for each stage, at which one thread arrives."""
    allocated = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(allocated.index(i), count=1)
    return allocated
