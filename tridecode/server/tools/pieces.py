"""What the machines of tool calls share: where things begin and end in a text that comes in pieces."""

import json


class Value:
    """Finds where a JSON object ends that comes in pieces."""

    def __init__(self):
        self._depth, self._quoted, self._escaped, self.ended = 0, False, False, False

    def feed(self, text: str) -> int:
        """Characters of `text` that belong to it."""
        for i, char in enumerate(text):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return i + 1
        return len(text)


def first_of(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Where the first of the marks stands, and which it is; "" for none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(found, default=(-1, ""))


def begins_at_end(text: str, mark: str) -> int:
    """Characters at the end of the text that the mark may begin with."""
    return next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:n]))


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def call_of(text: str, key: str) -> tuple[str | None, str]:
    """Name and arguments of a call that is one JSON object; no name where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None, ""
    name, arguments = found.get("name"), found.get(key, {})
    if isinstance(arguments, str) and is_object(arguments):
        return (name, arguments) if isinstance(name, str) and name else (None, "")
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None, ""
    return name, json.dumps(arguments, ensure_ascii=False)
