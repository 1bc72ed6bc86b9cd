"""Capture and replay: the token step as one CUDA graph a kind of sampling."""

import logging

import torch

from . import decode
from .meta import LIMIT_REACHED, STATUS
from .model import DecodeModel

log = logging.getLogger("tridecode")


class StepGraphs:
    """The captured steps of one model, shared by all its requests.

    With `check_addresses` every replay first asserts that no buffer moved since capture (a debug aid). `kinds`: those
    to capture, all by default.
    """

    def __init__(self, model: DecodeModel, check_addresses: bool = False, kinds: tuple[str, ...] = decode.KINDS):
        self.model = model
        self.captures = 0
        self.check_addresses = check_addresses
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
            decode.step(self.model, kind)
        torch.cuda.synchronize(self.model.device)
        return stream

    def _capture(self, kind: str, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            decode.step(self.model, kind)
        self.captures += 1
        return graph

    def replay(self, kind: str) -> None:
        """Enqueue one step on the current stream."""
        if self.check_addresses:
            moved = [name for name, a in self.model.addresses().items() if self._addresses.get(name) != a]
            assert not moved, f"buffers moved since capture: {', '.join(moved)}"
        self._graphs[kind].replay()
