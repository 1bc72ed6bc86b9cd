"""The routing policy: which replica a request goes to. This module needs neither Ray nor an event loop.

A prompt is described by a chain of hashes, one for each of a few positions. Each hash covers the prompt from its
beginning, so two prompts share a hash only if they are equal up to its position. The policy remembers which replicas
have computed which hashes.
"""

import hashlib
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

MAX_HASHED = 1 << 16  # Bytes of a prompt that are hashed.
FIRST_POSITION = 1024  # The first position within a message. The others are this number times powers of two.
MESSAGES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))  # Messages whose ends are positions.
ROUTERS: dict[str, Any] = {}  # Deployment -> its router in this process.
# Fields of a body that decide where a request goes.
FIELDS = frozenset(
    ("model", "prompt_cache_key", "cache_salt", "tools", "system", "instructions", "messages", "input", "prompt")
)
VOLATILE = frozenset(("cache_control", "id", "status", "annotations"))  # Fields that change between turns.


@dataclass(frozen=True)
class Chain:
    """The hashes of a prompt.

    Attributes:
        hashes: one hash for each position, from the first to the last.
        shared: number of leading hashes that other conversations may have, too. The others belong to this conversation.
    """

    hashes: tuple[int, ...] = ()
    shared: int = 0


@dataclass
class Ticket:
    """A request, as the policy sees it.

    Attributes:
        chain: hashes of the prompt.
        session: the conversation that the client names, or "".
        avoid: replicas that have failed this request.
        id: identifier of the request in logs.
        replica: the replica that was chosen last, or None.
    """

    chain: Chain = Chain()
    session: str = ""
    avoid: set[str] = field(default_factory=set)
    id: str = field(default_factory=lambda: f"req_{secrets.token_hex(8)}")
    replica: str | None = None


def register(deployment: str, router: Any) -> None:
    """Let the gateway of this process find a router. Ray copies the router's class and its globals, but not these."""
    ROUTERS[deployment] = router


class _Hasher:
    def __init__(self) -> None:
        self._hash, self._left = hashlib.blake2b(digest_size=8), MAX_HASHED
        self.hashes: list[int] = []

    @property
    def full(self) -> bool:
        return self._left <= 0

    def mark(self) -> None:
        """Add a position after the bytes so far."""
        value = int.from_bytes(self._hash.digest())
        if not self.hashes or self.hashes[-1] != value:
            self.hashes.append(value)

    def add(self, data: bytes) -> None:
        """Add a part of the prompt, with positions inside it."""
        data = data[: self._left]
        self._left -= len(data)
        start, size = 0, FIRST_POSITION
        while size <= len(data):
            self._hash.update(data[start:size])
            self.mark()
            start, size = size, 2 * size
        self._hash.update(data[start:] + b"\x1e")


def fields_of(body: bytes) -> dict[str, Any]:
    """Return the fields of a JSON body that decide where it goes, without the later part of a long prompt.

    msgspec holds the interpreter lock while it parses. It skips a value much faster than it builds one.

    Raises:
        msgspec.DecodeError, msgspec.ValidationError: the body is not a JSON object.
    """
    raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields: dict[str, Any] = {}
    for name in raw.keys() & FIELDS:
        value = bytes(raw[name])
        if name in ("messages", "input") and value.startswith(b"["):
            fields[name], size = [], 0
            for item in msgspec.json.decode(value, type=list[msgspec.Raw]):
                size += len(bytes(item))
                fields[name].append(msgspec.json.decode(item))
                if size > 2 * MAX_HASHED:
                    break
        elif len(value) > 2 * MAX_HASHED and name in ("prompt", "input"):
            fields[name] = value[:MAX_HASHED].decode("latin-1")
        else:
            fields[name] = msgspec.json.decode(value)
    return fields


