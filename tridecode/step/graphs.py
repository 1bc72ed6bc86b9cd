"""Who runs the token step: launched line by line, or captured once as a CUDA graph for each kind and replayed."""

import logging
from contextlib import nullcontext

import torch

from ..layout import LIMIT_REACHED, STATUS
from . import decode
from .run import Run, launch, launch_dependent
from .state import DecodeModel

log = logging.getLogger("tridecode")


def launcher(model: DecodeModel) -> Run:
    """The runner that is fastest on the model's GPU."""
    return launch_dependent if model.pdl else launch


class EagerSteps:
    """Steps whose lines `run` runs one by one."""

    def __init__(self, model: DecodeModel, run: Run):
        self.model, self._run = model, run

    @torch.inference_mode()
    def replay(self, kind: str, rows: int | None = None) -> None:
        """Run one step of the first `rows` rows, by default all; on a GPU it is enqueued on the current stream."""
        with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
            decode.step(self._run, self.model.of_rows(rows or self.model.rows), kind)


class StepGraphs:
    """The captured steps of one model, shared by all its requests.

    With `check_addresses` every replay first asserts that no buffer moved since capture (a debug aid). `kinds`: those
    to capture, all by default. `run`: the runner to capture, by default `launcher(model)`.
    """

    def __init__(
        self,
        model: DecodeModel,
        check_addresses: bool = False,
        kinds: tuple[str, ...] = decode.KINDS,
        run: Run | None = None,
    ):
        self.model = model
        self.captures = 0
        self.check_addresses = check_addresses
        self._run = run or launcher(model)
        self._addresses = model.addresses()
        with torch.cuda.device(model.device):  # Triton launches on the current device
            log.info("compiling the kernels of the step")
            streams = {kind: self._compile(kind) for kind in kinds}
            log.info("capturing %d CUDA graphs", len(kinds))
            self._graphs = {kind: self._capture(kind, stream) for kind, stream in streams.items()}

    def _compile(self, kind: str) -> torch.cuda.Stream:
        # With a status other than RUN the warm-up compiles and loads every kernel and writes nothing.
        self.model.workspace.meta[:, STATUS] = LIMIT_REACHED
        stream = torch.cuda.Stream(self.model.device)
        stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with torch.cuda.stream(stream):
            decode.step(self._run, self.model, kind)
        torch.cuda.synchronize(self.model.device)
        return stream

    def _capture(self, kind: str, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            decode.step(self._run, self.model, kind)
        self.captures += 1
        return graph

    def replay(self, kind: str, rows: int | None = None) -> None:
        """Enqueue one step of at least the first `rows` rows, by default all, on the current stream."""
        if self.check_addresses:
            moved = [name for name, a in self.model.addresses().items() if self._addresses.get(name) != a]
            assert not moved, f"buffers moved since capture: {', '.join(moved)}"
        self._graphs[kind].replay()
