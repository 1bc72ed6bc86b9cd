"""Text on its way to and from people: consoles, control characters, the lines about speed."""

import difflib
import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext, suppress
from textwrap import wrap

from rich.console import Console

from ..errors import counted
from .signals import in_background, suspendable

USER = "cyan"  # what a user has typed

# ESC, carriage return, backspace, C1: a terminal obeys them, so a model (or a file name) must not be able to send them.
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | {code: 0xFFFD for code in range(0x80, 0xA0)}
# Embeddings, overrides and isolates of writing direction: they make text look like another.
_CONTROLS |= {code: 0xFFFD for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    """`text` with every control character but newline and tab replaced by a picture of it."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def one_line(message: object) -> str:
    """A message as one line without control characters; of a word as long as no name should be, the two ends."""
    words = str(message).split()
    return visible(" ".join(f"{word[:150]}…{word[-50:]}" if len(word) > 300 else word for word in words))


def tolerant_streams() -> None:
    """Make every stream usable: closed ones become empty, characters that an encoding lacks become '?' or U+FFFD."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started the program
            setattr(sys, name, open(os.devnull, mode))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class PipeConsole(Console):
    """A console that leaves a reader that has gone to its caller; rich's own would end the program with code 1."""

    def on_broken_pipe(self) -> None:
        raise


def foreign_encoding() -> str | None:
    """The encoding of a stream in which ASCII is something else, such as UTF-16; the streams are UTF-8 afterwards.

    No terminal shows it, lines from a pipe do not end in it, and what is written in pieces has no byte order mark.
    """
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None) or "utf-8"
        if "a\n".encode(encoding, "replace") != b"a\n":
            for each in (sys.stdin, sys.stdout, sys.stderr):
                if hasattr(each, "reconfigure"):
                    each.reconfigure(encoding="utf-8", errors="replace")
            return encoding
    return None


def make_console(**options) -> Console:
    """A console that shows text as it is. A size in the environment counts only if something can be shown in it."""
    unusable = {name for name in ("COLUMNS", "LINES") if not os.environ.get(name, "").strip("0")}
    environment = {name: value for name, value in os.environ.items() if name not in unusable}
    return PipeConsole(highlight=False, markup=False, emoji=False, _environ=environment, **options)


class Output:
    """stdout for answers, stderr for everything else; `tty` says whether stdout is a terminal."""

    def __init__(self):
        self.console, self.errors = make_console(), make_console(stderr=True)
        # rich's own answer can be forced by environment variables
        self.tty, self.wraps = sys.stdout.isatty(), sys.stderr.isatty()
        self.quiet = False  # no notes and no bar
        self.redraws = True  # whether what stands in a terminal may change, as a bar does
        self.keys = Keys()

    def text(self, text: str) -> None:
        """Answer text, at once and as it is; on a terminal without its control characters."""
        if not text:
            return
        if self.tty:
            self.console.out(visible(text), end="", highlight=False)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def user(self, text: str) -> None:
        """What somebody has typed, with its prompt, in its colour."""
        self.console.out(visible(text), style=USER if self.tty else None, highlight=False)

    def dim(self, text: str) -> None:
        """Text beside the answer on stdout, at once, dimmed."""
        self.console.out(visible(text), end="", style="dim", highlight=False)

    def note(self, message: str, aligned: bool = False) -> None:
        """One dim line on stderr, which a terminal wraps between words; aligned keeps its spaces."""
        if self.quiet:
            return
        text = visible(message) if aligned else one_line(message)
        self.errors.print(text, style="dim", soft_wrap=not self.wraps)

    def say(self, message: str, style: str | None = None) -> None:
        """What was asked for, on stderr: like a note whose spaces stay, but not dim."""
        self.errors.print(visible(message), style=style, soft_wrap=not self.wraps)

    def entry(self, name: str, words: str, column: int = 24) -> None:
        """A name, and beside it what it is, whose further lines are indented too; below it in a narrow window."""
        width = self.errors.width if self.wraps else None
        if width is None or width >= 2.5 * column:
            first, rest = f"  {name:<{column - 3}} ", " " * column
        else:
            self.say(f"  {name}")
            first = rest = " " * 4
        fitted = [words] if width is None else wrap(words, max(width - len(rest) - 1, 8))
        for i, line in enumerate(fitted):
            self.say((rest if i else first) + line)

    def error(self, message: object) -> None:
        self.errors.print(f"tridecode: error: {one_line(message)}", style="red", soft_wrap=not self.wraps)

    @contextmanager
    def loading(self):
        """On a terminal a bar with bytes and speed, or with kernels, and a line for each further step that the engine
        logs.

        Yields an object whose `weights` and `kernels` Engine.load calls with its progress.
        """
        from .progress import Loading

        shows = self.errors.is_terminal and not self.quiet
        with Loading(self.errors, disable=not (shows and self.redraws)) as bar:
            with logged(self.note) if shows else nullcontext(), suspendable(bar.stop, bar.start):
                yield bar


