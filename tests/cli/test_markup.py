"""The Markdown dialect of answers: CommonMark, without loss of text."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tridecode.cli.chat.markdown import Painter
from tridecode.cli.terminal import visible


def shown(text, width=200, **options):
    """Return the rows of a finished answer."""
    console = Console(file=io.StringIO(), width=width, _environ={}, **options)
    painter = Painter(console)
    painter.frame(text, final=True)
    painter.close()
    return console.file.getvalue().rstrip("\n")


def styled(text):
    """Return the rows with letters around bold, italic, struck and blue text (code, addresses)."""
    text = shown(text, force_terminal=True, color_system="standard")
    text = re.sub(r"\x1b\[[\d;]*[hlJ]|\x1b\[\?25[hl]", "", text).rstrip()
    names = {"1": "B", "3": "I", "9": "S"}
    return re.sub(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", lambda m: f"<{names.get(m[1], 'C')}{m[2]}>", text)


def lines_of(text):
    return [line.rstrip() for line in text.splitlines() if line.strip()]


AS_WRITTEN = [
    "2 * 3 * 4, (a+b)*(c+d)*2",
    "snake_case_name, __init__.py, _private_, __all__ and _two words_, x_1 + y_2",
    "f(*args, **kwargs)",
    r"\( x \) and \(a*b*c*d\) and \[ x^* + y^* \] and $a*b c*d$ and $$ *x y* $$",
    "\\[\nx = a\n- b\n+ c \\\\\n# d\n\\]",
    "\\begin{align}\n- a &= b \\\\\n* c\n\\end{align}",
    "$$\n- a\n===\n$$",
    "where\n$$\n- a\n$$\nand so on",
    "costs $5 and not $10; $5/$6",
    "C:\\new\\file, a line\\ and another",
    "[a]: http://b.example",
    "<b>html</b> <https://a.example> <!-- no -->\n<div>",
    "#include <stdio.h>\n#1 of #2",
    "~/a ~ b ~c~",
    "one\ntwo\nthree\nfour",
    "**", "***a", "a***", "**a", "a*", "`", "``a`", "~~a", "[", "](", "\\", "|", "-5",
    "```", "```` a", "```python\n```",
]  # fmt: skip


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_text_that_is_not_markup(text):
    assert lines_of(shown(text)) == lines_of(text)
    assert lines_of(shown(f"words\n\n{text}")) == ["words", *lines_of(text)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("**bold** and *it is*, ***both of***", "<Bbold> and <Iit is>, <Cboth of>"),
        ("(**a**): *Titanic*'s **Note:** ~~not~~ 2*3*4", "(<Ba>): <ITitanic>'s <BNote:> <Snot> 2<I3>4"),
        ("**R**ead **__init__**", "<BR>ead <B__init__>"),
        ("这是**重要**的", "这是<B重要>的"),
        ("**It is `a*b` here**, `x**2`", "<BIt is ><Ca*b><B here>, <Cx**2>"),
        ('[here](http://a.example "t") ![i](j.png)', "<Chere> (<Chttp://a.example>) !<Ci> (<Cj.png>)"),
        ("`` a`b `` and `\\*`", "<Ca`b> and <C\\*>"),
        (r"\*not this\*, &lt;b&gt; &#27;[2J &#x202e;", "*not this*, <b> \ufffd[2J \ufffd"),
    ],
)  # fmt: skip
def test_inline_markup(text, expected):
    assert styled(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("- a\n- b\n\n  c\n* d", " • a\n • b\n   c\n\n • d"),
        ("3. a\n7. b\n10) c", " 3. a\n 7. b\n\n 10) c"),
        ("# Mean and median\n\nThe mean", "Mean and median\n\nThe mean"),
        ("2.", " 2."),
        ("-\n- ", " •\n •"),
        ("+", " •"),
        ("- - a", " •  • a"),
        ("- a\n  $$\n  - x\n  $$", " • a\n   $$\n   - x\n   $$"),
        ("> a\n> > b", "▌ a\n▌ ▌ b"),
        ("> \\[\n> - x\n> \\]", "▌ \\[\n▌ - x\n▌ \\]"),
        ("a\n---\nb\n\n---", "a\n\nb\n\n" + "─" * 199),
        ("```python x.py\na\n```", "  python x.py\n  a"),
        ("a\n\n```\n```\n\nb", "a\n\n```\n```\n\nb"),
        ("| a \\| b | c |\n|-|-|\n| 1 | 2 | 3 | 4 |\n| 5 |", "a | b   c\n─────────────────\n1       2 | 3 | 4\n5"),
    ],
)
def test_block_markup(text, expected):
    assert re.sub(r"(?m) +$", "", shown(text)) == expected


def test_tex_ends_at_blank_line():
    """If TeX could contain a blank line, a single delimiter would block the display of all later text."""
    for text in ("$$\n- a\n\n- b\n$$", "\\[\n- a\n\n- b\n\\]", "$$\n- a\n"):
        assert " • a" in shown(text)


MARKS = "*~`#>-|:+=\\"  # Markup characters. The renderer may replace them by • ▌ ─.
FRAGMENTS = [
    *"*_~`#>-+|:=$[](){}<>!/.,;'\"%^@ax1 \n\n ", "**", "***", "__", "~~", "``", "- ", "* ", "+ ", "1. ", "7) ", "> ",
    "# ", "## ", "\n\n", "\n- ", "\n> ", "\n    ", "```\n", "\n```\n", "~~~\n", "---\n", "| a | b |\n|---|---|\n",
    "| 1 | 2 |\n", "|x|y|z|\n", "\\(", "\\)", "\\[", "\\]", "$$", "\\*", "\\|", "\\begin{align}\n", "\n\\end{align}",
    "![", "[b]: c\n", "<b>", "a*b*c", "two words", "snake_case", "**bold**", "*it is*", "`code`", "é", "漢字", "😀",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


def letters(text):
    return [char for char in text if not char.isspace() and char not in MARKS + "•▌─"]


@settings(deadline=None, max_examples=400)
@given(TEXTS)
def test_all_text_is_shown(text):
    """All characters except markup are shown in order: letters, digits, brackets, underscores."""
    text = visible(text).replace("](", "] (")  # The renderer does not show the title of a link.
    text = re.sub(r"(?m)_(?=[ _]*$)", "_a", text)  # A row of underscores would be a horizontal rule.
    if "`" in text or "~" in text:  # The renderer does not show the language after a fence.
        text = re.sub(r"(?m)(```(?=[^\n`])|~~~(?=[^\n~]))", r"\1 . . ", text)
    assert letters(shown(text, width=10_000)) == letters(text)


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("columns", [1, 5, 30])
def test_all_table_cells_are_shown(width, columns):
    cells = [[f"r{row}c{column}" for column in range(columns)] for row in range(3)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    written = shown("\n".join([lines[0], "|" + "---|" * columns, *lines[1:]]), width=width)
    assert {word for row in cells for word in row} <= set(re.findall(r"r\d+c\d+", written))
    assert max(map(len, written.splitlines())) < width
