"""Responses and events, validated against the OpenAPI documents of OpenAI, Open Responses and Anthropic."""

import warnings
from pathlib import Path

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from servers import CHAT, Running, events

from tridecode import Engine

CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
FUNCTION = {"name": "get_weather", "description": "Of a city.", "parameters": CITY}
FORM = {"name": "city", "schema": CITY}
CHATS = {"model": "bundled", "messages": CHAT, "max_tokens": 60, "temperature": 0}
# name: (path, body, client's type, client's type of an event, (document, schema), (document, schema of an event))
CASES: dict[str, tuple] = {}
for name, more in {
    "plain": {},
    "logprobs": {"logprobs": True, "top_logprobs": 2, "n": 2},
    "call": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
             "parallel_tool_calls": False},
    "json": {"response_format": {"type": "json_schema", "json_schema": FORM}},
}.items():  # fmt: skip
    CASES[f"chat_{name}"] = (
        "chat/completions", CHATS | more, ChatCompletion, ChatCompletionChunk,
        ("openai_chat", "CreateChatCompletionResponse"), ("openai_chat", "CreateChatCompletionStreamResponse"),
    )  # fmt: skip
for name, more in {"plain": {}, "logprobs": {"logprobs": 2, "n": 2}}.items():
    CASES[f"completion_{name}"] = (
        "completions", {"model": "bundled", "prompt": "Once", "max_tokens": 5} | more, Completion, None,
        ("openai_chat", "CreateCompletionResponse"), ("openai_chat", "CreateCompletionResponse"),
    )  # fmt: skip
for name, more in {
    "plain": {"metadata": {"a": "b"}, "safety_identifier": "u", "prompt_cache_key": "k", "max_tool_calls": 3},
    "call": {"tools": [{"type": "function"} | FUNCTION], "tool_choice": "required", "parallel_tool_calls": False},
    "json": {"text": {"format": {"type": "json_schema"} | FORM}, "reasoning": {"effort": "low"}},
    "cut": {"max_output_tokens": 2},
}.items():
    CASES[f"response_{name}"] = (
        "responses", {"model": "bundled", "input": "What is 17 + 25?", "temperature": 0} | more, Response,
        ResponseStreamEvent,
        # The document allows no schema in a response format.
        None if name == "json" else ("openresponses", "ResponseResource"), None,
    )  # fmt: skip
for name, more in {
    "plain": {},
    "call": {"tools": [{"name": "get_weather", "input_schema": CITY}],
             "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "stopped": {"stop_sequences": ["="]},
    "cut": {"max_tokens": 2},
}.items():  # fmt: skip
    CASES[f"message_{name}"] = (
        "messages", CHATS | more, Message, RawMessageStreamEvent, ("anthropic", "Message"), None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def served():
    with Engine.load(device="cpu", slots=4) as engine, Running(engine) as running:
        yield running


@pytest.fixture(scope="module")
def check():
    """Return a function that validates a value against a schema of an OpenAPI document."""
    schema = pytest.importorskip("llm_comply.schema", reason="llm-comply contains the OpenAPI documents")
    specs = Path(schema.__file__).parent / "specs"
    loaders = {}

    def validate(value, document: str, name: str) -> None:
        loader = loaders.setdefault(document, schema.SpecLoader(str(specs / f"{document}.json")))
        with warnings.catch_warnings():  # llm-comply resolves references by a class that jsonschema deprecates.
            warnings.simplefilter("ignore", DeprecationWarning)
            errors = loader.validate(value, name)
        # In events, OpenAI's server sends null, which llm-comply's reading of the document does not allow.
        assert [error for error in errors if "finish_reason: None is not" not in error] == []

    return validate


def accepts(kind, value) -> None:
    """Validate a value with the types of a client, without conversions."""
    TypeAdapter(kind).validate_python(value, strict=False)


@pytest.mark.parametrize("name", CASES)
def test_response_has_the_published_form(served, check, name):
    path, body, kind, _, schema, _ = CASES[name]
    got = served.post(f"/v1/{path}", body)
    assert got.status_code == 200, got.text
    accepts(kind, got.json())
    if schema:
        check(got.json(), *schema)


@pytest.mark.parametrize("name", CASES)
def test_events_have_the_published_form(served, check, name):
    path, body, _, kind, schema, event_schema = CASES[name]
    with served.stream(body, f"/v1/{path}") as got:
        sent = [event for event in events(got.iter_lines()) if isinstance(event, dict)]
    assert len(sent) > 1
    for event in sent:
        if kind:  # OpenAI's type of completions does not allow finish_reason null, which its server sends.
            accepts(kind, event)
        if event_schema:
            check(event, *event_schema)
        if event.get("type") == "message_start":
            check(event["message"], *schema)
        elif "response" in event and schema:
            check(event["response"], *schema)


def test_fields_that_clients_check(served):
    chat = served.post("/v1/chat/completions", CHATS).json()
    assert isinstance(chat["system_fingerprint"], str) and chat["choices"][0]["message"]["annotations"] == []
    block = served.post("/v1/messages", CHATS).json()["content"][0]
    assert block["citations"] is not None  # The AI SDK refuses null.
    more = {"temperature": 0.5, "top_p": 0.25, "presence_penalty": 1, "prompt_cache_key": "k", "safety_identifier": "s"}
    got = served.post("/v1/responses", {"model": "bundled", "input": "Hi", "max_output_tokens": 2} | more).json()
    assert {name: got[name] for name in more} == more and got["frequency_penalty"] == 0
    default = served.engine.default_params()
    plain = served.post("/v1/responses", {"model": "bundled", "input": "Hi", "max_output_tokens": 2}).json()
    assert (plain["temperature"], plain["top_p"]) == (default.temperature, default.top_p)
