"""Choice: one growing answer, split into thinking, text and tool calls."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from ..results import OutputChunk, TokenLogprobs, Usage
from ..text.tokenizer import Tokenizer
from .answer import AnswerText, Span
from .tools.parser import ARGUMENTS, NAME, TEXT, Event
from .tools.toolset import Tools


@dataclass(frozen=True)
class Output:
    """The form of an answer's text.

    Args:
        special_tokens: whether the text contains special tokens.
        stop_string: whether it contains the stop string or stop token that ended it.
        only_prompt: whether the answer is empty, because the request only computes its prompt.
        stop_ids: ids of the tokens that end the answer.
    """

    special_tokens: bool = False
    stop_string: bool = False
    only_prompt: bool = False
    stop_ids: frozenset[int] = frozenset()

    def special_texts(self, tokenizer: Tokenizer, in_calls: dict[int, str]) -> dict[int, str]:
        """Map the tokens that output chunks omit, and that the answer contains, to their texts.

        Args:
            in_calls: the special tokens of tool calls.
        """
        texts = in_calls
        if self.special_tokens:
            texts = {token: tokenizer.token_bytes(token).decode() for token in tokenizer.special_ids}
        if not self.stop_string:
            return {token: text for token, text in texts.items() if token not in self.stop_ids}
        ordinary = self.stop_ids - tokenizer.special_ids
        return texts | {token: tokenizer.token_bytes(token).decode(errors="replace") for token in ordinary}


@dataclass
class Delta:
    """The part of an answer that some output chunks add.

    Args:
        events: (kind, text) pairs in order; the kind is thinking.THINKING or one of tools.parser.
        token_ids: ids of the sampled tokens.
        logprobs: (token id, log-probabilities, offset of the token's text in the answer) for each token.
    """

    events: list[Event] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, TokenLogprobs | None, int]] = field(default_factory=list)

    def text(self, kind: str) -> str:
        """Return the joined text of the events of `kind`."""
        return "".join(text for event_kind, text in self.events if event_kind == kind)


class Choice:
    """One answer.

    Its text, thinking and calls are separate. It also has log-probabilities and the reason for its end.
    """

    def __init__(
        self, tokenizer: Tokenizer, tag: str | None, first_text: str = "", tools: Tools | None = None,
        before: Sequence[int] = (), output: Output = Output(), stops: Sequence[str] | None = None,
    ):  # fmt: skip
        """Create an empty answer.

        Args:
            tag: the think tag with which a chat's prompt ends, or "", if the model may think; None otherwise.
            first_text: text in front of the answer, for `echo`.
            tools: the request's tools, whose calls are parsed.
            before: token ids of a prompt that the answer continues.
            output: the form of its text.
            stops: the stop strings of a chat; None in a completion, where the engine applies them to the whole text.
        """
        self._tokenizer, self._output, self._chat = tokenizer, output, stops is not None
        special = output.special_texts(tokenizer, tools.special_tokens(tokenizer) if tools else {})
        new = partial(AnswerText, tokenizer, tag, tools, stops or (), special)
        # A new reader of the answer, for the engine to search for stop strings.
        self.reader: Callable[[], AnswerText] | None = new if stops else None
        self._answer, self.completion_tokens = new(), 0
        self._first_text, self._characters = first_text, len(first_text)
        # Tokens of a chat whose text may become content: logprobs of the delta, and place in the answer.
        self._undecided: deque[tuple[tuple[int, TokenLogprobs | None, int], Span]] = deque()
        # Offsets need the text of each token. Stop strings may delay the text of the chunks.
        self._text = tokenizer.detokenizer(before)
        self._first_logprobs: list[tuple[int, TokenLogprobs | None, int]] = []
        self.sent = False  # Whether a part of the answer was sent.
        self.finish_reason: str | None = None
        self.stop_string: str | None = None  # The stop string that ended the answer.
        self.usage = Usage(0, 0, 0)  # The usage is set at the end of the answer.

    @property
    def reasoning_tokens(self) -> int:
        """Number of tokens of thinking."""
        return self._answer.reasoning_tokens

    @property
    def called(self) -> bool:
        """Whether the answer contains a valid tool call."""
        return self._answer.parser is not None and any(not call.broken for call in self._answer.parser.calls)

    def echo_logprobs(self, prompt: Sequence[int], scores: list[OutputChunk]) -> None:
        """Insert the log-probabilities of the prompt, which `scores` contains for all tokens but the first."""
        text, offset = self._tokenizer.detokenizer(skip_special=False), 0
        for token, logprobs in zip(prompt, (None, *(chunk.logprobs for chunk in scores))):
            self._first_logprobs.append((token, logprobs, offset))
            offset += len(text.push(token))

    def add(self, chunks: list[OutputChunk]) -> Delta:
        """Add output chunks and return their delta; store finish_reason, stop_string and usage of the last chunk."""
        delta = Delta([(TEXT, self._first_text)] if self._first_text else [], logprobs=self._first_logprobs)
        self._first_text, self._first_logprobs = "", []
        for chunk in chunks:
            if self._output.only_prompt:
                self._end_without_tokens(chunk)
                continue
            token, start, last = chunk.token_id, self._answer.length, chunk.finish_reason is not None
            delta.events += self._answer.feed(token, chunk.text, last)
            if token is not None:
                delta.token_ids.append(token)
                self.completion_tokens += 1
                if chunk.logprobs is not None:
                    self._take_logprobs(delta, token, chunk.logprobs, start)
            delta.logprobs += self._content_logprobs()
            if last and self._output.stop_string and (stop := chunk.stop_string or self._answer.hit):
                delta.events.append((TEXT, stop))
            if chunk.finish_reason:
                self.finish_reason, self.stop_string = chunk.finish_reason, chunk.stop_string or self._answer.hit
                if self._answer.hit and self.finish_reason == "length":  # The last text completed the stop string.
                    self.finish_reason = "stop"
                self.usage = chunk.usage or self.usage
        return delta

    def _end_without_tokens(self, chunk: OutputChunk) -> None:
        """Take a chunk of a request that samples no tokens: end the answer, and drop the token that was sampled."""
        if chunk.finish_reason:
            self.finish_reason, usage = "length", chunk.usage or self.usage
            self.usage = Usage(usage.prompt_tokens, usage.reused_tokens, 0)

    def _take_logprobs(self, delta: Delta, token: int, logprobs: TokenLogprobs, start: int) -> None:
        """Add the log-probabilities of a token to the delta; in a chat, keep them until its text is content."""
        if not self._chat:
            delta.logprobs.append((token, logprobs, self._characters))
            self._characters += len(self._text.push(token))
            return
        end = self._answer.length
        # A token without text is a part of the next character, unless it is a special token.
        if end > start or token not in self._tokenizer.special_ids:
            self._undecided.append(((token, logprobs, start), (start, max(end, start + 1))))

    def _content_logprobs(self) -> list[tuple[int, TokenLogprobs | None, int]]:
        """Return the log-probabilities of the tokens whose text became content."""
        spans, content = self._answer.take_spans(), []
        while spans and self._undecided and self._undecided[0][1][0] < spans[-1][1]:
            entry, (start, end) = self._undecided.popleft()
            if any(first < end and start < last for first, last in spans):
                content.append(entry)
        return content

    def restore_malformed_calls(self, delta: Delta) -> Delta:
        """Return the delta of a whole answer in which malformed calls are replaced by the text that the model wrote.

        A call that max_tokens cut stays a call, as in a stream.
        """
        events: list[Event] = []
        parser = self._answer.parser
        calls, number = (parser.calls if parser else []), -1
        malformed = [call.broken and not (call.open and self.finish_reason == "length") for call in calls]
        for kind, text in delta.events:
            number += kind == NAME
            if kind in (NAME, ARGUMENTS) and malformed[number]:
                kind, text = TEXT, calls[number].raw if kind == NAME else ""
            if events and events[-1][0] == kind != NAME:
                events[-1] = kind, events[-1][1] + text
            else:
                events.append((kind, text))
        if parser:
            parser.calls = [call for call in calls if not call.broken]
        return Delta(events, delta.token_ids, delta.logprobs)
