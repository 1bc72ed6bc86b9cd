"""Regular expressions from checkpoints, matched in limited time.

Python's re needs exponential time for some patterns, and a checkpoint comes from a stranger. This matcher computes the
set of positions at which a part of the pattern can end, and its steps are limited.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from re import _parser  # type: ignore[attr-defined]
from typing import Any

from ...arguments import shown
from ...errors import CheckpointError

LONGEST = 500  # characters of a pattern
STEPS = 100_000  # to match one name; usual patterns need some hundred
UNSUPPORTED = "flags, lookbehind, backreferences and possessive quantifiers"
CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda c: c.isalnum() or c == "_",
}
Nodes = Any  # a list of (operation, argument), as Python's parser returns it


@dataclass(frozen=True)
class Pattern:
    """A regular expression without flags, lookbehind, backreferences and possessive quantifiers.

    Raises ValueError with the reason if it is invalid.
    """

    text: str

    def __post_init__(self) -> None:
        _parsed(self.text)

    def match(self, name: str) -> bool:
        """Return whether the pattern matches at the start of a name. Raises CheckpointError if it needs too long."""
        return bool(_Matcher(name, self.text).ends(_parsed(self.text), 0))


@lru_cache(1024)
def _parsed(text: str) -> Nodes:
    if len(text) > LONGEST:
        raise ValueError(f"it is longer than {LONGEST} characters")
    try:
        tree = _parser.parse(text)
        supported = tree.state.flags == re.UNICODE.value and _supported(tree)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"it is invalid: {error}") from None
    if not supported:
        raise ValueError(f"it uses {UNSUPPORTED}, which are not supported")
    return tree


def _supported(nodes: Nodes) -> bool:
    """Return whether the matcher knows all operations."""
    for operation, argument in nodes:
        name, children = str(operation), []
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            children = [argument[2]]
        elif name == "BRANCH":
            children = argument[1]
        elif name == "SUBPATTERN" and not argument[1] and not argument[2]:
            children = [argument[3]]
        elif name in ("ASSERT", "ASSERT_NOT") and argument[0] == 1:
            children = [argument[1]]
        elif name not in ("LITERAL", "NOT_LITERAL", "ANY", "IN", "AT"):
            return False
        if not all(_supported(child) for child in children):
            return False
    return True


@dataclass
class _Matcher:
    """The positions at which parts of a pattern can end in one text."""

    text: str
    pattern: str
    steps: int = 0
    known: dict[tuple[int, int], frozenset[int]] = field(default_factory=dict)

    def ends(self, nodes: Nodes, start: int) -> frozenset[int]:
        """Return the positions at which a sequence that begins at `start` can end."""
        key = id(nodes), start
        if key not in self.known:
            positions = frozenset((start,))
            for operation, argument in nodes:
                positions = self._after(str(operation), argument, positions)
            self.known[key] = positions
        return self.known[key]

    def _after(self, operation: str, argument: Any, starts: frozenset[int]) -> frozenset[int]:
        """Return the positions at which one operation can end."""
        self.steps += 1 + len(starts)
        if self.steps > STEPS:
            raise CheckpointError(
                f"quantization_config: the regular expression {shown(self.pattern)} needs too many steps; "
                "remove nested repetitions"
            )
        match operation:
            case "BRANCH":
                return frozenset().union(*(self.ends(branch, start) for branch in argument[1] for start in starts))
            case "SUBPATTERN":
                return frozenset().union(*(self.ends(argument[3], start) for start in starts))
            case "MAX_REPEAT" | "MIN_REPEAT":
                lowest, highest, nodes = argument
                return self._repeat(lowest, highest, nodes, starts)
            case "ASSERT" | "ASSERT_NOT":
                expected = operation == "ASSERT"
                return frozenset(start for start in starts if bool(self.ends(argument[1], start)) == expected)
            case "AT":
                return frozenset(start for start in starts if self._at(str(argument), start))
        text = self.text
        return frozenset(at + 1 for at in starts if at < len(text) and _matches(operation, argument, text[at]))

    def _repeat(self, lowest: int, highest: int, nodes: Nodes, positions: frozenset[int]) -> frozenset[int]:
        reached: frozenset[int] = frozenset()
        for count in range(highest + 1):
            if count >= lowest:
                if positions <= reached:
                    break
                reached |= positions
            following = frozenset().union(*(self.ends(nodes, at) for at in positions))
            if following == positions:  # All further repetitions end here too.
                return reached | positions
            positions = following
        return reached

    def _at(self, place: str, start: int) -> bool:
        if place in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return start == 0
        if place in ("AT_END", "AT_END_STRING"):
            return start == len(self.text)
        word = CATEGORIES["CATEGORY_WORD"]
        before, after = (0 <= at < len(self.text) and word(self.text[at]) for at in (start - 1, start))
        return (before != after) == (place == "AT_BOUNDARY")


def _matches(operation: str, argument: Any, char: str) -> bool:
    """Return whether one character matches."""
    match operation:
        case "ANY":
            return char != "\n"
        case "LITERAL":
            return ord(char) == argument
        case "NOT_LITERAL":
            return ord(char) != argument
        case "RANGE":
            return argument[0] <= ord(char) <= argument[1]
        case "CATEGORY":
            name = str(argument)
            return CATEGORIES[name.replace("_NOT_", "_")](char) != ("_NOT_" in name)
    negated = str(argument[0][0]) == "NEGATE"
    return any(_matches(str(kind), value, char) for kind, value in argument[negated:]) != negated
