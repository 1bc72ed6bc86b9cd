"""Declarations of arguments, and the checks of their values.

A field of EngineOptions or SamplingParams carries an Option: its constraint, help text and group. The command line, the
configuration file, environment variables, docs, HTTP requests and generation_config.json all use the same constraint.
"""

import difflib
import operator
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from .errors import ParameterError, PromptError, conflict

LARGEST = 2**31 - 2  # Positions and counts are 32-bit integers.
ROLES = ("system", "developer", "user", "assistant", "tool")  # Roles of chat messages.
WORDS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}

T = TypeVar("T")
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = _repr.maxlong = 60


def shown(value: object) -> str:
    """Return the repr of a value on one line for a message, cut to about 60 characters."""
    try:
        return " ".join(_repr.repr(value).split())
    except ValueError:  # Python refuses to convert an integer with thousands of digits to a string.
        return f"an {type(value).__name__} of thousands of digits"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the word of `known` of which `word` may be a misspelling, or None.

    Case and leading punctuation are ignored, so that --stop and /stop are not similar to every option and command.
    """
    bare = {name.lstrip("-/").lower(): name for name in known}
    word = word.lstrip("-/").lower()
    for near in difflib.get_close_matches(word, bare, cutoff=0.75):
        if near[:1] == word[:1] or sorted(near) == sorted(word) or near in word or word in near:
            return bare[near]
    return None


def listed(words: Sequence[str]) -> str:
    """Join words as "a, b or c"."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


class Rejected(ValueError):
    """A constraint does not accept a value.

    Args:
        code: "type", "range" or "choice".
        detail: text that replaces `expected` of the constraint in the message, for example about one entry of a list.
        entry: the part of the value that `detail` is about.
    """

    def __init__(self, code: str, detail: str = "", entry: Any = None):
        super().__init__(code)
        self.code, self.detail, self.entry = code, detail, entry


class Constraint:
    """The values that an argument may have.

    expects: the text that follows "must be" in an error message. {0} in it is replaced by the constraint.
    """

    expects = ""

    @property
    def expected(self) -> str:
        """The text after "must be" in an error message, such as "a positive integer"."""
        return self.expects.format(self)

    def accept(self, value: Any) -> Any:
        """Return the value in its normal form. Raises Rejected."""
        raise NotImplementedError

    def read(self, text: str) -> Any:
        """Convert a text from the command line, environment or file to a value, without checking it."""
        return text

    def check(self, name: str, value: Any) -> Any:
        """Return the value in its normal form. Raises ParameterError, which names the argument."""
        try:
            return self.accept(value)
        except Rejected as error:
            message = f"{name} must be {self.expected}, got {shown(value)}"
            if error.detail:
                message = f"{name}: {error.detail}, got {shown(error.entry)}"
            raise ParameterError(message, argument=name, code=error.code) from None

    def parse(self, text: str) -> Any:
        """Return the checked value of a text. Raises ParameterError without a name."""
        try:
            return self.accept(self.read(text))
        except Rejected as error:
            expected = error.detail or f"expected {self.expected}"
            raise ParameterError(f"{expected}, got {text[:80]!r}", code=error.code) from None

    @property
    def item(self) -> "Constraint":
        """The constraint of one value of a repeatable option."""
        return self


@dataclass(frozen=True)
class Choice(Constraint):
    """One of several words."""

    choices: tuple[str, ...]

    @property
    def expected(self) -> str:
        """The choices, as "a, b or c"."""
        return listed(self.choices)

    def accept(self, value: Any) -> str:
        """Return the value if it is one of the choices. Raises Rejected."""
        if not isinstance(value, str) or value not in self.choices:
            raise Rejected("choice")
        return value


@dataclass(frozen=True)
class Integer(Constraint):
    """An integer of Python, numpy or torch. `high_prefix` is text before the upper limit in messages."""

    low: int
    high: int = LARGEST
    high_prefix: str = ""
    expects: str = "an integer from {0.low:,} to {0.high_prefix}{0.high:,}"

    def accept(self, value: Any) -> int:
        """Return the value as an int. Raises Rejected for other types, bool included, and outside the limits."""
        if isinstance(value, bool):
            raise Rejected("type")
        try:
            number = operator.index(value)
        except TypeError:
            raise Rejected("type") from None
        if not self.low <= number <= self.high:
            raise Rejected("range")
        return number

    def read(self, text: str) -> int | str:
        """Return the integer that the text contains, or the text itself."""
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,39}", text.strip()) else text


