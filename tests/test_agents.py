"""The APIs of coding agents, tested with OpenAI's and Anthropic's clients.

Grammars force the answers of the bundled model, whose chat template is replaced by templates of other families.
"""

import json
import logging
import shutil
from contextlib import contextmanager
from pathlib import Path

import anthropic
import openai
import pytest
from anthropic.types import Message
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from servers import CHAT, Running, events, until

from tridecode import Engine
from tridecode.checkpoint.hub import BUNDLED

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}}
TOOL = {"type": "function", "name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}
BLOCK_TOOL = {"name": "get_weather", "description": "Of a city.", "input_schema": SCHEMA}
ARGUMENTS = {"city": "Bonn", "days": 2}
# family: (words of its chat template, an answer with a call in its format)
WRITTEN = {
    "tagged": ("<tool_call>", 'Look.\n<tool_call>\n{"name": "get_weather", "arguments": %s}\n</tool_call>'),
    "xml": (
        "<tool_call><function=",
        "Look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n2\n</parameter>"
        "\n</function>\n</tool_call>",
    ),
    "mistral": ("[TOOL_CALLS]", 'Look.[TOOL_CALLS] [{"name": "get_weather", "arguments": %s}]'),
    "bare": ('"parameters" ipython', '{"name": "get_weather", "parameters": %s}'),
}


@pytest.fixture(scope="module")
def served():
    with Engine.load(slots=4, device="cpu") as engine, Running(engine, any_model=True) as running:
        yield running


@pytest.fixture(scope="module")
def claude(served):
    return anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def client(served):
    return served.client()


@contextmanager
def family(tmp_path: Path, name: str):
    """Run a server with the bundled weights and a chat template that supports tools like the family's template."""
    path = tmp_path / name
    shutil.copytree(BUNDLED, path)
    template = path / "chat_template.jinja"
    mark = "{#- " + WRITTEN[name][0] + " -#}{%- if tools -%}{{ tools | tojson }}{%- endif -%}"
    template.write_text(mark + template.read_text())
    with Engine.load(path, device="cpu") as engine, Running(engine, any_model=True) as running:
        yield running


def forced_answer(text: str) -> dict:
    """Return request fields that force the answer to be `text`."""
    return {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}


def answer_with_call(name: str) -> str:
    """Return an answer with a call in the format of a family."""
    text = WRITTEN[name][1]
    return text % json.dumps(ARGUMENTS) if "%s" in text else text


# ---- tools, by all three APIs


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_each_family_reach_clients(tmp_path, name):
    with family(tmp_path, name) as running:
        extra, before = forced_answer(answer_with_call(name)), "" if name == "bare" else "Look."
        payload = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL], "extra_body": extra}
        chat = running.client().chat.completions
        got = chat.create(**payload).choices[0]
        (call,) = got.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
        assert got.finish_reason == "tool_calls" and (got.message.content or "") == before
        with chat.stream(**payload) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds and streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert (streamed.message.content or "") == before

        claude = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0).messages
        payload = {"model": "m", "messages": CHAT, "tools": [BLOCK_TOOL], "max_tokens": 200, "extra_body": extra}
        got = claude.create(**payload)
        assert got.content[-1].input == ARGUMENTS and got.stop_reason == "tool_use"
        with claude.stream(**payload) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == [block.type for block in got.content]
        assert streamed.content[-1].input == ARGUMENTS and streamed.stop_reason == "tool_use"

        payload = {"model": "m", "input": "Weather?", "tools": [TOOL], "extra_body": extra}
        got = running.client().responses.create(**payload)
        assert got.output[-1].name == "get_weather" and json.loads(got.output[-1].arguments) == ARGUMENTS
        with running.client().responses.stream(**payload) as stream:
            list(stream)
            streamed = stream.get_final_response()
        assert streamed.output[-1].arguments == got.output[-1].arguments and streamed.output_text == before


