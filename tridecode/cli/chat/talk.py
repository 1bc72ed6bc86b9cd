"""Chat: a conversation with a model, turn by turn, whichever process runs the model."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from ...errors import ParameterError
from ...results import Piece
from ...sampling import SamplingParams
from ...text.prompt import Prompt
from ...text.thinking import strip_thinking
from ..explain import explain
from ..terminal import Output, counted, joined
from . import session, slash
from .completion import Offer
from .conversation import Conversation
from .idle import IdleCapture
from .lines import unquoted
from .overflow import Overflow, fit
from .settings import CHOICES, NAMES, as_typed, changed, known
from .turn import Turn

log = logging.getLogger("tridecode")
DEVICE_LOST = 3  # exit code
IMPATIENCE = 1.0  # seconds after an answer was stopped in which another Ctrl-C was meant for that answer


class Model(Protocol):
    """What every chat needs of its model. capacity: None if it is unknown."""

    name: str

    @property
    def capacity(self) -> int | None: ...

    @property
    def device(self) -> object: ...

    def default_params(self, **given) -> SamplingParams: ...


class Chat:
    """A conversation with a model, its settings, and the file that holds it (None: no file).

    The base of LocalChat and RemoteChat. Both implement the methods that raise NotImplementedError, and facts (lines of
    /stats), switch (to another model), go_on (continue the last answer) and cut (explain why an answer was cut).
    """

    unit = "token"  # what a piece of an answer is

    def __init__(
        self,
        engine: Model,
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
        self.exit_code = 0
        self.last: Piece | None = None  # the last piece of the latest complete answer
        self.seed: int | None = None  # its seed, where that counts
        self.used: int | None = None  # tokens of the conversation at most, where that is known
        self.answers = self.tokens = 0
        self.seconds = 0.0
        self.think, self.opens_thinking, self.thinks = "on", False, False
        self.variables: dict[str, bool] | None = None  # of the chat template
        self.set_think(think)

    def set_think(self, mode: str) -> None:
        """Set how thinking is handled: on, off or hide."""
        raise NotImplementedError

    def pieces(self, prompt: Prompt, params: SamplingParams) -> Iterator[Piece]:
        """Return the pieces of an answer as they come."""
        raise NotImplementedError

    def count(self, prompt: str | list[dict]) -> int:
        """Return the number of tokens of a prompt. Raises TooLong, without counting, if it far exceeds the context."""
        raise NotImplementedError

    def make_room(self, base: Conversation, line: str, begun: str = "") -> Conversation:
        """Return the conversation in which `line` fits. Raises Overflow."""
        raise NotImplementedError

    def begun_prompt(self, prompt: Prompt, begun: str) -> Prompt:
        """Return the prompt of an answer that continues `begun`."""
        return prompt

    def seeded(self) -> SamplingParams:
        """Return the sampling parameters of the next answer."""
        return self.params

    def reading(self) -> tuple[int, int, int] | None:
        """Return the progress of the prompt as Scheduler.reading does. Another thread calls it."""
        return None

    def use_idle_time(self) -> None:
        """Start the work that can be done while no answer is generated."""

    def goes_on(self, error: Exception) -> bool:
        """Return whether the chat can go on after `error`; if not, report it."""
        return True

    def largest(self) -> int:
        """Return the largest context that the model supports, 0 if it is unknown."""
        return 0

    def capacity_words(self) -> str:
        if self.engine.capacity is None:
            return "context of a length that the server does not tell"
        return f"context of {counted(self.engine.capacity, 'token')}"

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

    def fitted(self, base: Conversation, line: str, begun: str = "", more: int = 0) -> Conversation:
        """Return the conversation in which `line` fits. more: the tokens of `begun` in a chat. Raises Overflow."""
        capacity = self.engine.capacity
        assert capacity is not None
        # Counting costs time before the first token. No token is less than a byte; 256 is for what a template adds.
        if not begun and self.used is not None and self.used + 4 * len(line) + 256 <= capacity - capacity // 8:
            return base

        def count(prompt) -> int:
            if isinstance(prompt, str):
                return self.count(prompt + begun)
            return self.count(prompt) + more

        most = self.params.max_tokens
        base, note = fit(base, line, count, capacity, self.overflow, most, self.largest(), bool(begun))
        if note:
            self.output.note(note)
        return base

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
