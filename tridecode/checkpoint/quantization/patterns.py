"""Regular expressions from checkpoints. RE2 matches them in linear time, because a checkpoint may be hostile."""

from dataclasses import dataclass
from functools import lru_cache
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


@lru_cache(1024)
def _compiled(text: str) -> Any:
    try:
        return re2.compile(text, OPTIONS)
    except re2.error as error:
        reason = error.args[0]
        raise ValueError(reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)) from None
