"""Choice: one answer as it grows, told apart into thinking, text and calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..results import Piece, TokenLogprobs, Usage
from ..text.thinking import THINKING, ThinkSplitter, ends_inside
from ..text.tokenizer import Tokenizer
from .tools.asked import Tools
from .tools.parser import ARGUMENTS, NAME, TEXT, Event


@dataclass
class Said:
    """What some pieces brought. events: (kind, text) in their order, of THINKING, and those of tools.parser; logprobs:
    (id, TokenLogprobs, offset of its text)."""

    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs | None, int]] = field(default_factory=list)

    def text(self, kind: str) -> str:
        return "".join(text for found, text in self.events if found == kind)


class Choice:
    """Text apart from thinking and calls, log-probabilities, and how it ended."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int] | None, first_text: str = "", tools: Tools | None = None,
        before: Sequence[int] = (),
    ):  # fmt: skip
        """prompt: of a chat whose model may think; first_text: what stands before the text; before: the ids of a prompt
        that the text continues."""
        self._tokenizer, self._splitter = tokenizer, None
        if prompt is not None:
            opened = ends_inside(tokenizer.decode(list(prompt[-4:]), skip_special=False))
            self._splitter = ThinkSplitter(opened)
        self._machine = tools.machine(tokenizer) if tools else None
        self._special = tools.special(tokenizer) if tools else {}
        self._first_text, self._characters = first_text, len(first_text)
        self._text = tokenizer.detokenizer(before)  # without stop strings, which hold text back: for offsets
        self._first_logprobs: list[tuple[int, TokenLogprobs | None, int]] = []
        self.begun = False  # something of it was sent
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # that has cut it
        self.usage = Usage(0, 0, 0)  # of the whole answer, once it has ended

    @property
    def reasoning_tokens(self) -> int:
        return self._splitter.tokens if self._splitter else 0

    @property
    def called(self) -> bool:
        """Whether it has calls that came to a good end."""
        return self._machine is not None and any(not call.broken for call in self._machine.calls)

    def echo_logprobs(self, prompt: Sequence[int], scores: list[Piece]) -> None:
        """Begin with the prompt's own: of its first token nothing is known, of the others what `scores` say."""
        text, offset = self._tokenizer.detokenizer(skip_special=False), 0
        for token, found in zip(prompt, (None, *(piece.logprobs for piece in scores))):
            self._first_logprobs.append((token, found, offset))
            offset += len(text.push(token))

    def add(self, pieces: list[Piece]) -> Said:
        """What these pieces bring; of the last one finish_reason, stop_string and usage are kept."""
        said = Said([(TEXT, self._first_text)] if self._first_text else [], logprobs=self._first_logprobs)
        self._first_text, self._first_logprobs = "", []
        for piece in pieces:
            text = piece.text
            if piece.token_id is not None:
                said.token_ids.append(piece.token_id)
                text = self._special.get(piece.token_id, "") + text
                if piece.logprobs is not None:
                    said.logprobs.append((piece.token_id, piece.logprobs, self._characters))
                    self._characters += len(self._text.push(piece.token_id))
            pairs = [(TEXT, text)] if text else []
            if self._splitter:
                pairs = self._splitter.feed(text, int(piece.token_id is not None))
                if piece.finish_reason:
                    pairs += self._splitter.finish()
            for kind, part in pairs:
                if kind == THINKING:
                    said.events.append((THINKING, part))
                else:
                    said.events += self._machine.feed(part) if self._machine else [(TEXT, part)]
            if piece.finish_reason:
                if self._machine:
                    said.events += self._machine.finish()
                self.finish_reason, self.stop_string = piece.finish_reason, piece.stop_string
                self.usage = piece.usage or self.usage
        return said

    def settle(self, said: Said) -> Said:
        """What a whole answer says, calls that did not come to a good end being text, as they stood."""
        events: list[Event] = []
        calls, number = (self._machine.calls if self._machine else []), -1
        for kind, text in said.events:
            number += kind == NAME
            if kind in (NAME, ARGUMENTS) and calls[number].broken:
                kind, text = TEXT, calls[number].raw if kind == NAME else ""
            if events and events[-1][0] == kind != NAME:
                events[-1] = kind, events[-1][1] + text
            else:
                events.append((kind, text))
        if self._machine:
            self._machine.calls = [call for call in calls if not call.broken]
        return Said(events, said.token_ids, said.logprobs)
