"""Server-sent events: the bytes of a stream."""

import msgspec

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
_encode = msgspec.json.Encoder().encode


def event(value) -> bytes:
    return b"data: %b\n\n" % _encode(value)


def named(value: dict) -> bytes:
    """An event that says its type twice."""
    return b"event: %b\ndata: %b\n\n" % (value["type"].encode(), _encode(value))
