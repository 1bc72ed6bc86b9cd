"""Small windows, and windows that are resized during an answer, in a simulated terminal and in tmux."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from screens import Terminal
from test_markdown import CUTS, split_at
from wcwidth import wcswidth

from tridecode.cli.chat.blocks import render_rows
from tridecode.cli.chat.markdown import Painter
from tridecode.cli.wrapping import Wrapped

WORD = re.compile(r"w\d+w")
KINDS = ["{}", "{}", "**{} {}** {}", "\n\n{}", "\n- {}", "\n1. {} *{} {}*", "\n\n> {}", "`{}` {}", "\n\n# {}\n\n{}"]
KINDS += ["\n\n```python\n{}\n    {}\n\n{}\n```\n\n", "\n\n| {} | {} |\n|---|---|\n| {} | **{}** |\n| {} | {} {} |\n\n"]
SIZES = st.tuples(st.integers(8, 100), st.integers(2, 30))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from(KINDS), max_size=40), CUTS, st.lists(SIZES, max_size=8), st.booleans())
def test_resized_window_shows_every_word_once(kinds, cuts, sizes, reflow):
    """The terminal may wrap or cut rows that no longer fit."""
    numbers = iter(range(10_000))
    text = " ".join(kinds)
    text = re.sub("{}", lambda match: f"w{next(numbers)}w", text)
    terminal = Terminal(80, 24, reflow)
    painter = Painter(terminal.console)
    parts = [part for part in split_at(text, cuts) for part in split_at(part, [40, 80, 120])]
    for i, part in enumerate(parts):
        if sizes and i % 3 == 2:
            terminal.resize(*sizes.pop())
        painter.frame(part)
    painter.frame("", final=True)
    painter.close()
    shown = re.sub(r"\s", "", terminal.shown)
    assert sorted(WORD.findall(shown)) == sorted(WORD.findall(text))


def test_tall_table_stays_a_table():
    terminal = Terminal(40, 6)
    painter = Painter(terminal.console)
    rows = [f"| r{i} | {'x' * i} |\n" for i in range(12)]
    for part in ["| name | what |\n|---|---|\n", *rows, "\nthe end"]:
        painter.frame(part)
    painter.frame("", final=True)
    painter.close()
    assert "|" not in terminal.shown and terminal.shown.endswith("\n\nthe end")
    assert terminal.shown.split("name")[1].count("what") == 1
    assert [word for word in terminal.shown.split() if word[0] in "rx"] == " ".join(rows).replace("|", "").split()


RULE = re.compile(r"^[─ ]*─[─ ]*$", re.MULTILINE)


@pytest.mark.parametrize("sizes", [[(20, 24)], [(20, 24), (60, 24)], [(60, 4)], [(25, 24), (18, 24), (40, 5)]])
@pytest.mark.parametrize("reflow", [True, False])
def test_table_in_a_resized_window_has_one_rule(sizes, reflow):
    terminal = Terminal(40, 24, reflow)
    painter = Painter(terminal.console)
    for part in ["| first name | second name |\n|---|---|\n", *(f"| row {i} | word {'x' * i} |\n" for i in range(9))]:
        painter.frame(part)
        if sizes and "row" in part:
            terminal.resize(*sizes.pop(0))
    painter.frame("\nthe end", final=True)
    painter.close()
    rows = terminal.shown.split("\n")
    rules = [i for i, row in enumerate(rows) if RULE.match(row)]
    assert len(rules) == 1 and "name" in rows[rules[0] - 1], "a rule has no heading above it"
    assert len(re.findall(r"row", terminal.shown)) == 9


SCRIPTS = [
    "कुछ शब्द: **नमस्ते**, किताब, विद्यार्थी, स्त्री और क्षत्रिय। भारत की राजधानी नई दिल्ली है, और यह यमुना नदी के किनारे बसी है।",
    "தமிழ் மொழி மிகவும் **பழமையான** மொழிகளில் ஒன்றாகும் என்று கூறப்படுகிறது",
    "বাংলা **ভাষা** " * 20,
]  # fmt: skip


@pytest.mark.parametrize("text", SCRIPTS)
@pytest.mark.parametrize("width", [20, 40])
def test_marks_of_indian_scripts_take_columns(text, width):
    """A terminal would wrap longer rows again, and the painter could not reach them."""
    terminal = Terminal(1000, 200)  # It gives each character a column, unlike real ones.
    terminal.console.width = width
    rows = ["".join(segment.text for segment in row) for row in render_rows(terminal.console, text)]
    out = []
    write = Wrapped(terminal.console, out.append)
    write(f"{text}\n")
    assert max(map(wcswidth, [*rows, *"".join(out).splitlines()])) < width and len(rows) > 1
    assert re.sub(r"[\s•*-]", "", "".join(rows)) == re.sub(r"[\s*-]", "", text)
    painter = Painter(terminal.console)
    for character in text:
        painter.frame(character)
    painter.frame("", final=True)
    painter.close()
    assert terminal.shown == "\n".join(rows)
    moves = re.findall(r"\x1b\[\d+D", terminal.getvalue())
    assert not moves, "the columns back to a mark depend on the terminal"


def test_interrupted_word_is_continued():
    terminal = Terminal(30, 5)
    painter = Painter(terminal.console)
    painter.frame("A sentence of some words, cut in the mid")
    terminal.resize(13, 5)
    for part in ("dle", " of one", " of them.\n\n", "Next.\n\n```python\n", "x = 1\nyyyyyyyy"):
        painter.frame(part)
    terminal.resize(10, 5)
    for part in ("y", " = 2\nz = ", "3\n", "```"):
        painter.frame(part)
    painter.frame("", final=True)
    painter.close()
    assert terminal.shown.split("\n") == [
        "A sentence of some words, cut", "in the middle", "of one of", "them.", "", "Next.", "", "  x = 1",
        "  yyyyyyyyy = 2", "  z = 3",
    ]  # fmt: skip


# This program shows an answer with every kind of block in a real terminal. At some places it requests another size
# of the window, and continues when the terminal has reported the new size.
PLAYER = """
import os, time
from pathlib import Path
from tridecode.cli.chat.display import open_sink
from tridecode.cli.terminal import Output

