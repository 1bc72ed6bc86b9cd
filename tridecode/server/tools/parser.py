"""Tool calls told apart from text, piece by piece: a small state machine for each way in which models write them.

A machine takes text cut anywhere and gives out events: ("text", text), ("name", name) for a call that begins, and
("arguments", JSON text) for pieces of its arguments. What does not become a call comes out as the text that it was. A
call whose arguments turn out broken after some of them were given out has `broken` set, and `raw` says how it stood.
"""

import json
import re
from dataclasses import dataclass

from .pieces import Value, begins_at_end, call_of, first_of, is_json, is_object, kinds_of, text_of

TEXT, NAME, ARGUMENTS = "text", "name", "arguments"
PYTHONS = {"True": "true", "False": "false", "None": "null"}  # as a template's Python wrote them
Event = tuple[str, str]


@dataclass
class Call:
    """One that was begun. raw: the text that it was read from, with white space before it and what parts it from
    others."""

    name: str
    arguments: str = ""
    raw: str = ""
    broken: bool = True  # until its end was seen


class Machine:
    """What all have in common: text until a call opens, white space around calls dropped.

    `_held` is what may still become part of a call, or white space before one. States are methods, which take what they
    can from it and say whether they got on.
    """

    opens: tuple[str, ...] = ()
    closes: str = ""

    def __init__(self, schemas: dict[str, dict]):
        """schemas: of each function's arguments, by name."""
        self.calls: list[Call] = []
        self._events: list[Event] = []
        self._schemas, self._held, self._raw = schemas, "", ""
        self._lead = ""  # white space before the mark that `_raw` begins with
        self._state = self._text
        self._begun_since = True  # text came behind the last call

    def feed(self, text: str) -> list[Event]:
        self._held += text
        while self._state():
            pass
        return self._given()

    def finish(self) -> list[Event]:
        """What is left at the end of the answer."""
        self._end()
        self._say(self._lead + self._raw + self._held)
        self._lead = self._raw = self._held = ""
        return self._given()

    def _end(self) -> None:
        """The last that comes of what is held."""

    def _given(self) -> list[Event]:
        given, self._events = self._events, []
        joined: list[Event] = []
        for kind, text in given:
            if joined and joined[-1][0] == kind != NAME:
                joined[-1] = kind, joined[-1][1] + text
            elif text or kind == NAME:
                joined.append((kind, text))
        return joined

    def _behind(self, text: str) -> str:
        """What is kept of a text that comes next: of one behind a call not its white space."""
        return text.lstrip() if self.calls and not self._begun_since and not self.calls[-1].broken else text

    def _say(self, text: str) -> None:
        text = self._behind(text)
        self._begun_since = self._begun_since or bool(text)
        self._events.append((TEXT, text))

    def _call(self, name: str) -> None:
        self._raw, self._lead = self._behind(self._lead) + self._raw, ""
        self.calls.append(Call(name))
        self._begun_since = False
        self._events.append((NAME, name))

    def _argue(self, text: str) -> None:
        self.calls[-1].arguments += text
        self._events.append((ARGUMENTS, text))

    def _close(self, raw: str) -> None:
        """The call's end was seen."""
        call = self.calls[-1]
        call.raw, call.broken = raw, not is_object(call.arguments)

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        self._raw += taken
        return taken

    # ---- states

    def _text(self) -> bool:
        """Give out what cannot be the beginning of a call, nor white space before one."""
        at, mark = first_of(self._held, self.opens)
        if mark:
            text = self._held[:at].rstrip()
            self._say(text)
            self._raw, self._lead, self._held = "", self._held[len(text) : at], self._held[at:]
            self._take(len(mark))
            self._state = self._head
            return True
        sure = len(self._held) - max(begins_at_end(self._held, mark) for mark in self.opens)
        sure = len(self._held[:sure].rstrip())
        self._say(self._held[:sure])
        self._held = self._held[sure:]
        return False

    def _skip_close(self) -> bool:
        """Take the tag that closes a call, if it is there; False where it may still come."""
        held = self._held.lstrip()
        if len(held) < len(self.closes) and self.closes.startswith(held):
            return False
        if held.startswith(self.closes):
            self._take(len(self._held) - len(held) + len(self.closes))
        return True

    def _head(self) -> bool:
        raise NotImplementedError

    def _arguments(self) -> bool:
        raise NotImplementedError

    def _no_call(self) -> bool:
        """What was read since the mark is text."""
        self._say(self._lead + self._raw)
        self._lead, self._raw, self._state = "", "", self._text
        return True