def test_tool_round_trip_with_openai_client(client):
    messages = [{"role": "system", "content": "Be brief."}, *CHAT]
    payload = {"model": "m", "tools": [CHAT_TOOL], "temperature": 0, "parallel_tool_calls": False}
    got = client.chat.completions.create(messages=messages, tool_choice="required", **payload)
    ChatCompletion.model_validate(got.model_dump(), strict=True)
    (call,) = got.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "days"} and call.id
    messages += [got.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    after = client.chat.completions.create(messages=messages, max_tokens=10, **payload)
    assert after.usage.prompt_tokens > got.usage.prompt_tokens
    none = client.chat.completions.create(messages=CHAT, tool_choice="none", **payload | {"max_tokens": 5})
    # The prompt does not contain the tools.
    assert none.choices[0].message.tool_calls is None and none.usage.prompt_tokens < 30


def test_stream_sends_name_before_arguments(served):
    body = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL], "temperature": 0, "parallel_tool_calls": False}
    with served.stream(body | {"tool_choice": "required"}, "/v1/chat/completions") as got:
        chunks = events(got.iter_lines())
    assert chunks.pop() == "[DONE]"
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "get_weather", "arguments": ""} and calls[0]["id"].startswith("call_")
    assert len(calls) > 4 and all(set(call) == {"index", "function"} and call["index"] == 0 for call in calls[1:])
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "tool_calls"


@pytest.mark.parametrize("arguments", ["{city}", '{"city": NaN}'])
def test_malformed_call_is_text(client, claude, arguments):
    broken = f'Well.\n<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    payload = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL], "extra_body": forced_answer(broken)}
    got = client.chat.completions.create(**payload).choices[0]
    assert got.message.tool_calls is None and got.finish_reason == "stop"
    assert got.message.content == broken
    payload = {
        "model": "m",
        "messages": CHAT,
        "tools": [BLOCK_TOOL],
        "max_tokens": 99,
        "extra_body": forced_answer(broken),
    }
    assert claude.messages.create(**payload).stop_reason == "end_turn"


def test_stream_with_malformed_call_does_not_end_with_tool_calls(served):
    good, broken = (
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {city}}}}}</tool_call>' for city in ('"x"', "NaN")
    )
    for text, ends in ((broken, ("stop", "end_turn")), (broken + good, ("tool_calls", "tool_use"))):
        payload = {"model": "m", "messages": CHAT, "max_tokens": 200} | forced_answer(text)
        with served.stream(payload | {"tools": [CHAT_TOOL]}, "/v1/chat/completions") as got:
            chunks = events(got.iter_lines())
        assert chunks[-2]["choices"][0]["finish_reason"] == ends[0]
        with served.stream(payload | {"tools": [BLOCK_TOOL]}, "/v1/messages") as got:
            chunks = events(got.iter_lines())
        # The line with the event's name and the last event follow.
        assert chunks[-3]["delta"]["stop_reason"] == ends[1]


def test_unsupported_schema_is_refused_by_name(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match='tools: Unimplemented keys: ."not'):
        client.chat.completions.create(model="m", messages=CHAT, tools=[tool], tool_choice="required")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="response_format: Unimplemented keys"):
        client.chat.completions.create(model="m", messages=CHAT, response_format=form)


def test_arguments_are_object_without_type_in_schema(client):
    schema = {"properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    payload = {"model": "m", "messages": CHAT, "temperature": 0, "parallel_tool_calls": False, "max_tokens": 60}
    got = client.chat.completions.create(tools=[tool], tool_choice="required", **payload)
    assert got.choices[0].message.tool_calls[0].function.arguments == '{"a": "x"}'


def test_allowed_tools_excludes_others(client):
    other = {"type": "function", "function": {"name": "now"}}
    named = {"type": "function", "function": {"name": "now"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    payload = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL, other], "temperature": 0}
    got = client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **payload)
    assert [call.function.name for call in got.choices[0].message.tool_calls] == ["now"]
    tools, mode = [TOOL, {"type": "function", "name": "now"}], {"type": "allowed_tools", "mode": "required"}
    named = [{"type": "web_search"}, {"type": "function", "name": "now"}]
    payload = {"model": "m", "input": "?", "tools": tools, "parallel_tool_calls": False}
    got = client.responses.create(tool_choice=mode | {"tools": named}, **payload)
    assert [item.name for item in got.output] == ["now"]
    with pytest.raises(openai.BadRequestError, match='tool_choice: "nope" is not one of the tools'):
        client.responses.create(tool_choice=mode | {"tools": [{"type": "function", "name": "nope"}]}, **payload)


