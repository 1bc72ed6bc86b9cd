"""Record the first minutes of a new user: writes docs/first-minutes.md and docs/chat.svg.

Run as `python docs/record.py`. It needs pexpect and pyte (a terminal in Python), and whatever installs the package: it
clones this repository's last commit, makes the environment with the README's command, and types what a user would.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from datetime import date
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

try:
    import pexpect
    import pyte
except ImportError as error:
    sys.exit(f"{error}; pip install pexpect pyte")

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
COLUMNS, LINES = 110, 30
SHELL = re.compile(r"\[\d+:\d\d\] \$ \Z")
READY = "\x1b[?2004h"  # The prompt of the chat reads keys.
CTRL_C = "\x03"
KITTY = re.compile(r"\x1b\[[<>=?]\d*u")  # Sequences of kitty's keyboard protocol, which pyte would show.
ABOUT = """\
# The first minutes

This is the first session of a new user on a machine without a GPU ({cores} CPU cores, Python {python}), recorded on
{day}. [record.py](record.py) typed the commands and measured the time. The block below the table is the complete,
unedited output of the terminal. `[m:ss]` is the time since the shell started. The packages were installed from a mirror
on the same machine. Over a network, the installation takes as long as the download
([requirements](../README.md#requirements)).

![The chat in a terminal](chat.svg)

| Time | |
| --- | --- |
{moments}

```text
{screen}
```
"""


class Terminal(pyte.HistoryScreen):
    """A screen that keeps lines that scrolled out of it, and shows dimmed text in gray."""

    def __init__(self):
        super().__init__(COLUMNS, LINES, history=10_000, ratio=1)
        self.stream = pyte.Stream(self)

    def select_graphic_rendition(self, *attributes, private=False):
        super().select_graphic_rendition(*[90 if value == 2 else value for value in attributes])

    def write(self, text):  # pexpect writes the output of the program to this log file.
        self.stream.feed(KITTY.sub("", text))

    def flush(self):
        pass

    def text(self) -> str:
        """Return all lines since the start."""
        lines = [*self.history.top, *(self.buffer[row] for row in range(LINES))]
        return "\n".join("".join(line[x].data for x in range(COLUMNS)).rstrip() for line in lines).rstrip()

    def svg(self, title: str) -> str:
        """Return a picture of the current screen."""
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"), color_system="truecolor")
        filled = [row for row in range(LINES) if self.display[row].strip()]
        for row in range(filled[-1] + 1):
            line = Text()
            chars = (self.buffer[row][x] for x in range(COLUMNS))
            for style, same in groupby(chars, style_of):
                line.append("".join(char.data for char in same), style)
            line.rstrip()
            console.print(line, no_wrap=True, overflow="crop")
        svg = console.export_svg(title=title, theme=DIMMED_MONOKAI)
        # The picture must not load fonts from the network.
        return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def style_of(char: pyte.screens.Char) -> Style:
    fg, bg = map(color, (char.fg, char.bg))
    return Style(
        color=fg, bgcolor=bg, bold=char.bold, italic=char.italics, underline=char.underscore, reverse=char.reverse
    )


def color(name: str) -> str | None:
    """Return the color of rich for a color of pyte."""
    if name == "default":
        return None
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return {"brown": "yellow", "brightblack": "bright_black"}.get(name, name.replace("bright", "bright_"))


class Recorder:
    def __init__(self, directory: str):
        path = os.environ["PATH"].split(os.pathsep)
        active = os.environ.get("VIRTUAL_ENV")
        environment = os.environ | {
            "PATH": os.pathsep.join(folder for folder in path if not active or not folder.startswith(active)),
            "PS1": r"[$((SECONDS/60)):$(printf %02d $((SECONDS%60)))] $ ",
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": f"{directory}/state",
            "XDG_CONFIG_HOME": f"{directory}/config",
            "PIP_QUIET": "1",
            "BASH_SILENCE_DEPRECATION_WARNING": "1",
        }
        for name in ("VIRTUAL_ENV", "COLUMNS", "LINES", "PROMPT_COMMAND", "PYTHONPATH"):
            environment.pop(name, None)
        self.screen, self.moments = Terminal(), []
        self.child = pexpect.spawn(
            "bash",
            ["--norc", "--noprofile"],
            cwd=directory,
            env=environment,
            encoding="utf-8",
            codec_errors="replace",
            dimensions=(LINES, COLUMNS),
            timeout=60,
        )
        self.child.logfile_read = self.screen
        self.began = time.monotonic()
        self.child.expect(SHELL)

    def moment(self, event: str) -> None:
        seconds = time.monotonic() - self.began
        self.moments.append(f"| {int(seconds // 60)}:{seconds % 60:04.1f} | {event} |")
        print(self.moments[-1])

    def type(self, text: str) -> None:
        for key in text:
            self.child.send(key)
            time.sleep(0.03)
        self.child.send("\r")

    def command(self, line: str, event: str | None = None) -> None:
        """Type a line in the shell and wait for the next prompt."""
        self.type(line)
        self.child.expect(SHELL)
        if event:
            self.moment(event)

    def say(self, line: str, until: str = r"context \d") -> None:
        """Type a line in the chat and wait for the next prompt."""
        self.type(line)
        self.child.expect(until)
        self.child.expect_exact(READY)
        self.child.expect(pexpect.TIMEOUT, timeout=0.3)  # Wait until the prompt is drawn.

    def chat_is_ready(self, event: str) -> None:
        self.child.expect_exact("/help lists the commands", timeout=1200)  # An installation may precede the prompt.
        self.child.expect_exact(READY)
        self.moment(event)
        time.sleep(0.3)


def readme_command(heading: str) -> str:
    return (ROOT / "README.md").read_text("utf-8").split(f"### {heading}\n", 1)[1].split("```sh\n", 1)[1].split("\n")[0]


def record(directory: str) -> Recorder:
    subprocess.run(["git", "clone", "-q", "--bare", str(ROOT), f"{directory}/tridecode.git"], check=True)
    user = Recorder(directory)
    user.command("git clone -q tridecode.git && cd tridecode", "the repository is cloned")
    user.type(readme_command("Chat"))
    user.chat_is_ready("the package is installed, the model is loaded, the prompt of the chat appears")
    user.say("Hello! Who are you?")
    user.moment("the first answer is complete")
    user.say("How do I make a cup of tea?")
    user.type("Tell me a long story about a snail.")
    user.child.expect_exact("\x1b[?2004l")
    user.child.expect(r"[a-z]{2}[^\x1b]*[a-z]{2}")
    user.child.send(CTRL_C)
    user.child.expect("stopped after")
    user.child.expect_exact(READY)
    user.moment("Ctrl-C interrupted an answer; the chat keeps its text")
    user.child.expect(pexpect.TIMEOUT, timeout=0.5)
    user.svg = user.screen.svg("tridecode chat")
    user.command("/exit")
    user.type(".venv/bin/python cli.py chat --resume")
    user.chat_is_ready("a new process has resumed the conversation")
    user.say("/stats", "session ")
    user.say("Thanks, bye!")
    user.command("/exit")
    user.command(". .venv/bin/activate")
    user.command('echo "Name three rivers." | python cli.py chat', "the chat answered a question from a pipe")
    user.command('echo "17 + 25?" | python cli.py generate --prompt "What is -"')
    user.command('python cli.py generate --json --prompt "Name three rivers." --temperature 0', "generate printed JSON")
    user.command("python cli.py chat --model missing; echo $?", "a wrong model name gave an error of one line")
    user.child.sendeof()
    user.child.expect(pexpect.EOF)
    return user


def main() -> None:
    directory = tempfile.mkdtemp()
    try:
        user = record(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    about = ABOUT.format(
        cores=os.cpu_count(),
        python=".".join(map(str, sys.version_info[:3])),
        day=date.today().isoformat(),
        moments="\n".join(user.moments),
        screen=user.screen.text().replace(directory, "~"),
    )
    (DOCS / "first-minutes.md").write_text(about, "utf-8")
    (DOCS / "chat.svg").write_text(user.svg, "utf-8")


if __name__ == "__main__":
    main()
