"""The clients of OpenAI and Anthropic. clients/ has the same cases with other projects' clients."""

import anthropic
import openai
import pytest
from pydantic import BaseModel
from servers import ANSWER, CHAT, Running, until

from tridecode import Engine

QUESTION, NAME = CHAT[0]["content"], "What is your name?"
INSTRUCTIONS = "Your name is Otto."
TURNS = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada!"},
    {"role": "user", "content": "What is my name?"},
]
STORY = [{"role": "user", "content": "Tell a long story about a river."}]
SCHEMA = {"type": "object", "properties": {"sum": {"const": 42}}, "required": ["sum"], "additionalProperties": False}
FUNCTION = {"name": "report", "description": "Reports a sum.", "parameters": SCHEMA}


class Sum(BaseModel):
    sum: int


@pytest.fixture(scope="module")
def running():
    with Engine.load(device="cpu", slots=2) as engine, Running(engine) as running:
        yield running


def chats(running):
    client = running.client().chat.completions
    tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}

    def create(messages=CHAT, model="bundled", **more):
        return client.create(model=model, messages=messages, temperature=0, **more)

    return {
        "plain": lambda: create().choices[0].message.content,
        "stream": lambda: "".join(part.choices[0].delta.content or "" for part in create(stream=True)),
        "system": lambda: create([{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": NAME}])
        .choices[0].message.content,
        "turns": lambda: create(TURNS).choices[0].message.content,
        "call": lambda: create(**tools).choices[0].message.tool_calls[0].function.arguments,
        "schema": lambda: client.parse(model="bundled", messages=CHAT, response_format=Sum).choices[0].message.parsed,
        "error": lambda: create(model="other"),
        "cancel": lambda: create(STORY, stream=True),
    }  # fmt: skip


def responses(running):
    client = running.client().responses
    tools = {"tools": [{"type": "function"} | FUNCTION], "tool_choice": "required"}

    def create(prompt=QUESTION, model="bundled", **more):
        return client.create(model=model, input=prompt, temperature=0, **more)

    def stream():
        with client.stream(model="bundled", input=QUESTION, temperature=0) as stream:
            return stream.get_final_response().output_text

    return {
        "plain": lambda: create().output_text,
        "stream": stream,
        "system": lambda: create(NAME, instructions=INSTRUCTIONS).output_text,
        "turns": lambda: create(TURNS).output_text,
        "call": lambda: create(**tools).output[0].arguments,
        "schema": lambda: client.parse(model="bundled", input=QUESTION, text_format=Sum).output_parsed,
        "error": lambda: create(model="other"),
        "cancel": lambda: create(STORY, stream=True),
    }


def messages(running):
    client = anthropic.Anthropic(base_url=running.url, api_key="none", max_retries=0).messages
    options = {"max_tokens": 400, "extra_body": {"temperature": 0}}
    tools = {"tools": [{"name": "report", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}}

    def create(messages=CHAT, model="bundled", **more):
        return client.create(model=model, messages=messages, **options, **more)

    def stream():
        with client.stream(model="bundled", messages=CHAT, **options) as stream:
            return stream.get_final_text()

    return {
        "plain": lambda: create().content[0].text,
        "stream": stream,
        "system": lambda: create([{"role": "user", "content": NAME}], system=INSTRUCTIONS).content[0].text,
        "turns": lambda: create(TURNS).content[0].text,
        "call": lambda: create(**tools).content[0].input,
        "schema": lambda: client.parse(model="bundled", messages=CHAT, output_format=Sum, **options).parsed_output,
        "error": lambda: create(model="other"),
        "cancel": lambda: create(STORY, stream=True),
    }


@pytest.mark.parametrize("client", [chats, responses, messages])
def test_cases_of_other_clients(running, client):
    cases = client(running)
    assert cases["plain"]() == cases["stream"]() == ANSWER
    assert "Otto" in cases["system"]() and "Ada" in cases["turns"]()
    assert cases["call"]() in ('{"sum": 42}', {"sum": 42})
    with pytest.raises((openai.NotFoundError, anthropic.NotFoundError)) as raised:
        cases["error"]()
    assert raised.value.status_code == 404 and "this server has bundled" in str(raised.value)
    cancelled = running.metric("requests_total", 'outcome="cancelled"')
    with cases["cancel"]() as stream:
        next(iter(stream))
    until(lambda: running.metric("requests_total", 'outcome="cancelled"') == cancelled + 1)


@pytest.mark.parametrize("client", [chats, responses, messages])
def test_schema_of_a_client_is_honored(running, client):
    assert isinstance(client(running)["schema"]().sum, int)
