"""Captured passes without a GPU. A fake graph is a list of the launches that run while it is captured."""

from contextlib import nullcontext
from threading import RLock

import torch

from tridecode.step import graphs
from tridecode.step.run import run_reference

CAPTURING: list["FakeGraph"] = []  # The graph that is being captured. The list is empty between captures.


class FakeGraph:
    """A substitute for torch.cuda.CUDAGraph. It keeps the arguments of its launches, and so their addresses."""

    def __init__(self):
        self.lines = []

    def capture_begin(self, pool, capture_error_mode):
        assert not CAPTURING, "a capture began during another capture"
        CAPTURING.append(self)

    def capture_end(self):
        assert CAPTURING.pop() is self

    def replay(self):
        assert not CAPTURING, "a graph was replayed during a capture"
        for line, args in self.lines:
            line(*args)


def run(role, op, *args, **options):
    """Run the reference, or add it to the graph that is being captured."""
    if CAPTURING:
        CAPTURING[0].lines.append((op.ref, args))
    else:
        run_reference(role, op, *args)


class Place(graphs.Place):
    """A Place without streams and memory. It records the modes of its captures."""

    def __init__(self, device):
        self._device = self._stream = self._pool = None
        self._lock = RLock()
        self.modes = []

    def run(self, enqueue):
        enqueue()

    def free_memory(self):
        return 0

    def seconds(self, enqueue, passes=1):
        for _ in range(1 + passes):
            enqueue()
        return 0.001

    def capture(self, mode, *args):
        self.modes.append(mode)
        return super().capture(mode, *args)


def install(monkeypatch) -> None:
    """Let runners capture on a CPU. Their line runner must be `run`."""
    monkeypatch.setattr(graphs, "Place", Place)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda target: nullcontext())
