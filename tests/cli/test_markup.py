"""What of an answer is Markdown: nothing that the model wrote may vanish."""

import io
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tridecode.cli.chat.markdown import Painter
from tridecode.cli.terminal import visible


def shown(text, width=200, **options):
    """What a finished answer looks like."""
    console = Console(file=io.StringIO(), width=width, _environ={}, **options)
    painter = Painter(console)
    painter.frame(text, final=True)
    painter.close()
    return console.file.getvalue().rstrip("\n")


def styled(text):
    """The same with bold, italic, struck out and blue (code, addresses) as letters around the text."""
    text = shown(text, force_terminal=True, color_system="standard")
    text = re.sub(r"\x1b\[[\d;]*[hlJ]|\x1b\[\?25[hl]", "", text).rstrip()
    names = {"1": "B", "3": "I", "9": "S"}
    return re.sub(r"\x1b\[([\d;]+)m(.*?)\x1b\[0m", lambda m: f"<{names.get(m[1], 'C')}{m[2]}>", text)


def lines_of(text):
    return [line.rstrip() for line in text.splitlines() if line.strip()]


AS_WRITTEN = [
    "2*3*4 = 24",
    "2 * 3 * 4, 2 *3* 4, a *b* c, a*b*c, (a+b)*(c+d)*2",
    "2**3**4 and x **2 + y **2 and (2)**3 + (4)**2",
    "4 *x + 5* y",
    r"\[ a \, b \{1, 2\} \]",
    r"\( x \) and \(a*b*c*d\) and \[ x^* + y^* \] and $a*b c*d$ and $$ *x y* $$",
    "\\[\nx = a\n- b\n+ c \\\\\n# d\n\n\\]",
    "\\begin{align}\n- a &= b \\\\\n* c\n\\end{align}",
    "$$\n- a\n$$",
    "where\n$$\n- a\n$$\nand so on",
    r"C:\new\_file, \\server\*x*\y, \*not this\*, \# nor this, a\`b\`",
    "a line\\\nand another",
    "/usr/*/bin/*, src/**/*.py, *.py *.txt, ~/*.c */bin/*, a/*b c*/d",
    "'*' and '*', \"*.py\" or \"*.txt\", (*) and (*)",
    "snake_case_name, __init__.py, _private_, __all__ and _two words_, x_1 + y_2",
    "f(*args, **kwargs) and g(*args, **kwargs)",
    "char *a, *b; int *p",
    "f[i](x), a[0][1](2) and ![i](j.png) [see](http://a.example/*b*/_c_ \"t\") [1]",
    "[a]: http://b.example",
    "<b>html</b> <https://a.example> &amp; &#27; <!-- no -->",
    "costs $5 and not $10; $5/$6; US$5*2*3",
    "#include <stdio.h>\n#1 of #2",
    "# \n#\n##",
    ">>> print(1)\n>= 5\n> 5\n>5",
    "345\n+128\n----\n473",
    "a\n====",
    "___\n_ _ _",
    "~~~~~ The End ~~~~~",
    "~/a ~ b ~c~ ~~ d",
    "a | b\n--\nc",
    "one\ntwo\n  three\nfour",
    "**", "***a", "a***", "**a", "a*", "`", "``a`", "~~a", "[", "](", "\\", "|", "-5",
    "```", "```` a", "```python\n```",
]  # fmt: skip


