"""The line editor: drafts, tall messages, what is no key, and what happens where it fails."""

import io
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import import_module
from types import SimpleNamespace

import pytest
from chats import READY, ROOT, leaves
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.keys import Keys
from prompt_toolkit.output import DummyOutput

from tridecode.cli import terminal as terminals
from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.keyboard import Keyboard
from tridecode.cli.chat.lines import Interrupted, PlainReader
from tridecode.cli.chat.sequences import Parser
from tridecode.cli.terminal import Output

UP, PASTE, PASTE_END = "\x1b[A", "\x1b[200~", "\x1b[201~"


def press(child, keys: str, until: str) -> None:
    child.send(keys)
    child.expect_exact(until)


def test_only_an_empty_line_and_two_interrupts_in_a_row_leave(terminal, state):
    child = terminal("--max-tokens", 2, "--temperature", 0)
    for draft in ("one draft", "two\x1b\rdrafts", "three"):
        press(child, draft, draft[-1])
        child.sendintr()
        child.expect_exact("Up brings it back")
        child.expect_exact(READY)
    press(child, "x", "x")
    press(child, "\x7f", "\x1b[K")
    child.sendintr()
    child.expect_exact("Ctrl-C again, or Ctrl-D, leaves")
    child.expect_exact(READY)
    press(child, "y", "y")
    press(child, "\x7f", "\x1b[K")
    child.sendintr()
    child.expect_exact("Ctrl-C again, or Ctrl-D, leaves")
    child.expect_exact(READY)
    press(child, UP, "three")
    press(child, UP + UP, "drafts")
    press(child, "\r", "context ")
    child.expect_exact(READY)
    child.sendintr()
    child.expect_exact("leaves")
    child.expect_exact(READY)
    child.sendintr()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["two\ndrafts"]
    kept = (state / "history").read_text()
    assert "drafts" in kept and "one draft" not in kept and "three" not in kept, "what was not sent is not written"


TALL = {
    "100 lines": "\n".join(f"<{n:03}> of the paste" for n in range(100)),
    "500 words": " ".join(f"<{n:03}>" for n in range(500)),
}


def test_enter_takes_what_a_search_found(terminal, state):
    child = terminal()
    for keys, shown in (("/set top_k 7\r", "k is 7"), ("/plain on\r", "plain text"), ("\x12top_k\r\r", "k is 7")):
        press(child, keys, shown)
        child.expect_exact(READY)
    child.send("/set seed 4\x1b\n\x7f5\r")  # a new line as it comes from a line that nobody edits, and back
    child.expect_exact("seed is 45")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)


def test_what_is_typed_while_a_model_loads_is_for_the_editor(monkeypatch):
    """So a paste stays one text, and none of its lines is a command."""
    changed, output = [], Output()
    monkeypatch.setattr(terminals, "_echo", lambda on, editor: changed.append((on, editor)))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    output.errors = terminals.Console(force_terminal=True, file=io.StringIO())
    output.editor = True
    with output.loading():
        assert changed == [(False, True)]
    assert changed == [(False, True), (True, True)]


@pytest.mark.parametrize("command, expected", [("chat", [(False, True), (True, True)]), ("generate", [])])
def test_what_is_typed_while_the_program_starts_is_for_the_editor(monkeypatch, command, expected):
    """While the imports take their time: before the chat is told of."""
    changed, seen, output = [], [], Output()
    program = import_module("tridecode.cli.main")
    monkeypatch.setattr(terminals, "_echo", lambda on, editor: changed.append((on, editor)))
    monkeypatch.setattr(program, "imported", lambda name: seen.extend(changed) or (lambda args, output: 7))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    output.tty = True
    assert program.run(SimpleNamespace(command=command), output) == 7
    assert seen == expected[:1] and changed == expected


def test_a_message_taller_than_the_window_is_printed_whole(terminal):
    text = "\n".join(f"<{n:03}> {'x' * 60}" for n in range(230))
    child = terminal("--max-tokens", 2, "--max-seq-len", 200, COLUMNS="")
    child.setwinsize(24, 80)
    child.send(PASTE + text.replace("\n", "\r") + PASTE_END)
    child.expect_exact(text[-12:])
    child.send("\r")
    child.expect_exact("holds 200")
    child.expect_exact(READY)
    shown = re.sub(r"\x1b\[[\d;]*m", "", child.screen.getvalue())
    printed = shown.rpartition("> <000>")[2].partition("\x1b")[0]
    assert printed.replace("\r\n… ", "\n").strip() == text[5:].strip()
    child.sendeof()
    leaves(child)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="there is no tmux here")
