"""Streaming Markdown: block boundaries, terminal output, and the frequency of rendering."""

import io
import re
import time
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from screens import screen

from tridecode.cli.chat import blocks, markdown
from tridecode.cli.chat.blocks import Block
from tridecode.cli.chat.markdown import MarkdownStream, Painter
from tridecode.cli.chat.markup import split

ANSWER = """\
# Title

Hello **world**: `code`, [/INST] [bold]x[/bold] <think> &amp; &#27; [link](http://a.example "t") ![image](u.png).
<div>

- a
- b

  more
  ```python
  def f(): return 1

  ```

12 apples

1. one
2. two

| name | size |
|:-----|-----:|
| [red]x[/] | 2 |
next

> quote

> other

```python title
def f(x):

    return "~~~"
```
~~~
```
~~~

    indented

    code

[a]: http://b.example

Head
----
***
the end"""
FRAGMENTS = [
    "a", "foo bar", "\n", "\n\n", "- ", "* ", "+ b\n", "1. ", "2) ", "12", "> ", "\n> ", "\n- ", "```", "~~~", "````",
    "``` py\n", " ", "    ", "\n    ", "\t", "|", "|a|b|\n|-|-|\n", "|x|\n", "--", "---", "===", "# ", "**", "_", "`",
    "[", "](", "http://x", ")", "![", "<b>", "<div>\n", "<!--", "<think>", "[/INST]", "[bold]", "[/]", "\\", "&#27;",
    "[a]: b\n", "$$", "\n$$\n", "\\[\n", "\n\\]\n", "\\begin{align}\n", "\n\\end{align}\n", "$",
    "é", "#", "=", ":", "\x1b[2J", "\x9b", "\r", "\r\n", "\x00", "\x07", "\ud800", "\U0001f600", "漢",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=25).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=10)


def split_at(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:])]


def console_to(terminal=False, width=80, height=24, **options):
    options = {"color_system": None, "_environ": {"TERM": "xterm"}} | options
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=height, **options)


def streamed(parts, console):
    """Return the output of a stream that draws a frame for each part, without a thread."""
    painter = Painter(console)
    for part in parts:
        painter.frame(part)
    painter.frame("", final=True)
    painter.close()
    return console.file.getvalue()


def blocks_of(text):
    return split(text, final=True)[0]


@pytest.fixture
def rendered(monkeypatch):
    """Record the sources of all rendered blocks."""
    sources = []
    render = Block.__rich_console__

    def counted(self, console, options):
        sources.append(self.markup)
        return render(self, console, options)

    monkeypatch.setattr(Block, "__rich_console__", counted)
    return sources


def test_split_finishes_blocks():
    blocks = blocks_of(ANSWER)
    assert [block.split("\n")[0][:12] for block in blocks] == [
        "# Title", "Hello **worl", "- a", "12 apples", "1. one", "| name | siz", "> quote", "> other", "```python ti",
        "~~~", "    indented", "[a]: http://", "Head", "***", "the end",
    ]  # fmt: skip
    assert blocks[2].endswith("\n  ```") and blocks[5].endswith("\nnext") and blocks[9] == "~~~\n```\n~~~"
    assert blocks[8].endswith('\n    return "~~~"\n```') and blocks[10].endswith("\n    code")


UNFINISHED = {  # text: its unfinished rest, which the renderer keeps
    "a\n": "a\n",
    "a\n\n": "",
    "a\n\nb": "b",
    "# a\n": "",
    "# a|b\n": "# a|b\n",  # This line is the head of a table if |-|-| follows.
    "```\na\n\nb\n": "```\na\n\nb\n",
    "```\na\n```\n": "",
    "~~~ x\n```\n": "~~~ x\n```\n",
    "- a\n\n": "- a\n\n",
    "- a\n\n-": "- a\n\n-",
    "- a\n\nb": "b",
    "- a\n\n  b": "- a\n\n  b",
    "1. a\n\n2": "1. a\n\n2",
    "> a\n": "> a\n",
    "> a\n\n": "",
    "|a|\n|-|\n|b|\n": "|a|\n|-|\n|b|\n",
    "|a|\n|-|\n|b|\n\n": "",
    "    a\n\n": "    a\n\n",
    "    a\n\nb": "b",
    "\n \n": "\n \n",
}