class JsonCalls(Machine):
    """Calls as JSON objects, {"name": ..., "arguments": {...}}: their name, then the arguments as they come."""

    key = "arguments"

    def __init__(self, schemas: dict[str, dict]):
        super().__init__(schemas)
        name = r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)+")\s*,\s*'
        self._begins = re.compile(rf'{name}"{self.key}"\s*:\s*(?=\{{)')
        self._value = Value()

    def _head(self) -> bool:
        if begun := self._begins.match(self._held):
            if (name := text_of(begun[1])) is None:
                return self._no_call()
            self._take(begun.end())
            self._call(name)
            self._value, self._state = Value(), self._arguments
            return True
        return self._whole()

    def _whole(self) -> bool:
        """Where the object is in another order, wait for its end."""
        start = len(self._held) - len(self._held.lstrip())
        if start == len(self._held):
            return False
        if self._held[start] != "{":
            return self._no_call()
        value = Value()
        end = value.feed(self._held[start:])
        if not value.ended:
            return False
        name, arguments = call_of(self._held[start : start + end], self.key)
        self._take(start + end)
        if name is None:
            return self._no_call()
        self._call(name)
        self._argue(arguments)
        self._state = self._tail
        return True

    def _arguments(self) -> bool:
        self._argue(self._take(self._value.feed(self._held)))
        if not self._value.ended:
            return False
        self._state = self._rest
        return True

    def _rest(self) -> bool:
        """The object ends behind its arguments."""
        if not self._held.lstrip():
            return False
        start = len(self._held) - len(self._held.lstrip())
        if self._held[start] != "}":
            self._close(self._raw)
            self.calls[-1].broken, self._raw, self._state = True, "", self._text
            return True
        self._take(start + 1)
        self._state = self._tail
        return True

    def _tail(self) -> bool:
        """What ends a call behind its object."""
        self._close(self._raw)
        self._raw, self._state = "", self._text
        return True

    def _end(self) -> None:
        if self._state in (self._arguments, self._rest):
            self.calls[-1].raw = self._raw + self._held
            self._raw = self._held = ""


