"""Policy: how requests share the passes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """Limits for how requests share passes.

    Args:
        chunk_tokens: maximum number of prompt tokens in one pass.
        max_queue: maximum number of requests that wait for a slot, or None for no limit.
        prompt_ms: time limit in milliseconds of a pass that reads prompts while other requests decode.
        prefix_sharing: whether K/V of equal prefixes are computed once.
    """

    chunk_tokens: int
    max_queue: int | None
    prompt_ms: float
    prefix_sharing: bool
