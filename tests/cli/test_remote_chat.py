"""Chats with a server: tridecode serve with the bundled model, and simulated servers with faults."""

import json
import re
import sys

import pytest
from chats import READY, as_messages, enter, leave
from openai_server import FakeServer
from servers import ANSWER, CHAT, Running, slow_passes, until

from tridecode import Engine, SamplingParams
from tridecode.cli.chat.remote import STRUCTURED, Answer, ServerError, events, sent

QUESTION = CHAT[0]["content"]


@pytest.fixture(scope="module")
def served():
    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        yield running


@pytest.fixture
def run_chat(served, piped, monkeypatch):
    """Return a function that runs a piped chat with the server and returns exit code, stdout and stderr."""
    monkeypatch.delenv("TRIDECODE_API_KEY", raising=False)
    return lambda text, *argv, url=served.url: piped(text, "--url", url, *argv)


def errors(err):
    start = "tridecode: error: "
    return [line.removeprefix(start) for line in err.splitlines() if line.startswith(start)]


# ---- tridecode serve


def test_remote_chat_matches_local_chat(run_chat, piped, served):
    lines = f"Hi, I'm Nora!\n{QUESTION}\nWhat's my name?\n"
    code, out, err = run_chat(lines, "--temperature", 0)
    assert (code, out) == piped(lines, "--temperature", 0)[:2] and ANSWER in out
    speeds = [line.split(" · ") for line in err.splitlines()]
    assert len(speeds) == 3 and all(len(speed) == 5 for speed in speeds)
    assert speeds[1][0] == "12 tokens" and speeds[1][1].endswith(" tok/s") and not speeds[1][3].startswith("0 of")
    assert speeds[1][4].endswith(f"{served.engine.capacity:,}")
    for end in ("/v1", "/"):
        assert run_chat(QUESTION, "--temperature", 0, url=f"{served.url}{end}")[:2] == (0, f"{ANSWER}\n")


def test_raw_chat(run_chat, served):
    expected = served.engine.generate("Once", SamplingParams(temperature=0, max_tokens=5)).text
    code, out, err = run_chat("Once", "--raw", "--temperature", 0, "--max-tokens", 5)
    assert (code, out) == (0, f"{expected}\n") and "the answer was cut: max_tokens (5) was reached" in err


def test_only_set_options_are_sent(run_chat, served, monkeypatch):
    sent, submit = [], served.engine.submit

    def spy(prompt, params, **options):
        sent.append(params)
        return submit(prompt, params, **options)

    monkeypatch.setattr(served.engine, "submit", spy)
    options = ("--seed", 4, "--top-k", 3, "--logit-bias", "5=-2.5", "--stop", "!", "--repetition-penalty", 1.5)
    lines = "Hello\n/set top_k default\n/set stop none\n/set min_p 0.5\n/set min_tokens 2\nHello\n"
    assert run_chat(lines, *options)[0] == 0
    first, second = sent
    fixed = dict(seed=4, logit_bias={5: -2.5}, repetition_penalty=1.5)
    assert first == served.engine.default_params(**fixed, top_k=3, stop=["!"])
    assert second == served.engine.default_params(**fixed, min_p=0.5, min_tokens=2)


