"""Record tool calls by OpenAI's and Anthropic's clients, streamed and not, in docs/agents-sessions.md.

Run as `python docs/record_agents.py`. It serves the bundled model on the CPU. tool_choice forces the tool calls,
because the bundled model was not trained to make any.
"""

import json
import subprocess
import sys
import time
import urllib.request
from importlib.metadata import version
from pathlib import Path

import anthropic
import openai

ROOT = Path(__file__).resolve().parent.parent
PORT = 8123
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Lyon"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NAME, ABOUT, QUESTION, RESULT = "get_weather", "Weather of a city.", "How is the weather in Bonn?", "Rain, 9 degrees."
FUNCTION = {"name": NAME, "description": ABOUT, "parameters": SCHEMA}
ASKED = [{"role": "user", "content": QUESTION}]


class Page:
    """The Markdown that is written."""

    def __init__(self):
        self.lines: list[str] = []

    def section(self, title: str) -> None:
        self.lines += ["", f"## {title}", ""]

    def record(self, call: str, *answers) -> None:
        """Add a client's call and its results: text, or models of the client, whose empty fields are omitted."""
        shown = [a if isinstance(a, str) else json.dumps(a.to_dict(), ensure_ascii=False) for a in answers]
        self.lines += ["```", f">>> {call}", *map(brief, shown), "```"]


def brief(line: str) -> str:
    return line if len(line) <= 400 else f"{line[:397]}..."


def chat(page: Page, client: openai.OpenAI) -> None:
    page.section("OpenAI's client, `chat.completions`")
    common = {"model": "any", "temperature": 0, "tools": [{"type": "function", "function": FUNCTION}]}
    got = client.chat.completions.create(messages=ASKED, tool_choice="required", parallel_tool_calls=False, **common)
    page.record('create(messages, tools, tool_choice="required", parallel_tool_calls=False)', got.choices[0], got.usage)
    message = got.choices[0].message
    answered = [*ASKED, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": RESULT}]
    got = client.chat.completions.create(messages=answered, max_tokens=30, **common)
    page.record("create(messages with the call and its result, tools)", got.choices[0], got.usage)
    streamed = client.chat.completions.create(
        messages=ASKED, tool_choice={"type": "function", "function": {"name": NAME}}, parallel_tool_calls=False,
        stream=True, stream_options={"include_usage": True}, **common,
    )  # fmt: skip
    chunks = [chunk.choices[0] if chunk.choices else chunk.usage for chunk in streamed]
    page.record("create(messages, tools, the function by its name, stream=True)", *chunks)


def responses(page: Page, client: openai.OpenAI) -> None:
    page.section("OpenAI's client, `responses`")
    tools = [{"type": "function", **FUNCTION}]
    common = {"model": "any", "temperature": 0, "tools": tools, "store": False, "parallel_tool_calls": False}
    got = client.responses.create(input=ASKED, tool_choice="required", **common)
    page.record('create(input, tools, tool_choice="required")', *got.output, got.usage)
    call = got.output[0]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    got = client.responses.create(input=[*ASKED, call.to_dict(), result], max_output_tokens=30, **common)
    page.record("create(input with the call and its output, tools)", *got.output, got.usage)
    events = client.responses.create(input=ASKED, tool_choice="required", stream=True, **common)
    page.record('create(input, tools, tool_choice="required", stream=True)', *events)


def messages(page: Page, client: anthropic.Anthropic) -> None:
    page.section("Anthropic's client, `messages`")
    tools = [{"name": NAME, "description": ABOUT, "input_schema": SCHEMA}]
    common = {"model": "any", "max_tokens": 90, "tools": tools, "extra_body": {"temperature": 0}}
    choice = {"type": "any", "disable_parallel_tool_use": True}
    got = client.messages.create(messages=ASKED, tool_choice=choice, **common)
    page.record('create(messages, tools, tool_choice={"type": "any"})', got)
    result = {"type": "tool_result", "tool_use_id": got.content[0].id, "content": RESULT}
    called = {"role": "assistant", "content": [got.content[0].to_dict()]}
    answered = [*ASKED, called, {"role": "user", "content": [result]}]
    got = client.messages.create(messages=answered, **common | {"max_tokens": 30})
    page.record("create(messages with the call and its result, tools)", got)
    events = client.messages.create(messages=ASKED, tool_choice=choice, stream=True, **common)
    page.record('create(messages, tools, tool_choice={"type": "any"}, stream=True)', *events)
    page.record("count_tokens(messages, tools)", client.messages.count_tokens(model="any", messages=ASKED, tools=tools))


def main() -> None:
    command = [sys.executable, str(ROOT / "cli.py"), "serve", "--device", "cpu", "--any-model", "--port", str(PORT)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    page, url = Page(), f"http://127.0.0.1:{PORT}"
    page.lines += [
        "# Client sessions",
        "",
        f"These are sessions of the Python clients of OpenAI ({version('openai')}) and Anthropic "
        f"({version('anthropic')}) with `tridecode serve` and the bundled",
        "model. [record_agents.py](record_agents.py) recorded them. Each session contains a tool call, which "
        "`tool_choice` forces.",
        "Each line is an answer or an event as the client returned it, truncated to 400 characters.",
    ]
    try:
        for _ in range(600):
            try:
                urllib.request.urlopen(f"{url}/health")
                break
            except OSError:
                time.sleep(0.1)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        chat(page, client)
        responses(page, client)
        messages(page, anthropic.Anthropic(base_url=url, api_key="none", max_retries=0))
    finally:
        server.terminate()
        server.wait()
    (ROOT / "docs" / "agents-sessions.md").write_text("\n".join(page.lines) + "\n")


if __name__ == "__main__":
    main()
