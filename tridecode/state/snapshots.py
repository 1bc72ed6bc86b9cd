"""Snapshots: records that later requests resume from, because a prefix of a recurrent model is more than its pages."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..layout import SCAN, packed
from .records import OF_SLOT, records_of

if TYPE_CHECKING:
    from .prefix import Node

# Distance of snapshots within long prompts. It is the default limit of the tokens in one pass, so at most one such pass
# is repeated. In models of the size of Qwen3.5, a snapshot takes about as much memory as K/V of this many positions.
INTERVAL = 2048
SHARE = 4  # The snapshots at this distance within one prompt use at most 1 / SHARE of the records for snapshots.


@dataclass(eq=False)
class Snapshot:
    """The state of a request after its first `position` tokens, in a record.

    `node` is the node of the prefix tree that owns it. None: a slot owns it.
    """

    position: int
    record: int
    node: "Node | None" = None


class SnapshotPool:
    """The records that slots and snapshots have. It is bookkeeping on the host only.

    A snapshot belongs to a slot until the pages before it are in the prefix tree, and then to a node of the tree.
    `_kept` contains the snapshots of the tree in the order of their last use.

    Args:
        slots: number of slots, each with OF_SLOT records.
        size: number of records in addition, which is the maximum number of snapshots.
    """

    def __init__(self, slots: int, size: int):
        self._slots, self.size = slots, size
        self._kept: dict[Snapshot, None] = {}
        self.hits = 0  # requests that have resumed from a snapshot
        self.recover([])

    def recover(self, kept: Iterable[Snapshot]) -> list[list[int]]:
        """Keep only these snapshots; return records for the slots. Without snapshots, they are the first ones."""
        order = {snapshot: place for place, snapshot in enumerate(self._kept)}
        self._kept = dict.fromkeys(sorted(kept, key=lambda snapshot: order.get(snapshot, len(order))))
        used = {snapshot.record for snapshot in self._kept}
        free = [record for record in range(OF_SLOT * self._slots + self.size) if record not in used]
        self._free = free[OF_SLOT * self._slots :][::-1]  # the lowest is taken first
        return [[free[record] for record in records_of(slot)] for slot in range(self._slots)]

    @property
    def count(self) -> int:
        """Number of snapshots."""
        return self.size - len(self._free)

    @property
    def oldest(self) -> Snapshot | None:
        """The least recently used snapshot of the tree."""
        return next(iter(self._kept), None)

    def take(self) -> int | None:
        """Take a free record; return None if there is none."""
        return self._free.pop() if self._free else None

    def free(self, record: int) -> None:
        """Make a record free."""
        self._free.append(record)

    def use(self, snapshot: Snapshot) -> None:
        """Make a snapshot of the tree the most recently used one."""
        self._kept.pop(snapshot, None)
        self._kept[snapshot] = None

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot that leaves the tree; its record is not free yet."""
        self._kept.pop(snapshot, None)

    def assert_consistent(self, kept: Sequence[Snapshot], own: Sequence[int]) -> None:
        """Check that each record is free once, or in one snapshot of the tree, or with one slot (`own`)."""
        assert set(kept) == self._kept.keys(), "a snapshot of the tree is not counted"
        records = [*self._free, *own, *(snapshot.record for snapshot in kept)]
        assert sorted(records) == [*range(OF_SLOT * self._slots + self.size)], "a record is lost or used twice"


def snapshot_positions(start: int, end: int, reach: int, messages: Sequence[int], size: int) -> set[int]:
    """Return the positions, multiples of SCAN, at which the passes that read a prompt take snapshots.

    Args:
        start, end: the passes read positions start to end - 1.
        reach: number of leading tokens whose pages are cached. There the prompt diverges from an earlier one.
        messages: positions at which later prompts probably diverge; without them, that is the end.
        size: number of records for snapshots.
    """
    interval = INTERVAL * max(-(-end * SHARE // (INTERVAL * max(size, 1))), 1)
    planned = {at // SCAN * SCAN for at in (reach, *(messages or [end]))} | {*range(interval, end, interval)}
    return {at for at in planned if start < at <= end}


def last_messages(ids: Sequence[int], count: int = 2) -> list[int]:
    """Return where the last messages of a chat begin, without the first message.

    This assumes that the template begins each message with the same token, the first one of the prompt. For other
    templates the result is empty. The last message is the beginning of the answer, which later prompts may contain
    without its thinking. The one before it is the last message of the user, which may end with a note that later
    prompts omit.
    """
    tokens = np.frombuffer(packed(ids), np.int32)
    positions: list[int] = np.flatnonzero(tokens == tokens[:1])[1:].tolist()
    return positions[-count:]