def test_commands(run_chat, served):
    lines = f"{QUESTION}\n/stats\n/set\n/model\n/model other\n/model bundled\n/think\n/retry\n"
    code, out, err = run_chat(lines, "--temperature", 0)
    assert out == f"{ANSWER}\n" * 2 and code == 0
    assert f"model bundled at {served.url}, a server of tridecode\n1 turn\nlast answer: 12 tokens" in err
    assert "temperature          0.0\ntop_k                the server's default\n" in err
    listed = re.findall(r"^(\w+) +the server's default$", err, re.MULTILINE)
    assert sorted([*listed, "temperature"]) == sorted(STRUCTURED), "/set lists options that the server does not support"
    [absent] = errors(err)
    assert absent == f"the server at {served.url} has no model 'other'; its models are bundled"
    assert f"bundled on {served.url}: context of 2,048 tokens" in err and "thinking is on" in err
    lines = f"/set top_k\n/set seed\n/set top_k 7\n/set top-k\n{QUESTION}\n"
    lines += "/continue\n/adapter json\n/set overflow drop-oldest\n"
    code, out, err = run_chat(lines, "--temperature", 0, "--seed", 4, "--quiet")
    assert (code, out) == (0, f"{ANSWER}\n")
    assert err.splitlines() == [
        "tridecode: error: /set top_k needs a value; the current value is the server's default",
        "tridecode: error: /set seed needs a value; the current value is 4",
        "top_k is 7",
        "tridecode: error: /set top_k needs a value; the current value is 7",
        'tridecode: error: a server cannot continue an answer; send a message such as "continue"',
        "tridecode: error: a server lists its adapters as models; use /model NAME",
        "overflow is drop-oldest",
    ]


def test_template_error_of_server_is_shown(run_chat):
    with FakeServer(owner="tridecode", behave=lambda number: "template") as server:
        code, out, err = run_chat("Hello", "--think", "off", url=server.url)
    [line] = errors(err)
    assert (code, out) == (1, "") and line.startswith("the server answers 400: ") and "enable_thinking" in line
    assert "/think on leaves thinking to the server" in line


def test_too_long_turn(run_chat, served):
    lines = f"{'dog ' * 1800}\n{QUESTION}\n{'cat ' * 1200}\n{'dog ' * 4000}\n"
    options = ("--max-tokens", 3)
    code, out, err = run_chat(lines, *options)
    first, second = errors(err)
    assert code == 1 and "the context holds 2,048; /undo, /clear or /set" in first
    assert second.startswith("this message alone needs") and "--max-seq-len" not in second
    code, out, err = run_chat(lines, *options, "--overflow", "drop-oldest")
    assert len(errors(err)) == 1 and "turn 1 is no longer sent to the model" in err
    assert run_chat(lines + "Hello\n", *options, "--overflow", "stop")[1].count("\n") == 2


def test_api_key(piped, tmp_path, monkeypatch):
    with Engine.load(device="cpu") as engine, Running(engine, api_keys=("right",)) as running:
        ask = lambda *argv: piped(QUESTION, "--url", running.url, "--temperature", 0, *argv)  # noqa: E731
        monkeypatch.delenv("TRIDECODE_API_KEY", raising=False)
        code, _, err = ask()
        assert code == 1 and errors(err) == [
            "the server answers 401: the API key is missing or wrong; send the header Authorization: Bearer KEY; "
            "give TRIDECODE_API_KEY or "
            "--api-key-file"
        ]
        (tmp_path / "key").write_text("right\n")
        assert ask("--api-key-file", tmp_path / "key")[:2] == (0, f"{ANSWER}\n")
        monkeypatch.setenv("TRIDECODE_API_KEY", "right")
        assert ask()[:2] == (0, f"{ANSWER}\n")


def test_interrupt_cancels_server_request(terminal, monkeypatch, tmp_path):
    with Engine.load(device="cpu") as engine, Running(engine) as running:
        slow_passes(engine, monkeypatch, 0.02)
        child = terminal("--url", running.url, "--ignore-eos", "--seed", 1, TRIDECODE_API_KEY="")
        child.send("Once upon a time\r")
        until(lambda: running.metric("generation_tokens_total") > 8)
        child.sendintr()
        child.expect(r"stopped after \d+ chunks and [\d.]+ s; kept in the conversation")
        until(lambda: running.metric("num_requests_running") == 0)
        assert running.metric("generation_tokens_total") < 500
        child.expect_exact(READY)
        child.send("/set ignore_eos default\r")
        enter(child, "What is 17 + 25?\r", "first ")
        leave(child)


# ---- other kinds of servers


