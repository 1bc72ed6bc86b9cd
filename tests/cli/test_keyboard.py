"""The line editor: drafts, tall messages, the external editor, and failures."""

import io
import re
import shutil
import subprocess
import sys
import time

import pytest
from chats import READY, ROOT, enter, leave, leaves
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.keyboard import Keyboard, Screen
from tridecode.cli.chat.lines import PlainReader
from tridecode.cli.terminal import Output

UP, PASTE, PASTE_END = "\x1b[A", "\x1b[200~", "\x1b[201~"


def press(child, keys: str, until: str) -> None:
    child.send(keys)
    child.expect_exact(until)


def test_only_two_interrupts_on_empty_line_leave(terminal, state):
    child = terminal("--max-tokens", 2, "--temperature", 0)
    for draft in ("one draft", "two\x1b\rdrafts", "three"):
        press(child, draft, draft[-1])
        child.sendintr()
        child.expect_exact("Up restores it")
        child.expect_exact(READY)
    press(child, "x", "x")
    press(child, "\x7f", "\x1b[K")
    child.sendintr()
    child.expect_exact("press Ctrl-C again, or Ctrl-D, to leave")
    child.expect_exact(READY)
    press(child, "y", "y")
    press(child, "\x7f", "\x1b[K")
    child.sendintr()
    child.expect_exact("press Ctrl-C again, or Ctrl-D, to leave")
    child.expect_exact(READY)
    press(child, UP, "three")
    press(child, UP + UP, "drafts")
    enter(child, "\r", "context ")
    child.sendintr()
    child.expect_exact("to leave")
    child.expect_exact(READY)
    child.sendintr()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["two\ndrafts"]
    kept = (state / "history").read_text()
    assert "drafts" in kept and "one draft" not in kept and "three" not in kept, (
        "the history contains unsent input, or lacks sent input"
    )


def test_search_results_and_tall_messages(terminal):
    child = terminal("--max-tokens", 2, "--max-seq-len", 200, COLUMNS="")
    for keys, shown in (("/set top_k 7\r", "k is 7"), ("/set top_p 1\r", "p is 1"), ("\x12top_k\r\r", "k is 7")):
        press(child, keys, shown)
        child.expect_exact(READY)
    # If a newline is typed during an answer, it arrives as ESC and LF. The test types a newline, then Backspace.
    child.send("/set seed 4\x1b\n\x7f5\r")
    child.expect_exact("seed is 45")
    child.expect_exact(READY)
    text = "\n".join(f"<{n:03}> {'x' * 60}" for n in range(230))
    child.setwinsize(24, 80)
    child.send(PASTE + text.replace("\n", "\r") + PASTE_END)
    child.expect_exact(text[-12:])
    enter(child, "\r", "holds 200")
    shown = re.sub(r"\x1b\[[\d;]*m", "", child.screen.getvalue())
    printed = shown.rpartition("> <000>")[2].partition("this message alone")[0]
    assert printed.replace("\r\n… ", "\n").strip() == text[5:].strip()
    leave(child)


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")
def test_tall_message_is_in_scrollback_once(state, tmp_path):
    def tmux(*words, **options):
        program = ["tmux", "-S", tmp_path / "tmux", "-f", "/dev/null", *words]
        return subprocess.run(program, capture_output=True, text=True, **options).stdout

    def until(words):
        end = time.monotonic() + 30
        while not re.search(words, shown := tmux("capture-pane", "-p", "-J", "-S", "-")):
            assert time.monotonic() < end, shown
            time.sleep(0.05)
        return shown

    lines, words = "\n".join(f"<{n:03}> of the paste" for n in range(100)), " ".join(f"<{n}>" for n in range(100, 600))
    chat = f"{sys.executable} cli.py chat --device cpu --max-tokens 2 --max-seq-len 200; sleep 60"
    tmux("new-session", "-d", "-x", "80", "-y", "24", f"XDG_STATE_HOME={state.parent} {chat}", cwd=ROOT)
    try:
        until("lists the commands\n>")
        for text, number in ((lines, 1), (words, 2)):
            tmux("load-buffer", "-", input=text)
            tmux("paste-buffer", "-p")
            until(text[-5:])
            tmux("send-keys", "Enter")
            shown = until(r"context\s+holds\s+200[\s\S]*" * number)
    finally:
        tmux("kill-server")
    assert re.findall(r"<\d{3}>", shown) == re.findall(r"<\d{3}>", f"{lines} {words}")


