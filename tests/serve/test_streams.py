"""Standard streams: closed readers, full devices, odd encodings and windows, and control characters in a terminal."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_tiny

from tridecode import cli as commands
from tridecode.cli.terminal import Output, visible

ROOT = Path(__file__).parents[2]
FULL = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full exists on Linux only")
SHOWS = (
    ("--help",),
    ("info", "--device", "cpu", "--json"),
    ("generate", "--prompt", "Hello", "--max-tokens", "4", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("streams") / "qwen3", "qwen3")


@pytest.fixture
def run_into(monkeypatch, tiny, capsys):
    """Run the program with a system file as stdout or stderr; return the exit code and the text on stderr."""

    def run_into(argv, stream, name="stdout"):
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(sys, "stdin", None)
        argv = [*argv, *(("--model", str(tiny)) if "--device" in argv else ())]
        try:
            code = commands.main(argv)
        except SystemExit as exit:
            code = exit.code
        stream.flush()  # Python flushes the stream at exit, so the buffer must be empty.
        return code, capsys.readouterr().err

    return run_into


@pytest.mark.parametrize("argv", SHOWS, ids=" ".join)
def test_closed_stdout_exits_with_141(run_into, argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        assert run_into(argv, gone) == (141, "")


@pytest.mark.parametrize("argv", [("info", "--model", "/absent"), SHOWS[-1]], ids=" ".join)
def test_closed_stderr_exits_with_141(run_into, argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        assert run_into(argv, gone, "stderr")[0] == 141


@FULL
@pytest.mark.parametrize("argv", SHOWS, ids=" ".join)
def test_full_device_is_one_line(run_into, argv):
    with open("/dev/full", "w") as full:
        code, err = run_into(argv, full)
    assert code == 1 and err.endswith("tridecode: error: No space left on device\n") and err.count("\n") == 1


@FULL
def test_wrong_options_exit_with_2_if_stderr_is_full(run_into):
    with open("/dev/full", "w") as full:
        assert run_into(("--nope",), full, "stderr")[0] == 2


def test_closed_pipe_is_not_an_error(tiny):
    argv = [sys.executable, "cli.py", "generate", "--model", tiny, "--prompt", "Hello", "--device", "cpu"]
    read, write = os.pipe()
    os.close(read)  # The reader closes the pipe before the first character.
    done = subprocess.run(argv, cwd=ROOT, stdout=write, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_unsupported_output_encoding_is_refused():
    encoding = "utf-16"
    argv = [sys.executable, "cli.py", "generate", "--prompt", "Hello", "--max-tokens", "2"]
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, stdin=subprocess.DEVNULL, text=True, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"as {encoding}; unset PYTHONIOENCODING" in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("size", ["0", "00", ""])
def test_window_size_of_zero_is_ignored(monkeypatch, size):
    monkeypatch.setenv("COLUMNS", size)
    monkeypatch.setenv("LINES", size)
    screen = io.StringIO()
    monkeypatch.setattr("sys.stdout", screen)
    output = Output()
    output.console.print("an answer")
    assert screen.getvalue() == "an answer\n" and output.console.width >= 80


def test_bidirectional_controls_are_replaced():
    assert visible("a\u202eb\u2066c\u202c\u2069 \u05d0\u200f") == "a\ufffdb\ufffdc\ufffd\ufffd \u05d0\u200f"


def test_control_characters_are_replaced_in_a_terminal(monkeypatch):
    text = "\x1b]0;title\x07 \x9b2J\x08[bold]x[/] [/INST]\r\nA\tb\rc :smile:\n"
    screen = io.StringIO()
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    Output().text(text)
    shown = screen.getvalue()
    assert shown == "␛]0;title␇ \ufffd2J␈[bold]x[/] [/INST]\nA       b␍c :smile:\n"
    assert visible("ok\t\n") == "ok\t\n"


def test_pipe_gets_the_unchanged_text(capsys):
    text = "\x1b[1m [/INST] \t\r\n"
    Output().text(text)
    assert capsys.readouterr().out == text
