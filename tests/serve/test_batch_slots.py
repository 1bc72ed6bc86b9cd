"""`generate --jsonl` with several slots: order, reading ahead, interrupts, progress bar and statistics."""

import io
import json
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from chats import ENVIRONMENT, ROOT
from checkpoints import write_tiny
from generating import LIMITS, lines

from tridecode import Engine
from tridecode import cli as commands
from tridecode.cli.generate import batch
from tridecode.cli.generate.batch import Lines, split
from tridecode.cli.generate.prompts import report
from tridecode.cli.graph_stats import OPTIONAL, show_graph_stats
from tridecode.cli.progress import progress
from tridecode.cli.terminal import make_console
from tridecode.serve.request import Request

SLOTS = 3
LENGTHS = (40, 3, 9, 1, 25, 2, 14, 5)


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """An engine with SLOTS slots."""
    path = write_tiny(tmp_path_factory.mktemp("several") / "qwen3", "qwen3")
    return Engine.load(path, device="cpu", slots=SLOTS)


@pytest.fixture
def run(several, capsys, monkeypatch, tmp_path):
    """Run `generate --jsonl` on these lines; return the exit code, the entries of stdout or --output, and stderr."""
    monkeypatch.setattr(Engine, "load", lambda *args, **kwargs: several)
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"

    def run(entries, *argv, to_file=False):
        file.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
        more = ("--output", results) if to_file else ()
        code = commands.main(list(map(str, ("generate", "--jsonl", file, *LIMITS, *argv, *more))))
        out, err = capsys.readouterr()
        return code, lines(results.read_text() if to_file else out), err

    run.results = results
    return run


def prompts(*lengths, **fields):
    return [
        {"prompt_ids": [5 + i, 17, 40], "max_tokens": length, "ignore_eos": True} | fields
        for i, length in enumerate(lengths)
    ]


def indices(entries):
    return [entry["index"] for entry in entries]


def test_ordered_answers_match_single_runs(run, several):
    requests = prompts(*LENGTHS) + [{"prompt": "Hello", "temperature": 1.0, "seed": 7}]
    code, entries, err = run(requests)
    assert code == 0 and indices(entries) == list(range(9))
    assert err.startswith("9 answered, 0 failed, 9 cut by max_tokens · 104 tokens in ")
    for entry, line in zip(entries, requests[:8]):
        params = several.default_params(temperature=0, max_tokens=line["max_tokens"], ignore_eos=True)
        assert entry["token_ids"] == list(several.generate(line["prompt_ids"], params).token_ids)


def test_unordered_answers_are_written_when_they_end(run):
    _, ordered, _ = run(prompts(*LENGTHS))
    code, entries, _ = run(prompts(*LENGTHS), "--unordered", "--no-reuse-prefix")
    assert code == 0 and sorted(indices(entries)) == list(range(8))
    assert indices(entries)[:2] == [1, 3] and indices(entries)[-1] == 0  # The shortest answers end first.
    assert {entry["index"]: entry["text"] for entry in entries} == {entry["index"]: entry["text"] for entry in ordered}


def test_unwritten_line_is_not_counted(run):
    """The reader has closed the pipe, or the disk is full."""
    code, _, err = run(prompts(*LENGTHS[:3]), "--output", "/dev/full")
    assert code == 1 and "0 answered, 0 failed, 3 left" in err


@pytest.mark.parametrize("order", [(), ("--unordered",)])
def test_invalid_line_fails_alone(run, order):
    requests = prompts(6, 5, 4, 3, 2)
    requests[1] = {"prompt_ids": [5] * 600}
    requests[3] = {"prompt_ids": [10**6]}
    code, entries, err = run(requests, *order)
    by_index = {entry["index"]: entry for entry in entries}
    assert code == 1 and len(by_index) == 5 and err.splitlines()[-1].startswith("3 answered, 2 failed")
    assert "the context holds" in by_index[1]["error"] and "vocabulary" in by_index[3]["error"]
    assert all(len(by_index[i]["token_ids"]) == 6 - i for i in (0, 2, 4))


@pytest.mark.parametrize("order", [(), ("--unordered",)])
def test_lines_are_read_as_slots_and_queue_allow(run, several, monkeypatch, order):
    read, pending, submit = [], [], several.submit
    reading = batch.Lines.requests

    def requests(*args):
        for request in reading(*args):
            read.append(request.index)
            yield request

    def spy(*args, **kwargs):
        pending.append(len(read) - answered[0])
        return submit(*args, **kwargs)

    answered, line = [0], batch.Answers._line

    def counting(*args):
        answered[0] += 1
        return line(*args)

    monkeypatch.setattr(batch.Lines, "requests", requests)
    monkeypatch.setattr(several, "submit", spy)
    monkeypatch.setattr(batch.Answers, "_line", counting)
    code, entries, _ = run(prompts(*[4] * 40), "--max-queue", "2", *order)
    assert code == 0 and len(entries) == 40 and max(pending) == SLOTS + 2


