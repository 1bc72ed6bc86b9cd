"""OpenAI's Responses API, /v1/responses: parsing of requests, and answers as JSON and as events.

The server does not store responses.
"""

import json
import logging
import secrets
import time
from typing import Any, ClassVar

import msgspec

from ..errors import as_json
from ..results import Usage
from ..text.thinking import THINKING
from ..text.tokenizer import Tokenizer
from .choice import Choice, Delta
from .constraints import ResponseFormat, parse_response_format, thinking_off
from .errors import ApiError, bad_request
from .events import named_event
from .fields import IGNORED_IN_RESPONSES, NEUTRAL_IN_RESPONSES
from .messages import function_call, merge_turns
from .protocol import Generation, template_variables
from .serializers import Serializer
from .settings import MAX_MESSAGES
from .tools.parser import ARGUMENTS, NAME, TEXT, Event
from .tools.toolset import Tools, apply_tool_choice, parse_function

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Kind of a part -> its field with the text.
TEXTS = dict.fromkeys(("input_text", "output_text", "text", "reasoning_text", "summary_text"), "text")
TEXTS["refusal"] = "refusal"
# Items of history about tools that ran on OpenAI's servers; the answer's text contains their findings.
SERVER_ITEMS = frozenset(
    "web_search_call file_search_call code_interpreter_call image_generation_call mcp_call mcp_list_tools "
    "mcp_approval_request mcp_approval_response tool_search_call tool_search_output compaction compaction_trigger "
    "additional_tools configuration_update program program_output".split()
)
STORED = "this server does not store responses: send the whole conversation as input"
# Calls of tools that ran on the client's machine, and their outputs.
LOCAL_CALLS = ("local_shell_call", "shell_call", "apply_patch_call")
LOCAL_OUTPUTS = tuple(f"{kind}_output" for kind in LOCAL_CALLS)
log = logging.getLogger("tridecode.server")


