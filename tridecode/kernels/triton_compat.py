"""Constants of kernels, and Gluon functions whose names depend on Triton's version, under the names of Triton 3.9."""

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

from .common import interpreted

async_load_pointers = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


class Constants:
    """Compile-time values as attributes. A kernel passes them to its functions in one constexpr argument.

    Only a `constexpr_function` may compute the values: Triton's cache key covers its source, but not that of a method.
    A NamedTuple does not work here: assigning it to a variable turns its compile-time values into tensors.
    """

    def __init__(self, **values):
        self._values = values
        vars(self).update(values if interpreted() else {name: tl.constexpr(value) for name, value in values.items()})

    def __repr__(self) -> str:
        return repr(self._values)

    def __eq__(self, other) -> bool:
        return isinstance(other, Constants) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))
