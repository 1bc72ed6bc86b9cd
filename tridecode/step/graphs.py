"""Who runs the passes: launched line by line, or captured once as CUDA graphs of several sizes and replayed."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, partial

import torch

from ..errors import brief
from ..kernels.attention.attention import attention_bytes, attention_ref
from ..kernels.op import Op
from ..layout import LIMIT_REACHED, STATUS
from . import decode
from .compiling import compile_ahead
from .dispatch import QUERIES, BatchDescriptor, Dispatcher, best_queries, most_queries
from .model import DecodeModel
from .run import Run, forked, launch, launch_dependent, refer

log = logging.getLogger("tridecode")


# torch's own attention reads lengths on the host: it can stand between the pieces of a graph only.
TORCH_ATTENTION = Op(attention_ref, attention_ref, attention_bytes, outputs=("partial", "lse", "out"))


def make_steps(
    model: DecodeModel, backend: str, dispatcher: Dispatcher, attention: str = "triton"
) -> "EagerSteps | StepGraphs":
    """Who runs the decode passes of an engine; backend: triton or torch (the references)."""
    other = TORCH_ATTENTION if attention == "torch" else None
    if backend == "torch" or dispatcher.mode == "none":
        return EagerSteps(model, refer if backend == "torch" else launcher(model), other)
    return StepGraphs(model, dispatcher=dispatcher, attention=other)


def launcher(model: DecodeModel) -> Run:
    """The runner that is fastest on the model's GPU."""
    return launch_dependent if model.pdl else launch


def model_of(model: DecodeModel, batch: BatchDescriptor) -> DecodeModel:
    """The model as that pass sees it. Rows with masks, which come one at a time, have no drafts."""
    if model.verify and not batch.masked:
        return model.of_queries(batch.rows, batch.tokens)
    return model.of_rows(batch.rows)


def list_of(model: DecodeModel, batch: BatchDescriptor) -> Callable[[Run], None]:
    """The list of that pass."""
    model = model_of(model, batch)
    return lambda run: decode.step(run, model, batch.kind, batch.masked)


def first_batches(sizes: Sequence[int], kinds: Sequence[str] = decode.KINDS) -> list[BatchDescriptor]:
    """The passes that are captured at load, the largest first: the smaller ones find their memory in the pool."""
    return [BatchDescriptor(kind, rows) for rows in sorted(sizes, reverse=True) for kind in kinds]


def first_lists(model: DecodeModel, batches: Sequence[BatchDescriptor]) -> list[Callable[[Run], None]]:
    """What is compiled for them, the ends of those with masks included."""
    ends = [partial(decode.hidden_to_token, m=model.of_rows(b.rows), kind=b.kind, masked=True) for b in batches]
    return [*(list_of(model, batch) for batch in batches), *ends]


class EagerSteps:
    """Passes whose lines `run` runs one by one; attention: in the place of the list's own."""

    def __init__(self, model: DecodeModel, run: Run, attention: Op | None = None):
        self.model, self._run, self._attention = model, run, attention
        self.dispatcher = Dispatcher("none", ())
        self._models: dict[tuple[int, int], DecodeModel] = {}

    def tokens(self, kind: str, rows: int, wants: Sequence[int], capture: bool) -> int:
        """Rows of each request in a pass of so many requests, of which each could use what it wants."""
        return best_queries(rows, wants) if self.model.verify else 1

    def capture_next(self) -> bool:
        """Capture one more pass; False where none is left."""
        return False

    def replay(self, kind: str, rows: int | None = None, masked: bool = False, tokens: int = 1) -> None:
        """Run one pass of the first `rows` requests, by default all, with `tokens` rows each; on a GPU it is enqueued
        on the current stream."""
        _, batch = self.dispatcher.dispatch(kind, rows or self.model.rows, masked, tokens)
        self.run(batch)

    @torch.inference_mode()
    def run(self, batch: BatchDescriptor) -> None:
        key = batch.rows, 0 if batch.masked else batch.tokens
        model = self._models.get(key) or self._models.setdefault(key, model_of(self.model, batch))
        with torch.cuda.device(self.model.device) if self.model.device.type == "cuda" else nullcontext():
            run = forked(self.model, self._run, self._attention)
            decode.step(run, model, batch.kind, batch.masked)


