"""The APIs of agents by the clients of those who made them: tools, forms, thinking, errors, streamed and not.

The bundled model is held to what it says by masks, and has the templates of the families whose formats it writes.
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
# What each family writes, and a template that gives it away.
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
    """A server of the bundled weights whose template has tools as the family's has."""
    path = tmp_path / name
    shutil.copytree(BUNDLED, path)
    template = path / "chat_template.jinja"
    mark = "{#- " + WRITTEN[name][0] + " -#}{%- if tools -%}{{ tools | tojson }}{%- endif -%}"
    template.write_text(mark + template.read_text())
    with Engine.load(path, device="cpu") as engine, Running(engine, any_model=True) as running:
        yield running


def saying(text: str) -> dict:
    """Extra fields with which the answer is that text."""
    return {"structured_outputs": {"grammar": f"start: {json.dumps(text)}"}}


def written(name: str) -> str:
    text = WRITTEN[name][1]
    return text % json.dumps(ARGUMENTS) if "%s" in text else text


# ---- tools, by all three APIs


@pytest.mark.parametrize("name", WRITTEN)
def test_each_familys_calls_reach_the_clients(tmp_path, name):
    with family(tmp_path, name) as running:
        extra, before = saying(written(name)), "" if name == "bare" else "Look."
        asked = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL], "extra_body": extra}
        chat = running.client().chat.completions
        got = chat.create(**asked).choices[0]
        (call,) = got.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
        assert got.finish_reason == "tool_calls" and (got.message.content or "") == before
        with chat.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_completion().choices[0]
        assert "tool_calls.function.arguments.delta" in kinds and streamed.finish_reason == "tool_calls"
        assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
        assert (streamed.message.content or "") == before

        claude = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0).messages
        asked = {"model": "m", "messages": CHAT, "tools": [BLOCK_TOOL], "max_tokens": 200, "extra_body": extra}
        got = claude.create(**asked)
        assert got.content[-1].input == ARGUMENTS and got.stop_reason == "tool_use"
        with claude.stream(**asked) as stream:
            streamed = stream.get_final_message()
        assert [block.type for block in streamed.content] == [block.type for block in got.content]
        assert streamed.content[-1].input == ARGUMENTS and streamed.stop_reason == "tool_use"

        asked = {"model": "m", "input": "Weather?", "tools": [TOOL], "extra_body": extra}
        got = running.client().responses.create(**asked)
        assert got.output[-1].name == "get_weather" and json.loads(got.output[-1].arguments) == ARGUMENTS
        with running.client().responses.stream(**asked) as stream:
            list(stream)
            streamed = stream.get_final_response()
        assert streamed.output[-1].arguments == got.output[-1].arguments and streamed.output_text == before


def test_a_round_with_a_tool_as_an_openai_client_plays_it(client):
    messages = [{"role": "system", "content": "Be brief."}, *CHAT]
    asked = {"model": "m", "tools": [CHAT_TOOL], "temperature": 0, "parallel_tool_calls": False}
    got = client.chat.completions.create(messages=messages, tool_choice="required", **asked)
    ChatCompletion.model_validate(got.model_dump(), strict=True)
    (call,) = got.choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"city", "days"} and call.id
    messages += [got.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    after = client.chat.completions.create(messages=messages, max_tokens=10, **asked)
    assert after.usage.prompt_tokens > got.usage.prompt_tokens
    none = client.chat.completions.create(messages=CHAT, tool_choice="none", **asked | {"max_tokens": 5})
    assert none.choices[0].message.tool_calls is None and none.usage.prompt_tokens < 30  # it is told of none


def test_a_stream_says_a_calls_name_first_and_then_its_arguments(served):
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
def test_a_malformed_call_comes_back_as_text(client, claude, arguments):
    broken = f'Well.\n<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    asked = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL], "extra_body": saying(broken)}
    got = client.chat.completions.create(**asked).choices[0]
    assert got.message.tool_calls is None and got.finish_reason == "stop"
    assert got.message.content == broken
    asked = {"model": "m", "messages": CHAT, "tools": [BLOCK_TOOL], "max_tokens": 99, "extra_body": saying(broken)}
    assert claude.messages.create(**asked).stop_reason == "end_turn"


def test_a_stream_whose_only_call_is_malformed_does_not_end_as_one_with_calls(served):
    good, broken = (
        f'<tool_call>{{"name": "get_weather", "arguments": {{"city": {city}}}}}</tool_call>' for city in ('"x"', "NaN")
    )
    for text, ends in ((broken, ("stop", "end_turn")), (broken + good, ("tool_calls", "tool_use"))):
        asked = {"model": "m", "messages": CHAT, "max_tokens": 200} | saying(text)
        with served.stream(asked | {"tools": [CHAT_TOOL]}, "/v1/chat/completions") as got:
            chunks = events(got.iter_lines())
        assert chunks[-2]["choices"][0]["finish_reason"] == ends[0]
        with served.stream(asked | {"tools": [BLOCK_TOOL]}, "/v1/messages") as got:
            chunks = events(got.iter_lines())
        assert chunks[-3]["delta"]["stop_reason"] == ends[1]  # before the last event and its name


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(client):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}
    with pytest.raises(openai.BadRequestError, match='tools: Unimplemented keys: ."not'):
        client.chat.completions.create(model="m", messages=CHAT, tools=[tool], tool_choice="required")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    with pytest.raises(openai.BadRequestError, match="response_format: Unimplemented keys"):
        client.chat.completions.create(model="m", messages=CHAT, response_format=form)


