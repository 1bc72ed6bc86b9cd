"""Op: an operation of a pass in all its forms, so that every runner can execute the list of the pass."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Op:
    """launch(*args, **how) launches kernels; ref(*args) computes the same in torch; bytes(*args): what a launch moves.

    how: the launch config, `pdl` and `followed`, if the launcher takes them. kernels: those that it launches, in order;
    empty if torch launches its own. outputs: the arguments that an engine without a workspace would allocate. A dotted
    name is a field of an argument. It counts if the argument has all the fields that `outputs` names of it: `sumsq` is
    an output of AddResidual, which has `normed` too, and an input of Normed.
    """

    launch: Callable
    ref: Callable
    bytes: Callable
    kernels: tuple = ()
    outputs: tuple[str, ...] = ()

    def output_tensors(self, args: tuple) -> dict[str, torch.Tensor]:
        """Return the outputs among the arguments of a launch, by name."""
        passed = dict(zip(inspect.signature(self.launch).parameters, args))
        tensors = {name: passed[name] for name in self.outputs if "." not in name}
        dotted = [name.split(".") for name in self.outputs if "." in name]
        for argument, field in dotted:
            if all(hasattr(passed[argument], other) for name, other in dotted if name == argument):
                tensors[f"{argument}.{field}"] = getattr(passed[argument], field)
        return tensors
