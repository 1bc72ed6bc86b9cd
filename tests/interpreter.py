"""What Triton's interpreter does for nothing is left out: half of its time. Values and checks stay as they are.

Its names are private. Where a version of Triton has others, nothing is changed, and the tests only take longer.
"""

import functools
from dataclasses import replace


def quicken() -> None:
    from triton.runtime import interpreter

    # What an overflow would be is computed for each sum and product, and asserted with `debug` only.
    builder = interpreter.interpreter_builder
    if hasattr(builder.options, "sanitize_overflow") and not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)
    names = ("_patch_lang", "_LangPatchScope", "GridExecutor", "_get_np_dtype")
    if all(hasattr(interpreter, name) for name in names):
        _patch_once(interpreter)
        interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)


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
