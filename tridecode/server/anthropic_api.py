"""Anthropic's Messages API, /v1/messages: parsing of requests, and answers as JSON and as events."""

import json
import logging
import re
import secrets
from typing import Any, ClassVar

import msgspec

from ..arguments import listed
from ..errors import as_json
from ..results import Usage
from ..text.prompt import Reading
from ..text.thinking import THINKING, THINKING_VARIABLE
from ..text.tokenizer import Tokenizer
from .choice import Choice, Delta
from .constraints import ResponseFormat
from .errors import ApiError, bad_request
from .events import named_event
from .fields import IGNORED_IN_MESSAGES, NEUTRAL_IN_MESSAGES
from .messages import function_call, merge_turns
from .protocol import Generation, template_variables
from .serializers import Serializer
from .settings import MAX_MESSAGES
from .tools.json_text import complete_object
from .tools.parser import NAME, TEXT
from .tools.toolset import Tools, check_tools, parse_function

# Claude Code sends a different line in each request. With this line, prompts could not share a prefix.
BILLING_HEADER = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n?")
# Blocks of history about tools that ran on Anthropic's servers; the answer's text contains their findings.
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "container_upload", "compaction", "fallback")
SERVER_RESULTS = tuple(
    f"{tool}_tool_result"
    for tool in ("web_search", "web_fetch", "code_execution", "bash_code_execution", "text_editor_code_execution",
                 "tool_search", "mcp", "advisor")
)  # fmt: skip
# Fields of `usage` that are the same in each answer.
FIXED_USAGE: dict[str, object] = {
    "cache_creation": {"ephemeral_1h_input_tokens": 0, "ephemeral_5m_input_tokens": 0},
    "cache_creation_input_tokens": 0, "inference_geo": None, "server_tool_use": None, "service_tier": "standard",
    "output_tokens_details": {"thinking_tokens": 0},
}  # fmt: skip
THINKING_TYPES = ("enabled", "adaptive", "disabled")
log = logging.getLogger("tridecode.server")


class Thinking(msgspec.Struct, forbid_unknown_fields=True):
    """The parameter `thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, forbid_unknown_fields=True):
    """The parameter `output_config`."""

    format: dict[str, Any] | None = None
    effort: str | None = None
    task_budget: dict[str, Any] | None = None


class MessagesRequest(Generation, kw_only=True):
    """Body of /v1/messages."""

    neutral: ClassVar[dict[str, list]] = NEUTRAL_IN_MESSAGES
    without_effect: ClassVar[frozenset[str]] = IGNORED_IN_MESSAGES
    allows_no_tokens: ClassVar[bool] = True
    renamed: ClassVar[dict[str, str]] = {"stop": "stop_sequences", "template_variables": "thinking"}
    messages: list[Any]
    system: str | list[Any] = ""
    stop_sequences: list[str] | None = None
    thinking: Thinking | None = None
    tools: list[Any] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    counts: ClassVar = False  # Whether the request only counts tokens, which needs no max_tokens.

    def check(self) -> None:
        """Check the parameters of the Messages API. Raises ApiError."""
        if self.max_tokens is None and not self.counts:
            raise bad_request("max_tokens is required", "max_tokens")
        if self.thinking is not None and self.thinking.type not in THINKING_TYPES:
            expected = f"{listed(THINKING_TYPES)}, got {as_json(self.thinking.type)}"
            raise bad_request(f"thinking.type: expected {expected}", "thinking")
        self.check_single_answer("a message")
        self.alias("stop_sequences", "stop")
        self.check_single_format(self.output_config.format if self.output_config else None, "output_config.format")
        super().check()

    @property
    def structure(self) -> ResponseFormat | None:
        """The response format of the request, or None."""
        value = self.output_config.format if self.output_config else None
        if value is None:
            return super().structure
        if value.get("type") != "json_schema" or "schema" not in value:
            expected = '{"type": "json_schema", "schema": {...}}'
            raise bad_request(f"output_config.format: expected {expected}, got {as_json(value)}", "output_config")
        return ResponseFormat("json_schema", value["schema"], "output_config.format.schema")

    def variables(self, tokenizer: Tokenizer) -> dict:
        """Return the variables of the chat template, with that which controls thinking if the template has it."""
        own = template_variables(self.chat_template_kwargs, tokenizer)
        if THINKING_VARIABLE not in tokenizer.template_variables:
            return own
        return {THINKING_VARIABLE: self.thinking is not None and self.thinking.type != "disabled"} | own

    @property
    def reading(self) -> Reading:
        """How the messages are read: an answer continues a last message of the assistant."""
        last = self.messages[-1] if self.messages else None
        return Reading(continued=isinstance(last, dict) and last.get("role") == "assistant")

    def parse_tools(self) -> Tools:
        """Parse the tools, without those that Anthropic's servers run. Raises ApiError."""
        functions, choice = [], {"type": "auto"} if self.tool_choice is None else self.tool_choice
        for i, tool in enumerate(self.tools or ()):
            place = f"tools[{i}]"
            if not isinstance(tool, dict):
                raise bad_request(f"{place}: expected an object, got {as_json(tool)}", "tools")
            if tool.get("type") == "function":  # This is the form of OpenAI's API.
                expected = '{"name": ..., "input_schema": {...}}'
                raise bad_request(f"{place}: expected {expected}, got {as_json(tool)}", "tools")
            if tool.get("type", "custom") not in (None, "custom"):
                log.info("ignored a tool of type %s", as_json(tool["type"])[:100])
                continue
            function = parse_function(tool.get("name"), tool.get("description"), tool.get("input_schema"), place)
            functions.append(function)
        kinds = {"auto": "auto", "any": "required", "tool": "one", "none": "none"}
        if not isinstance(kind := choice.get("type"), str) or kind not in kinds:
            raise bad_request(f"tool_choice: expected type {', '.join(kinds)}, got {as_json(choice)}", "tool_choice")
        parallel = not choice.get("disable_parallel_tool_use", False)
        return check_tools(functions, kinds[kind], choice.get("name"), parallel)

    def conversation(self) -> list[dict]:
        """Convert the messages for a chat template. Raises ApiError."""
        if not self.messages or len(self.messages) > MAX_MESSAGES:
            raise bad_request(f"messages: expected from 1 to {MAX_MESSAGES:,}, got {len(self.messages):,}", "messages")
        messages = []
        if system := _texts(self.system, "system", system=True):
            messages.append({"role": "system", "content": system})
        for i, message in enumerate(self.messages):
            messages += _turns(message, f"messages[{i}]")
        messages = merge_turns(messages)
        if messages[-1]["role"] == "assistant" and "tool_calls" in messages[-1]:
            problem = "the last message is an answer with tool calls; the results of the tools must follow it"
            raise bad_request(f"messages: {problem}", "messages")
        return messages


