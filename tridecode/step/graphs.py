"""Runners of passes. A pass replays the CUDA graph that was captured for its key, or launches its list."""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Generic, TypeVar

import torch

from ..blocks.weights import bytes_read
from ..errors import brief
from ..kernels.attention.attention import attention_bytes, attention_ref
from ..kernels.op import Op
from ..layout import LIMIT_REACHED, STATUS
from ..state.acceptance import Acceptance
from . import decode
from .compiling import compile_lists
from .dispatch import QUERIES, BatchDescriptor, Costs, Dispatcher, best_queries, max_queries, typical_costs
from .model import DecodeModel
from .run import Lines, Run, forked, launch, launch_dependent, recorded, run_reference

log = logging.getLogger("tridecode")
Key = TypeVar("Key", bound=Hashable)

LISTS = 64  # Number of lists that a runner caches. To make a list, all buffers of the model are narrowed to its rows.
# Torch's attention reads lengths on the host, so no graph can contain it. It runs between the parts of a graph.
TORCH_ATTENTION = Op(attention_ref, attention_ref, attention_bytes, outputs=("scratch.partial", "scratch.lse", "out"))


class PassRunner(Generic[Key]):
    """Runs passes by key: replays the graph of a key, or launches its list.

    Args:
        lines: maps a key to the list of its pass.
        run: runs a line.
        mode: how passes are captured: full, piecewise or none.
        place: where passes are captured. None in mode none.
        attention: replaces the attention of launched and piecewise passes if not None; see run.replaced.
        between: runs the lines between the parts of a piecewise graph.
    """

    def __init__(
        self, model: DecodeModel, lines: Callable[[Key], Lines], run: Run, mode: str, place: "Place | None",
        attention: Op | None, between: Run,
    ):  # fmt: skip
        self.model, self.run, self.mode = model, run, mode
        self.lines = lru_cache(LISTS)(lambda key: recorded(lines(key)))
        self.place, self.attention, self.between = place, attention, between
        # Key of a pass -> its replay, or None if the capture failed.
        self.graphs: dict[Key, Callable[[], None] | None] = {}
        self.captures = 0  # Number of CUDA graphs. A piecewise pass has several.

    def enqueue(self, mode: str, key: Key) -> None:
        """Enqueue a pass on the current stream: replay its graph if there is one, else launch its list."""
        replay = self.graphs.get(key) if mode != "none" else None
        (replay or partial(self.launch, key))()

    @torch.inference_mode()
    def launch(self, key: Key) -> None:
        """Run a pass without a graph: launch the operations of its list one by one."""
        on_gpu = self.model.device.type == "cuda"
        # Triton launches kernels on the current device.
        with torch.cuda.device(self.model.device) if on_gpu else nullcontext():
            self.lines(key)(forked(self.model, self.run, self.attention))

    @torch.inference_mode()
    def capture(self, key: Key) -> None:
        """Capture a pass whose kernels are loaded. The model must be idle."""
        assert self.place is not None
        run, between = forked(self.model, self.run), partial(forked, self.model, self.between, self.attention)
        self.graphs[key], count = self.place.capture(self.mode, run, between, self.lines(key))
        self.captures += count

    def try_capture(self, key: Key) -> None:
        """Capture a pass. If that fails, log the error; the pass is then always launched."""
        assert self.place is not None
        started, free = time.perf_counter(), self.place.free_memory()
        try:
            with idle(self.model):
                self.capture(key)
        except Exception as error:  # Some errors of Triton are not RuntimeErrors.
            self.graphs[key] = None
            log.warning("%s cannot be captured, so it is launched: %s", key, brief(error))
        else:
            milliseconds, used = 1e3 * (time.perf_counter() - started), free - self.place.free_memory()
            log.debug("captured %s (%s) in %.0f ms, %.1f MiB", key, self.mode, milliseconds, used / 2**20)

    def capture_first(self, keys: Iterable[Key]) -> bool:
        """Capture the first of `keys` whose capture was not tried yet. Return whether others remain."""
        left = [key for key in keys if key not in self.graphs]
        if left:
            self.try_capture(left[0])
        return len(left) > 1


@contextmanager
def idle(model: DecodeModel) -> Iterator[None]:
    """Stop all rows and empty the table of chunks, in stream order, so that passes write no state. Restore both."""
    states = model.workspace.meta, model.prompt.chunks
    with torch.inference_mode():
        copies = [state.clone() for state in states]
        model.prompt.chunks.zero_()
        for workspace in filter(None, (model.workspace, model.verify)):
            workspace.meta[:, STATUS] = LIMIT_REACHED
        try:
            yield
        finally:
            for state, values in zip(states, copies):
                state.copy_(values)


