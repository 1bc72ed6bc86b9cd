"""What the machines of tool calls share: where things begin and end in a text that comes in pieces."""

import json

import msgspec

TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}  # others are numbers


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


def is_json(text: str, kind: type = object) -> bool:
    """Whether it is a value of that type by JSON's own rules: Python would also read NaN, and half a character."""
    try:
        return isinstance(msgspec.json.decode(text), kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False


def is_object(text: str) -> bool:
    return is_json(text, dict)


def text_of(written: str) -> str | None:
    """What a JSON string says, None where it is none."""
    return json.loads(written) if is_json(written, str) else None


def kinds_of(schema, root: dict) -> set[str]:
    """The types that a JSON schema within `root` allows, as far as it says so."""
    kinds, seen, left = set(), set(), [schema]  # each part once: they may refer to one another
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if "type" in part:
            kinds |= {kind for kind in _listed(part["type"]) if isinstance(kind, str)}
            continue
        values = [*_listed(part.get("enum", [])), *([part["const"]] if "const" in part else [])]
        kinds |= {TYPES.get(type(value), "number") for value in values}
        for name in ("anyOf", "oneOf", "allOf"):
            left += _listed(part.get(name, []))
        left.append(_pointed(part.get("$ref"), root))
    return kinds


def _listed(value) -> list:
    return value if isinstance(value, list) else [value]


def _pointed(path, root: dict):
    """What a reference like # or #/$defs/name stands for, None for another one."""
    first, *names = path.split("/") if isinstance(path, str) else [""]
    found = root if first == "#" else None
    for name in names:
        found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found


def call_of(text: str, key: str) -> tuple[str | None, str]:
    """Name and arguments of a call that is one JSON object; no name where it is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None, ""
    name, arguments = found.get("name"), found.get(key, {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not name or not is_json(json.dumps(name)) or not is_object(written):
        return None, ""
    return name, written
