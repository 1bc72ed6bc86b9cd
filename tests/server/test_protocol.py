"""Parameters of requests: honored, ignored, neutral and refused ones, and the meaning of values."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
from anthropic.types import message_create_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params
from servers import ANSWER, CHAT, GREEDY, Running, events
from tokenizers import AddedToken, Tokenizer

from tridecode import Engine
from tridecode.checkpoint.hub import BUNDLED
from tridecode.server import fields
from tridecode.server.anthropic_api import MessagesRequest
from tridecode.server.errors import ApiError
from tridecode.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest, parse_body
from tridecode.server.responses_api import ResponsesRequest

DOCS = Path(__file__).parents[2] / "docs"
TEXT = {"model": "bundled", "prompt": "Once upon a time", "temperature": 0, "max_tokens": 6}
MODEL = {"model": "bundled"}
BODIES = {
    "chat/completions": (ChatRequest, GREEDY | {"max_tokens": 3}),
    "completions": (CompletionRequest, TEXT),
    "responses": (ResponsesRequest, MODEL | {"input": "Hi", "max_output_tokens": 3}),
    "messages": (MessagesRequest, MODEL | {"messages": CHAT, "max_tokens": 3}),
}
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


@pytest.fixture(scope="module")
def served():
    with Engine.load(device="cpu", slots=4) as engine, Running(engine) as running:
        yield running


def parsed(path: str, **more):
    """Return the parsed body of a request with further parameters."""
    body_type, body = BODIES[path]
    return parse_body(json.dumps(body | more).encode(), body_type)


def answer(served, path: str, **more) -> dict:
    """Return the body of a response with status 200."""
    got = served.post(f"/v1/{path}", BODIES[path][1] | more)
    assert got.status_code == 200, got.text
    return got.json()


# ---- text prompts


def test_text_prompts_read_control_tokens(served):
    tokenizer, text = served.engine.tokenizer, "<|im_start|>user\nWhat is 17 + 25?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, allow_special=True)
    assert served.post("/tokenize", {"prompt": text}).json()["tokens"] == ids and {1, 2} <= {*ids}
    got = answer(served, "completions", prompt=text, max_tokens=20)
    assert got["choices"][0]["text"] == ANSWER and got["usage"]["prompt_tokens"] == len(ids)
    chat = [{"role": "user", "content": text}]
    assert served.post("/tokenize", {"messages": chat}).json()["tokens"] == served.engine.encode(chat)
    assert len(served.engine.encode(chat)) > len(ids) + 20


def test_detokenize_to_tokenize_round_trip(served):
    for ids in (served.engine.encode(CHAT), served.engine.encode("a b <|im_end|> c")):
        text = served.post("/detokenize", {"tokens": ids}).json()["prompt"]
        again = served.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
        if 1 in ids:
            assert again == ids
        assert served.post("/detokenize", {"tokens": again}).json()["prompt"] == text


@pytest.fixture(scope="module")
def code_model(tmp_path_factory):
    """Serve the bundled weights with fill-in-the-middle tokens, and a bos token that the post-processor adds."""
    path = tmp_path_factory.mktemp("code") / "model"
    shutil.copytree(BUNDLED, path)
    state = json.loads((path / "tokenizer.json").read_text("utf-8"))
    vocab, merges = state["model"]["vocab"], state["model"]["merges"]
    names = ("<bos>", *FIM)
    # The last tokens of the vocabulary make room for the new ones.
    for name, token in zip(names, range(len(vocab) - len(names), len(vocab))):
        old = next(text for text, i in vocab.items() if i == token)
        del vocab[old]
        vocab[name] = token
    state["model"]["merges"] = [
        pair for pair in merges if "".join(pair.split(" ") if isinstance(pair, str) else pair) in vocab
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    bos = tokenizer.token_to_id("<bos>")
    state = json.loads(tokenizer.to_str())
    single = [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    state["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<bos>": {"id": "<bos>", "ids": [bos], "tokens": ["<bos>"]}},
    }  # fmt: skip
    (path / "tokenizer.json").write_text(json.dumps(state), "utf-8")
    with Engine.load(path, device="cpu", slots=4) as engine, Running(engine) as running:
        running.bos = bos
        yield running


def test_add_special_tokens_is_honored(code_model):
    def tokens(**body) -> list[int]:
        return code_model.post("/tokenize", body).json()["tokens"]

    bos, words = code_model.bos, tokens(prompt="Hi", add_special_tokens=False)
    assert tokens(prompt="Hi") == tokens(prompt="Hi", add_special_tokens=True) == [bos, *words]
    chat = tokens(messages=CHAT)
    assert chat[0] != bos and tokens(messages=CHAT, add_special_tokens=True) == [bos, *chat]
    for path, more in (("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": CHAT})):
        used = [
            answer(code_model, path, add_special_tokens=added, max_tokens=1, **more)["usage"]["prompt_tokens"]
            for added in (False, True)
        ]
        assert used[1] == used[0] + 1


def test_suffix_fills_in_the_middle(code_model, monkeypatch):
    seen, prepare = [], code_model.engine.prepare
    monkeypatch.setattr(
        code_model.engine, "prepare", lambda *args, **more: seen.append(prepare(*args, **more)) or seen[-1]
    )
    got = answer(code_model, "completions", prompt="def f(x):\n", suffix="\n    return y", echo=True, max_tokens=2)
    text = code_model.engine.tokenizer.decode(seen[0].ids, False)
    assert text == "<bos><|fim_prefix|>def f(x):\n<|fim_suffix|>\n    return y<|fim_middle|>"
    ids = [code_model.engine.tokenizer.token_id(name) for name in FIM[:3]]
    assert [token for token in seen[0].ids if token in ids] == ids
    assert got["choices"][0]["text"].startswith("def f(x):\n")


# ---- every parameter


@pytest.mark.parametrize("path", BODIES)
def test_every_parameter_of_the_published_clients_is_classified(path):
    published = {
        "chat/completions": [chat_params.CompletionCreateParamsBase],
        "completions": [completion_create_params.CompletionCreateParamsBase],
        "responses": [response_create_params.ResponseCreateParamsBase],
        "messages": [message_create_params.MessageCreateParamsBase, beta_params.MessageCreateParamsBase],
    }[path]
    names = {name for params in published for name in inspect.get_annotations(params)}
    # These request another kind of answer, so that they are refused unless they are empty.
    refused = {"audio", "functions", "prediction", "web_search_options", "moderation", "function_call"}
    body_type = BODIES[path][0]
    known = {*body_type.__struct_fields__, *fields.IGNORED, *fields.NEUTRAL, *body_type.neutral}
    assert names - known - body_type.without_effect <= refused, "classify these parameters"


@pytest.mark.parametrize("path", BODIES)
def test_ignored_and_neutral_parameters_are_accepted(path):
    body_type = BODIES[path][0]
    for name in fields.IGNORED | body_type.without_effect:
        if name not in body_type.__struct_fields__:
            parsed(path, **{name: "anything"})
    for name, values in (fields.NEUTRAL | body_type.neutral).items():
        for value in [*values, None, [], {}, ""]:
            if name not in body_type.__struct_fields__ and not (name == "prompt" and value is not None):
                parsed(path, **{name: value})
                assert name not in body_type.__struct_fields__
    parsed(path, some_extension=None, other_extension=[], third_extension={}, fourth_extension="")


@pytest.mark.parametrize("name", sorted(fields.NEUTRAL))
def test_other_values_of_neutral_parameters_are_refused(name):
    for value in ("other", 7, True, False):
        if not fields.is_neutral(value, fields.NEUTRAL[name]):
            with pytest.raises(ApiError) as refused:
                parsed("completions", **{name: value})
            assert refused.value.status == 400 and refused.value.param == name


def test_docs_list_every_parameter():
    text = (DOCS / "serving.md").read_text("utf-8")
    table = text.split("<!-- parameters -->")[1].split("<!-- parameters end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "`" in line]
    documented: dict[str, dict] = {}
    for api, names, values in rows:
        for name in re.findall(r"`([^`]+)`", names):
            documented.setdefault(api, {})[name] = [json.loads(value) for value in re.findall(r"`([^`]+)`", values)]
    own = {"completions": fields.NEUTRAL_IN_COMPLETIONS, "responses": fields.NEUTRAL_IN_RESPONSES,
           "messages": fields.NEUTRAL_IN_MESSAGES}  # fmt: skip
    expected = {"all": dict.fromkeys(fields.IGNORED, []) | fields.NEUTRAL}
    for api, neutral in own.items():
        ignored = {"responses": fields.IGNORED_IN_RESPONSES, "messages": fields.IGNORED_IN_MESSAGES}.get(api, ())
        expected[api] = dict.fromkeys(ignored, []) | neutral
    assert documented == expected, "docs/serving.md and fields.py list different parameters"
    whole = text + (DOCS / "agents.md").read_text("utf-8")
    for body_type, _ in BODIES.values():
        for name in body_type.__struct_fields__:
            assert re.search(rf"`{name}\b", whole), f"{name} is not documented"


@pytest.mark.parametrize(
    "path, sent, advice",
    [
        ("/tokenize", {"content": "a"}, "use prompt"),
        ("/v1/completions", {"n_predict": 5}, "use max_tokens"),
        ("/v1/chat/completions", {"n_predict": 5}, "use max_tokens"),
        ("/v1/chat/completions", {"json_schema": {"type": "object"}}, "use response_format"),
        ("/v1/chat/completions", {"format": "json"}, "use response_format"),
        ("/v1/completions", {"grammar": "root ::= x"}, "use structured_outputs"),
        ("/v1/chat/completions", {"prompt": "a"}, "use messages"),
        ("/v1/chat/completions", {"input": "a"}, "use messages"),
        ("/v1/completions", {"messages": CHAT}, "use prompt"),
        ("/v1/responses", {"messages": CHAT}, "use input"),
        ("/v1/chat/completions", {"options": {"temperature": 0}}, "put its fields at the top level"),
        ("/v1/chat/completions", {"think": False}, "use reasoning_effort"),
        ("/v1/chat/completions", {"enable_thinking": False}, "use chat_template_kwargs"),
        ("/v1/completions", {"repeat_penalty": 1.1}, "use repetition_penalty"),
    ],
)
def test_parameters_of_other_apis_name_the_right_one(served, path, sent, advice):
    got = served.post(path, sent | {"model": "bundled"})
    (name,) = sent
    assert got.status_code == 400 and got.json()["error"]["param"] == name
    assert got.json()["error"]["message"].startswith(f"{name} is not a parameter of this API: {advice}")


def test_advice_names_parameters_that_exist():
    named = {name for _, body in BODIES.items() for name in body[0].__struct_fields__}
    named |= {*TokenizeRequest.__struct_fields__}
    assert {other for names in fields.INSTEAD.values() for other in names} <= named | {"content"}


def test_generation_requires_the_model(served):
    for path, (_, body) in BODIES.items():
        body = {name: value for name, value in body.items() if name != "model"}
        got = served.post(f"/v1/{path}", body)
        assert got.status_code == 400 and "model is required" in got.json()["error"]["message"]


# ---- values


@pytest.mark.parametrize(
    "sent, meant",
    [
        ({"top_p": 0}, {"top_p": 1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": -1}, {"seed": None}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"max_tokens": 5.0}, {"max_tokens": 5}),
        ({"top_k": 3.0, "seed": 7.0, "n": 2.0}, {"top_k": 3, "seed": 7, "n": 2}),
        ({"stop": ""}, {"stop": None}),
        ({"stop": ["", "x", ""]}, {"stop": ["x"]}),
        ({"stop": []}, {"stop": None}),
        ({"stop_token_ids": [5.0]}, {"stop_token_ids": [5]}),
        ({"response_format": {}}, {"response_format": None}),
        ({"structured_outputs": {"json": None, "regex": ""}}, {"structured_outputs": None}),
        ({"logit_bias": []}, {"logit_bias": None}),
        ({"tools": [], "tool_choice": ""}, {"tools": None, "tool_choice": None}),
        ({"stream_options": {}}, {"stream_options": None}),
        ({"repetition_penalty": 0}, {"repetition_penalty": 1}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_values_that_mean_off_elsewhere(sent, meant):
    body = {"messages": CHAT}
    got = parse_body(json.dumps(body | sent).encode(), ChatRequest)
    assert {name: getattr(got, name) for name in meant} == meant
    got.sampling()


def test_fractions_are_refused_for_integers():
    for name in ("max_tokens", "seed", "n", "top_k"):
        with pytest.raises(ApiError):
            parsed("completions", **{name: 1.5})


# ---- parameters with an effect


def test_json_object_honors_its_schema(served):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_object", "schema": schema}
    got = answer(served, "chat/completions", response_format=form, max_tokens=60)
    assert json.loads(got["choices"][0]["message"]["content"]) == {"a": "x"}
    assert served.post("/v1/chat/completions", GREEDY | {"response_format": form | {"schema": 5}}).status_code == 400
    # A schema without a type describes an object, unless it names other values.
    for schema, value in ({"const": "42"}, "42"), ({"anyOf": [{"const": 1}]}, 1), ({"maxProperties": 0}, {}):
        form = {"type": "json_object", "schema": schema}
        got = answer(served, "chat/completions", response_format=form, max_tokens=60)
        assert json.loads(got["choices"][0]["message"]["content"]) == value


def test_min_tokens_excludes_stop_tokens(served):
    free = answer(served, "chat/completions", max_tokens=40)
    count = free["usage"]["completion_tokens"]
    forced = answer(served, "chat/completions", max_tokens=40, min_tokens=count + 5, return_token_ids=True)
    ids = forced["choices"][0]["token_ids"]
    assert len(ids) >= count + 5 and not {*served.engine.config.stop_ids} & {*ids[: count + 4]}
    assert forced["choices"][0]["message"]["content"].startswith(ANSWER)
    same = answer(served, "chat/completions", max_tokens=40, min_tokens=count - 1)
    assert same["choices"][0]["message"]["content"] == ANSWER and same["choices"][0]["finish_reason"] == "stop"


def test_continuous_usage_stats_count_up(served):
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, more in (("completions", {"n": 2}), ("chat/completions", {})):
        with served.stream(BODIES[path][1] | more | {"stream_options": options}, f"/v1/{path}") as got:
            *chunks, last, _ = events(got.iter_lines())
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts) and counts[0] >= 1
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
        assert counts[-1] == last["usage"]["completion_tokens"]


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_zero_with_echo_scores_only_the_prompt(served, stream):
    body = TEXT | {"max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
    if stream:
        with served.stream(body) as got:
            choices = [chunk["choices"][0] for chunk in events(got.iter_lines())[:-1]]
    else:
        got = answer(served, "completions", **body)
        choices = got["choices"]
        assert got["usage"]["completion_tokens"] == 0
    assert "".join(choice["text"] for choice in choices) == TEXT["prompt"]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    assert "".join(tokens) == TEXT["prompt"] and choices[-1]["finish_reason"] == "length"
    empty = served.post("/v1/messages", MODEL | {"messages": CHAT, "max_tokens": 0}).json()
    assert empty["content"] == [] and empty["stop_reason"] == "max_tokens" and empty["usage"]["output_tokens"] == 0
    assert served.post("/v1/chat/completions", GREEDY | {"max_tokens": 0}).status_code == 400


def test_echo_with_logprobs_streams(served):
    body = TEXT | {"prompt": ["Once upon a time", "Hi"], "echo": True, "logprobs": 2, "n": 2}
    expected = answer(served, "completions", **body)["choices"]
    texts, tokens, values = ([None] * 4 for _ in range(3))
    with served.stream(body) as got:
        for chunk in events(got.iter_lines())[:-1]:
            (choice,) = chunk["choices"]
            i, logprobs = choice["index"], choice["logprobs"] or {"tokens": [], "token_logprobs": []}
            texts[i] = (texts[i] or "") + choice["text"]
            tokens[i] = (tokens[i] or []) + logprobs["tokens"]
            values[i] = (values[i] or []) + logprobs["token_logprobs"]
    assert texts == [choice["text"] for choice in expected]
    assert tokens == [choice["logprobs"]["tokens"] for choice in expected]
    for got, choice in zip(values, expected):
        assert got[0] is None and got[1:] == pytest.approx(choice["logprobs"]["token_logprobs"][1:], abs=1e-4)


def test_continue_final_message_continues_the_answer(served):
    messages = [*CHAT, {"role": "assistant", "content": "17 + 25"}]
    more = {"continue_final_message": True, "add_generation_prompt": False, "max_tokens": 20}
    got = answer(served, "chat/completions", messages=messages, **more)
    assert got["choices"][0]["message"]["content"] == ANSWER.removeprefix("17 + 25")
    ids = served.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    text = served.post("/detokenize", {"tokens": ids}).json()["prompt"]
    assert text.endswith("<|im_start|>assistant\n17 + 25") and got["usage"]["prompt_tokens"] == len(ids)
    both = more | {"add_generation_prompt": True, "messages": messages}
    assert served.post("/v1/chat/completions", GREEDY | both).status_code == 400
    got = served.post("/v1/messages", MODEL | {"messages": messages, "max_tokens": 20, "temperature": 0}).json()
    assert got["content"][0]["text"] == ANSWER.removeprefix("17 + 25")


def test_continued_message_keeps_control_tokens_neutral(served):
    messages = [*CHAT, {"role": "assistant", "content": "a <|im_end|> b <|im_"}]
    ids = served.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert served.post("/detokenize", {"tokens": ids}).json()["prompt"].endswith("assistant\na <|im_end|> b <|im_")
    assert ids.count(2) == served.engine.encode(CHAT).count(2)


def test_add_generation_prompt_false_omits_the_answers_header(served):
    with_header = served.post("/tokenize", {"messages": CHAT}).json()["tokens"]
    without = served.post("/tokenize", {"messages": CHAT, "add_generation_prompt": False}).json()["tokens"]
    assert with_header[: len(without)] == without and len(without) < len(with_header)
    got = answer(served, "chat/completions", add_generation_prompt=False, max_tokens=1)
    assert got["usage"]["prompt_tokens"] == len(without)


def test_thinking_variables_are_ignored_by_models_without_them(served):
    for path in ("chat/completions", "responses", "messages"):
        answer(served, path, chat_template_kwargs={"enable_thinking": False})
        got = served.post(f"/v1/{path}", BODIES[path][1] | {"chat_template_kwargs": {"enable_thinkng": False}})
        assert got.status_code == 400


def test_skip_special_tokens_false_shows_special_tokens(served):
    forced = {"logit_bias": {"0": 100}, "max_tokens": 2, "stop_token_ids": [], "ignore_eos": True}
    for path in ("completions", "chat/completions"):
        texts = []
        for skip in (True, False):
            choice = answer(served, path, skip_special_tokens=skip, **forced)["choices"][0]
            texts.append(choice["text"] if path == "completions" else choice["message"]["content"])
        assert texts == ["", "<|endoftext|>" * 2]
    text = answer(served, "chat/completions", skip_special_tokens=False, max_tokens=30)["choices"][0]["message"]
    assert text["content"] == ANSWER  # As in vLLM, the token that ends the answer is not a part of it.


@pytest.mark.parametrize("stream", [False, True])
def test_include_stop_str_in_output(served, stream):
    body = GREEDY | {"stop": ["25 ="], "include_stop_str_in_output": True, "stream": stream}
    if stream:
        with served.stream(body, "/v1/chat/completions") as got:
            chunks = events(got.iter_lines())[:-1]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    else:
        text = served.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert text == "17 + 25 ="


def test_forced_call_wins_over_a_text_format(served):
    tool = {"type": "function", "function": {"name": "f"}}
    more = {"tools": [tool], "tool_choice": "required", "response_format": {"type": "json_object"}}
    got = answer(served, "chat/completions", parallel_tool_calls=False, max_tokens=60, **more)["choices"][0]
    assert got["message"]["tool_calls"][0]["function"]["name"] == "f"


# ---- history of other servers

HISTORY = {
    "reasoning": ({"role": "assistant", "content": "42.", "reasoning": "Add.", "reasoning_details": [{"a": 1}]}, "42."),
    "refusal": ({"role": "assistant", "content": None, "refusal": "I cannot."}, "I cannot."),
    "refusal_part": ({"role": "assistant", "content": [{"type": "refusal", "refusal": "No way."}]}, "No way."),
    "provider_fields": (
        {"role": "assistant", "content": "42.", "provider_specific_fields": {"x": 1}, "annotations": [{}]}, "42.",
    ),
    "cache_control": (
        {"role": "user", "content": [{"type": "text", "text": "42.", "cache_control": {"type": "ephemeral"}}],
         "cache_control": {"type": "ephemeral"}}, "42.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("message, text", HISTORY.values(), ids=HISTORY)
def test_history_of_other_servers_is_accepted(served, message, text):
    got = served.post("/tokenize", {"messages": [*CHAT, message, *CHAT]})
    assert got.status_code == 200, got.text
    assert text in served.post("/detokenize", {"tokens": got.json()["tokens"]}).json()["prompt"]


def test_legacy_function_calls_are_accepted(served):
    call = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    result = {"role": "function", "name": "f", "content": "sunny"}
    answer(served, "chat/completions", messages=[*CHAT, call, result])


def test_items_of_tools_in_the_history_are_accepted(served):
    items = [
        {"role": "user", "content": "Hi"},
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "done"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "local_shell_call", "call_id": "b", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "call_id": "b", "output": "a.txt"},
        {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "b.txt", "stderr": ""}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "And now?"},
    ]
    answer(served, "responses", input=items)
    messages = ResponsesRequest(input=items).conversation()
    text = json.dumps(messages)
    assert all(word in text for word in ("*** Begin", "done", "ls", "a.txt", "b.txt", "No."))
    unknown = served.post("/v1/responses", MODEL | {"input": [{"type": "item_reference", "id": "x"}]})
    assert unknown.status_code == 400


def test_blocks_of_tools_in_the_history_are_accepted(served):
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    found = {"type": "search_result", "title": "T", "source": "http://x", "content": [{"type": "text", "text": "S"}]}
    messages = [
        {"role": "user", "content": [document, found, {"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
            {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
            {"type": "text", "text": "Yes."},
        ]},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    answer(served, "messages", messages=messages)
    text = MessagesRequest(messages=messages).conversation()[0]["content"]
    assert text == "Notes\nD\n\nT\nhttp://x\nS\n\nHi"
    image = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
    got = served.post("/v1/messages", MODEL | {"messages": [{"role": "user", "content": [image]}], "max_tokens": 1})
    assert got.status_code == 400


# ---- formats that cannot be enforced

NODE = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "additionalProperties": False}
HOPELESS = {
    "recursion_without_text": ({"structured_outputs": {"grammar": "start: start"}}, "structured_outputs.grammar"),
    "object_that_requires_itself": ({"structured_outputs": {"json": {"$defs": {"n": NODE}, "$ref": "#/$defs/n"}}},
                                    "structured_outputs.json"),
    "large_expression": ({"structured_outputs": {"regex": "((a{100}){100}){100}"}}, "structured_outputs.regex"),
    "contradiction": ({"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 4}}},
                      "structured_outputs.json"),
}  # fmt: skip


@pytest.mark.parametrize("sent, parameter", HOPELESS.values(), ids=HOPELESS)
def test_formats_that_cannot_be_enforced_are_the_clients_errors(served, sent, parameter):
    got = served.post("/v1/chat/completions", GREEDY | {"max_tokens": 30} | sent)
    error = got.json()["error"]
    assert got.status_code == 400 and error["param"] == parameter and "\n" not in error["message"], got.text
    assert "stack" not in error["message"]
    if "maximum" in str(sent):
        assert "no text fits this schema" in error["message"]


def test_many_choices_work(served):
    choices = [f"c{i}/(*)" for i in range(5000)]
    got = answer(served, "chat/completions", structured_outputs={"choice": choices}, max_tokens=30)
    assert got["choices"][0]["message"]["content"] in choices


def test_one_of_distinct_constants_works(served):
    schema = {"oneOf": [{"const": 1}, {"const": 2}, {"const": "a"}]}
    got = answer(served, "chat/completions", structured_outputs={"json": schema}, max_tokens=30)
    assert json.loads(got["choices"][0]["message"]["content"]) in (1, 2, "a")
    same = {"oneOf": [{"const": 1}, {"const": 1.0}]}
    assert served.post("/v1/chat/completions", GREEDY | {"structured_outputs": {"json": same}}).status_code == 400
