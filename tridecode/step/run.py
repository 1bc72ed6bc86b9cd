"""Runners: what to do with each line of a pass's list, run(role, op, *arguments, **how)."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache

import torch

from ..kernels.op import Op
from .model import DecodeModel

Run = Callable[..., None]


def launch(role: str, op: Op, *args, **how) -> None:
    """Launch the kernels on the current stream: at once, or into the graph that is being captured."""
    op.launch(*args, **how)


def launch_dependent(role: str, op: Op, *args, **how) -> None:
    """Launch with programmatic dependent launch: a kernel starts while the one before it drains (sm_90 and above)."""
    op.launch(*args, pdl=True, **how)


def refer(role: str, op: Op, *args, **how) -> None:
    """Run the reference: the CPU backend, and the oracle of the tests."""
    op.ref(*args)


class Forked:
    """Runs the lines of one pass as `run` does, but those with the role "fetch" on the stream `side`, or `captured`
    within a capture: each begins when what stands before it in the list is done, and a line "fetched" waits for the one
    that filled its buffer.

    `plain` launches the fetches, and what follows a wait: a dependent launch needs its predecessor alone. Within a
    capture this makes a branch of the graph; every fetch is waited for, so the branch has joined when the list ends.
    """

    def __init__(self, run: Run, plain: Run, side: torch.cuda.Stream, captured: torch.cuda.Stream):
        self._run, self._plain, self._sides = run, plain, (side, captured)
        self._filled: dict[int, torch.cuda.Event] = {}  # by the address of a buffer
        self._joined = False

    def __call__(self, role: str, op: Op, *args, **how) -> None:
        if role == "fetch":
            side = self._sides[torch.cuda.is_current_stream_capturing()]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._plain(role, op, *args, **how)
                self._filled[args[-1].data_ptr()] = side.record_event()
        elif role == "fetched":
            if filled := self._filled.pop(args[0].data_ptr(), None):
                torch.cuda.current_stream().wait_event(filled)
                self._joined = True
        else:
            run, self._joined = self._plain if self._joined else self._run, False
            run(role, op, *args, **how)


def forked(model: DecodeModel, run: Run, attention: Op | None = None) -> Run:
    """`run` for one pass, `attention` in the place of its own: with pages or weights in host memory on two streams."""
    plain = replaced(launch if run is launch_dependent else run, attention)
    run = replaced(run, attention)
    if not model.hosted or model.device.type != "cuda":
        return run
    return Forked(run, plain, *fetch_streams(model.device))


def replaced(run: Run, attention: Op | None) -> Run:
    """`run`, with another operation in the place of attention."""
    if attention is None:
        return run

    def run_other(role: str, op: Op, *args, **how) -> None:
        if role == "attention":
            attention.launch(*args)  # which has no launch shape
        else:
            run(role, op, *args, **how)

    return run_other


@cache
def fetch_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The stream on which what lies in host memory comes, whichever pass wants it, and the one for captures: while one
    engine captures, others may run."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Allocating:
    """Runs as an engine without a workspace would: with an allocation for every output of every op.

    A tensor is held until the next one of its name, as a variable of such an engine holds it. The values themselves
    stay in the workspace, since kernels add to the residual stream in place: what is added is the allocation.
    """

    def __init__(self, run: Run):
        self._run, self._held = run, {}

    def __call__(self, role: str, op: Op, *args, **how) -> None:
        for name, tensor in op.output_tensors(args).items():
            self._held[role, name] = torch.empty_like(tensor)
        self._run(role, op, *args, **how)


@dataclass(frozen=True)
class Launch:
    """One line of a list: what a recorder keeps of it."""

    role: str
    op: Op
    args: tuple
    how: dict

    def __repr__(self) -> str:
        return f"Launch({self.role}, {', '.join(self.kernels())})"

    def bytes(self) -> int:
        """What the launch moves, given what its arguments hold now."""
        return self.op.bytes(*self.args)

    def key(self) -> tuple:
        """The same for launches that need the same compiled kernels."""
        return self.op.launch, tuple(map(_kind, self.args)), tuple(self.how.items())

    def kernels(self) -> list[str]:
        return [kernel.fn.__name__ for kernel in self.op.kernels]


def _kind(value):
    """What the compiler sees of an argument, and a little more."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if is_dataclass(value):
        return tuple(_kind(getattr(value, each.name)) for each in fields(value))
    return value


class Recorder:
    """Runs nothing; `launches` holds the lines in their order."""

    def __init__(self):
        self.launches: list[Launch] = []

    def __call__(self, role: str, op: Op, *args, **how) -> None:
        self.launches.append(Launch(role, op, args, how))
