"""The hashes of a prompt, by which a request finds the replica that has computed its beginning.

Each hash covers the prompt from its beginning, so two prompts share a hash only if they are equal up to its position.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_HASHED = 1 << 16  # Bytes of a prompt that are hashed.
FIRST_POSITION = 1024  # The first position within a message. The others are this number times powers of two.
MESSAGES = frozenset((1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))  # Messages whose ends are positions.
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
