"""Chat: a conversation with a model, turn by turn."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from ...engine import Engine
from ...errors import ParameterError
from ...results import Piece
from ...text.thinking import CLOSE, SWITCH, strip_thinking
from ..explain import explain
from ..signals import one_interrupt
from ..terminal import Output, counted, joined
from . import session, slash, stats
from .completion import Offer
from .conversation import Conversation
from .display import opens_thinking
from .idle import IdleCapture
from .lines import unquoted
from .overflow import Overflow, fit
from .settings import CHOICES, NAMES, as_typed, changed, known
from .turn import Turn, with_seed

log = logging.getLogger("tridecode")
DEVICE_LOST = 3  # exit code
IMPATIENCE = 1.0  # seconds after an answer was stopped in which another Ctrl-C was meant for that answer


class Chat:
    """A conversation with an engine, its settings and the file it is saved to (None: nowhere).

    What it asks of the engine by itself: a name, the capacity, and the device, beside what methods of one line ask.
    """

    unit = "token"  # what a piece of an answer is

    def __init__(
        self,
        engine: Engine,
        params,
        output: Output,
        conversation: Conversation,
        *,
        interactive: bool = False,
        store: session.Store | None = None,
        overflow: str = "error",
        stats: str = "full",
        system: str | None = None,
        plain: bool = False,
        think: str = "on",
        given: dict | None = None,
        loader=None,
    ):
        """think: on, off or hide. given: sampling options that were asked for. loader: a loading.Loader, for /model."""
        self.engine, self.params, self.output = engine, params, output
        self.conversation, self.system = conversation, system
        self.given, self.loader = dict(given or {}), loader
        self.interactive, self.store, self.overflow, self.stats = interactive, store, overflow, stats
        self.begun_with = {name: getattr(self, name) for name in CHOICES}
        self.plain = plain or conversation.raw  # a text that is continued is no Markdown
        self.idle: IdleCapture | None = None
        self.stopped_at = -IMPATIENCE
        self.tries = 0  # of the last message, beside the first
        self.draft: str | None = None  # what /edit puts into the next prompt
        self.kept: str | None = None  # the session that holds the conversation before this one
        self.editor = False  # whether what is typed meanwhile goes to a line editor
        self.exit_code = 0
        self.last = None  # the last piece of the latest complete answer
        self.seed: int | None = None  # its seed, where that counts
        self.used: int | None = None  # tokens of the conversation at most, where that is known
        self.answers = self.tokens = 0
        self.seconds = 0.0
        self.think, self.variables, self.opens_thinking, self.thinks = "on", None, False, False
        self.set_think(think)

    def set_think(self, mode: str) -> None:
        """on, off or hide. Where the template cannot be told, off is a line and changes nothing."""
        tokenizer, raw = self.engine.tokenizer, self.conversation.raw
        switch = not raw and SWITCH in tokenizer.template_variables
        self.opens_thinking = not raw and opens_thinking(tokenizer, None)
        self.thinks = switch or self.opens_thinking or (not raw and tokenizer.thinks)
        if mode == "off" and not switch and (raw or self.thinks):
            why = "with --raw there is no chat template" if raw else f"the chat template has no variable {SWITCH}"
            self.output.note(f"thinking cannot be switched off: {why}; /think hide shows only its length")
            mode = self.think if self.think != "off" else "on"
        self.think, self.used = mode, None
        self.variables = {SWITCH: mode != "off"} if switch else None
        self.opens_thinking = not raw and opens_thinking(tokenizer, self.variables)

    def pieces(self, prompt, params) -> Iterator[Piece]:
        if isinstance(prompt, list) and isinstance(prompt[0], int):  # the template has had its variables
            return self.engine.stream(prompt, params)
        return self.engine.stream(prompt, params, template_variables=self.variables)

    def reading(self) -> tuple[int, int, int] | None:
        """What Scheduler.reading tells; called from another thread."""
        return self.engine.scheduler.reading()

    def capacity_words(self) -> str:
        return f"context of {counted(self.engine.capacity, 'token')}"

    def facts(self) -> list[str]:
        """The lines of /stats about what runs."""
        return stats.engine_lines(self.engine, self.last)

    def settings(self) -> Sequence[str]:
        """The names of the sampling options that can be set."""
        return NAMES

    def offer(self) -> Offer:
        """What Tab completes."""
        return Offer(self.settings())

    def setting(self, name: str) -> str:
        """The value of a sampling option, as /set takes it."""
        return as_typed(name, getattr(self.params, name))

    def change(self, name: str, text: str) -> str:
        """Set a sampling option from what was typed; returns its full name. Raises ParameterError."""
        name = known(name)
        if not text:
            raise ParameterError(f"/set {name} needs a value; it is {self.setting(name)}")
        self.params = changed(self.params, self.engine.default_params(), name, text)
        self.given[name] = getattr(self.params, name)
        if text == "default":
            del self.given[name]
        return name

    def choose(self, name: str, value: str) -> None:
        """Set one of CHOICES; default is what it was when the chat began. Raises ParameterError."""
        if value not in (*CHOICES[name], "default"):
            if not value:
                raise ParameterError(f"/set {name} needs a value; it is {getattr(self, name)}")
            raise ParameterError(f"{name} must be one of {', '.join(CHOICES[name])}, default, got {value[:80]!r}")
        setattr(self, name, self.begun_with[name] if value == "default" else value)

    def switch(self, name: str) -> None:
        """Another model; Ctrl-C leaves the one that is there."""
        with one_interrupt(self.interactive):  # while that comes back, too
            try:
                self.loader.switch(self, name)
            except KeyboardInterrupt:
                if not self.interactive or self.engine is None:
                    raise
                self.stopped_at = time.monotonic()
                self.output.note("stopped; the model stays")

    def use_idle_time(self) -> None:
        """From now on, while nobody waits."""
        if self.idle is not None:
            self.idle.end()
        self.idle = IdleCapture(self.engine)

    def use(self, engine: Engine) -> None:
        """Go on with another model; the conversation stays."""
        self.engine, self.params, self.last = engine, engine.default_params(**self.given), None
        self.set_think(self.think)
        if self.idle is not None:
            self.use_idle_time()
        if self.store:
            self.store.model = engine.name

    def handle(self, line: str, replaces: bool = False) -> bool:
        """A command or a turn, which `replaces` the last one if so; False ends the chat."""
        message = unquoted(line)
        if message is None and line.startswith("/") and not line.startswith("//"):
            word, *rest = line.split(maxsplit=1)
            return self.command(word, "".join(rest).strip())
        if message is None:
            message = line.removeprefix("/")
            if self.interactive and (meant := slash.meant(message)):
                self.output.note(meant)
                return True
        if not message.strip():
            return True
        return self.ask(message if self.conversation.raw else message.strip(), replaces)

    def command(self, word: str, rest: str) -> bool:
        """One command; an error is one line. False ends the chat."""
        try:
            return slash.run(self, word, rest)
        except BrokenPipeError:
            raise
        except Exception as error:
            log.debug("%s failed", word, exc_info=True)
            self.output.error(explain(error))
            return self.goes_on(error)

    def goes_on(self, error: Exception) -> bool:
        """Whether there is a model to talk with after `error`; if not, a line and the exit code say so."""
        if self.engine is None:
            self.output.error("there is no model any more; the chat ends")
            self.exit_code = 1
        elif isinstance(error, RuntimeError) and not responds(self.engine.device):
            self.output.error(f"{self.engine.device} can no longer be used by this program; the chat ends")
            self.exit_code = DEVICE_LOST
        else:
            return True
        return False

    def go_on(self) -> bool:
        """Continue the last answer where it ended."""
        message, answer = self.conversation.turns[-1]
        return self.ask(message, replaces=True, begun=answer)

    def ask(self, message: str, replaces: bool = False, tries: int = 0, begun: str = "") -> bool:
        """One turn; an error is one line and leaves the conversation as it was. False ends the chat.

        tries: how often this message was asked before, which changes the seed. begun: the answer that is continued.
        """
        before, self.tries = self.tries, tries
        try:
            base = self.conversation.without_last() if replaces and self.conversation.turns else self.conversation
            Turn(self, message, base, begun).run()
        except Overflow as error:
            self.tries = before
            self.fail(str(error), begun)
            if self.overflow == "stop":
                self.exit_code = 1
                return False
        except OSError:  # the answer cannot be shown: a reader or a terminal that has gone
            raise
        except Exception as error:
            log.debug("a turn failed", exc_info=True)
            self.tries = before
            self.fail(explain(error), begun)
            return self.goes_on(error)
        return True

    def fail(self, what: str, begun: str = "") -> None:
        """One line; a pipe, where nobody may have read it, says so again with its exit code."""
        self.output.error(joined(what, "the answer stays as it was" if begun else "the turn is not kept"))
        if not self.interactive:
            self.exit_code = 1

    def seeded(self):
        return with_seed(self.params)

    def begun_prompt(self, prompt, begun: str):
        """The prompt of an answer that goes on after `begun`."""
        if not begun:
            return prompt
        if isinstance(prompt, str):
            return prompt + begun
        return self.engine.encode(prompt, self.variables) + self.answer_ids(begun)

    def answer_ids(self, text: str) -> list[int]:
        """The tokens of an answer; only its think block has control tokens."""
        tokenizer, (thought, tag, rest) = self.engine.tokenizer, text.partition(CLOSE)
        parts = [(thought + tag, True), (rest, False)] if tag and self.thinks else [(text, False)]
        around = tokenizer.bos_id, tokenizer.eos_id
        ids = [tokenizer.encode(part, special) for part, special in parts if part]
        return [token for part in ids for token in part if token not in around]

    def make_room(self, base: Conversation, line: str, begun: str = "") -> Conversation:
        capacity = self.engine.capacity
        # Counting costs time before the first token. No token is less than a byte; 256 is for what a template adds.
        if not begun and self.used is not None and self.used + 4 * len(line) + 256 <= capacity - capacity // 8:
            return base

        def count(prompt) -> int:
            if isinstance(prompt, str):
                return self.count(prompt + begun)
            return self.count(prompt) + more

        more = len(self.answer_ids(begun)) if begun and not base.raw else 0
        most = self.params.max_tokens
        base, note = fit(base, line, count, capacity, self.overflow, most, self.largest(), bool(begun))
        if note:
            self.output.note(note)
        return base

    def largest(self) -> int:
        """The context that the model could have."""
        return self.engine.config.max_position

    def count(self, prompt) -> int:
        """Tokens of a prompt. Raises TooLong, without counting, for what is far longer than the context."""
        tokenizer, context = self.engine.tokenizer, self.engine.capacity
        if isinstance(prompt, str):
            return len(tokenizer.encode(prompt, context=context))
        return len(tokenizer.encode_chat(prompt, context, **self.variables or {}))

    def cut(self, last) -> str:
        """A line about an answer that was cut."""
        if last.finish_reason != "length":
            return ""
        why = f"the context of {counted(self.engine.capacity, 'token')} is full"
        more = self.overflow == "drop-oldest" and len(self.conversation.turns) - self.conversation.dropped > 1
        if last.usage.prompt_tokens + last.usage.completion_tokens < self.engine.capacity:
            why, more = f"max_tokens ({self.params.max_tokens:,}) was reached", True
        return f"the answer was cut: {why}" + ("; /continue goes on" if self.interactive and more else "")

    def save(self) -> None:
        """Bring the session file up to date; where that fails, a line says so and the chat goes on."""
        if self.store is None:
            return
        try:
            if note := self.store.save(self.conversation):
                self.output.note(note)
        except session.SessionError as error:
            self.output.error(f"the session is not saved: {error}; /save FILE writes it elsewhere")
            if not self.interactive:
                self.exit_code = 1

    def fresh(self) -> Conversation:
        return Conversation(self.conversation.raw, self.system)

    def set_system(self, text: str | None) -> None:
        self.system, self.used = text, None
        self.conversation = replace(self.conversation, system=text)
        self.save()

    def set_title(self, text: str | None) -> None:
        self.conversation = replace(self.conversation, title=text)
        self.save()

    def answer_only(self, answer: str) -> str:
        """An answer without its thinking."""
        return answer if self.conversation.raw else strip_thinking(answer, self.opens_thinking)

    def replace_conversation(self, conversation: Conversation) -> None:
        """Go on with another conversation, in a file of its own: the one so far stays on disk."""
        self.kept = self.store.name if self.store and self.store.saved else None
        self.conversation, self.last, self.used, self.tries = conversation, None, None, 0
        if self.store:
            self.store.begin_new()

    def kept_in(self) -> str:
        return f"; the one before stays in session {self.kept}" if self.kept else ""

    def describe(self) -> str:
        turns = self.conversation.turns
        last = f", the last was {slash.quoted(turns[-1][0])}" if turns else ""
        return f"continuing {counted(len(turns), 'turn')}{last}"


def responds(device) -> bool:
    """Whether the GPU still takes calls: after a device-side assert or a bad address every one fails."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
        except RuntimeError:
            return False
    return True
