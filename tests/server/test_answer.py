"""The parts of an answer: which text stop strings end, which tokens have log-probabilities, and the last chunk."""

import json
from types import SimpleNamespace

import pytest
from servers import GREEDY, Running, events

from tridecode import Engine
from tridecode.results import TokenLogprobs
from tridecode.server.serializers import CompletionSerializer
from tridecode.text.thinking import CLOSE, OPEN

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}}}]
THINKS = f"Wait. 1\n\n2 END{CLOSE}\n\n"


@pytest.fixture(scope="module")
def served():
    with Engine.load(device="cpu", slots=4) as engine, Running(engine) as running:
        yield running


@pytest.fixture
def answer(served, monkeypatch):
    """Return a function that sends a request whose answer has a given text, streamed or not.

    The bundled model does not think, so a grammar forces the text, as if the prompt had opened thinking. The function
    returns a choice of Chat Completions.
    """
    monkeypatch.setattr(served.engine.tokenizer, "supports_thinking", True)
    monkeypatch.setattr("tridecode.text.tokenizer.last_tag", lambda text: OPEN)

    def answer(text, stream=False, **more):
        forced = {"grammar": f"start: {json.dumps(text)}"}
        monkeypatch.setattr("tridecode.server.app.answer_constraint", lambda *args: forced)
        payload = GREEDY | more
        if not stream:
            return served.post("/v1/chat/completions", payload).json()["choices"][0]
        with served.stream(payload, "/v1/chat/completions") as got:
            chunks = [chunk["choices"][0] for chunk in events(got.iter_lines())[:-1]]
        message = {key: "".join(chunk["delta"].get(key) or "" for chunk in chunks)
                   for key in ("content", "reasoning_content")}  # fmt: skip
        calls = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", ())]
        names = [call["function"]["name"] for call in calls if "name" in call["function"]]
        message |= {"tool_calls": [{"function": {"name": name}} for name in names]}
        content = [token for chunk in chunks for token in (chunk["logprobs"] or {"content": ()})["content"]]
        last = chunks[-1]["finish_reason"]
        return {"message": message, "finish_reason": last, "logprobs": {"content": content}, "chunks": chunks}

    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "stop, text, content, reason",
    [
        ("END", f"{THINKS}The sum is 3. END It is.", "The sum is 3. ", "stop"),
        ("\n\n", f"{THINKS}The sum is 3.\n\nIt is.", "The sum is 3.", "stop"),
        ("\n\n", f"{THINKS}The sum is 3.", "The sum is 3.", "stop"),
        (CLOSE, f"{THINKS}The sum", "The sum", "stop"),
        ("1", f"{THINKS}Some\n{CALL}", "Some", "tool_calls"),
        ("\n", f"{THINKS}Some\n{CALL}", "Some", "tool_calls"),
        ("call", f"{THINKS}{CALL}\n{CALL}", "", "tool_calls"),
        ("one two", f"{THINKS}one{CALL} two", "onetwo", "tool_calls"),
        ("</s", f"{THINKS}a </s> b", "a ", "stop"),
    ],
)
def test_stop_string_ends_only_content(answer, stream, stop, text, content, reason):
    got = answer(text, stream, stop=stop, tools=TOOLS)
    message = got["message"]
    assert (message["content"] or "", message["reasoning_content"]) == (content, "Wait. 1\n\n2 END")
    assert len(message.get("tool_calls") or ()) == text.count("<tool_call>")
    assert got["finish_reason"] == reason


def test_stop_string_in_content_ends_the_generation(served, answer):
    before = served.metric("generation_tokens_total")
    got = answer(f"{THINKS}yes END{' no' * 90}", stop="END")
    assert got["message"]["content"] == "yes " and served.metric("generation_tokens_total") - before < 60


