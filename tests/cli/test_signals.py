"""Tests of signals: Ctrl-C during start, Ctrl-Z, SIGTERM and SIGHUP, and the state of terminal and files afterwards."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
from chats import ENVIRONMENT, READY, ROOT, leaves

from tridecode.cli.chat import session as sessions
from tridecode.cli.chat.conversation import Conversation
from tridecode.cli.signals import Ended, ending, ending_task

pexpect = pytest.importorskip("pexpect")

SHOWN, HIDDEN = "\x1b[?25h", "\x1b[?25l"
STREAMING = r"\x1b\[\?7;2004h[^\n]*\n[\s\S]*[a-z]{3}[^\x1b]*[a-z]{3}"  # The line of the message, followed by text.

# This program runs cli.py. It sends itself SIGINT while it imports the module argv[1].
INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == interrupted:
            os.kill(os.getpid(), signal.SIGINT)

interrupted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
sys.argv[0] = "cli.py"
runpy.run_path("cli.py", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module, code",
    [
        ("tridecode.version", 130),
        ("argparse", 130),
        ("tridecode.models.presets", 130),
        ("torch", -signal.SIGINT),  # A shell reports the end by this signal as exit code 130.
    ],
)
def test_ctrl_c_during_start(module, code):
    program = [sys.executable, "-c", INTERRUPTED_IMPORT, module, "info"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_sigterm_in_mid_answer(terminal, state):
    child = terminal("--ignore-eos", "--seed", 3, "--max-tokens", 4)
    child.send("first\r")
    child.expect_exact("context ")
    child.expect_exact(READY)
    child.send("/set max_tokens none\r")
    child.expect_exact(READY)
    child.send("second\r")
    child.expect(STREAMING)
    child.kill(signal.SIGTERM)
    child.expect(pexpect.EOF)
    shown = child.screen.getvalue()
    assert shown.rfind(SHOWN) >= shown.rfind(HIDDEN), "the cursor stayed hidden"
    assert child.getecho(), "the terminal's echo stayed off"
    child.close()
    assert child.signalstatus == signal.SIGTERM
    (name,) = os.listdir(state / "sessions")
    assert [user for user, _ in sessions.read(state / "sessions" / name).turns] == ["first"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_no_temporary_file_is_left(state, monkeypatch, signum):
    """The signal arrives while a session is written, and again during the cleanup."""
    before = signal.signal(signum, signal.SIG_DFL)

    def interrupted(handle):
        os.kill(os.getpid(), signum)

    unlink = os.unlink
    monkeypatch.setattr(sessions.os, "fsync", interrupted)
    monkeypatch.setattr(sessions.os, "unlink", lambda path: (interrupted(0), unlink(path)))
    with pytest.raises(Ended) as ended, ending():
        sessions.Store(sessions.named("work")).save(Conversation(turns=(("one", "two"),)), "m")
    assert ended.value.signum == signum and os.listdir(state / "sessions") == []
    assert signal.signal(signum, before) is signal.SIG_DFL


def test_error_during_cleanup_does_not_hide_the_signal():
    with pytest.raises(Ended), ending():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            raise OSError("the terminal is gone")


def test_signal_ends_task_though_loop_swallows_callback_errors():
    went_on = []

    def callback():  # An asynchronous callback, such as one of uvloop for received data.
        with suppress(BaseException):
            os.kill(os.getpid(), signal.SIGTERM)

    async def task():
        with ending_task():
            asyncio.get_running_loop().call_soon(callback)
            await asyncio.sleep(60)
        went_on.append(True)

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Ended), ending():
        asyncio.run(task())
    assert not went_on and signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_the_caller_ignores_stays_ignored():
    """Programs that nohup starts are an example."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ending():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def spawn(state):
    """Start a program in a pseudo-terminal, with the checkout as its directory."""
    children = []

    def spawn(program, *argv):
        child = pexpect.spawn(
            program,
            list(argv),
            cwd=str(ROOT),
            env=ENVIRONMENT | {"XDG_STATE_HOME": str(state.parent), "PS1": "shell: ", "COLUMNS": ""},
            encoding="utf-8",
            codec_errors="replace",
            timeout=120,
            dimensions=(50, 200),
        )
        children.append(child)
        return child

    yield spawn
    for child in children:
        child.close(force=True)


IGNORING = f"trap '' INT HUP; exec '{sys.executable}' cli.py chat --device cpu --ignore-eos --seed 3"


def test_a_chat_whose_parent_ignores_signals(spawn):
    """Ctrl-C still stops an answer; SIGHUP remains ignored, as under nohup."""
    child = spawn("/bin/sh", "-c", IGNORING)
    child.expect_exact("lists the commands")
    child.expect_exact(READY)
    child.send("Tell me a story\r")
    child.expect(STREAMING)
    child.sendintr()
    child.expect(r"stopped after \d+ tokens?")
    child.expect_exact(READY)
    child.kill(signal.SIGHUP)
    child.send("/exit\r")
    leaves(child)


