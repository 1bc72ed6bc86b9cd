"""What was said so far, as a value: a turn that fails leaves it as it was."""

from dataclasses import dataclass, replace

from ...text.thinking import strip_thinking


@dataclass(frozen=True)
class Conversation:
    """Turns of (user, assistant) text and a system turn; with raw one text that both sides continue.

    dropped: turns at the beginning that are no longer sent to the model. They stay part of the conversation.
    """

    raw: bool = False
    system: str | None = None
    turns: tuple[tuple[str, str], ...] = ()
    dropped: int = 0
    title: str | None = None  # what it is called in lists, None: its first words

    def prompt(self, line: str) -> str | list[dict]:
        """The prompt of the turn that `line` begins."""
        if self.raw:
            return "".join(f"{user}{answer}\n" for user, answer in self.turns[self.dropped :]) + line
        return [*self.messages(), {"role": "user", "content": line}]

    def messages(self) -> list[dict]:
        """What was said as chat messages; ValueError where that is one text."""
        if self.raw:
            raise ValueError("it was made with --raw and is no chat")
        found = [] if self.system is None else [{"role": "system", "content": self.system}]
        for user, answer in self.turns[self.dropped :]:
            found += {"role": "user", "content": user}, {"role": "assistant", "content": answer}
        return found

    def plus(self, line: str, answer: str) -> "Conversation":
        return replace(self, turns=(*self.turns, (line, answer)))

    def without_last(self) -> "Conversation":
        turns = self.turns[:-1]
        return replace(self, turns=turns, dropped=min(self.dropped, len(turns)))

    def markdown(self, opens_thinking: bool = False) -> str:
        """The whole conversation for people to read, without the thinking."""
        parts = [] if self.system is None else [f"## System\n\n{self.system}\n"]
        for user, answer in self.turns:
            said = answer if self.raw else strip_thinking(answer, opens_thinking)
            parts.append(f"{user}{said}\n" if self.raw else f"## User\n\n{user}\n\n## Assistant\n\n{said}\n")
        return "\n".join(["# Conversation\n", *parts])
