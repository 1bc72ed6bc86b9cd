"""Plain text that streams into a terminal, its lines broken between words."""

import re
from collections.abc import Callable

from rich.cells import cell_len
from rich.console import Console

# Scripts that are written without spaces: a line may end after each of these.
WIDE = "\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef\U0001f000-\U0003ffff"
PARTS = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")
MARKER = re.compile(r"[-*+•]|\d{1,3}[.)]")  # of a list's item, below whose text its lines go on
FENCES = ("```", "~~~")
TAB = 8


class Wrapped:
    """Called with text as it comes; `write` gets it with newlines where the window ends. Nothing is taken back: a word
    is held until its end is there, so what ends a text must be a newline.

    Lines of code between fences stay whole, and so do words that are longer than the window.
    """

    def __init__(self, console: Console, write: Callable[[str], None]):
        self._console, self._write = console, write
        self._word, self._fence = "", ""  # the one that is begun; the mark that opened a block of code
        self._begin_line()

    def _begin_line(self) -> None:
        self._column, self._indent, self._space, self._words = 0, "", "", 0

    def __call__(self, text: str) -> None:
        parts = PARTS.findall(self._word + text)
        self._word = ""
        if parts and not parts[-1].isspace() and not re.fullmatch(f"[{WIDE}]", parts[-1]):
            self._word = parts.pop()
        out = "".join(map(self._placed, parts))
        if out:
            self._write(out)

    def _placed(self, part: str) -> str:
        """What is written for it now."""
        if part == "\n":
            self._begin_line()
            return part
        if part.isspace():
            if self._words:
                self._space += part
                return ""
            self._indent += part
            self._move(part)
            return part
        if not self._words:
            self._first(part)
        width = max(self._console.width - 1, 1)
        needed = cell_len(self._space.expandtabs(TAB)) + cell_len(part)
        if self._words and not self._fence and self._column + needed > width:
            indent = self._indent if cell_len(self._indent) < width / 2 else ""
            out, self._column = f"\n{indent}{part}", cell_len(indent)
            self._move(part)
        else:
            out = self._space + part
            self._move(out)
        self._words, self._space = self._words + 1, ""
        return out

    def _first(self, word: str) -> None:
        """The first word of a line says where its further rows begin, and whether code begins or ends."""
        if MARKER.fullmatch(word):
            self._indent = self._indent.expandtabs(TAB) + " " * (len(word) + 1)
        if word.startswith(self._fence or FENCES):
            self._fence = "" if self._fence else word[:3]

    def _move(self, text: str) -> None:
        for part in re.findall(r"\t|[^\t]+", text):
            self._column += TAB - self._column % TAB if part == "\t" else cell_len(part)