def test_split_keeps_unfinished_rest():
    for text, rest in UNFINISHED.items():
        assert split(text)[1].strip("\n") == rest.strip("\n"), text


@settings(deadline=None, max_examples=250)
@given(TEXTS, CUTS)
def test_incremental_split_matches_full_parse(text, cuts):
    text = markdown.visible(text)
    got = []
    for parts in (split_at(text, cuts), text):
        rest = ""
        for part in parts:
            blocks, rest, _ = split(rest + part)
            got += blocks
        got += blocks_of(rest)
        assert got == blocks_of(text)
        got.clear()


@settings(deadline=None, max_examples=60)
@given(TEXTS, CUTS)
@example("aaaa\r\n# aaaaaaaaa😀a", [55])  # The row is centered and contains a character that is two columns wide.
@example(ANSWER, [])
@example(ANSWER, [*range(0, 1000, 7)])
def test_streamed_screen_matches_full_render(text, cuts):
    text = markdown.visible(text.replace("\ud800", "?"))
    at_once = screen(streamed([text], console_to()))
    console = console_to(terminal=True, height=1000)
    written = streamed(split_at(text, cuts), console)
    assert screen(written) == at_once
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h"), "the cursor stayed hidden"


@settings(deadline=None, max_examples=60)
@given(TEXTS, CUTS)
def test_control_sequences_are_replaced(text, cuts):
    for terminal in (False, True):
        console = console_to(terminal)
        stream = MarkdownStream(console)
        for part in split_at(text, cuts):
            stream.push(part)
        stream.finish()
        written = console.file.getvalue()
        ours = r"\x1b\[(\?25[lh]|J|\d+[AD])|\r" if terminal else "(?!)"
        left = re.sub(ours, "", written)
        assert not [c for c in left if unicodedata.category(c) in ("Cc", "Cs") and c != "\n"]


def test_rendered_answer():
    shown = screen(streamed([ANSWER], console_to(width=130)))
    for part in (
        "Hello world: code, [/INST] [bold]x[/bold] <think> & \ufffd link (http://a.example) !image (u.png).\n<div>\n",
        "\n\n • a\n • b\n   more\n     def f(): return 1\n\n12 apples\n\n 1. one\n 2. two\n\n",
        "\nname        size\n────────────────\n[red]x[/]      2\nnext\n",
        '▌ quote\n\n▌ other\n\n  python title\n  def f(x):\n\n      return "~~~"\n\n  ```\n\n',
        "\n\n  indented\n\n  code\n\n[a]: http://b.example\n\nHead\n\n─",
    ):
        assert part in shown
    assert shown.endswith("\n\nthe end")


def test_code_is_highlighted():
    for language, colors in (("python", True), ("no-such-language", False), ("", False), ("{.python}", False)):
        console = console_to(terminal=True, color_system="truecolor")
        written = streamed([f"```{language}\nreturn 1\n```"], console)
        assert bool(re.search(r"\x1b\[[\d;]*m\s*return", written)) == colors
        assert "return" in written


@pytest.mark.parametrize("space", ["\u3000", "\xa0", "\u2028", "\u200b", "    ", "\t"])
def test_whitespace_blocks(space):
    for text in (f"a\n\n{space}\n\nb", f"{space}\n\n```\na\n```\n\nb", f"{space}\n"):
        at_once = screen(streamed([text], console_to()))
        assert "".join(at_once.split()).replace("\u200b", "") == ("" if text == f"{space}\n" else "ab")
        assert screen(streamed(text, console_to(terminal=True))) == at_once


@pytest.mark.parametrize("text", [">" * 200 + " deep", "- " * 200 + "deep", "[" * 3000 + "deep", "**" * 3000 + "deep"])
def test_deep_nesting_is_shown_as_text(text):
    assert "".join(text.split()) == "".join(streamed([text], console_to()).split())