class StepGraphs:
    """The captured passes of one model, shared by all its requests.

    dispatcher: its mode and sizes, by default one graph of all rows. attention: what runs eagerly between the pieces of
    a piecewise graph in place of the list's own, and `between` who runs it there. kinds: those to capture, all by
    default. run: the runner to capture, by default `launcher(model)`. With `check_addresses` every replay first asserts
    that no buffer moved since capture (a debug aid).

    Passes with masks, which most never need, are compiled with the others and captured when they first come; those that
    verify drafts are compiled then too, each by itself: nobody waits for more than one.
    """

    def __init__(
        self,
        model: DecodeModel,
        check_addresses: bool = False,
        kinds: Sequence[str] = decode.KINDS,
        run: Run | None = None,
        dispatcher: Dispatcher | None = None,
        attention: Op | None = None,
        between: Run = launch,
    ):
        self.model = model
        self.captures = 0
        self.check_addresses = check_addresses
        self.dispatcher = dispatcher or Dispatcher("full", (model.rows,))
        self._run, self.attention, self._between = run or launcher(model), attention, between
        self._addresses = model.addresses()
        self._eager = EagerSteps(model, self._run, attention)
        batches = first_batches(self.dispatcher.sizes, kinds)
        with torch.cuda.device(model.device):  # Triton launches on the current device
            self.place = Place(model.device)
            log.info("compiling the kernels of the step")
            model.workspace.meta[:, STATUS] = LIMIT_REACHED
            compile_ahead(first_lists(model, batches), forked(model, self._run), model.device)
            log.info("capturing %d CUDA graphs of %s rows", len(batches), ", ".join(map(str, self.dispatcher.sizes)))
            self._graphs: dict[BatchDescriptor, Callable[[], None] | None] = {b: self._capture(b) for b in batches}
        self._verifying = [
            replace(batch, tokens=tokens)
            for tokens in QUERIES[1:] for batch in batches if model.verify and tokens <= most_queries(batch.rows)
        ]  # fmt: skip

    def _capture(self, batch: BatchDescriptor) -> Callable[[], None]:
        """No row may run: then the pass that runs first loads every kernel and writes nothing."""
        (mode, _), lines = self.dispatcher.plan(batch.kind, batch.rows), list_of(self.model, batch)
        if batch.tokens > 1:
            self.model.verify.meta[:, STATUS] = LIMIT_REACHED
            compile_ahead([lines], forked(self.model, self._run), self.model.device)
        between = partial(forked, self.model, self._between, self.attention)
        self.place.run(lambda: lines(forked(self.model, self._run, self.attention)))
        replay, captures = self.place.capture(mode, forked(self.model, self._run), between, lines)
        self.captures += captures
        return replay

    def capture_next(self) -> bool:
        """Capture one more pass that verifies drafts; False where none is left."""
        left = [batch for batch in self._verifying if batch not in self._graphs]
        if left:
            self._graphs[left[0]] = capture_late(self.model, left[0], self._capture)
        return len(left) > 1

    def tokens(self, kind: str, rows: int, wants: Sequence[int], capture: bool) -> int:
        """Rows of each request in a pass of so many requests, of which each could use what it wants: as passes were
        captured for until now, or, with `capture`, will be."""
        if not self.model.verify or max(wants) == 1:
            return 1
        batch = self.dispatcher.plan(kind, rows)[1]
        there = [each for each in QUERIES if self._graphs.get(replace(batch, tokens=each), capture)]
        return best_queries(batch.rows, wants, there)

    def replay(self, kind: str, rows: int | None = None, masked: bool = False, tokens: int = 1) -> None:
        """Enqueue one pass of at least the first `rows` requests, by default all, with `tokens` rows each, on the
        current stream. Those beyond must not run."""
        if self.check_addresses:
            moved = [name for name, a in self.model.addresses().items() if self._addresses.get(name) != a]
            assert not moved, f"buffers moved since capture: {', '.join(moved)}"
        mode, batch = self.dispatcher.dispatch(kind, rows or self.model.rows, masked, tokens)
        if mode != "none" and batch not in self._graphs:
            self._graphs[batch] = capture_late(self.model, batch, self._capture)
        if (replay := self._graphs.get(batch)) is None:
            self._eager.run(batch)
        else:
            replay()


