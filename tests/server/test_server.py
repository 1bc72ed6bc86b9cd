"""The HTTP server with the bundled model: endpoints, invalid requests, and access."""

import json
import logging
import re
import shutil
import threading
import time
import warnings
from pathlib import Path

import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from servers import ANSWER, CHAT, GREEDY, LONG, Running, events, slow_passes, until

from tridecode import Engine, SamplingParams
from tridecode.checkpoint.hub import BUNDLED
from tridecode.text.prompt import Encoded
from tridecode.text.thinking import CLOSE, OPEN
from tridecode.version import __version__

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def served():
    with Engine.load(device="cpu", slots=4) as engine, Running(engine, max_queue=200) as running:
        yield running


@pytest.fixture
def client(served):
    return served.client()


def strict(model, received):
    """Validate an object of the client, which does not validate responses itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validated = model.model_validate(received.model_dump(), strict=True)
    required = {name for name, field in model.model_fields.items() if field.is_required()}
    assert required <= received.model_fields_set
    return validated


# ---- answers


def test_chat(client, served):
    got = client.chat.completions.create(**GREEDY)
    strict(ChatCompletion, got)
    [choice] = got.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert {"refusal", "annotations"} <= choice.message.model_fields_set and "logprobs" in choice.model_fields_set
    expected = served.engine.generate(CHAT, SamplingParams(temperature=0))
    assert got.usage.prompt_tokens == expected.usage.prompt_tokens
    assert got.usage.completion_tokens == expected.usage.completion_tokens
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    assert got.model == "bundled" and got.id.startswith("chatcmpl-")


def test_chat_stream_sends_role_with_first_token(client):
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    *tokens, last = chunks
    assert tokens[0].choices[0].delta.role == "assistant" and tokens[0].choices[0].delta.content
    assert all(chunk.choices[0].delta.role is None for chunk in tokens[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in tokens) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in tokens[-2:]] == [None, "stop"]
    assert last.choices == [] and last.usage.completion_tokens == 12 and all(c.usage is None for c in tokens)
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_ids_stay_packed(client, served, monkeypatch, stream):
    """Lists of ids would cost memory and time for long prompts.

    Checks for thinking and response formats read only the end of a prompt.
    """
    monkeypatch.setattr(served.engine.tokenizer, "supports_thinking", True)
    monkeypatch.setattr(Encoded, "ids", property(lambda self: pytest.fail("a list of all ids was built")))
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes"]}}}
    assert list(client.chat.completions.create(**GREEDY, response_format=form, max_tokens=8, stream=stream))


def test_stream_without_usage_omits_field_and_ends_with_done(served):
    with served.stream(GREEDY, "/v1/chat/completions") as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(got.iter_lines())
    assert done == "[DONE]" and all("usage" not in chunk for chunk in chunks) and chunks[-1]["choices"]


def test_answers_of_one_request_use_consecutive_seeds(client):
    payload = GREEDY | {"temperature": 3, "seed": 7, "max_tokens": 12}
    got = client.chat.completions.create(**payload, n=3)
    texts = [choice.message.content for choice in got.choices]
    assert [choice.index for choice in got.choices] == [0, 1, 2] and len(set(texts)) == 3
    alone = client.chat.completions.create(**payload | {"seed": 8})
    assert alone.choices[0].message.content == texts[1]
    assert got.usage.prompt_tokens == alone.usage.prompt_tokens
    streamed = [""] * 3
    for chunk in client.chat.completions.create(**payload, n=3, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_chat_logprobs(client):
    got = client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2)
    strict(ChatCompletion, got)
    content = got.choices[0].logprobs.content
    assert len(content) == got.usage.completion_tokens - 1, "the end token is not content"
    assert b"".join(bytes(token.bytes) for token in content).decode() == ANSWER
    assert all(len(token.top_logprobs) == 2 and token.top_logprobs[0].token == token.token for token in content)
    streamed = []
    for chunk in client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=2, stream=True):
        streamed += chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else []
    assert [token.token for token in streamed] == [token.token for token in content]


def test_completion_logprobs_have_offsets(client):
    got = client.completions.create(model="bundled", prompt="Once", temperature=0, max_tokens=6, logprobs=1)
    strict(Completion, got)
    logprobs, text = got.choices[0].logprobs, got.choices[0].text
    for token, offset in zip(logprobs.tokens, logprobs.text_offset):
        assert text[offset:].startswith(token)
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 6


def test_stop_strings_do_not_change_offsets(client):
    payload = {"model": "bundled", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6, "logprobs": 1}
    free, delayed = (client.completions.create(**payload, stop=stop).choices[0] for stop in (None, "there was"))
    # " the" may be the start of the stop string, so the server delays it.
    assert free.text == delayed.text and " the" in delayed.logprobs.tokens
    assert delayed.logprobs.text_offset == free.logprobs.text_offset


@pytest.mark.parametrize("echo", [False, True])
def test_zero_logprobs_returns_only_sampled_tokens(client, echo):
    payload = {"model": "bundled", "prompt": "Once", "temperature": 0, "max_tokens": 3, "echo": echo}
    none, one = (client.completions.create(**payload, logprobs=count).choices[0].logprobs for count in (0, 1))
    assert none.tokens == one.tokens
    assert none.token_logprobs[echo:] == pytest.approx(one.token_logprobs[echo:], abs=1e-4)
    own = [{token: value} for token, value in zip(none.tokens, none.token_logprobs)]
    assert none.top_logprobs[echo:] == own[echo:]


def test_echo_with_logprobs_scores_the_prompt(client, served):
    prompts = ["Once upon a time", "Hi"]
    got = client.completions.create(model="bundled", prompt=prompts, temperature=0, max_tokens=3, logprobs=2, echo=True)
    for prompt, choice in zip(prompts, got.choices):
        ids, logprobs = served.engine.encode(prompt), choice.logprobs
        expected = served.engine.score(ids).log_softmax(-1)
        # The schema does not allow None for the first token, but clients expect it.
        assert logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
        for i, token in enumerate(ids[1:]):
            assert logprobs.token_logprobs[i + 1] == pytest.approx(float(expected[i, token]), abs=1e-4)
        assert len(logprobs.tokens) == len(ids) + 3 and choice.text.startswith(prompt)
        for token, offset in zip(logprobs.tokens, logprobs.text_offset):
            assert choice.text[offset:].startswith(token)
    assert got.usage.completion_tokens == 6


@pytest.mark.parametrize("stream", [False, True])
def test_completions_of_several_prompts_with_echo(client, served, stream):
    prompts = ["Once upon a time", "The cat"]
    payload = dict(model="bundled", prompt=prompts, temperature=0, max_tokens=5, echo=True, stream=stream)
    got = client.completions.create(**payload)
    texts = [""] * 2
    for part in got if stream else [got]:
        strict(Completion, part) if not stream else None
        for choice in part.choices:
            texts[choice.index] += choice.text
    params = SamplingParams(temperature=0, max_tokens=5)
    assert texts == [prompt + served.engine.generate(prompt, params).text for prompt in prompts]


def test_token_ids_as_prompt(client, served):
    ids = served.engine.encode("Once upon a time")
    text = served.engine.generate(ids, SamplingParams(temperature=0, max_tokens=4)).text
    for prompt, answers, tokens in ((ids, 1, len(ids)), ([ids, ids[:2]], 2, len(ids) + 2)):
        got = client.completions.create(model="bundled", prompt=prompt, temperature=0, max_tokens=4)
        assert got.choices[0].text == text and len(got.choices) == answers
        assert got.usage.prompt_tokens == tokens


def test_text_parts_and_developer_role(client, served):
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "17 + 25?"}]
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": parts}]
    same = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "What is\n17 + 25?"}]
    got = client.chat.completions.create(model="bundled", messages=messages, temperature=0)
    assert got.choices[0].message.content == served.engine.generate(same, SamplingParams(temperature=0)).text


def test_answer_can_be_sent_back_unchanged(client):
    answer = client.chat.completions.create(**GREEDY).choices[0].message.model_dump()
    messages = [*CHAT, answer, {"role": "user", "content": "and plus 10?"}]
    got = client.chat.completions.create(model="bundled", messages=messages, temperature=0)
    assert got.choices[0].message.content == "42 + 10 = 52." and got.usage.prompt_tokens_details.cached_tokens > 20


@pytest.mark.parametrize(
    "payload, same",
    [
        ({"stop": "+"}, {"stop": ["+"]}),
        ({"stop": ["=", "25"]}, {"stop": ["=", "25"]}),
        ({"max_completion_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 10**6}, {}),
        ({"seed": 5, "temperature": 1.0, "top_p": 0.9, "top_k": 9, "min_p": 0.01}, ...),
        ({"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}, ...),
        ({"logit_bias": {"19": -100}}, {"logit_bias": {19: -100.0}}),
        ({"stop_token_ids": [538]}, ...),
        ({"ignore_eos": True, "max_tokens": 30}, ...),
        ({"ignore_eos": True, "max_tokens": 30, "min_tokens": 30}, {"ignore_eos": True, "max_tokens": 30}),
        ({"min_tokens": 0, "user": "me", "store": False, "metadata": {"a": "b"}, "tools": [], "seed": None}, {}),
        ({"cache_prompt": False, "service_tier": "auto", "response_format": {"type": "text"}}, {}),
    ],
    ids=lambda value: ",".join(value)[:40] if isinstance(value, dict) else "",
)
def test_parameters_match_engine(served, payload, same):
    got = served.post("/v1/chat/completions", GREEDY | payload).json()
    params = SamplingParams(**{"temperature": 0, "top_k": 40, "top_p": 0.9} | (payload if same is ... else same))
    expected = served.engine.generate(CHAT, params)
    choice = got["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (expected.text, expected.finish_reason)
    with served.stream(GREEDY | payload, "/v1/chat/completions") as stream:
        chunks = events(stream.iter_lines())[:-1]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == expected.text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "more",
    [{}, {"structured_outputs": {"choice": ["😀🚀 ✓"]}}, {"stop": ["= 42", "ever after"]}],
    ids=["whole", "partial_characters", "partial_stop_string"],
)
def test_token_ids_include_tokens_without_text(served, path, more):
    prompt = {"prompt": "What is 17 + 25?"} if path == "/v1/completions" else {"messages": CHAT}
    payload = {"model": "bundled", "temperature": 0, "max_tokens": 30, "return_token_ids": True} | prompt | more
    expected = served.post(path, payload).json()["choices"][0]["token_ids"]
    if not more:
        params = SamplingParams(temperature=0, max_tokens=30)
        assert expected == list(served.engine.generate(prompt.get("messages", prompt.get("prompt")), params).token_ids)
    with served.stream(payload, path) as stream:
        chunks = events(stream.iter_lines())[:-1]
    assert [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_is_separate_from_answer(served, monkeypatch, stream):
    """The bundled model does not think, so a grammar forces its text, as if the prompt had opened thinking."""
    monkeypatch.setattr(served.engine.tokenizer, "supports_thinking", True)
    monkeypatch.setattr("tridecode.text.tokenizer.last_tag", lambda text: OPEN)
    grammar = f"start: {json.dumps(f'so{CLOSE}' + chr(10) * 2 + '17 is odd.')}"
    monkeypatch.setattr("tridecode.server.app.answer_constraint", lambda *args: {"grammar": grammar})
    payload = GREEDY
    if stream:
        with served.stream(payload, "/v1/chat/completions") as got:
            deltas = [chunk["choices"][0]["delta"] for chunk in events(got.iter_lines())[:-1]]
        message = {key: "".join(delta.get(key) or "" for delta in deltas) for key in ("content", "reasoning_content")}
    else:
        got = served.post("/v1/chat/completions", payload).json()
        message = got["choices"][0]["message"]
        assert got["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    assert (message["reasoning_content"], message["content"]) == ("so", "17 is odd.")


# ---- other paths


def test_model_card_contains_no_path(client):
    [model] = client.models.list().data
    strict(Model, model)
    assert (model.id, model.root, client.models.retrieve("bundled").id) == ("bundled", "bundled", "bundled")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_tokenize_and_detokenize_round_trip(served):
    text = "Once upon a time, <|im_end|> there was an owl: ü"
    got = served.post("/tokenize", {"model": "bundled", "prompt": text}).json()
    assert got["tokens"] == served.engine.tokenizer.encode(text, allow_special=True)
    assert 2 in got["tokens"] and got["count"] == len(got["tokens"])
    assert got["max_model_len"] == served.engine.capacity
    assert served.post("/detokenize", {"tokens": got["tokens"]}).json() == {"prompt": text}
    chat = served.post("/tokenize", {"messages": CHAT}).json()
    assert chat["tokens"] == served.engine.encode(CHAT)
    assert served.post("/detokenize", {"tokens": [4096]}).status_code == 400


def test_health_version_and_metrics(served):
    assert served.get("/health").json() == {"status": "ok"}
    assert served.get("/version").json() == {"version": __version__}
    served.post("/v1/chat/completions", GREEDY)  # A counter with labels appears with its first sample.
    before = {name: served.metric(name) for name in ("generation_tokens_total", "requests_total", "passes_total")}
    first = served.metric("time_to_first_token_seconds_count")
    served.post("/v1/chat/completions", GREEDY)
    served.post("/v1/chat/completions", GREEDY | {"n": 0})
    assert served.metric("generation_tokens_total") == before["generation_tokens_total"] + 12
    assert served.metric("requests_total") == before["requests_total"] + 2
    assert served.metric("passes_total") > before["passes_total"]
    assert served.metric("time_to_first_token_seconds_count") == first + 1
    text = served.get("/metrics").text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                 "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total",
                 "prefix_cache_hits_total", "inter_token_latency_seconds_bucket", "e2e_request_latency_seconds_sum",
                 "padding_rows_total", "active_rows"):  # fmt: skip
        assert f"\ntridecode:{name}{{" in text
    assert served.metric("requests_total", 'outcome="refused"') >= 1


def test_dashboard_and_docs_list_all_metrics(served):
    served.post("/v1/chat/completions", GREEDY)
    lines = [line for line in served.get("/metrics").text.splitlines() if line.startswith("tridecode:")]
    labels = {}
    for line in lines:
        labels.setdefault(re.match(r"tridecode:\w+", line)[0], set()).update(re.findall(r'(\w+)="', line))
    board = json.loads((DOCS / "grafana.json").read_text("utf-8"))
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    shown = set()
    for target in targets:
        names = re.findall(r"tridecode:\w+", target["expr"])
        by = re.findall(r"by \((\w+)\)", target["expr"]) + re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert names and all({"model_name", *by} <= labels[name] for name in names), target["expr"]
        shown.update(names)
    assert board["templating"]["list"][1]["definition"] == "label_values(tridecode:slots, model_name)"
    counted = {re.sub("_(bucket|sum|count)$", "", name) for name in labels if not name.endswith("_created")}
    assert {re.sub("_(bucket|sum|count)$", "", name) for name in shown} == counted, (
        "the dashboard and the server have different metrics"
    )
    table = (DOCS / "serving.md").read_text("utf-8").split("## Metrics")[1].split("## Benchmarks")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert {f"tridecode:{name}" for row in rows for name in re.findall(r"`(\w+)`", row)} == counted


# ---- invalid requests

PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}]}
REFUSED = {
    "no model": ({"model": None}, 400, "model is required"),
    "another model": ({"model": "gpt-4"}, 404, '"gpt-4" does not exist'),
    "no messages": ({"messages": None}, 400, "messages is required"),
    "empty messages": ({"messages": []}, 400, "at least one message"),
    "message as text": ({"messages": ["hi"]}, 400, "messages[0]: expected an object"),
    "unknown role": ({"messages": [{"role": "bot", "content": "x"}]}, 400, 'messages[0].role: expected system'),
    "unknown field of a message": ({"messages": [CHAT[0] | {"mood": "good"}]}, 400, "messages[0].mood: not supported"),
    "name as number": ({"messages": [CHAT[0] | {"name": 5}]}, 400, "messages[0].name: expected text, got 5"),
    "no content": ({"messages": [{"role": "user"}]}, 400, "messages[0].content: expected text"),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400,
        "messages[0].content[0]: image_url is not supported",
    ),
    "audio": (
        {"messages": [CHAT[0], {"role": "user", "content": [*PARTS["content"], {"type": "input_audio"}]}]},
        400,
        "messages[1].content[1]: input_audio is not supported",
    ),
    "invalid call": (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, 400, "messages[0].tool_calls[0]: expected",
    ),
    "invalid tool": ({"tools": [{"type": "function"}]}, 400, "tools[0]: expected"),
    "unknown response format": ({"response_format": {"type": "xml"}}, 400, "response_format: expected type text"),
    "stored answers": ({"store": True}, 400, "store is not supported"),
    "beam search": ({"use_beam_search": True}, 400, "use_beam_search is not supported"),
    "messages as text": ({"messages": "hi"}, 400, "messages: expected a list, got a string"),
    "former name of tools": ({"functions": [{"name": "f"}]}, 400, "functions is not a parameter of this API"),
    "misspelled parameter": ({"temprature": 1}, 400, "did you mean temperature?"),
    "effort as number": ({"reasoning_effort": 5}, 400, "reasoning_effort: expected a string"),
    "unknown effort": ({"reasoning_effort": "huge"}, 400, "reasoning_effort must be one of none, minimal, low"),
    "wrong type": ({"temperature": "hot"}, 400, "temperature: expected a number, got a string"),
    "wrong type of item": ({"stop": [1]}, 400, "stop[0]: expected a string, got an integer"),
    "value out of range": ({"top_p": 2}, 400, "top_p must be a number above 0 to 1"),
    "invalid max_completion_tokens": ({"max_completion_tokens": 0}, 400, "max_completion_tokens must be"),
    "negative max_tokens": ({"max_tokens": -2}, 400, "max_tokens must be an integer from 1"),
    "two different maxima": ({"max_completion_tokens": 4, "max_tokens": 5}, 400, "set one of them"),
    "bias without token id": ({"logit_bias": {"x": 1}}, 400, "logit_bias: every key must be a token id"),
    "bias outside the vocabulary": ({"logit_bias": {"4096": 1}}, 400, "not in the vocabulary"),
    "too many biases": ({"logit_bias": {str(i): 1 for i in range(1025)}}, 400, "at most 1,024 tokens"),
    "too many stops": ({"stop": ["a"] * 17}, 400, "at most 16 strings"),
    "too long stop": ({"stop": "a" * 257}, 400, "at most 256 characters"),
    "too many messages": ({"messages": CHAT * 4097}, 400, "at most 4,096"),
    "too many answers": ({"n": 129}, 400, "n must be from 1 to 128"),
    "min_tokens with stop": ({"min_tokens": 3, "stop": "a"}, 400, "min_tokens is not supported together with stop"),
    "min_tokens with a response format": (
        {"min_tokens": 3, "ignore_eos": True, "structured_outputs": {"choice": ["yes"]}}, 400,
        "structured_outputs.choice determines the answer's end",
    ),
    "min_tokens with a required call": (
        {"min_tokens": 3, "ignore_eos": True, "tool_choice": "required",
         "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tool_choice determines the answer's end",
    ),
    "min_tokens > max_tokens": ({"min_tokens": 3, "max_tokens": 2, "ignore_eos": True}, 400, "from 0 to max_tokens"),
    "top_logprobs without logprobs": ({"top_logprobs": 3}, 400, "top_logprobs needs logprobs"),
    "too many top_logprobs": ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs must be"),
    "stream options without a stream": ({"stream_options": {"include_usage": True}}, 400, "needs stream"),
    "unknown stream options": (
        {"stream": True, "stream_options": {"usage": True}}, 400,
        "stream_options: object contains the unknown field usage; leave it out",
    ),
    "unknown template variable": ({"chat_template_kwargs": {"x": 1}}, 400, "chat_template_kwargs: the chat"),
    "too long prompt": (
        {"messages": [{"role": "user", "content": "a b " * 3000}]}, 400, "has 6,009 tokens, the context holds 2,048"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_chat_request_names_parameter(served, name):
    wrong, status, message = REFUSED[name]
    for stream in ({}, {"stream": True}) if "stream_options" not in wrong else ({},):
        got = served.post("/v1/chat/completions", GREEDY | stream | wrong)
        assert got.status_code == status and got.headers["content-type"] == "application/json", got.text
        error = got.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert message in error["message"] and "\n" not in error["message"]
        assert error["param"] in (None, *wrong)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"prompt": []}, "prompt must be text"),
        ({"prompt": ["a", 1]}, "prompt must be text"),
        ({"prompt": [[1], "a"]}, "prompt must be text"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": [-1]}, "token id -1 is not in the vocabulary"),
        ({"prompt": [1] * 2049}, "has 2,049 tokens, the context holds 2,048"),
        ({"prompt": ["a"] * 65, "n": 2}, "at most 128 answers"),
        ({"suffix": "end"}, "suffix: this model has no tokens for fill-in-the-middle"),
        ({"suffix": "end", "prompt": [5]}, "suffix needs a prompt that is text"),
        ({"best_of": 3}, "best_of is not supported"),
        ({"prompt": 5}, "prompt: expected a string or a list, got an integer"),
        ({"messages": []}, "messages is not a parameter"),
    ],
)  # fmt: skip
def test_invalid_completion_request_is_refused(served, wrong, message):
    got = served.post("/v1/completions", {"model": "bundled", "prompt": "a", "max_tokens": 2} | wrong)
    assert got.status_code == 400 and message in got.json()["error"]["message"]


BODIES = {
    b"": "is not JSON: it is empty; send an object",
    b"{": "is not JSON: it ends before the value is complete",
    b"[]": "must be a JSON object, got a list",
    b'"{}"': "must be a JSON object, got a string",
    b"null": "must be a JSON object, got null",
    b"\xff\xfe": "is not JSON: its encoding is not UTF-8",
    b'{"model": "caf\xe9"}': "is not JSON: its encoding is not UTF-8",
    b"[" * 30_000: "is not JSON: ",
    b'{"model": NaN}': 'is not JSON: invalid character at byte 10, "NaN}"',
    b'{"n": 1, // one\n"seed": 1}': 'object keys must be strings at byte 9, "// one"; JSON has no comments',
    b'{"model": /* which? */ "x"}': "; JSON has no comments",
    b"{'n': 1}": "is not JSON: object keys must be strings at byte 1, \"'n': 1}\"",
    b'{"n": 1,}': 'is not JSON: trailing comma in object at byte 8, "}"',
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: ascii(body[:20]))
def test_body_must_be_json_object(served, body):
    got = served.post("/v1/chat/completions", body)
    message = got.json()["error"]["message"]
    assert got.status_code == 400 and message.startswith("the body ") and BODIES[body] in message


def test_unknown_path_and_method_are_refused(served):
    assert served.get("/v1/embeddings").status_code == 404
    got = served.get("/v1/chat/completions")
    assert got.status_code == 405 and got.json()["error"]["message"].endswith("; use POST")


@pytest.mark.parametrize("half", ["\ud83d", "\ude00", "\ud83d\ud83d"], ids=ascii)
def test_half_surrogate_pair_is_replaced(served, half):
    """JavaScript sends half of a pair if it cuts a text within an emoji."""
    for after in (" def", "\\", ""):
        text, replaced = (f"abc 😀 \\{character}{after}" for character in (half, "\ufffd" * len(half)))
        expected = served.engine.encode(text)
        assert served.post("/tokenize", {"prompt": text}).json()["tokens"] == expected == served.engine.encode(replaced)
        payload = {"model": "bundled", "prompt": text, "max_tokens": 1, "echo": True}
        got = served.post("/v1/completions", payload).json()
        assert got["choices"][0]["text"].startswith(replaced) and got["usage"]["prompt_tokens"] == len(expected)


def test_refusal_of_a_template_contains_no_path(tmp_path):
    shutil.copytree(BUNDLED, tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text("{{ raise_exception('no such thing') }}")
    with Engine.load(tmp_path / "model", device="cpu") as engine, Running(engine) as running:
        message = running.post("/v1/chat/completions", GREEDY).json()["error"]["message"]
    assert message == "the chat template in chat_template.jinja refused these messages: no such thing"


def test_unexpected_error_has_each_apis_form_and_is_counted(served, monkeypatch, caplog):
    def broken(*args, **options):
        raise RuntimeError(f"secret of {DOCS}")

    with monkeypatch.context() as while_prepared, caplog.at_level(logging.CRITICAL):
        while_prepared.setattr(served.engine, "prepare", broken)
        got = served.post("/v1/chat/completions", GREEDY)
    assert got.status_code == 500 and "secret" not in got.text and "Traceback" not in got.text
    monkeypatch.setattr("tridecode.server.app.parse_body", broken)
    with caplog.at_level(logging.INFO, "tridecode.server"):
        got, other = served.post("/v1/chat/completions", {}), served.post("/v1/messages", {})
    assert got.status_code == other.status_code == 500
    assert "secret" not in got.text + other.text and "Traceback" not in got.text + other.text
    assert got.json()["error"]["type"] == "server_error" and got.json().keys() == {"error"}
    assert other.json()["type"] == "error" and other.json()["error"]["type"] == "api_error"
    lines = [record.getMessage() for record in caplog.records if record.name == "tridecode.server"]
    for answer in (got, other):  # The log may also contain lines of earlier requests.
        (line,) = (line for line in lines if line.startswith(answer.headers["x-request-id"]))
        assert " 500 " in line and line.endswith(" failed")


# ---- access


def test_key_protects_all_paths_but_health(served):
    with Running(served.engine, api_keys=("s3cret-ü",)) as locked:
        assert locked.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/version", "/nothing"):
            assert locked.get(path).status_code == 401
        for wrong in ("Bearer s3cret", "Bearer", "s3cret-ü", "Basic s3cret-ü"):
            assert locked.get("/v1/models", headers={"Authorization": wrong.encode()}).status_code == 401
        assert locked.get("/v1/models", headers={"Authorization": "Bearer s3cret-ü".encode()}).status_code == 200
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            locked.client().chat.completions.create(**GREEDY)


def test_cors_allows_only_listed_origins(served):
    asks = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}
    with Running(served.engine, api_keys=("k",), cors=("https://chat.example",)) as open_to:
        for running, allowed in ((served, None), (open_to, "https://chat.example")):
            got = running.client()._client.options(f"{running.url}/v1/chat/completions", headers=asks)
            assert got.headers.get("access-control-allow-origin") == allowed
        other = open_to.get("/health", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


def test_any_model_option(served):
    with Running(served.engine, any_model=True) as lenient:
        for model in ({"model": "gpt-4"}, {}):
            got = lenient.post("/v1/completions", {"prompt": "a", "max_tokens": 1} | model)
            assert got.status_code == 200 and got.json()["model"] == "bundled"


def test_log_contains_prompts_only_with_log_prompts(served, caplog):
    with caplog.at_level(logging.INFO, "tridecode.server"):
        served.post("/v1/chat/completions", GREEDY)
        # The response may arrive before the log line is written.
        until(lambda: "POST /v1/chat/completions 200" in caplog.text)
        assert "What" not in caplog.text
        with Running(served.engine, log_prompts=True) as verbose:
            verbose.post("/v1/chat/completions", GREEDY)
        assert "What is 17 + 25?" in caplog.text


# ---- concurrent requests


def test_concurrent_requests_equal_single_requests(served):
    prompts = [f"What is {a} + {b}?" for a in range(11, 15) for b in range(20, 23)]
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    expected = [served.engine.generate(chat, SamplingParams(temperature=0)).text for chat in chats]
    texts: dict[int, str] = {}

    def ask(number: int) -> None:
        got = served.client().chat.completions.create(model="bundled", messages=chats[number], temperature=0)
        texts[number] = got.choices[0].message.content

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(chats))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [texts.get(i) for i in range(len(chats))] == expected


def test_disconnect_cancels_stream(served, monkeypatch):
    slow_passes(served.engine, monkeypatch)
    scheduler, cancelled = served.engine.scheduler, served.metric("requests_total", 'outcome="cancelled"')
    with served.stream(LONG) as got:
        lines = got.iter_lines()  # If this object is deleted, the connection closes.
        next(lines)
        until(lambda: scheduler.load().rows == 1)
    until(lambda: scheduler.load().requests == 0)
    sampled = served.metric("generation_tokens_total")
    until(lambda: served.metric("requests_total", 'outcome="cancelled"') == cancelled + 1)
    time.sleep(0.3)
    assert served.metric("generation_tokens_total") == sampled
    scheduler.assert_consistent()


def test_disconnect_cancels_request_without_stream(served, monkeypatch):
    slow_passes(served.engine, monkeypatch)
    with pytest.raises(openai.APITimeoutError):
        served.client(timeout=0.5).completions.create(
            **{k: v for k, v in LONG.items() if k != "ignore_eos"}, extra_body={"ignore_eos": True}
        )
    until(lambda: served.engine.scheduler.load().requests == 0)


def test_base_url_explains_itself(served):
    answer = served.get("/v1")
    body = answer.json()
    assert answer.status_code == 200 and "/v1 is the base URL for clients of OpenAI's API" in body["message"]
    assert {"GET /", "POST /v1/chat/completions", "GET /v1/models/{model}"} <= {*body["paths"]}


@pytest.mark.parametrize(
    "path, named",
    {
        "/chat/completions": "did you mean POST /v1/chat/completions?",
        "/v1/v1/completions": "did you mean POST /v1/completions?",
        "/api/chat": "did you mean POST /v1/chat/completions?",
        "/openai/v1/models": "did you mean GET /v1/models?",
        "/v1/nothing": "GET /v1 lists the paths",
        "/api/": "GET /v1 lists the paths",
    }.items(),
)
def test_unknown_path_names_the_right_one(served, path, named):
    answer = served.get(path)
    assert answer.status_code == 404 and named in answer.json()["error"]["message"]


def test_wrong_method_names_the_right_one(served):
    answer = served.get("/v1/chat/completions")
    assert answer.status_code == 405 and answer.json()["error"]["message"].endswith("use POST")