# ---- decode passes


def make_passes(
    model: DecodeModel, backend: str, dispatcher: Dispatcher, attention: str = "triton", compiled: bool = False
) -> "DecodePasses":
    """Return the runner of an engine's decode passes.

    Args:
        backend: triton, or torch for the references.
        attention: one of dispatch.ATTENTION.
        compiled: as for DecodePasses.
    """
    other = TORCH_ATTENTION if attention == "torch" else None
    if backend == "torch":
        return DecodePasses(model, run_reference, attention=other)
    return DecodePasses(model, launcher(model), dispatcher, other, compiled=compiled)


def launcher(model: DecodeModel) -> Run:
    """Return the line runner that is fastest on the model's GPU."""
    return launch_dependent if model.pdl else launch


def decode_list(model: DecodeModel, batch: BatchDescriptor) -> Lines:
    """Return the list of a decode pass. A pass with masks cannot verify drafts, because masks arrive one at a time."""
    verifies, model = model.verify and not batch.masked, model.with_adapters(batch.adapters)
    view = model.for_queries(batch.rows, batch.tokens) if verifies else model.for_rows(batch.rows)
    return lambda run: decode.decode_pass(run, view, batch.kind, batch.masked)


def first_batches(
    sizes: Sequence[int], kinds: Sequence[str] = decode.KINDS, forms: Sequence[bool] = (False,)
) -> list[BatchDescriptor]:
    """Return the passes without masks and drafts. The largest come first, because smaller ones reuse their memory.

    forms: whether passes have adapters.
    """
    ordered = sorted(sizes, reverse=True)
    return [BatchDescriptor(kind, rows, adapters=form) for rows in ordered for form in forms for kind in kinds]


def decode_batches(model: DecodeModel, sizes: Sequence[int]) -> list[BatchDescriptor]:
    """Return all decode passes of these sizes: without masks, with masks, and those that verify drafts."""
    batches = []
    for batch in first_batches(sizes, forms=model.adapter_forms):
        queries = [tokens for tokens in QUERIES[1:] if model.verify and tokens <= max_queries(batch.rows)]
        batches += [batch, replace(batch, masked=True), *(replace(batch, tokens=tokens) for tokens in queries)]
    return batches


class DecodePasses(PassRunner[BatchDescriptor]):
    """Runs the decode passes of a model, which all its requests share. The constructor captures them.

    Args:
        run: runs a line, by default launcher(model).
        dispatcher: its mode and sizes select the captured passes. By default all passes are launched.
        attention, between: see PassRunner.
        batches: the passes to capture, by default all of the sizes. Others are launched.
        compiled: whether the kernels of all passes, including those of PromptPasses, are already compiled and loaded.
            If not, the constructor compiles them.
    """

    def __init__(
        self, model: DecodeModel, run: Run | None = None, dispatcher: Dispatcher | None = None,
        attention: Op | None = None, batches: Sequence[BatchDescriptor] | None = None, between: Run = launch,
        compiled: bool = False,
    ):  # fmt: skip
        self.dispatcher = dispatcher or Dispatcher("none", ())
        mode, sizes = self.dispatcher.decode_mode, self.dispatcher.sizes
        place = None if mode == "none" else Place(model.device)
        super().__init__(model, partial(decode_list, model), run or launcher(model), mode, place, attention, between)
        self.compiled = compiled
        self.costs: Costs = {}  # The costs of greedy and sampling passes. Empty if they were not measured.
        read = cache(partial(bytes_read, model.spec, model.weights))
        self._typical = cache(partial(typical_costs, bytes_read=read))
        self.check_addresses = False  # For debugging: check before each pass that no buffer has moved.
        self._addresses = model.addresses()
        if place:
            batches = decode_batches(model, sizes) if batches is None else batches
            with idle(model):
                if not compiled:
                    compile_lists(map(self.lines, batches), forked(model, self.run), model.device)
                log.info("capturing %d CUDA graphs of %s rows", len(batches), ", ".join(map(str, sizes)))
                for batch in batches:  # Passes with masks or drafts may remain without a graph.
                    self.try_capture(batch) if batch.masked or batch.tokens > 1 else self.capture(batch)

    def tokens(self, kind: str, rows: int, drafts: Sequence[Acceptance], adapters: bool = False) -> int:
        """Return the number of rows that each of `rows` requests should have in the next pass.

        Only captured passes are chosen.

        Args:
            drafts: the acceptance of each request's drafts.
            adapters: whether the pass has adapters.
        """
        if not self.model.verify or not any(each.requested_drafts for each in drafts):
            return 1
        mode, batch = self.dispatcher.plan(kind, rows, adapters=adapters)
        allowed = [tokens for tokens in QUERIES if mode == "none" or self.graphs.get(replace(batch, tokens=tokens))]
        return best_queries(self.costs_of(kind, batch.rows), drafts, allowed)

    def costs_of(self, kind: str, requests: int) -> Mapping[int, float]:
        """Return the costs of passes of `requests` requests by their rows of each request, measured if possible."""
        measured = self.costs.get(("greedy" if kind == "greedy" else "sample", requests))
        return measured or self._typical(requests)

    def replay(
        self, kind: str, rows: int | None = None, masked: bool = False, tokens: int = 1, adapters: bool = False
    ) -> None:
        """Enqueue a pass of the first `rows` requests (default: all) on the current stream, with `tokens` rows each.

        The pass may be padded with requests beyond these, which must not run.
        """
        if self.check_addresses:
            moved = [name for name, a in self.model.addresses().items() if self._addresses.get(name) != a]
            assert not moved, f"buffers moved since capture: {', '.join(moved)}"
        rows = rows or self.model.rows
        mode, batch = self.dispatcher.plan(kind, rows, masked, tokens, adapters)
        if not self.graphs.get(batch):
            mode = "none"
        self.dispatcher.count(rows, batch, mode)
        self.enqueue(mode, batch)


