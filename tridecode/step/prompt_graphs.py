"""Who runs the prompt passes: launched line by line, or replayed from graphs captured for a schedule of sizes."""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..errors import brief
from ..kernels.op import Op
from ..kernels.torch_ops import BLOCK_ATTENTION, torch_attention
from ..layout import Chunk
from . import prompt as prefill
from .compiling import compile_ahead
from .dispatch import BatchDescriptor, Dispatcher
from .graphs import EagerSteps, StepGraphs, capture_late, first_batches, launcher
from .model import DecodeModel
from .run import Run, forked, launch, refer

ATTENTION_RATE = 300e12  # FLOP a second, to reckon what attention adds to a pass that was timed without
log = logging.getLogger("tridecode")


def decoding_beside(model: DecodeModel) -> tuple[int, ...]:
    """The rows that may decode in a captured prompt pass: none, or as many as the model can have."""
    return (0,) if model.fixed_chunk or len(model.workspace.tokens) == 1 else (0, model.rows)


def end_of(model: DecodeModel, batch: BatchDescriptor) -> Callable[[Run], None]:
    """The list of the end of a prompt pass whose rows are those of that decode pass."""
    return lambda run: prefill.finish(run, model.of_rows(batch.rows), batch.kind, batch.masked)


def first_reads(model: DecodeModel) -> list[Callable[[Run], None]]:
    """What is compiled for the passes themselves: of few tokens, and of as many as fit, as attention of many may be
    another kernel's."""
    tokens = 4, model.prompt.rows - model.rows
    sizes = [(each + beside, beside) for each in tokens for beside in decoding_beside(model)]
    return [partial(prefill.read, m=model, rows=rows, decoding=beside) for rows, beside in sizes]


class EagerPrompts:
    """Prompt passes whose lines are launched one by one.

    run: what runs the lines of `read`; finish_run: those of `finish`. attention: a backend of torch's in place of the
    list's own.
    """

    def __init__(
        self, model: DecodeModel, run: Run, finish_run: Run, dispatcher: Dispatcher, attention: str | None = None
    ):
        self.model, self.dispatcher = model, dispatcher
        self.chunks: list[Chunk] = []  # of the pass that is enqueued next: what torch's attention wants to know
        self.attention: Op | None = torch_attention(attention, self.chunks) if attention else None
        self._run, self._finish_run = run, finish_run

    def capture_next(self, most: int | None = None) -> bool:
        """Capture the largest size that is not captured yet, of those of up to `most` tokens; False where none is left.
        Nothing may run meanwhile."""
        return False

    def capture_all(self, most: int | None = None) -> None:
        """Capture all sizes of up to `most` tokens."""

    def decoding(self, rows: int) -> int:
        """The rows that a pass has for `rows` that decode."""
        return rows

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        """Tokens of prompts, the first at position `start`, that a pass with rows that decode may read in so long, at
        most `most` and at least a few; only captured passes are bounded, since they have been timed."""
        return most

    def read(self, chunks: Sequence[Chunk], tokens: int, decoding: int = 0) -> None:
        """Enqueue a pass over `chunks`, which the device has been told of, of `tokens` tokens together, and the first
        `decoding` rows."""
        self.dispatcher.count_prompt(tokens, decoding, tokens, "none")
        self.launch(chunks, tokens, decoding)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], tokens: int, decoding: int) -> None:
        self.chunks[:] = chunks
        rows = self.model.fixed_chunk or decoding + tokens
        prefill.read(forked(self.model, self._run, self.attention), self.model, rows, decoding)

    @torch.inference_mode()
    def finish(self, kind: str, rows: int, masked: bool = False) -> None:
        """Enqueue the rest of that pass: a token for each of the first `rows` rows of meta."""
        prefill.finish(forked(self.model, self._finish_run), self.model.of_rows(rows), kind, masked)


