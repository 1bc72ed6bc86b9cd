"""Policy: how requests share the passes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    """How requests share the passes.

    Args:
        chunk_tokens: tokens of prompts in one pass at most.
        max_queue: requests that may wait for a slot; None: any number.
        prompt_ms: milliseconds that a pass may take that reads prompts while other requests decode.
        prefix_sharing: whether K/V of equal prefixes are computed once.
    """

    chunk_tokens: int
    max_queue: int | None
    prompt_ms: float
    prefix_sharing: bool