@dataclass(frozen=True)
class Number(Constraint):
    """A number.

    If `above` is set, the number must be greater than the lower limit. Each of `words` is also accepted.
    """

    low: float
    high: float
    above: bool = False
    words: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """The limits, and the words that are also accepted."""
        bound = "above" if self.above else "from"
        others = "".join(f' or "{word}"' for word in self.words)
        return f"a number {bound} {self.low:,.10g} to {self.high:,.10g}{others}"

    def accept(self, value: Any) -> float | int | str:
        """Return the number or the accepted word. Raises Rejected for other types and outside the limits."""
        if isinstance(value, str) and value in self.words:
            return value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Rejected("type")
        if not self.low <= value <= self.high or self.above and value == self.low:
            raise Rejected("range")
        return value

    def read(self, text: str) -> float | str:
        """Return the number that the text contains, or the text itself."""
        try:
            return float(text)
        except ValueError:
            return text


@dataclass(frozen=True)
class Flag(Constraint):
    """True or False."""

    expects = "True or False"

    def accept(self, value: Any) -> bool:
        """Return the bool. Raises Rejected for any other type."""
        if not isinstance(value, bool):
            raise Rejected("type")
        return value

    def read(self, text: str) -> bool | str:
        """Return the value of a word such as on, true or 0, or the text itself."""
        return WORDS.get(text.strip().lower(), text)


@dataclass(frozen=True)
class Text(Constraint):
    """A string that matches a pattern as a whole."""

    expects: str = "a string"
    pattern: str = r"(?s).*"

    def accept(self, value: Any) -> str:
        """Return the text if it matches the pattern. Raises Rejected."""
        if not isinstance(value, str):
            raise Rejected("type")
        if not re.fullmatch(self.pattern, value):
            raise Rejected("choice")
        return value


@dataclass(frozen=True)
class Several(Constraint):
    """Several values of one constraint, separated by commas on the command line.

    Args:
        each: the constraint of each value.
        expects: as in Constraint.
        min_items: minimum number of values. If it is 0, None means no value and a string means one.
        ascending: each value must be larger than its predecessor.
    """

    each: Constraint
    expects: str = "a list"
    min_items: int = 1
    ascending: bool = False

    @property
    def item(self) -> Constraint:
        """The constraint of each value."""
        return self.each

    def accept(self, value: Any) -> tuple[Any, ...]:
        """Return the values as a tuple, each in its normal form.

        Raises:
            Rejected: the value is not a collection, has too few values, or contains a wrong one, which `detail` names.
        """
        if not self.min_items and (value is None or isinstance(value, str)):
            value = () if value is None else (value,)
        unordered = (Set,) if self.ascending else ()
        other = isinstance(value, (str, bytes, bytearray, memoryview, Mapping, *unordered))
        items = list(value) if isinstance(value, Iterable) and not other else None
        if items is None or len(items) < self.min_items:
            raise Rejected("type")
        values = []
        for entry in items:
            try:
                values.append(self.each.accept(entry))
            except Rejected as error:
                detail = error.detail or f"every entry must be {self.each.expected}"
                raise Rejected("range" if error.code == "range" else "type", detail, entry) from None
        if self.ascending and values != sorted(set(values)):
            raise Rejected("range")
        return tuple(values)

    def read(self, text: str) -> list[Any]:
        """Return the values between commas; an empty list for an empty text."""
        return [self.each.read(part) for part in text.split(",")] if text.strip() else []


@dataclass(frozen=True)
class Pair(Constraint):
    """Two integers from 1 to `largest`, the larger one first. The command line writes them as "8:2"."""

    largest: int
    example: tuple[int, int]
    expects: str = "two numbers from {0.largest} down to 1, the larger first, like {0.example[0]} and {0.example[1]}"

    def accept(self, value: Any) -> tuple[int, int]:
        """Return the two integers as a tuple. Raises Rejected if they are out of range or in the wrong order."""
        if not isinstance(value, Sequence) or len(value) != 2 or not all(type(each) is int for each in value):
            raise Rejected("type")
        if not 1 <= value[1] <= value[0] <= self.largest:
            raise Rejected("range")
        return value[0], value[1]

    def read(self, text: str) -> list[int | str]:
        """Return the numbers between colons or commas."""
        return [Integer(1).read(part) for part in re.split("[:,]", text)]