def test_tab_completes_models_and_options_of_the_server(terminal):
    with FakeServer(tokens=1) as server:
        child = terminal("--url", server.url, TRIDECODE_API_KEY="")
        enter(child, "/model an\t\r", f"another on {server.url}: ")
        enter(child, "/set top_\t0.5\r", "top_p is 0.5")  # Completion selects top_p, because it does not list top_k.
        child.send("/set overflow d\t\r")  # Completion does not list drop-oldest.
        child.expect_exact("overflow is error")
        child.expect_exact(READY)
        leave(child)


@pytest.mark.parametrize("behavior, message", [
    ("500", "the server answers 500: out of luck"),
    ("503", "the server answers 503: 256 requests wait already; try again in 2 s"),
    ("401", "the server answers 401: no key; give TRIDECODE_API_KEY or --api-key-file"),
    ("text", "the server answers 502: <html>Bad gateway</html>"),
    ("cut", "the connection to URL was lost (peer closed connection"),
    ("garbage", "the server sent an event that is not part of OpenAI's API: {\"choices\": [}"),
    ("error", "the server ended the answer: the engine died"),
])  # fmt: skip
def test_failed_turn_prints_one_line(run_chat, behavior, message):
    with FakeServer(tokens=6, behave=lambda number: behavior if number == 1 else "ok") as server:
        code, out, err = run_chat("one\ntwo\nthree\n", url=server.url)
        [line] = errors(err)
        assert code == 1 and line.startswith(message.replace("URL", server.url))
        assert line.endswith("; the turn is not kept")
        answer = " word" * 6
        assert out.startswith(f"{answer}\n") and out.endswith(f"{answer}\n")
        assert server.bodies[2]["messages"] == as_messages("one", answer, "three")
        assert server.bodies[2]["stream_options"] == {"include_usage": True}


def test_failed_retry_is_not_counted(run_chat):
    with FakeServer(tokens=1, behave=lambda number: "500" if number in (2, 3) else "ok") as server:
        run_chat("one\n/retry\n/retry\n/retry\n/retry\n", "--seed", 3, url=server.url)
        assert [body["seed"] for body in server.bodies] == [3, 4, 5, 5, 5]


def test_unreachable_server_fails_each_turn(run_chat):
    def behave(number):
        raise ConnectionError

    with FakeServer(behave=behave) as server:
        code, out, err = run_chat("one\ntwo\n", url=server.url)
    assert (code, out) == (1, "") and len(errors(err)) == 2
    assert all(line.startswith(f"the connection to {server.url} was lost") for line in errors(err))
    [line] = errors(run_chat("one\n", url=server.url)[2])
    assert line.startswith(f"cannot connect to {server.url}: ") and line.endswith("; is a server there?")


def test_unreported_statistics_are_omitted(run_chat):
    with FakeServer(tokens=3, gap=0.01) as server:
        err = run_chat("one\n/model\n/think off\n/set overflow drop-oldest\n", url=server.url)[2]
        assert "overflow drop-oldest needs a server that counts tokens" in err
        assert "\n3 tokens · " in err and "reused" not in err and "· context" not in err
        assert f"a-model on {server.url}: context of unknown length" in err
        assert "thinking cannot be switched off: a server of" in err
    with FakeServer(tokens=3, behave=lambda number: "no usage") as server:
        err = run_chat("one\n", url=server.url)[2]
        assert err.splitlines()[1].startswith("first token 0.") and err.count("\n") == 2


def test_server_that_counts_nothing(run_chat):
    """Some servers report a usage of zeros."""
    with FakeServer(tokens=3, gap=0.01, behave=lambda number: "zero usage") as server:
        line = run_chat("one\n", url=server.url)[2].splitlines()[1]
    assert re.fullmatch(r"first token 0\.\d\d s · 0\.\d s", line)


