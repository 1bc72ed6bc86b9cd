"""Tests of `generate --url`, which lets a server with OpenAI's API answer."""

import json

import pytest
from openai_server import FakeServer
from servers import ANSWER, Running

from tridecode import Engine

QUESTION = "What is 17 + 25?"
pytestmark = pytest.mark.usefixtures("state")


@pytest.fixture(scope="module")
def served():
    engine = Engine.load(device="cpu")
    with Running(engine) as running:
        yield running
    engine.close()


def test_answer_equals_the_local_one(run, served, tmp_path):
    local = ("generate", QUESTION, "--temperature", 0)
    expected = json.loads(run(*local, "--json")[1])
    for url in (f"127.0.0.1:{served.port}", f"http://127.0.0.1:{served.port}/v1"):
        code, out, err = run(*local, "--url", url)
        assert (code, out) == (0, f"{ANSWER}\n") and err.startswith("12 tokens · ") and err.count("\n") == 1
    report = json.loads(run(*local, "--url", url, "--json")[1])
    assert report["text"] == expected["text"] and report["finish_reason"] == "stop"
    assert report["usage"]["completion_tokens"] == 12 and report["timings"]["ttft"] > 0
    assert report.keys() <= expected.keys()
    file = tmp_path / "answers"
    assert run(*local, "--url", url, "--output", file, "--quiet") == (0, "", "") and file.read_text() == f"{ANSWER}\n"


def test_forms_of_the_answer_are_sent(run, served, tmp_path):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    (tmp_path / "schema").write_text(json.dumps(schema | {"additionalProperties": False}))
    url = ("--url", f"127.0.0.1:{served.port}", "--temperature", 0, "--quiet")
    assert run("generate", QUESTION, *url, "--choice", "41", "--choice", "43")[1].strip() in ("41", "43")
    assert len(run("generate", QUESTION, *url, "--regex", "[ab]{3}")[1]) == 4
    text = run("generate", QUESTION, *url, "--json-schema", tmp_path / "schema")[1]
    assert isinstance(json.loads(text)["ok"], bool)
    with FakeServer(tokens=1) as server:
        run("generate", QUESTION, "--url", server.url, "--json-schema", tmp_path / "schema")
        code, _, err = run("generate", QUESTION, "--url", server.url, "--regex", "a")
        [body] = server.bodies
        assert body["response_format"]["json_schema"]["schema"]["required"] == ["ok"]
        assert code == 1 and "regex: a server of no known kind does not support this option" in err


def test_several_answers_have_several_seeds(run):
    with FakeServer(tokens=1) as server:
        out = run("generate", "hi", "--url", server.url, "--n", 2, "--seed", 5, "--json")[1]
        assert [body["seed"] for body in server.bodies] == [5, 6]
        assert [json.loads(line)["seed"] for line in out.splitlines()] == [5, 6]


def test_prompts_of_all_kinds(run, monkeypatch, tmp_path):
    import io

    (tmp_path / "chat").write_text('[{"role": "user", "content": "a"}]')
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin\n"))
    with FakeServer(tokens=1) as server:
        run("generate", "--url", server.url, "--system", "Be brief.")
        run("generate", "--url", server.url, "--messages", tmp_path / "chat")
        run("generate", "--url", server.url, "--raw", "--prompt", "Once")
        first, second, third = server.bodies
    assert [message["content"] for message in first["messages"]] == ["Be brief.", "from stdin"]
    assert second["messages"] == [{"role": "user", "content": "a"}] and third["prompt"] == "Once"


@pytest.mark.parametrize("behavior", ["500", "cut", "garbage", "error"])
def test_failure_exits_1_with_one_line(run, behavior):
    with FakeServer(tokens=4, behave=lambda number: behavior) as server:
        code, _, err = run("generate", "hi", "--url", server.url)
    assert code == 1 and err.startswith("tridecode: error: ") and err.count("\n") == 1


@pytest.mark.parametrize(
    "options, why",
    [
        ("hi --graph none", "--graph sets up an engine in this process"),
        ("--jsonl x", "--jsonl needs an engine in this process"),
        ("--prompt-ids 1", "--prompt-ids needs an engine in this process"),
        ("hi --json --logprobs 1", "logprobs: not available with --url"),
    ],
)
def test_options_of_an_engine_are_refused(run, options, why):
    with FakeServer(tokens=1) as server:
        code, out, err = run("generate", "--url", server.url, *options.split())
        assert code in (1, 2) and out == "" and why in err and server.bodies == []
    assert "--api-key-file needs --url" in run("generate", "hi", "--api-key-file", "x")[2]
