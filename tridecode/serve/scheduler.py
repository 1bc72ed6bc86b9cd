"""Scheduler: whose rows the next pass holds. It does nothing by itself: add, step, cancel."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from ..layout import NO_TOKEN
from ..step.prefill import prefill
from ..step.state import DecodeModel
from ..text.tokenizer import Tokenizer
from .output import Output, Ring
from .request import Request
from .slots import Slots


@dataclass
class Running:
    """A request that has its slot. embedded: the token whose K/V the next step leaves; tokens: those before it."""

    request: Request
    output: Output
    generation: int
    tokens: list[int]
    embedded: int
    seen: int = 0  # steps whose entries were read


class Scheduler:
    """One slot: a request that is added while another one runs takes its place.

    run_pass(kind): enqueues one pass. ahead: passes that are enqueued before the one awaited has ended.
    """

    def __init__(
        self, model: DecodeModel, tokenizer: Tokenizer | None, run_pass: Callable[[str], None], ahead: int
    ):
        self.slots = Slots(model)
        self._model, self._tokenizer, self._run_pass, self._ahead = model, tokenizer, run_pass, ahead
        self._ring = Ring(model)
        self._running: Running | None = None
        self._in_flight: deque[Running] = deque()

    def add(self, request: Request) -> None:
        """Give the request the slot, read its prompt, and enqueue its first passes."""
        self.cancel()
        request.slot, held = 0, self.slots.held[0]
        ids, last = request.ids, len(request.ids) - 1
        request.reused = common_prefix(held.tokens, ids[:last]) if request.reuse_prefix else 0
        held.tokens = ids[: request.reused]  # the rest counts once a step on it has given finite logits
        self.slots.write_tokens(0, ids, request.limit - 1)
        prefill(self._model, request.reused, last)
        generation = self.slots.begin(
            0, 0, request.params, position=last, n_known=len(ids), limit=request.limit, stop_ids=request.stop_ids
        )
        output = Output(request, self._tokenizer, self._model.weights.dtype)
        self._running = Running(request, output, generation, ids[:last], ids[last])
        for _ in range(self._ahead):
            self._enqueue()

    def step(self) -> None:
        """Enqueue a pass where one is wanted, and wait for the oldest in flight; pieces go to their requests."""
        self._enqueue()
        running = self._in_flight.popleft()
        request = running.request
        token = self._ring.token(request.slot, running.generation, running.seen)
        wanted = request.params.logprobs
        logprobs = None if wanted is None else self._ring.logprobs(request.slot, running.seen, wanted)
        running.seen += 1
        running.tokens.append(running.embedded)  # its step has run: its K/V are there
        # Attention multiplies masked values by 0, and 0 * NaN is NaN: nothing in the cache is above suspicion.
        self.slots.held[request.slot].tokens = [] if token == NO_TOKEN else running.tokens
        running.embedded = token
        running.output.push(token, logprobs)
        if running.output.ended:
            self._leave()

    def cancel(self, request: Request | None = None) -> None:
        """End `request`, or whichever runs; what it left in the cache stays."""
        if self._running and request in (None, self._running.request):
            self._running.request.cancelled = True
            self._leave()

    def _enqueue(self) -> None:
        request = self._running.request
        if request.enqueued < request.steps:
            self._run_pass(request.kind)
            request.enqueued += 1
            self._in_flight.append(self._running)

    def _leave(self) -> None:
        # What is still in flight belongs to a generation that nobody awaits any more.
        self._in_flight.clear()  # first: where Ctrl-C comes between the two, the next `cancel` does both again
        self._running = None


def common_prefix(held: list[int], ids: list[int]) -> int:
    """Leading tokens that both have."""
    return next((i for i, (a, b) in enumerate(zip(held, ids)) if a != b), min(len(held), len(ids)))
