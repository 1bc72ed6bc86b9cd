"""Thinking and answer told apart in streamed text: the `<think>` block that some models begin with."""

import time

OPEN, CLOSE = "<think>", "</think>"
SWITCH = "enable_thinking"  # the variable by which templates are told whether to think
THINKING, ANSWER = "thinking", "answer"


class ThinkSplitter:
    """Tell a think block at the start of an answer from the answer itself, piece by piece.

    Tags may be split anywhere over the pieces. `opened`: the prompt already ended inside a think block. Only a block
    at the very start counts: a tag later in an answer is text. White space around the block belongs to neither side.
    `tokens` and `seconds` are those of the block, its tags included; `closed` says that its end was seen.
    """

    def __init__(self, opened: bool = False, clock=time.perf_counter):
        self.tokens, self.closed = 0, False
        self._opened, self._clock = opened, clock
        self._started = self._ended = None
        self._kind: str | None = None  # not known before the first tag could have come
        self._held = ""  # what later pieces may still turn into a tag, or into white space around one
        self._begun = False  # something of the present kind was given out

    @property
    def thinking(self) -> bool:
        """Whether the text of now is thinking."""
        return self._kind == THINKING

    @property
    def seconds(self) -> float:
        """From the first piece to the end of the block; 0 where there is no thinking."""
        if self._started is None or not (self.thinking or self.closed):
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._started

    def feed(self, text: str, tokens: int = 1) -> list[tuple[str, str]]:
        """The (kind, text) pairs that this piece decides; `tokens` is how many it stands for."""
        if self._started is None:
            self._started = self._clock()
        if self._kind != ANSWER:
            self.tokens += tokens
        self._held += text
        if self._kind is None and not self._decide():
            return []
        given = self._think() if self.thinking else []
        if self._kind == ANSWER:
            given += self._give(self._held.lstrip("\n") if self.closed and not self._begun else self._held)
            self._held = ""
        return given

    def finish(self) -> list[tuple[str, str]]:
        """The pairs held back until now, at the end of the stream."""
        if self._kind is None:
            self._become(THINKING if self._opened else ANSWER)
        held, self._held = self._held, ""
        if self.thinking:
            held = held.rstrip() if self._begun else held.strip()
            if self._ended is None and self._started is not None:
                self._ended = self._clock()
        return self._give(held)

    def _decide(self) -> bool:
        """Find out how the text begins; False while that is open."""
        body = self._held.lstrip()
        if len(body) < len(OPEN) and OPEN.startswith(body):
            return False
        if body.startswith(OPEN):
            self._held = body[len(OPEN) :]
            self._become(THINKING)
        else:
            self._become(THINKING if self._opened else ANSWER)
        return True

    def _think(self) -> list[tuple[str, str]]:
        """Give out the thinking that is certain, and change to the answer where the block ends."""
        if not self._begun:
            self._held = self._held.lstrip()
        head, close, rest = self._held.partition(CLOSE)
        if close:
            given = self._give(head.rstrip())
            self._held, self.closed, self._ended = rest, True, self._clock()
            self._become(ANSWER)
            return given
        certain = len(head) - next(n for n in range(len(CLOSE) - 1, -1, -1) if head.endswith(CLOSE[:n]))
        certain = len(head[:certain].rstrip())
        self._held = head[certain:]
        return self._give(head[:certain])

    def _become(self, kind: str) -> None:
        self._kind, self._begun = kind, False
        if kind == ANSWER and not self.closed:
            self.tokens = 0  # counted until now in case this became thinking

    def _give(self, text: str) -> list[tuple[str, str]]:
        self._begun |= bool(text)
        return [(self._kind, text)] if text and self._kind else []


def ends_inside(text: str) -> bool:
    """Whether a prompt that ends like this has begun the think block, so that its answer starts inside it."""
    return text.rstrip().endswith(OPEN)


def end_thinking(text: str, opened: bool = False) -> str:
    """A text that was cut off, its think block ended: templates take the thinking out of earlier turns only then."""
    splitter = ThinkSplitter(opened)
    splitter.feed(text)
    splitter.finish()
    return f"{text}\n{CLOSE}\n\n" if splitter.thinking else text


def strip_thinking(text: str, opened: bool = False) -> str:
    """An answer without its think block; empty when the block never ended."""
    splitter = ThinkSplitter(opened)
    return "".join(piece for kind, piece in splitter.feed(text) + splitter.finish() if kind == ANSWER)