@pytest.mark.parametrize("text", TALL.values(), ids=TALL)
def test_a_message_taller_than_the_window_is_in_the_scrollback_once(state, tmp_path, text):
    def tmux(*words, **options):
        program = ["tmux", "-S", tmp_path / "tmux", "-f", "/dev/null", *words]
        return subprocess.run(program, capture_output=True, text=True, **options).stdout

    def until(words):
        end = time.monotonic() + 30
        while not re.search(words, shown := tmux("capture-pane", "-p", "-J", "-S", "-")):
            assert time.monotonic() < end, shown
            time.sleep(0.05)
        return shown

    chat = f"{sys.executable} cli.py chat --device cpu --max-tokens 2 --max-seq-len 200; sleep 60"
    tmux("new-session", "-d", "-x", "80", "-y", "24", f"XDG_STATE_HOME={state.parent} {chat}", cwd=ROOT)
    try:
        until("lists the commands\n>")
        tmux("load-buffer", "-", input=text)
        tmux("paste-buffer", "-p")
        until(text[-5:])
        tmux("send-keys", "Enter")
        shown = until(r"context\s+holds\s+200")
    finally:
        tmux("kill-server")
    assert re.findall(r"<\d{3}>", shown) == re.findall(r"<\d{3}>", text)


def keys_of(*chunks: str) -> list:
    """What the editor gets, one entry a key; a lone Escape is one once nothing follows it."""
    found = []
    parser = Parser(lambda press: found.append((press.key, press.data)))
    for chunk in chunks:
        parser.feed(chunk)
    parser.flush()
    return [data if len(key) == 1 else key for key, data in found]


DROPPED = {
    "colour": "\x1b[31m",
    "cursor": "\x1b[999;999H",
    "mouse": "\x1b[<0;10;5M",
    "old mouse": "\x1b[M !!",
    "urxvt mouse": "\x1b[32;10;5M",
    "position": "\x1b[12;40R",
    "attributes": "\x1b[?1;2c",
    "focus": "\x1b[I\x1b[O",
    "title": "\x1b]0;a title\x07",
    "background": "\x1b]11;rgb:ffff/ffff/ffff\x1b\\",
    "DCS": "\x1bP1$r0m\x1b\\",
    "graphics": "\x1b_Gi=1;OK\x1b\\",
    "SS3": "\x1bOZ",
}


@pytest.mark.parametrize("sequence", DROPPED.values(), ids=DROPPED)
def test_sequences_that_are_no_keys_are_dropped(sequence):
    typed = f"a{sequence}b"
    assert keys_of(typed) == keys_of(*typed) == ["a", "b"]
    for at in range(len(typed)):
        assert keys_of(typed[:at], typed[at:]) == ["a", "b"]


@pytest.mark.parametrize(
    "typed, keys",
    [
        (UP, [Keys.Up]),
        ("\x1bOA", [Keys.Up]),
        ("\x1b[[A", [Keys.F1]),
        ("\x1b\r", [Keys.Escape, Keys.ControlM]),
        ("\x1b", [Keys.Escape]),
        ("\x1b\x1b[A", [Keys.Escape, Keys.Up]),
        ("\x1b]ab", [Keys.Escape, "]", "a", "b"]),
        ("\x1bPx", [Keys.Escape, "P", "x"]),
        ("\x1b[31", [Keys.Escape, "[", "3", "1"]),
        ("é\x1b[31m日", ["é", "日"]),
        (f"a{PASTE}x\x1b[31m\x1b[{PASTE_END}b", ["a", Keys.BracketedPaste, "b"]),
    ],
)
def test_keys_stay_keys(typed, keys):
    assert keys_of(typed) == keys_of(*typed) == keys


def test_a_paste_stays_as_it_is():
    found = []
    for chunks in ([f"{PASTE}x\x1b[31m\x1b[20{PASTE_END}"], [*f"{PASTE}x\x1b[31m\x1b[20{PASTE_END}"]):
        parser = Parser(lambda press: found.append(press.data))
        for chunk in chunks:
            parser.feed(chunk)
    assert found == ["x\x1b[31m\x1b[20"] * 2