class CountRequest(MessagesRequest, kw_only=True):
    """Body of /v1/messages/count_tokens."""

    counts: ClassVar = True


def _texts(content, place: str, system: bool = False) -> str:
    """Return text content, or the joined texts of its blocks; remove the billing line from a system prompt."""
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [_text(block, f"{place}[{i}]") for i, block in enumerate(content)]
    else:
        raise _refused(place, f"expected text or a list of blocks, got {as_json(content)}")
    if system:
        texts = [BILLING_HEADER.sub("", text, count=1) if BILLING_HEADER.match(text) else text for text in texts]
    return "\n\n".join(text for text in texts if text)


def _text(block, place: str) -> str:
    if not isinstance(block, dict) or not isinstance(kind := block.get("type"), str):
        raise _refused(place, f'expected {{"type": "text", "text": "..."}}, got {as_json(block)}')
    if kind == "tool_reference":
        return f"Tool {block.get('tool_name')} is there."
    if kind == "search_result":
        texts = [block.get("title"), block.get("source"), _texts(block.get("content") or "", f"{place}.content")]
        return "\n".join(text for text in texts if isinstance(text, str) and text)
    if kind == "document":
        return _document(block, place)
    if kind in SERVER_BLOCKS or kind in SERVER_RESULTS:
        return ""
    if kind != "text":
        raise _refused(place, f"{as_json(kind)[1:-1]} is not supported: this model reads text only")
    if not isinstance(block.get("text"), str):
        raise _refused(f"{place}.text", f"expected text, got {as_json(block.get('text'))}")
    return block["text"]


def _document(block: dict, place: str) -> str:
    """Return the title, context and text of a document. Raises ApiError if it is not text."""
    match block.get("source"):
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "content", "content": content}:
            text = _texts(content, f"{place}.source.content")
        case _:
            raise _refused(place, "only documents of text are supported: this model reads text only")
    return "\n".join(
        part for part in (block.get("title"), block.get("context"), text) if isinstance(part, str) and part
    )


