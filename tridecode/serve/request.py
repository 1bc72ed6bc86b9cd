"""Request: one generation, from its prompt's ids to its last piece."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import ParameterError
from ..layout import MAX_STOP_IDS
from ..model.config import ModelConfig
from ..results import Piece
from ..sampling import SamplingParams


@dataclass(eq=False)
class Request:
    """ids: the prompt; before: what of it the text continues (none in a chat); params: with a seed; stop_ids: the
    model's and params'; limit: tokens, prompt and output, at which it ends; started: by time.perf_counter.

    Who drives the scheduler takes `pieces` as they come; with `cancelled` no more will.
    """

    ids: list[int]
    before: Sequence[int]
    params: SamplingParams
    stop_ids: tuple[int, ...]
    limit: int
    reuse_prefix: bool
    started: float
    pieces: deque[Piece] = field(default_factory=deque)
    cancelled: bool = False
    slot: int | None = None  # while it has one
    reused: int = 0  # positions whose K/V were there
    enqueued: int = 0  # passes that it takes part in

    @property
    def steps(self) -> int:
        """Tokens that it may draw."""
        return self.limit - len(self.ids)

    @property
    def kind(self) -> str:
        return step_kind(self.params)


def step_kind(params: SamplingParams) -> str:
    """The variant of the step (decode.KINDS) that serves `params`."""
    if params.logprobs is not None:
        return "logprobs"
    return "greedy" if params.greedy else "sample"


def checked_stop_ids(params: SamplingParams, config: ModelConfig) -> tuple[int, ...]:
    """The ids that end a generation: the model's own, unless they are ignored, and params'. Raises ParameterError, also
    for ids outside the vocabulary in logit_bias."""
    own = () if params.ignore_eos else config.stop_ids
    stop_ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
    if len(stop_ids) > MAX_STOP_IDS:
        raise ParameterError(f"stop_token_ids: at most {MAX_STOP_IDS} with the model's own, got {len(stop_ids)}")
    for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
        for token in ids:
            if token >= config.vocab_size:
                raise ParameterError(f"{name}: token id {token} is not in the vocabulary of {config.vocab_size}")
    return stop_ids
