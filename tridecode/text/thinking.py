"""Separation of streamed text into thinking (the `<think>` block with which some models begin) and answer."""

import time

OPEN, CLOSE = "<think>", "</think>"
THINKING_VARIABLE = "enable_thinking"  # The template variable that enables thinking.
THINKING, ANSWER = "thinking", "answer"


class ThinkSplitter:
    """A splitter of streamed text into a think block at its beginning and the answer after it.

    A tag may be cut anywhere between two calls of `feed`. Tags after the beginning are text. White space around the
    block is dropped.

    Args:
        starts_inside: whether the prompt ends inside a think block.
        clock: a function that returns seconds.

    Attributes:
        tokens: number of tokens of the block, including its tags.
        closed: whether the block has ended.
    """

    def __init__(self, starts_inside: bool = False, clock=time.perf_counter):
        self.tokens, self.closed = 0, False
        self._starts_inside, self._clock = starts_inside, clock
        self._started = self._ended = None
        self._kind: str | None = None  # None until the text is long enough for the first tag.
        self._pending = ""  # Text that may be a part of a tag, or white space around a tag.
        self._emitted = False  # Whether text of the current kind was returned.

    @property
    def thinking(self) -> bool:
        """Whether the next text is thinking."""
        return self._kind == THINKING

    @property
    def seconds(self) -> float:
        """Seconds from the first text to the end of the block, or to the present in an open one; 0 without a block."""
        if self._started is None or not (self.thinking or self.closed):
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._started

    def feed(self, text: str, tokens: int = 1) -> list[tuple[str, str]]:
        """Add text; return the (kind, text) pairs that are decided now.

        Args:
            tokens: number of tokens of `text`.
        """
        if self._started is None:
            self._started = self._clock()
        if self._kind != ANSWER:
            self.tokens += tokens
        self._pending += text
        if self._kind is None and not self._decide():
            return []
        pairs = self._think() if self.thinking else []
        if self._kind == ANSWER:
            pairs += self._emit(self._pending.lstrip("\n") if self.closed and not self._emitted else self._pending)
            self._pending = ""
        return pairs

    def finish(self) -> list[tuple[str, str]]:
        """Return the (kind, text) pairs that are still held back, at the end of the stream."""
        if self._kind is None:
            self._switch_to(THINKING if self._starts_inside else ANSWER)
        rest, self._pending = self._pending, ""
        if self.thinking:
            rest = rest.rstrip() if self._emitted else rest.strip()
            if self._ended is None and self._started is not None:
                self._ended = self._clock()
        return self._emit(rest)

    def _decide(self) -> bool:
        """Decide whether the text begins with a think block; return False if more text is needed for that."""
        body = self._pending.lstrip()
        if len(body) < len(OPEN) and OPEN.startswith(body):
            return False
        if body.startswith(OPEN):
            self._pending = body[len(OPEN) :]
            self._switch_to(THINKING)
        else:
            self._switch_to(THINKING if self._starts_inside else ANSWER)
        return True

    def _think(self) -> list[tuple[str, str]]:
        """Return the pending text that is certainly thinking; switch to the answer if the block ends."""
        if not self._emitted:
            self._pending = self._pending.lstrip()
        head, close, rest = self._pending.partition(CLOSE)
        if close:
            pairs = self._emit(head.rstrip())
            self._pending, self.closed, self._ended = rest, True, self._clock()
            self._switch_to(ANSWER)
            return pairs
        certain = len(head) - next(n for n in range(len(CLOSE) - 1, -1, -1) if head.endswith(CLOSE[:n]))
        certain = len(head[:certain].rstrip())
        self._pending = head[certain:]
        return self._emit(head[:certain])

    def _switch_to(self, kind: str) -> None:
        self._kind, self._emitted = kind, False
        if kind == ANSWER and not self.closed:
            self.tokens = 0  # The tokens so far were counted in case the text was thinking.

    def _emit(self, text: str) -> list[tuple[str, str]]:
        self._emitted |= bool(text)
        return [(self._kind, text)] if text and self._kind else []


def last_tag(prompt: str) -> str:
    """Return the think tag, OPEN or CLOSE, with which a prompt ends except for white space, or ""."""
    return next((tag for tag in (OPEN, CLOSE) if prompt.rstrip().endswith(tag)), "")


def strip_thinking(text: str, starts_inside: bool = False) -> str:
    """Return an answer without its think block; "" if the block does not end.

    Args:
        starts_inside: whether the prompt ends inside a think block.
    """
    splitter = ThinkSplitter(starts_inside)
    return "".join(piece for kind, piece in splitter.feed(text) + splitter.finish() if kind == ANSWER)
