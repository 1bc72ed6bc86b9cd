"""Functions of the parsers of tool calls: search in partial text, and checks of JSON and of schemas."""

import json

import msgspec

# All other values are numbers.
TYPES = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object"}


class ObjectScanner:
    """Finds the end of a JSON object that arrives in parts."""

    def __init__(self):
        self._depth, self.quoted, self._escaped, self.ended = 0, False, False, False

    def feed(self, text: str) -> int:
        """Return the number of characters of `text` that belong to the object; set `ended` at its end."""
        for i, char in enumerate(text):
            if self.quoted:
                self.quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    self.ended = True
                    return i + 1
        return len(text)


def find_first(text: str, marks: tuple[str, ...]) -> tuple[int, str]:
    """Return (position, mark) of the first mark in the text, (-1, "") if it contains none."""
    matches = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    return min(matches, default=(-1, ""))


def partial_mark(text: str, mark: str) -> int:
    """Return the number of characters at the end of `text` that are a proper prefix of `mark`."""
    return next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:n]))


def is_json(text: str, kind: type = object) -> bool:
    """Return whether `text` is JSON of this type. Unlike Python's json, it refuses NaN and lone surrogates."""
    try:
        return isinstance(msgspec.json.decode(text), kind)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return False


def is_object(text: str) -> bool:
    """Return whether `text` is a JSON object."""
    return is_json(text, dict)


def complete_object(text: str) -> dict:
    """Return the complete members of a JSON object whose end is missing, as the clients of streams do."""
    scanner, closing = ObjectScanner(), ""
    cuts = [("", "{}")]  # (text up to a position at which a member or a value is missing, its closing brackets)
    for i, char in enumerate(text):
        quoted = scanner.quoted
        scanner.feed(char)
        if quoted or char not in "{[]},":
            continue
        if char == ",":
            cuts.append((text[:i], closing))
        elif char in "{[":
            closing = ("}" if char == "{" else "]") + closing
            cuts.append((text[: i + 1], closing))
        else:
            closing = closing[1:]
    cuts.append((text, closing))
    return next(msgspec.json.decode(part + end) for part, end in reversed(cuts) if is_object(part + end))


def decode_string(text: str) -> str | None:
    """Return the value of a JSON string, None if `text` is not one."""
    return json.loads(text) if is_json(text, str) else None


def schema_types(schema, root: dict) -> set[str]:
    """Return the types that a JSON schema within `root` explicitly allows."""
    types, seen, left = set(), set(), [schema]  # References may be circular, so each part is visited once.
    while left:
        part = left.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        if "type" in part:
            types |= {name for name in _as_list(part["type"]) if isinstance(name, str)}
            continue
        values = [*_as_list(part.get("enum", [])), *([part["const"]] if "const" in part else [])]
        types |= {TYPES.get(type(value), "number") for value in values}
        for name in ("anyOf", "oneOf", "allOf"):
            left += _as_list(part.get(name, []))
        left.append(_resolve(part.get("$ref"), root))
    return types


def _as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def _resolve(path, root: dict):
    """Return the part of `root` to which a reference such as # or #/$defs/name points, or None for other references."""
    first, *names = path.split("/") if isinstance(path, str) else [""]
    part = root if first == "#" else None
    for name in names:
        part = part.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(part, dict) else None
    return part


def parse_call(text: str, key: str) -> tuple[str | None, str]:
    """Return (name, arguments as JSON text) of a call that is one JSON object; (None, "") if it is invalid."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None, ""
    name, arguments = call.get("name"), call.get(key, {})
    encoded = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not name or not is_json(json.dumps(name)) or not is_object(encoded):
        return None, ""
    return name, encoded
