"""OffloadedSlots: slots whose pages are on the device or in host memory, and move between the two."""

from array import array
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice

import torch

from ..layout import Chunk
from .offload import WRITTEN
from .pages import OutOfPages
from .slot import Slot
from .slots import STAGED_WRITES, SlotModel, Slots, StagingBuffer


class OffloadedSlots(Slots):
    """Slots whose pages are on the device or in host memory.

    Page numbers are independent of the location of a page; `_location` maps a number to its location. A page gets a
    place on the device just before the first pass that writes it. If the device is full, unused pages move to the host
    first, then the oldest full pages of active requests. Each of the latter gets a place in the ring, to which every
    pass copies the page layer by layer. Pages on the host that a new request reuses are copied to the device, if it has
    room.

    Copies and table updates run in stream order, between passes. Therefore no page moves during a pass, and the host
    does not wait. While a prompt is read, the pages that the next chunk will displace are copied in advance on a
    separate stream, during the pass that still reads them.

    The active requests together never have more pages than the device and the ring can store.
    """

    def __init__(self, model: SlotModel, sharing: bool = True):
        super().__init__(model, sharing)
        assert model.kv.offload is not None
        self._kv, self._offload = model.kv, model.kv.offload
        self._location: dict[int, int] = {}  # Written page -> device page, or ~(host page).
        self._ring_place: dict[int, int] = {}  # Page of a slot that is on the host -> place in the ring.
        self._stale: set[int] = set(range(len(self)))  # Slots whose tables must be written before the next pass.
        self._fetched_stale = False
        self._precopied: dict[int, int] = {}  # Page on the device -> host page of its copy, which may be pending.
        self._copy_stream = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        staged = max(len(self), STAGED_WRITES)
        self._tables = StagingBuffer(model.kv.page_table, self._offload.fetched[None], count=staged)
        self._refreshed_at: int | None = None  # PagePool.changes at the last refresh.
        self._refresh()

    # ---- bookkeeping on the host

    def max_prompt_tokens(self) -> int:
        """Return the maximum number of prompt tokens in one pass; all their pages must fit on the device."""
        pages = len(self._kv.pool) - WRITTEN * len(self)
        return min(super().max_prompt_tokens(), pages * self.page)

    def available(self) -> int:
        """Return the number of pages that requests can still get."""
        return min(super().available(), self._unreserved())

    def make_room(self, pages: int) -> bool:
        """Evict unused pages until `pages` pages are free; return whether that succeeded."""
        return pages <= self._unreserved() and super().make_room(pages)

    def _take(self, pages: int) -> list[int]:
        self._refresh()  # Drop the locations of free pages before their numbers are reused.
        return super()._take(pages)

    def extra_pages(self, needed: int) -> int:
        """Return 0, because the device has few pages and a page is taken only when it is written."""
        return 0

    def _unreserved(self) -> int:
        """Return how many more pages active requests may have together."""
        return self._kv.runnable - len(self._pages_of_slots())

    def _pages_of_slots(self) -> set[int]:
        return {page for slot in self for page in slot.pages}

    def _on_host(self, page: int) -> bool:
        return self._location.get(page, 0) < 0

    def _on_device(self, page: int) -> bool:
        return self._location.get(page, -1) >= 0

    def _refresh(self) -> None:
        """Recompute the free lists and the ring from the pool's counts, `_location` and the slots' pages.

        If no page was released since the last call, they are up to date.
        """
        if self._refreshed_at == self.pages.changes:
            return
        in_slots = self._pages_of_slots()
        self._location = {page: where for page, where in self._location.items() if self.pages.holders(page)}
        if any(not self.pages.holders(page) or not self._on_device(page) for page in self._precopied):
            self._discard_precopied()
        used = {*self._location.values()} | {~place for place in self._precopied.values()}
        self._free_device = [page for page in reversed(range(len(self._kv.pool))) if page not in used]
        self._free_host = [page for page in reversed(range(len(self._offload.host))) if ~page not in used]
        ring = {page: place for page, place in self._ring_place.items() if page in in_slots and self._on_host(page)}
        self._fetched_stale |= ring != self._ring_place
        self._ring_place = ring
        places = set(ring.values())
        self._free_ring = [place for place in reversed(range(self._offload.plan.ring)) if place not in places]
        self._refreshed_at = self.pages.changes

    def admit(self, ids: "array[int]", positions: int, salt: Hashable = "") -> Slot | None:
        """Assign an idle slot to a request as `Slots.admit`, and copy its pages on the host to the device."""
        self._refresh()
        slot = super().admit(ids, positions, salt)
        if slot is not None:
            slot.full = slot.filled // self.page
            self._copy_back(slot, self.pages_for(positions) - len(slot.pages))
        return slot

    @torch.inference_mode()
    def _copy_back(self, slot: Slot, new_pages: int) -> None:
        """Copy the slot's pages on the host to the device, the last positions first, and leave room for `new_pages`.

        The pages that do not fit get a place in the ring.
        """
        self._refresh()
        free = len(self._kv.pool) - new_pages - sum(not self._on_host(page) for page in self._pages_of_slots())
        on_host = [page for page in slot.pages if self._on_host(page) and page not in self._ring_place]
        copied = on_host[max(len(on_host) - max(free, 0), 0) :]
        for page in on_host[: len(on_host) - len(copied)]:
            self._add_to_ring(page)
        for page in reversed(copied):
            self._to_device([page])

    def publish(self, slot: Slot, read: int) -> None:
        """Add the whole pages of the first `read` tokens to the prefix tree; they may now leave the device."""
        slot.full = read // self.page
        super().publish(slot, read)

    def release(self, slot: Slot) -> None:
        """Make the slot idle as `Slots.release`."""
        super().release(slot)
        self._refresh()

    def recover(self) -> None:
        """Make all slots idle as `Slots.recover`, and write all tables again before the next pass."""
        self._discard_precopied()
        super().recover()
        self._refresh()
        self._stale, self._fetched_stale = set(range(len(self))), True

    def assert_consistent(self) -> None:
        """Check the slots as `Slots.assert_consistent`, and the locations of their pages.

        Each place on the device, on the host and in the ring is free or has one page. Exactly the host pages of slots
        are in the ring.
        """
        super().assert_consistent()
        self._refresh()
        free = [sorted(places) for places in (self._free_device, self._free_host, self._free_ring)]
        self._refreshed_at = None
        self._refresh()
        assert free == [sorted(places) for places in (self._free_device, self._free_host, self._free_ring)]
        in_slots = self._pages_of_slots()
        places = [*self._location.values(), *(~place for place in self._precopied.values())]
        assert len(set(places)) == len(places), "two pages have the same place"
        assert all(page in self._location for page in self.cache.pages()), "a page in the prefix tree has no location"
        assert {page for page in in_slots if self._on_host(page)} == self._ring_place.keys(), (
            "the ring does not hold exactly the pages of active requests that are on the host"
        )
        assert len(set(self._ring_place.values())) == len(self._ring_place), "two pages have the same place in the ring"
        assert len(in_slots) <= self._kv.runnable, "active requests have more pages than the device and the ring store"

    # ---- moving pages, in stream order

    @torch.inference_mode()
    def ensure(self, slot: Slot, first: int, end: int) -> None:
        """Move the pages of the slot's positions [first, end) to the device for writing. Raises OutOfPages."""
        pages = slot.pages[first // self.page : self.pages_for(end)]
        # The slot writes the last page of an earlier request, which has a copy on the host.
        if not self._precopied.keys().isdisjoint(pages):
            self._discard_precopied()
            self._refresh()
        if missing := [page for page in pages if not self._on_device(page)]:
            self._to_device(missing)
            self._stale.add(slot.number)

    def _to_device(self, pages: list[int]) -> None:
        """Give each page a place on the device, and copy its content if it has been written. Raises OutOfPages."""
        # These pages come first, because evicted pages may need their places in the ring.
        for page in self._ring_place.keys() & pages:
            self._free_ring.append(self._ring_place.pop(page))
            self._fetched_stale = True
        candidates = self._eviction_candidates()
        # One page at a time, because each page from the host frees a host page for an eviction.
        for number, page in enumerate(pages):
            self._free_device_page(candidates, pages[number:])
            place, before = self._free_device.pop(), self._location.get(page)
            if before is not None:
                self._kv.pool[place].copy_(self._offload.host[~before], non_blocking=True)
                self._free_host.append(~before)
            self._location[page] = place
            self._mark_stale(page)

    def _free_device_page(self, candidates: Iterator[int], needed: list[int]) -> None:
        """Free a place on the device for the first of the pages `needed`, by evicting one of `candidates`.

        Raises:
            OutOfPages: the host is full, or no page can leave the device.
        """
        if self._free_device:
            return
        self._refresh()
        self._evict_precopied()
        # Both memories are full, so remove pages from the prefix tree.
        while not (self._free_device or self._free_host):
            if not self.cache.evict(max(sum(page not in self._location for page in needed), 1)):
                raise OutOfPages("no page of the host is free")
            self._refresh()
        if not self._free_device:
            if (page := next(candidates, None)) is None:
                raise OutOfPages(f"none of {len(self._kv.pool)} pages can leave the device")
            self._to_host(page)

    def _eviction_candidates(self) -> Iterator[int]:
        """Yield pages that may leave the device: unused pages, then full pages of requests in the order of positions.

        Pages of requests are yielded only while the ring has free places.
        """
        in_slots = self._pages_of_slots()
        for page in self.cache.pages():
            if page not in in_slots and self._on_device(page) and page not in self._precopied:
                yield page
        # A slot that `admit` has not marked busy yet contains only reused pages. All but the last of them are full.
        full = [slot.full if slot.busy else len(slot.pages) - 1 for slot in self]
        for place in range(max(full)):
            for filled, slot in zip(full, self):
                if place < filled and self._free_ring and self._on_device(page := slot.pages[place]):
                    if page not in self._precopied:
                        yield page

    def _to_host(self, page: int) -> None:
        """Copy a page of the device to the host, and free its place on the device."""
        place = self._free_host.pop()
        self._offload.host[place].copy_(self._kv.pool[self._location[page]], non_blocking=True)
        self._mark_evicted(page, place)

    def _mark_evicted(self, page: int, place: int) -> None:
        """Set the page's location to `place` on the host, where a copy of it is, and free its place on the device."""
        self._free_device.append(self._location[page])
        self._location[page] = ~place
        if any(page in slot.pages for slot in self):
            self._add_to_ring(page)

    def _precopy(self, slots: set[int]) -> None:
        """Copy the pages that the next chunk of these slots will displace, during the pass that is enqueued next."""
        lacking = sum(page not in self._location for slot in slots for page in self[slot].pages)
        lacking = min(lacking, self.pages_for(self.max_prompt_tokens())) - len(self._free_device) - len(self._precopied)
        if lacking <= 0:
            return
        if self._copy_stream is not None:
            self._copy_stream.wait_stream(torch.cuda.current_stream(self.model.device))
        with nullcontext() if self._copy_stream is None else torch.cuda.stream(self._copy_stream):
            for page in islice(self._eviction_candidates(), min(lacking, len(self._free_host))):
                self._precopied[page] = place = self._free_host.pop()
                self._offload.host[place].copy_(self._kv.pool[self._location[page]], non_blocking=True)

    def _evict_precopied(self) -> None:
        """Move the pages that were copied in advance to the host, while the ring has room for them."""
        in_slots, precopied = self._pages_of_slots(), self._precopied
        self._discard_precopied()
        for page, place in precopied.items():
            if page in in_slots and not self._free_ring:
                self._free_host.append(place)
            else:
                self._mark_evicted(page, place)

    def _discard_precopied(self) -> None:
        """Drop the copies made in advance, and let the current stream wait until they have ended."""
        if not self._precopied:
            return
        if self._copy_stream is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self._copy_stream)
        self._precopied, self._refreshed_at = {}, None

    def _add_to_ring(self, page: int) -> None:
        self._ring_place[page] = self._free_ring.pop()
        self._fetched_stale = True
        self._mark_stale(page)

    def _mark_stale(self, page: int) -> None:
        self._stale.update(slot.number for slot in self if page in slot.pages)

    @torch.inference_mode()
    def _copy_page(self, source: int, target: int) -> None:
        self._to_device([target])
        location = self._location[source]
        content = self._kv.pool[location] if location >= 0 else self._offload.host[~location]
        self._kv.pool[self._location[target]].copy_(content, non_blocking=True)

    # ---- writes to the device

    def _write_table(self, slot: int, table: torch.Tensor, pages: Sequence[int]) -> None:
        self._stale.add(slot)

    def _extend_table(self, slot: Slot, have: int) -> None:
        slot.full = max(slot.full, have - 1)
        self.ensure(slot, have * self.page, self.allocated(slot))

    def _prepare_page(self, slot: Slot, position: int) -> None:
        slot.full = max(slot.full, position // self.page)
        self.ensure(slot, position, position + 1)

    def write_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Move the pages of the chunks to the device, and write the chunks of the next prompt pass."""
        for chunk in chunks:
            self.ensure(self[chunk.slot], chunk.start, chunk.end)
        self.before_pass()
        self._precopy({chunk.slot for chunk in chunks})
        super().write_chunks(chunks)

    @torch.inference_mode()
    def before_pass(self) -> None:
        """Write the tables of slots whose pages moved, and the list of pages to fetch."""
        kv, offload = self._kv, self._offload
        for slot in sorted(self._stale):
            if numbers := [self._number(page) for page in self[slot].pages]:
                with self._tables.next() as (table, _):
                    super()._write_table(slot, table, numbers)
                    if kv.rings:
                        offload.resolve(kv.page_table, slot, len(numbers))
        self._stale.clear()
        if self._fetched_stale and kv.rings:
            with self._tables.next() as (_, fetched):
                fetched.fill_(-1)
                fetched[0] = 1 + max(self._ring_place.values(), default=-1)
                for page, place in self._ring_place.items():
                    fetched[1 + place] = ~self._location[page]
                offload.fetched.copy_(fetched, non_blocking=True)
        self._fetched_stale = False

    def _number(self, page: int) -> int:
        """Return a page's entry in the page table; 0 before the page is written.

        It is its device page, or the number of device pages + its place in the ring.
        """
        if self._on_host(page):
            return len(self._kv.pool) + self._ring_place[page]
        return self._location.get(page, 0)

    @torch.inference_mode()
    def send(self, slot: int, count: int) -> None:
        """Move the slot's first `count` pages, which must be full, to the host; for benchmarks."""
        for page in self[slot].pages[:count]:
            if self._on_device(page):
                self._to_host(page)
        self.before_pass()