@torch.inference_mode()
def capture_late(
    model: DecodeModel, batch: BatchDescriptor, capture: Callable[[BatchDescriptor], Callable[[], None] | None]
) -> Callable[[], None] | None:
    """What `capture` returns, between two passes of running requests: their rows idle meanwhile, in stream order. None,
    which is said, where that fails: such passes stay eager."""
    meta, started = model.workspace.meta, time.perf_counter()
    kept = meta.clone()
    meta[:, STATUS] = LIMIT_REACHED
    try:
        replay = capture(batch)
        log.info("captured %s in %.0f ms", batch, 1e3 * (time.perf_counter() - started))
        return replay
    except Exception as error:  # Triton's own are no RuntimeErrors
        log.warning("%s stays uncaptured: %s", batch, brief(error))
        return None
    finally:
        meta.copy_(kept)


@cache
def capture_stream(device: torch.device) -> tuple[torch.cuda.Stream, threading.RLock]:
    """The stream on which all graphs of a device are captured, and whose turn it is: torch keeps the workspace of its
    products for each stream that it has met, for good."""
    return torch.cuda.Stream(device), threading.RLock()


class Place:
    """Where graphs of one model are captured: the stream for that, and a memory pool of its own."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream, self._turn = capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, enqueue: Callable[[], None]) -> None:
        """Run it once there, uncaptured, and wait for it: what it needs is compiled, loaded and allocated then."""
        with self._turn, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                enqueue()
            torch.cuda.synchronize(self._device)

    def free_memory(self) -> int:
        """Bytes on the device; what it says of a graph is rounded to what the driver takes at a time."""
        return torch.cuda.mem_get_info(self._device)[0]

    def seconds(self, enqueue: Callable[[], None]) -> float:
        """What it takes on the GPU, once."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._turn, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            enqueue()
            start.record()
            enqueue()
            end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def capture(
        self, mode: str, run: Run, between: Callable[[], Run], lines: Callable[[Run], None]
    ) -> tuple[Callable[[], None], int]:
        """What replays `lines`, whose every line `run` runs, and in how many graphs. mode: full or piecewise; between:
        as Pieces takes it."""
        pieces = Pieces(run, between, self._pool, cut=mode == "piecewise")
        with self._turn, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                lines(pieces)
                graphs = pieces.end()
            except BaseException:
                pieces.abandon()  # else all that this stream is told later would be captured
                raise
        return (graphs[0].replay if mode == "full" else pieces.replay), len(graphs)


class Pieces:
    """Captures a list, on the current stream, if `cut` in pieces that end where attention or a fetch stands: these run
    eagerly between them, by what `between` makes for each pass."""

    def __init__(self, run: Run, between: Callable[[], Run], pool, cut: bool):
        self._run, self._between, self._pool, self._cut = run, between, pool, cut
        self._parts: list[torch.cuda.CUDAGraph | Callable[[Run], None]] = []
        self._capturing: torch.cuda.CUDAGraph | None = None

    def __call__(self, role: str, op: Op, *args, **how) -> None:
        if self._cut and role in ("attention", "fetch", "fetched"):
            self.end()
            self._parts.append(lambda run: run(role, op, *args, **how))
            return
        if self._capturing is None:
            self._capturing = torch.cuda.CUDAGraph()
            self._parts.append(self._capturing)
            # Not torch.cuda.graph: that collects garbage and synchronises before each of some hundred pieces.
            self._capturing.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._run(role, op, *args, **how)

    def end(self) -> list[torch.cuda.CUDAGraph]:
        """End the piece that is being captured; returns all so far."""
        if self._capturing is not None:
            self._capturing.capture_end()
            self._capturing = None
        return [part for part in self._parts if isinstance(part, torch.cuda.CUDAGraph)]

    def abandon(self) -> None:
        """End what is being captured, which is of no use."""
        if self._capturing is not None:
            with suppress(RuntimeError):  # it may be invalid already
                self._capturing.capture_end()
            self._capturing = None

    @torch.inference_mode()
    def replay(self) -> None:
        run = self._between()
        for part in self._parts:
            part.replay() if isinstance(part, torch.cuda.CUDAGraph) else part(run)