class Notes(logging.Handler):
    """Passes the messages of level INFO to `note`."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno == logging.INFO:
            self._note(record.getMessage())


@contextmanager
def logged(note: Callable[[str], None]):
    """Within, `note` gets what the engine logs at level INFO; with --verbose, which shows that itself, nothing."""
    logger, handler = logging.getLogger("tridecode"), Notes(note)
    if logger.level != logging.NOTSET:
        yield
        return
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)


class Keys:
    """The terminal's input while no prompt reads it.

    Keys are not echoed, because they would appear amid the output. The next prompt receives all of them.
    """

    def __init__(self, enabled: bool = False, paste: bool = False):
        """paste: ask the terminal to mark pastes, so that several pasted lines arrive as one text."""
        self._enabled, self._paste = enabled, paste
        self._before: list | None = None  # the terminal's attributes, while they are changed

    def hold(self) -> None:
        """Switch the echo off. Call it again after each prompt."""
        if not self._enabled or in_background():  # the terminal is the shell's: the change would stop this program
            return
        import termios

        with suppress(termios.error, OSError, ValueError):  # stdin is not a terminal, or it was closed
            attributes = termios.tcgetattr(sys.stdin.fileno())
            self._before = self._before or [*attributes]
            # In canonical mode the kernel drops the rest of a line after 4,096 bytes: the end of a long paste.
            attributes[3] &= ~(termios.ECHO | termios.ICANON)
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, attributes)
            if self._paste:
                # Mode 7 is on anyway; with it the sequence differs from the prompt's, which tests wait for.
                os.write(sys.stdout.fileno(), b"\x1b[?7;2004h")

    def release(self) -> None:
        """Restore the terminal's attributes."""
        if self._before is None or in_background():
            return
        import termios

        with suppress(termios.error, OSError, ValueError):
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, self._before)
            if self._paste:
                os.write(sys.stdout.fileno(), b"\x1b[?2004l")
        self._before = None


@contextmanager
def unechoed(enabled: bool, pause: Callable[[], None], resume: Callable[[], None], paste: bool = False):
    """Hold the terminal's keys within the context, and yield the Keys.

    Ctrl-Z calls `pause` and releases the keys. When the program continues, they are held again and `resume` is called.
    """
    keys = Keys(enabled, paste)
    with suspendable(both(pause, keys.release), both(keys.hold, resume)):
        try:
            keys.hold()
            yield keys
        finally:
            keys.release()


def both(first: Callable[[], None], then: Callable[[], None]) -> Callable[[], None]:
    """Return a function that calls both."""

    def call() -> None:
        first()
        then()

    return call


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A question that names the one of `known` that `word` resembles; "" where none does."""
    near = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else ""


def joined(said: str, more: str) -> str:
    """A line and what follows from it, behind a semicolon, or as a sentence where the line ends one itself."""
    return f"{said} {more[0].upper()}{more[1:]}" if said.endswith((".", "?", "!")) else f"{said}; {more}"


SHORTER = ("reused", "seed", "context", "first", "pass")  # what a line that is too long loses, in this order


def speed_line(usage, timings, capacity: int | None = None, seed: int | None = None, width: int | None = None) -> str:
    """The line after an answer: tokens, speed, tokens a pass where some were guessed, time to first token, what was
    reused of the prompt and, with `capacity`, how much of the context is used. Of a server's answer what it does not
    tell is left out.

    width: columns that it may have; where it has more its words become shorter, then SHORTER counts. None: any number.
    """
    parts = _speed(usage, timings, capacity, seed)
    if width is not None and len(" · ".join(parts.values())) > width:
        parts = _speed(usage, timings, capacity, seed, short=True)
        for name in SHORTER:
            if len(" · ".join(parts.values())) > width:
                parts.pop(name, None)
    return " · ".join(parts.values())


def _speed(usage, timings, capacity, seed, short: bool = False) -> dict[str, str]:
    """The parts of a speed_line by their names."""
    number, of = (_thousands, "/") if short else ("{:,}".format, " / ")
    parts = {"tokens": counted(usage.completion_tokens, "token")} if usage else {}
    if rate := timings.tokens_per_second:
        parts["rate"] = f"{rate:,.{0 if rate >= 100 else 1}f} tok/s"
    if usage and usage.accepted:
        parts["pass"] = f"{usage.tokens_per_pass:.1f} a pass"
    parts["first"] = f"first {'' if short else 'token '}{timings.ttft:.2f} s"
    if usage and usage.reused_tokens is not None:
        both = number(usage.reused_tokens), number(usage.prompt_tokens)
        parts["reused"] = f"{(of if short else ' of ').join(both)} reused"
    if usage and capacity is not None:
        used = min(usage.prompt_tokens + usage.completion_tokens, capacity)  # the last token takes no place of its own
        parts["context"] = f"context {number(used)}{of}{number(capacity)}"
    if seed is not None:
        parts["seed"] = f"seed {seed}"
    return parts


def _thousands(n: int) -> str:
    return f"{n:,}" if n < 10_000 else f"{n / 1000:,.0f}k"
