"""Slot: the place of one active request on the device."""

from array import array
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..layout import packed
from .acceptance import Acceptance
from .prefix import Node
from .snapshots import Snapshot

GROW_MARGIN = 16  # A row gets more pages when its pages have fewer unused positions than this number.


@dataclass(eq=False)
class Slot:
    """The place of one active request: its pages, its row, and the progress of its passes.

    `Slots.release` replaces it with a new idle slot. A pass in flight keeps its reference to the old slot, which is no
    longer busy.
    """

    number: int  # Index into the page table, and into the tensors that have one row for each slot.
    generation: int = 0  # The number grows with each request. Entries of the output ring contain it.
    busy: bool = False  # Whether a request has the slot.

    # The pages.
    # The array of the request, which grows with the output.
    tokens: "array[int]" = field(default_factory=lambda: packed(()))
    filled: int = 0  # Number of leading tokens whose K/V are in the pages.
    pages: list[int] = field(default_factory=list)  # Pages in the order of positions.
    shared: int = 0  # Number of positions in the first pages, which other slots may also read.
    reused: int = 0  # Number of positions whose K/V were in the cache at admission.
    node: Node | None = None  # The last node of the prefix tree that the slot uses.
    extends_leaf: bool = False  # Match.extends_leaf of the match at admission.
    salt: Hashable = ""
    adapter: int = 0  # The number of the request's adapter on the device.
    full: int = 0  # Number of leading pages that are no longer written. OffloadedSlots may move them.

    # The recurrent state, if the model has any.
    records: list[int] = field(default_factory=list)  # The current record, and the one that a prompt pass writes.
    covered: int = 0  # Positions that the current record contains, while no pass that updates it is in flight.
    stopped: bool = False  # Whether the device has ended the request. A pass in flight then does not update the record.
    reach: int = 0  # Number of leading prompt tokens that had pages at admission.
    planned: set[int] = field(default_factory=set)  # Positions at which later prompt passes take snapshots.
    taking: list[Snapshot] = field(default_factory=list)  # Snapshots of the pass that is being enqueued.
    snapshots: list[Snapshot] = field(default_factory=list)  # Snapshots that the prefix tree does not have yet.

    # The request. The scheduler sets `request` only during a step; see serve/request.py.
    ref: Any = None  # A weak reference to the request.
    request: Any = None
    mask: Any = None  # The GrammarMasks of the request, if it has a grammar.

    # The passes.
    read: int = 0  # Number of prompt positions whose K/V are present, or which an enqueued pass will write.
    position: int = 0  # Position of the oldest pass whose output entry the host has not read.
    end: int = 0  # Position at which the request ends.
    row: int = -1  # Row in decode passes. It is -1 until the prompt is read.
    allocated: int = 0  # Number of positions that the slot's pages can store.
    seen: int = 0  # Number of passes whose entries the host has read.
    in_flight: int = 0  # Number of enqueued passes whose entries the host has not read.
    rows_in_flight: int = 0  # Number of rows of the slot in those passes.
    drafts: Acceptance = field(default_factory=Acceptance)
    known: int = 0  # Number of next passes whose tokens are known, because the request was preempted after them.

    @property
    def left(self) -> int:
        """Number of prompt positions left to read, including the last one, whose token the first decode pass embeds."""
        return self.position + 1 - self.read

    @property
    def runs(self) -> bool:
        """Whether the slot may take part in the next pass.

        A pass in flight advances the slot by at least one position, unless its mask is late. Passes in flight of a slot
        with a mask therefore do not count, because the next pass could otherwise omit a row that still runs.
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
