"""Slot: the place of one active request on the device."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from ..layout import packed
from .acceptance import Acceptance
from .prefix import Node

AHEAD = 16  # positions: a row with fewer left in its pages gets more pages


@dataclass(eq=False)
class Slot:
    """The place of one active request: its pages, its row, and how far its passes are.

    `Slots.release` replaces it with a new idle slot. A pass in flight keeps the slot that it was enqueued for, which is
    then no longer busy.
    """

    number: int  # index into the page table and the tensors of one row a slot
    generation: int = 0  # changes with each request that begins here; entries of the ring carry it
    busy: bool = False  # has a request

    # The pages.
    tokens: "array[int]" = field(default_factory=lambda: packed(()))  # its request's array, which grows with the output
    filled: int = 0  # leading tokens whose K/V the pages hold
    pages: list[int] = field(default_factory=list)  # in the order of positions
    shared: int = 0  # positions in the first pages, which other slots may read as well
    node: Node | None = None  # the last node of the prefix tree that it uses
    goes_on: bool = False  # Match.goes_on of the match at admission
    salt: str = ""
    full: int = 0  # leading pages that are no longer written, for OffloadedSlots

    # The request. The scheduler sets `request` for the time of a step only; see serve/request.py.
    ref: Any = None  # weak reference to it
    request: Any = None
    mask: Any = None  # its Following, if it has a grammar

    # The passes.
    read: int = 0  # positions of the prompt whose K/V are enqueued or present
    position: int = 0  # position of the first pass whose entry was not read yet
    end: int = 0  # position at which its passes end
    row: int = -1  # -1 until its prompt is read
    room: int = 0  # position at which the pages of its row end
    seen: int = 0  # passes whose entries were read
    in_flight: int = 0  # passes whose entries were not read yet
    rows_in_flight: int = 0  # its rows in those passes
    drafts: Acceptance = field(default_factory=Acceptance)
    known: int = 0  # next passes whose tokens are known, because it was preempted after them

    @property
    def left(self) -> int:
        """Positions of the prompt that are still to be read. The first pass embeds the token of the last one."""
        return self.position + 1 - self.read

    @property
    def runs(self) -> bool:
        """Whether it may take part in the next pass.

        A pass in flight advances it by one position or more, but not if its mask is late. So with a mask no pass in
        flight counts, or the next pass would omit a row that still runs.
        """
        surely = 0 if self.mask else self.in_flight
        return self.position + surely < min(self.end, self.room)

    @property
    def lacks_mask(self) -> bool:
        """Whether a pass that is enqueued now can do nothing for it, unless its mask comes before the pass runs."""
        return self.mask is not None and not self.in_flight and self.mask.late

    @property
    def needs_pages(self) -> bool:
        reached = self.position + self.rows_in_flight
        return self.row >= 0 and self.room < self.end and reached > self.room - AHEAD
