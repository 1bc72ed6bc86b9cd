"""Tests of generate --jsonl: failed lines, files of results, and resumed batches."""

import fcntl
import hashlib
import io
import json
import os
import tracemalloc

import pytest
from generating import LIMITS, lines, user

from tridecode import Engine
from tridecode.cli.generate.results import locked
from tridecode.errors import PromptError

GOOD = [
    {"prompt": "Hello", "id": "a"},
    {"messages": [user("Hi")], "max_tokens": 3, "stop": "zzz"},
    {"prompt": "Hello", "temperature": 1.0, "seed": 3, "logit_bias": {"7": -1}, "stop_token_ids": [5]},
    {"prompt_ids": [5, 17, 300], "seed": 4, "id": 0},
]
BAD = [
    ("{", "not JSON"), ("[1]", "expected an object"), ("{}", "none"),
    ('{"prompt": "a", "messages": []}', "prompt and messages"), ('{"prompt": " "}', "empty"),
    ('{"messages": [1]}', "message 1"),
    ('{"prompt": "a", "temprature": 1}', "did you mean temperature?"), ('{"prompt": "a", "zz": 1}', "known are"),
    ('{"prompt": "a", "top_p": 5}', "top_p"), ('{"prompt": "a", "stop": 5}', "stop must be a text or a list of texts"),
    ('{"prompt": "a", "logit_bias": [1]}', "logit_bias"), ('{"prompt": "a", "ignore_eos": 1}', "ignore_eos"),
    ('{"prompt": "a", "logit_bias": {"388000": 1}}', "vocabulary"), (json.dumps({"prompt": "long " * 600}), "context"),
    (json.dumps({"prompt": "a", "logit_bias": {"9" * 5000: 1}}), "every key must be a token id"),
    ('{"prompt": "a", "id": [1]}', "id must be"), ('{"prompt": "a", "id": null}', "a string or an integer, got null"),
    ('{"prompt": "a", "id": true}', "id must be a string or an integer, got true"),
    ('{"prompt": "a", "id": 1.5}', "id must be a string or an integer, got 1.5"),
    ('{"prompt": "a", "id": 1e400}', "1e400 is out of range"),
    ('{"prompt": "a", "id": -1e999}', "out of range"), ('{"prompt": "a", "id": NaN}', "NaN is not a JSON number"),
    (json.dumps({"prompt": "a", "seed": 7})[:-1] + "7" * 5000 + "}", "a number of 5,001 digits"),
    ('{"messages": [{"role": "usr", "content": "a"}]}', "role must be one of system, developer, user, assistant, tool"),
    ('{"prompt": "a", "seed": null, "temperature": null}', "temperature"),
    ('{"prompt_ids": [5], "messages": [], "prompt": "a"}', "prompt and messages and prompt_ids"),
    ('{"prompt_ids": []}', "prompt_ids must be a list"), ('{"prompt_ids": [5, true]}', "[5, true]"),
    ('{"prompt_ids": "5"}', "a list of token ids"), ('{"prompt_ids": [999999]}', "not in the vocabulary"),
    ('{"prompt_ids": [-1]}', "not in the vocabulary"),
]  # fmt: skip


