"""A chat with a local or remote model: its state, and the handling of one line of input."""

import logging
import time
from dataclasses import dataclass, field, replace

from ...results import OutputChunk
from ...sampling import SamplingParams
from ...text.thinking import THINKING_VARIABLE, strip_thinking
from ..explain import explain
from ..signals import one_interrupt
from ..terminal import Output, counted, joined
from . import session, settings, slash
from .conversation import Conversation
from .lines import unquoted
from .model import Model, Thinking
from .overflow import Overflow
from .turn import Turn

log = logging.getLogger("tridecode")
DEVICE_LOST = 3  # Exit code after the loss of a GPU.


@dataclass
class Chat:
    """A conversation with a model, its settings and its session file.

    Attributes:
        interactive: Whether stdin and stdout are a terminal.
        store: The session file, None if the conversation is not saved.
        plain: Whether answers are plain text.
        think: on, off or hide.
        overrides: Sampling options that are set.
        configured: Those that the configuration file or the environment sets, which are not saved.
        params: The sampling parameters: `overrides`, and the defaults of the model.
        initial_choices: The values of CHOICES at the start of the chat.
        thinking: How the model handles the mode `think`.
        last: The last chunk of the latest complete answer.
        seed: The seed of that answer, or None if it is greedy or unknown.
        used: Upper bound of the number of tokens of the conversation, or None if it is unknown.
        tries: Number of retries of the last message.
        unanswered: The arguments of the latest `ask` if its turn is not kept, else None.
        draft: Text that /edit puts into the next prompt, and whether the message then replaces the last turn.
        attached: Text of files that is sent with the next message.
        files: Stamps of the files to which /save saved the conversation, or from which /load read it.
        stopped_at: Time at which an answer, or the load of a model, was stopped.
    """

    model: Model
    output: Output
    conversation: Conversation
    interactive: bool = False
    store: session.Store | None = None
    overflow: str = "error"
    stats: str = "full"
    plain: bool = False
    think: str = "on"
    overrides: dict = field(default_factory=dict)
    configured: dict = field(default_factory=dict)
    params: SamplingParams = field(init=False)
    initial_choices: dict[str, str] = field(init=False)
    thinking: Thinking = field(init=False)
    last: OutputChunk | None = None
    seed: int | None = None
    used: int | None = None
    tries: int = 0
    unanswered: tuple[str, bool, int] | None = None
    draft: tuple[str, bool] | None = None
    attached: str = ""
    files: set = field(default_factory=set)
    stopped_at: float = float("-inf")
    exit_code: int = 0

    def __post_init__(self):
        self.params = self.model.default_params(**self.overrides)
        self.initial_choices = {name: getattr(self, name) for name in settings.CHOICES}
        self.plain = self.plain or self.conversation.raw  # Continued text is not Markdown.
        mode, self.think = self.think, "on"
        self.set_think(mode)

    # ---- input

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
            if self.interactive and slash.COMMAND_WORDS.get(message.rstrip().lower()) == "/exit":
                return False
            if self.interactive and (command_hint := slash.command_hint(message)):
                self.output.note(command_hint)
                return True
        if not message.strip():
            return True
        return self.ask(self.with_files(message if self.conversation.raw else message.strip()), replaces)

    def with_files(self, message: str) -> str:
        """Return a message with the attached files, which are then no longer attached. With --raw they precede it."""
        attached, self.attached = self.attached, ""
        return attached + message if self.conversation.raw else message + attached

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
        self.unanswered = None if prefix else (message, replaces, tries)
        base = self.conversation.without_last() if replaces and self.conversation.turns else self.conversation
        try:
            Turn(self, message, base, prefix, tries).run()
        except OSError:  # The pipe or the terminal is closed, so the answer cannot be shown.
            raise
        except Exception as error:
            log.debug("a turn failed", exc_info=True)
            self.fail(explain(error), prefix)
            if isinstance(error, Overflow) and self.overflow == "stop":
                self.exit_code = 1
                return False
            return self.can_continue(error)
        return True

    # ---- errors

    def fail(self, message: str, prefix: str = "") -> None:
        """Print the error of a turn. If the chat is not interactive, also set the exit code to 1."""
        if THINKING_VARIABLE in message and self.thinking.advice:
            message = joined(message, self.thinking.advice)
        self.output.error(joined(message, "the answer is unchanged" if prefix else "the turn is not kept"))
        if not self.interactive:
            self.exit_code = 1

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

    # ---- the model

    def set_think(self, mode: str) -> None:
        """Set the mode of thinking: on, off or hide. If off is not supported, print the reason and keep the mode."""
        thinking = self.model.thinking(mode, self.conversation.raw)
        if mode == "off" and thinking.refusal:
            self.output.note(f"thinking cannot be switched off: {thinking.refusal}; /think hide shows only its length")
            mode = self.think if self.think != "off" else "on"
            thinking = self.model.thinking(mode, self.conversation.raw)
        self.think, self.thinking, self.used = mode, thinking, None

    def switch(self, name: str) -> None:
        """Load another model and keep the conversation and the set options. Ctrl-C keeps the present model."""
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
                    self.params, self.last = self.model.default_params(**self.overrides), None
                    self.set_think(self.think)

    def describe_capacity(self) -> str:
        """Return the size of the context for display."""
        if self.model.capacity is None:
            return "context of unknown length"
        return f"context of {counted(self.model.capacity, 'token')}"

    # ---- the conversation

    def save(self) -> None:
        """Save the conversation to the session file. An error is printed, and the chat continues."""
        if self.store is None:
            return
        try:
            if note := self.store.save(self.conversation, self.model.name):
                self.output.note(note)
        except session.SessionError as error:
            self.output.error(f"the session is not saved: {error}; /save FILE writes it elsewhere")
            if not self.interactive:
                self.exit_code = 1

    def change_conversation(self, **changes) -> None:
        """Replace fields of the conversation, such as its title, and save it."""
        self.conversation, self.used = replace(self.conversation, **changes), None
        self.save()

    def begin(self, conversation: Conversation) -> str:
        """Switch to another conversation and to a new session file.

        Return the name of the session that contains the previous conversation, or "".
        """
        kept = self.store.name if self.store and self.store.saved else ""
        if self.attached:
            self.output.note("what was added to the next message is removed")
        self.conversation, self.last, self.used, self.tries, self.attached = conversation, None, None, 0, ""
        self.files, self.unanswered = set(), None
        if self.store:
            self.store.begin_new()
        return kept

    def answer_only(self, answer: str) -> str:
        """Return an answer without its thinking."""
        return answer if self.conversation.raw else strip_thinking(answer, self.thinking.opened)

    def describe(self) -> str:
        """Return a description of a continued conversation."""
        turns = self.conversation.turns
        last = f", the last was {slash.quoted(turns[-1][0])}" if turns else ""
        return f"continuing {counted(len(turns), 'turn')}{last}"
