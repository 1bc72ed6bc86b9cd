"""A simulated terminal for the Markdown painter, with wrapped rows, a scrollback and resizing."""

import io
import re

from rich.cells import cell_len
from rich.console import Console

PARTS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]|[^\r\n\x1b]")


class Terminal(io.StringIO):
    """A terminal that stores the written text in `lines`.

    Attributes:
        reflow: Whether a narrower window wraps lines that are too long, as most terminals do, instead of cutting them.
    """

    def __init__(self, width=80, height=24, reflow=True):
        super().__init__()
        self.width, self.height, self.reflow = width, height, reflow
        self.lines, self.line, self.at, self.top = [""], 0, 0, 0
        self.console = Console(file=self, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
        self.resize(width, height)

    def rows(self) -> list[tuple[int, int]]:
        """Return the line and the first character of each row."""
        width = self.width if self.reflow else 10**6
        return [(i, at) for i, line in enumerate(self.lines) for at in range(0, max(len(line), 1), width)]

    def row(self) -> int:
        """Return the row of the cursor."""
        return max(i for i, place in enumerate(self.rows()) if place <= (self.line, self.at))

    def resize(self, width, height) -> None:
        self.width, self.height = width, height
        self.console.width, self.console.height = width, height
        self.top = max(self.row() - height + 1, 0)

    def write(self, text: str) -> int:
        for part in PARTS.findall(text):
            self.execute(part)
            self.top = max(self.top, self.row() - self.height + 1)
        return super().write(text)

    def execute(self, part: str) -> None:
        if part == "\r":
            self.line, self.at = self.rows()[self.row()]
        elif part == "\n":
            self.line, self.at = self.line + 1, 0
            self.lines += [""] * (self.line == len(self.lines))
        elif part == "\x1b[J":
            self.lines[self.line] = self.lines[self.line][: self.at]
            del self.lines[self.line + 1 :]
        elif part[0] == "\x1b" and part[-1] == "A":
            self.line, self.at = self.rows()[max(self.row() - int(part[2:-1]), self.top)]
        elif part[0] == "\x1b" and part[-1] == "D":  # The cursor never moves to the previous row.
            columns, first = int(part[2:-1]), self.rows()[self.row()][1]
            while columns > 0 and self.at > first:
                self.at -= 1
                columns -= cell_len(self.lines[self.line][self.at])
        elif len(part) == 1:
            line = self.lines[self.line]
            self.lines[self.line] = line[: self.at] + part + line[self.at + 1 :]
            self.at += 1
        else:
            assert part in ("\x1b[?25l", "\x1b[?25h"), part

    @property
    def shown(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip()


def screen(written):
    """Return the final text of a terminal of unlimited size."""
    terminal = Terminal(10**6, 10**6)
    terminal.write(written)
    return terminal.shown