# ---- response formats


def test_response_formats_in_all_apis(client, claude):
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
    got = client.chat.completions.create(model="m", messages=CHAT, response_format=form, temperature=0)
    assert set(json.loads(got.choices[0].message.content)) == {"city", "days"}
    text = {"format": {"type": "json_schema", "name": "weather", "schema": SCHEMA}}
    got = client.responses.create(model="m", input="?", text=text)
    assert set(json.loads(got.output_text)) == {"city", "days"}
    output = {"format": {"type": "json_schema", "schema": SCHEMA}}
    got = claude.messages.create(model="m", messages=CHAT, max_tokens=99, output_config=output)
    assert set(json.loads(got.content[0].text)) == {"city", "days"}
    got = client.completions.create(model="m", prompt="x", extra_body={"structured_outputs": {"choice": ["a b", "c"]}})
    assert got.choices[0].text in ("a b", "c")
    form = {"type": "json_object"}
    got = client.chat.completions.create(model="m", messages=CHAT, response_format=form, seed=3, max_tokens=99)
    assert got.choices[0].finish_reason == "length" or isinstance(json.loads(got.choices[0].message.content), dict)


WITH_TOOLS = {
    "choices": ({"choice": ["yes", "no"]}, ("yes", "no")),
    "regex_with_slash": ({"regex": r"a/b\/[/]\n"}, ("a/b//\n",)),
    "json_text": ({"json": '{"const": "x"}'}, ('"x"',)),
}


@pytest.mark.parametrize("payload, texts", WITH_TOOLS.values(), ids=WITH_TOOLS)
def test_response_format_applies_to_answers_without_calls(served, client, payload, texts):
    tokenizer = served.engine.tokenizer
    tags = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).startswith(b"<")]
    more = {"logit_bias": dict.fromkeys(map(str, tags), -100), "extra_body": {"structured_outputs": payload}}
    got = client.chat.completions.create(model="m", messages=CHAT, max_tokens=40, tools=[CHAT_TOOL], **more)
    assert got.choices[0].message.content in texts