class PromptGraphs:
    """Prompt passes of the dispatcher's sizes, each captured by `capture`; until then, and above the largest, they are
    launched. A pass has no rows that decode, or as many as the model can have. Ends with masks are captured when they
    first come, as StepGraphs does.

    lazy: a size is also captured when it comes for the second time; nothing else may run then.
    """

    def __init__(self, model: DecodeModel, steps: StepGraphs, attention: str | None = None, lazy: bool = True):
        self.model, self.dispatcher, self._place, self._steps = model, steps.dispatcher, steps.place, steps
        self._eager = EagerPrompts(model, launch, launcher(model), self.dispatcher, attention)
        self._most = model.rows  # which may be more than the largest captured decode pass has
        self._read: dict[tuple[int, int], Callable[[], None]] = {}
        self.seconds: dict[tuple[int, int], float] = {}  # of each captured size, without attention
        mixed = decoding_beside(model)
        sizes = self.dispatcher.prompts if self.dispatcher.plan_prompt(1)[0] != "none" else ()
        self._wanted = [(size, decoding) for size in sizes for decoding in reversed(mixed)]
        self._failed: set[tuple[int, int]] = set()
        self._missed: set[tuple[int, int]] | None = set() if lazy else None
        batches = [] if model.fixed_chunk else first_batches(self.dispatcher.sizes)  # there none ends a prompt
        compile_ahead([end_of(model, batch) for batch in batches], forked(model, launcher(model)), model.device)
        if attention is None:
            compile_ahead(first_reads(model), forked(model, launch), model.device)
        self._finish = {batch: self._capture_finish(batch) for batch in batches}

    def decoding(self, rows: int) -> int:
        return self._most if rows else 0

    def tokens_within(self, seconds: float, start: int, most: int) -> int:
        timed = sorted((tokens, spent) for (tokens, decoding), spent in self.seconds.items() if decoding)
        if not timed:
            return most
        config = self.model.config
        pair = 4 * config.q_size * (config.num_layers - 1) / ATTENTION_RATE  # of a token and a position
        fitting = [tokens for tokens, spent in timed if spent + tokens * (start + tokens / 2) * pair <= seconds]
        return min(max(fitting, default=timed[0][0]), most)

    def _capture_finish(self, batch: BatchDescriptor) -> Callable[[], None] | None:
        """None where its mode is to launch it: then all is loaded that it needs. No row may run."""
        mode, _ = self.dispatcher.plan(batch.kind, batch.rows)
        run, lines, attention = launcher(self.model), end_of(self.model, batch), self._steps.attention
        self._place.run(lambda: lines(forked(self.model, run, attention)))
        if mode == "none":
            return None
        between = partial(forked, self.model, launch, attention)
        return self._place.capture(mode, forked(self.model, run), between, lines)[0]

    def capture_next(self, most: int | None = None) -> bool:
        wanted = [key for key in self._wanted if key not in self._read and key not in self._failed]
        if most is not None:
            wanted = [key for key in wanted if key[0] <= most]
        if wanted:
            self.capture(*wanted[-1])
        return len(wanted) > 1

    def capture_all(self, most: int | None = None) -> None:
        before, started, free = len(self._read), time.perf_counter(), self._place.free_memory()
        while self.capture_next(most):
            pass
        taken, spent = free - self._place.free_memory(), time.perf_counter() - started
        log.info("captured %d prompt passes in %.1f s, %.0f MiB", len(self._read) - before, spent, taken / 2**20)

    @torch.inference_mode()
    def capture(self, tokens: int, decoding: int) -> None:
        """Capture that size. One that cannot be captured stays eager, which is said."""
        mode, key = self.dispatcher.plan_prompt(tokens)[0], (tokens, decoding)
        started, free = time.perf_counter(), self._place.free_memory()
        chunks = self.model.prompt.chunks
        kept = chunks.clone()
        try:
            chunks.zero_()  # so that what is run first writes nothing
            self._place.run(lambda: self._eager.launch((), tokens, decoding))
            rows, attention = decoding + tokens, self._eager.attention
            self._read[key], _ = self._place.capture(
                mode, forked(self.model, launch), partial(forked, self.model, launch, attention),
                lambda run: prefill.read(run, self.model, rows, decoding),
            )  # fmt: skip
            self.seconds[key] = self._place.seconds(self._read[key])
            taken, spent = free - self._place.free_memory(), time.perf_counter() - started
            log.debug(
                "captured prompts of %d tokens beside %d rows (%s) in %.0f ms, %.1f MiB: %.2f ms and attention",
                tokens, decoding, mode, 1e3 * spent, taken / 2**20, 1e3 * self.seconds[key],
            )  # fmt: skip
        except Exception as error:  # Triton's own are no RuntimeErrors
            log.warning("prompts of %d tokens stay uncaptured: %s", tokens, brief(error))
            self._failed.add(key)
        finally:
            chunks.copy_(kept)

    def read(self, chunks: Sequence[Chunk], tokens: int, decoding: int = 0) -> None:
        mode, padded = self.dispatcher.plan_prompt(tokens)
        key = padded, decoding
        if self._missed is not None and mode != "none" and key not in self._read and key not in self._failed:
            if key in self._missed:
                self.capture(*key)
            self._missed.add(key)
        replay = self._read.get(key)
        if replay is None:
            self._eager.read(chunks, tokens, decoding)
            return
        self.dispatcher.count_prompt(tokens, decoding, padded, mode)
        self._eager.chunks[:] = chunks
        replay()

    def finish(self, kind: str, rows: int, masked: bool = False) -> None:
        _, batch = self.dispatcher.plan(kind, rows, masked)
        if masked and batch not in self._finish:
            self._finish[batch] = capture_late(self.model, batch, self._capture_finish)
        if (replay := self._finish.get(batch)) is None:
            self._eager.finish(kind, rows, masked)
        else:
            replay()


def make_prompts(
    model: DecodeModel, steps: EagerSteps | StepGraphs, backend: str, attention: str = "triton"
) -> EagerPrompts | PromptGraphs:
    """Who runs the prompt passes of an engine whose decode passes `steps` runs. attention: one of
    dispatch.PROMPT_ATTENTION."""
    other = None if attention == "triton" else attention
    if isinstance(steps, StepGraphs):
        return PromptGraphs(model, steps, other, lazy=len(model.workspace.tokens) == 1)
    if backend == "torch":
        prompts = EagerPrompts(model, refer, refer, steps.dispatcher)
        prompts.attention = BLOCK_ATTENTION if model.fixed_chunk else None
        return prompts
    return EagerPrompts(model, launch, launcher(model), steps.dispatcher, other)
