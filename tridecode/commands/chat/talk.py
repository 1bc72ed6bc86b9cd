"""Chat: a conversation with a model, turn by turn."""

import logging
import secrets
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from ...engine import Engine
from ...errors import GenerationError, ParameterError, TooLong
from ...results import Piece
from ...text.thinking import CLOSE, SWITCH, end_thinking, strip_thinking
from ..explain import explain
from ..signals import one_interrupt
from ..terminal import Output, counted, speed_line, unechoed
from . import session, slash, stats
from .conversation import Conversation
from .display import answer_display, open_fence, opens_thinking
from .idle import IdleCapture
from .lines import unquoted
from .overflow import Overflow, fit
from .settings import CHOICES, as_typed, changed

log = logging.getLogger("tridecode")
DEVICE_LOST = 3  # exit code
SEEDS = 1_000_000  # that are drawn from where none is given
COLUMNS = 80  # of the line after an answer, at most
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

    def capacity_words(self) -> str:
        return f"context of {self.engine.capacity:,} tokens"

    def facts(self) -> list[str]:
        """The lines of /stats about what runs."""
        return stats.engine_lines(self.engine, self.last)

    def setting(self, name: str) -> str:
        """The value of a sampling option, as /set takes it."""
        return as_typed(getattr(self.params, name))

    def change(self, name: str, text: str) -> str:
        """Set a sampling option from what was typed; returns its full name. Raises ParameterError."""
        self.params, name = changed(self.params, self.engine.default_params(), name, text)
        self.given[name] = getattr(self.params, name)
        if text == "default":
            del self.given[name]
        return name

    def choose(self, name: str, value: str) -> None:
        """Set one of CHOICES. Raises ParameterError."""
        if value not in CHOICES[name]:
            raise ParameterError(f"{name} must be one of {', '.join(CHOICES[name])}, got {value[:80]!r}")
        setattr(self, name, value)

    def switch(self, name: str) -> None:
        self.loader.switch(self, name)

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
        self.tries = tries
        try:
            base = self.conversation.without_last() if replaces and self.conversation.turns else self.conversation
            self.turn(message, base, begun)
        except Overflow as error:
            self.fail(str(error))
            if self.overflow == "stop":
                self.exit_code = 1
                return False
        except OSError:  # the answer cannot be shown: a reader or a terminal that has gone
            raise
        except Exception as error:
            log.debug("a turn failed", exc_info=True)
            self.fail(explain(error))
            return self.goes_on(error)
        return True

    def fail(self, what: str) -> None:
        """One line; a pipe, where nobody may have read it, says so again with its exit code."""
        self.output.error(f"{what}; the turn is not kept")
        if not self.interactive:
            self.exit_code = 1

    def turn(self, line: str, base: Conversation, begun: str = "") -> None:
        """Stream the answer, or its rest after `begun`; keep the turn unless it failed or was stopped before its first
        character."""
        # Around all of it: a second Ctrl-C must not lose what the first one stopped.
        opened = self.opens_thinking and not begun  # its thinking is over
        shown = answer_display(self.output, self.plain, opened, self.think == "hide", self.unit)
        if begun and self.output.tty and not self.plain:
            shown.push(open_fence(begun))
        with one_interrupt(self.interactive), unechoed(self.interactive, shown.pause, shown.resume, self.editor):
            said, tokens, last = [], 0, None
            params = self.params_of_this_try()
            started = time.perf_counter()
            try:
                base = self.make_room(base, line, begun)
                for last in self.pieces(self.begun_prompt(base.prompt(line), begun), params):
                    said.append(last.text)
                    tokens += last.finish_reason is None
                    shown.push(last.text)
            except KeyboardInterrupt:
                shown.abort()
                if not self.interactive:
                    raise
                last, self.stopped_at = None, time.monotonic()
            except BaseException:
                shown.abort()
                raise
            answer, added = begun + "".join(said), bool("".join(said))
            if last is None or last.finish_reason == "length":
                answer = end_thinking(answer, self.opens_thinking)
            failed = last is not None and last.finish_reason == "error"
            self.used = None
            if last is not None and last.usage is not None and not failed:
                self.used = last.usage.prompt_tokens + last.usage.completion_tokens
            if not failed and (added or last is not None):
                self.conversation = base.plus(line, answer)
            try:
                (shown.abort if failed else shown.finish)()
            finally:
                self.save()
            self.answers, self.tokens = self.answers + 1, self.tokens + tokens
            self.seconds += time.perf_counter() - started
            if failed:
                self.fail(explain(GenerationError(last.error)))
            elif last is None:
                rest = "kept in the conversation" if answer else "the turn is not kept"
                seconds = time.perf_counter() - started
                self.output.note(f"stopped after {counted(tokens, self.unit)} and {seconds:.1f} s; {rest}")
            else:
                if begun and not added:
                    self.output.note("the model has nothing to add")
                self.last, self.seed = last, params.seed if params.temperature else None
                self.report(last)

    def params_of_this_try(self):
        """Those that are set; a further try of the same message has another seed, which is told."""
        if not self.tries:
            return self.seeded()
        if self.params.temperature == 0:
            self.output.note("temperature is 0, so every try gives the same answer; /set temperature 0.7 changes that")
        elif self.params.seed is not None:
            seed = self.params.seed + self.tries
            seed -= 2**64 if seed >= 2**64 else 0
            self.output.note(f"try {self.tries + 1}, seed {seed}")
            return replace(self.params, seed=seed)
        return self.seeded()

    def seeded(self):
        """The parameters with a seed that can be read and typed, so that an answer can be had again."""
        if self.params.seed is not None or self.params.temperature == 0:
            return self.params
        return replace(self.params, seed=secrets.randbelow(SEEDS))

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
        base, note = fit(base, line, count, capacity, self.overflow, self.params.max_tokens, self.largest())
        if note:
            self.output.note(note)
        return base

    def largest(self) -> int:
        """The context that the model could have."""
        return self.engine.config.max_position

    def count(self, prompt) -> int:
        tokenizer, context = self.engine.tokenizer, self.engine.capacity
        try:
            if isinstance(prompt, str):
                return len(tokenizer.encode(prompt, context=context))
            return len(tokenizer.encode_chat(prompt, context, **self.variables or {}))
        except TooLong as error:
            return error.tokens  # the fewest; enough to know that it does not fit

    def report(self, last) -> None:
        if last.finish_reason == "length":
            used = last.usage.prompt_tokens + last.usage.completion_tokens
            full = used >= self.engine.capacity
            why = f"the context of {self.engine.capacity:,} tokens is full"
            if not full:
                why = f"max_tokens ({self.params.max_tokens:,}) was reached"
            self.output.note(f"the answer was cut: {why}" + ("; /continue goes on" if self.interactive else ""))
        self.tell_speed(last)

    def tell_speed(self, last) -> None:
        """The line after an answer, as `stats` has it."""
        if self.stats == "short":
            self.output.note(" · ".join(speed_line(last.usage, last.timings).split(" · ")[:2]))
        elif self.stats == "full":
            width = min(COLUMNS, self.output.errors.width)
            self.output.note(speed_line(last.usage, last.timings, self.engine.capacity, self.seed, width))

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