@pytest.mark.parametrize("text", AS_WRITTEN)
def test_what_stays_as_written(text):
    assert lines_of(shown(text)) == lines_of(text)
    assert lines_of(shown(f"words\n\n{text}")) == ["words", *lines_of(text)]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("**bold** and *it is*, ***both of***", "<Bbold> and <Iit is>, <Cboth of>"),
        ("(**a**): *Titanic*'s **Note:** **42** **.NET** **-5**", "(<Ba>): <ITitanic>'s <BNote:> <B42> <B.NET> <B-5>"),
        ("**R**ead **T**he **F**ile", "<BR>ead <BT>he <BF>ile"),
        ("这是**重要**的，*非常*好", "这是<B重要>的，<I非常>好"),
        ("**yes**/**no** ~~not this~~ “*so it is*” —*or so*—", "<Byes>/<Bno> <Snot this> “<Iso it is>” —<Ior so>—"),
        ("**a *bb c* d** *e **f** gh*", "<Ba ><Cbb c><B d> <Ie ><Cf><I gh>"),
        ("**It is `a*b` here**, `x**2`", "<BIt is ><Ca*b><B here>, <Cx**2>"),
        ("[**here**](http://a.example)", "[<Bhere>](<Chttp://a.example>)"),
        ("`` a`b `` and `\\*`", "<Ca`b> and <C\\*>"),
    ],
)  # fmt: skip
def test_what_is_markup(text, expected):
    assert styled(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("- a\n- b\n\n  c\n* d", " • a\n • b\n   c\n\n • d"),
        ("3. a\n7. b\n10) c", " 3. a\n 7. b\n\n 10) c"),
        ("2.", " 2."),
        ("-\n- ", " -\n -"),
        ("345\n- 128\n-----\n217", "345\n\n - 128\n   -----\n   217"),
        ("12\n+ 30", "12\n\n + 30"),
        ("* 4\n* 5 apples", " * 4\n • 5 apples"),
        ("> a\n> > b", "▌ a\n▌ ▌ b"),
        ("a\n---\nb", "a\n\n" + "─" * 199 + "\n\nb"),
        ("```python x.py\na\n```", "  python x.py\n  a"),
        ("a\n\n```\n```\n\nb", "a\n\n```\n```\n\nb"),
        ("*", " *"),
        ("+", " +"),
        ("- - a", " •  • a"),
        ("| a \\| b | c |\n|-|-|\n| 1 | 2 | 3 | 4 |", "a \\| b   c\n──────────────────\n1        2 | 3 | 4"),
    ],
)
def test_how_blocks_look(text, expected):
    assert re.sub(r"(?m) +$", "", shown(text)) == expected


MARKS = "*~`#>-|:"  # what markup is made of; in their places come • ▌ ─
FRAGMENTS = [
    *"*_~`#>-+|:=$\\[](){}<>!&/.,;'\"%^@ax1 \n\n ", "**", "***", "__", "~~", "``", "- ", "* ", "+ ", "1. ", "7) ", "> ",
    "# ", "## ", "\n\n", "\n- ", "\n> ", "\n    ", "```\n", "\n```\n", "~~~\n", "---\n", "| a | b |\n|---|---|\n",
    "| 1 | 2 |\n", "|x|y|z|\n", "\\(", "\\)", "\\[", "\\]", "$$", "\\*", "\\|", "\\begin{a}\n", "\\end{a}",
    "[a](b)", "![", "[b]: c\n", "<b>", "&lt;", "http://a.b/c_d*e*f", "a*b*c", "two words", "snake_case", "**bold**",
    "*it is*", "`code`",
    "é", "漢字", "😀", "C:\\x\\_y", "/*/",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=30).map("".join)


def letters(text):
    return [char for char in text if not char.isspace() and char not in MARKS + "•▌─"]


@settings(deadline=None, max_examples=400)
@given(TEXTS)
def test_nothing_vanishes(text):
    """Each character but the marks is shown, in its order: letters, digits, backslashes, brackets, underscores."""
    text = visible(text)
    if "`" in text or "~" in text:  # the language after a fence is no text
        text = re.sub(r"(?m)(```(?=[^\n`])|~~~(?=[^\n~]))", r"\1 . . ", text)
    assert letters(shown(text, width=10_000)) == letters(text)


@settings(deadline=None, max_examples=100)
@given(st.text(st.sampled_from(MARKS + "_\\[]()$+= a1\n"), max_size=30))
def test_marks_alone_are_shown(text):
    """Something is there wherever something was written."""
    if "```" not in text and "~~~" not in text:
        assert bool(shown(text, width=10_000).strip()) == bool(text.strip())


@pytest.mark.parametrize("width", [20, 80])
@pytest.mark.parametrize("columns", [1, 5, 30])
def test_no_cell_of_a_table_vanishes(width, columns):
    cells = [[f"r{row}c{column}" for column in range(columns)] for row in range(3)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    written = shown("\n".join([lines[0], "|" + "---|" * columns, *lines[1:]]), width=width)
    assert {word for row in cells for word in row} <= set(re.findall(r"r\d+c\d+", written))
    assert max(map(len, written.splitlines())) < width
