"""Server settings from the command line, and fixed limits for requests."""

from dataclasses import dataclass

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 256
HEAD_SECONDS = 30.0  # Seconds in which the head of a request must arrive.
# The limit of a body follows the context length, between these bounds.
MIN_BODY_LIMIT, MAX_BODY_BYTES = 4 << 20, 32 << 20
BODY_BYTES_PER_TOKEN = 64
MIN_BODY_VALUES, BODY_VALUES_PER_TOKEN = 1 << 16, 2
SMALL_BODY = 64 << 10  # Larger bodies are parsed in a thread.
BODY_BUDGET = 16 << 20  # Bytes of large bodies that the server buffers at once, beyond SMALL_BODY of each.
MAX_MESSAGES = 4096
MAX_ANSWERS = 128  # Maximum number of answers of one request: its prompts multiplied by n.
MAX_STOPS, MAX_STOP_CHARACTERS = 16, 256
MAX_LOGIT_BIASES = 1024
MAX_DETOKENIZE_TOKENS = 1 << 16
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
        allow_hosts: host names in requests that are accepted, in addition to those of this machine; "*" accepts all.
        max_connections: maximum number of open connections.
        timeout_keep_alive: seconds for which a connection without a request stays open.
        api_keys: requests must send one of these keys. Without keys, all requests are accepted.
        cors: origins of web pages that may send requests.
        log_prompts: whether the log contains prompts.
        adapter_root: the directory from which clients may load adapters, or None if they may not load any.
        replica: label of the metrics of a replica behind a gateway, which also sets the identifiers of requests.
    """

    model: str
    any_model: bool = False
    max_queue: int = 256
    timeout: float | None = None
    grace: float = 10.0
    keep_alive: float = 5.0
    allow_hosts: tuple[str, ...] = ()
    max_connections: int = 1000
    timeout_keep_alive: int = 75
    api_keys: tuple[str, ...] = ()
    cors: tuple[str, ...] = ()
    log_prompts: bool = False
    adapter_root: str | None = None
    replica: str = ""
