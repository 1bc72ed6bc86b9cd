"""generate: where prompts come from, what is reported, where it goes; batches and how they resume."""

import io
import json
import stat
import sys

import pytest
from checkpoints import TOKENIZER_VOCAB_SIZE, write_tiny

from tridecode import Engine, commands
from tridecode.commands.generate import STDIN, clean, logprob_entry
from tridecode.commands.parser import SAMPLING, make_parser, sampling_overrides
from tridecode.commands.terminal import Output
from tridecode.sampling import SamplingParams

LIMITS = ("--temperature", "0", "--max-tokens", "5", "--device", "cpu")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("generate") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def engine(tiny):
    return Engine.load(tiny, device="cpu")


@pytest.fixture
def run(capsys, engine, monkeypatch):
    """Run `generate` in this process on one engine; returns exit code, stdout, stderr."""
    monkeypatch.setattr(Engine, "load", lambda *args, **kwargs: engine)

    def run(*argv, stdin=None):
        engine._cached = []
        if stdin is not None:
            given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
            monkeypatch.setattr("sys.stdin", given)
        try:
            code = commands.main(["generate", *map(str, argv)])
        except SystemExit as exit:
            code = exit.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def seen(engine, monkeypatch):
    """The prompts and parameters that reach the engine."""
    found, stream = [], engine.stream

    def spy(prompt, params=None, **options):
        found.append((prompt, params, options))
        return stream(prompt, params, **options)

    monkeypatch.setattr(engine, "stream", spy)
    return found


def user(text):
    return {"role": "user", "content": text}


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def test_every_sampling_option_is_an_option():
    argv = [
        "--temperature", "0.5", "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1",
        "--presence-penalty", "-1", "--frequency-penalty", "0.5", "--logit-bias", "7=-1.5", "--logit-bias", "8=2",
        "--seed", "4", "--max-tokens", "9", "--stop", "a", "--stop", "b c", "--stop-token-ids", "1,2", "--ignore-eos",
        "--logprobs", "2",
    ]  # fmt: skip
    given = sampling_overrides(make_parser().parse_args(["generate", *argv]))
    assert (
        tuple(given)
        == SAMPLING
        == tuple(sorted(SamplingParams.__dataclass_fields__, key=lambda name: SAMPLING.index(name)))
    )
    params = SamplingParams(**given)
    assert params.logit_bias == {7: -1.5, 8: 2.0} and params.stop == ("a", "b c") and params.stop_token_ids == (1, 2)
    assert params.ignore_eos is True and params.presence_penalty == -1
    assert sampling_overrides(make_parser().parse_args(["generate"])) == {}


@pytest.mark.parametrize(
    "prompt, text",
    [
        ("-", "IN"),
        ("Shorten: -", "Shorten: IN"),
        ("Text:\n-\nShorten it.", "Text:\nIN\nShorten it."),
        ("5 - 3 = ?", "5 - 3 = ?"),
        ("- a\n- b", "- a\n- b"),
        ("a-", "a-"),
        ("--", "--"),
        ("well-known", "well-known"),
    ],
)
def test_a_hyphen_that_stands_for_stdin(prompt, text):
    assert STDIN.sub(lambda _: "IN", prompt) == text


def test_stdin_inside_the_prompt(run, seen):
    code, _, err = run("--prompt", "Shorten: -", *LIMITS, stdin=b"\\1 a river\n")
    assert code == 0 and seen[0][0] == [user("Shorten: \\1 a river")] and err.count("\n") == 1
    _, _, err = run("--prompt", "Shorten: -", *LIMITS, stdin=b"")
    assert err.startswith("stdin, which the - in --prompt stands for, is empty\n")


def test_what_is_no_unicode_is_replaced_with_a_note(run, seen, tmp_path):
    code, _, err = run(*LIMITS, stdin=b"a \xff b\n")
    assert code == 0 and seen[-1][0] == [user("a \ufffd b")] and err.startswith("stdin: what is not valid UTF-8")
    code, _, err = run("--prompt", "x", "--system", "\ud800", *LIMITS)
    assert code == 0 and seen[-1][0][0]["content"] == "\ufffd" and err.count("\n") == 2
    code, _, err = run("--prompt", "x\udcff", *LIMITS)  # as an argument that is not UTF-8 arrives
    assert code == 0 and seen[-1][0] == [user("x\ufffd")] and err.startswith("--prompt: ")
    file = tmp_path / "m.json"
    file.write_bytes(b'\xef\xbb\xbf[{"role": "user", "content": "\\ud800 \\ud83d\\ude00 \xfe"}]')
    code, _, err = run("--messages", file, *LIMITS)
    assert code == 0 and seen[-1][0] == [user("\ufffd 😀 \ufffd")] and str(file) in err


