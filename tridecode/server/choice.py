"""Choice: one growing answer, split into thinking, text and tool calls."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..results import OutputChunk, TokenLogprobs, Usage
from ..text.thinking import OPEN, THINKING, ThinkSplitter
from ..text.tokenizer import Tokenizer
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


@dataclass
class Delta:
    """The part of an answer that some output chunks add.

    Args:
        events: (kind, text) pairs in order; the kind is THINKING or one of tools.parser.
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
        before: Sequence[int] = (), output: Output = Output(),
    ):  # fmt: skip
        """Create an empty answer.

        Args:
            tag: the think tag with which a chat's prompt ends, or "", if the model may think; None otherwise.
            first_text: text in front of the answer, for `echo`.
            tools: the request's tools, whose calls are parsed.
            before: token ids of a prompt that the answer continues.
            output: the form of its text.
        """
        self._output, self.completion_tokens = output, 0
        self._tokenizer, self._splitter = tokenizer, None if tag is None else ThinkSplitter(tag == OPEN)
        self._parser = tools.parser(tokenizer) if tools else None
        self._special = tools.special_tokens(tokenizer) if tools else {}
        if output.special_tokens:
            self._special = {token: tokenizer.token_bytes(token).decode() for token in tokenizer.special_ids}
        self._shown_stops = output.stop_ids if output.stop_string else frozenset()
        self._first_text, self._characters = first_text, len(first_text)
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
        return self._splitter.tokens if self._splitter else 0

    @property
    def called(self) -> bool:
        """Whether the answer contains a valid tool call."""
        return self._parser is not None and any(not call.broken for call in self._parser.calls)

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
            text = chunk.text
            if chunk.token_id is not None:
                delta.token_ids.append(chunk.token_id)
                self.completion_tokens += 1
                text = self._text_of_special(chunk.token_id) + text
                if chunk.logprobs is not None:
                    delta.logprobs.append((chunk.token_id, chunk.logprobs, self._characters))
                    self._characters += len(self._text.push(chunk.token_id))
            if chunk.stop_string and self._output.stop_string:
                text += chunk.stop_string
            pairs = [(TEXT, text)] if text else []
            if self._splitter:
                pairs = self._splitter.feed(text, int(chunk.token_id is not None))
                if chunk.finish_reason:
                    pairs += self._splitter.finish()
            for kind, part in pairs:
                if kind == THINKING:
                    delta.events.append((THINKING, part))
                else:
                    delta.events += self._parser.feed(part) if self._parser else [(TEXT, part)]
            if chunk.finish_reason:
                if self._parser:
                    delta.events += self._parser.finish()
                self.finish_reason, self.stop_string = chunk.finish_reason, chunk.stop_string
                self.usage = chunk.usage or self.usage
        return delta

    def _text_of_special(self, token: int) -> str:
        """Return the text of a token that the chunk's text omits: a special token or the stop token, if requested."""
        if token in self._output.stop_ids:
            if token not in self._shown_stops or token in self._tokenizer.special_ids - self._special.keys():
                return ""
            return self._tokenizer.token_bytes(token).decode(errors="replace")
        return self._special.get(token, "")

    def _end_without_tokens(self, chunk: OutputChunk) -> None:
        """Take a chunk of a request that samples no tokens: end the answer, and drop the token that was sampled."""
        if chunk.finish_reason:
            self.finish_reason, usage = "length", chunk.usage or self.usage
            self.usage = Usage(usage.prompt_tokens, usage.reused_tokens, 0)

    def restore_malformed_calls(self, delta: Delta) -> Delta:
        """Return the delta of a whole answer in which malformed calls are replaced by the text that the model wrote.

        A call that max_tokens cut stays a call, as in a stream.
        """
        events: list[Event] = []
        calls, number = (self._parser.calls if self._parser else []), -1
        malformed = [call.broken and not (call.open and self.finish_reason == "length") for call in calls]
        for kind, text in delta.events:
            number += kind == NAME
            if kind in (NAME, ARGUMENTS) and malformed[number]:
                kind, text = TEXT, calls[number].raw if kind == NAME else ""
            if events and events[-1][0] == kind != NAME:
                events[-1] = kind, events[-1][1] + text
            else:
                events.append((kind, text))
        if self._parser:
            self._parser.calls = [call for call in calls if not call.broken]
        return Delta(events, delta.token_ids, delta.logprobs)
