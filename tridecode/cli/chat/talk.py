"""A chat with a local or remote model: its state, settings and turns."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

from ...errors import ParameterError
from ...results import OutputChunk
from ...sampling import SamplingParams
from ...text.thinking import THINKING_VARIABLE, strip_thinking
from ..explain import explain
from ..signals import one_interrupt
from ..terminal import Output, counted, joined
from . import session, slash
from .completion import Offer
from .conversation import Conversation
from .lines import unquoted
from .model import Model, Prompt, Thinking
from .overflow import Overflow, fit
from .settings import CHOICES, NAMES, as_typed, changed, known
from .turn import Turn

log = logging.getLogger("tridecode")
DEVICE_LOST = 3  # Exit code after the loss of a GPU.
INTERRUPT_GRACE = 1.0  # Seconds after a stopped answer in which another Ctrl-C does not end the chat.
COUNTING = "needs a server that counts tokens, as tridecode's and vLLM's do"


class Chat:
    """A conversation with a model, its settings and its session file."""

    def __init__(
        self,
        model: Model,
        params: SamplingParams,
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
        overrides: dict | None = None,
    ):
        """Create the chat; the arguments correspond to options of the command line.

        Args:
            interactive: stdin and stdout are a terminal.
            store: The session file, None if the conversation is not saved.
            system: The system turn of new conversations.
            think: on, off or hide.
            overrides: Sampling options that are set.
        """
        self.model, self.params, self.output = model, params, output
        self.conversation, self.system = conversation, system
        self.overrides = dict(overrides or {})
        self.interactive, self.store, self.overflow, self.stats = interactive, store, overflow, stats
        self.initial_choices = {name: getattr(self, name) for name in CHOICES}
        self.plain = plain or conversation.raw  # Continued text is not Markdown.
        self.stopped_at = float("-inf")  # Time at which an answer, or the load of a model, was stopped.
        self.tries = 0  # Number of retries of the last message.
        self.draft: str | None = None  # Text that /edit puts into the next prompt.
        self.kept: str | None = None  # Name of the session of the previous conversation.
        self.exit_code = 0
        self.last: OutputChunk | None = None  # Last chunk of the latest complete answer.
        self.seed: int | None = None  # Seed of that answer, or None if it is greedy or unknown.
        # Upper bound of the number of tokens of the conversation, or None if it is unknown.
        self.used: int | None = None
        self.answers = self.tokens = 0
        self.seconds = 0.0
        self.think, self.thinking = "on", Thinking()
        self.set_think(think)

    def set_think(self, mode: str) -> None:
        """Set the mode of thinking: on, off or hide. If off is not supported, print the reason and keep the mode."""
        thinking = self.model.thinking(mode, self.conversation.raw)
        if mode == "off" and thinking.refusal:
            self.output.note(f"thinking cannot be switched off: {thinking.refusal}; /think hide shows only its length")
            mode = self.think if self.think != "off" else "on"
            thinking = self.model.thinking(mode, self.conversation.raw)
        self.think, self.thinking, self.used = mode, thinking, None

    def switch(self, name: str) -> None:
        """Load another model and keep the conversation. Ctrl-C keeps the present model."""
        with one_interrupt(self.interactive):  # The interrupt also applies while the present model is loaded again.
            try:
                self.model.switch(name, self.overrides, self.conversation.raw)
            except KeyboardInterrupt:
                if not (self.interactive and self.model.loaded):
                    raise
                self.stopped_at = time.monotonic()
                self.output.note("stopped; the model stays")
            finally:
                if self.model.loaded:
                    self.apply_model_settings()

    def apply_model_settings(self) -> None:
        """Update the settings that depend on the model."""
        self.params, self.last = self.model.default_params(**self.overrides), None
        self.set_think(self.think)
        if self.store:
            self.store.model = self.model.name

    def describe_capacity(self) -> str:
        """Return the size of the context for display."""
        if self.model.capacity is None:
            return "context of unknown length"
        return f"context of {counted(self.model.capacity, 'token')}"

    def settings(self) -> Sequence[str]:
        """Return the names of the sampling options that can be set."""
        return [name for name in NAMES if name in self.model.options]

    def offer(self) -> Offer:
        """Return the arguments that Tab completes."""
        fixed: dict[str, tuple[str, ...]] = {} if self.model.counts else {"overflow": ("error",)}
        return Offer(self.settings(), CHOICES | fixed, self.model.models)

    def setting(self, name: str) -> str:
        """Return the value of a sampling option as text that /set accepts."""
        if self.model.defaults is not None and name not in self.overrides:
            return self.model.defaults
        return as_typed(name, getattr(self.params, name))

    def change(self, name: str, text: str) -> str:
        """Set a sampling option to a typed value and return its full name. Raises ParameterError."""
        name = known(name)
        if not text:
            raise ParameterError(f"/set {name} needs a value; the current value is {self.setting(name)}")
        params = changed(self.params, self.model.default_params(), name, text)
        if text == "default":
            self.overrides.pop(name, None)
        else:
            self.model.check(name)
            self.overrides[name] = getattr(params, name)
        self.params = params
        return name

    def choose(self, name: str, value: str) -> None:
        """Set one of CHOICES. `default` restores the value at the start of the chat. Raises ParameterError."""
        if value not in (*CHOICES[name], "default"):
            if not value:
                raise ParameterError(f"/set {name} needs a value; the current value is {getattr(self, name)}")
            raise ParameterError(f"{name} must be one of {', '.join(CHOICES[name])} or default, got {value[:80]!r}")
        if name == "overflow" and value in ("drop-oldest", "stop") and not self.model.counts:
            raise ParameterError(f"overflow {value} {COUNTING}")
        setattr(self, name, self.initial_choices[name] if value == "default" else value)

    def handle(self, line: str, replaces: bool = False) -> bool:
        """Handle an input line: a command or a message. Return False to end the chat.

        Args:
            replaces: The message replaces the last turn.
        """
        message = unquoted(line)
        if message is None and line.startswith("/") and not line.startswith("//"):
            word, *rest = line.split(maxsplit=1)
            return self.command(word, "".join(rest).strip())
        if message is None:
            message = line.removeprefix("/")
            if self.interactive and (command_hint := slash.command_hint(message)):
                self.output.note(command_hint)
                return True
        if not message.strip():
            return True
        return self.ask(message if self.conversation.raw else message.strip(), replaces)

    def command(self, word: str, rest: str) -> bool:
        """Run a command and print its error, if any, as one line. Return False to end the chat."""
        try:
            return slash.run(self, word, rest)
        except BrokenPipeError:
            raise
        except Exception as error:
            log.debug("%s failed", word, exc_info=True)
            self.output.error(explain(error))
            return self.can_continue(error)

    def ask(self, message: str, replaces: bool = False, tries: int = 0, prefix: str = "") -> bool:
        """Run a turn. An error is printed as one line and leaves the conversation unchanged.

        Return False to end the chat.

        Args:
            replaces: The turn replaces the last one.
            tries: Number of earlier answers to this message; it changes the seed.
            prefix: The answer to continue.
        """
        before, self.tries = self.tries, tries
        try:
            base = self.conversation.without_last() if replaces and self.conversation.turns else self.conversation
            Turn(self, message, base, prefix).run()
        except Overflow as error:
            self.tries = before
            self.fail(str(error), prefix)
            if self.overflow == "stop":
                self.exit_code = 1
                return False
        except OSError:  # The pipe or the terminal is closed, so the answer cannot be shown.
            raise
        except Exception as error:
            log.debug("a turn failed", exc_info=True)
            self.tries = before
            self.fail(explain(error), prefix)
            return self.can_continue(error)
        return True

    def continue_answer(self) -> bool:
        """Continue the last answer where it ended."""
        if not self.model.continues:
            self.output.note('a server cannot continue an answer; send a message such as "continue"')
            return True
        message, answer = self.conversation.turns[-1]
        return self.ask(message, replaces=True, prefix=answer)

    def can_continue(self, error: Exception) -> bool:
        """Return whether the chat can continue after `error`. If not, print the reason."""
        if not self.model.loaded:
            problem, code = "there is no model any more", 1
        elif self.model.lost(error):
            problem, code = f"{self.model.device} can no longer be used by this program", DEVICE_LOST
        else:
            return True
        self.output.error(f"{problem}; the chat ends")
        self.exit_code = code
        return False

    def fail(self, message: str, prefix: str = "") -> None:
        """Print the error of a turn. If the chat is not interactive, also set the exit code to 1."""
        if THINKING_VARIABLE in message and self.thinking.advice:
            message = joined(message, self.thinking.advice)
        self.output.error(joined(message, "the answer is unchanged" if prefix else "the turn is not kept"))
        if not self.interactive:
            self.exit_code = 1

    def make_room(self, base: Conversation, line: str, prefix: str = "") -> Conversation:
        """Return the conversation in which `line` fits. Raises Overflow."""
        capacity = self.model.capacity
        if capacity is None or not self.model.counts:
            return base
        # Counting tokens delays the first token, so skip it if an upper bound fits. A character has at most four bytes,
        # a token
        # has at least one byte, and the template adds fewer than 256 tokens.
        if not prefix and self.used is not None and self.used + 4 * len(line) + 256 <= capacity - capacity // 8:
            return base

        def count(prompt: Prompt) -> int:
            return self.model.count(prompt, self.thinking, prefix)

        max_tokens = self.params.max_tokens
        base, note = fit(base, line, count, capacity, self.overflow, max_tokens, self.model.largest, bool(prefix))
        if note:
            self.output.note(note)
        return base

    def cut(self, last: OutputChunk) -> str:
        """Return a line that explains why the answer was cut, or ""."""
        usage, limit, capacity = last.usage, self.params.max_tokens, self.model.capacity
        if last.finish_reason == "stop":
            return ""
        if last.finish_reason != "length":
            return f"the server ended the answer: {last.finish_reason}"
        more = True
        if capacity is not None and usage and usage.prompt_tokens + usage.completion_tokens >= capacity:
            why = f"the context of {counted(capacity, 'token')} is full"
            more = self.overflow == "drop-oldest" and len(self.conversation.turns) - self.conversation.dropped > 1
        elif limit is not None and (usage is None or usage.completion_tokens >= limit):
            why = f"max_tokens ({limit:,}) was reached"
        else:
            why = "the context is full, or the server has a limit"
        continuable = self.interactive and self.model.continues and more
        return f"the answer was cut: {why}" + ("; /continue continues it" if continuable else "")

    def save(self) -> None:
        """Save the conversation to the session file. An error is printed, and the chat continues."""
        if self.store is None:
            return
        try:
            if note := self.store.save(self.conversation):
                self.output.note(note)
        except session.SessionError as error:
            self.output.error(f"the session is not saved: {error}; /save FILE writes it elsewhere")
            if not self.interactive:
                self.exit_code = 1

    def new_conversation(self) -> Conversation:
        """Return an empty conversation with the system turn of the chat."""
        return Conversation(self.conversation.raw, self.system)

    def set_system(self, text: str | None) -> None:
        """Set the system turn; None removes it."""
        self.system, self.used = text, None
        self.conversation = replace(self.conversation, system=text)
        self.save()

    def set_title(self, text: str | None) -> None:
        """Set the title; None selects the first words."""
        self.conversation = replace(self.conversation, title=text)
        self.save()

    def answer_only(self, answer: str) -> str:
        """Return an answer without its thinking."""
        return answer if self.conversation.raw else strip_thinking(answer, self.thinking.opened)

    def replace_conversation(self, conversation: Conversation) -> None:
        """Switch to another conversation and to a new session file. The file of the previous one is kept."""
        self.kept = self.store.name if self.store and self.store.saved else None
        self.conversation, self.last, self.used, self.tries = conversation, None, None, 0
        if self.store:
            self.store.begin_new()

    def previous_session_note(self) -> str:
        """Return the part of a note that names the session of the previous conversation, or ""."""
        return f"; the previous one is saved in session {self.kept}" if self.kept else ""

    def describe(self) -> str:
        """Return a description of a continued conversation."""
        turns = self.conversation.turns
        last = f", the last was {slash.quoted(turns[-1][0])}" if turns else ""
        return f"continuing {counted(len(turns), 'turn')}{last}"
