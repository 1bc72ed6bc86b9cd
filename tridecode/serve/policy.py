"""Policy: how requests share the passes, as an engine was told."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

from ..arguments import choice, flag, integer, real, shown
from ..errors import ParameterError
from ..layout import MAX_NGRAM, NGRAM
from ..state.kv import PAGE
from ..step.prompt import CHUNK

PROMPT_MS = 15.0
FIXED_CHUNK = 256  # of the batch-invariant mode, where a prompt's passes have all that many rows
SPECULATE = ("auto", "ngram", "off")
LONGEST = 2**31 - 2


@dataclass(frozen=True)
class Policy:
    """chunk_tokens: of prompts in one pass, None is CHUNK, in the batch-invariant mode FIXED_CHUNK; max_queue: requests
    that may wait for a slot, None is any number; prompt_ms: milliseconds that a pass may take which reads prompts while
    others decode; prefix_sharing: K/V of equal beginnings are computed once; batch_invariant: a request's logits have
    the same bits alone and in any company; speculate: ngram, tokens that may come next are guessed from the text and
    verified several in one pass, off, or auto, which placement.resolve_speculation decides before there is an engine;
    speculate_ngram: how many tokens are to agree with what stands before, at most and at least, None is layout.NGRAM;
    beside auto it asks for ngram. Raises ParameterError."""

    chunk_tokens: int | None = None
    max_queue: int | None = None
    prompt_ms: float = PROMPT_MS
    prefix_sharing: bool = True
    batch_invariant: bool = False
    speculate: str = "off"
    speculate_ngram: tuple[int, int] | None = None

    def __post_init__(self):
        flag("batch_invariant", self.batch_invariant)
        choice("speculate", self.speculate, SPECULATE)
        object.__setattr__(self, "speculate_ngram", self._ngram())
        if self.chunk_tokens is None:
            object.__setattr__(self, "chunk_tokens", FIXED_CHUNK if self.batch_invariant else CHUNK)
        object.__setattr__(self, "chunk_tokens", integer("chunk_tokens", self.chunk_tokens, 1, LONGEST))
        if self.max_queue is not None:
            object.__setattr__(self, "max_queue", integer("max_queue", self.max_queue, 0, LONGEST))
        real("prompt_ms", self.prompt_ms, 0.1, 1e6)
        flag("prefix_sharing", self.prefix_sharing)
        if self.batch_invariant and self.chunk_tokens % PAGE:
            raise ParameterError(
                f"chunk_tokens must be a multiple of {PAGE} with batch_invariant, got {self.chunk_tokens:,}"
            )
        if self.batch_invariant and self.prompt_ms != PROMPT_MS:
            raise ParameterError("prompt_ms: with batch_invariant all prompt passes are alike; use chunk_tokens")

    def _ngram(self) -> tuple[int, int] | None:
        """None where nothing is guessed. Raises ParameterError."""
        given = self.speculate_ngram
        if given is None:
            return NGRAM if self.speculates else None
        whole = isinstance(given, Sequence) and len(given) == 2 and all(type(each) is int for each in given)
        if not whole or not 1 <= given[1] <= given[0] <= MAX_NGRAM:
            got = " and ".join(map(shown, given)) if whole else shown(given)
            raise ParameterError(
                f"speculate_ngram must be two numbers from {MAX_NGRAM} down to 1, the larger first, like "
                f"{NGRAM[0]} and {NGRAM[1]}, got {got}"
            )
        if self.speculate == "off":
            raise ParameterError('speculate_ngram: nothing is guessed with speculate="off"; leave one of them out')
        return tuple(given)

    @property
    def speculates(self) -> bool:
        return self.speculate == "ngram"

    @classmethod
    def out_of(cls, options: dict) -> "Policy":
        """Of what it takes of `options`; the others stay there."""
        return cls(**{each.name: options.pop(each.name) for each in fields(cls) if each.name in options})

    def chunk(self, slots: int, capacity: int, page: int) -> int:
        """Tokens of prompts in one pass of an engine of that size; batch-invariant: whole pages, whatever the slots."""
        most = -(-capacity // page) * page if self.batch_invariant else slots * capacity
        return min(self.chunk_tokens, most)