def test_limit_after_a_partial_stop_string_shows_it(answer):
    text = f"{THINKS}abc"
    got = answer(text, stop="abcd", max_tokens=200)
    assert (got["message"]["content"], got["finish_reason"]) == ("abc", "stop")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "more, text, content",
    [
        ({}, f"{THINKS}The \U0001f680 is 3.", "The \U0001f680 is 3."),
        ({"stop": " END"}, f"{THINKS}is 3. END.", "is 3."),
        ({"tools": TOOLS}, f"{THINKS}So\n{CALL}", "So"),
        ({"tools": TOOLS}, f"{THINKS}{CALL}\nDone.", "Done."),
    ],
)
def test_chat_logprobs_cover_the_content(answer, stream, more, text, content):
    got = answer(text, stream, logprobs=True, **more)
    data = b"".join(bytes(token["bytes"]) for token in got["logprobs"]["content"]).decode()
    assert data.strip() == content


def test_top_logprobs_of_completions_keep_tokens_of_the_same_text(served):
    """No byte of the character is text, so all byte tokens would have the name U+FFFD."""
    serializer = CompletionSerializer("bundled", served.engine.tokenizer)
    several = [i for i in range(4096) if b"\x80" <= served.engine.tokenizer.token_bytes(i) <= b"\xff"][:5]
    assert len(several) == 5
    top = tuple((token, -float(i)) for i, token in enumerate(several[:4]))
    got = serializer._logprobs([(several[4], TokenLogprobs(-9.0, top), 0), (several[0], TokenLogprobs(0.0, top), 0)])
    assert [len(values) for values in got["top_logprobs"]] == [5, 4]
    for name, value, values in zip(got["tokens"], got["token_logprobs"], got["top_logprobs"]):
        assert values[name] == value and name.startswith("bytes:\\x")


@pytest.mark.parametrize("names", [["a", "a", "a"], ["b", "a", "a"]])
def test_top_logprobs_of_completions_keep_equal_names(names):
    tokenizer = SimpleNamespace(token_bytes=lambda token: names[token].encode())
    top = ((1, -0.5), (2, -1.0))
    got = CompletionSerializer("bundled", tokenizer)._logprobs([(0, TokenLogprobs(-2.0, top), 0)])
    (values,) = got["top_logprobs"]
    assert sorted(values.values()) == [-2.0, -1.0, -0.5] and values[names[0]] == -2.0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("more", [{}, {"stop": "42"}, {"max_tokens": 3}, {"n": 2}, {"logprobs": 1}])
def test_finish_reason_has_a_chunk_of_its_own(served, path, more):
    payload = GREEDY | {"return_token_ids": True} | more
    if path == "/v1/completions":
        payload["prompt"] = payload.pop("messages")[0]["content"]
    elif "logprobs" in more:
        payload["logprobs"] = True
    with served.stream(payload, path) as got:
        choices = [chunk["choices"][0] for chunk in events(got.iter_lines())[:-1]]
    ends = [choice for choice in choices if choice["finish_reason"]]
    assert len(ends) == more.get("n", 1)
    for end in ends:
        assert not end.get("text") and not end.get("delta", {}).get("content")
        assert [choice for choice in choices if choice["index"] == end["index"]][-1] is end


def test_finish_reason_follows_the_calls(answer):
    chunks = answer(f"{THINKS}{CALL}", stream=True, tools=TOOLS)["chunks"]
    assert (chunks[-1]["delta"], chunks[-1]["finish_reason"]) == ({}, "tool_calls")
    assert all(chunk["finish_reason"] is None for chunk in chunks[:-1])


def test_message_start_reports_the_cache(served):
    text = "Tell me a story. " * 20
    payload = {"model": "bundled", "max_tokens": 3, "messages": [{"role": "user", "content": text}]}
    usages = []
    for _ in range(2):
        with served.stream(payload, "/v1/messages") as got:
            data = [json.loads(line[6:]) for line in got.iter_lines() if line.startswith("data: ")]
        start = next(event["message"]["usage"] for event in data if event["type"] == "message_start")
        (end,) = [event["usage"] for event in data if event["type"] == "message_delta"]
        assert all(start[name] == end[name] for name in ("input_tokens", "cache_read_input_tokens"))
        usages.append(start)
    cold, warm = usages
    assert cold["cache_read_input_tokens"] < 10 < warm["cache_read_input_tokens"]
    assert len({usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages}) == 1
