"""Scheduler: selects the rows of each pass. It has no thread. Its work is done in calls of add, step and cancel."""

import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import GenerationError, QueueFull, counted, not_finite
from ..layout import LATE_TOKEN, NO_TOKEN, SCAN, Chunk, Entry
from ..results import TokenLogprobs
from ..state.slot import Slot
from ..step.decode import KINDS
from ..step.graphs import DecodePasses
from ..step.model import DecodeModel
from ..step.prompt_graphs import PromptPasses
from ..text.tokenizer import Tokenizer
from .masks import wait_for
from .output import Ring
from .policy import Policy
from .queue import Queue
from .request import Request

ADAPTER_SECONDS = 0.01  # Maximum time that a step waits for an adapter. Other threads submit requests between steps.


@dataclass(frozen=True, eq=False)
class Pass:
    """An enqueued pass.

    Args:
        slots: slots whose rows the pass decodes.
        allocated: for each slot, the number of positions that its pages stored when the pass was enqueued.
        rows: rows of each slot.
        drafts: for each slot, the number of drafts that it requested when the pass was enqueued.
        done: on a GPU, an event recorded after a pass that decodes no rows.
    """

    slots: list[Slot]
    allocated: list[int]
    rows: int
    drafts: list[int]
    done: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Load:
    """The load of a scheduler."""

    requests: int  # Number of active and waiting requests.
    waiting: int  # Number of requests without a slot.
    rows: int  # Number of rows of the next pass.
    pages: int
    free_pages: int
    preemptions: int
    snapshots: int
    snapshot_hits: int  # requests that have resumed from a snapshot


