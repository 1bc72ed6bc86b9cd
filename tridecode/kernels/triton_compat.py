"""What Triton's versions spell differently, keep private, or lack. The names are those of 3.9."""

from dataclasses import dataclass

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from .common import interpreted

async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


@dataclass(frozen=True)
class Constants:
    """Compile-time values that the functions of a kernel take as one constexpr argument; subclasses add the fields.

    Only a `constexpr_function` may compute the values: Triton's cache key covers its source, but not that of a method.
    A NamedTuple does not serve here: assigning it to a variable turns its compile-time values into tensors.
    """

    def __post_init__(self):
        if not interpreted():
            for name, value in list(vars(self).items()):
                object.__setattr__(self, name, tl.constexpr(value))
