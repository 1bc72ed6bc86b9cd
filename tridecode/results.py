"""Results of a generation."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """Token counts of a generation.

    Attributes:
        prompt_tokens: tokens of the prompt.
        reused_tokens: prompt tokens whose K/V were in the cache.
        completion_tokens: tokens of the output.
        drafted: draft tokens that passes verified.
        accepted: verified draft tokens that were right. Each is an output token without a pass of its own.
    """

    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float:
        """Average number of output tokens of a pass."""
        return self.completion_tokens / max(self.completion_tokens - self.accepted, 1)


@dataclass(frozen=True)
class Timings:
    """Times of a generation.

    Attributes:
        ttft: seconds from the call to the first token.
        decode: seconds from the first token to the last.
        tokens_per_second: output tokens per second of `decode`.
    """

    ttft: float
    decode: float
    tokens_per_second: float


@dataclass(frozen=True)
class TokenLogprobs:
    """Natural-log probabilities of a token under the raw logits.

    Attributes:
        logprob: log-probability of the sampled token.
        top: (token id, log-probability) of the most likely tokens.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class OutputChunk:
    """One output chunk of a stream: a token, and the text that this token completes. The text may be empty.

    The last chunk has no token (token_id is None). It has any remaining text, the finish_reason ("stop", "length",
    "error" or "cancelled"), usage and timings. With "error" it has a one-line `error`. If one of SamplingParams.stop
    has ended the text, `stop_string` is that string.
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
    """A whole generation. token_ids contains all sampled tokens, including a final stop token, which `text` omits.

    For a cancelled request, it contains the output until the cancellation.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timings: Timings
    seed: int
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None