def test_unordered_batch_resumes_by_line(run, several, monkeypatch):
    requests, submit, calls = prompts(*LENGTHS), several.submit, []
    _, whole, _ = run(requests)

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return submit(*args, **kwargs)

    monkeypatch.setattr(several, "submit", interrupted)
    code, first, err = run(requests, "--unordered", "--max-queue", "1", to_file=True)
    assert code == 130 and 0 < len(first) < 8 and f"{len(first)} answered, 0 failed, {8 - len(first)} left" in err
    assert 0 not in indices(first)  # The interrupt stopped the longest answer.
    code, entries, err = run(requests, "--unordered", to_file=True)
    assert code == 0 and f"{len(first)} already answered" in err and len(calls) == 8 + 8 - len(first)
    assert sorted(indices(entries)) == list(range(8)) and entries[: len(first)] == first
    assert {entry["index"]: entry["text"] for entry in entries} == {entry["index"]: entry["text"] for entry in whole}
    assert run(requests, to_file=True)[2] == f"{run.results}: all 8 lines are answered\n"


def test_interrupt_writes_all_finished_answers(run, monkeypatch):
    """Ordered answers wait for the first line; an interrupt writes them without it."""
    result = Request.result

    def interrupted(handle):
        if handle.finish_reason is None:
            for _ in zip(range(29), handle):  # The test interrupts the first line before its 40 tokens are complete.
                pass
            raise KeyboardInterrupt
        return result(handle)

    monkeypatch.setattr(Request, "result", interrupted)
    code, entries, err = run(prompts(*LENGTHS), to_file=True)
    assert code == 130 and indices(entries) == [1, 2, 3, 4, 5, 6] and "6 answered, 0 failed, 2 left" in err


def test_ctrl_c_ends_promptly_and_keeps_finished_answers(endless, tmp_path):
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    requests = prompts(2, 10**4, 3, 10**4, 10**4)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in requests))
    command = [sys.executable, "cli.py", "generate", "--jsonl", file, "--output", results, "--device", "cpu"]
    command += ["--model", endless, "--temperature", "0", "--slots", "2", "--unordered"]
    with subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: results.exists() and results.read_text().count("\n") >= 2)
            process.send_signal(signal.SIGINT)
            err = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    entries = lines(results.read_text())
    assert indices(entries) == [0, 2] and "2 answered, 0 failed, 3 left" in err and "Traceback" not in err


def test_ctrl_c_clears_the_progress_bar(endless, tmp_path):
    pexpect = pytest.importorskip("pexpect")
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    file.write_text("".join(json.dumps(entry) + "\n" for entry in prompts(*[2, 10**4] * 4)))
    command = ["cli.py", "generate", "--jsonl", file, "--output", results, "--device", "cpu", "--model", endless]
    command = [*map(str, command), "--temperature", "0", "--slots", "2"]
    child = pexpect.spawn(sys.executable, command, cwd=str(ROOT), env=ENVIRONMENT | {"COLUMNS": "40"}, timeout=120)
    screen = child.logfile_read = io.BytesIO()
    child.expect(rb"1/8 [\d,]+ tok/s")
    child.sendintr()
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 130 and indices(lines(results.read_text()))[0] == 0
    assert b"^C" not in screen.getvalue() and b"left" in screen.getvalue()
    # The program clears the line of the progress bar.
    assert screen.getvalue().rindex(b"\x1b[2K") > screen.getvalue().rindex(b"tok/s")


def until(true, seconds=60):
    deadline = time.perf_counter() + seconds
    while not true():
        assert time.perf_counter() < deadline
        time.sleep(0.05)


def test_default_slots_depend_on_the_command(monkeypatch, several, tmp_path, capsys):
    options_of_load = []
    monkeypatch.setattr(Engine, "load", lambda *args, **kwargs: options_of_load.append(kwargs) or several)
    file = tmp_path / "b.jsonl"
    file.write_text(json.dumps(prompts(1)[0]))
    engine = ["--kv-tokens", "900", "--graph", "piecewise", "--graph-sizes", "1,3", "--chunk-tokens", "64"]
    for argv in (["--jsonl", str(file)], ["--jsonl", str(file), "--slots", "5", *engine], ["--prompt-ids", "5"]):
        assert commands.main(["generate", *LIMITS, *argv]) == 0
    assert [kwargs["slots"] for kwargs in options_of_load] == [16, 5, 1]
    assert {name: options_of_load[1][name] for name in ("kv_tokens", "graph", "graph_sizes", "chunk_tokens")} == {
        "kv_tokens": 900, "graph": "piecewise", "graph_sizes": (1, 3), "chunk_tokens": 64
    }  # fmt: skip


