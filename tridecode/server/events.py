"""Encoding of server-sent events."""

import msgspec

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


def event(value) -> bytes:
    """Encode `value` as the data of an event."""
    return b"data: %b\n\n" % _encode(value)


def named_event(value: dict) -> bytes:
    """Encode an event whose name is the "type" in its data, as Anthropic and the Responses API do."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), _encode(value))