def test_valid_text_has_no_note(capsys):
    assert clean("😀 \ufeff\ufffd\x00é", "x", Output()) == "😀 \ufeff\ufffd\x00é"
    assert capsys.readouterr().err == ""


def test_messages_and_system(run, seen, tmp_path):
    chat = [user("Hi"), {"role": "assistant", "content": "Hello"}, user("Bye")]
    file = tmp_path / "m.json"
    for content in (chat, {"messages": chat}):
        file.write_text(json.dumps(content))
        assert run("--messages", file, *LIMITS)[0] == 0 and seen[-1][0] == chat
    assert run("--messages", "-", *LIMITS, stdin=json.dumps(chat).encode())[0] == 0 and seen[-1][0] == chat
    assert run("--messages", file, "--system", "Be brief", *LIMITS)[0] == 0
    assert seen[-1][0] == [{"role": "system", "content": "Be brief"}, *chat]
    assert run("--prompt", "Hi", "--system", "S", *LIMITS)[0] == 0
    assert seen[-1][0] == [{"role": "system", "content": "S"}, user("Hi")]


@pytest.mark.parametrize(
    "text, named",
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("1" * 5000, "not JSON"),
        ("[]", "got []"),
        ('{"role": "user"}', "expected a list"),
        ('["x"]', "message 1"),
        ('[{"role": "user", "content": "a"}, {"role": "user"}]', "message 2: content must be a string, got none"),
        ('[{"role": 1, "content": "a"}]', "message 1: role must be a string, got 1"),
        ('[{"role": "system", "content": "a"}]', "leave out --system"),
    ],
)
def test_messages_that_are_none(run, tmp_path, text, named):
    file = tmp_path / "m.json"
    file.write_text(text)
    code, out, err = run("--messages", file, "--system", "S", *LIMITS)
    assert (code, out, err.count("\n")) == (1, "", 1) and str(file) in err and named in err


def test_a_file_that_is_absent(run, tmp_path):
    for option in ("--messages", "--jsonl"):
        code, out, err = run(option, tmp_path / "absent")
        assert (code, out, err.count("\n")) == (1, "", 1) and "absent: No such file" in err


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
        (("--n", "0"), "positive"),
        (("--logit-bias", "5"), "ID=VALUE"),
        (("--stop-token-ids", "x"), "'x'"),
    ],
)
def test_options_that_contradict_each_other(run, argv, named):
    code, out, err = run(*argv)
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("tridecode: error: ") and named in err


def test_logprobs_name_their_tokens(run, engine):
    code, out, _ = run("--prompt", "Hello", "--json", "--logprobs", "3", *LIMITS)
    (report,) = lines(out)
    assert code == 0 and [entry["token_id"] for entry in report["logprobs"]] == report["token_ids"]
    for entry in report["logprobs"]:
        assert len(entry["top"]) == 3 and entry["top"][0] == {k: entry[k] for k in ("token_id", "text", "logprob")}
        assert entry["logprob"] <= 0 and entry["text"] == engine.tokenizer.decode([entry["token_id"]], False)
    assert logprob_entry(engine.tokenizer, 2, -1.0)["text"] == "<|im_end|>"
    assert logprob_entry(engine.tokenizer, TOKENIZER_VOCAB_SIZE, -1.0)["text"] == "\ufffd"
    assert "logprobs" not in lines(run("--prompt", "Hello", "--json", *LIMITS)[1])[0]


def test_n_answers_are_those_of_their_seeds(run):
    options = ("--prompt", "Hello", "--temperature", "1", "--max-tokens", "5", "--json")
    code, out, _ = run(*options, "--n", "3", "--seed", "7")
    reports = lines(out)
    assert code == 0 and [report["seed"] for report in reports] == [7, 8, 9]
    for report in reports:
        assert lines(run(*options, "--seed", report["seed"])[1])[0]["token_ids"] == report["token_ids"]
    first, second = (report["seed"] for report in lines(run(*options, "--n", "2")[1]))
    assert second == first + 1
    code, out, err = run("--prompt", "Hello", *LIMITS, "--n", "2", "--seed", "7")
    assert code == 0 and "answer 2 of 2, seed 8\n" in err
    code, out, err = run(*options, "--n", "2", "--seed", 2**64 - 1)
    assert (code, out) == (1, "") and "seed" in err


