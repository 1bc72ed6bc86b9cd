"""Chat templates: Jinja programs that come with a checkpoint, rendered in child processes with limits."""

from dataclasses import dataclass
from pathlib import Path

from ..errors import NO_CHAT, PromptError
from .sandbox import Program, Sandbox, SandboxError

MAX_CHILDREN = 4  # Maximum child processes of one template.


@dataclass(frozen=True)
class Limits:
    """Limits of one render: wall-clock seconds, bytes of memory, characters of output."""

    seconds: float = 5.0
    memory: int = 512 << 20
    characters: int = 16 << 20


class ChatTemplate:
    """A chat template, rendered in child processes.

    Jinja's sandbox denies the template access to Python's internals. The child process has no access to files, and
    its time, memory and output are limited.

    Args:
        source: the template in Jinja.
        special_tokens: text by name (bos_token, eos_token, ...). The template can read them as variables.
        file: path of the template, for error messages.
        limits: of each render; None is the default limits.
    """

    def __init__(
        self, source: str, special_tokens: dict[str, str], file: Path | str | None = None, limits: Limits | None = None
    ):
        self.source, self.special_tokens = source, special_tokens
        self.limits = limits or Limits()
        self._name = "the chat template" if file is None else f"the chat template in {file}"
        setup = [source, self.limits.characters]
        longest = 8 * self.limits.characters + 1000  # A character takes at most 6 bytes in JSON.
        self.sandbox = Sandbox(
            Program(
                "tridecode.text.rendering:renderer", lambda: setup, self.limits.memory, self.limits.seconds, longest
            )
        )

    def render(self, messages: list[dict], variables: dict) -> str:
        """Return the text of the prompt.

        Args:
            messages: dicts of plain JSON values, usually with "role" and "content".
            variables: further variables of the template, plain JSON values by name.

        Raises:
            PromptError: the template refuses the messages, fails, or exceeds a limit.
        """
        context = {"tools": None, "documents": None, "add_generation_prompt": True, **self.special_tokens, **variables}
        try:
            text = self.sandbox.call(context | {"messages": messages}, self.limits.seconds)
        except SandboxError as error:
            raise PromptError(f"{self._name}{self._problem(error)}") from None
        # A string literal of the template may contain a lone surrogate.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def variables(self) -> frozenset[str]:
        """Return the names of the variables that the template reads and a caller may set.

        The set is empty if the template cannot be compiled.
        """
        try:
            names = self.sandbox.call(None, self.limits.seconds)
        except SandboxError:
            return frozenset()
        return frozenset(names) - {"messages", "add_generation_prompt", *self.special_tokens}

    def _problem(self, error: SandboxError) -> str:
        """Return the rest of an error message that begins with the name of the template."""
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