def test_ctrl_c_while_a_chat_starts_whose_parent_ignores_signals(spawn):
    child = spawn("/bin/sh", "-c", IGNORING)
    child.expect_exact("2004h")  # The program shows this before it imports its modules.
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert (child.signalstatus, child.exitstatus) in ((signal.SIGINT, None), (None, 130))


@pytest.fixture
def shell(spawn):
    """A shell with job control, and a chat that it runs."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    child = spawn(bash, "--norc", "--noprofile", "-i")
    child.expect_exact("shell: ")
    child.send(f"{sys.executable} cli.py chat --device cpu --ignore-eos --seed 3\r")
    child.expect_exact("lists the commands")
    child.expect_exact(READY)
    return child


def suspended(child) -> None:
    child.send("\x1a")
    child.expect_exact("Stopped")
    child.expect_exact("shell: ")
    child.send("stty -a | tr ' ' '\\n' | grep -x -e -echo -e echo\r")
    child.expect(r"[\r\n](-?echo)\r")
    assert child.match[1] == "echo"
    child.expect_exact("shell: ")


def test_ctrl_z_at_the_prompt(shell):
    shell.send("a draft")
    shell.expect_exact("draft")
    suspended(shell)
    shell.send("fg\r")
    shell.expect_exact("> ")
    shell.expect_exact("a draft")
    shell.send("\x15/exit\r")
    shell.expect_exact("shell: ")
    # The shell stops a background program that changes the terminal. generate does not change the terminal.
    shell.send(f"{sys.executable} cli.py generate --device cpu --prompt Hi --max-tokens 4 & wait; echo went''on\r")
    shell.expect("Stopped|wenton")
    assert shell.after == "wenton"


@pytest.mark.parametrize("answering", [False, True], ids=["prompt", "answer"])
def test_a_suspended_chat_can_be_ended(shell, answering):
    if answering:
        shell.send("Tell me a story\r")
        shell.expect(STREAMING)
    suspended(shell)
    shell.send("pid=$(jobs -p); kill %1; while kill -0 $pid 2>/dev/null; do sleep 0.2; done; echo go''ne\r")
    shell.expect_exact("gone")
    shell.expect_exact("shell: ")


def test_ctrl_z_in_mid_answer(shell):
    shell.send("Tell me a story\r")
    shell.expect(STREAMING)
    for _ in range(2):
        shell.send("\x1a")
        shell.expect_exact("Stopped")
        before = shell.before
        assert before.rfind(SHOWN) > before.rfind(HIDDEN), "the cursor of the shell stayed hidden"
        shell.expect_exact("shell: ")
        shell.send("fg\r")
        shell.expect(r"[a-z]{3}[^\x1b]*[a-z]{3}[\s\S]*\x1b\[\?25l[\s\S]*[a-z]{3}")
    shell.sendintr()
    shell.expect(r"stopped after \d+ tokens? and [\d.]+ s; kept in the conversation")
    assert "^C" not in re.sub(r"[\s\S]*fg", "", shell.before), "typed keys were echoed after fg"
    shell.expect_exact(READY)
    shell.send("/exit\r")
    shell.expect_exact("shell: ")


@pytest.mark.parametrize("command", ["chat", "generate --prompt hi", "info"])
def test_deleted_working_directory(tmp_path, command):
    (directory := tmp_path / "gone").mkdir()
    program = f"{sys.executable} {ROOT / 'cli.py'} {command}"
    script = (
        f'before=$(stty -g); rmdir "$PWD"; {program}; echo "code $?"; [ "$before" = "$(stty -g)" ] && echo restored'
    )
    child = pexpect.spawn("sh", ["-c", script], cwd=str(directory), env=ENVIRONMENT, encoding="utf-8", timeout=60)
    child.expect(pexpect.EOF)
    lines = child.before.replace("\x1b[31m", "").replace("\x1b[0m", "").split("\r\n")
    assert lines[0].startswith("tridecode: error: the working directory cannot be used (No such file or directory);")
    assert lines[1:] == ["code 1", "restored", ""]


LIBRARY_EXIT = "import ctypes; ctypes.CDLL(None).exit(2)"


@pytest.mark.parametrize("failure", ["raise OSError('broken')", "sys.exit(4)", LIBRARY_EXIT])
def test_failed_import_leaves_terminal_unchanged(tmp_path, failure):
    (tmp_path / "torch.py").write_text(f"import sys\n{failure}\n")
    script = (
        f'before=$(stty -g); {sys.executable} {ROOT / "cli.py"} chat; [ "$before" = "$(stty -g)" ] && echo restored'
    )
    environment = ENVIRONMENT | {"PYTHONPATH": f"{tmp_path}:{ENVIRONMENT['PYTHONPATH']}"}
    child = pexpect.spawn("sh", ["-c", script], cwd=str(tmp_path), env=environment, encoding="utf-8", timeout=60)
    child.expect(pexpect.EOF)
    assert child.before.endswith("restored\r\n"), child.before