NOT = {"not": {}}
EXACT = {"const": 2**53 + 1}  # This number has no exact floating-point representation.
INVALID_FORMATS = {  # name: (path, request fields with the conversation, the parameter that the error names)
    "json": ("chat/completions", {"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    "json_text": ("completions", {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    "unsupported_keyword": ("responses", {"structured_outputs": {"json": NOT}}, "structured_outputs.json"),
    "regex": ("messages", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "choice": ("completions", {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    "choice_is_a_number": (
        "chat/completions", {"structured_outputs": {"choice": 5}, "tools": [CHAT_TOOL]}, "structured_outputs.choice",
    ),
    "regex_with_tools": (
        "chat/completions", {"structured_outputs": {"regex": "("}, "tools": [CHAT_TOOL]},
        "structured_outputs.regex or tools",
    ),
    "grammar": ("responses", {"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    "grammar_in_messages": ("messages", {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    "grammar_with_tools": (
        "chat/completions", {"structured_outputs": {"grammar": 5}, "tools": [CHAT_TOOL]}, "structured_outputs.grammar",
    ),
    "format_or_tools": (
        "chat/completions", {"structured_outputs": {"json": NOT}, "tools": [CHAT_TOOL]},
        "structured_outputs.json or tools",
    ),
    "inexact_number": (
        "chat/completions", {"structured_outputs": {"json": EXACT}, "tools": [CHAT_TOOL]}, "structured_outputs.json",
    ),
    "inexact_number_in_tool": (
        "responses", {"tools": [TOOL | {"parameters": {"items": EXACT}}], "tool_choice": "required"}, "tools",
    ),
    "text": ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": NOT}}}, "text.format"),
    "output_config": (
        "messages", {"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path, sent, parameter", INVALID_FORMATS.values(), ids=INVALID_FORMATS)
def test_invalid_response_format_names_its_parameter(served, path, sent, parameter):
    conversation = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": CHAT})
    got = served.post(f"/v1/{path}", {"model": "m", "max_tokens": 3} | conversation | sent)
    error = got.json()["error"]
    assert got.status_code == 400 and error["message"].startswith((f"{parameter}: ", f"{parameter} must ")), got.text
    assert path == "messages" or error["param"] == (None if " or " in parameter else parameter)


def test_required_call_ignores_the_format_of_texts(served):
    call = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    for form in ({"text": {"format": {"type": "json_object"}}}, {"structured_outputs": {"regex": "a"}}):
        got = served.post("/v1/responses", {"model": "m", "input": "x"} | call | form).json()
        assert [item["type"] for item in got["output"]] == ["function_call"]


# ---- /v1/responses


def test_response_and_event_order(client):
    payload = {"model": "m", "input": "What is 17 + 25?", "temperature": 0}
    got = client.responses.create(**payload)
    Response.model_validate(got.model_dump(), strict=True)
    assert got.output_text == "17 + 25 = 42." and got.status == "completed" and got.usage.output_tokens == 12
    stream_events = list(client.responses.create(**payload, stream=True))
    assert [event.sequence_number for event in stream_events] == list(range(len(stream_events)))
    kinds = list(dict.fromkeys(event.type for event in stream_events))
    assert kinds == [f"response.{kind}" for kind in (
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    )]  # fmt: skip
    assert (
        "".join(event.delta for event in stream_events if event.type == "response.output_text.delta") == got.output_text
    )
    assert stream_events[-1].response.output[0].content[0].text == got.output_text


def test_truncated_item_is_incomplete_in_all_events(client):
    payload = {"model": "m", "input": "Weather?", "tools": [TOOL], "max_output_tokens": 30}
    long = SCHEMA | {"properties": SCHEMA["properties"] | {"city": {"type": "string", "minLength": 200}}}
    call = {"tools": [TOOL | {"parameters": long}], "tool_choice": "required"}
    for more, kind in (({"max_output_tokens": 2}, "message"), (call, "function_call")):
        got = list(client.responses.create(**payload | more, stream=True))
        done = [event.item for event in got if event.type == "response.output_item.done"]
        for item in (done[-1], got[-1].response.output[-1]):
            assert (item.type, item.status) == (kind, "incomplete")


def test_conversation_from_input_items(client):
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"role": "user", "content": "Weather?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "c1", "output": "Rain."},
    ]
    tools = [TOOL, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "namespace"}]
    got = client.responses.create(
        model="m", instructions="You are Codex.", input=items, tools=tools, max_output_tokens=4, store=False,
        include=["reasoning.encrypted_content"], reasoning={"effort": "low", "summary": "auto"}, prompt_cache_key="k",
        text={"verbosity": "low"},
    )  # fmt: skip
    assert got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"
    assert got.usage.input_tokens > 100


def test_codex_parameters_are_accepted(served):
    message = {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "Show a.txt"}]}
    tools = [TOOL | {"strict": False}, {"type": "web_search", "external_web_access": False},
             {"type": "namespace", "name": "agents", "tools": [TOOL]}]  # fmt: skip
    body = {
        "model": "m", "stream": True, "input": [message | {"role": "developer"}, message], "tools": tools,
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "high", "summary": "auto"},
        "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "client_metadata": {"session_id": "s"}, "service_tier": "auto",
        "max_output_tokens": 2,
    }  # fmt: skip
    with served.stream(body, "/v1/responses") as got:
        assert "response.incomplete" in list(got.iter_lines())[-3]


def test_empty_input_is_answered(client):
    for empty in ("", []):
        assert client.responses.create(model="m", input=empty, max_output_tokens=1).usage.output_tokens == 1


FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
REFUSED = {
    "store": ({"store": True}, "store: this server does not store responses"),
    "previous_response": ({"previous_response_id": "resp_1"}, "previous_response_id: this server does not store"),
    "background": ({"background": True}, "background is not supported"),
    "image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
    "unknown_item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: expected a message"),
    "unknown_parameter": ({"extra_body": {"inputs": 1}}, "did you mean input?"),
    "unknown_field_of_text": ({"text": {"fromat": {}}}, "text: object contains the unknown field fromat"),
    "unknown_field_of_reasoning": ({"reasoning": {"efort": "low"}}, "reasoning: object contains the unknown field"),
    "format_is_number": ({"text": {"format": 5}}, "text.format: expected an object, got an integer"),
    "unknown_format_type": ({"text": {"format": {"type": "xml"}}}, "text.format: expected type text"),
    "format_without_schema": (
        {"text": {"format": {"type": "json_schema", "name": "x"}}}, 'json_schema with {"name": ..., "schema": {...}}',
    ),
    "two_formats": ({"text": {"format": FORM}, "extra_body": {"structured_outputs": {"regex": "x"}}}, "set one of"),
    "zero_max_output_tokens": ({"max_output_tokens": 0}, "max_output_tokens must be an integer from 1"),
    "two_maxima": ({"max_output_tokens": 3, "extra_body": {"max_tokens": 4}}, "max_tokens and max_output_tokens have"),
    "return_token_ids": ({"extra_body": {"return_token_ids": True}}, "a response cannot contain them"),
    "no_input": ({"input": openai.omit}, "input is required"),
    "tool_of_chats": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]}, 'tools[0]: expected {"type": "function", "name":',
    ),
    "unknown_tool_choice": ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice: expected auto, none"),
}  # fmt: skip


