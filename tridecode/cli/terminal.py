"""Terminal input and output: consoles, control characters, key handling, and the statistics line."""

import logging
import os
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext, suppress
from textwrap import wrap

from rich.console import Console

from ..arguments import nearest
from ..errors import counted
from .signals import in_background, suspendable

USER = "cyan"  # Color of the user's messages.

# Control characters such as ESC, carriage return, backspace and C1. A terminal interprets them, so text from a model
# or a file name must not contain them.
_CONTROLS = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_CONTROLS |= {0x7F: 0x2421} | {code: 0xFFFD for code in range(0x80, 0xA0)}
# Embeddings, overrides and isolates of the writing direction. They can disguise text.
_CONTROLS |= {code: 0xFFFD for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}


def visible(text: str) -> str:
    """Replace control characters in `text`, except newline and tab, by visible symbols."""
    return text.replace("\r\n", "\n").translate(_CONTROLS)


class Visible:
    """A function like `visible` for text in parts. A CR at the end of a part waits, because an LF may follow it."""

    def __init__(self):
        self._pending = ""

    def __call__(self, part: str) -> str:
        """Return the part that can be shown now."""
        text = self._pending + part
        self._pending = "\r" * text.endswith("\r")
        return visible(text.removesuffix("\r"))


def one_line(message: object) -> str:
    """Return a message as one line without control characters, with words over 300 characters shortened."""
    words = str(message).split()
    return visible(" ".join(f"{word[:150]}…{word[-50:]}" if len(word) > 300 else word for word in words))


def repair_streams() -> None:
    """Make the standard streams usable: closed ones become empty, and encoding errors become '?' or U+FFFD."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:  # The parent process closed the stream.
            setattr(sys, name, open(os.devnull, mode))
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


class PipeConsole(Console):
    """A console that raises BrokenPipeError; rich's Console would exit with code 1."""

    def on_broken_pipe(self) -> None:
        """Raise the BrokenPipeError that is being handled."""
        raise


def switch_streams_to_utf8() -> str | None:
    """Switch the standard streams to UTF-8 if the encoding of one is incompatible with ASCII, such as UTF-16.

    Terminals cannot show such an encoding, newlines in a pipe have other bytes, and later writes would lack the byte
    order mark.

    Returns:
        The name of the replaced encoding, or None.
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
    """Return a console without markup and highlighting. COLUMNS and LINES are ignored if they are 0 or empty."""
    unusable = {name for name in ("COLUMNS", "LINES") if not os.environ.get(name, "").strip("0")}
    environment = {name: value for name, value in os.environ.items() if name not in unusable}
    return PipeConsole(highlight=False, markup=False, emoji=False, _environ=environment, **options)


class Output:
    """Output to stdout, for answers, and to stderr, for all other text.

    Attributes:
        tty: Whether stdout is a terminal.
    """

    def __init__(self):
        self.console, self.errors = make_console(), make_console(stderr=True)
        # isatty is called directly, because environment variables can change rich's result.
        self.tty, self.wraps = sys.stdout.isatty(), sys.stderr.isatty()
        self.quiet = False  # Whether notes and the progress bar are hidden.
        self.redraws = True  # Whether written rows may change, as in a progress bar.
        self.error_prefix = "tridecode: error: "  # A chat in a terminal removes it, because the program is obvious.
        self.keys = Keys()
        self._visible, self._visible_dim = Visible(), Visible()

    def text(self, text: str) -> None:
        """Write text of an answer immediately.

        In a terminal, control characters are replaced. Otherwise the text is unchanged.
        """
        if not text:
            return
        if self.tty:
            self.console.out(self._visible(text), end="", highlight=False)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    def user(self, text: str) -> None:
        """Write a message of the user, with its prompt, in the color of user messages."""
        self.console.out(visible(text), style=USER if self.tty else None, highlight=False)

    def dim(self, text: str) -> None:
        """Write dimmed text to stdout immediately."""
        self.console.out(self._visible_dim(text), end="", style="dim", highlight=False)

    def note(self, message: str, aligned: bool = False) -> None:
        """Write a dim line to stderr. In a terminal, it is wrapped between words. If `aligned`, spaces are kept."""
        if self.quiet:
            return
        text = visible(message) if aligned else one_line(message)
        self.errors.print(text, style="dim", soft_wrap=not self.wraps)

    def print_line(self, message: str, style: str | None = None) -> None:
        """Write output of a command to stderr. It is not dimmed, keeps its spaces, and is also shown with --quiet."""
        self.errors.print(visible(message), style=style, soft_wrap=not self.wraps)

    def entry(self, name: str, words: str, column: int = 24) -> None:
        """Write a name and its description in two columns; in a narrow window the description is below the name."""
        width = self.errors.width if self.wraps else None
        if width is None or width >= 2.5 * column:
            first, rest = f"  {name:<{column - 3}} ", " " * column
        else:
            self.print_line(f"  {name}")
            first = rest = " " * 4
        fitted = [words] if width is None else wrap(words, max(width - len(rest) - 1, 8))
        for i, line in enumerate(fitted):
            self.print_line((rest if i else first) + line)

    def error(self, message: object) -> None:
        """Write an error as one red line to stderr."""
        self.errors.print(f"{self.error_prefix}{one_line(message)}", style="red", soft_wrap=not self.wraps)

    @contextmanager
    def loading(self):
        """Show the progress of loading in a terminal: a bar for weights or kernels, and the engine's log messages.

        Yields an object with the methods `weights` and `kernels`. `Engine.load` calls them to report its progress.
        """
        from .progress import Loading

        shows = self.errors.is_terminal and not self.quiet
        with Loading(self.errors, disable=not (shows and self.redraws)) as bar:
            with logged(self.note) if shows else nullcontext(), suspendable(bar.stop, bar.start):
                yield bar


class Notes(logging.Handler):
    """A log handler that passes messages of level INFO to `note`."""

    def __init__(self, note: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record of level INFO as a note; other levels are not shown."""
        if record.levelno == logging.INFO:
            self._note(record.getMessage())


