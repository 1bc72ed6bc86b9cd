"""Terminal output: wrapping, indentation and colors."""

import io
import os
import re
import shlex
import sys

import pytest
from chats import ENVIRONMENT, READY, ROOT, enter, leave
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tridecode.cli.chat.display import Display, PlainText, open_sink
from tridecode.cli.chat.slash import COMMANDS
from tridecode.cli.outputs import writer
from tridecode.cli.terminal import Output
from tridecode.cli.wrapping import Wrapped
from tridecode.text.thinking import ThinkSplitter

pexpect = pytest.importorskip("pexpect")

COLOR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|38|48)[;\dm]")


def wrapped(text: str, width: int, size: int = 3) -> str:
    """Return the output for a text that arrives in parts of `size` characters."""
    console, written = Console(file=io.StringIO(), width=width, _environ={}), []
    write = Wrapped(console, written.append)
    for at in range(0, len(text), size):
        write(text[at : at + size])
    write("\n")
    return "".join(written).removesuffix("\n")


WRAPPED = {
    "words": ("one two three four", 10, "one two\nthree\nfour"),
    "paragraphs": ("one two\n\nthree four five", 12, "one two\n\nthree four\nfive"),
    "inner spaces are kept": ("a  b   c", 20, "a  b   c"),
    "spaces before a break are dropped": ("abcdef   ghi", 8, "abcdef\nghi"),
    "indented line": ("   one two three", 12, "   one two\n   three"),
    "bullet": ("- one two three four", 13, "- one two\n  three four"),
    "numbered item": ("12. one two three", 12, "12. one two\n    three"),
    "negative number is not a bullet": ("-5 one two three", 12, "-5 one two\nthree"),
    "long word": (
        "see https://example.org/a/long/path\nnow",
        12,
        "see\nhttps://example.org/a/long/path\nnow",
    ),
    "code": ("```\nx = one + two + three\n```\none two three", 12, "```\nx = one + two + three\n```\none two\nthree"),
    "Chinese": ("你好世界你好", 9, "你好世界\n你好"),
    "deep indents": (" " * 30 + "one two three", 20, " " * 30 + "one\ntwo three"),
    "nothing": ("", 10, ""),
}


@pytest.mark.parametrize("text, width, shown", WRAPPED.values(), ids=WRAPPED)
def test_lines_wrap_between_words(text, width, shown):
    assert [wrapped(text, width, size) for size in (1, 3, 100)] == [shown] * 3


@given(st.text(st.sampled_from("ab \n-1.`你\t"), max_size=60), st.integers(1, 30), st.integers(1, 9))
def test_wrapping_keeps_all_text(text, width, size):
    shown = wrapped(text, width, size)
    assert re.sub(r"\s", "", shown) == re.sub(r"\s", "", text)
    if "```" not in text and "\t" not in text:
        for line in shown.split("\n"):
            assert cell_len(line) < max(width, 2) or len(line.split()) <= 1, (
                "a line with several words exceeds the width"
            )


def test_word_is_written_when_complete():
    console, written = Console(file=io.StringIO(), width=40, _environ={}), []
    write = Wrapped(console, written.append)
    for piece in ("Hel", "lo wor", "ld", "!\n"):
        write(piece)
    assert written == ["Hello", " world!\n"]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_help_fits_the_window_and_is_not_dim(session, width):
    chat, stream = session(), io.StringIO()
    chat.output = Output()
    chat.output.errors = Console(file=stream, force_terminal=True, width=width, _environ={"TERM": "xterm"})
    chat.output.wraps = True
    assert chat.handle("/help")
    shown = stream.getvalue()
    assert "\x1b[2m" not in shown and "\x1b[1mKeys\x1b[0m" in shown
    lines = re.sub(r"\x1b\[[\d;]*m", "", shown).splitlines()
    assert max(map(len, lines)) < width
    assert all(
        any(line.startswith(f"  {name}") for line in lines) for name in COMMANDS if name not in ("/think", "/adapter")
    )
    (at,) = [i for i, line in enumerate(lines) if line.startswith("  /history")]
    if width == 40:
        assert lines[at : at + 3] == ["  /history [N]", "    show the conversation, or its last", "    N turns"]
    else:
        assert lines[at] == "  /history [N]          show the conversation, or its last N turns"


