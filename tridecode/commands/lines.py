"""Messages from lines: blocks between three quotation marks, and the plain reader where there is no real terminal."""

import os
from collections.abc import Iterable, Iterator

from .terminal import visible

MARK = '"""'


def unfinished(text: str) -> bool:
    """Whether `text` opens a block that it does not close."""
    ended = text.rstrip()
    return text.startswith(MARK) and not (len(ended) >= 2 * len(MARK) and ended.endswith(MARK))


def unquoted(text: str) -> str | None:
    """The message in a block; None for what is none. One that nothing closes ends where the text does."""
    if not text.startswith(MARK):
        return None
    body = text[len(MARK) :]
    return (body if unfinished(text) else body.rstrip().removesuffix(MARK)).strip("\n")


def join_blocks(lines: Iterable[str]) -> Iterator[str]:
    """Each line without its end, the lines of a block as one."""
    block = None
    for line in lines:
        line = line.rstrip("\r\n")
        line = line if block is None else f"{block}\n{line}"
        block = line if unfinished(line) else None
        if block is None:
            yield line
    if block is not None:
        yield block


class PlainReader:
    """input(), with readline where Python has it."""

    def __init__(self):
        try:
            import readline  # noqa: F401  arrow keys and history in input()
        except ImportError:
            pass

    def read(self, draft: str = "") -> str:
        if draft:
            print(f"(was: {visible(draft.strip())})")
        try:
            text = input("> ")
            while unfinished(text):
                text += "\n" + input("… ")
        except (EOFError, KeyboardInterrupt):
            print()  # the line editor ends its line itself
            raise
        return text


def open_reader(commands: Iterable[str], output):
    """A line editor where the terminal can show one."""
    if os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return PlainReader()
    from .keyboard import Keyboard

    return Keyboard(commands, output)