class Scheduler:
    """Scheduler over the slots of a model: requests run in the order of arrival.

    All state can be rebuilt from the requests and from the pages of the slots. After an interrupt or an error, the
    scheduler discards all other state. Each unfinished request then continues after its last output chunk, like a
    preempted request.

    Args:
        steps: returns the current object that runs decode passes
        prompts: returns the current object that runs prompt passes
        lookahead: passes that may be enqueued before the oldest pass has ended
        policy: limits for how requests share passes
    """

    def __init__(
        self,
        model: DecodeModel,
        tokenizer: Tokenizer | None,
        steps: Callable[[], DecodePasses],
        prompts: Callable[[], PromptPasses],
        lookahead: int,
        policy: Policy,
    ):
        self.queue = Queue(model, tokenizer, policy)
        self.slots = self.queue.slots
        self._model, self._ring, self.lookahead = model, Ring(model), lookahead
        self._steps, self._prompts = steps, prompts
        self._policy, self._chunk = policy, min(policy.chunk_tokens, self.slots.max_prompt_tokens())
        self._fixed, self._forms = model.fixed_chunk, model.adapter_forms
        self._in_flight: deque[Pass] = deque()
        self._incomplete = False  # Whether an operation has begun and has not finished.
        self.answered = False  # Whether a request has ended by itself. Captures in idle time wait for this.
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        """Whether a request is active or waits."""
        return bool(self.queue.requests)

    def load(self) -> Load:
        """Return the current load. Any thread may call this. The numbers may come from different passes."""
        requests, pages = len(self.queue.requests), self._model.kv.runnable
        waiting = max(requests - len(self.queue.admitted), 0)
        kept = self.slots.snapshots
        snapshots = (kept.count, kept.hits) if kept else (0, 0)
        return Load(
            requests, waiting, len(self.queue.rows), pages, self.slots.available(), self.preemptions, *snapshots
        )

    def reading(self) -> tuple[int, int, int] | None:
        """Return the progress of the oldest prompt that is being read, or None. Any thread may call this.

        The progress is (positions reused from the cache, positions that are cached or enqueued, total positions). For a
        preempted request the total includes its output.
        """
        for slot in tuple(self.queue.reading):
            request = slot.ref()
            return (request.reused or 0) if request else 0, slot.read, slot.position + 1
        return None

    def check_queue(self, submitted: int, dropped: int) -> None:
        """Raise QueueFull if there is no place for one more request. Any thread may call this.

        Args:
            submitted: number of requests that will be added before it.
            dropped: number of requests that the next step cancels; they take no place.
        """
        slots, limit = len(self.slots), self._policy.max_queue
        if limit is not None and len(self.queue.requests) + submitted - min(dropped, slots + limit) >= slots + limit:
            raise QueueFull(
                f"the queue is full: {counted(slots, 'request')} running and {limit:,} waiting; try again later, or "
                "raise max_queue"
            )

    def add(self, ref: weakref.ref[Request]) -> None:
        """Put a request at the end of the queue, unless it is in the queue or was dropped by its callers."""
        self._recover()
        if (request := ref()) is None or ref in self.queue.requests:
            return
        self._incomplete = True
        self.queue.add(request)
        self._incomplete = False

    def step(self) -> None:
        """Enqueue as many passes as allowed, then wait for the oldest pass in flight."""
        self._recover()
        self._incomplete = True
        self.queue.hold_references()
        while self._in_flight and (slots := self._in_flight[0].slots) and not any(slot.busy for slot in slots):
            self._in_flight.popleft()
        self._await_masks()
        while len(self._in_flight) <= self.lookahead and self._enqueue():
            pass
        if self._in_flight:
            self._drain()
        elif self.slots.adapters is not None and not self.queue.admitted:
            self.slots.adapters.wait(ADAPTER_SECONDS)  # The waiting requests need adapters that are being loaded.
        self._incomplete = False
        self.queue.release_references()

    def cancel(self, request: Request) -> bool:
        """End the request; return False if it had ended already. Its K/V stay in the cache."""
        if request.ref in self.queue.requests:
            self._recover()
        if request.ref not in self.queue.requests:
            return False
        self._incomplete = True
        request.cancelled = True
        request.end("cancelled")
        self.queue.finish(request.ref)
        self._incomplete = False
        return True

    def cancel_all(self) -> None:
        """Cancel all requests."""
        for ref in list(self.queue.requests):
            if (request := ref()) is not None:
                self.cancel(request)

    def assert_consistent(self) -> None:
        """Check the queue, the slots and the pages."""
        self._recover()
        self.queue.assert_consistent()

    # ---- prompts

    def _choose(self) -> list[tuple[Slot, int]]:
        """Choose the slots whose prompts the next pass reads, and the number of tokens of each.

        The order is the order of arrival, and includes requests that wait for a slot. A request with one token left to
        read joins the decode batch. In batch-invariant mode a pass reads one prompt, up to the next multiple of the
        fixed chunk, and never its last token. Prompts of models with recurrent state are cut at multiples of SCAN,
        where snapshots can be taken.
        """
        limit, chosen, reading = self._chunk, [], deque(self.queue.reading)
        if not self._fixed and any(slot.runs for slot in self.queue.rows) and (reading or self.queue.waiting):
            start = reading[0].read if reading else 0
            limit = self._prompts().tokens_within(self._policy.prompt_ms / 1e3, start, limit)
        while limit > 0 and (reading or self.queue.admit()):
            slot = reading.popleft() if reading else self.queue.reading[-1]
            if slot.left == 1:
                self.queue.begin(slot)
                continue
            if self._fixed:
                chosen.append((slot, min(slot.left - 1, limit - slot.read % limit)))
                break
            count = min(slot.left, limit)
            if self.slots.snapshots is not None and count < slot.left:
                whole = (slot.read + count) // SCAN * SCAN - slot.read
                count = whole if whole > 0 or chosen else count  # at least one prompt advances
            if count <= 0:
                break
            chosen.append((slot, count))
            limit -= count
        return chosen

    def _read(self, chosen: list[tuple[Slot, int]], rows: int) -> list[Chunk]:
        """Enqueue a pass that reads the chosen prompts and decodes the first `rows` rows. Return its chunks."""
        prompts, chunks = self._prompts(), []
        first = decoding = prompts.decoding(rows)
        for slot, count in chosen:
            if self._fixed:
                first = slot.read % self._fixed
            chunks.append(Chunk(slot.number, first, count, slot.read))
            first += count
        self.slots.write_chunks(chunks)
        adapters = self._adapting([*(slot for slot, _ in chosen), *self.queue.rows[:rows]])
        prompts.read(chunks, sum(chunk.count for chunk in chunks), decoding, adapters)
        return chunks

    def _adapting(self, slots: list[Slot]) -> bool:
        """Return whether a pass of these slots has adapters."""
        return True in self._forms and (False not in self._forms or any(slot.adapter for slot in slots))

    def _finish_chunks(self, chosen: list[tuple[Slot, int]], chunks: list[Chunk]) -> None:
        """Publish the pages that an enqueued pass fills. A slot whose prompt is complete gets a row."""
        for (slot, count), chunk in zip(chosen, chunks):
            slot.read += count
            self.slots.publish(slot, slot.read)
            if slot.left == 0:
                self.queue.begin(slot, chunk.rows.stop - 1)
            elif self._fixed and slot.left == 1:
                self.queue.begin(slot)

    # ---- passes

    def _enqueue(self) -> bool:
        """Enqueue a pass that reads prompts and decodes all rows that can run; return False if there are neither."""
        for slot in [slot for slot in self.queue.admitted if slot.needs_pages]:
            if slot.busy:
                self._grow(slot)
        chosen = self._choose()
        before = [slot for slot in self.queue.rows if slot.runs]
        while chosen:
            try:
                chunks = self._read(chosen, before[-1].row + 1 if before and not self._fixed else 0)
            except Exception as error:  # The error is usually out of memory. Only one request fails.
                if len(chosen) == 1:
                    slot = chosen[0][0]
                    slot.request.fail(error)
                    self.queue.finish(slot.ref)
                    return True
                chosen = chosen[:1]
            else:
                self._finish_chunks(chosen, chunks)
                break
        slots = [slot for slot in self.queue.rows if slot.runs]
        if not chosen and all(slot.lacks_mask for slot in slots):
            return False
        drafts = [slot.drafts.requested_drafts for slot in slots]
        rows = self._sample(slots, ends_prompts=bool(chosen) and not self._fixed) if slots else 0
        done = None
        if not slots and self._model.device.type == "cuda":
            done = torch.cuda.current_stream(self._model.device).record_event()
        self._in_flight.append(Pass(slots, [slot.allocated for slot in slots], rows, drafts, done))
        return True

    def _sample(self, slots: list[Slot], ends_prompts: bool) -> int:
        """Enqueue the launches that sample a token for these slots: a decode pass, or the end of a prompt pass.

        The kind of the pass is the most general one that any of the slots needs. Returns the number of rows of each
        slot.
        """
        kind = slots[0].request.kind if len(slots) == 1 else max((s.request.kind for s in slots), key=KINDS.index)
        count, masked, rows = slots[-1].row + 1, any(slot.mask for slot in slots), 1
        adapters = self._adapting(slots)
        self.slots.before_pass()
        if ends_prompts:
            self._prompts().finish(kind, count, masked, adapters)
        else:
            if self._model.verify and not masked and all(slot.request.logits is None for slot in slots):
                rows = self._steps().tokens(kind, count, [slot.drafts for slot in slots], adapters)
            self._steps().replay(kind, count, masked, rows, adapters)
        for slot in slots:
            if slot.request.logits is not None:
                position = slot.position + slot.in_flight
                slot.request.logits[position].copy_(self._model.workspace.logits[slot.row])
            slot.in_flight += 1
            slot.rows_in_flight += rows
        return rows

    def _grow(self, slot: Slot) -> None:
        """Give a row more pages before it needs them. If no page is free, preempt the youngest requests."""
        slots, waits = self.slots, slot.position + slot.in_flight >= slot.allocated
        if waits and slot.in_flight:
            return  # A pass in flight may end the request. Then no preemption is necessary.
        while not slots.make_room(1):
            if not waits:
                return
            self._preempt(youngest := self.queue.admitted[-1])
            if youngest is slot:
                return
        lacking = slots.pages_for(slot.end) - len(slot.pages)
        slots.grow(slot, slot.row, min(1 + slots.extra_pages(1), lacking))
        slot.allocated = slots.allocated(slot)

    def _await_masks(self) -> None:
        """If no pass is in flight, wait briefly for late masks. A request whose mask cannot be computed ends."""
        masked = [slot for slot in self.queue.rows if slot.mask]
        if masked and not self._in_flight:
            wait_for([slot.mask for slot in masked])
        for slot in masked:
            try:
                slot.mask.check()
            except GenerationError as error:
                slot.request.end("error", str(error))
                self.queue.finish(slot.ref)

    def _drain(self) -> None:
        """Wait for the oldest pass and append its tokens to their requests.

        Two kinds of rows write no entry and are skipped: rows of requests that an earlier pass ended, and rows whose
        pages were full when the pass was enqueued.
        """
        passed = self._in_flight.popleft()
        if passed.done:
            passed.done.synchronize()
        for slot, allocated, drafts in zip(passed.slots, passed.allocated, passed.drafts):
            slot.in_flight -= 1
            slot.rows_in_flight -= passed.rows
            following, place = 0 if slot.position < allocated else -1, 0
            sampled = not slot.known  # Drafts of known tokens are always right, so they do not count.
            while following >= 0 and slot.busy:
                entry = self._ring.entry(slot.number, slot.generation, slot.seen)
                if sampled:
                    slot.request.drafted += entry.drafted if place == 0 else 0
                    slot.request.accepted += place > 0
                if place == 0:
                    slot.covered = slot.position + 1
                    decided = drafts if sampled else 0
                    slot.drafts.learn(decided, entry.drafted, entry.following, entry.requested_drafts)
                self._process_entry(slot, entry)
                following, place = entry.following - 1, place + 1

    def _process_entry(self, slot: Slot, entry: Entry) -> None:
        """Process one token of a slot."""
        request, token = slot.request, entry.token
        count = request.params.logprobs
        logprobs = None if count is None else self._ring.logprobs(slot.number, slot.seen, count)
        slot.seen += 1
        if token == LATE_TOKEN:
            return
        slot.position += 1
        if token == NO_TOKEN:
            self.slots.invalidate(slot)
            if slot.reused and request.reuse_prefix:
                # The reused K/V may be the cause, so the request computes all K/V itself.
                request.reuse_prefix, request.reused = False, None
                self.queue.requeue(slot)
                return
        else:
            slot.filled = slot.position  # The pass has ended, so its K/V are present.
        if slot.known and token != NO_TOKEN:
            slot.known -= 1
            return
        slot.stopped = token in request.stop_ids or slot.position == slot.end
        self._push(slot, token, logprobs)
        if request.ended:
            self.answered = True
            self.queue.finish(slot.ref)

    def _push(self, slot: Slot, token: int, logprobs: TokenLogprobs | None) -> None:
        """Append a sampled token to its request. If the request has a grammar, start computing the next mask."""
        request, mask = slot.request, slot.mask
        if token == NO_TOKEN:
            number = len(request.chunks) + 1
            position = number - 1 if request.scores else request.prompt_tokens + number - 2
            request.end("error", not_finite(number, position, self._model.weights.dtype))
        elif not mask or token in request.stop_ids:
            request.push(token, logprobs)
        else:
            try:
                request.push(token, logprobs, last=mask.accept(token))
                if not request.ended:
                    mask.next(slot.position)
            except GenerationError as error:
                request.end("error", str(error))

    def _preempt(self, slot: Slot) -> None:
        """Move an active request to the front of the queue. Its K/V may be evicted."""
        self.preemptions += 1
        self.queue.requeue(slot)

    def _recover(self) -> None:
        """Discard the partial state of an operation that an interrupt or an error ended."""
        if self._incomplete:
            self.queue.recover()
            self._in_flight.clear()
            self._incomplete = False
