"""Runner of prompt passes. `read` and `finish` are each launched, or replayed from a graph."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count, product, takewhile

from ..kernels.attention.torch_attention import BLOCK_ATTENTION, torch_attention
from ..kernels.op import Op
from ..layout import Chunk
from . import prompt
from .compiling import compile_lists
from .dispatch import BatchDescriptor, PromptDescriptor
from .graphs import DecodePasses, PassRunner, first_batches, idle
from .model import DecodeModel
from .run import Lines, Run, forked, launch, run_reference

# FLOPs per second of attention. The estimate is added to a pass that was timed without attention.
ATTENTION_RATE = 300e12
log = logging.getLogger("tridecode")


def make_prompts(model: DecodeModel, steps: DecodePasses, backend: str, attention: str = "triton") -> "PromptPasses":
    """Return the runner of an engine's prompt passes. attention: one of dispatch.PROMPT_ATTENTION."""
    if backend == "torch":
        return PromptPasses(model, steps, run_reference, BLOCK_ATTENTION if model.fixed_chunk else None)
    chunks: list[Chunk] = []
    other = None if attention == "triton" else torch_attention(attention, chunks)
    return PromptPasses(model, steps, launch, other, chunks)


def decoding_rows(model: DecodeModel) -> tuple[int, ...]:
    """Return the numbers of decoding rows of captured prompt passes: 0, and the maximum if several requests can run."""
    return (0,) if model.fixed_chunk or len(model.workspace.tokens) == 1 else (0, model.rows)


def read_list(model: DecodeModel, batch: PromptDescriptor) -> Lines:
    """Return the list of `read`. In batch-invariant mode every pass has the same number of rows."""
    view = model.with_adapters(batch.adapters)
    rows = model.fixed_chunk or view.prompt_rows(batch.decoding + batch.tokens)
    return lambda run: prompt.read(run, view, rows, batch.decoding)


def finish_list(model: DecodeModel, batch: BatchDescriptor) -> Lines:
    """Return the list of `finish`."""
    view = model.with_adapters(batch.adapters).for_rows(batch.rows)
    return lambda run: prompt.finish(run, view, batch.kind, batch.masked)


def first_reads(model: DecodeModel) -> list[Lines]:
    """Return the read passes whose kernels are compiled at load.

    Attention has up to three kernels, for different numbers of tokens.
    """
    limit = model.prompt.rows - model.rows
    sizes = [*takewhile(lambda size: size < limit, (4 << i for i in count())), limit]
    rows = decoding_rows(model)
    return [read_list(model, PromptDescriptor(*batch)) for batch in product(sizes, rows, model.adapter_forms)]


