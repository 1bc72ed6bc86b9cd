"""Python clients: litellm, langchain, pydantic-ai, instructor and llm.

Usage: python python_clients.py URL [CLIENT ...]. It prints [client, version, case, answer] for each case.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from importlib.metadata import version
from typing import Literal

import instructor
import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_openai import ChatOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ModelRequest, ModelResponse, TextPart, UserPromptPart
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is 17 + 25?"
USER = [{"role": "user", "content": QUESTION}]
STORY = [{"role": "user", "content": "Tell a long story about a river."}]
SYSTEM, NAME = "Your name is Otto.", "What is your name?"
INSTRUCTED = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": NAME}]
TURNS = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada!"},
    {"role": "user", "content": "What is my name?"},
]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "London"]}}, "required": ["city"],
          "additionalProperties": False}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Of a city.", "parameters": SCHEMA}}
FORM = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
OPTIONS = {"api_key": "none", "max_retries": 0}


class City(BaseModel):
    city: Literal["Paris", "London"]


def cancelled(url) -> float:
    """Return the number of requests that the server has cancelled."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(map(float, re.findall(r'^tridecode:requests_total{[^}]*"cancelled"[^}]*} (\S+)$', text, re.M)))


def stop(stream, close=None) -> None:
    """Read the beginning of a stream, and close it."""
    for _ in zip(range(3), stream):
        pass
    (close or stream.close)()