text, request = open({text!r}).read(), Path({request!r})
blocks = text.split("\\n\\n")
starts = [sum(len(block) + 2 for block in blocks[:i]) for i in range(len(blocks))]
places = [starts[i] + len(blocks[i]) * 7 // 10 for i in (0, 1, 3, 4, 5, 7, 9)]  # inside paragraphs and lists
answer = open_sink(Output(), plain=False)
for i in range(0, len(text), 4):
    if places and i >= places[0]:
        time.sleep(0.2)
        before = os.get_terminal_size()
        request.write_text(str(8 - len(places)))
        while os.get_terminal_size() == before:
            time.sleep(0.01)
        places.pop(0)
    answer.push(text[i : i + 4])
    time.sleep(0.002)
answer.finish()
print("the end", flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not shutil.which("tmux"), reason="tmux is not installed")
def test_tmux_shows_every_word_once(tmp_path):
    numbers = iter(range(10_000))
    paragraph, items = "{} " * 40 + "**{} {}** *{} {}*.\n\n", "- {} {} **{}** {} {} {} {} {} {}\n" * 6 + "\n"
    text = (paragraph + items + "```python\n" + "{} = {}  # {} {} {} {} {}\n" * 15 + "```\n\n" + paragraph) * 3
    text = re.sub("{}", lambda match: f"w{next(numbers)}w", text)
    (tmp_path / "text").write_text(text)
    request = tmp_path / "request"
    (tmp_path / "player.py").write_text(PLAYER.format(text=str(tmp_path / "text"), request=str(request)))

    def tmux(*arguments):
        return subprocess.run(["tmux", "-S", tmp_path / "socket", *arguments], capture_output=True, text=True).stdout

    path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    program = f"PYTHONPATH={path} exec {sys.executable} {tmp_path / 'player.py'}"
    try:
        tmux("-f", "/dev/null", "new-session", "-d", "-x", "200", "-y", "24", program)
        shown, began = "", time.monotonic()
        sizes, resized = [(80, 24), (40, 24), (200, 24), (40, 10), (80, 30), (60, 24), (40, 24)], 0
        while "the end" not in shown and time.monotonic() - began < 60:
            time.sleep(0.05)
            if request.exists() and (request.read_text() or "0") == str(resized + 1):
                width, height = sizes[resized]
                tmux("resize-window", "-x", str(width), "-y", str(height))
                resized += 1
            shown = tmux("capture-pane", "-p", "-J", "-S", "-", "-E", "-")
    finally:
        tmux("kill-server")
    assert "the end" in shown and resized == len(sizes), shown
    assert sorted(WORD.findall(re.sub(r"\s", "", shown))) == sorted(WORD.findall(text))
