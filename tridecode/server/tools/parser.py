"""Streaming parsers that separate tool calls from text: one state machine for each format of calls.

A parser accepts text that is cut at any position and emits events: ("text", text), ("name", name) at the start of a
call, and ("arguments", JSON text) for parts of its arguments. Text that does not become a call is emitted unchanged. If
the arguments of a call turn out to be malformed after some of them were emitted, `broken` stays set, and `raw` contains
the text of the call.
"""

import json
import re
from dataclasses import dataclass

from .json_text import (
    ObjectScanner,
    decode_string,
    find_first,
    is_json,
    is_object,
    parse_call,
    partial_mark,
    schema_types,
)

TEXT, NAME, ARGUMENTS = "text", "name", "arguments"
# Python literal that a template may write -> JSON literal.
PYTHONS = {"True": "true", "False": "false", "None": "null"}
Event = tuple[str, str]


@dataclass
class Call:
    """A call whose name was parsed.

    Args:
        raw: the text of the call, with the white space and the separator in front of it.
        broken: whether its end is missing or its arguments are malformed.
        open: whether the answer ended within its arguments.
    """

    name: str
    arguments: str = ""
    raw: str = ""
    broken: bool = True
    open: bool = False


class CallParser:
    """Base class of the parsers. It emits text up to the mark that opens a call, and drops white space around calls.

    `_pending` is text that may become part of a call, or white space in front of one. Each state is a method that
    consumes a part of `_pending` and returns whether it made progress.

    Args:
        schemas: name of a function -> JSON schema of its arguments.
    """

    open_marks: tuple[str, ...] = ()
    close_mark: str = ""

    def __init__(self, schemas: dict[str, dict]):
        self.calls: list[Call] = []
        self._events: list[Event] = []
        self._schemas, self._pending, self._raw = schemas, "", ""
        self._leading_space = ""  # White space before the mark that begins `_raw`.
        self._state = self._text
        self._text_since_call = True  # Whether text followed the last call.
        self._length = 0  # Characters of the answer so far.
        self._spans: list[tuple[int, int]] = []

    def feed(self, text: str) -> list[Event]:
        """Parse the next part of the answer and return its events."""
        self._length += len(text)
        self._pending += text
        while self._state():
            pass
        return self._take_events()

    def finish(self) -> list[Event]:
        """Return the events of the remaining text at the end of the answer."""
        self._end()
        self._emit_text(self._leading_space + self._raw + self._pending)
        self._leading_space = self._raw = self._pending = ""
        return self._take_events()

    def take_spans(self) -> list[tuple[int, int]]:
        """Return where in the answer the texts of the TEXT events since the last call of this method are."""
        spans, self._spans = self._spans, []
        return spans

    def _end(self) -> None:
        """Complete or abandon the open call at the end of the answer."""

    def _take_events(self) -> list[Event]:
        """Return the events so far, with consecutive events of one kind joined."""
        events, self._events = self._events, []
        joined: list[Event] = []
        for kind, text in events:
            if joined and joined[-1][0] == kind != NAME:
                joined[-1] = kind, joined[-1][1] + text
            elif text or kind == NAME:
                joined.append((kind, text))
        return joined

    def _strip_after_call(self, text: str) -> str:
        """Return the text without leading white space if it directly follows a valid call."""
        return text.lstrip() if self.calls and not self._text_since_call and not self.calls[-1].broken else text

    def _emit_text(self, text: str) -> None:
        """Emit `text`, with which the answer after the last event begins."""
        end = self._length - len(self._leading_space + self._raw + self._pending) + len(text)
        text = self._strip_after_call(text)
        if text:
            self._spans.append((end - len(text), end))
        self._text_since_call = self._text_since_call or bool(text)
        self._events.append((TEXT, text))

    def _emit_call(self, name: str) -> None:
        self._raw, self._leading_space = self._strip_after_call(self._leading_space) + self._raw, ""
        self.calls.append(Call(name))
        self._text_since_call = False
        self._events.append((NAME, name))

    def _emit_arguments(self, text: str) -> None:
        self.calls[-1].arguments += text
        self._events.append((ARGUMENTS, text))

    def _close(self, raw: str) -> None:
        """Complete the last call, whose text is `raw`."""
        call = self.calls[-1]
        call.raw, call.broken = raw, not is_object(call.arguments)

    def _take(self, count: int) -> str:
        """Move `count` characters from `_pending` to `_raw` and return them."""
        taken, self._pending = self._pending[:count], self._pending[count:]
        self._raw += taken
        return taken

    # ---- states

    def _text(self) -> bool:
        """Emit text that can be neither the beginning of a call nor white space in front of one."""
        at, mark = find_first(self._pending, self.open_marks)
        if mark:
            text = self._pending[:at].rstrip()
            self._emit_text(text)
            self._raw, self._leading_space, self._pending = "", self._pending[len(text) : at], self._pending[at:]
            self._take(len(mark))
            self._state = self._head
            return True
        end = len(self._pending) - max(partial_mark(self._pending, mark) for mark in self.open_marks)
        end = len(self._pending[:end].rstrip())
        self._emit_text(self._pending[:end])
        self._pending = self._pending[end:]
        return False

    def _skip_close(self) -> bool:
        """Consume the closing mark if it follows. Return False if only a part of it has arrived."""
        pending = self._pending.lstrip()
        if len(pending) < len(self.close_mark) and self.close_mark.startswith(pending):
            return False
        if pending.startswith(self.close_mark):
            self._take(len(self._pending) - len(pending) + len(self.close_mark))
        return True

    def _head(self) -> bool:
        """Parse the text between the opening mark and the arguments."""
        raise NotImplementedError

    def _arguments(self) -> bool:
        """Parse the arguments."""
        raise NotImplementedError

    def _reject_call(self) -> bool:
        """Emit the text since the opening mark as text."""
        self._emit_text(self._leading_space + self._raw)
        self._leading_space, self._raw, self._state = "", "", self._text
        return True


