"""Queue: the requests that wait for a slot, and the slots of active requests."""

import weakref
from array import array
from collections import Counter, deque
from collections.abc import Hashable

from ..layout import OWN_ROW, SCAN
from ..state.offloaded_slots import OffloadedSlots
from ..state.slot import Slot
from ..state.slots import Slots, common_prefix
from ..step.model import DecodeModel
from ..text.tokenizer import Tokenizer
from .masks import Masks
from .policy import Policy
from .request import Request


class Queue:
    """The queue, which knows the state of each request: it waits, its prompt is being read, or it has a row.

    `recover` rebuilds all other attributes from the set of requests. References to requests
    are weak; see `hold_references`.
    """

    def __init__(self, model: DecodeModel, tokenizer: Tokenizer | None, policy: Policy):
        self.slots = (OffloadedSlots if model.kv.offload else Slots)(model, policy.prefix_sharing)
        self._tokenizer, self._masks = tokenizer, Masks(model)
        self._sharing, self._fixed = policy.prefix_sharing, model.fixed_chunk
        self.requests: dict[weakref.ref[Request], None] = {}  # Requests that have not ended, in the order of arrival.
        self.reset()

    def reset(self) -> None:
        """Let all requests wait, as if none of them ever had a slot."""
        self.waiting = deque(self.requests)  # Waiting requests in order. Some may have ended.
        self.admitted: list[Slot] = []  # Slots of all active requests, the oldest first.
        self.reading: list[Slot] = []  # Slots whose prompts are being read. Their requests are the youngest.
        self.rows: list[Slot] = []  # The other slots. The index is the row.
        # The last request that could not be admitted, and the state at that time.
        self._blocked: tuple[weakref.ref[Request], int, list[Slot]] | None = None

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue, unless its reader fails."""
        request.resume(self._tokenizer)
        if not request.ended:
            self.requests[request.ref] = None
            self.waiting.append(request.ref)

    def hold_references(self) -> None:
        """Keep strong references to the active requests until `release_references`, which ends a step.

        Between steps only callers have references to requests. A request that all callers dropped is cancelled.
        """
        for slot in [*self.admitted]:
            slot.request = slot.ref()
            if slot.request is None:
                self.finish(slot.ref)

    def release_references(self) -> None:
        """Drop the strong references to the active requests."""
        for slot in [*self.admitted]:
            slot.request = None

    def _next(self) -> tuple[Request, int] | None:
        """Return the first waiting request that can start, and the number of its adapter, or None.

        A request whose adapter is being loaded lets later ones pass. If requests use all adapters on the device, later
        requests with adapters wait too, so that each request starts at some time. Requests without an adapter
        pass the waiting request: the request whose end frees a place for its adapter also frees a slot.
        """
        adapters_wait = False
        for ref in [*self.waiting]:
            request = ref() if ref in self.requests else None
            if request is None:
                self.waiting.remove(ref)
            elif request.adapter is None:
                return request, 0
            elif not adapters_wait:
                try:
                    number = self.slots.acquire_adapter(request.adapter)
                except Exception as error:  # For example, the GPU is lost. Only this request fails.
                    request.fail(error)
                    self.finish(ref)
                    continue
                if number is not None:
                    return request, number
                if not self.slots.residents.loading(request.adapter):
                    if len(self.admitted) == len(self.slots):
                        return None
                    adapters_wait = True
        return None

    def admit(self) -> bool:
        """Give the first waiting request that can start a slot and pages; return whether that was possible."""
        if (following := self._next()) is None or all(slot.busy for slot in self.slots):
            return False
        request, adapter = following
        slots, tokens, ref = self.slots, request.tokens, request.ref
        if self._blocked == (
            ref,
            slots.pages.changes,
            self.reading,
        ):  # A long prompt should not be matched again.
            return False
        position = 0 if request.scores else (request.prompt_tokens if self._fixed else len(tokens)) - 1
        reusable = tokens[: position if request.reuse_prefix else 0]
        pending = self._prefix_is_pending(reusable, request.salt)
        if pending or (slot := slots.admit(reusable, position + 1, request.salt)) is None:
            self._blocked = ref, slots.pages.changes, [*self.reading]
            return False
        self._blocked = None
        self.waiting.remove(ref)
        slots.set_adapter(slot, adapter)
        slot.tokens, slot.ref, slot.request = tokens, ref, request
        slot.read, slot.position, slot.end = slot.filled, position, request.limit - 1
        slots.plan_snapshots(slot, position, chat=not request.continues)
        slot.known = len(request.chunks) if request.scores else len(tokens) - 1 - position
        if request.reused is None:
            request.reused = slot.read
        if request.grammar:
            slot.mask = self._masks.follow(request.grammar, tokens[request.prompt_tokens :].tolist())
        self.reading.append(slot)
        self.admitted.append(slot)
        needed = slots.pages_for(position + 1)
        needed += slots.extra_pages(needed - len(slot.pages))
        slots.write_tokens(slot, tokens, min(needed * slots.page, slot.end))
        return True

    def _prefix_is_pending(self, ids: "array[int]", salt: Hashable) -> bool:
        """Return whether a prompt that is being read will soon add pages to the cache that match more of `ids`.

        If so, the request waits for these pages. If the model has recurrent state, the running prompt also takes a
        snapshot where the two diverge, unless it has read on.
        """
        if not self._sharing:
            return False
        page, others = self.slots.page, [other for other in self.reading if other.salt == salt]
        common = [(min(common_prefix(other.tokens, ids), other.position), other) for other in others]
        if self.slots.snapshots is None:
            pending = max((end for end, _ in common), default=0) // page * page
        else:
            pending = max((_pending_snapshot(other, end) for end, other in common), default=0)
        return pending > 0 and self.slots.cache.match(ids, salt).tokens(page) < pending

    def begin(self, slot: Slot, source: int = OWN_ROW) -> None:
        """Give the slot the next row of decode passes.

        The prompt has been read up to its last token. Row `source` of a prompt pass has read the last token, or the
        slot's first decode pass reads it (OWN_ROW).
        """
        request = slot.request
        self.slots.begin(
            slot,
            len(self.rows),
            request.params,
            position=slot.position,
            n_known=len(request.tokens),
            limit=request.limit,
            stop_ids=request.stop_ids,
            prompt=request.prompt_tokens,
            source=source,
        )
        if slot.mask:
            slot.mask.begin(slot.number, slot.generation, slot.position + slot.known)
        slot.row, slot.allocated = len(self.rows), self.slots.allocated(slot)
        self.rows.append(slot)
        self.reading.remove(slot)

    def finish(self, ref: weakref.ref[Request]) -> None:
        """Remove a request that has ended. Entries of passes in flight for its slot are not read."""
        if slot := next((slot for slot in self.admitted if slot.ref is ref), None):
            self._release_slot(slot)
        self.requests.pop(ref, None)
        self._blocked = None

    def requeue(self, slot: Slot) -> None:
        """Release the slot, and let its request wait before all others."""
        self._release_slot(slot)
        self.waiting.appendleft(slot.ref)

    def _release_slot(self, slot: Slot) -> None:
        """Release the slot. The last row moves to its row, so that rows stay contiguous."""
        if slot.mask:
            slot.mask.drop()
        self.admitted.remove(slot)
        if slot in self.reading:
            self.reading.remove(slot)
        else:
            last = self.rows.pop()
            if last is not slot:
                self.rows[slot.row] = last
            self.slots.remove_row(slot.row, last.row)
            last.row = slot.row
        self.slots.release(slot)
        slot.request = None

    def recover(self) -> None:
        """Let all unfinished requests wait again. This works after an interrupt at any line."""
        left = [request for ref in self.requests if (request := ref()) is not None and not request.ended]
        self.requests = {request.ref: None for request in left}
        for slot in self.admitted:
            if slot.mask:
                slot.mask.drop()
        self.slots.recover()
        self.reset()
        for request in left:
            request.resume(self._tokenizer)
            if request.ended:
                del self.requests[request.ref]

    def assert_consistent(self) -> None:
        """Check that each request has one state, that rows and slots match, and that no page is lost."""
        admitted = self.admitted
        known = [ref for ref in self.waiting if ref in self.requests] + [slot.ref for slot in admitted]
        assert len(known) == len(set(known)) and set(known) == set(self.requests), "a request is lost or listed twice"
        assert [slot.row for slot in self.rows] == list(range(len(self.rows)))
        assert Counter(self.rows + self.reading) == Counter(admitted)
        assert set(admitted) == {slot for slot in self.slots if slot.busy}
        assert all(slot.position <= slot.allocated == self.slots.allocated(slot) for slot in self.rows)
        self.slots.assert_consistent()


def _pending_snapshot(slot: Slot, end: int) -> int:
    """Return the last position up to `end` of a snapshot that the slot will add to the prefix tree, or 0."""
    if (last := end // SCAN * SCAN) > slot.read:
        slot.planned.add(last)
        return last
    return max((snapshot.position for snapshot in slot.snapshots if snapshot.position <= end), default=0)
