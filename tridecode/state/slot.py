"""Slot: the place of one active request on the device."""

from array import array
from dataclasses import dataclass, field
from typing import Any

from ..layout import packed
from .acceptance import Acceptance
from .prefix import Node
from .snapshots import Snapshot

GROW_MARGIN = 16  # a row gets more pages when its pages have fewer unused positions than this


@dataclass(eq=False)
class Slot:
    """The place of one active request: its pages, its row, and the progress of its passes.

    `Slots.release` replaces it with a new idle slot. A pass in flight keeps its reference to the old slot, which is no
    longer busy.
    """

    number: int  # index into the page table and into the tensors that have one row for each slot
    generation: int = 0  # incremented for each request; entries of the output ring contain it
    busy: bool = False  # whether a request has the slot

    # The pages.
    tokens: "array[int]" = field(default_factory=lambda: packed(()))  # the request's array, which grows with the output
    filled: int = 0  # leading tokens whose K/V are in the pages
    pages: list[int] = field(default_factory=list)  # in the order of positions
    shared: int = 0  # positions in the first pages, which other slots may also read
    node: Node | None = None  # the last node of the prefix tree that it uses
    extends_leaf: bool = False  # Match.extends_leaf of the match at admission
    salt: str = ""
    full: int = 0  # leading pages that are no longer written; OffloadedSlots may move them

    # The recurrent state, if the model has any.
    records: list[int] = field(default_factory=list)  # the current record, and the one that a prompt pass writes
    covered: int = 0  # positions that the current record contains, while no pass that updates it is in flight
    stopped: bool = False  # the device has ended the request, so a pass in flight does not update the record
    reach: int = 0  # leading tokens of the prompt that had pages at admission
    planned: set[int] = field(default_factory=set)  # positions at which later prompt passes take snapshots
    taking: list[Snapshot] = field(default_factory=list)  # snapshots of the pass that is being enqueued
    snapshots: list[Snapshot] = field(default_factory=list)  # snapshots that the prefix tree does not have yet

    # The request. The scheduler sets `request` during a step only; see serve/request.py.
    ref: Any = None  # weak reference to the request
    request: Any = None
    mask: Any = None  # the GrammarMasks of the request, if it has a grammar

    # The passes.
    read: int = 0  # positions of the prompt whose K/V are present or written by an enqueued pass
    position: int = 0  # position of the oldest pass whose output entry the host has not read
    end: int = 0  # position at which the request ends
    row: int = -1  # row in decode passes; -1 until the prompt is read
    allocated: int = 0  # number of positions that the slot's pages can store
    seen: int = 0  # passes whose entries the host has read
    in_flight: int = 0  # enqueued passes whose entries the host has not read
    rows_in_flight: int = 0  # rows of the slot in those passes
    drafts: Acceptance = field(default_factory=Acceptance)
    known: int = 0  # next passes whose tokens are known, because the request was preempted after them

    @property
    def left(self) -> int:
        """Number of prompt positions left to read, including the last one, whose token the first decode pass embeds."""
        return self.position + 1 - self.read

    @property
    def runs(self) -> bool:
        """Whether the slot may take part in the next pass.

        A pass in flight advances the slot by at least one position, unless its mask is late. For a slot with a mask,
        passes in flight therefore do not count. Otherwise the next pass could omit a row that still runs.
        """
        advance = 0 if self.mask else self.in_flight
        return self.position + advance < min(self.end, self.allocated)

    @property
    def lacks_mask(self) -> bool:
        """Whether a pass enqueued now skips the slot, unless the slot's mask arrives before the pass runs."""
        return self.mask is not None and not self.in_flight and self.mask.late

    @property
    def needs_pages(self) -> bool:
        """Whether the row is near the end of its pages and does not have all the pages it can use."""
        reached = self.position + self.rows_in_flight
        return self.row >= 0 and self.allocated < self.end and reached > self.allocated - GROW_MARGIN