class JsonCallParser(CallParser):
    """Base of the parsers of calls that are JSON objects, {"name": ..., "arguments": {...}}."""

    key = "arguments"

    def __init__(self, schemas: dict[str, dict]):
        super().__init__(schemas)
        name = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*'
        self._start = re.compile(rf'{name}"{self.key}"\s*:\s*(?=\{{)')
        self._value = ObjectScanner()

    def _head(self) -> bool:
        if match := self._start.match(self._pending):
            if (name := decode_string(match[1])) is None:
                return self._reject_call()
            self._take(match.end())
            self._emit_call(name)
            self._value, self._state = ObjectScanner(), self._arguments
            return True
        return self._whole_object()

    def _whole_object(self) -> bool:
        """Parse a call whose object does not begin with the name, when the end of the object has arrived.

        Return whether it has.
        """
        start = len(self._pending) - len(self._pending.lstrip())
        if start == len(self._pending):
            return False
        if self._pending[start] != "{":
            return self._reject_call()
        value = ObjectScanner()
        end = value.feed(self._pending[start:])
        if not value.ended:
            return False
        name, arguments = parse_call(self._pending[start : start + end], self.key)
        self._take(start + end)
        if name is None:
            return self._reject_call()
        self._emit_call(name)
        self._emit_arguments(arguments)
        self._state = self._tail
        return True

    def _arguments(self) -> bool:
        self._emit_arguments(self._take(self._value.feed(self._pending)))
        if not self._value.ended:
            return False
        self._state = self._object_end
        return True

    def _object_end(self) -> bool:
        """Consume the end of the object after its arguments."""
        if not self._pending.lstrip():
            return False
        start = len(self._pending) - len(self._pending.lstrip())
        if self._pending[start] != "}":
            self._close(self._raw)
            self.calls[-1].broken, self._raw, self._state = True, "", self._text
            return True
        self._take(start + 1)
        self._state = self._tail
        return True

    def _tail(self) -> bool:
        """Complete the call after its object."""
        self._close(self._raw)
        self._raw, self._state = "", self._text
        return True

    def _end(self) -> None:
        if self._state in (self._arguments, self._object_end):
            self.calls[-1].raw, self.calls[-1].open = self._raw + self._pending, True
            self._raw = self._pending = ""


class TaggedCallParser(JsonCallParser):
    """Parses <tool_call>{"name": ..., "arguments": {...}}</tool_call>, the format of Qwen and Hermes."""

    open_marks, close_mark = ("<tool_call>",), "</tool_call>"

    def _tail(self) -> bool:
        if not self._skip_close():
            return False
        return super()._tail()

    def _end(self) -> None:
        super()._end()
        if self._state == self._tail:
            self._close(self._raw + self._pending)
            self._raw = self._pending = ""


class BareCallParser(JsonCallParser):
    """Parses {"name": ..., "parameters": {...}}, one or several separated by `;`, the format of Llama."""

    open_marks, key = ("<|python_tag|>",), "parameters"
    _had_text = False  # After text, a brace does not begin a call.

    def _text(self) -> bool:
        pending = self._pending.lstrip(" \t\r\n;" if self.calls else None)
        if not pending:
            return False
        if pending[0] == "{" and not (self._text_since_call and self.calls) and not self._had_text:
            self._leading_space = self._pending[: len(self._pending) - len(pending)]
            self._pending, self._raw, self._state = pending, "", self._head
            return True
        before = len(self._events)
        progress = super()._text()
        self._had_text = self._had_text or any(text.strip() for kind, text in self._events[before:] if kind == TEXT)
        return progress

    def _reject_call(self) -> bool:
        self._had_text = True
        return super()._reject_call()


