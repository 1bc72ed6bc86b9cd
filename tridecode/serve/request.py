"""Job: one generation, from its prompt's ids to its last piece, as the scheduler knows it."""

import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..errors import ParameterError
from ..layout import MAX_STOP_IDS, packed
from ..results import Piece
from ..sampling import SamplingParams
from ..text.grammar import Grammar

if TYPE_CHECKING:
    from ..blocks.spec import ModelSpec


@dataclass(eq=False)
class Job:
    """ids: the prompt, int32; before: what of it the text continues (none in a chat); params: with a seed; stop_ids:
    the model's and params'; limit: tokens, prompt and output, at which it ends; started: by time.perf_counter; salt: it
    shares K/V with jobs of the same one only.

    scores: its passes begin at the prompt's first token, and its pieces are what follows each; logits: where such a one
    leaves those of each pass, fp32 [len(ids), vocab].
    `pieces` only grows, a token with what ends it at once: whatever else the scheduler knows of a job follows from it.
    """

    ids: array
    before: Sequence[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    limit: int
    reuse_prefix: bool
    started: float
    salt: str = ""
    scores: bool = False
    logits: torch.Tensor | None = None
    grammar: Grammar | None = None  # which its output follows
    pieces: list[Piece] = field(default_factory=list)
    failure: Exception | None = None  # what ended it in place of a last piece
    first: float | None = None  # when its first token came
    reused: int | None = None  # positions whose K/V were there when its prompt was read first
    drafted: int = 0  # tokens that were guessed and verified
    accepted: int = 0  # and of these those that were right
    gone: bool = False  # nobody reads it any more: who steps next cancels it

    @property
    def ended(self) -> bool:
        return self.failure is not None or bool(self.pieces) and self.pieces[-1].finish_reason is not None

    @property
    def tokens(self) -> array:
        """The prompt, and what was drawn until now."""
        return self.ids if self.scores else self.ids + packed([piece.token_id for piece in self.pieces])

    @property
    def known(self) -> int:
        """How many these are."""
        return len(self.ids) + (0 if self.scores else len(self.pieces))

    @cached_property
    def kind(self) -> str:
        return step_kind(self.params)


def generating(
    ids: array,
    chat: bool,
    params: SamplingParams,
    spec: "ModelSpec",
    capacity: int,
    reuse_prefix: bool,
    salt: str,
    started: float,
    grammar: Grammar | None = None,
) -> Job:
    """A job that continues `ids`, of a chat or not, within `capacity` positions. Raises ParameterError."""
    stop_ids = checked_stop_ids(params, spec)
    return Job(
        ids=ids,
        before=() if chat else ids,  # an answer begins a text of its own; raw text and ids are continued
        params=params if params.seed is not None else replace(params, seed=secrets.randbits(63)),
        stop_ids=stop_ids,
        limit=min(len(ids) + (params.max_tokens or capacity), capacity + 1),
        reuse_prefix=reuse_prefix,
        started=started,
        salt=salt,
        grammar=grammar,
    )


def scoring(ids: array, started: float, logprobs: int | None = None, logits: torch.Tensor | None = None) -> Job:
    """A job that tells how likely each token of `ids` was: by the logits, or its pieces' log-probabilities."""
    params = SamplingParams(temperature=0, seed=0, logprobs=logprobs)
    return Job(ids, (), params, (), len(ids) + 1, reuse_prefix=False, started=started, scores=True, logits=logits)


def step_kind(params: SamplingParams) -> str:
    """The variant of the step (decode.KINDS) that serves `params`."""
    if params.logprobs is not None:
        return "logprobs"
    return "greedy" if params.greedy else "sample"


def checked_stop_ids(params: SamplingParams, spec: "ModelSpec") -> tuple[int, ...]:
    """The ids that end a generation: the model's own, unless they are ignored, and params'. Raises ParameterError, also
    for ids outside the vocabulary in logit_bias."""
    own = () if params.ignore_eos else spec.stop_ids
    stop_ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ParameterError(f"stop_token_ids: at most {MAX_STOP_IDS} with the model's own, got {len(stop_ids)}")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= spec.vocab_size:
                raise ParameterError(f"{name}: token id {token} is not in the vocabulary of {spec.vocab_size}")
    return stop_ids
