"""Messages from lines: blocks between three quotation marks, and the plain reader where there is no real terminal."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import ModuleType

from ..terminal import Keys, visible

MARK = '"""'
PROMPT, CONTINUED = "> ", "… "


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
    block: list[str] = []
    for line in lines:
        line = line.rstrip("\r\n")
        # Once a block is open only its newest line can close it: no look at all that came before.
        open_still = not line.rstrip().endswith(MARK) if block else unfinished(line)
        block.append(line)
        if not open_still:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C at the prompt: the draft that it discarded, and whether anything was typed there at all."""

    def __init__(self, draft: str = "", typed: bool = False):
        self.draft, self.typed = draft, typed or bool(draft)


def _insert(readline: ModuleType, draft: str) -> None:
    readline.set_startup_hook()
    readline.insert_text(draft)


class PlainReader:
    """input(), with readline where Python has it."""

    redraws = True  # for whoever reads; this one never does

    def __init__(self, keys: Keys | None = None):
        """keys: those that are held while nothing is read."""
        self._keys = keys or Keys()
        self._readline: ModuleType | None = None
        with suppress(ImportError):
            import readline  # arrow keys and history in input()

            self._readline = readline

    def read(self, draft: str = "") -> str:
        lines: list[str] = []
        self._begin_with(draft)
        self._keys.release()
        try:
            return next(join_blocks(self._lines(lines)))
        except (EOFError, KeyboardInterrupt) as end:
            print()  # the line editor ends its line itself
            if isinstance(end, EOFError):
                raise
            raise self._discard(lines) from None
        finally:
            self._keys.hold()

    def _lines(self, lines: list[str]) -> Iterator[str]:
        """What is typed, which is also kept in `lines`."""
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
