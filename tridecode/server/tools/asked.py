"""Tools as a request has them: what the template is given, how calls are read, and to what the answer is held."""

import hashlib
import json
import re
from dataclasses import dataclass

from ...errors import as_json
from ...text.tokenizer import Tokenizer
from ..errors import refusal
from .formats import TAGGED, Format, Function, call_grammar, format_of, special_texts, system_turn
from .parser import Machine, XmlCalls

MOST = 1024
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = re.compile(r"[\w.:/-]{1,128}")


@dataclass(frozen=True)
class Tools:
    """choice: auto, none, required, or one: that function alone. parallel: an answer may have several calls."""

    functions: tuple[Function, ...] = ()
    choice: str = "auto"
    one: str | None = None
    parallel: bool = True

    @property
    def used(self) -> bool:
        """Whether an answer may have calls."""
        return bool(self.functions) and self.choice != "none"

    @property
    def enforced(self) -> bool:
        return self.used and self.choice in ("required", "one")

    def format(self, tokenizer: Tokenizer) -> Format:
        known = format_of(tokenizer)
        return TAGGED if self.enforced and known.machine is XmlCalls else known  # nothing holds that one to schemas

    def machine(self, tokenizer: Tokenizer) -> Machine | None:
        if not self.used:
            return None
        return self.format(tokenizer).machine({function.name: function.parameters for function in self.functions})

    def special(self, tokenizer: Tokenizer) -> dict[int, str]:
        return special_texts(tokenizer, self.format(tokenizer)) if self.used else {}

    def grammar(self, tokenizer: Tokenizer) -> tuple[str, list[str]]:
        """As call_grammar; what an answer must be that is held to calls."""
        chosen = tuple(function for function in self.functions if self.choice != "one" or function.name == self.one)
        known, special = self.format(tokenizer), self.special(tokenizer)
        return call_grammar(known, chosen, self.parallel, special)

    def fit(self, messages: list[dict], tokenizer: Tokenizer) -> tuple[list[dict], dict]:
        """Messages and variables for the chat template, whether it knows tools or not."""
        if not self.functions and not any("tool_calls" in m or m["role"] == "tool" for m in messages):
            return messages, {}
        if "tools" in tokenizer.template_variables:
            if "[TOOL_CALLS]" in tokenizer.template_source:
                messages = [with_short_ids(message) for message in messages]
            tools = [function.definition() for function in self.functions] if self.used else None
            return [with_objects(message) for message in messages], {"tools": tools} if tools else {}
        messages = [as_text(message) for message in messages]
        if self.used:
            told = system_turn(self.functions)
            if messages and messages[0]["role"] == "system":
                first = messages[0] | {"content": f"{messages[0]['content']}\n\n{told}"}
                messages = [first, *messages[1:]]
            else:
                messages = [{"role": "system", "content": told}, *messages]
        return messages, {}


def with_objects(message: dict) -> dict:
    """Arguments as objects, which templates write in their own way."""
    if "tool_calls" not in message:
        return message
    return message | {"tool_calls": [_with_object(call) for call in message["tool_calls"]]}


def _with_object(call: dict) -> dict:
    try:
        arguments = json.loads(call["function"]["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call  # as the model wrote it
    if not isinstance(arguments, dict):
        return call
    return call | {"function": call["function"] | {"arguments": arguments}}


def with_short_ids(message: dict) -> dict:
    """Ids of nine characters, which Mistral's templates demand."""
    made = dict(message)
    if "tool_call_id" in made:
        made["tool_call_id"] = _short(made["tool_call_id"])
    if "tool_calls" in made:
        made["tool_calls"] = [call | {"id": _short(call["id"])} for call in made["tool_calls"]]
    return made


def _short(name: str) -> str:
    return name if re.fullmatch(r"[a-zA-Z0-9]{9}", name) else hashlib.sha256(name.encode()).hexdigest()[:9]


def as_text(message: dict) -> dict:
    """For a template that knows no tools: calls and results in the words that system_turn has taught."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls", ())
    texts = [message["content"]] if message["content"] else []
    for call in with_objects(message)["tool_calls"] if calls else ():
        written = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
        texts.append(f"{TAGGED.opens}{json.dumps(written, ensure_ascii=False)}{TAGGED.closes}")
    return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": "\n".join(texts)}


def function_of(name, description, parameters, place: str) -> Function:
    """A checked one. Raises ApiError."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise refusal(f"{place}: expected a name of up to 128 letters, digits and _.:/-, got {as_json(name)}", "tools")
    if not isinstance(description, str | None):
        raise refusal(f"{place}: description must be text, got {as_json(description)}", "tools")
    if not isinstance(parameters, dict | None):
        raise refusal(f"{place}: parameters must be a JSON schema, got {as_json(parameters)}", "tools")
    return Function(name, description, parameters or NOTHING)


def checked(functions: list[Function], choice: str, one: str | None, parallel: bool) -> Tools:
    """Raises ApiError where the choice does not fit the functions."""
    if len(functions) > MOST:
        raise refusal(f"tools: at most {MOST:,}, got {len(functions):,}", "tools")
    names = [function.name for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise refusal(f"tools: {as_json(twice)} is there twice", "tools")
    if choice in ("required", "one") and not functions:
        raise refusal("tool_choice asks for a call, and there are no tools that could be called", "tool_choice")
    if choice == "one" and one not in names:
        raise refusal(f"tool_choice: {as_json(one)} is none of the tools", "tool_choice")
    return Tools(tuple(functions), choice, one, parallel)


def openai_tools(tools: list | None, choice, parallel: bool | None) -> Tools:
    """Those of a chat: {"type": "function", "function": {...}}. Raises ApiError."""
    functions = []
    for i, tool in enumerate(tools or ()):
        place = f"tools[{i}]"
        if not isinstance(tool, dict) or not isinstance(told := tool.get("function"), dict):
            raise refusal(f'{place}: expected {{"type": "function", "function": ...}}, got {as_json(tool)}', "tools")
        functions.append(function_of(told.get("name"), told.get("description"), told.get("parameters"), place))
    return chosen(functions, choice, parallel is not False)


def chosen(functions: list[Function], choice, parallel: bool) -> Tools:
    """By OpenAI's tool_choice, in the form of either of their APIs. Raises ApiError."""
    if (name := _named(choice)) is not None:
        return checked(functions, "one", name, parallel)
    match choice:
        case None | "auto" | "none" | "required":
            return checked(functions, choice or "auto", None, parallel)
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}} | {
            "type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools),
        }:  # fmt: skip
            for i, tool in enumerate(tools):
                kind = tool.get("type") if isinstance(tool, dict) else None
                other = isinstance(kind, str) and kind != "function"  # which is left out
                if not other and _named(tool) is None:
                    place, form = f"tool_choice: allowed_tools.tools[{i}]", '{"type": "function", ...} with a name'
                    raise refusal(f"{place}: expected {form}, got {as_json(tool)}", "tool_choice")
            names = [name for tool in tools if (name := _named(tool)) is not None]
            for name in names:
                checked(functions, "one", name, parallel)
            return checked([function for function in functions if function.name in names], mode, None, parallel)
    expected = "auto, none, required, a function or allowed_tools"
    raise refusal(f"tool_choice: expected {expected}, got {as_json(choice)}", "tool_choice")


def _named(choice) -> str | None:
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            return name
    return None
