"""Messages from lines: blocks between triple quotation marks, and a reader for terminals without a line editor."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from ..terminal import Keys, visible

MARK = '"""'
PROMPT, CONTINUED = "> ", "… "


def unfinished(text: str) -> bool:
    """Return whether `text` opens a block that it does not close.

    Text with an even number of marks is complete. It may be a program that begins with a docstring.
    """
    ended = text.rstrip()
    closed = len(ended) >= 2 * len(MARK) and ended.endswith(MARK)
    return text.startswith(MARK) and not closed and text.count(MARK) % 2 == 1


def unquoted(text: str) -> str | None:
    """Return the message in a block, or None if `text` is not a block. An unclosed block ends with the text."""
    body = text.removeprefix(MARK)
    if body == text or not (unfinished(text) or text.rstrip().endswith(MARK)):
        return None
    return (body if unfinished(text) else body.rstrip().removesuffix(MARK)).strip("\n")


def join_blocks(lines: Iterable[str]) -> Iterator[str]:
    """Yield each line without its line end, and each block of several lines as one text."""
    block: list[str] = []
    for line in lines:
        line = line.rstrip("\r\n")
        # Only the newest line can close an open block, so earlier lines are not searched again.
        still_open = not line.rstrip().endswith(MARK) if block else unfinished(line)
        block.append(line)
        if not still_open:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


def as_typed(message: str) -> str:
    """Return a message with the prompts that the user saw while typing it."""
    return PROMPT + message.replace("\n", "\n" + CONTINUED)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at the prompt.

    Attributes:
        draft: The discarded text.
        typed: Whether the user typed anything, even if it was deleted again.
    """

    def __init__(self, draft: str = "", typed: bool = False):
        self.draft, self.typed = draft, typed or bool(draft)


class PlainReader:
    """A reader that uses input()."""

    def __init__(self, keys: Keys | None = None):
        """Create the reader. `keys` are the terminal's keys, which are released during a read."""
        self._keys = keys or Keys()
        with suppress(ImportError):
            import readline  # noqa: F401  # It adds arrow keys and a history to input().

    def read(self, draft: str = "") -> str:
        """Return one message. Raises KeyboardInterrupt for Ctrl-C and EOFError for Ctrl-D."""
        if draft:
            print(f"(was: {visible(draft.strip())})")
        self._keys.release()
        try:
            return next(join_blocks(self._lines()))
        except (EOFError, KeyboardInterrupt):
            print()  # input() leaves the cursor on the line of the prompt.
            raise
        finally:
            self._keys.disable_echo()

    def _lines(self) -> Iterator[str]:
        prompt = PROMPT
        while True:
            yield input(prompt)
            prompt = CONTINUED


def shows_editor() -> bool:
    """Return whether the terminal can show a line editor."""
    return os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
