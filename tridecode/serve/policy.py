"""Policy: how requests share the passes, as an engine was told."""

from dataclasses import dataclass

from ..arguments import flag, integer, real
from ..step.prefill import CHUNK

PROMPT_MS = 15.0
LONGEST = 2**31 - 2


@dataclass(frozen=True)
class Policy:
    """chunk_tokens: of prompts in one pass; max_queue: requests that may wait for a slot, None is any number;
    prompt_ms: milliseconds that a pass may take which reads prompts while others decode; prefix_sharing: K/V of equal
    beginnings are computed once. Raises ParameterError."""

    chunk_tokens: int = CHUNK
    max_queue: int | None = None
    prompt_ms: float = PROMPT_MS
    prefix_sharing: bool = True

    def __post_init__(self):
        object.__setattr__(self, "chunk_tokens", integer("chunk_tokens", self.chunk_tokens, 1, LONGEST))
        if self.max_queue is not None:
            object.__setattr__(self, "max_queue", integer("max_queue", self.max_queue, 0, LONGEST))
        real("prompt_ms", self.prompt_ms, 0.1, 1e6)
        flag("prefix_sharing", self.prefix_sharing)