def test_batch_answers_equal_single_runs(generate, engine, tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text("\n\n".join(map(json.dumps, GOOD)) + "\r\n")
    code, out, err = generate("--jsonl", file, *LIMITS)
    found = lines(out)
    assert code == 0 and [entry["index"] for entry in found] == [0, 2, 4, 6]
    assert found[0]["id"] == "a" and "id" not in found[1] and found[3]["id"] == 0
    params = engine.default_params(temperature=0, max_tokens=5)
    assert found[0]["token_ids"] == list(engine.generate([user("Hello")], params).token_ids)
    assert found[1]["usage"]["completion_tokens"] == 3 and found[2]["seed"] == 3
    assert found[3]["token_ids"] == list(engine.generate([5, 17, 300], params).token_ids)
    assert err.startswith("4 answered, 0 failed, 4 cut by max_tokens · 1") and err.count("\n") == 1
    assert [entry["text"] for entry in lines(generate("--jsonl", "-", *LIMITS, stdin=file.read_bytes())[1])] == [
        entry["text"] for entry in found
    ]


def test_invalid_lines_do_not_affect_others(generate, tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_text("\n".join([*(line for line, _ in BAD), '{"prompt": "Hello"}']))
    code, out, err = generate("--jsonl", file, *LIMITS)
    found = [json.loads(line, parse_constant=pytest.fail) for line in out.splitlines()]
    assert code == 1 and len(found) == len(BAD) + 1 and "error" not in found[-1] and found[-1]["text"]
    for number, ((_, named), entry, line) in enumerate(zip(BAD, found, err.splitlines()), 1):
        assert entry["error"].startswith(f"line {number}: ") and named in entry["error"], entry
        assert line.startswith(f"tridecode: error: {file}: line {number}: ") and named in line
    assert err.splitlines()[-1].startswith(f"1 answered, {len(BAD)} failed")
    file.write_text('{"prompt": "a", "logit_bias": {"388000": 1}}\n{"prompt": "a"}')
    found = lines(generate("--jsonl", file, *LIMITS, "--logit-bias", "388000=1")[1])
    assert [entry["error"].split(": ")[1] for entry in found] == ["logit_bias", "--logit-bias"], (
        "the error names the wrong setting"
    )
    code, out, err = generate("--jsonl", "-", stdin=b"\n \n")
    assert (code, out, err.count("\n")) == (1, "", 1) and "no prompts" in err


def test_a_batch_resumes(generate, engine, monkeypatch, tmp_path):
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    file.write_text("\n".join([json.dumps(GOOD[0]), "{", *map(json.dumps, GOOD[1:])]))
    whole = lines(generate("--jsonl", file, *LIMITS)[1])
    submit, calls = engine.submit, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return submit(*args, **kwargs)

    monkeypatch.setattr(engine, "submit", interrupted)
    code, out, err = generate("--jsonl", file, *LIMITS, "--output", results, "--max-queue", 1)
    assert (code, out) == (130, "") and "1 answered, 1 failed, 3 left" in err
    assert [entry["index"] for entry in lines(results.read_text())] == [0, 1]
    with results.open("a") as cut:
        cut.write('{"index": 2, "input": "4')  # A killed program leaves such an incomplete line.
    code, _, err = generate("--jsonl", file, *LIMITS, "--output", results)
    assert code == 1 and len(calls) == 5 and "3 answered, 1 failed, 1 already answered" in err
    found = {entry["index"]: entry for entry in lines(results.read_text())}
    assert len(found) == 5 == results.read_text().count("\n")
    for entry in whole:
        assert entry.get("text") == found[entry["index"]].get("text")
    file.write_text(file.read_text().replace("\n{\n", "\n \n"))
    monkeypatch.setattr(Engine, "load", None)
    code, out, err = generate("--jsonl", file, *LIMITS, "--output", results)
    assert (code, out) == (0, "") and err == f"{results}: all 4 lines are answered\n"


def test_the_bar_is_on_stderr_only(generate, monkeypatch, tmp_path):
    file, results, screen = tmp_path / "b.jsonl", tmp_path / "o.jsonl", io.StringIO()
    file.write_text('{"prompt": "Hello"}\n{\n')
    screen.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    code, out, _ = generate("--jsonl", file, *LIMITS, "--output", results)
    assert (code, out) == (1, "") and "answering" in screen.getvalue() and "0/2" in screen.getvalue()
    assert len(lines(results.read_text())) == 2
    code, out, _ = generate("--jsonl", file, *LIMITS)
    assert code == 1 and len(lines(out)) == 2


@pytest.fixture
def batch(generate, engine, monkeypatch, tmp_path):
    """Return a function that runs a batch of two prompts. Loading an engine fails unless `answers` is called first."""
    file, results = tmp_path / "b.jsonl", tmp_path / "o.jsonl"
    file.write_text('{"prompt": "Hello"}\n{"prompt": "Bye"}\n')
    load = Engine.load
    monkeypatch.setattr(Engine, "load", None)

    def run(path=results):
        return generate("--jsonl", file, *LIMITS, "--output", path)

    run.answers = lambda: monkeypatch.setattr(Engine, "load", load)
    run.results = results
    return run


def key(line):
    return hashlib.sha256(line.encode()).hexdigest()[:16]


OWN = key('{"prompt": "Hello"}')
ENTRY = {"index": 0, "input": OWN, "token_ids": [5], "text": "a", "finish_reason": "stop"}


UNRELATED = [
    "notes", "notes\n", '{"a": 1}\n', "[]\n", "\udcff\n",
    '{"index": [], "input": ""}\n', '{"index": 0, "input": "other"}\n', '{"index": 9, "input": "other"}\n',
    "{", '{"index": ', '{"index": 0, "note": "mine"}', '{"index": 1, "input": "4',
    f'{{"index": 1, "input": "{OWN}", "text": "of another line"',
    '{"index": 1, "input": "0123456789abcdef", "error": "mine"}\n',
    f'{{"index": 0, "input": "{OWN}"}}\n',
    json.dumps(ENTRY) + '\n{"index": 1, "note": "mine"}',
    json.dumps(ENTRY | {"index": True}) + "\n",
    json.dumps(ENTRY) + "\n\0\0\0\n",
]  # fmt: skip


@pytest.mark.parametrize("content", UNRELATED)
def test_unrelated_file_is_not_changed(batch, content):
    batch.results.write_bytes(data := content.encode(errors="surrogateescape"))
    code, out, err = batch()
    assert (code, out, err.count("\n")) == (1, "", 1) and str(batch.results) in err and "another name" in err
    assert batch.results.read_bytes() == data


@pytest.mark.parametrize(
    "rest",
    [
        f'{{"index": 0, "input": "{OWN}"',
        json.dumps(ENTRY)[:-10],
        json.dumps(ENTRY),
        json.dumps(ENTRY | {"index": 1, "input": key('{"prompt": "Bye"}'), "error": "line 2: x"}) + '\n{"ind',
        '{"index": 1, "input": "0123456789abcdef", "error": "line 2: of a line that was mended since"}\n{"index": 1, ',
    ],
)
def test_incomplete_result_is_answered_again(batch, rest):
    batch.results.write_text(rest)
    batch.answers()
    assert batch()[0] == 0
    found = lines(batch.results.read_text())
    assert [entry["index"] for entry in found] == [0, 1] and all("error" not in entry for entry in found)


@pytest.mark.parametrize("cut", [0, 30])
def test_nul_bytes_at_the_end_are_reported_with_a_fix(batch, cut):
    begun = json.dumps(ENTRY) + "\n" + json.dumps(ENTRY)[:cut]
    batch.results.write_text(begun + "\0" * 5000)
    code, _, err = batch()
    assert (code, err.count("\n")) == (1, 1) and f"from byte {len(begun):,} on it contains NUL bytes" in err
    assert f"truncate --size={len(begun)}," in err and batch.results.stat().st_size == len(begun) + 5000
    os.truncate(batch.results, len(begun))
    batch.answers()
    assert batch()[0] == 0 and [entry["index"] for entry in lines(batch.results.read_text())] == [0, 1]


def test_a_second_process_on_one_output_is_refused(batch, engine, monkeypatch):
    busy, second, submit = f"{batch.results}: another process writes to it", [], engine.submit
    batch.answers()
    # The batch must repeat this request, because it failed.
    batch.results.write_text('{"index": 1, "input": "0123456789abcdef", "error": "line 2: x"}\n')

    def meanwhile(*args, **kwargs):
        with pytest.raises(PromptError, match="another process") as refused, locked(str(batch.results)):
            pass
        second.append(str(refused.value))
        return submit(*args, **kwargs)

    monkeypatch.setattr(engine, "submit", meanwhile)
    assert batch()[0] == 0 and len(second) == 2 and all(line.startswith(busy) for line in second)
    with locked(str(batch.results)):
        code, _, err = batch()
    assert (code, err.count("\n")) == (1, 1) and busy in err
    code, _, err = batch()
    assert code == 0 and "all 2 lines are answered" in err


def test_file_replaced_during_open_is_not_appended_to(batch, monkeypatch, tmp_path):
    flock = fcntl.flock

    def replaced(file, operation):
        (tmp_path / "other").write_text("")
        (tmp_path / "other").replace(batch.results)
        flock(file, operation)

    def unsupported(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", replaced)
    code, _, err = batch()
    assert (code, err.count("\n")) == (1, 1) and "another process" in err
    monkeypatch.setattr(fcntl, "flock", unsupported)
    batch.answers()
    assert batch()[0] == 0 and len(lines(batch.results.read_text())) == 2, (
        "the batch failed on a file system without locks"
    )


def test_huge_unrelated_file_is_not_read_whole(batch, monkeypatch):
    monkeypatch.setattr("tridecode.cli.generate.results.LONGEST", 1 << 20)
    with batch.results.open("wb") as file:
        file.write(b"x")
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        assert "not a result of this command" in batch()[2] and tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_results_are_written_to_a_pipe(batch, tmp_path):
    """A FIFO, and the descriptor that a shell gives as >(command)."""
    batch.answers()
    read, write = os.pipe()
    assert batch(f"/dev/fd/{write}")[0] == 0
    os.close(write)
    with os.fdopen(read) as pipe:
        assert [entry["index"] for entry in lines(pipe.read())] == [0, 1]
    assert batch("/dev/stdout")[1].count("\n") == 2
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    assert batch(tmp_path / "fifo")[0] == 0
    with os.fdopen(reader) as pipe:
        assert [entry["index"] for entry in lines(pipe.read())] == [0, 1]
