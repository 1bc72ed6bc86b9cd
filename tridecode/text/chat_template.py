"""Chat templates: Jinja programs that come with a checkpoint, run in a sandbox by a child process with limits."""

import json
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from ..errors import NO_CHAT, PromptError
from .worker import Pool, Worker, WorkerFailure

WORKER = Path(__file__).with_name("template_worker.py")
PROCESSES = 4  # that render at the same time; most programs need the first only


@dataclass(frozen=True)
class Limits:
    """What one render may take: seconds on the clock, bytes of memory, characters of output."""

    seconds: float = 5.0
    memory: int = 512 << 20
    characters: int = 16 << 20


class ChatTemplate:
    """A template's source and the special tokens it may name (bos_token, eos_token, ...), rendered as text.

    The sandbox keeps a template from Python's objects; the child processes, which live as long as this object, keep it
    from files and bound its time, memory and output. file: where the source is from, for messages.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], file: Path | str | None = None, limits: Limits | None = None
    ):
        self.source, self.special_tokens = source, special_tokens
        self.limits = limits or Limits()
        self._name = "the chat template" if file is None else f"the chat template in {file}"
        arguments = (self.limits.memory, 2 * ceil(self.limits.seconds), self.limits.characters)
        longest = 8 * self.limits.characters + 1000  # no character takes more in JSON
        self._workers = Pool(PROCESSES, lambda: Worker(WORKER, arguments, lambda: source, longest))

    def start(self) -> None:
        """Start the child, which takes some 60 ms, without waiting for it; `render` does so too where it must."""
        self._workers.first.start()

    def render(self, messages: list[dict], variables: dict) -> str:
        """The prompt's text; PromptError with the template's own words where it refuses, or with what went wrong."""
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **variables}
        found = self._ask(given | {"messages": messages})
        match found.get("failure"):
            case None:
                # A literal of the template may hold half a surrogate pair.
                return found["text"].encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            case "refused":
                raise PromptError(f"{self._name} refused these messages: {found['reason']}")
            case "broken":
                raise PromptError(f"{self._name} is broken, {found['reason']}; {NO_CHAT}")
            case "failed":
                raise PromptError(f"{self._name} failed on these messages: {found['reason']}")
            case "memory":
                raise PromptError(f"{self._name} needs more than {self.limits.memory >> 20} MiB of memory; {NO_CHAT}")
            case _:
                limit = f"{self.limits.characters:,} characters"
                raise PromptError(f"{self._name} wrote more than {limit}; shorten the chat, or {NO_CHAT}")

    def variables(self) -> frozenset[str]:
        """Names that the template reads and that `render` may give it; none where that cannot be found out."""
        try:
            found = self._ask(None)
        except PromptError:
            return frozenset()
        names = json.loads(found.get("text", "[]"))
        return frozenset(names) - {"messages", "add_generation_prompt", *self.special_tokens}

    def _ask(self, given: dict | None) -> dict:
        """The child's answer, to None the names that the template reads."""
        worker = self._workers.one()
        try:
            found = worker.ask(given, self.limits.seconds)
        except WorkerFailure as failure:
            raise PromptError(f"{self._name}: {failure}; {NO_CHAT} if that happens again") from None
        if found.get("failure") == "memory":
            worker.stop()  # what is left of its memory may not do for the next one
        return found
