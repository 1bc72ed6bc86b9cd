"""OffloadedSlots: slots whose pages lie on the device or in the host's memory, and move between them."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice

import torch

from ..layout import Chunk
from .offload import WRITTEN
from .pages import OutOfPages
from .slot import Slot
from .slots import RECORDS, Records, SlotModel, Slots


class OffloadedSlots(Slots):
    """Slots over the pages of both places: the pool's page numbers say nothing of where a page lies, `_where` does.

    A page gets its place on the device just before the first pass that writes it. When the device has no more, those
    leave that no request uses, then the oldest full ones of requests: these get a place in the ring, where each layer's
    part of them comes in every pass. Whatever is found again comes back, as far as the device has room. Copies and
    tables are written in stream order, between passes: so no pass in flight sees a page move, and none is waited for.
    While a prompt is read the pages that the next chunk will push out are copied on a stream of their own, beside the
    pass that still reads them.

    The requests that run have together no more pages than device and ring hold.
    """

    def __init__(self, model: SlotModel, sharing: bool = True):
        super().__init__(model, sharing)
        assert model.kv.offload is not None
        self._kv, self._offload = model.kv, model.kv.offload
        self._where: dict[int, int] = {}  # page that has been written -> its page of the device, or ~ that of the host
        self._ring: dict[int, int] = {}  # page -> place in the ring, of the host's pages that slots have
        self._stale: set[int] = set(range(len(self)))  # slots whose tables are to be written
        self._fetched_stale = False
        self._leaving: dict[int, int] = {}  # page of the device -> host page, where a copy of it is, or will soon be
        self._out = torch.cuda.Stream(model.device) if model.device.type == "cuda" else None
        self._tables = Records(model.kv.page_table, self._offload.fetched[None], count=max(len(self), RECORDS))
        self._collected: int | None = None  # the pool's changes that _collect has seen
        self._collect()

    # ---- the host's book-keeping

    def most_read(self) -> int:
        pages = len(self._kv.pool) - WRITTEN * len(self)
        return min(super().most_read(), pages * self.page)

    def available(self) -> int:
        return min(super().available(), self._left())

    def make_room(self, pages: int) -> bool:
        return pages <= self._left() and super().make_room(pages)

    def _take(self, pages: int) -> list[int]:
        self._collect()  # what is free lies nowhere: its number comes again as another page's
        return super()._take(pages)

    def spare(self, needed: int) -> int:
        return 0  # a page that is not written yet need not be on the device

    def _left(self) -> int:
        """Pages that requests may have beside those that they have."""
        return self._kv.runnable - len(self._held_pages())

    def _held_pages(self) -> set[int]:
        return {page for slot in self for page in slot.pages}

    def _on_host(self, page: int) -> bool:
        return self._where.get(page, 0) < 0

    def _on_device(self, page: int) -> bool:
        return self._where.get(page, -1) >= 0

    def _collect(self) -> None:
        """Believe the pool's counts, `_where` and what slots hold alone; all else follows. Where nothing was given back
        since, all else is as it should be."""
        if self._collected == self.pages.changes:
            return
        held = self._held_pages()
        self._where = {page: where for page, where in self._where.items() if self.pages.holders(page)}
        if any(not self.pages.holders(page) or not self._on_device(page) for page in self._leaving):
            self._forget_leaving()
        used = {*self._where.values()} | {~place for place in self._leaving.values()}
        self._device_free = [page for page in reversed(range(len(self._kv.pool))) if page not in used]
        self._host_free = [page for page in reversed(range(len(self._offload.host))) if ~page not in used]
        ring = {page: place for page, place in self._ring.items() if page in held and self._on_host(page)}
        self._fetched_stale |= ring != self._ring
        self._ring = ring
        places = set(ring.values())
        self._ring_free = [place for place in reversed(range(self._offload.plan.ring)) if place not in places]
        self._collected = self.pages.changes

    def admit(self, ids: "array[int]", positions: int, salt: str = "") -> Slot | None:
        self._collect()
        slot = super().admit(ids, positions, salt)
        if slot is not None:
            slot.full = slot.filled // self.page
            self._bring_back(slot, self.pages_for(positions) - len(slot.pages))
        return slot

    @torch.inference_mode()
    def _bring_back(self, slot: Slot, fresh: int) -> None:
        """Copy the slot's pages on the host to the device, the last positions first, if there is room for `fresh`
        new pages too. The other pages get a place in the ring."""
        self._collect()
        room = len(self._kv.pool) - fresh - sum(not self._on_host(page) for page in self._held_pages())
        found = [page for page in slot.pages if self._on_host(page) and page not in self._ring]
        back = found[max(len(found) - max(room, 0), 0) :]
        for page in found[: len(found) - len(back)]:
            self._to_ring(page)
        for page in reversed(back):
            self._to_device([page])

    def publish(self, slot: Slot, read: int) -> None:
        slot.full = read // self.page
        super().publish(slot, read)

    def release(self, slot: Slot) -> None:
        super().release(slot)
        self._collect()

    def recover(self) -> None:
        self._forget_leaving()
        super().recover()
        self._collect()
        self._stale, self._fetched_stale = set(range(len(self))), True

    def assert_consistent(self) -> None:
        """As well: no two pages in one place, every place free or a page's, every host page of a slot in the ring, and
        none that is written there."""
        super().assert_consistent()
        self._collect()
        free = [sorted(places) for places in (self._device_free, self._host_free, self._ring_free)]
        self._collected = None
        self._collect()
        assert free == [sorted(places) for places in (self._device_free, self._host_free, self._ring_free)]
        held, places = self._held_pages(), [*self._where.values(), *(~place for place in self._leaving.values())]
        assert len(set(places)) == len(places), "two pages in one place"
        assert all(page in self._where for page in self.cache.pages()), "what can be found lies nowhere"
        assert {page for page in held if self._on_host(page)} == self._ring.keys(), "the ring has other pages"
        assert len(set(self._ring.values())) == len(self._ring), "two pages in one place of the ring"
        assert len(held) <= self._kv.runnable, "more pages run than there is room for"

    # ---- pages that move, in stream order

    @torch.inference_mode()
    def ensure(self, slot: Slot, first: int, end: int) -> None:
        """Have the pages of the slot's positions [first, end) on the device, to be written. Raises OutOfPages."""
        pages = slot.pages[first // self.page : self.pages_for(end)]
        if not self._leaving.keys().isdisjoint(pages):  # the end of another request, copied before this one went on
            self._forget_leaving()
            self._collect()
        if wanted := [page for page in pages if not self._on_device(page)]:
            self._to_device(wanted)
            self._stale.add(slot.number)

    def _to_device(self, pages: list[int]) -> None:
        for page in self._ring.keys() & pages:  # before others leave, which may want its place
            self._ring_free.append(self._ring.pop(page))
            self._fetched_stale = True
        leaving = self._may_leave()
        for number, page in enumerate(pages):  # one by one: each that comes leaves a host page to the next that goes
            self._free_a_place(leaving, pages[number:])
            place, before = self._device_free.pop(), self._where.get(page)
            if before is not None:
                self._kv.pool[place].copy_(self._offload.host[~before], non_blocking=True)
                self._host_free.append(~before)
            self._where[page] = place
            self._moved(page)

    def _free_a_place(self, leaving: Iterator[int], coming: list[int]) -> None:
        """Have a place free on the device for the first of those that come: what can leave does."""
        if self._device_free:
            return
        self._collect()
        self._let_leave()
        while not (self._device_free or self._host_free):  # then each new page is one too many
            if not self.cache.evict(max(sum(page not in self._where for page in coming), 1)):
                raise OutOfPages("no page of the host is free")
            self._collect()
        if not self._device_free:
            if (page := next(leaving, None)) is None:
                raise OutOfPages(f"none of {len(self._kv.pool)} pages can leave the device")
            self._to_host(page)

    def _may_leave(self) -> Iterator[int]:
        """Pages of the device that nobody writes, those that no request uses first, then by their place in a request:
        as many of these as the ring has room for."""
        held = self._held_pages()
        for page in self.cache.pages():
            if page not in held and self._on_device(page) and page not in self._leaving:
                yield page
        # Where a slot is being filled, all that was found is full but for its end.
        full = [slot.full if slot.busy else len(slot.pages) - 1 for slot in self]
        for place in range(max(full)):
            for most, slot in zip(full, self):
                if place < most and self._ring_free and self._on_device(page := slot.pages[place]):
                    if page not in self._leaving:
                        yield page

    def _to_host(self, page: int) -> None:
        place = self._host_free.pop()
        self._offload.host[place].copy_(self._kv.pool[self._where[page]], non_blocking=True)
        self._has_left(page, place)

    def _has_left(self, page: int, place: int) -> None:
        """A copy of the page is in that place of the host."""
        self._device_free.append(self._where[page])
        self._where[page] = ~place
        if any(page in slot.pages for slot in self):
            self._to_ring(page)

    def _copy_ahead(self, slots: set[int]) -> None:
        """Copy pages which the next chunk of these slots will push out, beside the pass that comes now."""
        lacking = sum(page not in self._where for slot in slots for page in self[slot].pages)
        lacking = min(lacking, self.pages_for(self.most_read())) - len(self._device_free) - len(self._leaving)
        if lacking <= 0:
            return
        if self._out is not None:
            self._out.wait_stream(torch.cuda.current_stream(self.model.device))
        with nullcontext() if self._out is None else torch.cuda.stream(self._out):
            for page in islice(self._may_leave(), min(lacking, len(self._host_free))):
                self._leaving[page] = place = self._host_free.pop()
                self._offload.host[place].copy_(self._kv.pool[self._where[page]], non_blocking=True)

    def _let_leave(self) -> None:
        """The pages that were copied ahead go, as far as the ring has room for them."""
        held, leaving = self._held_pages(), self._leaving
        self._forget_leaving()
        for page, place in leaving.items():
            if page in held and not self._ring_free:
                self._host_free.append(place)
            else:
                self._has_left(page, place)

    def _forget_leaving(self) -> None:
        """What comes next on the stream finds the copies done."""
        if not self._leaving:
            return
        if self._out is not None:
            torch.cuda.current_stream(self.model.device).wait_stream(self._out)
        self._leaving, self._collected = {}, None

    def _to_ring(self, page: int) -> None:
        self._ring[page] = self._ring_free.pop()
        self._fetched_stale = True
        self._moved(page)

    def _moved(self, page: int) -> None:
        self._stale.update(slot.number for slot in self if page in slot.pages)

    @torch.inference_mode()
    def _copy_page(self, source: int, target: int) -> None:
        self._to_device([target])
        where = self._where[source]
        of = self._kv.pool[where] if where >= 0 else self._offload.host[~where]
        self._kv.pool[self._where[target]].copy_(of, non_blocking=True)

    # ---- writes to the device

    def _write_table(self, slot: int, table: torch.Tensor, pages: Sequence[int]) -> None:
        self._stale.add(slot)

    def _extend_table(self, slot: Slot, have: int) -> None:
        slot.full = max(slot.full, have - 1)
        self.ensure(slot, have * self.page, self.room(slot))

    def _reach(self, slot: Slot, position: int) -> None:
        slot.full = max(slot.full, position // self.page)
        self.ensure(slot, position, position + 1)

    def write_chunks(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.ensure(self[chunk.slot], chunk.start, chunk.end)
        self.before_pass()
        self._copy_ahead({chunk.slot for chunk in chunks})
        super().write_chunks(chunks)

    @torch.inference_mode()
    def before_pass(self) -> None:
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
                fetched[0] = 1 + max(self._ring.values(), default=-1)
                for page, place in self._ring.items():
                    fetched[1 + place] = ~self._where[page]
                offload.fetched.copy_(fetched, non_blocking=True)
        self._fetched_stale = False

    def _number(self, page: int) -> int:
        """In the page table: a page of the device, or their number + the place in the ring; 0 before it is written."""
        if self._on_host(page):
            return len(self._kv.pool) + self._ring[page]
        return self._where.get(page, 0)

    @torch.inference_mode()
    def send(self, slot: int, count: int) -> None:
        """The slot's first `count` pages, which must be full, go to the host; for benchmarks."""
        for page in self[slot].pages[:count]:
            if self._on_device(page):
                self._to_host(page)
        self.before_pass()