def test_a_stop_string_is_not_shown(run):
    text = run("--prompt", "Hello", *LIMITS)[1].rstrip("\n")
    stop = text[2:4]
    shown = run("--prompt", "Hello", *LIMITS, "--stop", "unseen", "--stop", stop)[1]
    assert shown == text[: text.index(stop)] + "\n"


def test_allow_special_reads_control_tokens(run, seen, engine):
    for option, ids in (((), 8), (("--allow-special",), 1)):
        assert run("--prompt", "<|im_end|>", "--raw", *option, *LIMITS)[0] == 0
        assert len(engine.encode(seen[-1][0])) >= ids
    assert seen[-1][0] == [2]


def test_no_reuse_prefix(run, seen):
    options = ("--prompt", "Hello", "--json", "--n", "2", *LIMITS)
    assert lines(run(*options)[1])[1]["usage"]["reused_tokens"] > 0
    assert [report["usage"]["reused_tokens"] for report in lines(run(*options, "--no-reuse-prefix")[1])] == [0, 0]


def test_output_is_written_whole_or_not_at_all(run, engine, monkeypatch, tmp_path):
    options = ("--prompt", "Hello", *LIMITS)
    shown = run(*options)[1]
    assert run(*options, "--output", "-")[1] == shown
    file = tmp_path / "o.txt"
    code, out, err = run(*options, "--output", file)
    assert (code, out) == (0, "") and file.read_text() == shown and err.startswith("5 tokens")
    (plain := tmp_path / "plain").touch()
    assert file.stat().st_mode == plain.stat().st_mode
    plain.unlink()
    file.write_text("before")
    file.chmod(0o600)
    link = tmp_path / "link"
    link.symlink_to(file)
    assert run(*options, "--json", "--output", link)[0] == 0
    assert link.is_symlink() and lines(file.read_text())[0]["text"] + "\n" == shown
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def interrupted(*args, **kwargs):
        yield next(stream)
        raise KeyboardInterrupt

    file.write_text("before")
    stream = engine.stream("Hello")
    monkeypatch.setattr(engine, "stream", interrupted)
    assert run(*options, "--output", file)[0] == 130 and file.read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "o.txt"]


