"""What a generation yields."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Token counts. reused_tokens: prompt tokens whose K/V were still in the cache. drafted: tokens that were guessed
    and verified; accepted: those of them that were right, each a token without a pass of its own."""

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Drawn in one pass, on average."""
        return self.completion_tokens / max(self.completion_tokens - self.accepted, 1)


@dataclass(frozen=True)
class Timings:
    """Seconds. ttft: from the call to the first token; decode: from the first token to the last."""

    ttft: float
    decode: float
    tokens_per_second: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities under the raw logits: of the drawn token, and (token id, logprob) of the likeliest."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """One token of a stream, and the text that became certain with it (may be empty).

    The last piece has no token (token_id None) but any held-back text, finish_reason ("stop", "length", "error" or
    "cancelled"), usage, timings, with "error" a one-line `error`, and where one of SamplingParams.stop has cut the text
    that `stop_string`.
    """

    token_id: int | None
    text: str
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    error: str | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Result:
    """A whole generation. token_ids holds everything drawn, a final stop token included; text does not.

    Of a request that was cancelled it is what came until then.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