class Text(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The parameter `text`."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The parameter `reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class ResponsesRequest(Generation, kw_only=True):
    """Body of /v1/responses."""

    neutral: ClassVar[dict[str, list]] = NEUTRAL_IN_RESPONSES
    without_effect: ClassVar[frozenset[str]] = IGNORED_IN_RESPONSES - {"max_tool_calls"}
    renamed: ClassVar[dict[str, str]] = {"max_tokens": "max_output_tokens", "template_variables": "reasoning"}
    input: str | list[Any]
    instructions: str = ""
    max_output_tokens: int | None = None
    store: bool = False
    previous_response_id: str | None = None
    text: Text | None = None
    reasoning: Reasoning | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    # Responses repeat these parameters, which have no effect.
    metadata: dict[str, Any] | None = None
    max_tool_calls: int | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def check(self) -> None:
        """Check the parameters of the Responses API. Raises ApiError."""
        if self.store:
            raise bad_request(f"store: {STORED}, and store: false", "store", "unsupported_parameter")
        if self.previous_response_id is not None:
            raise bad_request(f"previous_response_id: {STORED}", "previous_response_id", "unsupported_parameter")
        self.check_single_answer("a response")
        self.alias("max_output_tokens", "max_tokens")
        self.check_single_format(self.text.format if self.text else None, "text.format")
        super().check()

    @property
    def messages(self):
        """The input, under the name that the log of prompts uses."""
        return self.input

    @property
    def structure(self) -> ResponseFormat | None:
        """The response format of the request, if it has one."""
        if self.text is None or self.text.format is None:
            return super().structure
        return parse_response_format(self.text.format, None, "text.format", '{"name": ..., "schema": {...}}')

    def variables(self, tokenizer: Tokenizer) -> dict:
        """Return the variables of the chat template, with that which disables thinking if the effort is low."""
        off = thinking_off(self.reasoning.effort if self.reasoning else None, tokenizer, "reasoning.effort")
        return off | template_variables(self.chat_template_kwargs, tokenizer)

    def parse_tools(self) -> Tools:
        """Parse the functions among the tools. Raises ApiError.

        Other tools run on OpenAI's servers. Clients send them to every server, so they are ignored.
        """
        functions = []
        for i, tool in enumerate(self.tools or ()):
            if not isinstance(tool, dict):
                raise bad_request(f"tools[{i}]: expected an object, got {as_json(tool)}", "tools")
            if tool.get("type") != "function":
                log.info("ignored a tool of type %s", as_json(tool.get("type"))[:100])
                continue
            place = f"tools[{i}]"
            if "function" in tool:  # This is the form of chats.
                expected = '{"type": "function", "name": ..., "parameters": {...}}'
                raise bad_request(f"{place}: expected {expected}, got {as_json(tool)}", "tools")
            functions.append(parse_function(tool.get("name"), tool.get("description"), tool.get("parameters"), place))
        return apply_tool_choice(functions, self.tool_choice, self.parallel_tool_calls)

    def conversation(self) -> list[dict]:
        """Convert instructions and input for a chat template. Raises ApiError."""
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        if len(items) > MAX_MESSAGES:
            raise bad_request(f"input: at most {MAX_MESSAGES:,} items, got {len(items):,}", "input")
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        messages += [message for i, item in enumerate(items) if (message := _message(item, f"input[{i}]"))]
        if not any(message["role"] in ("user", "tool") for message in messages):
            # Clients send an empty input to check that the server answers.
            messages.append({"role": "user", "content": ""})
        return merge_turns(messages)


def _message(item, place: str) -> dict | None:
    """Convert an item of the input into a chat message; None for reasoning without text."""
    if not isinstance(item, dict):
        raise bad_request(f"{place}: expected an object, got {as_json(item)}", "input")
    match item:
        case {"type": "function_call", "call_id": str(id), "name": str(name), "arguments": str(arguments)}:
            return {"role": "assistant", "content": "", "tool_calls": [function_call(id, name, arguments)]}
        case {"type": "custom_tool_call", "call_id": str(id), "name": str(name), "input": str(text)}:
            arguments = json.dumps({"input": text}, ensure_ascii=False)
            return {"role": "assistant", "content": "", "tool_calls": [function_call(id, name, arguments)]}
        case {"type": str(kind), "call_id": str(id)} if kind in LOCAL_CALLS:
            fields = item.get("action") or item.get("operation") or {}
            call = function_call(id, kind.removesuffix("_call"), json.dumps(fields, ensure_ascii=False))
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case {"type": str(kind)} if kind in SERVER_ITEMS:
            return None
        case {"type": str(kind)} if kind in LOCAL_OUTPUTS and isinstance(item.get("call_id") or item.get("id"), str):
            output = item.get("output")
            texts = [_output_text(part) for part in (output if isinstance(output, list) else [output])]
            called = item.get("call_id") or item.get("id")
            return {"role": "tool", "content": "\n".join(texts), "tool_call_id": called}
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": str(id)}:
            return {"role": "tool", "content": _texts(item.get("output"), f"{place}.output"), "tool_call_id": id}
        case {"type": "reasoning"}:
            thought = _texts(item.get("content") or item.get("summary") or "", f"{place}.content")
            return {"role": "assistant", "content": "", "reasoning_content": thought} if thought else None
        case {"role": str(role)} if item.get("type", "message") == "message" and role in ROLES:
            return {"role": ROLES[role], "content": _texts(item.get("content"), f"{place}.content")}
    expected = "a message, function_call, function_call_output or reasoning"
    raise bad_request(f"{place}: expected {expected}, got {as_json(item)}", "input")


def _output_text(part) -> str:
    """Return the text of one part of the output of a shell call."""
    if isinstance(part, dict) and ("stdout" in part or "stderr" in part):
        return "\n".join(str(part[name]) for name in ("stdout", "stderr") if part.get(name))
    return part if isinstance(part, str) else as_json(part)


def _texts(content, place: str) -> str:
    """Return text content, or the texts of its parts joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{place}: expected text or a list of texts, got {as_json(content)}", "input")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        field = TEXTS.get(kind) if isinstance(kind, str) else None
        if field is None or not isinstance(part.get(field), str):
            raise bad_request(f"{place}[{i}]: this model reads text only, got {as_json(part)}", "input")
        texts.append(part[field])
    return "\n".join(texts)


class ResponsesSerializer(Serializer):
    """Writes answers as responses with reasoning, message and function_call items."""

    def __init__(self, model: str, tokenizer: Tokenizer, payload: ResponsesRequest):
        super().__init__(model, tokenizer)
        self.id, self._payload, self._created = f"resp_{secrets.token_hex(16)}", payload, int(time.time())
        self._sequence = 0
        self._items: list[dict] = []  # The items so far.
        self._open = False  # Whether the last item of a stream has not ended.

    def response(self, choices: list[Choice], deltas: list[Delta]) -> dict:
        """Return the whole response."""
        (choice,) = choices
        for event in choice.restore_malformed_calls(deltas[0]).events:
            self._take(event)
        for item in self._items:
            item["status"] = "completed"
        return self._end(choice)

    def first_events(self, prompts: list[Usage]) -> bytes:
        """Return the events that begin a stream."""
        response = self._response("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def new_events(self, number: int, choice: Choice, delta: Delta) -> bytes:
        """Return the events of a delta."""
        data = b""
        for event in delta.events:
            kind, text = event
            if self._begins(event):
                data += self._close()
                self._take((kind, text if kind == NAME else ""))
                data += self._begin()
            if kind != NAME and text:
                self._take(event)
                data += self._part(f"{_DELTAS[kind]}.delta", delta=text, **({"logprobs": []} if kind == TEXT else {}))
        return data

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the events that end a stream."""
        data = self._close("incomplete" if choices[0].finish_reason == "length" else "completed")
        response = self._end(choices[0])
        return data + self._event(f"response.{response['status']}", response=response)

    def error_events(self, problem: ApiError) -> bytes:
        """Return the event that ends a failed stream."""
        error = {"code": "server_error", "message": problem.message}
        return self._event("response.failed", response=self._response("failed") | {"error": error})

    # ---- items

    def _begins(self, event: Event) -> bool:
        """Return whether the event begins an item."""
        kind, _ = event
        return kind == NAME or not self._open or _ITEMS[kind] != self._items[-1]["type"]

    def _take(self, event: Event) -> None:
        """Append an event to the last item, or to a new item if the event begins one."""
        kind, text = event
        if self._begins(event):
            self._items.append(_item(kind, text))
            self._open = True
        item = self._items[-1]
        if kind == ARGUMENTS:
            item["arguments"] += text
        elif kind != NAME:
            item["content"][0]["text"] += text

    def _begin(self) -> bytes:
        item = self._items[-1]
        sent = item if item["type"] == "function_call" else item | {"content": []}
        data = self._event("response.output_item.added", output_index=len(self._items) - 1, item=sent)
        if item["type"] != "function_call":
            data += self._part("response.content_part.added", part=dict(item["content"][0]))
        return data

    def _close(self, status: str = "completed") -> bytes:
        if not self._open:
            return b""
        self._open, item = False, self._items[-1]
        item["status"] = status
        if item["type"] == "function_call":
            data = self._part(f"{_DELTAS[ARGUMENTS]}.done", arguments=item["arguments"])
        else:
            kind, part = THINKING if item["type"] == "reasoning" else TEXT, item["content"][0]
            logprobs: dict[str, list] = {"logprobs": []} if kind == TEXT else {}
            data = self._part(f"{_DELTAS[kind]}.done", text=part["text"], **logprobs)
            data += self._part("response.content_part.done", part=part)
        return data + self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _part(self, kind: str, **more) -> bytes:
        """Return an event of the last item."""
        item = self._items[-1]
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        if item["type"] != "function_call":
            place["content_index"] = 0
        return self._event(kind, **place, **more)

    def _event(self, kind: str, **more) -> bytes:
        self._sequence += 1
        return named_event({"type": kind, "sequence_number": self._sequence - 1} | more)

    # ---- the response itself

    def _end(self, choice: Choice) -> dict:
        usage, truncated = choice.usage, choice.finish_reason == "length"
        if truncated and self._items:
            self._items[-1]["status"] = "incomplete"
        return self._response("incomplete" if truncated else "completed") | {
            "completed_at": None if truncated else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.reused_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

    def _response(self, status: str) -> dict:
        payload = self._payload
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status, "model": self.model,
            "output": [], "error": None, "incomplete_details": None, "usage": None,
            "instructions": payload.instructions or None, "max_output_tokens": payload.max_output_tokens,
            "parallel_tool_calls": payload.parallel_tool_calls, "previous_response_id": None, "store": False,
            "temperature": self.params.temperature, "top_p": self.params.top_p,
            "presence_penalty": self.params.presence_penalty, "frequency_penalty": self.params.frequency_penalty,
            "top_logprobs": 0, "max_tool_calls": payload.max_tool_calls, "tools": self._tools(),
            "tool_choice": payload.tool_choice or "auto", "text": self._text(),
            "reasoning": self._reasoning(), "truncation": "disabled", "background": False,
            "metadata": payload.metadata or {}, "service_tier": "default", "completed_at": None,
            "safety_identifier": payload.safety_identifier, "prompt_cache_key": payload.prompt_cache_key,
        }  # fmt: skip

    def _tools(self) -> list:
        """Return the tools of the request; those of functions with all fields that the schema requires."""
        return [
            {"description": None, "parameters": None, "strict": None} | tool if tool.get("type") == "function" else tool
            for tool in self._payload.tools or ()
        ]

    def _text(self) -> dict:
        """Return the response format and verbosity of the request."""
        text = self._payload.text
        form = text.format if text and text.format else {"type": "text"}
        if form.get("type") == "json_schema":
            form = {"name": "response", "description": None, "strict": False} | form
        return {"format": form} | ({"verbosity": text.verbosity} if text and text.verbosity else {})

    def _reasoning(self) -> dict:
        """Return the parameter `reasoning` of the request, with the fields that the schema requires."""
        fields = msgspec.to_builtins(self._payload.reasoning) if self._payload.reasoning else {}
        return {"effort": None, "summary": None} | fields


_DELTAS = {
    TEXT: "response.output_text", THINKING: "response.reasoning_text", ARGUMENTS: "response.function_call_arguments",
}  # fmt: skip
_ITEMS = {TEXT: "message", THINKING: "reasoning", ARGUMENTS: "function_call"}


def _item(kind: str, name: str) -> dict:
    code = secrets.token_hex(12)
    shared: dict[str, object] = {"status": "in_progress"}
    if kind == NAME:
        call = {"id": f"fc_{code}", "type": "function_call", "call_id": f"call_{code}", "name": name, "arguments": ""}
        return call | shared
    if kind == THINKING:
        content: list[dict] = [{"type": "reasoning_text", "text": ""}]
        return {"id": f"rs_{code}", "type": "reasoning", "summary": [], "content": content} | shared
    content = [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    return {"id": f"msg_{code}", "type": "message", "role": "assistant", "content": content} | shared