# ---- capture


@cache
def capture_stream(device: torch.device) -> tuple[torch.cuda.Stream, threading.RLock]:
    """Return the capture stream of a device, and its lock.

    A device has only one, because torch never frees the cuBLAS workspace of a stream.
    """
    return torch.cuda.Stream(device), threading.RLock()


class Place:
    """The stream and the memory pool in which the graphs of one model are captured."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream, self._lock = capture_stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, enqueue: Callable[[], None]) -> None:
        """Run a pass without capturing it, and wait for it. This loads its kernels and allocates its scratch."""
        with self._lock, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                enqueue()
            torch.cuda.synchronize(self._device)

    def free_memory(self) -> int:
        """Return the free bytes of the device. The driver allocates in blocks, which several graphs may share."""
        return torch.cuda.mem_get_info(self._device)[0]

    def seconds(self, enqueue: Callable[[], None], passes: int = 1) -> float:
        """Return the mean time of `passes` passes on the GPU, after one pass to warm up."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with self._lock, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                enqueue()
                start.record()
                for _ in range(passes):
                    enqueue()
                end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / passes

    def capture(self, mode: str, run: Run, between: Callable[[], Run], lines: Lines) -> tuple[Callable[[], None], int]:
        """Capture a list, in mode full or piecewise. Return the function that replays it, and the number of graphs."""
        captured = ListCapture(run, between, self._pool, cut=mode == "piecewise")
        with self._lock, torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            try:
                lines(captured)
                captured.end()
            except BaseException:
                with suppress(RuntimeError):  # The capture may already be invalid.
                    captured.end()  # Otherwise the stream would capture all later work.
                raise
        return (captured.graphs[0].replay if mode == "full" else captured.replay), len(captured.graphs)


class ListCapture:
    """Line runner that captures a list as one graph, or, if `cut`, in parts that end at attention and at fetches.

    Args:
        run: runs the captured lines.
        between: returns the runner of the other lines. It is called for each replay.
    """

    def __init__(self, run: Run, between: Callable[[], Run], pool, cut: bool):
        self._run, self._between, self._pool, self._cut = run, between, pool, cut
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._parts: list[Lines] = []
        self._capturing = False

    def __call__(self, role: str, op: Op, *args, **options) -> None:
        """Capture a line in the current graph. With `cut`, attention and fetches run between graphs."""
        if self._cut and role in ("attention", "fetch", "fetched"):
            self.end()
            self._parts.append(lambda run: run(role, op, *args, **options))
            return
        if not self._capturing:
            graph, self._capturing = torch.cuda.CUDAGraph(), True
            self.graphs.append(graph)
            self._parts.append(lambda run: graph.replay())
            # torch.cuda.graph is not used. It collects garbage and synchronizes before each of hundreds of parts.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self._run(role, op, *args, **options)

    def end(self) -> None:
        """End the capture of the current part."""
        if self._capturing:
            self._capturing = False
            self.graphs[-1].capture_end()

    @torch.inference_mode()
    def replay(self) -> None:
        """Replay the parts, and run the lines between them."""
        run = self._between()
        for part in self._parts:
            part(run)
