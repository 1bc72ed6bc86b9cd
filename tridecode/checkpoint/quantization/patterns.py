"""Patterns of names of modules, from checkpoints.

RE2 matches regular expressions in linear time, because a checkpoint may be hostile.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import re2

OPTIONS = re2.Options()
OPTIONS.log_errors = False
OPTIONS.max_mem = 2**22  # Maximum bytes of a compiled expression.


@dataclass(frozen=True)
class Pattern:
    """A regular expression in the syntax of RE2, which has no lookaround and no backreferences.

    Raises ValueError with the reason if it is invalid.
    """

    text: str

    def __post_init__(self) -> None:
        _compiled(self.text)

    def match(self, name: str) -> bool:
        """Return whether the pattern matches at the start of a name."""
        return _compiled(self.text).match(name) is not None


@dataclass(frozen=True)
class Names:
    """Names in a list of modules. The time of a match does not depend on their number, unless `kind` is "inside".

    Args:
        kind: "whole": the name of the module is in the list. "end" and "path": a name in the list is at the end of the
            name of the module, or anywhere in it, with a dot or an end of the name before and after it. "inside": it is
            anywhere in it.
    """

    names: frozenset[str]
    kind: str

    def match(self, name: str) -> bool:
        """Return whether the list contains the name of a module."""
        if self.kind == "whole":
            return name in self.names
        if self.kind == "inside":
            return any(each in name for each in self.names)
        parts = name.split(".")
        ends = range(0 if self.kind == "path" else len(parts) - 1, len(parts))
        return any(
            ".".join(parts[first : end + 1]) in self.names
            for end in ends
            if parts[end] in self._last
            for first in range(end + 1)
        )

    @cached_property
    def _last(self) -> set[str]:
        """The last parts of the names."""
        return {name.rpartition(".")[2] for name in self.names}


@lru_cache(1024)
def _compiled(text: str) -> Any:
    try:
        return re2.compile(text, OPTIONS)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from None
