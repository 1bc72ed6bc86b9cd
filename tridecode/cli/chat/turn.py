"""One turn of a chat: its prompt, the streamed answer and the statistics line."""

import secrets
import time
from dataclasses import replace

from ...errors import GenerationError
from ...results import OutputChunk
from ...sampling import SamplingParams
from ...text.thinking import CLOSE, ThinkSplitter
from ..explain import explain
from ..signals import one_interrupt, suspendable
from ..terminal import both, counted, cut_by, speed_line
from ..waiting import Waiting
from .conversation import Conversation
from .display import Display, open_display
from .model import Prompt
from .overflow import fit
from .settings import changed

SEEDS = 1_000_000  # If no seed is set, a random seed below this number is used.
COLUMNS = 80  # Maximum width of the statistics line.


class Turn:
    """The answer to `line` in the conversation `base`, or the rest of the answer after `prefix`.

    `run` streams the answer and adds the turn to the conversation of `chat`, a talk.Chat. A turn that failed, or was
    stopped before its first character, is not added.

    Args:
        tries: Number of earlier answers to this message; it changes the seed.
    """

    def __init__(self, chat, line: str, base: Conversation, prefix: str = "", tries: int = 0):
        self.chat, self.line, self.base, self.prefix, self.tries = chat, line, base, prefix, tries
        self.params: SamplingParams  # `run` sets this attribute.
        # A continued answer has already ended its thinking.
        self.splitter = ThinkSplitter(chat.thinking.opened and not prefix)
        self.texts: list[str] = []
        self.tokens = 0
        self.last: OutputChunk | None = None  # The latest chunk.
        self.started = 0.0

    def run(self) -> None:
        """Stream the answer, show it, and update the chat."""
        chat, shown = self.chat, open_display(self.chat, self.splitter, self.prefix)
        waiting = Waiting(chat.output, chat.model.reading, redraws=not chat.plain, shows=chat.interactive)
        pause, resume = both(waiting.pause, shown.pause), both(shown.resume, waiting.resume)
        # The handler covers the whole turn. So a second Ctrl-C does not lose the answer that the first one stopped.
        with one_interrupt(chat.interactive), suspendable(pause, resume):
            self.params = params_of(chat, self.tries)
            self.started = time.perf_counter()
            try:
                self._stream(shown, waiting)
            except KeyboardInterrupt:
                shown.abort()
                if not chat.interactive:
                    raise
                self.last, chat.stopped_at = None, time.monotonic()
            except BaseException:
                shown.abort()
                raise
            self._record(shown)

    def _stream(self, shown: Display, waiting: Waiting) -> None:
        chat = self.chat
        self._make_room()
        prompt = self.base.prompt(self.line)
        with waiting:
            for chunk in chat.model.stream(prompt, self.params, chat.overrides, chat.thinking, self.prefix):
                waiting.end()
                self.last = chunk
                self.texts.append(chunk.text)
                self.tokens += chunk.finish_reason is None
                shown.push(chunk.text)
        shown.flush()

    def _make_room(self) -> None:
        """Drop the oldest turns from the prompt if it does not fit in the context. Raises Overflow."""
        chat, capacity = self.chat, self.chat.model.capacity
        if capacity is None or not chat.model.counts:
            return
        # Counting tokens delays the first token, so skip it if an upper bound fits. A character has at most four bytes,
        # a token has at least one byte, and the template adds fewer than 256 tokens.
        bound = None if chat.used is None or self.prefix else chat.used + 4 * len(self.line) + 256
        if bound is not None and bound <= capacity - capacity // 8:
            return

        def count(prompt: Prompt) -> int:
            return chat.model.count(prompt, chat.thinking, self.prefix)

        limits = capacity, chat.overflow, chat.params.max_tokens, chat.model.largest
        self.base, note = fit(self.base, self.line, count, *limits, bool(self.prefix))
        if note:
            chat.output.note(note)

    def _record(self, shown: Display) -> None:
        """Add the turn to the conversation, save it, and print the statistics line or the error."""
        chat, last = self.chat, self.last
        added = "".join(self.texts)
        answer = self.prefix + added
        if self.splitter.thinking and (last is None or last.finish_reason == "length"):
            answer += f"\n{CLOSE}\n\n"  # Templates remove the thinking of earlier turns only if its block is closed.
        failed = last is not None and last.finish_reason == "error"
        chat.used = None
        if last is not None and last.usage is not None and not failed:
            chat.used = last.usage.prompt_tokens + last.usage.completion_tokens
        if not failed:
            chat.tries = self.tries
            if added or last is not None:
                chat.conversation = replace(self.base.plus(self.line, answer), settings=changed(chat))
                chat.unanswered = None
        try:
            (shown.abort if failed else shown.finish)()
        finally:
            chat.save()
        if last is None:
            length, seconds = counted(self.tokens, chat.model.unit), time.perf_counter() - self.started
            rest = "kept in the conversation" if answer else "the turn is not kept"
            chat.output.note(f"stopped after {length} and {seconds:.1f} s; {rest}")
        elif failed:
            chat.fail(explain(GenerationError(last.error)), self.prefix)
        else:
            if self.prefix and not added:
                chat.output.note("the model has nothing to add")
            chat.last, chat.seed = last, self.params.seed if self.params.temperature else None
            if cut := cut_note(chat, last):
                chat.output.note(cut)
            print_speed(chat, last)


def params_of(chat, tries: int) -> SamplingParams:
    """Return the sampling parameters of a turn.

    If no seed is set, it is a short random number, so that the user can reproduce the answer. If one is set, a retry
    of the message changes it and prints it.
    """
    params = chat.params
    if params.temperature == 0:
        if tries:
            chat.output.note("temperature is 0, so every try gives the same answer; use /set temperature 0.7")
    elif params.seed is None:
        if chat.model.seeds:
            return replace(params, seed=secrets.randbelow(SEEDS))
    elif tries:
        seed = params.seed + tries
        seed -= 2**64 if seed >= 2**64 else 0
        chat.output.note(f"try {tries + 1}, seed {seed}")
        return replace(params, seed=seed)
    return params


def cut_note(chat, last: OutputChunk) -> str:
    """Return a line that explains why the answer was cut, or ""."""
    usage, limit, capacity = last.usage, chat.params.max_tokens, chat.model.capacity
    if last.finish_reason == "stop":
        return ""
    if last.finish_reason != "length":
        return f"the server ended the answer: {last.finish_reason}"
    by, more = cut_by(usage, limit, capacity), True
    if by == "context":
        more = chat.overflow == "drop-oldest" and len(chat.conversation.turns) - chat.conversation.dropped > 1
    continuable = chat.interactive and chat.model.continues and more
    reasons = {"max_tokens": f"max_tokens ({limit or 0:,}) was reached"}
    reasons["context"] = f"the context of {counted(capacity or 0, 'token')} is full"
    why = reasons.get(by or "", "the context is full, or the server has a limit")
    return f"the answer was cut: {why}" + ("; /continue continues it" if continuable else "")


def print_speed(chat, last: OutputChunk) -> None:
    """Print the statistics line in the form that the setting `stats` selects."""
    if chat.stats == "short":
        chat.output.note(" · ".join(speed_line(last.usage, last.timings).split(" · ")[:2]))
    elif chat.stats == "full":
        width = min(COLUMNS, chat.output.errors.width)
        chat.output.note(speed_line(last.usage, last.timings, chat.model.capacity, chat.seed, width))