@pytest.mark.parametrize(
    "option, value, named",
    [
        ("--graph-sizes", "4,2", "expected ascending integers from 1 to 64, like 1, 2, 4, got '4,2'"),
        ("--max-queue", "4", "--max-queue needs --jsonl"),
        ("--unordered", None, "--unordered needs --jsonl"),
    ],
)
def test_wrong_values_are_one_line(option, value, named, capsys):
    with pytest.raises(SystemExit) as exit:
        commands.main(["generate", "--prompt", "x", option, *([] if value is None else [value])])
    err = capsys.readouterr().err
    assert exit.value.code == 2 and err.count("\n") == 1 and option in err and named in err


def test_queue_of_no_requests_is_refused(capsys):
    with pytest.raises(SystemExit) as exit:
        commands.main(["generate", "--jsonl", "-", "--max-queue", "0"])
    assert exit.value.code == 2 and "--max-queue must be at least 1 for --jsonl" in capsys.readouterr().err


def test_lines_are_split_at_newlines_only():
    for text in ("", "\n", "a", "a\n", "a\n\nb\r\n", "\u2028\x0b\x1e\na"):
        assert list(split(text)) == text.split("\n")
    batch_lines = Lines("a\n\n b \n")
    assert len(batch_lines) == 2 and batch_lines.keys[1] == 0 and batch_lines.keys[2] == Lines("b").keys[0]
    assert batch_lines.answered(0, f"{batch_lines.keys[0]:016x}") and not batch_lines.answered(1, "0" * 16)
    assert not batch_lines.answered(9, f"{batch_lines.keys[0]:016x}")


def test_n_answers_share_the_slots(several, monkeypatch, capsys):
    monkeypatch.setattr(Engine, "load", lambda *args, **kwargs: several)
    started, submit = [], several.submit
    monkeypatch.setattr(
        several, "submit", lambda *args, **kwargs: started.append(submit(*args, **kwargs)) or started[-1]
    )
    command = ["generate", *LIMITS, "--prompt-ids", "5,17", "--temperature", "1", "--n", "5", "--seed", "3"]
    running = []
    monkeypatch.setattr(
        "tridecode.cli.generate.command.report", lambda *args: running.append(len(started)) or report(*args)
    )
    assert commands.main([*command, "--json"]) == 0
    entries = lines(capsys.readouterr().out)
    assert [entry["seed"] for entry in entries] == [3, 4, 5, 6, 7] and running == [3, 4, 5, 5, 5]
    for entry in entries:
        params = several.default_params(temperature=1.0, max_tokens=5, seed=entry["seed"])
        assert entry["token_ids"] == list(several.generate([5, 17], params).token_ids)
    assert commands.main(command) == 0
    out, err = capsys.readouterr()
    assert out == "".join(entry["text"] + "\n" for entry in entries) and "answer 2 of 5, seed 4" in err


# ---- progress bar and statistics


STATS = [
    SimpleNamespace(rows=1, padded=1, padding=0, mode="full", kind="greedy", count=12345),
    SimpleNamespace(rows=19, padded=20, padding=1, mode="full", kind="logprobs+mask", count=7),
]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_progress_bar_fits_in_one_line(width):
    screen = io.StringIO()
    output = SimpleNamespace(errors=make_console(file=screen, width=width, force_terminal=True), tty=False, quiet=False)
    bar = progress("answering", output, lambda: 12345.6)
    with bar:
        bar.add_task("answering", total=1000, completed=11)
        bar.refresh()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue().replace("\r", "\n"))
    assert {"11/1,000", "12,346", "tok/s"} <= set(shown.split())
    assert all(len(line) <= width for line in shown.splitlines())
    assert screen.getvalue().count("\n") == 1  # The progress bar rewrites one line.


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("width", [30, 40, 200])
def test_graph_stats_are_a_table(monkeypatch, terminal, width):
    screen = io.StringIO()
    output = SimpleNamespace(errors=make_console(file=screen, width=width, force_terminal=terminal))
    show_graph_stats(SimpleNamespace(graph_stats=lambda: STATS), output)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue())
    assert ("───" in shown) == terminal and all(len(line) <= width for line in shown.splitlines())
    rows = [line.split() for line in shown.splitlines()]
    figures = dict(rows="19", padded="20", padding="1", count="7", mode="full", kind="logprobs+mask").items()
    tables = [[each for each in figures if each[0] not in OPTIONAL[:spared]] for spared in range(4)]
    shown_columns = next(columns for columns in tables if [name for name, _ in columns] in rows)
    assert [value for _, value in shown_columns] in rows, "the output breaks a line within a column"
    assert len(shown_columns) == {30: 4 - terminal, 40: 5 - terminal, 200: 6}[width]
    if width == 200:
        assert ["1", "1", "0", "12,345", "full", "greedy"] in rows
        assert ["19", "20", "1", "7", "full", "logprobs+mask"] in rows


def test_graph_stats_follow_the_answers_on_stderr(run, several, monkeypatch):
    monkeypatch.setattr(several, "graph_stats", lambda: STATS, raising=False)
    _, entries, err = run(prompts(2, 2), "--graph-stats")
    assert len(entries) == 2 and "12,345" in err and err.index("answered") < err.index("padded")
