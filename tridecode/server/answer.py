"""AnswerText: the text of a growing answer, split into thinking, text and tool calls, up to a stop string."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ..text.stop_strings import StopStrings
from ..text.thinking import OPEN, THINKING, ThinkSplitter
from ..text.tokenizer import Tokenizer
from .tools.parser import NAME, TEXT, CallParser, Event
from .tools.toolset import Tools

Span = tuple[int, int]


class AnswerText:
    """The text of a chat's answer.

    Stop strings end the text that the client sees as content. They do not apply to thinking, to the white space around
    it, or to tool calls.

    Args:
        tag: the think tag with which the chat's prompt ends, or "", if the model may think; None otherwise.
        tools: the request's tools, whose calls are parsed.
        stops: the stop strings of the request.
        special: the texts of tokens that output chunks omit, but that this text contains.

    Attributes:
        length: number of characters so far.
        hit: the stop string that ended the content; None before that.
    """

    def __init__(
        self, tokenizer: Tokenizer, tag: str | None = None, tools: Tools | None = None, stops: Sequence[str] = (),
        special: Mapping[int, str] = MappingProxyType({}),
    ):  # fmt: skip
        self.length = 0
        self._splitter = None if tag is None else ThinkSplitter(tag == OPEN)
        self._parser = tools.parser(tokenizer) if tools else None
        self._special = special
        self._in_stops = tokenizer.special_tokens_in(stops) if stops else {}
        self._stops = StopStrings(stops)
        self._answer_start = 0  # Place of the first character after the thinking.
        self._unshown: list[Span] = []  # Places of content that a stop string may hide.
        self._shown: list[Span] = []

    @property
    def hit(self) -> str | None:
        """The stop string that ended the content; None before that."""
        return self._stops.hit

    @property
    def parser(self) -> CallParser | None:
        """The parser of tool calls, if the answer may contain any."""
        return self._parser

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of thinking."""
        return self._splitter.tokens if self._splitter else 0

    def feed(self, token: int | None, text: str, last: bool = False) -> list[Event]:
        """Add the text that a token completes. Return the events that are decided now.

        Args:
            token: token id, or None.
            last: whether the answer ends here.
        """
        if self.hit:
            return []
        text = ("" if token is None else self._special.get(token, "")) + text
        self.length += len(text)
        pairs = [(TEXT, text)] if text else []
        if self._splitter:
            pairs = self._splitter.feed(text, int(token is not None))
            if last:
                pairs += self._splitter.finish()
        events: list[Event] = []
        for kind, part in pairs:
            events += [(THINKING, part)] if kind == THINKING else self._read(part)
        if last and self._parser:
            events += self._find(self._parser.finish())
        thinks = self._splitter is not None and self._splitter.thinking
        if token in self._in_stops and token not in self._special and not thinks:
            events += self._show(self._stops.push(self._in_stops[token], visible=False))
        if last and not self.hit:
            events += self._show(self._stops.flush())
        return events

    def take_spans(self) -> list[Span]:
        """Return where in the answer the content is that was returned since the last call of this method."""
        spans, self._shown = self._shown, []
        return spans

    def _read(self, text: str) -> list[Event]:
        """Return the events of a part of the answer after the thinking. The part is the end of the text so far."""
        start = self.length - len(text)
        if self._parser is None:
            self._unshown.append((start, self.length))
            return self._show(self._stops.push(text))
        if not self._answer_start:
            self._answer_start = start
        return self._find(self._parser.feed(text))

    def _find(self, events: list[Event]) -> list[Event]:
        """Return the events of the parser up to the first stop string in their text."""
        assert self._parser is not None
        self._unshown += [(self._answer_start + a, self._answer_start + b) for a, b in self._parser.take_spans()]
        kept: list[Event] = []
        for kind, text in events:
            if self.hit:
                break
            if kind == NAME:  # A stop string does not extend across a call.
                kept += self._show(self._stops.flush())
            kept += self._show(self._stops.push(text)) if kind == TEXT else [(kind, text)]
        return kept

    def _show(self, text: str) -> list[Event]:
        """Return content as an event, and note its place."""
        left = len(text)
        while left:
            start, end = self._unshown.pop(0)
            middle = min(start + left, end)
            left -= middle - start
            if middle < end:
                self._unshown.insert(0, (middle, end))
            if self._shown and self._shown[-1][1] == start:
                start = self._shown.pop()[0]
            self._shown.append((start, middle))
        return [(TEXT, text)] if text else []