def chain_of(body: Mapping[str, Any]) -> Chain:
    """Return the hashes of a request's prompt: tools, system message, and messages or text.

    Args:
        body: the JSON body of a request for a chat, a completion, a response or a message.
    """
    hasher = _Hasher()
    salt, tools = body.get("cache_salt"), body.get("tools")
    if salt or tools:
        hasher.add(_canonical([salt, tools]))
        hasher.mark()
    for name in ("system", "instructions"):
        if body.get(name):
            hasher.add(_canonical(["system", _text(body[name])]))
            hasher.mark()
    messages = body.get("messages", body.get("input"))
    if not isinstance(messages, list):
        prompt = messages if messages is not None else body.get("prompt")
        if prompt:
            hasher.add(prompt.encode(errors="replace") if isinstance(prompt, str) else _canonical(prompt))
        return Chain(tuple(hasher.hashes), len(hasher.hashes))
    shared = None
    for number, message in enumerate(messages, start=1):
        if hasher.full:
            break
        role = message.get("role") if isinstance(message, dict) else None
        if shared is None and role == "assistant":  # The answer makes the messages before it a conversation.
            shared = max(len(hasher.hashes) - 1, 0)
        hasher.add(_message(message))
        if number in MESSAGES or shared is None and role == "user":
            hasher.mark()
    return Chain(tuple(hasher.hashes), len(hasher.hashes) if shared is None else shared)


def _message(message: Any) -> bytes:
    if not isinstance(message, dict):
        return _canonical(message)
    rest = {name: message[name] for name in message.keys() - VOLATILE - {"role", "content", "type"}}
    role = "system" if message.get("role") == "developer" else message.get("role")
    return _canonical([role, _text(message.get("content")), rest])


def _text(content: Any) -> Any:
    """Return content as text if it is text, otherwise without the fields that change between turns."""
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if isinstance(part, dict):
            text = part.get("text")
            parts.append(text if isinstance(text, str) else {name: part[name] for name in part.keys() - VOLATILE})
        else:
            parts.append(part)
    return "\n".join(parts) if all(isinstance(part, str) for part in parts) else parts


def _canonical(value: Any) -> bytes:
    return msgspec.json.encode(value, order="deterministic")