@pytest.mark.parametrize("end", ["finish", "abort"])
@pytest.mark.parametrize("text, shown", [("", ""), (" ", ""), ("\n\n", ""), ("Half **a sen", "Half **a sen")])
def test_text_after_the_end_is_ignored(text, shown, end):
    console = console_to(terminal=True)
    stream = MarkdownStream(console)
    if text:
        stream.push(text)
    for _ in range(2):
        getattr(stream, end)()
    stream.push("too late")
    stream.abort()
    time.sleep(2 * markdown.FRAME)
    assert screen(console.file.getvalue()) == shown and (shown or console.file.getvalue() == "")


def long_answer():
    """Return about 4,000 words with every kind of block."""
    part = ANSWER.replace("the end", "words and more words, " * 12)
    return "\n\n".join([part] * 36)


def test_only_unfinished_block_is_rerendered(rendered):
    text = long_answer()
    assert len(text.split()) > 4000
    blocks = blocks_of(text)
    written = streamed([text[i : i + 25] for i in range(0, len(text), 25)], console_to(terminal=True))
    assert max(map(len, rendered)) <= max(map(len, blocks)) + 50
    assert len(rendered) <= len(blocks) + -(-len(text) // 25) + 1
    assert len(written) < 1.5 * len(streamed([text], console_to())), "finished blocks were written again"


def test_long_code_block_is_highlighted_in_parts(rendered):
    painter = Painter(console_to(terminal=True))
    lines = [f"x{i} = 1\n" + "\n" * (i % 10 == 0) for i in range(2 * markdown.LONG_CODE)]
    for line in ("```python\n", *lines):
        painter.frame(line)
    assert max(source.count("\n") for source in rendered) <= markdown.LONG_CODE + 15
    painter.frame("```\n\ny\n\nz")
    painter.frame("", final=True)
    painter.close()
    assert screen(painter.console.file.getvalue()).split() == [*"".join(lines).split(), "y", "z"]


def test_at_most_30_frames_a_second(rendered):
    console = console_to(terminal=True)
    stream = MarkdownStream(console)
    started = time.perf_counter()
    for _ in range(400):
        stream.push("word ")
        time.sleep(0.0005)
    stream.finish()
    assert 2 <= len(rendered) <= (time.perf_counter() - started) * 30 + 2
    assert screen(console.file.getvalue()).count("word") == 400


def test_paused_stream_does_not_draw():
    console = console_to(terminal=True)
    out = console.file
    stream = MarkdownStream(console)
    stream.push("one ")
    time.sleep(3 * markdown.FRAME)
    stream.pause()
    left = out.getvalue()
    stream.push("two ")
    time.sleep(3 * markdown.FRAME)
    assert out.getvalue() == left and left.endswith("\x1b[?25h")
    stream.resume()
    stream.push("three")
    stream.finish()
    assert screen(out.getvalue()).split() == ["one", "two", "three"]


def test_list_marker_is_not_shown_as_heading():
    console = console_to(terminal=True, color_system="standard")
    written = streamed(["Three rivers:", "\n-", " Nile\n", "-", " Rhine"], console)
    assert written.count("rivers") == 1 and written.count("Rhine") == 1


@pytest.mark.parametrize("error", [OSError("input/output error"), BrokenPipeError("gone")])
@pytest.mark.parametrize("wait", [0, 0.1])
def test_closed_terminal(monkeypatch, error, wait):
    """`finish` raises and `abort` does not; neither hangs or exits, whether the thread or the caller gets the error."""
    # Otherwise rich would redirect stdout of this process to the null device.
    monkeypatch.setattr("os.dup2", lambda *args: None)

    def write(text):
        raise error

    for end in ("finish", "abort"):
        console = console_to(terminal=True)
        monkeypatch.setattr(console.file, "write", write)
        stream = MarkdownStream(console)
        stream.push("text\n\nmore")
        time.sleep(wait)
        if end == "finish":
            with pytest.raises(type(error)):
                stream.finish()
        else:
            stream.abort()


def test_render_error_shows_source(monkeypatch):
    def broken(source):
        raise RuntimeError("a bug of the renderer")

    monkeypatch.setattr(blocks.PARSER, "parse", broken)
    assert streamed(["*a* [b]", "\n\nc"], console_to()) == "*a* [b]\n\nc\n"
