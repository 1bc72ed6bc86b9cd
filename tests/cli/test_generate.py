"""Tests of `tridecode generate`: its options, its reports and its output."""

import errno
import json
import os
import pwd
import stat
import sys
import tracemalloc
from pathlib import Path

import pytest
from checkpoints import TOKENIZER_VOCAB_SIZE
from generating import LIMITS, lines

from tridecode import Engine
from tridecode.cli.generate.prompts import logprob_entry
from tridecode.cli.options import SAMPLING, sampling_overrides
from tridecode.cli.parser import make_parser
from tridecode.cli.terminal import visible
from tridecode.sampling import SamplingParams
from tridecode.tuning.tables import table_path


def test_every_sampling_option_is_an_option():
    argv = [
        "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1",
        "--presence-penalty", "-1", "--frequency-penalty", "0.5", "--logit-bias", "7=-1.5", "--logit-bias", "8=2",
        "--seed", "4", "--max-tokens", "9", "--stop", "a", "--stop", "b c", "--stop-token-ids", "1,2", "--ignore-eos",
        "--min-tokens", "3", "--logprobs", "2", "--json-schema", "f", "--regex", "r", "--choice", "a", "--grammar", "g",
    ]  # fmt: skip
    given = sampling_overrides(make_parser().parse_args(["generate", *argv]))
    assert list(SAMPLING) == list(SamplingParams.__dataclass_fields__)
    assert list(given) == [name for name in SAMPLING if name != "adapter"]  # --adapter also loads it.
    # A request can have only one response format and no min_tokens with it, so all but the grammar are removed.
    for name in ("json_schema", "regex", "choice", "min_tokens"):
        del given[name]
    params = SamplingParams(**given)
    assert params.grammar == "g"
    assert params.logit_bias == {7: -1.5, 8: 2.0} and params.stop == ("a", "b c") and params.stop_token_ids == (1, 2)
    assert params.ignore_eos is True and params.presence_penalty == -1
    for command in ("generate", "chat"):
        assert sampling_overrides(make_parser().parse_args([command])) == {}


@pytest.mark.parametrize(
    "argv, named",
    [
        (("--prompt", "x", "--allow-special"), "--raw"),
        (("--prompt", "x", "--logprobs", "2"), "--json"),
        (("--jsonl", "x", "--n", "2"), "--n"),
        (("--messages", "x", "--raw"), "--raw"),
        (("--prompt", "x", "--raw", "--system", "s"), "--raw"),
        (("--prompt-ids", "1", "--system", "s"), "--prompt-ids"),
        (("--jsonl", "x", "--output", "x"), "overwrite"),
        (("--messages", "x", "--output", "./x"), "overwrite"),
        (("--prompt", "x", "--jsonl", "y"), "not allowed"),
    ],
)
def test_contradicting_options_are_refused(generate, argv, named):
    code, out, err = generate(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("tridecode: error: ") and named in err


def test_logprobs_name_their_tokens(generate, engine):
    code, out, _ = generate("--prompt", "Hello", "--json", "--logprobs", "3", *LIMITS)
    (report,) = lines(out)
    assert code == 0 and [entry["token_id"] for entry in report["logprobs"]] == report["token_ids"]
    for entry in report["logprobs"]:
        assert len(entry["top"]) == 3 and entry["top"][0] == {k: entry[k] for k in ("token_id", "text", "logprob")}
        assert entry["logprob"] <= 0 and entry["text"] == engine.tokenizer.decode([entry["token_id"]], False)
    assert logprob_entry(engine.tokenizer, 2, -1.0)["text"] == "<|im_end|>"
    assert logprob_entry(engine.tokenizer, TOKENIZER_VOCAB_SIZE, -1.0)["text"] == "\ufffd"
    assert "logprobs" not in lines(generate("--prompt", "Hello", "--json", *LIMITS)[1])[0]


def test_n_answers_equal_runs_with_their_seeds(generate):
    options = ("--prompt", "Hello", "--temperature", "1", "--max-tokens", "5", "--json")
    code, out, _ = generate(*options, "--n", "3", "--seed", "7")
    reports = lines(out)
    assert code == 0 and [report["seed"] for report in reports] == [7, 8, 9]
    for report in reports:
        assert lines(generate(*options, "--seed", report["seed"])[1])[0]["token_ids"] == report["token_ids"]
    first, second = (report["seed"] for report in lines(generate(*options, "--n", "2")[1]))
    assert second == first + 1
    code, out, err = generate("--prompt", "Hello", *LIMITS, "--n", "2", "--seed", "7")
    assert code == 0 and "answer 2 of 2, seed 8\n" in err
    assert first + 1 == second < 2**53
    code, out, err = generate(*options, "--n", "2", "--seed", 2**64 - 1)
    assert (code, out) == (1, "") and "seed" in err


def test_allow_special_reads_control_tokens(generate, seen, engine):
    for option, ids in (((), 8), (("--allow-special",), 1)):
        assert generate("--prompt", "<|im_end|>", "--raw", *option, *LIMITS)[0] == 0
        assert len(engine.encode(seen[-1][0])) >= ids
    assert seen[-1][0] == [2]


def test_no_reuse_prefix(generate, seen):
    options = ("--prompt", "Hello", "--json", "--n", "2", *LIMITS)
    assert lines(generate(*options)[1])[1]["usage"]["reused_tokens"] > 0
    assert [report["usage"]["reused_tokens"] for report in lines(generate(*options, "--no-reuse-prefix")[1])] == [0, 0]


def test_output_is_written_whole_or_not_at_all(generate, engine, monkeypatch, tmp_path):
    options = ("--prompt", "Hello", *LIMITS)
    shown = generate(*options)[1]
    assert generate(*options, "--output", "-")[1] == shown
    stop = shown[2:4]
    assert generate(*options, "--stop", "unseen", "--stop", stop)[1] == shown[: shown.index(stop)] + "\n"
    file = tmp_path / "o.txt"
    code, out, err = generate(*options, "--output", file)
    assert (code, out) == (0, "") and file.read_text() == shown and err.startswith("5 tokens")
    (plain := tmp_path / "plain").touch()
    assert file.stat().st_mode == plain.stat().st_mode
    plain.unlink()
    file.write_text("before")
    file.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert generate(*options, "--json", "--output", link)[0] == 0
    assert link.is_symlink() and lines(file.read_text())[0]["text"] + "\n" == shown
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def interrupted(*args, **kwargs):
        yield next(stream)
        raise KeyboardInterrupt

    file.write_text("before")
    stream = engine.stream("Hello")
    monkeypatch.setattr(engine, "submit", interrupted)
    assert generate(*options, "--output", file)[0] == 130 and file.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "o.txt"]