@pytest.mark.parametrize("wrong, message", REFUSED.values(), ids=REFUSED)
def test_invalid_response_request_is_refused(client, wrong, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "m", "input": "x"} | wrong)
    assert message in refused.value.message


# ---- /v1/messages


def test_message_and_event_order(served, claude):
    payload = {"model": "claude-opus", "messages": CHAT, "max_tokens": 50, "extra_body": {"temperature": 0}}
    got = claude.messages.create(**payload)
    Message.model_validate(got.model_dump(), strict=True)
    assert got.content[0].text == "17 + 25 = 42." and got.stop_reason == "end_turn" and got.model == "claude-opus"
    body = {"model": "x", "messages": CHAT, "max_tokens": 50, "temperature": 0}
    with served.stream(body, "/v1/messages?beta=true") as stream:
        lines = [line for line in stream.iter_lines() if line and not line.startswith(":")]
    names, data = [line[7:] for line in lines[::2]], [json.loads(line[6:]) for line in lines[1::2]]
    assert names == [event["type"] for event in data]
    assert list(dict.fromkeys(names)) == ["message_start", "content_block_start", "content_block_delta",
                                          "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
    assert data[0]["message"]["usage"] == data[-2]["usage"] | {"output_tokens": 0}
    assert sum(data[0]["message"]["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")) == 18
    assert data[-2]["delta"]["stop_reason"] == "end_turn" and data[-2]["usage"]["output_tokens"] == 12
    assert claude.messages.count_tokens(model="x", messages=CHAT).input_tokens == 18


def test_thinking_is_separate_block(served, claude, client, monkeypatch):
    monkeypatch.setattr(served.engine.tokenizer, "supports_thinking", True)
    form = {"grammar": 'start: "<think>\\nhm\\n</think>\\n\\nYes."'}
    monkeypatch.setattr("tridecode.server.app.answer_constraint", lambda *args: form)
    payload = {"model": "m", "messages": CHAT, "max_tokens": 50}
    got = claude.messages.create(**payload)
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in got.content] == [
        ("thinking", "hm"), ("text", "Yes."),
    ]  # fmt: skip
    with claude.messages.stream(**payload) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "thinking" in kinds and [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[0].signature and streamed.content[1].text == "Yes."
    again = [*CHAT, {"role": "assistant", "content": [block.model_dump() for block in streamed.content]},
             {"role": "user", "content": "Sure?"}]  # fmt: skip
    assert claude.messages.create(**payload | {"messages": again}).stop_reason == "end_turn"
    got = list(client.responses.create(model="m", input="?", stream=True))
    assert [item.type for item in got[-1].response.output] == ["reasoning", "message"]
    assert "response.reasoning_text.delta" in {event.type for event in got}


def test_tool_round_trip_with_anthropic_client(claude):
    search = {"type": "web_search_20250305", "name": "web_search"}
    payload = {"model": "m", "max_tokens": 90, "tools": [BLOCK_TOOL, search]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    got = claude.messages.create(messages=CHAT, tool_choice=choice, **payload)
    (call,) = got.content
    assert set(call.input) == {"city", "days"} and got.stop_reason == "tool_use"
    text = {"type": "text", "text": "No."}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [text], "is_error": True}
    messages = [*CHAT, {"role": "assistant", "content": [call.model_dump()]},
                {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]  # fmt: skip
    assert claude.messages.create(messages=messages, **payload | {"max_tokens": 5}).stop_reason == "max_tokens"


def test_claude_code_parameters_are_accepted(served):
    cached = {"type": "text", "text": "Show a.txt", "cache_control": {"type": "ephemeral"}}
    tool = BLOCK_TOOL | {"input_schema": SCHEMA | {"$schema": "https://json-schema.org/draft/2020-12/schema"}}
    body = {
        "model": "m", "max_tokens": 2, "stream": True, "messages": [{"role": "user", "content": [cached]}],
        "system": [cached], "tools": [tool | {"cache_control": {"type": "ephemeral"}}], "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive", "display": "omitted"}, "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    }  # fmt: skip
    with served.stream(body, "/v1/messages?beta=true") as got:
        assert [line for line in got.iter_lines() if line.startswith("event: ")][-1] == "event: message_stop"


def test_billing_line_does_not_prevent_prefix_reuse(claude):
    def ask(code: str):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={code};"},
                  {"type": "text", "text": "You are an agent that works with files. " * 8}]  # fmt: skip
        return claude.messages.create(model="m", system=system, messages=CHAT, max_tokens=3).usage

    first, second = ask("1f2e3"), ask("a9b8c")
    assert second.cache_read_input_tokens >= 64 and first.cache_read_input_tokens < second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens


def test_later_system_messages_keep_their_position(claude):
    messages = [*CHAT, {"role": "assistant", "content": "42."}, {"role": "system", "content": "900 tokens left"},
                {"role": "user", "content": "Thanks."}]  # fmt: skip
    payload = {"model": "m", "messages": messages, "max_tokens": 3}
    assert claude.messages.create(**payload).stop_reason == "max_tokens"
    count = claude.messages.count_tokens(model="m", messages=messages).input_tokens
    assert count > claude.messages.count_tokens(model="m", messages=[*messages[:2], messages[3]]).input_tokens


LONG_STOP = "abcdefgh " * 25  # The string has more than a hundred tokens.
STOPPED = {  # name: (forced answer, stop sequences, expected text, expected stop sequence)
    "one_of_two": ("one two three", ["x", "two"], "one ", "two"),
    "first_within_a_token": ("I think so", ["th", "nk", "ink"], "I ", "th"),
    "longer_of_two_with_same_end": ("x ab y", ["b", "ab"], "x ", "ab"),
    "a_long_one": (f"one {LONG_STOP}end", ["x", LONG_STOP], "one ", LONG_STOP),
    "none": ("one two", ["three"], "one two", None),
}


@pytest.mark.parametrize("answer, stops, text, stopped", STOPPED.values(), ids=STOPPED)
def test_stop_sequence_is_reported(claude, answer, stops, text, stopped):
    payload = {
        "model": "m",
        "messages": CHAT,
        "max_tokens": 300,
        "stop_sequences": stops,
        "extra_body": forced_answer(answer),
    }
    with claude.messages.stream(**payload) as stream:
        streamed = stream.get_final_message()
    for got in (claude.messages.create(**payload), streamed):
        assert (got.content[0].text, got.stop_sequence) == (text, stopped)
        assert got.stop_reason == ("stop_sequence" if stopped else "end_turn")


MESSAGES_REFUSED = {
    "no_max_tokens": ({}, "max_tokens is required"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "reads text only"),
    "no_messages": ({"messages": [], "max_tokens": 1}, "messages: expected from 1"),
    "last_message_is_a_call": (
        {"messages": [*CHAT, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}],
         "max_tokens": 1}, "the results of the tools must follow it",
    ),
    "unknown_thinking_type": ({"thinking": {"type": "sometimes"}, "max_tokens": 1}, "expected enabled, adaptive or"),
    "unknown_field_of_output_config": ({"output_config": {"fromat": 1}, "max_tokens": 1}, "output_config: object"),
    "too_many_stops": ({"stop_sequences": ["a"] * 99, "max_tokens": 1}, "stop_sequences: at most 16 strings"),
    "two_lists_of_stops": ({"stop_sequences": ["a"], "stop": ["b"], "max_tokens": 1}, "stop and stop_sequences have"),
    "two_formats": (
        {"output_config": {"format": FORM}, "response_format": {"type": "json_object"}, "max_tokens": 1}, "set one",
    ),
    "return_token_ids": ({"return_token_ids": True, "max_tokens": 1}, "a message cannot contain them"),
    "tool_of_chats": (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 1}, 'expected {"name": ..., "in',
    ),
    "required_without_tools": ({"tool_choice": {"type": "any"}, "max_tokens": 1}, "there are no tools"),
    "tool_choice_without_type": ({"tool_choice": {"name": "f"}, "max_tokens": 1}, "tool_choice: expected type auto"),
    "tool_choice_with_list_as_type": ({"tool_choice": {"type": ["any"]}, "max_tokens": 1}, "expected type auto"),
    "too_long_prompt": ({"messages": [{"role": "user", "content": "word " * 9000}], "max_tokens": 1}, "context holds"),
}  # fmt: skip


