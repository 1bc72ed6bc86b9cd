"""Names of Triton that are private or that differ between the supported versions, 3.9's first."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
view = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