def test_output_is_written_to_an_open_descriptor(generate, tmp_path):
    """The path that the shell passes for >(command), and /dev/stdout, name an open file. Its content is kept."""
    options = ("--prompt", "Hello", *LIMITS)
    shown = generate(*options)[1]
    assert generate(*options, "--output", "/dev/stdout")[1] == shown
    with (tmp_path / "log").open("a+") as log:
        log.write("before\n")
        log.flush()
        assert generate(*options, "--output", f"/dev/fd/{log.fileno()}")[:2] == (0, "")
        log.seek(0)
        assert log.read() == "before\n" + shown
    read, write = os.pipe()
    assert generate(*options, "--output", f"/proc/self/fd/{write}")[0] == 0
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == shown
    code, _, err = generate(*options, "--output", "/dev/fd/999")
    assert (code, err.count("\n")) == (1, 1) and err.endswith("(Bad file descriptor): /dev/fd/999\n")
    leader, follower = os.openpty()
    assert generate(*options, "--output", os.ttyname(follower))[0] == 0
    assert os.read(leader, 1000).decode().replace("\r\n", "\n") == visible(shown)
    os.close(leader)
    os.close(follower)


def test_answers_are_prepared_lazily(generate, engine, monkeypatch):
    prompts = []

    def interrupted(prompt, params, **options):
        prompts.append(params.seed)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "submit", interrupted)
    tracemalloc.start()
    try:
        assert generate("--prompt", "x", "--json", "--n", "1000000", "--seed", "7")[0] == 130 and prompts == [7]
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert "--n" in generate("--prompt", "x", "--json", "--n", 10**30)[2]


@pytest.mark.parametrize("path, named", [("absent/o", "No such file"), (".", "Is a directory")])
def test_unwritable_output_fails_before_loading(generate, monkeypatch, tmp_path, path, named):
    monkeypatch.setattr(Engine, "load", None)
    for output in (tmp_path / path, *([""] if path == "." else [])):
        code, out, err = generate("--prompt", "x", "--output", output)
        assert (code, out, err.count("\n")) == (1, "", 1) and "--output" in err and named in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full exists only on Linux")