@pytest.mark.parametrize("wrong, message", MESSAGES_REFUSED.values(), ids=MESSAGES_REFUSED)
def test_invalid_message_request_has_anthropics_error_form(served, wrong, message):
    got = served.post("/v1/messages", {"model": "m", "messages": CHAT} | wrong)
    assert got.status_code == 400 and got.json()["type"] == "error"
    assert got.json()["error"]["type"] == "invalid_request_error" and message in got.json()["error"]["message"]


def test_request_id_in_client_and_log(claude, client, caplog):
    payload = {"model": "bundled", "messages": CHAT, "max_tokens": 1}
    with caplog.at_level(logging.INFO, "tridecode.server"):
        names = [client.chat.completions.create(**payload)._request_id, claude.messages.create(**payload)._request_id]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**payload | {"n": 0})
        names.append(refused.value.request_id)
        assert len(set(names)) == 3
        until(lambda: all(f"{name} POST" in caplog.text for name in names))


def test_x_api_key_header_is_accepted():
    with Engine.load(device="cpu") as engine, Running(engine, any_model=True, api_keys=("secret",)) as running:
        good = anthropic.Anthropic(base_url=running.url, api_key="secret", max_retries=0)
        assert good.messages.count_tokens(model="m", messages=CHAT).input_tokens == 18
        bad = anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            bad.messages.count_tokens(model="m", messages=CHAT)
