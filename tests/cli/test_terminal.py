"""The chat in a pseudo-terminal: keys, Ctrl-C, the screen and the session file."""

import os
import re
import signal
import stat
import termios
import time

import pytest
from chats import READY, STREAMS, enter, leave, leaves

from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.conversation import Conversation
from tridecode.cli.chat.slash import COMMANDS

pexpect = pytest.importorskip("pexpect")

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_line_editing(terminal, state):
    child = terminal("--max-tokens", 2, "--temperature", 0)
    enter(child, "\x1b[200~pasted one\n/exit\nthree\n\x1b[201~\r", "context ")
    enter(child, "alt\x1b\renter\r", "context ")
    enter(child, '"""quoted\r/exit\r"""\r', "context ")
    enter(child, "/syx\x7f\t Be brief.\r", "the system turn is set")
    child.send("/edit\r")
    child.expect_exact("/exit")
    child.sendintr()
    child.expect_exact("Up restores it")
    child.expect_exact(READY)
    leave(child)
    assert "tridecode chat --resume continues this conversation" in child.screen.getvalue()
    (file,) = (state / "sessions").iterdir()
    saved = sessions.read(file)
    users = [user for user, _ in saved.turns]
    assert users[:3] == ["pasted one\n/exit\nthree", "alt\nenter", "quoted\n/exit"]
    assert saved.system == "Be brief.", "Tab did not complete /sy"
    history = state / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600

    child = terminal("--max-tokens", 2, "--resume", "--quiet", early="")
    child.expect_exact(READY)
    leave(child)
    assert "continues this conversation" not in child.screen.getvalue()
    child = terminal("--max-tokens", 2, "--resume")
    assert f"session {file.stem}: continuing {len(users)} turns" in child.screen.getvalue()
    assert "quoted" in child.screen.getvalue(), "the last turns are not on the screen"
    child.send("\x1b[A\r")  # Up recalls /edit, which is the last line of the previous chat.
    child.expect_exact("/exit")
    enter(child, "\x1b\rmore\r", "context ")
    leave(child)
    assert len(sessions.read(file).turns) == len(users) and sessions.read(file).turns[-1][0].endswith("\nmore")


# command: (its input, a part of its output)
TYPED = {
    "/help": ("", "a line that starts with a space"),
    "/system": ("Be brief.", "the system turn is set"),
    "/retry": ("", "context "),
    "/continue": ("", "context"),
    "/edit": ("Hello again", "context "),
    "/history": ("", "Hello again"),
    "/title": ("A greeting", "the title is A greeting"),
    "/sessions": ("", "this is session"),
    "/save": ("{path}/talk.json", "saved to"),
    "/file": ("{path}/talk.json", "is sent with the next message"),
    "/load": ("{path}/talk.json", "continuing 1 turn"),
    "/export": ("{path}/talk.md", "exported to"),
    "/copy": ("", "c"),
    "/model": ("", "bundled"),
    "/adapter": ("", "adapter"),
    "/think": ("", "think"),
    "/plain": ("on", "answers are plain text"),
    "/set": ("temperature 0", "temperature is 0"),
    "/stats": ("", "1 turn"),
    "/undo": ("", "0 turns left"),
    "/clear": ("", "a new conversation begins"),
}


def test_every_command(terminal, tmp_path):
    child = terminal("Hello?", "--max-tokens", 4, "--temperature", 0)
    assert "> Hello?" in child.screen.getvalue(), "the question of the command line is not on the screen"
    for name, (rest, words) in TYPED.items():
        child.send(f"{name} {rest.format(path=tmp_path)}".rstrip() + "\r")
        child.expect(f"(?i){re.escape(words)}")
        child.expect_exact(READY)
    child.send("/exit\r")
    leaves(child)
    assert {*TYPED, "/exit"} == set(COMMANDS)
    shown = child.screen.getvalue()
    assert "there is no command" not in shown and "tridecode: error" not in shown
    assert sessions.read(tmp_path / "talk.json").turns[0][0] == "Hello again" and (tmp_path / "talk.md").exists()


def interrupt(child) -> int:
    """Send Ctrl-C and return the number of tokens in its note."""
    child.sendintr()
    child.expect(r"stopped after (\d+) tokens? and")
    return int(child.match[1])