class TaggedCalls(JsonCalls):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and Hermes write."""

    opens, closes = ("<tool_call>",), "</tool_call>"

    def _tail(self) -> bool:
        if not self._skip_close():
            return False
        return super()._tail()

    def _end(self) -> None:
        super()._end()
        if self._state == self._tail:
            self._close(self._raw + self._held)
            self._raw = self._held = ""


class BareCalls(JsonCalls):
    """{"name": ..., "parameters": {...}} as the whole answer, as Llama writes; several with ; between them."""

    opens, key = ("<|python_tag|>",), "parameters"
    _spoke = False  # a brace behind text is text

    def _text(self) -> bool:
        held = self._held.lstrip(" \t\r\n;" if self.calls else None)
        if not held:
            return False
        if held[0] == "{" and not (self._begun_since and self.calls) and not self._spoke:
            self._lead = self._held[: len(self._held) - len(held)]
            self._held, self._raw, self._state = held, "", self._head
            return True
        spoke = len(self._events)
        went_on = super()._text()
        self._spoke = self._spoke or any(text.strip() for kind, text in self._events[spoke:] if kind == TEXT)
        return went_on

    def _no_call(self) -> bool:
        self._spoke = True
        return super()._no_call()


class MistralCalls(JsonCalls):
    """[TOOL_CALLS] and a list of objects, or each name with its arguments behind it, [ARGS] between them or nothing."""

    opens = ("[TOOL_CALLS]",)
    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)")
    _listed = False

    def _head(self) -> bool:
        held = self._held.lstrip()
        if not self._listed and held.startswith("["):
            self._listed = True
            self._take(len(self._held) - len(held) + 1)
            return True
        if self._listed or held.startswith("{"):
            return super()._head()
        if named := self._named.match(self._held):
            self._take(named.end())
            self._call(named[1])
            self._value, self._state = Value(), self._arguments
            return True
        if re.fullmatch(r"\s*[\w.-]*\s*(\[[A-Z_]*\]?\s*\w*\s*(\[[A-Z]*\]?)?)?\s*", self._held):
            return False
        return self._no_call()

    def _arguments(self) -> bool:
        got_on = super()._arguments()
        if self._state == self._rest and not self._in_object:
            self._state = self._tail
        return got_on

    @property
    def _in_object(self) -> bool:
        """Whether the arguments stand in an object with their name."""
        return self._listed or self._raw.lstrip().removeprefix(self.opens[0]).lstrip().startswith("{")

    def _tail(self) -> bool:
        if not self._listed:
            return super()._tail()
        held = self._held.lstrip()
        if not held:
            return False
        self._listed = held[0] == ","
        self._take(len(self._held) - len(held) + (held[0] in ",]"))
        self._close(self._raw)
        self._raw, self._state = "", self._head if self._listed else self._text
        return True

    def _end(self) -> None:
        super()._end()
        if self._state == self._tail:
            self._close(self._raw)
            self._raw = ""


class XmlCalls(Machine):
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>, as Qwen3-Coder writes."""

    opens, closes = ("<tool_call>", "<function="), "</tool_call>"
    _name = re.compile(r"\s*(?:<function=)?([^<>\s]+)>")
    _parameter = re.compile(r"\s*<parameter=([^<>]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
    _function_end = re.compile(r"\s*</function>")

    def _head(self) -> bool:
        if (named := self._name.match(self._held)) and (self._raw != "<tool_call>" or "<function=" in named[0]):
            self._take(named.end())
            self._call(named[1])
            self._given_keys, self._state = 0, self._arguments
            return True
        held = self._held.lstrip()
        if "<function=".startswith(held[:10]) or self._raw != "<tool_call>" and re.fullmatch(r"[^<>\s]*", held):
            return False
        return False if held.startswith("<function=") and ">" not in held else self._no_call()

    def _arguments(self) -> bool:
        if "</" not in self._held:
            return False
        if found := self._parameter.match(self._held):
            self._take(found.end())
            key, value = found.groups()
            self._argue(("{" if not self._given_keys else ", ") + f"{json.dumps(key)}: {self._typed(key, value)}")
            self._given_keys += 1
            return True
        if ended := self._function_end.match(self._held):
            self._take(ended.end())
            self._argue("}" if self._given_keys else "{}")
            self._state = self._tail
            return True
        return False

    def _typed(self, key: str, value: str) -> str:
        """The value as JSON: text, unless its schema says that it is something else."""
        schema, kinds = self._schemas.get(self.calls[-1].name, {}), set()
        if isinstance(properties := schema.get("properties"), dict):
            kinds = kinds_of(properties.get(key), schema)
        word = value.strip()
        word = PYTHONS.get(word, word)
        wanted = word == "null" and "null" in kinds if "string" in kinds else bool(kinds)
        return word if wanted and is_json(word) else json.dumps(value, ensure_ascii=False)

    def _tail(self) -> bool:
        if not self._skip_close():
            return False
        self._close(self._raw)
        self._raw, self._state = "", self._text
        return True

    def _end(self) -> None:
        if self._state == self._arguments:
            self.calls[-1].raw = self._raw + self._held
        elif self._state == self._tail:
            self._close(self._raw)
        else:
            return
        self._raw = self._held = ""
