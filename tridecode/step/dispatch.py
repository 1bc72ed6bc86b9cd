"""Modes and sizes of CUDA graphs, and the choice of the graph that runs a pass.

Source: the CUDA graph modes, the dispatcher and the batch descriptor of vLLM.
"""

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from ..errors import counted
from ..state.acceptance import Acceptance

SIZES = (1, 2, 4, 8, 16, 32, 64)  # Numbers of rows of the captured decode passes.
# Numbers of tokens of the captured prompt passes: SGLang's list without the sizes that take as long as the next one.
PROMPT_SIZES = (
    *range(16, 65, 16), *range(96, 257, 32), *range(320, 513, 64), *range(640, 1025, 128), *range(1280, 4097, 256)
)  # fmt: skip
MAX_PROMPT_GRAPH_TOKENS = 2048  # Maximum tokens of a captured prompt pass.
QUERIES = (1, 2, 4, 8)  # Rows of a request in a captured decode pass: one for the next token, and one for each draft.
# Number of requests -> cost of a pass with 1, 2, 4 and 8 rows of each request, relative to one row. Measured with
# Qwen3-4B on an H200 at a context of 1,024. An engine that captures passes measures its own costs (costs.py).
COSTS = {
    1: (1.0, 1.12, 1.16, 1.22), 2: (1.0, 1.03, 1.08, 1.14), 4: (1.0, 1.04, 1.10, 1.24), 8: (1.0, 1.07, 1.19),
    16: (1.0, 1.11),
}  # fmt: skip
Costs = dict[tuple[str, int], dict[int, float]]  # (kind, requests) -> rows of each request -> seconds
MIN_GAIN = 1.05  # A pass verifies drafts if they increase the expected tokens per cost by at least this factor.
# Graph mode -> (mode of prompt passes, mode of decode passes).
MODES = {
    "none": ("none", "none"),
    "piecewise": ("piecewise", "piecewise"),
    "full": ("full", "full"),
    "full_decode_only": ("none", "full"),
    "full_and_piecewise": ("piecewise", "full"),
}


class Support(IntEnum):
    """The passes in which a graph can contain an attention backend. A level includes all lower levels."""

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2  # Every request has the same number of tokens.
    ALWAYS = 3


ATTENTION = {"triton": Support.UNIFORM_BATCH, "torch": Support.NEVER}  # Attention backends of decode passes.
# Attention backends of prompt passes.
PROMPT_ATTENTION = {"triton": Support.ALWAYS, "flash": Support.NEVER, "cudnn": Support.NEVER}


@dataclass(frozen=True)
class BatchDescriptor:
    """The key of a decode pass, or of the end of a prompt pass."""

    kind: str  # The most general kind of sampling that a request needs.
    rows: int  # Number of requests.
    tokens: int = 1  # Number of rows of each request. It is more than one if the pass verifies drafts.
    masked: bool = False  # Whether requests may have masks.
    adapters: bool = False  # Whether requests may have adapters.

    def __str__(self) -> str:
        each = f" of {self.tokens} tokens" * (self.tokens > 1)
        parts = [name for name in ("masks", "adapters") if getattr(self, {"masks": "masked"}.get(name, name))]
        return f"a pass of {counted(self.rows, 'row')}{each}{' with ' * bool(parts)}{' and '.join(parts)}"


class PromptDescriptor(NamedTuple):
    """The key of a prompt pass."""

    tokens: int  # Number of prompt tokens.
    decoding: int  # Number of rows that decode in the same pass.
    adapters: bool = False  # Whether requests may have adapters.

    def __str__(self) -> str:
        rows = f"{counted(self.tokens, 'prompt token')} and {counted(self.decoding, 'decoding row')}"
        return f"a pass of {rows}{' with adapters' * self.adapters}"


@dataclass(frozen=True)
class GraphStat:
    """Number of passes of one kind, size and mode.

    Attributes:
        kind: the kind of sampling, with "+mask" if rows have masks, with "+adapters" if rows have adapters, and with
            "x2" to "x8" if every request has that number of rows to verify drafts. A pass that reads prompts is
            "prompt", or "mixed" if rows also decode.
    """

    kind: str
    rows: int  # Number of requests, or of prompt tokens.
    padded: int  # Number of rows of the pass that ran.
    mode: str  # One of none, piecewise and full.
    count: int

    @property
    def padding(self) -> int:
        """Rows that were added to reach the captured size."""
        return self.padded - self.rows


