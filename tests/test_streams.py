"""Streams that take nothing: a reader that has gone, and a full device."""

import os
import sys

import pytest
from checkpoints import write_tiny

from tridecode import commands

FULL = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
SHOWS = (
    ("--help",),
    ("--version",),
    ("generate", "--help"),
    ("--print-completion", "zsh"),
    ("info", "--device", "cpu"),
    ("info", "--device", "cpu", "--json"),
    ("bench", "report", "ROWS"),
    ("bench", "report", "ROWS", "--format", "csv"),
    ("generate", "--prompt", "Hello", "--max-tokens", "4", "--device", "cpu"),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("streams") / "qwen3", "qwen3")


@pytest.fixture
def run_into(monkeypatch, tmp_path, tiny, capsys):
    """Run the program with a file of the system as stdout or stderr; returns exit code and what stderr shows."""

    def run_into(argv, stream, name="stdout"):
        rows = tmp_path / "rows.json"
        rows.write_text('[{"bench": "decode", "preset": "qwen3-4b", "context": 64, "us_per_token": 2096}]')
        monkeypatch.setattr(sys, name, stream)
        monkeypatch.setattr(sys, "stdin", None)
        argv = [str(rows) if arg == "ROWS" else arg for arg in argv]
        argv += ["--model", str(tiny)] if "--device" in argv else []
        try:
            code = commands.main(argv)
        except SystemExit as exit:
            code = exit.code
        stream.flush()  # as Python does at exit: what the program could not write must be gone
        return code, capsys.readouterr().err

    return run_into


@pytest.mark.parametrize("argv", SHOWS, ids=" ".join)
def test_a_reader_that_has_gone_is_exit_code_141_and_silence(run_into, argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        assert run_into(argv, gone) == (141, "")


@pytest.mark.parametrize("argv", [("info", "--model", "/absent"), SHOWS[-1]], ids=" ".join)
def test_a_reader_of_stderr_that_has_gone_is_the_same(run_into, argv):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        assert run_into(argv, gone, "stderr")[0] == 141


@FULL
@pytest.mark.parametrize("argv", SHOWS, ids=" ".join)
def test_a_full_device_is_one_line(run_into, argv):
    with open("/dev/full", "w") as full:
        code, err = run_into(argv, full)
    assert code == 1 and err.endswith("tridecode: error: No space left on device\n") and err.count("\n") == 1


@FULL
def test_wrong_options_are_code_2_even_where_nobody_can_be_told(run_into):
    with open("/dev/full", "w") as full:
        assert run_into(("--nope",), full, "stderr")[0] == 2
