"""Which graph runs a pass: modes and dispatch by size, after vLLM's (its CUDA graph modes, and BatchDescriptor)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of the captured passes
# Mode -> how a pass with chunks of prompts in it runs, and how a decode pass does.
MODES = {
    "none": ("none", "none"),
    "piecewise": ("piecewise", "piecewise"),
    "full": ("full", "full"),
    "full_decode_only": ("none", "full"),
    "full_and_piecewise": ("piecewise", "full"),
}


class Support(IntEnum):
    """For what an attention backend can be captured in a graph; each level includes those below."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # the same number of tokens for each request
    ALWAYS = 3


ATTENTION = {"triton": Support.UNIFORM_SINGLE_TOKEN_DECODE, "torch": Support.NEVER}  # backends of the decode pass


@dataclass(frozen=True)
class BatchDescriptor:
    """The key of a graph. kind: of sampling, the strongest of its rows; tokens: of each request."""

    kind: str
    rows: int
    tokens: int = 1


@dataclass(frozen=True)
class GraphStat:
    """count passes of `kind` had `rows` rows, and ran as `mode` with `padded` rows."""

    kind: str
    rows: int
    padded: int
    mode: str
    count: int

    @property
    def padding(self) -> int:
        return self.padded - self.rows


def graph_sizes(slots: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """The sizes to capture for `slots` requests: `sizes` (ascending; SIZES by default) as far as they are needed."""
    if sizes is not None:
        return tuple(size for size in sizes if size < slots) + tuple(size for size in sizes if size >= slots)[:1]
    return tuple(size for size in SIZES if size < slots) + (min(slots, SIZES[-1]),)


def lowered(mode: str, support: Support) -> str:
    """The mode nearest to `mode` whose decode passes a backend of this level can be captured for."""
    if support >= Support.UNIFORM_SINGLE_TOKEN_DECODE or MODES[mode][1] != "full":
        return mode
    return "none" if MODES[mode][0] == "none" else "piecewise"


class Dispatcher:
    """Says how a decode pass runs, and counts what it has said."""

    def __init__(self, mode: str, sizes: Sequence[int]):
        self.mode, self.sizes = mode, tuple(sizes)
        self._decode = MODES[mode][1]
        self._counts: Counter[tuple[str, int, int, str]] = Counter()

    def plan(self, kind: str, rows: int) -> tuple[str, BatchDescriptor]:
        """none, piecewise or full, and the batch to run: padded to the next size, or beyond the largest as it is."""
        padded = next((size for size in self.sizes if size >= rows), None) if self._decode != "none" else None
        return ("none" if padded is None else self._decode), BatchDescriptor(kind, padded or rows)

    def dispatch(self, kind: str, rows: int) -> tuple[str, BatchDescriptor]:
        """plan, counted."""
        mode, batch = self.plan(kind, rows)
        self._counts[kind, rows, batch.rows, mode] += 1
        return mode, batch

    def stats(self) -> list[GraphStat]:
        """What was dispatched so far, by kind and rows."""
        return [GraphStat(*key, count) for key, count in sorted(self._counts.items())]
