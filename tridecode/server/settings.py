"""Server settings from the command line, and fixed limits for requests."""

from dataclasses import dataclass

MAX_BODY_BYTES = 32 << 20
MAX_MESSAGES = 4096
MAX_ANSWERS = 128  # Maximum number of answers of one request: its prompts multiplied by n.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_LOGIT_BIASES = 1024
MAX_DETOKENIZE_TOKENS = 1 << 18
TICK_SECONDS = 0.25  # Seconds between checks for deadlines and silent streams.
FAILURE_GRACE = 5.0  # Seconds between the failure of the engine and the end of the process.


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Args:
        model: the name of the model for clients.
        any_model: whether requests may name any model, or none.
        max_queue: number of requests that may wait for a slot.
        timeout: seconds that a request may take from its first byte; None removes the limit.
        grace: seconds for running requests to end when the server stops.
        keep_alive: seconds of silence after which a stream sends a comment.
        api_key: the key that requests must send; None accepts all requests.
        cors: origins of web pages that may send requests.
        log_prompts: whether the log contains prompts.
    """

    model: str
    any_model: bool = False
    max_queue: int = 256
    timeout: float | None = None
    grace: float = 10.0
    keep_alive: float = 5.0
    api_key: str | None = None
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
