"""The tools of a request: input of the chat template, the parser of calls, and the grammar that enforces calls."""

import hashlib
import json
import re
from dataclasses import dataclass

from ...errors import as_json
from ...text.tokenizer import Tokenizer
from ..errors import bad_request
from .formats import TAGGED, Format, Function, call_grammar, detect_format, special_tokens, system_turn
from .parser import CallParser, XmlCallParser

MAX_TOOLS = 1024
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Tools:
    """The tools of a request.

    Args:
        functions: the functions that the model may call.
        choice: "auto", "none", "required", or "one", which requires a call of the only function.
        parallel: whether an enforced answer may have several calls.
    """

    functions: tuple[Function, ...] = ()
    choice: str = "auto"
    one: str | None = None
    parallel: bool = True

    @property
    def used(self) -> bool:
        """Whether an answer may contain calls."""
        return bool(self.functions) and self.choice != "none"

    @property
    def enforced(self) -> bool:
        """Whether an answer must be a call."""
        return self.used and self.choice in ("required", "one")

    def format(self, tokenizer: Tokenizer) -> Format:
        """Return the format of the calls. XML calls cannot be enforced by a schema, so TAGGED replaces them."""
        detected = detect_format(tokenizer)
        return TAGGED if self.enforced and detected.parser is XmlCallParser else detected

    def parser(self, tokenizer: Tokenizer) -> CallParser | None:
        """Return a new parser of an answer's calls, None if it cannot contain any."""
        if not self.used:
            return None
        return self.format(tokenizer).parser({function.name: function.parameters for function in self.functions})

    def special_tokens(self, tokenizer: Tokenizer) -> dict[int, str]:
        """Return token id -> text of the special tokens in calls."""
        return special_tokens(tokenizer, self.format(tokenizer)) if self.used else {}

    def grammar(self, tokenizer: Tokenizer, open_objects: bool = False) -> tuple[str, list[str]]:
        """Return (Lark expression, its rules) of an answer that consists of calls."""
        allowed = tuple(function for function in self.functions if self.choice != "one" or function.name == self.one)
        special = self.special_tokens(tokenizer)
        return call_grammar(self.format(tokenizer), allowed, self.parallel, special, self.enforced, open_objects)

    def render(self, messages: list[dict], tokenizer: Tokenizer) -> tuple[list[dict], dict]:
        """Return (messages, variables) for the chat template; without tool support in the template, tools as text."""
        if not self.functions and not any("tool_calls" in m or m["role"] == "tool" for m in messages):
            return messages, {}
        if "tools" in tokenizer.template_variables:
            if "[TOOL_CALLS]" in tokenizer.template_source:
                messages = [with_short_ids(message) for message in messages]
            tools = [function.definition() for function in self.functions] if self.used else None
            return [with_objects(message) for message in messages], {"tools": tools} if tools else {}
        messages = [as_text(message) for message in messages]
        if self.used:
            description = system_turn(self.functions)
            if messages and messages[0]["role"] == "system":
                first = messages[0] | {"content": f"{messages[0]['content']}\n\n{description}"}
                messages = [first, *messages[1:]]
            else:
                messages = [{"role": "system", "content": description}, *messages]
        return messages, {}


def with_objects(message: dict) -> dict:
    """Return a message in which the arguments of calls are objects, because templates format the arguments."""
    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: dict) -> dict:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # Return the text that the model wrote.
    if not isinstance(arguments, dict):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


def with_short_ids(message: dict) -> dict:
    """Return a message whose call ids have nine characters, which Mistral's templates require."""
    result = dict(message)
    if "tool_call_id" in result:
        result["tool_call_id"] = _short(result["tool_call_id"])
    if "tool_calls" in result:
        result["tool_calls"] = [call | {"id": _short(call["id"])} for call in result["tool_calls"]]
    return result


def _short(name: str) -> str:
    return name if re.fullmatch(r"[a-zA-Z0-9]{9}", name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def as_text(message: dict) -> dict:
    """Return a message with calls and results as text in the format of `system_turn`."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls", ())
    texts = [message["content"]] if message["content"] else []
    for call in with_objects(message)["tool_calls"] if calls else ():
        fields = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        texts.append(f"{TAGGED.prefix}{json.dumps(fields, ensure_ascii=False)}{TAGGED.suffix}")
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": "\n".join(texts)}


def parse_function(name, description, parameters, place: str) -> Function:
    """Return a checked function; `place` is its position in the request, for errors. Raises ApiError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise bad_request(
            f"{place}: expected a name of up to 128 letters, digits and _.:/-, got {as_json(name)}", "tools"
        )
    if not isinstance(description, str | None):
        raise bad_request(f"{place}: description must be text, got {as_json(description)}", "tools")
    if not isinstance(parameters, dict | None):
        raise bad_request(f"{place}: parameters must be a JSON schema, got {as_json(parameters)}", "tools")
    return Function(name, description, parameters or NO_PARAMETERS)


def check_tools(functions: list[Function], choice: str, one: str | None, parallel: bool) -> Tools:
    """Return the tools of a request. Raises ApiError if names are not unique or the choice is impossible."""
    if len(functions) > MAX_TOOLS:
        raise bad_request(f"tools: at most {MAX_TOOLS:,}, got {len(functions):,}", "tools")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise bad_request(f"tools: {as_json(duplicate)} is defined twice; names must be unique", "tools")
    if choice in ("required", "one") and not functions:
        raise bad_request("tool_choice requires a call, but there are no tools; add tools or use auto", "tool_choice")
    if choice == "one" and one not in names:
        raise bad_request(f"tool_choice: {as_json(one)} is not one of the tools", "tool_choice")
    return Tools(tuple(functions), choice, one, parallel)


def openai_tools(tools: list | None, choice, parallel: bool | None) -> Tools:
    """Parse the tools of a chat, {"type": "function", "function": {...}}. Raises ApiError."""
    functions = []
    for i, tool in enumerate(tools or ()):
        place = f"tools[{i}]"
        if not isinstance(tool, dict) or not isinstance(fields := tool.get("function"), dict):
            raise bad_request(
                f'{place}: expected {{"type": "function", "function": ...}}, got {as_json(tool)}', "tools"
            )
        functions.append(parse_function(fields.get("name"), fields.get("description"), fields.get("parameters"), place))
    return apply_tool_choice(functions, choice, parallel is not False)


def apply_tool_choice(functions: list[Function], choice, parallel: bool) -> Tools:
    """Return the tools that a tool_choice of Chat Completions or of the Responses API allows. Raises ApiError."""
    if (name := _function_name(choice)) is not None:
        return check_tools(functions, "one", name, parallel)
    match choice:
        case None | "auto" | "none" | "required":
            return check_tools(functions, choice or "auto", None, parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}} | {
            "type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools),
        }:  # fmt: skip
            for i, tool in enumerate(tools):
                kind = tool.get("type") if isinstance(tool, dict) else None
                ignored = isinstance(kind, str) and kind != "function"
                if not ignored and _function_name(tool) is None:
                    place, expected = f"tool_choice: allowed_tools.tools[{i}]", '{"type": "function", ...} with a name'
                    raise bad_request(f"{place}: expected {expected}, got {as_json(tool)}", "tool_choice")
            names = [name for tool in tools if (name := _function_name(tool)) is not None]
            for name in names:
                check_tools(functions, "one", name, parallel)
            return check_tools([function for function in functions if function.name in names], mode, None, parallel)
    expected = "auto, none, required, a function or allowed_tools"
    raise bad_request(f"tool_choice: expected {expected}, got {as_json(choice)}", "tool_choice")


def _function_name(choice) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None
