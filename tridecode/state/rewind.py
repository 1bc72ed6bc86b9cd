"""Rows without requests, which are used to measure passes.

They start at any position, with any content of the cache.
"""

from ..sampling import SamplingParams
from .offloaded_slots import OffloadedSlots
from .slots import Slots

STRIDE = 7919  # Difference of the ids of neighboring tokens. It is prime, so ids repeat late.


def rewind_slots(slots: Slots, positions: list[int], params: SamplingParams, known: int = 0) -> None:
    """Start slots 0, 1, ... and their rows at `positions`.

    After each position there are `known` tokens that passes do not sample. Neighboring tokens and those of different
    rows differ, because equal rows would choose equal experts.

    No request may be active. Each slot gets an equal share of the pages, up to the capacity, and the same pages in each
    call. With offload, every page gets a location as if it had been written. The oldest pages are in host memory.

    Raises:
        OutOfPages: the positions need more pages than the pool has.
    """
    capacity, page, vocab = slots.model.kv.capacity, slots.page, slots.model.workspace.counts.shape[1]
    slots.recover()
    slots.cache.clear()
    slots.reset_records()
    slots.pages.recount(slot.pages for slot in slots)
    for row, position in enumerate(positions):
        spare = slots.pages.free - sum(slots.pages_for(later + 1) for later in positions[row:])
        allocated = (slots.pages_for(position + 1) + max(spare, 0) // (len(positions) - row)) * page
        n_known = min(position + 1 + known, capacity)
        tokens = [(STRIDE * (row * capacity + place) + 1) % vocab for place in range(n_known)]
        slots.write_tokens(slots[row], tokens, min(allocated, capacity))
        slots.begin(slots[row], row, params, position=position, n_known=n_known, limit=capacity + 1, stop_ids=())
        for layer in slots.model.recurrent.layers if slots.model.recurrent else ():
            layer.covered[slots[row].records[0]] = position
    if isinstance(slots, OffloadedSlots):
        for row in range(len(positions)):
            for first in range(0, slots.allocated(slots[row]), page):
                slots.ensure(slots[row], first, first + 1)
        slots.before_pass()