def test_turns_are_visually_separated(terminal):
    child = terminal("--temperature", 0)
    enter(child, "Hello\r", "tok/s")
    enter(child, "/set seed\r", "needs a value")
    enter(child, "Thanks, bye!\r", "tok/s")
    leave(child)
    shown = child.screen.getvalue()
    assert "\x1b[36m> Hello\x1b[0m" in shown and "\x1b[36m> Thanks, bye!\x1b[0m" in shown, (
        "the messages of the user are not colored"
    )
    screen = pyte_lines(shown)
    starts = [i for i, line in enumerate(screen) if line.startswith("> ")]
    assert len(starts) >= 3 and all(screen[i - 1] == "" for i in starts[1:]) and screen[starts[0] - 1] != ""


def pyte_lines(written: str) -> list[str]:
    """Return the final lines of a terminal."""
    pyte = pytest.importorskip("pyte")
    screen = pyte.HistoryScreen(200, 50, history=1000)
    pyte.Stream(screen).feed(written)
    return [line.rstrip() for line in screen.display]


def test_no_color_variable(terminal):
    child = terminal("--temperature", 0, NO_COLOR="1")
    enter(child, "Hello\r", "tok/s")
    enter(child, "/nothing\r", "there is no command")
    leave(child)
    assert "tridecode: error" not in child.screen.getvalue(), "an error in a terminal has the prefix of a pipe"
    assert not COLOR.search(child.screen.getvalue())


def test_plain_never_rewrites_text(terminal, endless):
    """With --plain no text is written twice: answers, messages, or the progress of a prompt."""
    child = terminal("--plain", "--model", endless, "--max-tokens", 40, "--seed", 3, "--max-seq-len", 60_000)
    before = len(child.screen.getvalue())
    enter(child, "Hello there\r", "tok/s")
    shown = child.screen.getvalue()[before:]
    assert "\x1b[36m> Hello there" not in shown, "the typed message was printed a second time"
    answer = shown.partition("2004h")[2].partition("\x1b[2m")[0]
    assert answer.strip() and "\x1b" not in answer and "\r" not in answer.replace("\r\n", "")
    child.send("\x1b[200~" + "word " * 2500 + "\x1b[201~\r")
    child.expect_exact("reading a prompt of ")
    child.expect_exact("tok/s")
    child.expect_exact(READY)
    leave(child)
    assert "\x1b[G" not in child.screen.getvalue() and "loading \x1b" not in child.screen.getvalue()


def test_plain_text_wraps_only_in_terminal(terminal, piped):
    child = terminal("--plain", "--temperature", 0, COLUMNS="")
    child.setwinsize(50, 40)
    enter(child, "How do I make a cup of tea?\r", "tok/s")
    leave(child)
    answer = child.screen.getvalue().rpartition("2004hB")[2].partition("\x1b")[0].split("\r\n")[:-1]
    assert len(answer) > 2 and max(map(len, answer)) < 40 and min(map(len, answer[:-1])) > 25, answer
    whole = piped("How do I make a cup of tea?\n", "--temperature", "0")[1]
    assert whole == "B" + " ".join(answer) + "\n"


def test_generate_wraps_in_terminal(state):
    options = ["--device", "cpu", "--quiet", "--temperature", "0", "--prompt", "How do I make a cup of tea?"]
    program = ["cli.py", "generate", *options]
    environment = ENVIRONMENT | {"COLUMNS": "40"}
    child = pexpect.spawn(sys.executable, program, cwd=str(ROOT), env=environment, encoding="utf-8", timeout=30)
    child.expect(pexpect.EOF)
    lines = child.before.split("\r\n")
    assert len(lines) > 3 and max(map(len, lines)) < 40


