"""Patches of Triton's interpreter for the tests. They halve its time, and let old versions behave like Triton 3.9.

They use private names. A version of Triton without these names is not patched, and the tests only take longer.
"""

import functools
from dataclasses import replace

import numpy as np


def quicken() -> None:
    """Patch the interpreter."""
    import triton
    from triton.runtime import interpreter

    # The interpreter checks each sum and product for overflow, although it reports overflows with `debug` only.
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "_get_np_dtype")
    if all(hasattr(interpreter, name) for name in names):
        _patch_once(interpreter)
        interpreter._get_np_dtype = _cached_types(interpreter._get_np_dtype)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        _behave_as_new(interpreter)


def _patch_once(interpreter) -> None:
    """Patch the language once for each module and launch.

    The interpreter patches it whenever one kernel function calls another.
    """
    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_lang(fn):
        if (module := fn.__globals__["__name__"]) in done:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        done.add(module)
        return scope

    @functools.wraps(launch)
    def call(*args, **kwargs):
        done.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call


def _cached_types(find):
    """Cache the function that maps Triton's types to numpy's, which builds a table at each call."""
    known = functools.cache(find)
    return lambda type: find(type) if type.scalar.is_ptr() else known(type.scalar)


def _behave_as_new(interpreter) -> None:
    """Give an interpreter before Triton 3.9 the minimum and maximum of 3.9, and tensors that can be indices."""
    # On a GPU, and in the interpreter since Triton 3.9, tl.minimum and tl.maximum of NaN and a number are the number.
    interpreter.InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        # numpy 2.5 does not convert an array of one element to an integer.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
