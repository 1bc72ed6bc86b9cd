"""Output: from the ring that the device writes to tokens, from tokens to text, from text to pieces."""

import time

import torch

from .. import layout
from ..errors import GenerationError, not_finite
from ..results import Piece, Timings, TokenLogprobs, Usage
from ..step.state import DecodeModel
from ..text.stop_strings import StopStrings
from ..text.tokenizer import Tokenizer
from .request import Request


class Ring:
    """Reads the entries that steps leave in host memory."""

    def __init__(self, model: DecodeModel):
        self._workspace, self._device = model.workspace, model.device
        self._entries = model.workspace.out.numpy()

    def token(self, slot: int, generation: int, step: int) -> int:
        """The token of a step, or NO_TOKEN; waits for it. The device writes it there: no copy, no synchronisation.

        Raises GenerationError where everything enqueued has ended without it.
        """
        place, polls = step % layout.RING, 0
        wanted = layout.ring_entry(generation, step, 0)
        while (value := int(self._entries[slot, place])) & ~layout.NO_TOKEN != wanted:
            polls += 1
            time.sleep(0)  # let the thread that draws the screen run
            if polls % 1024 == 0 and self._idle() and int(self._entries[slot, place]) & ~layout.NO_TOKEN != wanted:
                raise GenerationError(f"step {step + 1} ended without a token")
        return value & layout.NO_TOKEN

    def _idle(self) -> bool:
        return self._device.type != "cuda" or torch.cuda.current_stream(self._device).query()

    def logprobs(self, slot: int, step: int, count: int) -> TokenLogprobs:
        """Of the token of a step that was seen, with the `count` likeliest."""
        ws, place = self._workspace, step % layout.RING
        values = ws.out_logprobs[slot, place, : count + 1].tolist()
        ids = ws.out_top_ids[slot, place, :count].tolist()
        return TokenLogprobs(values[0], tuple(zip(ids, values[1:])))


class Output:
    """Turns a request's tokens into its pieces, the last of which says how it ended."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None, dtype: torch.dtype):
        self._request, self._dtype = request, dtype
        self._detokenizer = tokenizer.detokenizer(request.before) if tokenizer else None
        self._stops = StopStrings(request.params.stop)
        self._first: float | None = None  # when the first token came
        self.tokens = 0
        self.ended = False

    def push(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """The next token, or NO_TOKEN: a step whose logits were not finite."""
        now = time.perf_counter()
        self._first = self._first or now
        if token == layout.NO_TOKEN:
            position = len(self._request.ids) + self.tokens - 1
            self._end("error", now, not_finite(self.tokens + 1, position, self._dtype))
            return
        self.tokens += 1
        stopped = token in self._request.stop_ids
        text = "" if stopped or self._detokenizer is None else self._stops.push(self._detokenizer.push(token))
        self._request.pieces.append(Piece(token, text, logprobs))
        if stopped or self._stops.hit:
            self._end("stop", now)
        elif self.tokens == self._request.steps:
            self._end("length", now)

    def _end(self, reason: str, now: float, error: str | None = None) -> None:
        self.ended = True
        request, tail = self._request, ""
        if self._detokenizer is not None and not self._stops.hit:
            tail = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        decode = now - self._first
        rate = (self.tokens - 1) / decode if self.tokens > 1 and decode > 0 else 0.0
        request.pieces.append(
            Piece(
                None,
                tail,
                finish_reason=reason,
                usage=Usage(len(request.ids), request.reused, self.tokens),
                timings=Timings(self._first - request.started, decode, rate),
                error=error,
            )
        )
