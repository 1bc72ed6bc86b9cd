"""How a server runs: what the command line says of it, and limits that no request may pass."""

from dataclasses import dataclass

BODY = 32 << 20  # bytes of a request
MESSAGES = 4096
ANSWERS = 128  # of one request: n times its prompts
STOPS, STOP_CHARACTERS = 16, 256
BIASES = 1024
TOKENS = 1 << 18  # to make text of
TICK = 0.25  # seconds between looks at deadlines and quiet streams
DYING = 5.0  # seconds for which a dead engine is told of before the process ends


@dataclass(frozen=True)
class Settings:
    """model: the name by which clients know it. max_queue: requests that may wait for a slot. timeout: seconds that a
    request may take from its first byte, None for any time. keep_alive: seconds of silence after which a stream has a
    comment."""

    model: str
    any_model: bool = False
    max_queue: int = 256
    timeout: float | None = None
    grace: float = 10.0
    keep_alive: float = 5.0
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