def test_a_full_disk_is_one_line(generate, tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text('{"prompt": "x"}\n')
    for source in (("--prompt", "x", "--json"), ("--jsonl", file)):
        code, out, err = generate(*source, *LIMITS, "--output", "/dev/full")
        assert code == 1 and err.splitlines()[-1].endswith("(No space left on device): /dev/full"), err


@pytest.mark.parametrize("limit", ["max_tokens", "context"])
def test_cut_answer_is_reported(generate, engine, monkeypatch, tmp_path, limit):
    argv = ["--temperature", "0", "--ignore-eos", "--device", "cpu"]
    argv += ["--max-tokens", "3"] if limit == "max_tokens" else []
    prompt = ("--raw", "--prompt-ids", ",".join(["5"] * (engine.capacity - 6)))
    code, _, err = generate(*prompt, *argv)
    assert code == 0 and err.endswith(f" · cut by {limit}\n") and err.count("\n") == 1
    code, out, err = generate(*prompt, *argv, "--json")
    assert (code, err, lines(out)[0]["finish_reason"], lines(out)[0]["cut_by"]) == (0, "", "length", limit)
    assert generate(*prompt, *argv, "--quiet")[2] == ""
    (file := tmp_path / "f").write_text(json.dumps({"prompt_ids": [5] * (engine.capacity - 6)}))
    code, out, err = generate("--jsonl", file, *argv)
    assert code == 0 and lines(out)[0]["cut_by"] == limit and f", 1 cut by {limit} · " in err
    code, out, err = generate("--prompt", "Hi", "--json", *argv, "--choice", "a", "--max-tokens", "99")
    assert lines(out)[0]["cut_by"] is None and "cut" not in err


def test_output_in_directory_that_permits_no_replacement(generate, monkeypatch, tmp_path):
    opened, replace = os.open, Path.replace

    def refuse(path, flags, mode=0o777, **options):
        if flags & os.O_CREAT and Path(path).parent == tmp_path and not Path(path).exists():
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, flags, mode, **options)

    def move(path, target):
        if path.parent != target.parent or os.open is opened:
            raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))
        return replace(path, target)

    (file := tmp_path / "out").write_text("older and longer than the answer")
    (other := tmp_path / "o.jsonl").touch()
    (prompts := tmp_path / "p.jsonl").write_text('{"prompt": "Hi"}\n{"prompt": 1}\n')
    file.chmod(0o640)
    inode, text = file.stat().st_ino, generate("--prompt", "Hi", *LIMITS)[1]
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "replace", move)
    for _ in range(2):
        code, out, err = generate("--prompt", "Hi", "--output", file, *LIMITS)
        assert (code, out, file.read_text()) == (0, "", text), err
        assert stat.S_IMODE(file.stat().st_mode) == 0o640 and file.stat().st_ino == inode
        for run in range(2):  # The second run removes the failed line of the first.
            code, out, err = generate("--jsonl", prompts, "--output", other, *LIMITS)
            assert code == 1 and len(lines(other.read_text())) == 2 and ("already answered" in err or run == 0)
        monkeypatch.setattr(os, "open", opened)  # In a sticky directory, only the replacement is refused.
    code, out, err = generate("--prompt-ids", "99999999", "--raw", "--output", file, *LIMITS)
    assert code == 1 and file.read_text() == text, "a failed answer changed an older file"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["o.jsonl", "out", "p.jsonl"]


def test_commands_without_home_directory(generate, run, monkeypatch):
    def absent(user):
        raise KeyError(user)

    for name in [name for name in os.environ if name == "HOME" or name.startswith("XDG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", absent)
    assert run("--version")[0] == run("config")[0] == run("info", "--device", "cpu")[0] == 0
    assert generate("--prompt", "Hi", *LIMITS)[0] == 0
    code, out, err = run("sessions")
    assert (code, out, err.count("\n")) == (1, "", 1) and "no home directory; set XDG_STATE_HOME" in err
    assert "nonexistent" in str(table_path("gpu"))


def test_options_of_other_programs(generate, seen):
    argv = ("-p", "Hi", "-n", "3", "--system-prompt", "S", "--temp=0", "--device", "cpu")
    assert generate(*argv)[0] == 0
    prompt, params, _ = seen[-1]
    assert [message["content"] for message in prompt] == ["S", "Hi"]
    assert (params.max_tokens, params.temperature) == (3, 0)
    parse = make_parser().parse_args
    assert parse(["generate", "--num-predict", "7"]).max_tokens == parse(["chat", "-n", "7"]).max_tokens == 7
    assert parse(["chat", "-m", "m"]).model == parse(["serve", "-m", "m"]).model == "m"
    for command in ("generate", "chat"):
        assert sampling_overrides(parse([command, "--max-tokens", "-1"])) == {}
    assert " -p" not in make_parser().format_help()
