"""The routing policy: which replica a request goes to. This module needs neither Ray nor an event loop.

It remembers which replicas have computed which hashes of prompts.
"""

import hashlib
import secrets
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from .prefix import Chain

PEER_SECONDS = 1.0  # Seconds after which a gateway counts as ended if it sends no report.


@dataclass
class Ticket:
    """A request, as the policy sees it.

    Attributes:
        chain: hashes of the prompt.
        session: the conversation that the client names, or "".
        avoid: replicas that have failed this request.
        replica: the replica that was chosen last, or None.
    """

    chain: Chain = Chain()
    session: str = ""
    avoid: set[str] = field(default_factory=set)
    replica: str | None = None


class Report(msgspec.Struct, array_like=True):
    """The state that a policy sends to the other gateways.

    Attributes:
        running: replica -> its load by this gateway.
        placed: (hashes, replica) of the requests since the last report.
    """

    running: dict[str, int]
    placed: list[tuple[tuple[int, ...], str]]


class Policy:
    """Chooses replicas: by conversation, by prefix while the load allows it, otherwise by load.

    The load of a replica is the number of requests that the gateways have sent there and that have not ended.

    Args:
        entries: maximum number of hashes that are remembered. The least recently used are forgotten.
        spread: a replica with the prefix is chosen if it has the least load, or at most `spread` times the average.
        kind: "prefix", "load" without prefixes, or "round_robin", which is for comparison only.
        several: whether other gateways choose for the same replicas; `report` and `receive` exchange their state.
    """

    def __init__(self, entries: int = 1 << 20, spread: float = 1.25, kind: str = "prefix", several: bool = False):
        self._limit, self._spread = max(entries // 2, 1), spread
        self._kind, self._several, self._chosen = kind, several, 0
        # Hash -> replicas as bits. A hash that is used moves from `_old` to `_young`; a full `_young` becomes `_old`.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._bits: dict[str, int] = {}  # Replica -> its bit, which no other replica gets later.
        self._names: dict[int, str] = {}  # The inverse.
        self._next, self._all = 1, 0  # The bit of the next replica, and all bits of replicas that exist.
        self.running: dict[str, int] = {}  # Replica -> its load by this gateway.
        self._others: dict[str, int] = {}  # Replica -> its load by other gateways.
        self._peers: dict[str, tuple[float, dict[str, int]]] = {}  # Gateway -> (time, its loads).
        self._placed: list[tuple[tuple[int, ...], str]] = []
        self.moved = 0  # Conversations that left their replica because of its load.

    def __len__(self) -> int:
        """Return the number of hashes in memory."""
        return len(self._young) + len(self._old)

    def choose(self, ticket: Ticket, replicas: Mapping[str, int]) -> str | None:
        """Choose a replica, and count the request as running there until `release`.

        Args:
            replicas: the replicas that are ready, with the number of requests that each runs at the same time.

        Returns:
            None if the request has failed on all replicas.
        """
        others, avoid = self._others, ticket.avoid
        loads = {name: self.running.get(name, 0) + others.get(name, 0) for name in replicas if name not in avoid}
        if not loads:
            return None
        hashes = ticket.chain.hashes
        if ticket.session:  # The hash of a session is the last one.
            named = hashlib.blake2b(ticket.session.encode(errors="replace"), digest_size=8, person=b"session").digest()
            hashes = (*hashes, int.from_bytes(named))
        chosen: str | None = None
        max_load = max(min(loads.values()), self._spread * (sum(loads.values()) + 1) / len(loads) - 1)
        if self._kind == "round_robin":
            self._chosen += 1
            chosen = [*loads][self._chosen % len(loads)]
        elif self._kind == "load" or (chosen := self._holder(hashes, ticket, loads, replicas, max_load)) is None:
            chosen = self._idlest(hashes, ticket, loads)
        ticket.replica = chosen
        self.running[chosen] = self.running.get(chosen, 0) + 1
        if self._kind == "prefix":
            self._remember(hashes, chosen)
            if self._several:
                self._placed.append((hashes, chosen))
        return chosen

    def release(self, ticket: Ticket) -> None:
        """Record that a request has ended on its replica."""
        replica, ticket.replica = ticket.replica, None
        if replica is not None:
            self.running[replica] = self.running.get(replica, 1) - 1

    def remove(self, replica: str) -> None:
        """Forget a replica that no longer exists."""
        self.running.pop(replica, None)
        if (bit := self._bits.pop(replica, None)) is not None:
            del self._names[bit]
            self._all ^= bit

    def report(self) -> Report:
        """Return what has changed since the last call."""
        placed, self._placed = self._placed, []
        return Report(self.running, placed)

    def receive(self, peer: str, report: Report, now: float) -> None:
        """Add the report of another gateway, which arrived at the time `now` of time.monotonic."""
        self._peers[peer] = now, report.running
        self._peers = {name: each for name, each in self._peers.items() if now - each[0] < PEER_SECONDS}
        self._others = dict(sum((Counter(running) for _, running in self._peers.values()), Counter()))
        for hashes, replica in report.placed:
            self._remember(hashes, replica)

    def _holder(
        self, hashes: Sequence[int], ticket: Ticket, loads: Mapping[str, int], slots: Mapping[str, int], max_load: float
    ) -> str | None:
        """Return the least loaded replica with the longest prefix, or None if its load is larger than `max_load`.

        The replica of a conversation is kept while it has a free slot.
        """
        for at in range(len(hashes) - 1, -1, -1):
            mask, holders = self._mask(hashes[at]), {}
            if mask == self._all and len(self._bits) == len(loads):  # This is much faster with many replicas.
                mask, holders = 0, dict(loads)
            while mask:
                bit = mask & -mask
                mask ^= bit
                if (name := self._names[bit]) in loads:
                    holders[name] = loads[name]
            if holders:
                best, continues = self._idlest(hashes, ticket, holders), at >= ticket.chain.shared
                if holders[best] <= max_load or continues and holders[best] < slots[best]:
                    return best
                self.moved += continues
                return None
        return None

    def _mask(self, key: int) -> int:
        """Return the replicas that have a prefix, as bits."""
        return (self._young.get(key) or self._old.get(key, 0)) & self._all

    def _idlest(self, hashes: Sequence[int], ticket: Ticket, loads: Mapping[str, int]) -> str:
        """Return the replica with the least load. The prompt decides between equal loads, in every process alike."""
        least = min(loads.values())
        equal = [name for name, load in loads.items() if load == least]
        if len(equal) == 1:
            return equal[0]
        seed = hashes[min(ticket.chain.shared, len(hashes) - 1)] if hashes else secrets.randbits(64)
        return max(equal, key=lambda name: hash((seed, zlib.crc32(name.encode()))))  # Python does not salt integers.

    def _remember(self, hashes: Sequence[int], replica: str) -> None:
        if (bit := self._bits.get(replica, 0)) == 0:
            bit = self._bits[replica] = self._next
            self._names[bit], self._all, self._next = replica, self._all | bit, self._next << 1
        for at, key in enumerate(hashes):
            mask = self._young.get(key)
            if mask is not None and mask & bit:
                continue
            if mask is None:
                mask = self._old.get(key, 0)
                # A prefix of a conversation is not used again while the conversation continues from a longer one.
                if mask & bit and at + 1 < len(hashes) and self._mask(hashes[at + 1]) & bit:
                    continue
            self._young[key] = mask & self._all | bit
        if len(self._young) >= self._limit:
            self._young, self._old = {}, self._young