@pytest.mark.parametrize("options", [(), ("--plain",)], ids=["markdown", "plain"])
def test_interrupt_stops_answer(terminal, endless, state, options):
    child = terminal("--model", endless, "--seed", 3, *options)
    for line in ("one", "two", "three"):
        child.send(f"{line}\r")
        child.expect_exact("\x1b[?2004l")
        # The answer does not end by itself, because the model never samples the end token.
        child.expect(r"[^\s\x1b]{20}")
        child.sendintr()
        child.expect(r"stopped after (\d+) tokens? and [\d.]+ s; kept in the conversation")
        assert int(child.match[1]) > 0
        child.expect_exact(READY)
    assert "^C" not in child.screen.getvalue(), "the terminal echoed Ctrl-C, which shifts the rows of the screen"
    enter(child, "/stats\r", "3 turns")
    time.sleep(1)  # The program ignores a Ctrl-C that follows a stopped answer immediately.
    child.sendintr()
    child.expect_exact("to leave")
    child.expect_exact(READY)
    child.sendintr()
    child.expect(pexpect.EOF)
    assert child.getecho(), "the terminal's echo stayed off"
    leaves(child)
    screen = child.screen.getvalue()
    controls = {chr(code) for code in range(32)} - set("\r\n\t\x1b\x07\x08")
    assert not set(screen) & controls, "a control character of the model reached the terminal"
    assert screen.count("\x1b[?25l") <= screen.count("\x1b[?25h"), "the cursor stayed hidden"
    assert len(only_session(state).turns[0][1]) > 20


def test_keys_and_paste_during_answer_reach_next_prompt(terminal, endless, state):
    """The paste is one message. It exceeds the 4,096 bytes to which the kernel limits a line."""
    text = "x" * 5000 + "\n/exit\nthe last line"
    child = terminal("--model", endless, "--seed", 3, "--max-tokens", 300)
    child.send("one\r")
    child.expect_exact("\x1b[?2004l")
    child.expect(r"[^\s\x1b]{20}")
    child.send("/set top_k 7")
    child.expect_exact("context ")
    assert "/set" not in child.before  # The output may already contain the next prompt.
    child.expect_exact(READY)
    enter(child, "\r", "top_k is 7")
    child.send("two\r")
    child.expect_exact("2004h")  # Bracketed paste mode is now enabled.
    child.expect(r"[^\s\x1b]{20}")
    enter(child, "\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~", "context ")
    child.expect_exact("the last line")
    enter(child, "\r", "context ")
    leave(child)
    assert [user for user, _ in only_session(state).turns] == ["one", "two", text]


def test_interrupt_stops_long_prompt(terminal, endless, state):
    """Ctrl-C while the prompt is processed discards the turn and keeps the conversation."""
    store = sessions.Store(sessions.named("long"))
    store.save(Conversation(turns=(("word " * 12_000, "fine"),)), "m")
    child = terminal("--model", endless, "--session", "long", "--max-tokens", 4, "--max-seq-len", 60_000)
    for _ in range(3):
        child.send("hello\r")
        child.expect_exact("\x1b[?2004l")
        child.expect(r"reading the prompt: [\d,]+ of [\d,]+ tokens, ")
        assert interrupt(child) == 0, "the answer began before Ctrl-C"
        child.expect_exact("the turn is not kept")
        child.expect_exact(READY)
    assert store.load().turns == (("word " * 12_000, "fine"),)
    enter(child, "/clear\r", "/load long continues it")
    enter(child, "hello\r", "context ")
    leave(child)


def test_long_paste_is_one_message(terminal, state):
    lines = "\n".join(f"{n}. /exit, then\tthe rest" for n in range(300))
    child = terminal("--max-tokens", 2, "--max-seq-len", 200)
    child.send("\x1b[200~" + lines.replace("\n", "\r") + "\x1b[201~")
    child.expect_exact("299.")
    enter(child, "\r", "holds 200")
    for shows in ("context ", "turn 1 is no longer sent to the model"):  # drop-oldest is the default in a terminal.
        enter(child, "\x1b[200~" + lines[:200].replace("\n", "\r") + "\x1b[201~\r", shows)
    leave(child)
    assert [user for user, _ in only_session(state).turns] == [lines[:200]] * 2


@pytest.mark.parametrize("when", ["", "loading"], ids=["start", "load"])
def test_paste_during_start_is_one_message(terminal, state, when):
    """The paste arrives before the import of torch or during loading, and exceeds the kernel's line limit of 4,096."""
    text = "x" * 5000 + "\n/exit\nthe last line"
    child = terminal("--max-tokens", 2, "--max-seq-len", 200, early="")
    child.expect_exact(when)
    child.send("\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~")
    child.expect_exact("/help lists the commands")
    assert "the last line" not in child.screen.getvalue(), "the terminal echoed the paste before the prompt"
    child.expect_exact("the last line")
    enter(child, "\r", "holds 200")
    child.send("\x1b[A\r")  # Up recalls the paste as one message.
    child.expect_exact("holds 200")
    child.expect_exact(READY)
    leave(child)


