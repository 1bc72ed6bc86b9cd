"""`tridecode chat`: a conversation in the terminal, or one turn a line from a pipe."""

import difflib
import re
import signal
import sys
import time
from contextlib import contextmanager

from ..engine import Engine, Prompt
from ..errors import TridecodeError
from .loading import load_engine
from .main import explain
from .terminal import Output, speed_line

HELP = """\
/help    show this
/clear   forget the conversation
/exit    leave (also Ctrl-D, or Ctrl-C twice)
Ctrl-C stops an answer and keeps what was said. A line that starts with a space is never a command."""
IMPATIENCE = 1.0  # seconds after an answer was stopped in which another Ctrl-C was meant for that answer
COMMANDS = ("/help", "/clear", "/exit")


class Conversation:
    """What was said so far: chat messages, or with raw one text that both sides continue."""

    def __init__(self, raw: bool):
        self.raw = raw
        self.clear()

    def clear(self) -> None:
        self._said = "" if self.raw else []

    def prompt(self, line: str) -> Prompt:
        """The prompt of the turn that `line` begins; nothing is kept yet."""
        return self._said + (line if self.raw else [{"role": "user", "content": line}])

    def keep(self, line: str, answer: str) -> None:
        reply = answer + "\n" if self.raw else [{"role": "assistant", "content": answer}]
        self._said = self.prompt(line) + reply


class Chat:
    def __init__(self, engine: Engine, params, output: Output, raw: bool, interactive: bool):
        self.engine, self.params, self.output = engine, params, output
        self.interactive = interactive
        self.stopped_at = -IMPATIENCE
        self.conversation = Conversation(raw)

    def handle(self, line: str) -> bool:
        """A command or a turn; False ends the chat."""
        word = line.split(" ", 1)[0]
        if line.startswith("/") and re.fullmatch(r"/[A-Za-z]*", word):
            return self.command(word)
        if line.strip():
            try:
                self.turn(line.strip() if not self.conversation.raw else line)
            except (TridecodeError, MemoryError, RuntimeError) as error:  # RuntimeError: torch's, out of memory too
                self.output.error(f"{explain(error)}; the turn is not kept")
        return True

    def command(self, word: str) -> bool:
        if word == "/exit":
            return False
        if word == "/clear":
            self.conversation.clear()
            self.output.note("the conversation is forgotten")
        elif word == "/help":
            for line in HELP.splitlines():
                self.output.note(line)
        else:
            near = difflib.get_close_matches(word, COMMANDS, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            self.output.note(f"there is no command {word}; {meant}/help lists them")
        return True

    def turn(self, line: str) -> None:
        """Stream the answer; keep the turn unless it failed or was stopped before its first character."""
        # Around all of it: a second Ctrl-C must not lose what the first one stopped.
        with one_interrupt(self.interactive):
            said, tokens, last = [], 0, None
            started = time.perf_counter()
            try:
                for last in self.engine.stream(self.conversation.prompt(line), self.params):
                    said.append(last.text)
                    tokens += last.token_id is not None
                    self.output.text(last.text)
            except KeyboardInterrupt:
                if not self.interactive:
                    raise
                last, self.stopped_at = None, time.monotonic()
            finally:
                if said:
                    self.output.text("\n")
            answer = "".join(said)
            failed = last is not None and last.finish_reason == "error"
            if not failed and (answer or last is not None):
                self.conversation.keep(line, answer)
            if failed:
                self.output.error(f"{last.error}; the turn is not kept")
            elif last is None:
                rest = "kept in the conversation" if answer else "the turn is not kept"
                seconds = time.perf_counter() - started
                self.output.note(f"stopped after {tokens} token{'s'[:tokens != 1]} and {seconds:.1f} s; {rest}")
            else:
                self.report(last)

    def report(self, last) -> None:
        if last.finish_reason == "length":
            used = last.usage.prompt_tokens + last.usage.completion_tokens
            full = used >= self.engine.capacity
            why = f"the context of {self.engine.capacity} tokens is full" if full else "--max-tokens was reached"
            self.output.note(f"the answer was cut: {why}")
        self.output.note(speed_line(last.usage, last.timings))


def chat(args, output: Output) -> int:
    interactive = output.tty and sys.stdin.isatty()
    engine, params = load_engine(args, output)
    if engine.device.type == "cpu":
        output.note("running on the CPU")
    session = Chat(engine, params, output, args.raw, interactive)
    if interactive:
        output.note(f"{engine.name}: context of {engine.capacity} tokens; /help lists the commands")
        return converse(session)
    for line in sys.stdin:
        if not session.handle(line.rstrip("\r\n")):
            break
    return 0


def converse(session: Chat) -> int:
    """Read from the terminal until /exit, Ctrl-D, or Ctrl-C twice in a row."""
    try:
        import readline  # noqa: F401  arrow keys and history in input()
    except ImportError:
        pass
    leaving = False
    while True:
        try:
            line = input("> ")
            leaving = False
            if not session.handle(line):
                return 0
        except EOFError:
            session.output.text("\n")
            return 0
        except KeyboardInterrupt:
            session.output.text("\n")
            if leaving:
                return 0
            leaving = time.monotonic() - session.stopped_at > IMPATIENCE
            if leaving:
                session.output.note("Ctrl-C again, or Ctrl-D, leaves")


@contextmanager
def one_interrupt(enabled: bool):
    """Within, the first Ctrl-C raises KeyboardInterrupt and later ones do nothing: impatience must not end the chat."""
    if not enabled:
        yield
        return

    def interrupt(signum, frame):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