@pytest.mark.parametrize("failure", ["key", "drawing"])
def test_failed_editor_falls_back_to_plain_input(monkeypatch, capsys, state, failure):
    drafts = []
    monkeypatch.setattr(PlainReader, "read", lambda reader, draft: drafts.append(draft) or "again")

    def fail(*args):
        raise ValueError("no such\ncolor")

    with create_pipe_input() as keys:
        keyboard = Keyboard((), Output(), keys, DummyOutput())
        if failure == "key":
            keyboard.session.key_bindings.add("x")(fail)
        else:
            monkeypatch.setattr(keyboard.session.app.renderer, "render", fail)
        keys.send_text("a draft x\r")
        assert keyboard.read() == keyboard.read() == "again"
    out, err = capsys.readouterr()
    assert err.endswith("error: the line editor failed (ValueError: no such color); using plain line input\n")
    assert out == "" and drafts == ["a draft " if failure == "key" else "", ""]


def test_message_opens_in_external_editor(terminal, state, tmp_path):
    editor, script = tmp_path / "editor", tmp_path / "script"
    editor.write_text(f"#!/bin/sh\n. {script}\n")
    editor.chmod(0o755)
    child = terminal("--max-tokens", 2, "--temperature", 0, EDITOR=str(editor), VISUAL="")
    press(child, "written", "written")
    for line, why in (("printf 'caf\\351' > $1", "can't decode byte 0xe9"), ("rm $1", "No such file")):
        script.write_text(line)
        press(child, "\x18\x05", "the editor failed")
        child.expect_exact(why)
        child.expect_exact("the message is unchanged")
    press(child, " here", "here")
    script.write_text('printf \'%s\' "$(cat "$1") by hand" > "$1"')
    # Ctrl-X Ctrl-E opens the editor. The program sends the saved text without Enter.
    press(child, "\x18\x05", "by hand")
    child.expect_exact("context ")
    child.expect_exact(READY)
    leave(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["written here by hand"]


# sequence of a key: the text that results after "ab", the sequence, "c" and Enter
KEYS = {
    "\x1b[13;2u": "ab\nc", "\x1b[27;2;13~": "ab\nc",  # Shift-Enter of kitty and of xterm
    "\x1b[13;6u": "ab\nc", "\x1b[27;5;13~": "ab\nc", "\x1b[13;130u": "ab\nc", "\x1b[13;2:1u": "ab\nc",
    "\x1b[13;2:3u": "abc",  # The key is released.
    "\x1b\r": "ab\nc", "\n": "ab\nc",
    "\x1b[127;2u": "ac", "\x1b[97;2u": "abAc", "\x1b[228u": "abäc", "\x1b[97;5u": "cab", "\x1b[57407u": "ab8c",
    "\x1b[1;129D": "acb", "\x1b[98;3u": "cab", "\x1b[9;5u": "abc",
    "\x1b[57358u": "abc", "\x1b[1;9P": "abc", "\x1b[200;300z": "abc", "\x1b[?62;c": "abc", "\x1b[<0;3;3M": "abc",
    "\x1bOz": "abc", "\x1b[13;9u": "abc", "\x1b[13$x": "abc", "\x1b[M\r\r\r": "abc",
    "\x1b[200~x\x1b[13;2uy\x1b[201~": "abx\x1b[13;2uyc",
}  # fmt: skip


@pytest.mark.parametrize("size", [1, 100])
def test_key_sequences(capsys, state, size):
    for sequence, text in KEYS.items():
        with create_pipe_input() as keys:
            keyboard = Keyboard(lambda typed: (0, []), Output(), keys, DummyOutput())
            typed = f"ab{sequence}c"
            for at in range(0, len(typed), size):
                keys.send_text(typed[at : at + size])
            keys.send_text("\r")
            assert keyboard.read() == text, repr(sequence)
    capsys.readouterr()


def test_shift_enter_and_enter_during_answer(terminal, state):
    child = terminal("--max-tokens", 40, "--ignore-eos", "--temperature", 0)
    child.send("one\x1b[13;2utwo\x1b[27;2;13~three\nfour\r")
    child.expect_exact("\x1b[?7;2004h")  # The answer begins.
    child.send("typed early\nagain\r")
    for _ in range(2):
        child.expect_exact("context ")
        child.expect_exact(READY)
    leave(child)
    (file,) = (state / "sessions").iterdir()
    assert [user for user, _ in sessions.read(file).turns] == ["one\ntwo\nthree\nfour", "typed early\nagain"]
    shown = child.screen.getvalue()
    assert shown.count("\x1b[>1u") == shown.count("\x1b[<u") > 1, "the terminal stays in kitty's mode"


def test_draft_is_erased_from_the_left_edge():
    """The terminal and the editor may disagree on the columns of a character, so the cursor may be elsewhere."""
    out = io.StringIO()
    screen = Screen(out, lambda: Size(rows=24, columns=80), term="xterm", enable_cpr=False)
    screen.erase_down(), screen.flush()
    assert out.getvalue().startswith("\r") and "\x1b[J" in out.getvalue()