def _turns(message, place: str) -> list[dict]:
    """Convert a message into messages for a chat template; results of tools precede the text of the message."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in ("user", "assistant", "system"):
        raise _refused(place, f"expected a role of user, assistant or system, got {as_json(message)}")
    content = message.get("content")
    if isinstance(content, str) or role == "system":
        return [{"role": role, "content": _texts(content, f"{place}.content", system=role == "system")}]
    if not isinstance(content, list):
        raise _refused(f"{place}.content", f"expected text or a list of blocks, got {as_json(content)}")
    texts, results, calls, thoughts = [], [], [], []
    for i, block in enumerate(content):
        where = f"{place}.content[{i}]"
        match block:
            case {"type": "tool_use", "id": str(id), "name": str(name)} if role == "assistant":
                calls.append(function_call(id, name, json.dumps(block.get("input") or {}, ensure_ascii=False)))
            case {"type": "tool_result", "tool_use_id": str(id)} if role == "user":
                text = _texts(block.get("content") or "", f"{where}.content")
                text = f"Error: {text}" if block.get("is_error") else text
                results.append({"role": "tool", "content": text, "tool_call_id": id})
            case {"type": "thinking", "thinking": str(text)} if role == "assistant":
                thoughts.append(text)
            case {"type": "redacted_thinking"} if role == "assistant":
                pass  # Anthropic has encrypted this block.
            case _:
                texts.append(_text(block, where))
    turn = {"role": role, "content": "\n\n".join(text for text in texts if text)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return results if results and not texts else [*results, turn]


def _refused(place: str, message: str) -> ApiError:
    return bad_request(f"{place}: {message}", place.partition("[")[0])


class MessagesSerializer(Serializer):
    """Writes answers as messages with thinking, text and tool_use blocks."""

    def __init__(self, model: str, tokenizer: Tokenizer):
        super().__init__(model, tokenizer)
        self.id = f"msg_{secrets.token_hex(12)}"
        self._open: str | None = None  # Kind of the open block of a stream.
        self._index = -1

    def response(self, choices: list[Choice], deltas: list[Delta]) -> dict:
        """Return the whole message."""
        (choice,), blocks = choices, []
        for kind, text in choice.restore_malformed_calls(deltas[0]).events:
            if kind in (TEXT, THINKING, NAME):
                blocks.append(_block(kind, text if kind == NAME else ""))
            if kind != NAME:
                _extend(blocks[-1], text)
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = complete_object(block["input"])
        return self._message(blocks, _usage(choice.usage, choice.reasoning_tokens)) | self._end(choice)

    def first_events(self, prompts: list[Usage]) -> bytes:
        """Return the event message_start."""
        return named_event({"type": "message_start", "message": self._message([], _usage(prompts[0], 0))})

    def new_events(self, number: int, choice: Choice, delta: Delta) -> bytes:
        """Return the events of a delta."""
        data = b""
        for kind, text in delta.events:
            if kind == NAME or kind in (TEXT, THINKING) and kind != self._open:
                data += self._close()
                self._open, self._index = kind, self._index + 1
                block = _block(kind, text if kind == NAME else "")
                if kind == NAME:
                    block["input"] = {}
                data += named_event({"type": "content_block_start", "index": self._index, "content_block": block})
            if kind != NAME and text:
                delta_type, field = _DELTAS.get(kind, "input_json_delta"), _FIELDS.get(kind, "partial_json")
                data += self._delta({"type": delta_type, field: text})
        return data

    def last_events(self, choices: list[Choice]) -> bytes:
        """Return the events that end a stream."""
        (choice,) = choices
        delta = {
            "type": "message_delta",
            "delta": self._end(choice),
            "usage": _usage(choice.usage, choice.reasoning_tokens),
        }
        return self._close() + named_event(delta) + named_event({"type": "message_stop"})

    def error_events(self, problem: ApiError) -> bytes:
        """Return the event that ends a failed stream."""
        return named_event(self.error_body(problem))

    def error_body(self, problem: ApiError) -> dict:
        """Return the body of an error response."""
        return problem.body("/v1/messages")

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": self.id}) if self._open == THINKING else b""
        self._open = None
        return signed + named_event({"type": "content_block_stop", "index": self._index})

    def _delta(self, delta: dict) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _message(self, blocks: list[dict], usage: dict) -> dict:
        body = {"id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": blocks}
        end = {"stop_reason": None, "stop_sequence": None, "stop_details": None, "container": None}
        return body | end | {"usage": usage}

    def _end(self, choice: Choice) -> dict:
        stopped = choice.stop_string if choice.finish_reason == "stop" else None
        if choice.finish_reason == "length":
            reason = "max_tokens"
        elif choice.called:
            reason = "tool_use"
        else:
            reason = "end_turn" if stopped is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stopped, "stop_details": None, "container": None}


_DELTAS = {TEXT: "text_delta", THINKING: "thinking_delta"}
_FIELDS = {TEXT: "text", THINKING: "thinking"}


def _block(kind: str, name: str) -> dict:
    if kind == NAME:
        call = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": name, "input": ""}
        return call | {"caller": {"type": "direct"}}
    if kind == THINKING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": "", "citations": []}  # Clients refuse null; the schema requires the field.


def _extend(block: dict, text: str) -> None:
    name = {"tool_use": "input", "thinking": "thinking"}.get(block["type"], "text")
    block[name] += text


def _usage(usage: Usage, thinking: int) -> dict:
    """Return the usage of a message with this number of thinking tokens."""
    return FIXED_USAGE | {
        "input_tokens": usage.prompt_tokens - usage.reused_tokens,
        "cache_read_input_tokens": usage.reused_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": thinking},
    }
