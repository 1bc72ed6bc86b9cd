"""Line runners.

A list calls run(role, op, *args, **options) for each of its lines, and the runner executes, captures or records it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache

import torch

from ..blocks.block import Run
from ..kernels.op import Op
from .model import DecodeModel

Lines = Callable[[Run], None]  # A list of launches. It calls its argument for each launch in order.


def launch(role: str, op: Op, *args, **options) -> None:
    """Launch the kernels on the current stream, which executes or captures them."""
    op.launch(*args, **options)


def launch_dependent(role: str, op: Op, *args, **options) -> None:
    """Launch with programmatic dependent launch (sm_90 and later): a kernel starts before its predecessor has ended."""
    op.launch(*args, pdl=True, **options)


def run_reference(role: str, op: Op, *args, **options) -> None:
    """Run the reference, for the CPU backend and as the expected result of tests."""
    op.ref(*args)


class Forked:
    """Runs one pass on two streams: lines with the role "fetch" on a side stream, all others on the current one.

    A fetch starts when the lines before it have finished. A line "fetched" waits for the fetch that fills its buffer.
    In a capture this makes a branch of the graph. The list waits for every fetch, so the branch has joined at its end.

    Args:
        run: runs the lines of the current stream.
        plain: the runner without dependent launch. It runs fetches and the first line after a wait, because a dependent
            launch waits only for the kernel before it on its own stream.
        side: the side stream.
        captured: the side stream during a capture.
    """

    def __init__(self, run: Run, plain: Run, side: torch.cuda.Stream, captured: torch.cuda.Stream):
        self._run, self._plain, self._sides = run, plain, (side, captured)
        self._filled: dict[int, torch.cuda.Event] = {}  # Address of a buffer -> event after its fetch.
        self._joined = False

    def __call__(self, role: str, op: Op, *args, **options) -> None:
        """Run a fetch on a side stream, any other line on the current stream, which waits at `fetched`."""
        if role == "fetch":
            side = self._sides[torch.cuda.is_current_stream_capturing()]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._plain(role, op, *args, **options)
                self._filled[args[-1].data_ptr()] = side.record_event()
        elif role == "fetched":
            if filled := self._filled.pop(args[0].data_ptr(), None):
                torch.cuda.current_stream().wait_event(filled)
                self._joined = True
        else:
            run, self._joined = self._plain if self._joined else self._run, False
            run(role, op, *args, **options)


def forked(model: DecodeModel, run: Run, attention: Op | None = None) -> Run:
    """Return the runner of one pass. It runs on two streams if the model has pages or weights in host memory.

    A Forked holds the events of its pass, so every pass needs a separate runner. For `attention`, see `replaced`.
    """
    plain = replaced(launch if run is launch_dependent else run, attention)
    run = replaced(run, attention)
    if not model.hosted or model.device.type != "cuda":
        return run
    return Forked(run, plain, *fetch_streams(model.device))


def replaced(run: Run, attention: Op | None) -> Run:
    """Return a runner like `run` that launches `attention` in place of the attention of a list, unless it is None."""
    if attention is None:
        return run

    def run_other(role: str, op: Op, *args, **options) -> None:
        if role == "attention":
            attention.launch(*args)  # Operations of torch take no launch config.
        else:
            run(role, op, *args, **options)

    return run_other


@cache
def fetch_streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the side stream of all passes, and another for captures, since other engines may run during a capture."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


class Allocating:
    """A line runner that behaves like an engine without a workspace: it allocates every output of every op.

    A tensor lives until the next one with the same role and name, like a variable of such an engine. The values remain
    in the workspace, since kernels add to the residual stream in place. Only the allocations are added.
    """

    def __init__(self, run: Run):
        self._run = run
        self._outputs: dict[tuple[str, str], torch.Tensor] = {}

    def __call__(self, role: str, op: Op, *args, **options) -> None:
        """Allocate the outputs of a line, then run it."""
        for name, tensor in op.output_tensors(args).items():
            self._outputs[role, name] = torch.empty_like(tensor)
        self._run(role, op, *args, **options)


@dataclass(frozen=True)
class Launch:
    """A recorded line of a list."""

    role: str
    op: Op
    args: tuple
    options: dict

    def __repr__(self) -> str:
        return f"Launch({self.role}, {', '.join(self.kernels())})"

    def bytes(self) -> int:
        """Return the bytes that the launch moves with the current contents of its arguments."""
        return self.op.bytes(*self.args)

    def key(self) -> tuple:
        """Return a key that is equal for launches that need the same compiled kernels."""
        return self.op.launch, _kind(self.args), tuple(self.options.items())

    def kernels(self) -> list[str]:
        """Return the names of the kernels that the launch runs."""
        return [kernel.fn.__name__ for kernel in self.op.kernels]


def _kind(value):
    """Return the properties of an argument that determine the compiled kernel."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.data_ptr() % 16
    if is_dataclass(value):
        value = tuple(getattr(value, field.name) for field in fields(value))
    return tuple(map(_kind, value)) if isinstance(value, tuple) else value


class Recorder:
    """A line runner that only records the lines, in `launches`."""

    def __init__(self):
        self.launches: list[Launch] = []

    def __call__(self, role: str, op: Op, *args, **options) -> None:
        """Record a line."""
        self.launches.append(Launch(role, op, args, options))


def recorded(lines: Lines) -> Lines:
    """Return an equal list that is recorded at its first use. Its arguments never change, and recording takes time."""
    launches: list[Launch] = []

    def run_all(run: Run) -> None:
        if not launches:
            recorder = Recorder()
            lines(recorder)
            launches[:] = recorder.launches  # This comes last, so that an interrupted list is made again.
        for each in launches:
            run(each.role, each.op, *each.args, **each.options)

    return run_all
