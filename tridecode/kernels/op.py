"""Op: an operation of a pass in all its forms, so that one list of the pass serves whoever runs it."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """launch(*args, **how) launches the kernels; ref(*args) does the same in torch; bytes(*args): what a launch moves.

    how: the launch config, `pdl` and `followed`, where the launcher takes them. kernels: those it launches, in order
    (none: torch's own). outputs: the arguments that hold what an engine without a workspace would allocate.
    """

    launch: Callable
    ref: Callable
    bytes: Callable
    kernels: tuple = ()
    outputs: tuple[str, ...] = ()

    def output_tensors(self, args: tuple) -> dict:
        """Name -> tensor of the outputs among the arguments of a launch."""
        given = dict(zip(inspect.signature(self.launch).parameters, args))
        return {name: given[name] for name in self.outputs}