@contextmanager
def logged(note: Callable[[str], None]):
    """Pass INFO messages of the engine to `note` within the context, unless --verbose shows them already."""
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
        """Create the keys of stdin.

        Args:
            enabled: Change the terminal; False makes all methods do nothing.
            paste: The line editor reads the keys. Request that the terminal marks pastes, so that several pasted lines
                arrive as one text, and do not change Enter into Ctrl-J, which inserts a line.
        """
        self._enabled, self._paste = enabled, paste
        self._before: list | None = None  # The original attributes of the terminal while they are changed.

    def disable_echo(self) -> None:
        """Disable the terminal's echo. Call this again after each prompt."""
        if not self._enabled or in_background():  # If a program in the background changes the terminal, it is stopped.
            return
        import termios

        with suppress(termios.error, OSError, ValueError):  # stdin is not a terminal, or is closed.
            attributes = termios.tcgetattr(sys.stdin.fileno())
            self._before = self._before or [*attributes]
            # In canonical mode the kernel drops all bytes of a line after the first 4,096, which would cut a long
            # paste.
            attributes[3] &= ~(termios.ECHO | termios.ICANON)
            if self._paste:
                attributes[0] &= ~termios.ICRNL
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSANOW, attributes)
            if self._paste:
                # Mode 7 is enabled by default. It makes this sequence differ from that of the prompt, for which tests
                # wait.
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
def echo_disabled(enabled: bool, pause: Callable[[], None], resume: Callable[[], None], paste: bool = False):
    """Disable the echo within a `with` block, and yield the Keys.

    Ctrl-Z calls `pause` and restores the terminal. When the program continues, the echo is disabled again and `resume`
    is called.
    """
    keys = Keys(enabled, paste)
    with suspendable(both(pause, keys.release), both(keys.disable_echo, resume)):
        try:
            keys.disable_echo()
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
    """Return a question that names the word of `known` most similar to `word`, or "" if there is none."""
    near = nearest(word, known)
    return f"did you mean {near}?" if near else ""


def joined(message: str, more: str) -> str:
    """Append `more` to a message after a semicolon, or as a new sentence if the message ends with one."""
    return f"{message} {more[0].upper()}{more[1:]}" if message.endswith((".", "?", "!")) else f"{message}; {more}"


def cut_by(usage, max_tokens: int | None, capacity: int | None) -> str | None:
    """Return the limit that ended an answer whose finish_reason is length: max_tokens, context, or None if unknown."""
    if max_tokens is not None and (usage is None or usage.completion_tokens == max_tokens):
        return "max_tokens"
    full = capacity is not None and usage and usage.prompt_tokens + usage.completion_tokens >= capacity
    return "context" if full else None


def cut_words(last, max_tokens: int | None, capacity: int | None) -> str:
    """Return the end of the statistics line of an answer that a limit has cut; "" for another answer."""
    if last.finish_reason != "length":
        return ""
    return f" · cut by {cut_by(last.usage, max_tokens, capacity) or 'a limit of the server'}"


# Parts that are omitted from a line that is too long, in this order.
SHORTER = ("reused", "seed", "context", "first", "pass")


def speed_line(usage, timings, capacity: int | None = None, seed: int | None = None, width: int | None = None) -> str:
    """Return the statistics line of an answer as text.

    Its parts: tokens, speed, tokens per pass if drafts were accepted, time to first token, reused tokens of the prompt,
    used tokens of the context, and the seed. Parts that a server does not report are omitted; without a number of
    tokens the time of the whole answer is shown.

    Args:
        capacity: Tokens of the context, None to omit this part.
        width: Maximum columns. A longer line is abbreviated, then the parts in SHORTER are omitted. None means no
            limit.
    """
    parts = _speed(usage, timings, capacity, seed)
    if width is not None and len(" · ".join(parts.values())) > width:
        parts = _speed(usage, timings, capacity, seed, short=True)
        for name in SHORTER:
            if len(" · ".join(parts.values())) > width:
                parts.pop(name, None)
    return " · ".join(parts.values())


def _speed(usage, timings, capacity, seed, short: bool = False) -> dict[str, str]:
    """Return the parts of the statistics line by name."""
    number, of = (_thousands, "/") if short else ("{:,}".format, " / ")
    parts = {"tokens": counted(usage.completion_tokens, "token")} if usage else {}
    if rate := timings.tokens_per_second:
        parts["rate"] = f"{rate:,.{0 if rate >= 100 else 1}f} tok/s"
    if usage and usage.accepted:
        parts["pass"] = f"{usage.tokens_per_pass:.1f} tok/pass"
    parts["first"] = f"first {'' if short else 'token '}{timings.ttft:.2f} s"
    if not usage:
        parts["whole"] = f"{timings.ttft + timings.decode:.1f} s"
    if usage and usage.reused_tokens is not None:
        both = number(usage.reused_tokens), number(usage.prompt_tokens)
        parts["reused"] = f"{(of if short else ' of ').join(both)} reused"
    if usage and capacity is not None:
        used = min(usage.prompt_tokens + usage.completion_tokens, capacity)  # The K/V of the last token are not stored.
        parts["context"] = f"context {number(used)}{of}{number(capacity)}"
    if seed is not None:
        parts["seed"] = f"seed {seed}"
    return parts


def _thousands(n: int) -> str:
    return f"{n:,}" if n < 10_000 else f"{n / 1000:,.0f}k"