def test_a_sequence_without_end_costs_little():
    began = time.monotonic()
    assert len(keys_of(*["\x1b]0;"], *["x" * 100] * 1000)) == 100_004
    assert time.monotonic() - began < 3


def test_sequences_at_the_prompt(terminal, state):
    child = terminal("--max-tokens", 2, "--temperature", 0)
    child.send("hel" + "".join(DROPPED.values()) + "lo\r")
    child.expect_exact("context ")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["hello"]


@pytest.mark.parametrize("ahead", ["", "x"])
def test_an_end_that_is_typed_before_the_prompt_is_no_less_one(monkeypatch, state, ahead):
    """The kernel keeps it as NUL; typed at the prompt that is Ctrl-Space, which leaves nothing."""
    terminal, program = os.openpty()
    with open(terminal, "r+b", buffering=0), open(program) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        keyboard = Keyboard(lambda typed: (0, []), Output(), screen=DummyOutput())
        if ahead:
            os.write(terminal, f"{ahead}\n".encode())
            assert keyboard.read() == ahead
        os.write(terminal, b"\x04")
        with pytest.raises(EOFError):
            keyboard.read()
        typed = [b"\0y\r"]
        keyboard.session.app.after_render += lambda app: typed and os.write(terminal, typed.pop())
        assert keyboard.read() == "y"


@pytest.mark.parametrize("where", ["key", "drawing"])
def test_an_editor_that_fails_is_replaced_by_plain_input(monkeypatch, capsys, state, where):
    drafts = []
    monkeypatch.setattr(PlainReader, "read", lambda reader, draft: drafts.append(draft) or "again")

    def fail(*args):
        raise ValueError("no such\ncolour")

    with create_pipe_input() as keys:
        keyboard = Keyboard((), Output(), keys, DummyOutput())
        if where == "key":
            keyboard.session.key_bindings.add("x")(fail)
        else:
            monkeypatch.setattr(keyboard.session.app.renderer, "render", fail)
        keys.send_text("a draft x\r")
        assert keyboard.read() == keyboard.read() == "again"
    out, err = capsys.readouterr()
    assert err == "the line editor failed (ValueError: no such colour); plain line input from here\n"
    assert out == "" and drafts == ["a draft " if where == "key" else "", ""]


@pytest.mark.parametrize("lines, left, draft", [([], "half", "half"), (['"""', "one"], "two", '"""\none\ntwo')])
def test_plain_input_tells_a_draft_from_an_empty_line(monkeypatch, lines, left, draft):
    typed = iter(lines)

    def interrupted(prompt):
        for line in typed:
            return line
        raise KeyboardInterrupt

    reader, history = PlainReader(), []
    reader._readline = SimpleNamespace(get_line_buffer=lambda: left, add_history=history.append)
    monkeypatch.setattr("builtins.input", interrupted)
    with pytest.raises(Interrupted) as pressed:
        reader.read()
    assert pressed.value.draft == draft and pressed.value.typed and history == [left]
    left = ""
    with pytest.raises(Interrupted) as pressed:
        reader.read()
    assert not pressed.value.typed


def test_the_message_is_opened_in_an_editor(terminal, state, tmp_path):
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\nprintf \'%s\' "$(cat "$1") by hand" > "$1"\n')
    editor.chmod(0o755)
    child = terminal("--max-tokens", 2, "--temperature", 0, EDITOR=str(editor), VISUAL="")
    press(child, "written", "written")
    press(child, "\x18\x05", "by hand")  # what is saved there is the message, without Enter
    child.expect_exact("context ")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["written by hand"]


UNREADABLE = [("printf 'caf\\351' > $1", "can't decode byte 0xe9"), ("rm $1", "No such file")]


@pytest.mark.parametrize("script, why", UNREADABLE)
def test_what_an_editor_leaves_may_be_no_text(terminal, state, tmp_path, script, why):
    editor = tmp_path / "editor"
    editor.write_text(f"#!/bin/sh\n{script}\n")
    editor.chmod(0o755)
    child = terminal("--max-tokens", 2, "--temperature", 0, EDITOR=str(editor), VISUAL="")
    press(child, "written", "written")
    press(child, "\x18\x05", "what the editor left could not be read")
    child.expect_exact(why)
    child.expect_exact("the message is as it was")
    press(child, " here", "here")
    press(child, "\r", "context ")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["written here"]
