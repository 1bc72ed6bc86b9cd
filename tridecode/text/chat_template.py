"""Chat templates: Jinja programs that come with a checkpoint, rendered in child processes with limits."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import NO_CHAT, PromptError
from .sandbox import Program, Sandbox, SandboxError

CHILDREN = 4  # that render at the same time, at most


@dataclass(frozen=True)
class Limits:
    """Limits of one render: seconds on the clock, bytes of memory, characters of output."""

    seconds: float = 5.0
    memory: int = 512 << 20
    characters: int = 16 << 20


class ChatTemplate:
    """A template's source and the special tokens that it may name (bos_token, eos_token, ...).

    Jinja's sandbox keeps a template from Python's objects; the child processes keep it from files and bound its time,
    memory and output.

    Args:
        file: the source's file, for messages.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], file: Path | str | None = None, limits: Limits | None = None
    ):
        self.source, self.special_tokens = source, special_tokens
        self.limits = limits or Limits()
        self._name = "the chat template" if file is None else f"the chat template in {file}"
        setup = [source, self.limits.characters]
        longest = 8 * self.limits.characters + 1000  # a character takes at most 6 bytes in JSON
        self.sandbox = Sandbox(
            Program(
                "tridecode.text.rendering:renderer", lambda: setup, self.limits.memory, self.limits.seconds, longest
            )
        )

    def render(self, messages: list[dict], variables: dict) -> str:
        """Return the text of the prompt.

        Raises:
            PromptError: the template refuses the messages, fails, or exceeds a limit.
        """
        given = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **variables}
        try:
            text = self.sandbox.ask(given | {"messages": messages}, self.limits.seconds)
        except SandboxError as error:
            raise PromptError(f"{self._name}{self._problem(error)}") from None
        # A literal of the template may hold half a surrogate pair.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def variables(self) -> frozenset[str]:
        """Return the names that the template reads and `render` takes; none if the template cannot be compiled."""
        try:
            names = self.sandbox.ask(None, self.limits.seconds)
        except SandboxError:
            return frozenset()
        return frozenset(names) - {"messages", "add_generation_prompt", *self.special_tokens}

    def _problem(self, error: SandboxError) -> str:
        match error.kind:
            case None:
                return f": {error}; {NO_CHAT} if that happens again"
            case "Refusal":
                return f" refused these messages: {error}"
            case "Broken":
                return f" is broken, {error}; {NO_CHAT}"
            case "MemoryError":
                return f" needs more than {self.limits.memory >> 20} MiB of memory; {NO_CHAT}"
            case "OutputTooLong":
                return f" wrote more than {self.limits.characters:,} characters; shorten the chat, or {NO_CHAT}"
        return f" failed on these messages: {error}"