class Policy:
    """Chooses replicas: by conversation, by prefix while the load allows it, otherwise by load.

    Threads may call the methods at the same time.

    Args:
        entries: maximum number of hashes that are remembered. The least recently used are forgotten.
        spread: a replica with the prefix is chosen while its load is at most `spread` times the average.
        prefix: whether prefixes and conversations count. False always chooses by load.
    """

    def __init__(self, entries: int = 1 << 20, spread: float = 1.25, prefix: bool = True):
        self._limit, self._spread, self._prefix = max(entries // 2, 1), spread, prefix
        # Hash -> replicas as bits. A hash that is used moves from `_old` to `_young`; a full `_young` becomes `_old`.
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        self._numbers: dict[str, int] = {}  # Replica -> the number of its bit.
        self._names: dict[int, str] = {}
        self._seeds: dict[str, int] = {}
        self._running: dict[str, int] = {}  # Replica -> requests that this policy has sent to it.
        self._lock = threading.Lock()
        self.moved = 0  # Conversations that did not continue on their replica.

    def __len__(self) -> int:
        """Return the number of hashes in memory."""
        return len(self._young) + len(self._old)

    def running(self, replica: str) -> int:
        """Return the number of requests that run on a replica."""
        return self._running.get(replica, 0)

    def choose(self, ticket: Ticket, loads: Mapping[str, int], slots: int = 1) -> str | None:
        """Choose the replica of a request, and count the request as running there until `release`.

        Args:
            ticket: the request. Its attribute `replica` is set.
            loads: candidate -> requests that run or wait there, as Ray reports. The policy's own count replaces
                a smaller one.
            slots: number of requests that a replica runs at the same time.

        Returns:
            None if there are no candidates.
        """
        with self._lock:
            self._forget_choice(ticket)
            running = self._running
            loads = {name: max(load, running.get(name, 0)) for name, load in loads.items() if name not in ticket.avoid}
            if not loads:
                return None
            keys = self._keys(ticket)
            chosen = self._holder(keys, ticket, loads, slots) if self._prefix else None
            if chosen is None:
                chosen = self._idlest(ticket, loads, keys)
            self._use(ticket, chosen, keys)
            return chosen

    def place(self, ticket: Ticket, replica: str) -> None:
        """Record that a request runs on another replica than the one that was chosen."""
        if replica != ticket.replica:
            with self._lock:
                self._forget_choice(ticket)
                self._use(ticket, replica, self._keys(ticket))

    def release(self, ticket: Ticket) -> None:
        """Record that a request has ended."""
        with self._lock:
            self._forget_choice(ticket)

    def remove(self, replica: str) -> None:
        """Forget a replica that no longer exists."""
        with self._lock:
            self._running.pop(replica, None)
            self._seeds.pop(replica, None)
            if (number := self._numbers.pop(replica, None)) is None:
                return
            del self._names[number]
            others = ~(1 << number)
            for table in (self._young, self._old):
                for key, mask in table.items():
                    table[key] = mask & others

    def _keys(self, ticket: Ticket) -> tuple[int, ...]:
        """Return the hashes of a request; the last one is the hash of the session, if the client names one."""
        if not ticket.session:
            return ticket.chain.hashes
        named = hashlib.blake2b(ticket.session.encode(errors="replace"), digest_size=8, person=b"session").digest()
        return (*ticket.chain.hashes, int.from_bytes(named))

    def _holder(self, keys: Sequence[int], ticket: Ticket, loads: Mapping[str, int], slots: int) -> str | None:
        """Return the least loaded replica with the longest prefix, or None if it has too much load."""
        names, average = self._names, (sum(loads.values()) + 1) / len(loads)
        for at in range(len(keys) - 1, -1, -1):
            mask = self._mask(keys[at])
            best, least = None, 0
            while mask:
                low = mask & -mask
                mask ^= low
                name = names[low.bit_length() - 1]
                load = loads.get(name)
                if load is not None and (best is None or load < least):
                    best, least = name, load
            if best is None:
                continue
            continues = at >= ticket.chain.shared
            # The replica of a conversation is kept while it has a free slot.
            if least < self._spread * average or continues and least < slots:
                return best
            self.moved += continues
            return None
        return None

    def _mask(self, key: int) -> int:
        """Return the replicas that have a prefix, as bits."""
        return self._young.get(key) or self._old.get(key, 0)

    def _idlest(self, ticket: Ticket, loads: Mapping[str, int], keys: Sequence[int]) -> str:
        """Return the replica with the least load. The prompt decides between equal loads, in every process alike."""
        least = min(loads.values())
        tied = [name for name, load in loads.items() if load == least]
        if len(tied) == 1:
            return tied[0]
        seed = keys[min(ticket.chain.shared, len(keys) - 1)] if keys else secrets.randbits(64)
        return max(tied, key=lambda name: (seed ^ self._seed(name)) * 0x9E3779B97F4A7C15 & (1 << 64) - 1)

    def _seed(self, name: str) -> int:
        if (seed := self._seeds.get(name)) is None:
            digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
            seed = self._seeds[name] = int.from_bytes(digest)
        return seed

    def _use(self, ticket: Ticket, replica: str, keys: Sequence[int]) -> None:
        ticket.replica = replica
        self._running[replica] = self._running.get(replica, 0) + 1
        if not self._prefix:
            return
        if (number := self._numbers.get(replica)) is None:
            number = next(free for free in range(len(self._names) + 1) if free not in self._names)
            self._numbers[replica], self._names[number] = number, replica
        bit = 1 << number
        for at, key in enumerate(keys):
            mask = self._young.get(key)
            if mask is not None and mask & bit:
                continue
            if mask is None:
                mask = self._old.get(key, 0)
                # A prefix of a conversation is not used again while the conversation continues from a longer one.
                if mask & bit and at + 1 < len(keys) and self._mask(keys[at + 1]) & bit:
                    continue
            self._young[key] = mask | bit
        if len(self._young) >= self._limit:
            self._young, self._old = {}, self._young

    def _forget_choice(self, ticket: Ticket) -> None:
        if ticket.replica is not None:
            left = self._running.get(ticket.replica, 0) - 1
            if left > 0:
                self._running[ticket.replica] = left
            else:
                self._running.pop(ticket.replica, None)
            ticket.replica = None
