"""The form to which an answer is held, behind its thinking: that of a request's format, or of calls."""

import json
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..arguments import shown
from ..errors import ParameterError
from ..sampling import STRUCTURES, SamplingParams
from ..text.grammar import lark_of_choices
from ..text.thinking import CLOSE, OPEN, SWITCH, ends_inside
from ..text.tokenizer import Tokenizer
from .errors import api_error, refusal
from .tools.asked import Tools
from .tools.formats import json_rule

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class Structure(NamedTuple):
    """A field of SamplingParams, its value, and where the request has it."""

    field: str
    value: object
    place: str

    @property
    def params(self) -> dict:
        return {self.field: self.value}


def response_format(
    given: dict | None, structured: dict | None, name: str = "response_format",
    schema: str = '{"json_schema": {"name": ..., "schema": {...}}}',
) -> Structure | None:  # fmt: skip
    """What response_format, for which an API may have another name and another place of the schema, or
    structured_outputs ask for. Raises ApiError."""
    if structured is not None:
        asked = {name: value for name, value in structured.items() if value is not None}
        if given is not None or len(asked) != 1 or not asked.keys() <= STRUCTURED.keys():
            expected = f"one of {', '.join(STRUCTURED)}, and no response_format beside it"
            raise refusal(f"structured_outputs: expected {expected}", "structured_outputs")
        ((name, value),) = asked.items()
        return Structure(STRUCTURED[name], value, f"structured_outputs.{name}")
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Structure("json_schema", {"type": "object"}, name)
        case {"type": "json_schema", "json_schema": {"schema": dict(value)}} | {
            "type": "json_schema", "schema": dict(value),
        }:  # fmt: skip
            return Structure("json_schema", value, name)
    raise refusal(f"{name}: expected type text, json_object or json_schema with {schema}", name)


def thinking_off(effort: str | None, tokenizer: Tokenizer, name: str = "reasoning_effort") -> dict:
    """The template's variable that switches thinking off where next to none is wanted, and it can be.

    name: of the parameter. Raises ApiError.
    """
    if effort is not None and effort not in EFFORTS:
        raise refusal(f"{name} must be one of {', '.join(EFFORTS)}, got {shown(effort)}", name)
    return {SWITCH: False} if effort in ("none", "minimal") and SWITCH in tokenizer.template_variables else {}


def held_to(structure: Structure | None, tools: Tools, tokenizer: Tokenizer, prompt: Sequence[int] | None) -> dict:
    """The fields of SamplingParams that hold an answer to this. prompt: of a chat, whose answer may begin with
    thinking. Raises ApiError and ParameterError."""
    if structure is None and not tools.enforced:
        return {}
    if structure is not None and tools.enforced:
        two = f"tool_choice asks for a call, {structure.place} for a text"
        raise refusal(f"{two}: an answer has one form", "tool_choice")
    tail = "" if prompt is None else tokenizer.decode(list(prompt[-8:]), skip_special=False)
    thinks = prompt is not None and tokenizer.thinks and not tail.rstrip().endswith(CLOSE)
    if structure is not None and (not thinks and not tools.used or structure.field == "grammar"):
        return structure.params
    several, rules = [], []
    if structure is not None:
        several.append("answer")
        rules.append(f"answer: {expression(SamplingParams(**structure.params))}")
    if tools.used:
        try:
            calls, more = tools.grammar(tokenizer)
        except ParameterError as error:
            raise api_error(error, None, {"json_schema": "tools"}) or error from None
        several.append("calls")
        rules += [f"calls: {calls}", *more]
    start = f"({' | '.join(several)})"
    if thinks:
        rules += [f"thinking[suffix={json.dumps(CLOSE)}]: /(.|\\n)*/", "gap: /\\s*/"]
        start = f"thinking gap {start}" if ends_inside(tail) else f"({json.dumps(OPEN)} thinking gap)? {start}"
    return {"grammar": "\n".join([f"start: {start}", *rules])}


def places(structure: Structure | None, tools: Tools) -> dict[str, str]:
    """Where the request has what `held_to` makes fields of SamplingParams of, for its errors."""
    if structure is None:
        return {"grammar": "tools"}
    beside = tools.used and structure.field != "grammar"  # one grammar is made of both
    return dict.fromkeys(STRUCTURES, structure.place) | ({"grammar": f"{structure.place} or tools"} if beside else {})


def expression(params: SamplingParams) -> str:
    """Return the structure of the answer as a Lark expression."""
    assert params.structure is not None
    name, source = params.structure
    if name == "json_schema":
        return json_rule(json.loads(source))
    if name == "choice":
        return lark_of_choices(json.loads(source)).removeprefix("start: ")
    written = {"/": r"\/", "\n": r"\n"}  # what would end it, or its line
    return "/" + re.sub(r"\\.|/|\n", lambda found: written.get(found[0], found[0]), source) + "/"