def test_keys_during_start_reach_first_prompts(terminal):
    child = terminal(early="/set top_k 7\r/set top_p 0.5\r\x04")
    leaves(child)
    before, _, after = ANSI.sub("", child.screen.getvalue()).partition("lists the commands")
    assert "/set" not in before and "top_k is 7" in after and "top_p is 0.5" in after


@pytest.mark.parametrize(
    "options, when, keys, ends",
    [
        ((), "", "\x03", "\x1b[?2004l"),
        ((), "loading", "\x03", 130),
        ((), "loading", "/exit\r", 0),
        (("--model", "/nowhere"), "", "x", 1),
    ],
    ids=["interrupt-before-imports", "interrupt-during-load", "exit-during-load", "error"],
)
def test_terminal_is_restored_after_start(terminal, options, when, keys, ends):
    child = terminal(*options, early="")
    child.expect_exact(when)
    child.send(keys)
    child.expect(pexpect.EOF)
    kept, shown = termios.tcgetattr(child.child_fd)[3], child.screen.getvalue()
    child.close()
    assert child.exitstatus == ends or (child.signalstatus == signal.SIGINT and shown.endswith(ends))
    assert kept & termios.ECHO and kept & termios.ICANON
    assert shown.rfind("2004h") < shown.rfind("2004l") and shown.rfind("?25l") <= shown.rfind("?25h")


def only_session(state) -> Conversation:
    (file,) = (state / "sessions").iterdir()
    return sessions.read(file)


def test_resume_after_kill(terminal, endless, state):
    """After kill -9 during an answer, --resume continues with the complete turns."""
    child = terminal("--model", endless, "--seed", 3, "--max-tokens", 5, "--plain")
    enter(child, "first\r", "context ")
    child.send("/set max_tokens none\r")
    child.expect_exact(READY)
    child.send("second\r")
    child.expect(STREAMS)
    child.kill(signal.SIGKILL)
    child.wait()
    child = terminal("--model", endless, "--resume", "--max-tokens", 5)
    assert "continuing 1 turn, the last was 'first'" in child.screen.getvalue()
    enter(child, "third\r", "context ")
    leave(child)
    assert [user for user, _ in only_session(state).turns] == ["first", "third"]


@pytest.mark.parametrize("answering", [False, True], ids=["at-prompt", "during-answer"])
def test_closed_terminal(terminal, endless, state, answering):
    child = terminal("--model", endless, "--seed", 3, "--max-tokens", 5, "--plain")
    enter(child, "first\r", "context ")
    if answering:
        child.send("/set max_tokens none\r")
        child.expect_exact(READY)
        child.send("second\r")
        child.expect(STREAMS)
    pty = child.ptyproc
    pty.fileobj.close()  # If the terminal closes, the kernel sends SIGHUP.
    pty.closed = True
    pty.wait()
    assert pty.signalstatus == signal.SIGHUP
    turns = only_session(state).turns
    assert turns[0][0] == "first" and len(turns) <= 1 + answering
    assert sorted(os.listdir(state)) == ["history", "sessions"], "a temporary file remained"


def test_terminal_becomes_narrow(terminal, state):
    child = terminal("--ignore-eos", "--seed", 3, COLUMNS="")
    child.send("Tell me a story.\r")
    child.expect_exact("\x1b[?2004l")
    child.expect(r"[a-z]{3}[^\x1b]*[a-z]{3}")
    child.setwinsize(50, 20)
    for _ in range(5):  # Wait until the program has updated the screen for the narrow window.
        child.expect_exact("\n")
    before = len(child.screen.getvalue())
    for _ in range(10):
        child.expect_exact("\n")
    output = ANSI.sub("", child.screen.getvalue()[before:])
    assert max(map(len, re.split(r"[\r\n]+", output))) <= 20
    child.setwinsize(3, 20)  # The window is smaller than the answer.
    child.expect_exact("\n")
    child.setwinsize(50, 200)
    interrupt(child)
    child.expect_exact(READY)
    child.setwinsize(50, 20)
    wide = "a line that is wider than the screen"
    enter(child, "/set max_tokens 4\r", "max_tokens is 4")
    enter(child, f"{wide}\r", "tok/s")
    leave(child)
    turns = only_session(state).turns
    assert [user for user, _ in turns] == ["Tell me a story.", wide] and len(turns[0][1]) > 100
