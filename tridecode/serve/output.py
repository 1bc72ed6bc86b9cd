"""Output: from the ring that the device writes to tokens, from tokens to text, from text to pieces."""

import time

import torch

from .. import layout
from ..errors import GenerationError, not_finite
from ..results import Piece, Timings, TokenLogprobs, Usage
from ..step.model import DecodeModel
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from .request import Job

PATIENCE = 120.0  # seconds for which a pass is awaited


class Ring:
    """Reads the entries that steps leave in host memory."""

    def __init__(self, model: DecodeModel):
        self._workspace, self._device = model.workspace, model.device
        self._entries = memoryview(model.workspace.out.numpy())  # which gives Python's numbers, and sooner than numpy

    def entry(self, slot: int, generation: int, step: int) -> layout.Entry:
        """The entry of a step; waits for it. The device writes it there: no copy, no synchronisation.

        Raises GenerationError where everything enqueued has ended without it, or does not end.
        """
        found = self._look(slot, generation, step)
        return self._wait(slot, generation, step) if found is None else found

    def _look(self, slot: int, generation: int, step: int) -> layout.Entry | None:
        return layout.entry_of(self._entries[slot, step % layout.RING], generation, step)

    def _wait(self, slot: int, generation: int, step: int) -> layout.Entry:
        polls, since = 0, time.monotonic()
        while (found := self._look(slot, generation, step)) is None:
            polls += 1
            time.sleep(0)  # let the thread that draws the screen run
            if polls % 1024:
                continue
            idle, late = self._idle(), time.monotonic() - since > PATIENCE
            if (idle or late) and not self._look(slot, generation, step):
                how = "ended without a token" if idle else f"has not ended in {PATIENCE:.0f} seconds; the GPU hangs"
                raise GenerationError(f"step {step + 1} {how}")
        return found

    def _idle(self) -> bool:
        return self._device.type != "cuda" or torch.cuda.current_stream(self._device).query()

    def logprobs(self, slot: int, step: int, count: int) -> TokenLogprobs:
        """Of the token of a step that was seen, with the `count` likeliest."""
        ws, place = self._workspace, step % layout.RING
        values = ws.out_logprobs[slot, place, : count + 1].tolist()
        ids = ws.out_top_ids[slot, place, :count].tolist()
        return TokenLogprobs(values[0], tuple(zip(ids, values[1:])))


class Output:
    """Turns a job's tokens into its pieces, the last of which says how it ended; goes on where the pieces end."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None, dtype: torch.dtype):
        self._job, self._dtype = job, dtype
        self._detokenizer = tokenizer.detokenizer(job.before) if tokenizer else None
        self._stops = StopStrings(job.params.stop)
        for piece in job.pieces:
            self._text(piece.token_id)

    def push(self, token: int, logprobs: TokenLogprobs | None, last: bool = False) -> None:
        """The next token, or NO_TOKEN: a step whose logits were not finite. last: by its grammar."""
        job = self._job
        job.first = job.first or time.perf_counter()
        before = len(job.pieces)
        if token == layout.NO_TOKEN:
            position = before if job.scores else len(job.ids) + before - 1
            self.end("error", not_finite(before + 1, position, self._dtype))
            return
        stopped = token in job.stop_ids
        piece = Piece(token, "" if stopped else self._text(token), logprobs)
        if stopped or last or self._stops.hit:
            self.end("stop", pieces=[piece])
        elif before + 1 == (len(job.ids) if job.scores else job.limit - len(job.ids)):
            self.end("length", pieces=[piece])
        else:
            job.pieces.append(piece)

    def _text(self, token: int) -> str:
        return "" if self._detokenizer is None else self._stops.push(self._detokenizer.push(token))

    def end(self, reason: str, error: str | None = None, pieces: list[Piece] | None = None) -> None:
        """Add `pieces`, the rest of the text and how it ended, all at once: no interrupt comes between them."""
        job, tail, now = self._job, "", time.perf_counter()
        pieces = pieces or []
        if self._detokenizer is not None and not self._stops.hit:
            tail = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        tokens, first = len(job.pieces) + len(pieces), job.first or now
        decode = now - first
        rate = (tokens - 1) / decode if tokens > 1 and decode > 0 else 0.0
        last = Piece(
            None,
            tail,
            finish_reason=reason,
            usage=Usage(len(job.ids), job.reused or 0, tokens, job.drafted, job.accepted),
            timings=Timings(first - job.started, decode, rate),
            error=error,
            stop_string=self._stops.hit,
        )
        job.pieces.extend((*pieces, last))