class PromptPasses(PassRunner[PromptDescriptor]):
    """Runs the prompt passes of a model: `read`, and `finish` for the rows that sample a token.

    `capture_next` and `capture_all` capture the sizes of the dispatcher. An engine with one slot, in which no other
    request runs, also captures a size at its second use. Other passes are launched. A captured read has either no
    decoding rows or the maximum number. `finish` is captured like a decode pass, in the same mode.

    Args:
        steps: the runner of the model's decode passes, which also runs the lines of `finish`.
        run: runs a line of `read`.
        attention: replaces the attention of `read` if not None.
        chunks: the list from which `attention` reads the chunks of a pass.
    """

    def __init__(
        self, model: DecodeModel, steps: DecodePasses, run: Run = launch, attention: Op | None = None,
        chunks: list[Chunk] | None = None,
    ):  # fmt: skip
        self.dispatcher = steps.dispatcher
        super().__init__(
            model, partial(read_list, model), run, self.dispatcher.prompt_mode, steps.place, attention, between=run
        )
        self._ends = PassRunner(
            model, partial(finish_list, model), steps.run, steps.mode, steps.place, steps.attention, steps.between
        )
        self.chunks = [] if chunks is None else chunks
        self.seconds: dict[PromptDescriptor, float] = {}  # Seconds of each captured prompt pass without attention.
        self._missed: set[PromptDescriptor] | None = set() if len(model.workspace.tokens) == 1 else None
        sizes = self.dispatcher.prompts if self.mode != "none" else ()
        keys = product(reversed(sizes), decoding_rows(model), model.adapter_forms)
        self._sizes = [PromptDescriptor(*key) for key in keys]
        if steps.place is not None:
            # With fixed chunks, decode passes sample the first tokens.
            sizes, forms = self.dispatcher.sizes, model.adapter_forms
            batches = [] if model.fixed_chunk else first_batches(sizes, forms=forms)
            ends = [replace(batch, masked=masked) for batch in batches for masked in (False, True)]
            with idle(model):
                if not steps.compiled:
                    compile_lists(map(self._ends.lines, ends), forked(model, steps.run), model.device)
                    if attention is None:
                        compile_lists(first_reads(model), forked(model, run), model.device)
                for batch in ends:
                    self._ends.try_capture(batch) if batch.masked else self._ends.capture(batch)

    def decoding(self, rows: int) -> int:
        """Return the decoding rows of a pass in which `rows` rows decode.

        Kernels are compiled for the maximum number of decoding rows and for none, so the number is padded.
        """
        return self.model.rows if rows and self.place else rows

    def tokens_within(self, seconds: float, start: int, limit: int) -> int:
        """Return the number of tokens, up to `limit`, that a pass with decoding rows can read in this time.

        The result is at least the smallest captured size. Without captured sizes it is `limit`.

        Args:
            seconds: the time that the pass may take.
            start: position of the first token.
        """
        form = self.model.adapter_forms[0]
        timed = [(key.tokens, spent) for key, spent in self.seconds.items() if key.decoding and key.adapters == form]
        timed.sort()
        if not timed:
            return limit
        flops = self.model.prompt_attention_flops
        fitting = [tokens for tokens, spent in timed if spent + flops(start, tokens) / ATTENTION_RATE <= seconds]
        return min(max(fitting, default=timed[0][0]), limit)

    def capture(self, key: PromptDescriptor) -> None:
        """Capture and time a pass. Its kernels must be compiled, and the model must be idle."""
        self.chunks.clear()  # The table of chunks is also cleared.
        place = self.place
        assert place is not None
        place.run(partial(self.launch, key))  # The first run lets cuBLAS load its kernels and allocate its workspace.
        super().capture(key)
        replay = self.graphs[key]
        assert replay is not None
        self.seconds[key] = place.seconds(replay)
        log.debug("%s takes %.2f ms without attention", key, 1e3 * self.seconds[key])

    def capture_next(self, limit: int | None = None) -> bool:
        """Capture the largest remaining size of up to `limit` tokens. Return whether others remain."""
        return self.capture_first(batch for batch in self._sizes if limit is None or batch.tokens <= limit)

    def capture_all(self, limit: int | None = None) -> None:
        """Capture all sizes of up to `limit` tokens."""
        if not self._sizes or self.place is None:
            return
        before, started, free = len(self.seconds), time.perf_counter(), self.place.free_memory()
        while self.capture_next(limit):
            pass
        used, spent = free - self.place.free_memory(), time.perf_counter() - started
        log.info("captured %d prompt passes in %.1f s, %.0f MiB", len(self.seconds) - before, spent, used / 2**20)

    def read(self, chunks: Sequence[Chunk], tokens: int, decoding: int = 0, adapters: bool = False) -> None:
        """Enqueue a pass of `tokens` prompt tokens and `decoding` rows. The table on the device contains its chunks."""
        mode, padded = self.dispatcher.plan_prompt(tokens)
        batch = PromptDescriptor(padded, decoding, adapters)
        if self._missed is not None and mode != "none" and batch not in self.graphs:
            if batch in self._missed:
                self.try_capture(batch)
            self._missed.add(batch)
        if self.graphs.get(batch) is None:
            mode, batch = "none", PromptDescriptor(tokens, decoding, adapters)
        self.dispatcher.count_prompt(tokens, batch, mode)
        self.chunks[:] = chunks
        self.enqueue(mode, batch)

    def finish(self, kind: str, rows: int, masked: bool = False, adapters: bool = False) -> None:
        """Enqueue the end of that pass, which samples a token for each of the first `rows` rows."""
        self._ends.enqueue(*self.dispatcher.plan(kind, rows, masked, adapters=adapters))