@pytest.mark.parametrize("path, named", [("absent/o", "No such file"), (".", "Is a directory")])
def test_an_output_that_cannot_be_is_told_before_loading(run, monkeypatch, tmp_path, path, named):
    monkeypatch.setattr(Engine, "load", None)
    code, out, err = run("--prompt", "x", "--output", tmp_path / path)
    assert (code, out, err.count("\n")) == (1, "", 1) and "--output" in err and named in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_a_full_disk_is_one_line(run, tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text('{"prompt": "x"}\n')
    for source in (("--prompt", "x", "--json"), ("--jsonl", file)):
        code, out, err = run(*source, *LIMITS, "--output", "/dev/full")
        assert code == 1 and err.splitlines()[-1].endswith("(No space left on device): /dev/full"), err


GOOD = [
    {"prompt": "Hello", "id": "a"},
    {"messages": [user("Hi")], "max_tokens": 3, "stop": "zzz"},
    {"prompt": "Hello", "temperature": 1.0, "seed": 3, "logit_bias": {"7": -1}, "stop_token_ids": [5]},
]
BAD = [
    ("{", "not JSON"), ("[1]", "expected an object"), ("{}", "neither"),
    ('{"prompt": "a", "messages": []}', "both"), ('{"prompt": " "}', "empty"), ('{"messages": [1]}', "message 1"),
    ('{"prompt": "a", "temprature": 1}', "did you mean temperature?"), ('{"prompt": "a", "zz": 1}', "known are"),
    ('{"prompt": "a", "top_p": 5}', "top_p"), ('{"prompt": "a", "stop": 5}', "stop must be a list"),
    ('{"prompt": "a", "logit_bias": [1]}', "logit_bias"), ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos"),
    ('{"prompt": "a", "logit_bias": {"388000": 1}}', "vocabulary"), (json.dumps({"prompt": "long " * 600}), "context"),
    (json.dumps({"prompt": "a", "logit_bias": {"9" * 5000: 1}}), "digits"),
    ('{"prompt": "a", "id": [1]}', "id must be"),
    ('{"prompt": "a", "seed": null, "temperature": null}', "temperature"),
]  # fmt: skip


def test_a_batch_answers_as_single_runs_do(run, engine, tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text("\n\n".join(map(json.dumps, GOOD)) + "\r\n")
    code, out, err = run("--jsonl", file, *LIMITS)
    found = lines(out)
    assert code == 0 and [entry["index"] for entry in found] == [0, 2, 4]
    assert found[0]["id"] == "a" and "id" not in found[1]
    params = engine.default_params(temperature=0, max_tokens=5)
    assert found[0]["token_ids"] == list(engine.generate([user("Hello")], params).token_ids)
    assert found[1]["usage"]["completion_tokens"] == 3 and found[2]["seed"] == 3
    assert err.startswith("3 answered, 0 failed · 1") and err.count("\n") == 1
    assert [entry["text"] for entry in lines(run("--jsonl", "-", *LIMITS, stdin=file.read_bytes())[1])] == [
        entry["text"] for entry in found
    ]


def test_bad_lines_fail_alone(run, tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text("\n".join([*(line for line, _ in BAD), '{"prompt": "Hello"}']))
    code, out, err = run("--jsonl", file, *LIMITS)
    found = lines(out)
    assert code == 1 and len(found) == len(BAD) + 1 and "error" not in found[-1] and found[-1]["text"]
    for number, ((_, named), entry, line) in enumerate(zip(BAD, found, err.splitlines()), 1):
        assert entry["error"].startswith(f"line {number}: ") and named in entry["error"], entry
        assert line.startswith(f"tridecode: error: {file}: line {number}: ") and named in line
    assert err.splitlines()[-1].startswith(f"1 answered, {len(BAD)} failed")


def test_a_batch_resumes(run, engine, monkeypatch, tmp_path):
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    file.write_text("\n".join([json.dumps(GOOD[0]), "{", *map(json.dumps, GOOD[1:])]))
    whole = lines(run("--jsonl", file, *LIMITS)[1])
    generate, calls = engine.generate, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    monkeypatch.setattr(engine, "generate", interrupted)
    code, out, err = run("--jsonl", file, *LIMITS, "--output", results)
    assert (code, out) == (130, "") and "1 answered, 1 failed, 2 left" in err
    assert [entry["index"] for entry in lines(results.read_text())] == [0, 1]
    with results.open("a") as cut:
        cut.write('{"index": 2, "input": "4')  # as a killed program leaves it
    code, _, err = run("--jsonl", file, *LIMITS, "--output", results)
    assert code == 1 and len(calls) == 4 and "2 answered, 1 failed, 1 were there already" in err
    found = {entry["index"]: entry for entry in lines(results.read_text())}
    assert len(found) == 4 == results.read_text().count("\n")
    for entry in whole:
        assert entry.get("text") == found[entry["index"]].get("text")
    file.write_text(file.read_text().replace("\n{\n", "\n \n"))
    monkeypatch.setattr(Engine, "load", None)
    code, out, err = run("--jsonl", file, *LIMITS, "--output", results)
    assert (code, out) == (0, "") and err == f"{results}: all 3 lines are answered\n"


@pytest.mark.parametrize(
    "content",
    [
        "notes",
        "notes\n",
        '{"a": 1}\n',
        "[]\n",
        "5\n",
        '{"index": [], "input": ""}\n',
        '{"index": 0, "input": "other"}\n',
        '{"index": 9, "input": "other"}\n',
        b"\xff\n",
    ],
)
def test_a_file_of_something_else_stays_as_it_is(run, monkeypatch, tmp_path, content):
    monkeypatch.setattr(Engine, "load", None)
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    file.write_text('{"prompt": "x"}\n')
    data = content if isinstance(content, bytes) else content.encode()
    results.write_bytes(data)
    code, out, err = run("--jsonl", file, "--output", results)
    assert (code, out, err.count("\n")) == (1, "", 1) and str(results) in err and "another name" in err
    assert results.read_bytes() == data


def test_the_bar_is_on_stderr_only(run, monkeypatch, tmp_path):
    file, results, screen = tmp_path / "b.jsonl", tmp_path / "o.jsonl", io.StringIO()
    file.write_text('{"prompt": "Hello"}\n{\n')
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = run("--jsonl", file, *LIMITS, "--output", results)
    assert (code, out) == (1, "") and "answering" in screen.getvalue() and "0/2" in screen.getvalue()
    assert len(lines(results.read_text())) == 2
    code, out, _ = run("--jsonl", file, *LIMITS)
    assert code == 1 and len(lines(out)) == 2


def test_a_batch_without_prompts(run):
    code, out, err = run("--jsonl", "-", stdin=b"\n \n")
    assert (code, out, err.count("\n")) == (1, "", 1) and "no prompts" in err


def test_help_tells_the_exit_codes(run):
    code, out, _ = run("--help")
    assert code == 0 and "Exit codes: 0 done" in out and "141" in out
