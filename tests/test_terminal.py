"""The chat in a pseudo-terminal: keys, Ctrl-C, what is on the screen and what is on the disk."""

import signal
import stat
import time

from chats import READY, STREAMS, leaves

from tridecode.commands import session as sessions


def test_in_a_terminal(endless, terminal):
    child = terminal("--model", endless, "--seed", 3, "--temperature", 0.7, "--plain")
    child.send("half a line")
    child.expect_exact("e\x1b")
    child.sendintr()
    child.expect_exact("leaves")
    child.expect_exact(READY)
    for line in ("hello", "again"):
        child.send(f"{line}\r")
        child.expect(STREAMS)  # it streams: this model never ends its answer by itself
        began = time.monotonic()
        child.sendintr()
        child.expect(r"stopped after (\d+) tokens? and [\d.]+ s; kept in the conversation")
        assert int(child.match[1]) > 0 and time.monotonic() - began < 2
        child.expect_exact(READY)
    child.send("/stats\r")
    child.expect_exact("2 turns, 2 of them sent to the model")
    child.expect_exact(READY)
    time.sleep(1)  # a Ctrl-C right after an answer was stopped was meant for that answer
    child.sendintr()
    child.expect_exact("leaves")
    child.sendintr()
    leaves(child)
    controls = {chr(code) for code in range(32)} - set("\r\n\t\x1b\x07\x08")
    assert not set(child.screen.getvalue()) & controls, "the model's control characters"


def test_markdown_in_a_terminal(endless, terminal, state):
    child = terminal("--model", endless, "--seed", 3)
    child.send("hello\r")
    child.expect_exact("\x1b[?2004l")
    child.expect(r"[^\s\x1b]{20}")
    time.sleep(0.5)
    began = time.monotonic()
    child.sendintr()
    child.expect(r"stopped after \d+ tokens? and [\d.]+ s; kept in the conversation")
    assert time.monotonic() - began < 2
    child.expect_exact(READY)
    time.sleep(1)
    child.sendeof()
    leaves(child)
    assert child.screen.getvalue().count("\x1b[?25l") <= child.screen.getvalue().count("\x1b[?25h"), "cursor hidden"
    (file,) = (state / "sessions").iterdir()
    assert len(sessions.read(file).turns[0][1]) > 20


def test_killed_in_the_middle_of_an_answer(endless, terminal, state):
    child = terminal("--model", endless, "--seed", 3, "--max-tokens", 5, "--plain")
    child.send("first\r")
    child.expect_exact("5 tokens")
    child.expect_exact(READY)
    child.send("/set max_tokens none\r")
    child.expect_exact("max_tokens is none")
    child.send("second\r")
    child.expect(STREAMS)
    child.kill(signal.SIGKILL)
    child.wait()
    saved = sessions.read(next((state / "sessions").iterdir()))
    assert [user for user, _ in saved.turns] == ["first"]


def test_lines_are_edited(terminal, state):
    child = terminal("--max-tokens", 2, "--temperature", 0)

    def ask(keys):
        child.send(keys)
        child.expect_exact("context ")
        child.expect_exact(READY)

    ask("\x1b[200~pasted one\n/exit\nthree\n\x1b[201~\r")
    ask("alt\x1b\renter\r")
    ask('"""quoted\r/exit\r"""\r')
    child.send("/syx\x7f\t Be brief.\r")
    child.expect_exact("the system turn is set")
    child.expect_exact(READY)
    child.send("/edit\r")
    child.expect_exact("/exit")
    child.sendintr()
    child.expect_exact("leaves")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    (file,) = (state / "sessions").iterdir()
    saved = sessions.read(file)
    users = [user for user, _ in saved.turns]
    assert users[:3] == ["pasted one\n/exit\nthree", "alt\nenter", "quoted\n/exit"]
    assert saved.system == "Be brief.", "completed from /sy"
    history = state / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600

    child = terminal("--max-tokens", 2, "--resume")
    assert f"session {file.stem}: continuing {len(users)} turns" in child.screen.getvalue()
    child.send("\x1b[A\r")  # /edit, the last line of the chat before
    child.expect_exact("/exit")
    child.send("\x1b\rmore\r")
    child.expect_exact("context ")
    child.expect_exact(READY)
    child.sendeof()
    leaves(child)
    assert len(sessions.read(file).turns) == len(users) and sessions.read(file).turns[-1][0].endswith("\nmore")