def test_arguments_are_an_object_though_the_schema_may_not_say_so(client):
    schema = {"properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    asked = {"model": "m", "messages": CHAT, "temperature": 0, "parallel_tool_calls": False, "max_tokens": 60}
    got = client.chat.completions.create(tools=[tool], tool_choice="required", **asked)
    assert got.choices[0].message.tool_calls[0].function.arguments == '{"a": "x"}'


def test_a_choice_of_some_tools_leaves_the_others_out(client):
    other = {"type": "function", "function": {"name": "now"}}
    named = {"type": "function", "function": {"name": "now"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    asked = {"model": "m", "messages": CHAT, "tools": [CHAT_TOOL, other], "temperature": 0}
    got = client.chat.completions.create(tool_choice=choice, parallel_tool_calls=False, **asked)
    assert [call.function.name for call in got.choices[0].message.tool_calls] == ["now"]
    tools, mode = [TOOL, {"type": "function", "name": "now"}], {"type": "allowed_tools", "mode": "required"}
    named = [{"type": "web_search"}, {"type": "function", "name": "now"}]
    asked = {"model": "m", "input": "?", "tools": tools, "parallel_tool_calls": False}
    got = client.responses.create(tool_choice=mode | {"tools": named}, **asked)
    assert [item.name for item in got.output] == ["now"]
    with pytest.raises(openai.BadRequestError, match='tool_choice: "nope" is none of the tools'):
        client.responses.create(tool_choice=mode | {"tools": [{"type": "function", "name": "nope"}]}, **asked)


# ---- forms


def test_forms_by_all_three_apis(client, claude):
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


BESIDE_TOOLS = {
    "choices": ({"choice": ["yes", "no"]}, ("yes", "no")),
    "a_slash": ({"regex": r"a/b\/[/]\n"}, ("a/b//\n",)),
    "json_text": ({"json": '{"const": "x"}'}, ('"x"',)),
}


@pytest.mark.parametrize("asked, texts", BESIDE_TOOLS.values(), ids=BESIDE_TOOLS)
def test_a_form_beside_tools_is_kept_where_none_is_called(served, client, asked, texts):
    tokenizer = served.engine.tokenizer
    tags = [token for token in range(tokenizer.vocab_size) if tokenizer.token_bytes(token).startswith(b"<")]
    more = {"logit_bias": dict.fromkeys(map(str, tags), -100), "extra_body": {"structured_outputs": asked}}
    got = client.chat.completions.create(model="m", messages=CHAT, max_tokens=40, tools=[CHAT_TOOL], **more)
    assert got.choices[0].message.content in texts


@pytest.mark.parametrize("wrong", [{"json": "{"}, {"json": [1]}, {"choice": 5}, {"regex": 5}, {"regex": "("}], ids=str)
@pytest.mark.parametrize("tools", [[], [CHAT_TOOL]], ids=["alone", "beside_tools"])
def test_what_is_no_form_is_refused_beside_tools_too(served, wrong, tools):
    body = {"model": "m", "messages": CHAT, "tools": tools, "structured_outputs": wrong}
    got = served.post("/v1/chat/completions", body)
    assert got.status_code == 400 and "internal" not in got.text, got.text


NOT = {"not": {}}
EXACT = {"const": 2**53 + 1}  # no floating-point number
PLACES = {  # a path, what is sent beside its conversation, and the place that the error names
    "json": ("chat/completions", {"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
    "json_text": ("completions", {"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    "a_keyword": ("responses", {"structured_outputs": {"json": NOT}}, "structured_outputs.json"),
    "regex": ("messages", {"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    "choice": ("completions", {"structured_outputs": {"choice": [""]}}, "structured_outputs.choice"),
    "grammar": ("responses", {"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
    "grammar_of_a_message": ("messages", {"structured_outputs": {"grammar": "x"}}, "structured_outputs.grammar"),
    "grammar_beside_tools": (
        "chat/completions", {"structured_outputs": {"grammar": 5}, "tools": [CHAT_TOOL]}, "structured_outputs.grammar",
    ),
    "one_of_two": (
        "chat/completions", {"structured_outputs": {"json": NOT}, "tools": [CHAT_TOOL]},
        "structured_outputs.json or tools",
    ),
    "a_number": (
        "chat/completions", {"structured_outputs": {"json": EXACT}, "tools": [CHAT_TOOL]}, "structured_outputs.json",
    ),
    "a_number_of_a_tool": (
        "responses", {"tools": [TOOL | {"parameters": {"items": EXACT}}], "tool_choice": "required"}, "tools",
    ),
    "text": ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": NOT}}}, "text.format"),
    "output_config": (
        "messages", {"output_config": {"format": {"type": "json_schema", "schema": 5}}}, "output_config.format.schema",
    ),
}  # fmt: skip


@pytest.mark.parametrize("path, sent, place", PLACES.values(), ids=PLACES)
def test_a_form_that_cannot_be_is_named_as_it_was_sent(served, path, sent, place):
    said = {"completions": {"prompt": "x"}, "responses": {"input": "x"}}.get(path, {"messages": CHAT})
    got = served.post(f"/v1/{path}", {"model": "m", "max_tokens": 3} | said | sent)
    error = got.json()["error"]
    assert got.status_code == 400 and error["message"].startswith((f"{place}: ", f"{place} must ")), got.text
    assert path == "messages" or error["param"] == (None if " or " in place else place)


def test_a_call_and_a_form_are_named_as_they_were_sent(served):
    beside = {"tools": [TOOL], "tool_choice": "required"}
    for form, place in (({"text": {"format": {"type": "json_object"}}}, "text.format"),
                        ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex")):  # fmt: skip
        got = served.post("/v1/responses", {"model": "m", "input": "x"} | beside | form)
        assert f"tool_choice asks for a call, {place} for a text" in got.json()["error"]["message"], got.text


# ---- /v1/responses


def test_a_response_and_its_events_in_their_order(client):
    asked = {"model": "m", "input": "What is 17 + 25?", "temperature": 0}
    got = client.responses.create(**asked)
    Response.model_validate(got.model_dump(), strict=True)
    assert got.output_text == "17 + 25 = 42." and got.status == "completed" and got.usage.output_tokens == 12
    found = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    kinds = list(dict.fromkeys(event.type for event in found))
    assert kinds == [f"response.{kind}" for kind in (
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    )]  # fmt: skip
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == got.output_text
    assert found[-1].response.output[0].content[0].text == got.output_text


def test_an_item_that_is_cut_is_incomplete_in_each_event_that_has_it(client):
    asked = {"model": "m", "input": "Weather?", "tools": [TOOL], "max_output_tokens": 30}
    long = SCHEMA | {"properties": SCHEMA["properties"] | {"city": {"type": "string", "minLength": 200}}}
    call = {"tools": [TOOL | {"parameters": long}], "tool_choice": "required"}
    for more, kind in (({"max_output_tokens": 2}, "message"), (call, "function_call")):
        found = list(client.responses.create(**asked | more, stream=True))
        done = [event.item for event in found if event.type == "response.output_item.done"]
        for item in (done[-1], found[-1].response.output[-1]):
            assert (item.type, item.status) == (kind, "incomplete")


def test_a_conversation_goes_on_from_items(client):
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


def test_what_codex_sends_beside_is_taken(served):
    words = {"role": "user", "type": "message", "content": [{"type": "input_text", "text": "Show a.txt"}]}
    tools = [TOOL | {"strict": False}, {"type": "web_search", "external_web_access": False},
             {"type": "namespace", "name": "agents", "tools": [TOOL]}]  # fmt: skip
    body = {
        "model": "m", "stream": True, "input": [words | {"role": "developer"}, words], "tools": tools,
        "tool_choice": "auto", "parallel_tool_calls": True, "reasoning": {"effort": "high", "summary": "auto"},
        "store": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "text": {"verbosity": "low"}, "client_metadata": {"session_id": "s"}, "service_tier": "auto",
        "max_output_tokens": 2,
    }  # fmt: skip
    with served.stream(body, "/v1/responses") as got:
        assert "response.incomplete" in list(got.iter_lines())[-3]


def test_a_client_that_asks_whether_somebody_is_there_gets_an_answer(client):
    for nothing in ("", []):
        assert client.responses.create(model="m", input=nothing, max_output_tokens=1).usage.output_tokens == 1


FORM = {"type": "json_schema", "name": "x", "schema": SCHEMA}
REFUSED = {
    "a_stored_response": ({"store": True}, "store: this server stores no responses"),
    "a_response_before": ({"previous_response_id": "resp_1"}, "previous_response_id: this server stores no responses"),
    "the_background": ({"background": True}, "background is not supported"),
    "an_image": ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "reads text only"),
    "an_unknown_item": ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]: expected a message"),
    "an_unknown_parameter": ({"extra_body": {"inputs": 1}}, "did you mean input?"),
    "an_unknown_word_of_its_text": ({"text": {"fromat": {}}}, "text: object contains unknown field fromat"),
    "an_unknown_word_of_its_reasoning": ({"reasoning": {"efort": "low"}}, "reasoning: object contains unknown field"),
    "a_format_that_is_none": ({"text": {"format": 5}}, "text.format: expected object"),
    "a_kind_of_format_that_is_none": ({"text": {"format": {"type": "xml"}}}, "text.format: expected type text"),
    "a_format_without_a_schema": (
        {"text": {"format": {"type": "json_schema", "name": "x"}}}, 'json_schema with {"name": ..., "schema": {...}}',
    ),
    "two_forms": ({"text": {"format": FORM}, "extra_body": {"structured_outputs": {"regex": "x"}}}, "give one"),
    "no_tokens": ({"max_output_tokens": 0}, "max_output_tokens must be an integer from 1"),
    "two_counts": ({"max_output_tokens": 3, "extra_body": {"max_tokens": 4}}, "max_tokens and max_output_tokens say"),
    "ids_of_its_tokens": ({"extra_body": {"return_token_ids": True}}, "return_token_ids: a response has no place"),
    "a_choice_of_no_kind": ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice: expected auto, none"),
}  # fmt: skip


@pytest.mark.parametrize("wrong, message", REFUSED.values(), ids=REFUSED)
def test_what_a_response_cannot_be_is_refused(client, wrong, message):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "m", "input": "x"} | wrong)
    assert message in refused.value.message


# ---- /v1/messages


def test_a_message_and_its_events_in_their_order(served, claude):
    asked = {"model": "claude-opus", "messages": CHAT, "max_tokens": 50, "extra_body": {"temperature": 0}}
    got = claude.messages.create(**asked)
    Message.model_validate(got.model_dump(), strict=True)
    assert got.content[0].text == "17 + 25 = 42." and got.stop_reason == "end_turn" and got.model == "claude-opus"
    body = {"model": "x", "messages": CHAT, "max_tokens": 50, "temperature": 0}
    with served.stream(body, "/v1/messages?beta=true") as stream:
        lines = [line for line in stream.iter_lines() if line and not line.startswith(":")]
    names, data = [line[7:] for line in lines[::2]], [json.loads(line[6:]) for line in lines[1::2]]
    assert names == [event["type"] for event in data]
    assert list(dict.fromkeys(names)) == ["message_start", "content_block_start", "content_block_delta",
                                          "content_block_stop", "message_delta", "message_stop"]  # fmt: skip
    assert data[0]["message"]["usage"]["input_tokens"] == 18
    assert data[-2]["delta"]["stop_reason"] == "end_turn" and data[-2]["usage"]["output_tokens"] == 12
    assert claude.messages.count_tokens(model="x", messages=CHAT).input_tokens == 18


def test_thinking_is_a_block_of_its_own(served, claude, client, monkeypatch):
    monkeypatch.setattr(served.engine.tokenizer, "thinks", True)
    extra = saying("<think>\nhm\n</think>\n\nYes.")
    asked = {"model": "m", "messages": CHAT, "max_tokens": 50, "extra_body": extra}
    got = claude.messages.create(**asked)
    assert [(block.type, getattr(block, "thinking", None) or block.text) for block in got.content] == [
        ("thinking", "hm"), ("text", "Yes."),
    ]  # fmt: skip
    with claude.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert "thinking" in kinds and [block.type for block in streamed.content] == ["thinking", "text"]
    assert streamed.content[0].signature and streamed.content[1].text == "Yes."
    again = [*CHAT, {"role": "assistant", "content": [block.model_dump() for block in streamed.content]},
             {"role": "user", "content": "Sure?"}]  # fmt: skip
    assert claude.messages.create(**asked | {"messages": again}).stop_reason == "end_turn"
    found = list(client.responses.create(model="m", input="?", stream=True, extra_body=extra))
    assert [item.type for item in found[-1].response.output] == ["reasoning", "message"]
    assert "response.reasoning_text.delta" in {event.type for event in found}


def test_a_round_with_a_tool_as_anthropics_client_plays_it(claude):
    search = {"type": "web_search_20250305", "name": "web_search"}
    asked = {"model": "m", "max_tokens": 90, "tools": [BLOCK_TOOL, search]}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    got = claude.messages.create(messages=CHAT, tool_choice=choice, **asked)
    (call,) = got.content
    assert set(call.input) == {"city", "days"} and got.stop_reason == "tool_use"
    text = {"type": "text", "text": "No."}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [text], "is_error": True}
    messages = [*CHAT, {"role": "assistant", "content": [call.model_dump()]},
                {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]}]  # fmt: skip
    assert claude.messages.create(messages=messages, **asked | {"max_tokens": 5}).stop_reason == "max_tokens"


def test_what_claude_code_sends_beside_is_taken(served):
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


def test_the_line_that_changes_with_each_request_hides_no_prefix(claude):
    def ask(code: str):
        system = [{"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={code};"},
                  {"type": "text", "text": "You are an agent that works with files. " * 8}]  # fmt: skip
        return claude.messages.create(model="m", system=system, messages=CHAT, max_tokens=3).usage

    first, second = ask("1f2e3"), ask("a9b8c")
    assert second.cache_read_input_tokens >= 64 and first.cache_read_input_tokens < second.cache_read_input_tokens
    assert second.input_tokens + second.cache_read_input_tokens == first.input_tokens + first.cache_read_input_tokens


def test_system_blocks_in_the_middle_stay_where_they_are(claude):
    messages = [*CHAT, {"role": "assistant", "content": "42."}, {"role": "system", "content": "900 tokens left"},
                {"role": "user", "content": "Thanks."}]  # fmt: skip
    asked = {"model": "m", "messages": messages, "max_tokens": 3}
    assert claude.messages.create(**asked).stop_reason == "max_tokens"
    count = claude.messages.count_tokens(model="m", messages=messages).input_tokens
    assert count > claude.messages.count_tokens(model="m", messages=[*messages[:2], messages[3]]).input_tokens


LONG_STOP = "abcdefgh " * 25  # of more than a hundred tokens
STOPPED = {  # what would be said, the stops, and the text and stop that come
    "one_of_two": ("one two three", ["x", "two"], "one ", "two"),
    "the_first_in_a_token": ("I think so", ["th", "nk", "ink"], "I ", "th"),
    "the_longer_of_two_that_end_together": ("x ab y", ["b", "ab"], "x ", "ab"),
    "a_long_one": (f"one {LONG_STOP}end", ["x", LONG_STOP], "one ", LONG_STOP),
    "none": ("one two", ["three"], "one two", None),
}


@pytest.mark.parametrize("said, stops, text, stopped", STOPPED.values(), ids=STOPPED)
def test_the_stop_sequence_that_cut_the_text_is_named(claude, said, stops, text, stopped):
    asked = {"model": "m", "messages": CHAT, "max_tokens": 300, "stop_sequences": stops, "extra_body": saying(said)}
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for got in (claude.messages.create(**asked), streamed):
        assert (got.content[0].text, got.stop_sequence) == (text, stopped)
        assert got.stop_reason == ("stop_sequence" if stopped else "end_turn")


MESSAGES_REFUSED = {
    "no_maximum": ({}, "max_tokens is required"),
    "an_image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 1}, "reads text only"),
    "no_messages": ({"messages": [], "max_tokens": 1}, "messages: expected from 1"),
    "an_answer_to_go_on_with": (
        {"messages": [*CHAT, {"role": "assistant", "content": "I"}], "max_tokens": 1}, "the last must be the user's",
    ),
    "thinking_of_no_kind": ({"thinking": {"type": "sometimes"}, "max_tokens": 1}, "thinking.type: invalid enum value"),
    "an_unknown_word": ({"output_config": {"fromat": 1}, "max_tokens": 1}, "output_config: object contains unknown"),
    "too_many_stops": ({"stop_sequences": ["a"] * 99, "max_tokens": 1}, "stop_sequences: at most 16 strings"),
    "two_lists_of_stops": ({"stop_sequences": ["a"], "stop": ["b"], "max_tokens": 1}, "stop and stop_sequences say"),
    "two_forms": (
        {"output_config": {"format": FORM}, "response_format": {"type": "json_object"}, "max_tokens": 1}, "give one",
    ),
    "ids_of_its_tokens": ({"return_token_ids": True, "max_tokens": 1}, "return_token_ids: a message has no place"),
    "a_choice_of_nothing": ({"tool_choice": {"type": "any"}, "max_tokens": 1}, "there are no tools"),
    "a_choice_of_no_kind": ({"tool_choice": {}, "max_tokens": 1}, "tool_choice: expected type auto, any"),
    "a_choice_of_several_kinds": ({"tool_choice": {"type": ["any"]}, "max_tokens": 1}, "expected type auto"),
    "too_much": ({"messages": [{"role": "user", "content": "word " * 9000}], "max_tokens": 1}, "the context holds"),
}  # fmt: skip


@pytest.mark.parametrize("wrong, message", MESSAGES_REFUSED.values(), ids=MESSAGES_REFUSED)
def test_what_a_message_cannot_be_is_refused_in_anthropics_form(served, wrong, message):
    got = served.post("/v1/messages", {"model": "m", "messages": CHAT} | wrong)
    assert got.status_code == 400 and got.json()["type"] == "error"
    assert got.json()["error"]["type"] == "invalid_request_error" and message in got.json()["error"]["message"]


def test_clients_know_a_request_by_the_logs_name_for_it(claude, client, caplog):
    asked = {"model": "bundled", "messages": CHAT, "max_tokens": 1}
    with caplog.at_level(logging.INFO, "tridecode.server"):
        names = [client.chat.completions.create(**asked)._request_id, claude.messages.create(**asked)._request_id]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**asked | {"n": 0})
        names.append(refused.value.request_id)
        assert len(set(names)) == 3
        until(lambda: all(f"{name} POST" in caplog.text for name in names))


def test_a_key_is_taken_as_anthropics_clients_send_it():
    with Engine.load(device="cpu") as engine, Running(engine, any_model=True, api_key="secret") as running:
        good = anthropic.Anthropic(base_url=running.url, api_key="secret", max_retries=0)
        assert good.messages.count_tokens(model="m", messages=CHAT).input_tokens == 18
        bad = anthropic.Anthropic(base_url=running.url, api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError, match="authentication_error"):
            bad.messages.count_tokens(model="m", messages=CHAT)