UNSUPPORTED = {
    "--graph none": "--graph sets up an engine in this process",
    "--graph-stats": "--graph-stats sets up an engine in this process",
    "--no-prefix-sharing": "--no-prefix-sharing sets up an engine in this process",
    "--prompt-ms=15": "--prompt-ms sets up an engine in this process",  # The value is the default value.
    "--overflow drop-oldest": "--overflow drop-oldest needs a server that counts tokens",
    "--top-k 3": "--top-k: a server of no known kind does not support this option and might ignore it",
    "--top-p 3": "--top-p: expected a number above 0 to 1, got '3'",
    "--model a-modle": "has no model 'a-modle'; did you mean a-model?",
}


def test_unsupported_options_are_refused(run_chat, piped):
    with FakeServer() as server:
        for options, message in UNSUPPORTED.items():
            code, out, err = run_chat("one\n", *options.split(), url=server.url)
            assert code in (1, 2) and out == "" and message in err and err.count("\n") == 1 and server.bodies == []
    code, _, err = piped("one\n", "--api-key-file", "x")
    assert code == 2 and "--api-key-file needs --url" in err


def test_switch_server_model(run_chat):
    with FakeServer(tokens=1) as server:
        run_chat("one\n/model another\ntwo\n", url=server.url)
        assert [body["model"] for body in server.bodies] == ["a-model", "another"]


def test_missing_httpx(piped, monkeypatch):
    monkeypatch.delitem(sys.modules, "tridecode.cli.chat.remote")
    monkeypatch.setitem(sys.modules, "httpx", None)
    code, _, err = piped("one\n", "--url", "http://127.0.0.1:1")
    fix = "install it: pip install 'tridecode[serve]'"
    assert code == 1 and errors(err) == [f"chat --url needs the package httpx; {fix}"]


def test_sampling_options_are_renamed(run_chat):
    with FakeServer(tokens=1, owner="llamacpp") as server:
        run_chat("one\n", "--repetition-penalty", 1.2, "--top-k", 3, url=server.url)
        [body] = server.bodies
        assert (body["repeat_penalty"], body["top_k"]) == (1.2, 3) and "repetition_penalty" not in body


# ---- events


def sse_events(*deltas, **last):
    answer = Answer()
    texts = [answer.event(json.dumps({"choices": [{"delta": delta}]}).encode()) for delta in deltas]
    answer.event(json.dumps({"choices": [{"delta": {}, "finish_reason": "stop"} | last]}).encode())
    return texts, answer.end()


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_separate_thinking_is_tagged(name):
    texts, last = sse_events({"role": "assistant", "content": None, name: "Hm"}, {name: ", 42?"}, {"content": "42."})
    assert texts == ["<think>\nHm", ", 42?", "\n</think>\n\n42."] and last.text == ""
    texts, last = sse_events({name: "Hm"}, finish_reason="length")
    assert texts + [last.text] == ["<think>\nHm", "\n</think>\n\n"] and last.finish_reason == "length"


def test_earlier_thinking_is_not_sent():
    assert sent(as_messages("a", "<think>\nHm\n</think>\n\n42.", "b")) == as_messages("a", "42.", "b")


def test_incomplete_stream_is_an_error():
    answer = Answer()
    answer.event(b'{"choices": [{"delta": {"content": "Half"}}]}')
    with pytest.raises(ServerError, match="the stream ended early"):
        answer.end()


@pytest.mark.parametrize("data", [
    b"[]", b"1", b"{", b'{"choices": [1]}', b'{"choices": 1}', b'{"choices": [{"delta": {"content": 1}}]}',
    b'{"usage": {"tokens": 1}}', b'{"usage": {"prompt_tokens": "1", "completion_tokens": 2}}', b"[" * 100_000, b"\xff",
])  # fmt: skip
def test_arbitrary_events(data):
    with pytest.raises(ServerError, match="not part of OpenAI's API") as caught:
        Answer().event(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_events_split_at_newlines():
    text = 'data: {"a": "\u2028"}\r\n\r\n: comment\n\ndata:x\n\ndata: [DONE]\n\ndata: y\n'.encode()
    for size in (1, 3, len(text)):
        data = list(events(text[i : i + size] for i in range(0, len(text), size)))
        assert data == ['{"a": "\u2028"}'.encode(), b"x"]