@dataclass(frozen=True)
class Option:
    """An argument of Python, a command and the configuration file.

    Args:
        constraint: the values that it accepts.
        help: its description in the help and the docs.
        brief: its line in `--help`. Options without it are only in `--help-all`.
        default: its value if it is not set.
        group: the heading under which help and docs show it.
        name: the name of the field.
        commands: the commands that accept it; empty for Python only.
        unsaved: commands in which only the command line can set it.
        defaults: name of a command, or of an option that is set -> the default that then replaces `default`.
        default_text: the default in words.
        metavar: placeholder of the value in the help.
        singular: the name of the flag if it is not that of the field, because the flag sets one value of several.
        repeated: the command line collects several values in a list.
        from_file: the command line takes the name of a file that contains the value.
        exclusive: name of a set of options; only one of them may be set.
        aliases: further flags, each with the value that it sets and its help.
        needs: (another option that must also be set, the end of the error message if it is not).
        excludes: name of another option -> (its values that contradict this option, or () for any value; the end of the
            error message, in which {} is the other option's value).
    """

    constraint: Constraint
    help: str
    default: Any = None
    group: str = ""
    brief: str = ""
    name: str = ""
    commands: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    default_text: str = ""
    metavar: str | None = None
    singular: str = ""
    repeated: bool = False
    from_file: bool = False
    exclusive: str = ""
    aliases: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    needs: tuple[str, str] | None = None
    excludes: Mapping[str, tuple[tuple[object, ...], str]] = field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The flag on the command line: --name, or --no-name for a flag that is on by default."""
        negative = isinstance(self.constraint, Flag) and self.default is True
        return f"--{'no-' if negative else ''}{(self.singular or self.name).replace('_', '-')}"

    @property
    def flag_help(self) -> str:
        """The help of the flag."""
        return f"do not {self.help}" if self.flag.startswith("--no-") and self.default is True else self.help

    @property
    def described_default(self) -> str:
        """The default in words; empty for flags."""
        if self.default_text or isinstance(self.constraint, Flag) or self.default is None:
            return self.default_text
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def check(self, value: Any, name: str = "") -> Any:
        """Return the value in its normal form. None is accepted if it is the default. Raises ParameterError."""
        if value is None and self.default is None:
            return None
        return self.constraint.check(name or self.name, value)


def option(default: Any, constraint: Constraint, help: str, **more: Any) -> Any:
    """Declare a dataclass field with an Option. `more` has further fields of Option."""
    return field(default=default, metadata={"option": Option(constraint, help, default, **more)})


_declared: dict[type, dict[str, Option]] = {}


def options_of(cls: type) -> dict[str, Option]:
    """Return the options that the fields of a dataclass declare, by name."""
    if cls not in _declared:  # The result is cached, because a server checks the parameters of each request.
        declared = {each.name: each.metadata.get("option") for each in fields(cls)}
        _declared[cls] = {name: replace(option, name=name) for name, option in declared.items() if option}
    return _declared[cls]


def check_fields(instance: Any) -> None:
    """Check and normalize the fields of a frozen dataclass that have an Option. Raises ParameterError."""
    options = options_of(type(instance))
    for name, declared in options.items():
        object.__setattr__(instance, name, declared.check(getattr(instance, name)))
    for name, declared in options.items():
        if getattr(instance, name) == declared.default:
            continue
        if declared.needs and getattr(instance, declared.needs[0]) is None:
            raise conflict(name, declared.needs[1])
        for other, (values, why) in declared.excludes.items():
            value = getattr(instance, other)
            if value in values if values else value is not None:
                raise conflict(name, why.format(value))


def documented(cls: type[T]) -> type[T]:
    """Add the options of a dataclass to its docstring, as Args."""
    lines = []
    for name, declared in options_of(cls).items():
        default = declared.default_text if declared.default in (None, (), {}) else repr(declared.default)
        lines.append(f"        {name}: {declared.help}.{f' Default: {default}.' if default else ''}")
    cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\n    Args:\n" + "\n".join(lines) + "\n"
    return cls


def mapping(name: str, value: Any) -> dict[str, Any]:
    """Return a dict with strings as keys, empty for None. Raises ParameterError."""
    if not isinstance(value, Mapping | None) or not all(isinstance(key, str) for key in value or ()):
        message = f"{name} must be a dict with strings as keys, got {shown(value)}"
        raise ParameterError(message, argument=name, code="type")
    return dict(value or {})


def function(name: str, value: object) -> None:
    """Check that a value is callable or None. Raises ParameterError."""
    if value is not None and not callable(value):
        message = f"{name} must be a function or None, got {shown(value)}"
        raise ParameterError(message, argument=name, code="type")


def check_messages(value: Any, place: str = "", roles: Sequence[str] = ROLES) -> list[dict[str, Any]]:
    """Return a chat, which is a list of dicts with the strings "role" and "content".

    Args:
        place: the source of the chat, for the message.
        roles: the accepted roles; empty accepts any role.

    Raises:
        PromptError: a message is wrong. The error has its index, or with `place` its number from 1.
    """
    begin = f"{place}: " if place else ""
    if not isinstance(value, list | tuple) or not value:
        raise PromptError(f'{begin}expected a list like [{{"role": "user", "content": "..."}}], got {shown(value)}')
    for number, message in enumerate(value, 1 if place else 0):
        subject = f"{begin}message {number:,}"
        if not isinstance(message, dict):
            raise PromptError(f"{subject} must be a dict with role and content, got {shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                got = shown(message[key]) if key in message else "none"
                raise PromptError(f"{subject}: {key} must be a string, got {got}")
        if roles and message["role"] not in roles:
            raise PromptError(f"{subject}: role must be one of {', '.join(roles)}, got {shown(message['role'])}")
    return list(value)
