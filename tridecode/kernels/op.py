"""Op: an operation of a pass in all its forms. A runner can execute the list of a pass in any of them."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Op:
    """One operation: its launcher, its reference and its cost.

    Attributes:
        launch: launch(*args, **options) launches kernels. The options are the launch config, `pdl` and `followed`, if
            the launcher takes them.
        ref: ref(*args) computes the same in torch.
        bytes: bytes(*args) returns the bytes that a launch moves.
        kernels: Kernels in order. A launch runs at least one of them. Empty if torch launches its own.
        outputs: Names of the output arguments that an engine without a workspace would allocate. A dotted name is a
            field of an argument. It counts only if the argument has all fields that `outputs` lists for it. For
            example, `sumsq` is an output of AddResidual, which also has `normed`, and an input of Normed.
    """

    launch: Callable
    ref: Callable
    bytes: Callable
    kernels: tuple = ()
    outputs: tuple[str, ...] = ()

    def output_tensors(self, args: tuple) -> dict[str, torch.Tensor]:
        """Return the output tensors among the arguments of a launch, by name."""
        passed = dict(zip(inspect.signature(self.launch).parameters, args))
        tensors = {name: passed[name] for name in self.outputs if "." not in name}
        dotted = [name.split(".") for name in self.outputs if "." in name]
        for argument, field in dotted:
            if all(hasattr(passed[argument], other) for name, other in dotted if name == argument):
                tensors[f"{argument}.{field}"] = getattr(passed[argument], field)
        return tensors
