"""Messages from lines: blocks between triple quotation marks, and a reader for terminals without a line editor."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType

from ..terminal import Keys, visible

MARK = '"""'
PROMPT, CONTINUED = "> ", "… "


def unfinished(text: str) -> bool:
    """Return whether `text` opens a block that it does not close."""
    ended = text.rstrip()
    return text.startswith(MARK) and not (len(ended) >= 2 * len(MARK) and ended.endswith(MARK))


def unquoted(text: str) -> str | None:
    """Return the message in a block, or None if `text` is not a block. An unclosed block ends with the text."""
    if not text.startswith(MARK):
        return None
    body = text[len(MARK) :]
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


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at the prompt.

    Attributes:
        draft: The discarded text.
        typed: Whether the user typed anything, even if it was deleted again.
    """

    def __init__(self, draft: str = "", typed: bool = False):
        self.draft, self.typed = draft, typed or bool(draft)


def _insert(readline: ModuleType, draft: str) -> None:
    readline.set_startup_hook()
    readline.insert_text(draft)


class PlainReader:
    """A reader that uses input(), with readline if it is available."""

    redraws = True  # All readers have this attribute. This reader never redraws.

    def __init__(self, keys: Keys | None = None):
        """Create the reader. `keys` are the terminal's keys, which are released during a read."""
        self._keys = keys or Keys()
        self._readline: ModuleType | None = None
        with suppress(ImportError):
            import readline  # readline adds arrow keys and a history to input().

            self._readline = readline

    def read(self, draft: str = "") -> str:
        """Return one message. Raises Interrupted for Ctrl-C and EOFError for Ctrl-D."""
        lines: list[str] = []
        self._begin_with(draft)
        self._keys.release()
        try:
            return next(join_blocks(self._lines(lines)))
        except (EOFError, KeyboardInterrupt) as end:
            print()  # input() leaves the cursor on the line of the prompt.
            if isinstance(end, EOFError):
                raise
            raise self._discard(lines) from None
        finally:
            self._keys.disable_echo()

    def _lines(self, lines: list[str]) -> Iterator[str]:
        """Yield the typed lines and append them to `lines`."""
        while True:
            lines.append(input(CONTINUED if lines else PROMPT))
            yield lines[-1]

    def _begin_with(self, draft: str) -> None:
        if draft and self._readline and draft.isprintable():
            self._readline.set_startup_hook(partial(_insert, self._readline, draft))
        elif draft:
            print(f"(was: {visible(draft.strip())})")

    def _discard(self, lines: list[str]) -> Interrupted:
        if self._readline and (line := self._readline.get_line_buffer()):
            self._readline.add_history(line)
            lines = [*lines, line]
        return Interrupted("\n".join(lines))