def graph_sizes(slots: int, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the decode pass sizes that `slots` requests need. sizes must ascend; the default is SIZES."""
    if sizes is not None:
        return tuple(size for size in sizes if size < slots) + tuple(size for size in sizes if size >= slots)[:1]
    return tuple(size for size in SIZES if size < slots) + (min(slots, SIZES[-1]),)


def typical_costs(requests: int, bytes_read: Callable[[int], float] = lambda rows: 1.0) -> dict[int, float]:
    """Map the possible rows of each request to the relative cost of a pass of `requests` requests.

    Args:
        bytes_read: bytes of the weights that a pass of a number of rows reads. More rows use more experts.
    """
    costs = next((costs for limit, costs in COSTS.items() if limit >= requests), (1.0,))
    one = bytes_read(requests)
    return {rows: cost + bytes_read(requests * rows) / one - 1 for rows, cost in zip(QUERIES, costs)}


def max_queries(requests: int) -> int:
    """Return the largest number of rows that each of `requests` requests can have in one pass."""
    return max(typical_costs(requests))


def best_queries(costs: Mapping[int, float], drafts: Sequence[Acceptance], allowed: Container[int] = QUERIES) -> int:
    """Return the number of rows per request with the most expected tokens per cost of a pass.

    Args:
        costs: rows of each request -> the cost of the pass, in any unit.
        drafts: the acceptance of each request's drafts.
        allowed: the numbers of rows to choose from, in addition to one.
    """

    def value(rows: int) -> float:
        return sum(each.expected(rows) for each in drafts) / costs[rows] / (MIN_GAIN if rows > 1 else 1)

    return max((rows for rows in costs if rows == 1 or rows in allowed), key=value)


def lowered(mode: str, support: Support) -> str:
    """Return `mode`, or the next lower mode that the attention backend of decode passes supports."""
    if support >= Support.UNIFORM_SINGLE_TOKEN_DECODE or MODES[mode][1] != "full":
        return mode
    return "none" if MODES[mode][0] == "none" else "piecewise"


def prompt_sizes(
    chunk: int, limit: int = MAX_PROMPT_GRAPH_TOKENS, sizes: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Return the prompt pass sizes that chunks of up to `chunk` tokens need.

    sizes must ascend; the default is PROMPT_SIZES up to `limit`.
    """
    possible = [size for size in PROMPT_SIZES if size <= limit] if sizes is None else list(sizes)
    smaller = [size for size in possible if size < chunk]
    return tuple(smaller + ([chunk] if sizes is None and chunk <= limit else [s for s in possible if s >= chunk][:1]))


def prompt_mode(mode: str, attention: str) -> str:
    """Return the mode of prompt passes in a graph mode, or the next lower one that the attention backend supports."""
    requested = MODES[mode][0]
    return "piecewise" if requested == "full" and PROMPT_ATTENTION[attention] < Support.ALWAYS else requested


class Dispatcher:
    """Chooses the mode and the size of every pass, and counts the passes.

    Args:
        mode: one of MODES.
        sizes: rows of the captured decode passes, ascending.
        prompts: tokens of the captured prompt passes, ascending.
        attention: the attention backend of prompt passes.
    """

    def __init__(self, mode: str, sizes: Sequence[int], prompts: Sequence[int] = (), attention: str = "triton"):
        self.sizes, self.prompts = tuple(sizes), tuple(prompts)
        self.prompt_mode, self.decode_mode = prompt_mode(mode, attention), MODES[mode][1]
        self._counts: Counter[tuple[str, int, int, str]] = Counter()

    def plan(
        self, kind: str, rows: int, masked: bool = False, tokens: int = 1, adapters: bool = False
    ) -> tuple[str, BatchDescriptor]:
        """Return the mode and the batch of a decode pass. It is padded to the next size, or unpadded in mode none."""
        mode, padded = _next_size(self.decode_mode, self.sizes, rows)
        return mode, BatchDescriptor(kind, padded, tokens, masked, adapters)

    def count(self, rows: int, batch: BatchDescriptor, mode: str) -> None:
        """Count a decode pass of `rows` requests."""
        kind = batch.kind + "+mask" * batch.masked + "+adapters" * batch.adapters
        self._counts[kind + f" x{batch.tokens}" * (batch.tokens > 1), rows, batch.rows, mode] += 1

    def plan_prompt(self, tokens: int) -> tuple[str, int]:
        """Return the mode and the tokens of a prompt pass. It is padded to the next size, or unpadded in mode none."""
        return _next_size(self.prompt_mode, self.prompts, tokens)

    def count_prompt(self, tokens: int, batch: PromptDescriptor, mode: str) -> None:
        """Count a prompt pass of `tokens` tokens."""
        kind = ("mixed" if batch.decoding else "prompt") + "+adapters" * batch.adapters
        self._counts[kind, tokens, batch.tokens, mode] += 1

    def stats(self) -> list[GraphStat]:
        """Return the counts of all passes so far, by kind and rows."""
        return [GraphStat(*key, count) for key, count in sorted(self._counts.items())]


def _next_size(mode: str, sizes: Sequence[int], least: int) -> tuple[str, int]:
    """Return `mode` and the next captured size. If no captured size is large enough, return "none" and `least`."""
    padded = next((size for size in sizes if size >= least), None) if mode != "none" else None
    return ("none", least) if padded is None else (mode, padded)
