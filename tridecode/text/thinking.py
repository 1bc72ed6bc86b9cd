"""The split of streamed text into thinking, the `<think>` block that some models begin with, and answer."""

import time

OPEN, CLOSE = "<think>", "</think>"
SWITCH = "enable_thinking"  # the template variable that enables thinking
THINKING, ANSWER = "thinking", "answer"


class ThinkSplitter:
    """Separates a think block at the start of an answer from the answer, as text arrives.

    Tags may be split over several parts. A tag later in an answer is text. White space around the block belongs to
    neither side.

    Args:
        opened: the prompt ends inside a think block.

    Attributes:
        tokens: those of the block, with its tags.
        closed: whether the block has ended.
    """

    def __init__(self, opened: bool = False, clock=time.perf_counter):
        self.tokens, self.closed = 0, False
        self._opened, self._clock = opened, clock
        self._started = self._ended = None
        self._kind: str | None = None  # None until the text is long enough for the first tag
        self._held = ""  # perhaps part of a tag, or white space around one
        self._begun = False  # text of this kind was returned

    @property
    def thinking(self) -> bool:
        """Whether the next text is thinking."""
        return self._kind == THINKING

    @property
    def seconds(self) -> float:
        """The time from the first text to the end of the block; 0 without a block."""
        if self._started is None or not (self.thinking or self.closed):
            return 0.0
        return (self._clock() if self._ended is None else self._ended) - self._started

    def feed(self, text: str, tokens: int = 1) -> list[tuple[str, str]]:
        """Return the (kind, text) pairs that are decided with this text of `tokens` tokens."""
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
        """Return the pairs that were held back, at the end of the stream."""
        if self._kind is None:
            self._become(THINKING if self._opened else ANSWER)
        held, self._held = self._held, ""
        if self.thinking:
            held = held.rstrip() if self._begun else held.strip()
            if self._ended is None and self._started is not None:
                self._ended = self._clock()
        return self._give(held)

    def _decide(self) -> bool:
        """Find out how the text begins; return False while that is open."""
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
        """Return the thinking that is certain, and change to the answer where the block ends."""
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
            self.tokens = 0  # they were counted in case this became thinking

    def _give(self, text: str) -> list[tuple[str, str]]:
        self._begun |= bool(text)
        return [(self._kind, text)] if text and self._kind else []


def ends_inside(text: str) -> bool:
    """Whether a prompt with this end has opened a think block."""
    return text.rstrip().endswith(OPEN)


def end_thinking(text: str, opened: bool = False) -> str:
    """Close the think block of a text that was cut off: templates remove only closed ones from earlier turns."""
    splitter = ThinkSplitter(opened)
    splitter.feed(text)
    splitter.finish()
    return f"{text}\n{CLOSE}\n\n" if splitter.thinking else text


def strip_thinking(text: str, opened: bool = False) -> str:
    """Return an answer without its think block; "" if the block does not end."""
    splitter = ThinkSplitter(opened)
    return "".join(piece for kind, piece in splitter.feed(text) + splitter.finish() if kind == ANSWER)
