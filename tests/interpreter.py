"""Changes of Triton's interpreter for the tests: half of its time is saved, and old versions behave as Triton 3.9.

They use private names. A version of Triton without these names remains unchanged, and the tests only take longer.
"""

import functools
from dataclasses import replace

import numpy as np


def quicken() -> None:
    import triton
    from triton.runtime import interpreter

    # What an overflow would be is computed for each sum and product, and asserted with `debug` only.
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "_get_np_dtype")
    if all(hasattr(interpreter, name) for name in names):
        _patch_once(interpreter)
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):
        _behave_as_new(interpreter)


def _patch_once(interpreter) -> None:
    """The language is patched anew at each call of one kernel function by another; once a module and launch will do."""
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


def _remembered(find):
    """numpy's type of Triton's, which makes a table of all of them at each question."""
    known = functools.cache(find)
    return lambda type: find(type) if type.scalar.is_ptr() else known(type.scalar)


def _behave_as_new(interpreter) -> None:
    """Give an interpreter that is older than Triton 3.9 its minimum and maximum, and its tensors as indices."""
    # On a GPU, and since Triton 3.9 here, tl.minimum and tl.maximum of NaN and a number are the number.
    interpreter.InterpreterBuilder.create_minnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmin)
    interpreter.InterpreterBuilder.create_maxnumf = lambda self, lhs, rhs: self.binary_op(lhs, rhs, np.fmax)
    patch = interpreter._patch_lang_tensor

    def patch_tensor(tensor, scope):
        patch(tensor, scope)
        # numpy 2.5 does not convert an array of one element to an integer.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor
