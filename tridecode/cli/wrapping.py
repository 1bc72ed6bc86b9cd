"""Text with lines broken between words: plain text that streams into a terminal, and the help of commands."""

import argparse
import re
import unicodedata
from collections.abc import Callable
from textwrap import fill, wrap
from typing import Any

from rich.cells import cell_len as rich_cell_len
from rich.console import Console

# Scripts that are written without spaces. A line may end after each of these characters.
WIDE = "\u2e80-\u9fff\uac00-\ud7ff\uf900-\ufaff\uff00-\uffef\U0001f000-\U0003ffff"
PARTS = re.compile(rf"\n|[^\S\n]+|[{WIDE}]|[^\s{WIDE}]+")
# The beginning of a list item. Its further lines are indented like its text.
MARKER = re.compile(r"[-*+•]|\d{1,3}[.)]")
# Marks of Indian and other Asian scripts. rich counts no column for vowel signs (Mc), most terminals count one, so
# private characters of one column replace them while rich lays out a text.
MARKS = [chr(code) for code in range(0x900, 0x1D200) if unicodedata.category(chr(code)) in ("Mc", "Mn")]
PRIVATE = {ord(mark): 0xF0000 + i for i, mark in enumerate(MARKS) if unicodedata.category(mark) == "Mc"}
ORIGINAL = {private: code for code, private in PRIVATE.items()}
FENCES = ("```", "~~~")
TAB = 8
WHOLE: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}  # Options stay on one line.


def cell_len(text: str) -> int:
    """Return the columns of a text, which is the maximum where terminals disagree about marks."""
    return rich_cell_len(text if text.isascii() else text.translate(PRIVATE))


class Wrapped:
    """A function that takes text as it arrives and writes it with newlines at the edge of the window.

    Written text is never changed. A word is written only when it is complete, so the last character of a text must be a
    newline. Lines of code between fences, and words longer than the window, are not broken.
    """

    def __init__(self, console: Console, write: Callable[[str], None]):
        self._console, self._write = console, write
        self._word, self._fence = "", ""  # The incomplete word, and the mark that opened a code block.
        self._begin_line()

    def _begin_line(self) -> None:
        self._column, self._indent, self._space, self._words = 0, "", "", 0

    def continue_line(self) -> None:
        """Continue at the first column, because another program used the terminal."""
        self._column, self._space = 0, ""

    def __call__(self, text: str) -> None:
        """Write text, with line breaks where a word would exceed the width."""
        parts = PARTS.findall(self._word + text)
        self._word = ""
        if parts and not parts[-1].isspace() and not re.fullmatch(f"[{WIDE}]", parts[-1]):
            self._word = parts.pop()
        out = "".join(map(self._placed, parts))
        if out:
            self._write(out)

    def _placed(self, part: str) -> str:
        """Return the text that can be written for a part now."""
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
        """Set the indent of further rows, and whether code begins or ends, from the first word of a line."""
        if MARKER.fullmatch(word):
            self._indent = self._indent.expandtabs(TAB) + " " * (len(word) + 1)
        if word.startswith(self._fence or FENCES):
            self._fence = "" if self._fence else word[:3]

    def _move(self, text: str) -> None:
        for part in re.findall(r"\t|[^\t]+", text):
            self._column += TAB - self._column % TAB if part == "\t" else cell_len(part)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter that fits the paragraphs of a description into the window. Indented lines are examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        def fit(paragraph: str) -> str:
            spaces = indent + " " * (len(paragraph) - len(paragraph.lstrip()))
            inner = f"{spaces}    " if spaces else ""
            return fill(paragraph.strip(), max(width, 11), initial_indent=spaces, subsequent_indent=inner, **WHOLE)

        paragraphs = re.sub(r"(?<=\S)\n(?=\S)", " ", text.strip("\n")).split("\n")
        return "\n".join(map(fit, paragraphs)) + "\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, **WHOLE)