class MistralCallParser(JsonCallParser):
    """A parser of Mistral's tool calls.

    A call has one of two forms. In the first form, [TOOL_CALLS] precedes a JSON list of objects. In the second form,
    [TOOL_CALLS] precedes the name of the tool, an optional [ARGS], and a JSON object of arguments.
    """

    open_marks = ("[TOOL_CALLS]",)
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
    _in_list = False

    def _head(self) -> bool:
        pending = self._pending.lstrip()
        if not self._in_list and pending.startswith("["):
            self._in_list = True
            self._take(len(self._pending) - len(pending) + 1)
            return True
        if self._in_list or pending.startswith("{"):
            return super()._head()
        if named := self._named.match(self._pending):
            self._take(named.end())
            self._emit_call(named[1])
            self._value, self._state = ObjectScanner(), self._arguments
            return True
        if re.fullmatch(r"\s*[\w.-]*\s*(\[[A-Z_]*\]?\s*\w*\s*(\[[A-Z]*\]?)?)?\s*", self._pending):
            return False
        return self._reject_call()

    def _arguments(self) -> bool:
        progress = super()._arguments()
        if self._state == self._object_end and not self._in_object:
            self._state = self._tail
        return progress

    @property
    def _in_object(self) -> bool:
        """Whether the arguments are in an object with their name."""
        return self._in_list or self._raw.lstrip().removeprefix(self.open_marks[0]).lstrip().startswith("{")

    def _tail(self) -> bool:
        if not self._in_list:
            return super()._tail()
        pending = self._pending.lstrip()
        if not pending:
            return False
        self._in_list = pending[0] == ","
        self._take(len(self._pending) - len(pending) + (pending[0] in ",]"))
        self._close(self._raw)
        self._raw, self._state = "", self._head if self._in_list else self._text
        return True

    def _end(self) -> None:
        super()._end()
        if self._state == self._tail:
            self._close(self._raw)
            self._raw = ""


class XmlCallParser(CallParser):
    """Parses the format of Qwen3-Coder.

    It is <tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>.
    """

    open_marks, close_mark = ("<tool_call>", "<function="), "</tool_call>"
    _name = re.compile(r"\s*(?:<function=)?([^<>\s]+)>")
    _parameter = re.compile(r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    _function_end = re.compile(r"\s*</function>")

    def _head(self) -> bool:
        if (named := self._name.match(self._pending)) and (self._raw != "<tool_call>" or "<function=" in named[0]):
            self._take(named.end())
            self._emit_call(named[1])
            self._keys_seen, self._state = 0, self._arguments
            return True
        pending = self._pending.lstrip()
        if "<function=".startswith(pending[:10]) or self._raw != "<tool_call>" and re.fullmatch(r"[^<>\s]*", pending):
            return False
        return False if pending.startswith("<function=") and ">" not in pending else self._reject_call()

    def _arguments(self) -> bool:
        if "</" not in self._pending:
            return False
        if match := self._parameter.match(self._pending):
            self._take(match.end())
            key, value = match.groups()
            self._emit_arguments(
                ("{" if not self._keys_seen else ", ") + f"{json.dumps(key)}: {self._typed(key, value)}"
            )
            self._keys_seen += 1
            return True
        if match := self._function_end.match(self._pending):
            self._take(match.end())
            self._emit_arguments("}" if self._keys_seen else "{}")
            self._state = self._tail
            return True
        return False

    def _typed(self, key: str, value: str) -> str:
        """Return the text of a parameter as JSON. Its type is the type that its schema allows, or else a string."""
        schema, types = self._schemas.get(self.calls[-1].name, {}), set()
        if isinstance(properties := schema.get("properties"), dict):
            types = schema_types(properties.get(key), schema)
        word = value.strip()
        word = PYTHONS.get(word, word)
        typed = word == "null" and "null" in types if "string" in types else bool(types)
        return word if typed and is_json(word) else json.dumps(value, ensure_ascii=False)

    def _tail(self) -> bool:
        if not self._skip_close():
            return False
        self._close(self._raw)
        self._raw, self._state = "", self._text
        return True

    def _end(self) -> None:
        if self._state == self._arguments:
            self.calls[-1].raw, self.calls[-1].open = self._raw + self._pending, True
        elif self._state == self._tail:
            self._close(self._raw)
        else:
            return
        self._raw = self._pending = ""
