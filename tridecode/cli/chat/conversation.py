"""An immutable conversation, which a failed turn does not change."""

from dataclasses import dataclass, field, replace

from ...text.thinking import strip_thinking


@dataclass(frozen=True)
class Conversation:
    """Turns of (user, assistant) text and a system turn.

    Attributes:
        raw: No chat template is used: the model continues the text of all turns.
        dropped: Number of turns at the beginning that are no longer sent to the model but remain in the conversation.
        title: The title in lists. None shows the first words of the conversation.
        settings: The sampling options that were set in the chat, as JSON values.
        model: The model named in the file from which the conversation was read.
    """

    raw: bool = False
    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    dropped: int = 0
    title: str | None = None
    settings: dict = field(default_factory=dict)
    model: str | None = field(default=None, compare=False)

    def prompt(self, line: str) -> str | list[dict]:
        """Return the prompt of a new turn with the message `line`."""
        if self.raw:
            return "".join(f"{user}{answer}\n" for user, answer in self.turns[self.dropped :]) + line
        return [*self.messages(), {"role": "user", "content": line}]

    def messages(self) -> list[dict]:
        """Return the conversation as chat messages. Raises ValueError if it is raw."""
        if self.raw:
            raise ValueError("it was made with --raw and has no chat messages")
        items = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, answer in self.turns[self.dropped :]:
            items += {"role": "user", "content": user}, {"role": "assistant", "content": answer}
        return items

    def plus(self, line: str, answer: str) -> "Conversation":
        """Return the conversation with one more turn."""
        return replace(self, turns=(*self.turns, (line, answer)))

    def without_last(self) -> "Conversation":
        """Return the conversation without its last turn."""
        turns = self.turns[:-1]
        return replace(self, turns=turns, dropped=min(self.dropped, len(turns)))

    def markdown(self, opens_thinking: bool = False) -> str:
        """Return the whole conversation as Markdown, without the thinking.

        Args:
            opens_thinking: The chat template begins the think block, so that answers start inside it.
        """
        parts = [] if self.system is None else [f"## System\n\n{self.system}\n"]
        for user, answer in self.turns:
            text = answer if self.raw else strip_thinking(answer, opens_thinking)
            parts.append(f"{user}{text}\n" if self.raw else f"## User\n\n{user}\n\n## Assistant\n\n{text}\n")
        return "\n".join(["# Conversation\n", *parts])