def test_line_break_in_two_parts_shows_no_mark(capsys):
    output = Output()
    output.tty, output.console = True, Console(force_terminal=True, color_system=None, width=40, _environ={})
    markdown = open_sink(output, plain=False)
    for write in (output.text, output.dim, open_sink(output, plain=True).push, markdown.push):
        for part in ("one", "\r", "\n", "\r", "\n\r", "\ntwo\r", "\n", "three\rfour", "\n"):
            write(part)
        if write == markdown.push:
            markdown.finish()
        assert re.findall("\\w*␍\\w*", capsys.readouterr().out) == ["three␍four"]
    leader, follower = os.openpty()
    with open(follower, "w") as terminal:
        write = writer(terminal, "name", flush=True)
        for part in ("a\r", "\nb", "\r", "c\n"):
            write(part)
        wanted, read = "a\r\nb␍c\r\n".encode(), b""
        while len(read) < len(wanted):
            read += os.read(leader, 100)
        assert read == wanted
    os.close(leader)


def on_terminal(*argv, columns: int, stdout: str = "") -> str:
    """Return what a command shows in a terminal, as text. `stdout` is a redirection."""
    words = " ".join(map(shlex.quote, (sys.executable, "-m", "tridecode", *argv)))
    environment = ENVIRONMENT | {"COLUMNS": ""}
    child = pexpect.spawn(
        "sh", ["-c", words + stdout], env=environment, encoding="utf-8", timeout=60, dimensions=(24, columns)
    )
    child.expect(pexpect.EOF)
    return re.sub(r"\x1b\[[\d;]*m", "", child.before).replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [40, 80])
def test_first_screens_wrap_between_words(columns):
    for argv in (["generate", "--max-tokens", "x"], ["chat", "--no-such-option"], ["chat", "--help"], ["--help"]):
        shown = on_terminal(*argv, columns=columns)
        words = on_terminal(*argv, columns=1000).split()
        lines = shown.splitlines()
        prose = [line for line in lines if not re.match(r"\s*[-[]", line)]  # Names of options are not broken.
        assert all(len(line) <= columns for line in prose), shown
        assert set(shown.split()) <= set(words) | {"..."}, "a word is broken"


def test_chat_with_redirected_stdout_shows_prompt_mark(state):
    words = f"{sys.executable} -m tridecode chat --device cpu --max-tokens 2 > {state.parent}.log"
    child = pexpect.spawn("sh", ["-c", words], env=ENVIRONMENT, encoding="utf-8", timeout=60)
    child.expect_exact("\n> ")
    child.send("hi\n")
    child.expect_exact("tok/s")
    child.expect_exact("\n> ")
    child.sendeof()
    child.expect(pexpect.EOF)


@pytest.mark.parametrize("kind", ["thinking", "plain"])
def test_text_continues_at_the_left_edge_after_ctrl_z(kind):
    output, written = Output(), []
    output.tty, output.console = True, Console(file=io.StringIO(), width=20, _environ={})
    output.text = output.dim = written.append
    sink = PlainText(output)
    shown = Display(output, sink, ThinkSplitter(kind == "thinking"), hide=False, tags=False)
    shown.push("one two three f")
    shown.pause(), written.clear(), shown.resume()
    shown.push("our five six seven eight nine ")
    assert "".join(written).startswith("four five six seven\neight")


def test_report_of_info_wraps_between_words(run, monkeypatch):
    monkeypatch.setattr(Output, "tty", property(lambda self: True, lambda self, value: None), raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    _, narrow, _ = run("info", "--device", "cpu")
    monkeypatch.setenv("COLUMNS", "500")
    _, wide, _ = run("info", "--device", "cpu")
    assert max(map(len, narrow.splitlines())) <= 40 and narrow.count("\n") > wide.count("\n")
    assert narrow.split()[:20] == wide.split()[:20] and "\n             " in narrow
