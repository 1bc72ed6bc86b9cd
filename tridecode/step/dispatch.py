"""Which graph runs a pass: modes and dispatch by size, after vLLM's (its CUDA graph modes, and BatchDescriptor)."""

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import IntEnum

SIZES = (1, 2, 4, 8, 16, 32, 64)  # rows of the captured decode passes
# Tokens of prompts in the captured prompt passes, after SGLang's schedule, without sizes that cost what the next does.
PROMPT_SIZES = (
    *range(16, 65, 16), *range(96, 257, 32), *range(320, 513, 64), *range(640, 1025, 128), *range(1280, 4097, 256)
)  # fmt: skip
PROMPT_MOST = 2048
QUERIES = (1, 2, 4, 8)  # rows of a request in the captured decode passes: the next token's, and drafts to verify
# By requests: what a pass of 1, 2, 4, 8 rows of each costs over one of one. Of Qwen3-4B on an H200 at a context of
# 1,024 (docs/speculation.md).
COSTS = {
    1: (1.0, 1.12, 1.16, 1.22), 2: (1.0, 1.03, 1.08, 1.14), 4: (1.0, 1.04, 1.10, 1.24), 8: (1.0, 1.07, 1.19),
    16: (1.0, 1.11),
}  # fmt: skip
RIGHT = 0.75  # of the guesses that a request is trusted with
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


ATTENTION = {"triton": Support.UNIFORM_BATCH, "torch": Support.NEVER}  # backends of the decode pass
PROMPT_ATTENTION = {"triton": Support.ALWAYS, "flash": Support.NEVER, "cudnn": Support.NEVER}  # and of the prompt pass


@dataclass(frozen=True)
class BatchDescriptor:
    """The key of a graph. kind: of sampling, the strongest of its rows; rows: of requests, each of which has `tokens`
    of the pass; masked: some have masks."""

    kind: str
    rows: int
    tokens: int = 1
    masked: bool = False

    def __str__(self) -> str:
        each = f" of {self.tokens} tokens" * (self.tokens > 1)
        return f"a pass of {self.rows} row{'s' * (self.rows != 1)}{each}{' with masks' * self.masked}"


@dataclass(frozen=True)
class GraphStat:
    """count passes of `kind` had `rows` rows, and ran as `mode` with `padded` rows. kind: of sampling, with "+mask" for
    rows that have one, and "x2" to "x8" where each had so many to verify drafts; of passes that read prompts, whose
    rows are their tokens, "prompt", or "mixed" where others decoded beside them."""

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


def query_costs(requests: int) -> dict[int, float]:
    """Rows that each of so many requests may have in one pass, and what it costs then."""
    return dict(zip(QUERIES, next((costs for limit, costs in COSTS.items() if limit >= requests), (1.0,))))


def most_queries(requests: int) -> int:
    """Rows that each of so many requests has in one pass at most."""
    return max(query_costs(requests))


def best_queries(requests: int, wants: Sequence[int], there: Container[int] = QUERIES) -> int:
    """Rows of each request in a pass padded to `requests` of them, of those in `there`: what brings most tokens for
    what it costs, where `wants` are the rows that each could use. One row is always there."""
    costs = {rows: cost for rows, cost in query_costs(requests).items() if rows == 1 or rows in there}
    return max(costs, key=lambda rows: sum(1 + RIGHT * (min(want, rows) - 1) for want in wants) / costs[rows])


def lowered(mode: str, support: Support) -> str:
    """The mode nearest to `mode` whose decode passes a backend of this level can be captured for."""
    if support >= Support.UNIFORM_SINGLE_TOKEN_DECODE or MODES[mode][1] != "full":
        return mode
    return "none" if MODES[mode][0] == "none" else "piecewise"


def prompt_sizes(chunk: int, most: int = PROMPT_MOST, sizes: Sequence[int] | None = None) -> tuple[int, ...]:
    """The sizes to capture for chunks of up to `chunk` tokens: `sizes` (ascending; PROMPT_SIZES up to `most` by
    default) as far as they are needed."""
    wanted = [size for size in PROMPT_SIZES if size <= most] if sizes is None else list(sizes)
    fitting = [size for size in wanted if size < chunk]
    return tuple(fitting + ([chunk] if sizes is None and chunk <= most else [s for s in wanted if s >= chunk][:1]))


class Dispatcher:
    """Says how a pass runs, and counts what it has said. sizes: of decode passes; prompts: of prompt passes, with this
    backend of attention."""

    def __init__(self, mode: str, sizes: Sequence[int], prompts: Sequence[int] = (), attention: str = "triton"):
        self.mode, self.sizes, self.prompts = mode, tuple(sizes), tuple(prompts)
        self._prompt, self._decode = MODES[mode]
        if self._prompt == "full" and PROMPT_ATTENTION[attention] < Support.ALWAYS:
            self._prompt = "piecewise"
        self._counts: Counter[tuple[str, int, int, str]] = Counter()

    def plan(self, kind: str, rows: int, masked: bool = False, tokens: int = 1) -> tuple[str, BatchDescriptor]:
        """none, piecewise or full, and the batch to run: padded to the next size, or beyond the largest as it is."""
        padded = next((size for size in self.sizes if size >= rows), None) if self._decode != "none" else None
        return ("none" if padded is None else self._decode), BatchDescriptor(kind, padded or rows, tokens, masked)

    def dispatch(self, kind: str, rows: int, masked: bool = False, tokens: int = 1) -> tuple[str, BatchDescriptor]:
        """plan, counted."""
        mode, batch = self.plan(kind, rows, masked, tokens)
        self._counts[kind + "+mask" * masked + f" x{tokens}" * (tokens > 1), rows, batch.rows, mode] += 1
        return mode, batch

    def plan_prompt(self, tokens: int) -> tuple[str, int]:
        """none, piecewise or full, and the tokens of prompts to run, padded or as they are."""
        padded = next((size for size in self.prompts if size >= tokens), None) if self._prompt != "none" else None
        return ("none", tokens) if padded is None else (self._prompt, padded)

    def count_prompt(self, tokens: int, decoding: int, padded: int, mode: str) -> None:
        self._counts["mixed" if decoding else "prompt", tokens, padded, mode] += 1

    def stats(self) -> list[GraphStat]:
        """What was dispatched so far, by kind and rows."""
        return [GraphStat(*key, count) for key, count in sorted(self._counts.items())]