def litellm_cases(url, provider="openai"):
    options = {"api_base": url, "api_key": "none", "num_retries": 0}

    def create(messages=USER, model="bundled", **more):
        return litellm.completion(f"{provider}/{model}", messages, temperature=0, **options, **more)

    def cancel():
        stream = create(STORY, stream=True)
        stop(stream, lambda: stream.completion_stream.close())

    return {
        "plain": lambda: create().choices[0].message.content,
        "stream": lambda: "".join(part.choices[0].delta.content or "" for part in create(stream=True)),
        "system": lambda: create(INSTRUCTED).choices[0].message.content,
        "turns": lambda: create(TURNS).choices[0].message.content,
        "call": lambda: create(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls[0].function,
        "schema": lambda: create(response_format=FORM).choices[0].message.content,
        "error": lambda: create(model="other"),
        "cancel": cancel,
    }  # fmt: skip


def langchain(kind, **options):
    def made(model="bundled"):
        return kind(model=model, temperature=0, **OPTIONS, **options)

    return {
        "plain": lambda: made().invoke(USER).text,
        "stream": lambda: "".join(chunk.text for chunk in made().stream(USER)),
        "system": lambda: made().invoke(INSTRUCTED).text,
        "turns": lambda: made().invoke(TURNS).text,
        "call": lambda: made().bind_tools([TOOL], tool_choice="any").invoke(USER).tool_calls[0]["args"],
        "schema": lambda: made().with_structured_output(City, method="json_schema").invoke(USER),
        "error": lambda: made("other").invoke(USER),
        "cancel": lambda: stop(made().stream(STORY)),
    }


def pydantic_ai(kind, provider, **options):
    def agent(model="bundled", **more):
        made = kind(model, provider=provider, **options)
        return Agent(made, model_settings={"temperature": 0, "max_tokens": 400}, retries=0, **more)

    async def stream(prompt, close=False):
        async with agent().run_stream(prompt) as run:
            texts = run.stream_text(debounce_by=None)
            return await anext(texts) and None if close else [text async for text in texts][-1]

    history = [ModelRequest([UserPromptPart(TURNS[0]["content"])]), ModelResponse([TextPart(TURNS[1]["content"])])]
    return {
        "plain": lambda: agent().run_sync(QUESTION).output,
        "stream": lambda: asyncio.run(stream(QUESTION)),
        "system": lambda: agent(system_prompt=SYSTEM).run_sync(NAME).output,
        "turns": lambda: agent().run_sync(TURNS[2]["content"], message_history=history).output,
        "call": lambda: agent(output_type=ToolOutput(City)).run_sync(QUESTION).output,
        "schema": lambda: agent(output_type=NativeOutput(City)).run_sync(QUESTION).output,
        "error": lambda: agent("other").run_sync(QUESTION),
        "cancel": lambda: asyncio.run(stream(STORY[0]["content"], True)),
    }


def instructor_cases(url):
    """Return the cases with a schema. The library has no other answers."""

    def create(mode="TOOLS", model="bundled", kind=City, **more):
        client = instructor.from_openai(openai.OpenAI(base_url=url, **OPTIONS), mode=instructor.Mode[mode])
        return client.chat.completions.create(model=model, messages=USER, response_model=kind, max_retries=0, **more)

    return {
        "stream": lambda: list(create(kind=instructor.Partial[City], stream=True))[-1],
        "call": create,
        "schema": lambda: create("JSON_SCHEMA"),
        "error": lambda: create(model="other"),
    }


def llm_cases(url):
    """Return the cases of the command line tool. It has no option that forces a call."""
    os.environ["LLM_USER_PATH"] = tempfile.mkdtemp()
    models = [
        {"model_id": f"local-{name}", "model_name": name, "api_base": url, "supports_schema": True}
        for name in ("bundled", "other")
    ]
    with open(f"{os.environ['LLM_USER_PATH']}/extra-openai-models.yaml", "w") as file:
        json.dump(models, file)  # JSON is YAML.

    def command(prompt, *options, model="bundled"):
        return [sys.executable, "-m", "llm", "-m", f"local-{model}", "--key", "none", "-o", "temperature", "0",
                *options, prompt]  # fmt: skip

    def ask(*arguments, **more):
        done = subprocess.run(command(*arguments, **more), capture_output=True, text=True)
        return done.stdout + done.stderr

    def cancel():
        with subprocess.Popen(command(STORY[0]["content"]), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            child.stdout.read(10)
            child.send_signal(signal.SIGINT)

    return {
        "plain": lambda: ask(QUESTION, "--no-stream"),
        "stream": lambda: ask(QUESTION),
        "system": lambda: ask(NAME, "--system", SYSTEM),
        "turns": lambda: (ask(TURNS[0]["content"]), ask(TURNS[2]["content"], "--continue"))[1],
        "schema": lambda: ask(QUESTION, "--schema", json.dumps(SCHEMA)),
        "error": lambda: ask(QUESTION, model="other"),
        "cancel": cancel,
    }


def clients(url: str) -> dict:
    """Return client: (its package, its cases)."""
    v1 = f"{url}/v1"
    server, other = OpenAIProvider(base_url=v1, api_key="none"), AnthropicProvider(base_url=url, api_key="none")
    # Without the profile, the client allows JSON schemas only for the names of Anthropic's models.
    profile = {"supports_json_schema_output": True}
    return {
        "litellm, openai": ("litellm", litellm_cases(v1)),
        "litellm, anthropic": ("litellm", litellm_cases(url, "anthropic")),
        "langchain-openai, chat": ("langchain-openai", langchain(ChatOpenAI, base_url=v1)),
        "langchain-openai, responses": (
            "langchain-openai", langchain(ChatOpenAI, base_url=v1, use_responses_api=True)
        ),
        "langchain-anthropic": ("langchain-anthropic", langchain(ChatAnthropic, base_url=url, max_tokens=400)),
        "pydantic-ai, chat": ("pydantic-ai-slim", pydantic_ai(OpenAIChatModel, server)),
        "pydantic-ai, responses": ("pydantic-ai-slim", pydantic_ai(OpenAIResponsesModel, server)),
        "pydantic-ai, anthropic": ("pydantic-ai-slim", pydantic_ai(AnthropicModel, other, profile=profile)),
        "instructor": ("instructor", instructor_cases(v1)),
        "llm": ("llm", llm_cases(v1)),
    }  # fmt: skip


def main(url: str, names: list[str]) -> None:
    litellm.suppress_debug_info = True
    all_clients = clients(url)
    for name in names or all_clients:
        package, cases = all_clients[name]
        for case, ask in cases.items():
            before, end = cancelled(url), time.monotonic() + 30
            try:
                got = ask()
            except Exception as error:
                got = f"{type(error).__name__}: {error}"
            while case == "cancel" and got is None and time.monotonic() < end:
                got = "cancelled" if cancelled(url) > before else None
            print(json.dumps([name, version(package), case, str(got)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
