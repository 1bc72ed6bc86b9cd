"""Constraints on answers: the response format of a request, tool calls, and thinking in front of both."""

import json
import re
from typing import NamedTuple

from ..arguments import shown
from ..errors import ParameterError
from ..sampling import STRUCTURES, SamplingParams
from ..text.grammar import choices_grammar
from ..text.thinking import CLOSE, OPEN, THINKING_VARIABLE
from ..text.tokenizer import Tokenizer
from .errors import api_error, bad_request
from .tools.formats import json_rule
from .tools.toolset import Tools

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
# Keys of structured_outputs about white space. JSON has a fixed layout here, which each of their values allows.
LAYOUT = ("disable_any_whitespace", "whitespace_pattern")
# Keywords of a schema that name its values, which need not be objects.
NAMES_VALUES = frozenset("type const enum anyOf oneOf allOf $ref items prefixItems".split())
STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "grammar"}


class ResponseFormat(NamedTuple):
    """A response format: a field of SamplingParams, its value, and the request parameter that sets it."""

    field: str
    value: object
    parameter: str

    @property
    def params(self) -> dict:
        """The field and its value, as keyword arguments of SamplingParams."""
        return {self.field: self.value}


def parse_response_format(
    value: dict | None, structured: dict | None, name: str = "response_format",
    schema: str = '{"json_schema": {"name": ..., "schema": {...}}}',
) -> ResponseFormat | None:  # fmt: skip
    """Parse a request's response_format or structured_outputs.

    Args:
        value: response_format, or the parameter that has its role in another API.
        structured: structured_outputs.
        name: the name of `value` in the API.
        schema: the expected form of a JSON schema in the API, for errors.

    Raises:
        ApiError: both are set, or the value is not supported.
    """
    if structured is not None:
        requested = {key: setting for key, setting in structured.items() if key not in LAYOUT}
        if requested.get("json_object") is True:
            requested = requested | {"json": {"type": "object"}}
            del requested["json_object"]
        if value is not None or len(requested) != 1 or not requested.keys() <= STRUCTURED.keys():
            expected = f"one of {', '.join(STRUCTURED)}, and no response_format with it"
            raise bad_request(f"structured_outputs: expected {expected}", "structured_outputs")
        ((key, setting),) = requested.items()
        return ResponseFormat(STRUCTURED[key], setting, f"structured_outputs.{key}")
    match value:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object", "schema": dict(fields)}:  # This is the form of llama.cpp.
            anything = fields.keys().isdisjoint(NAMES_VALUES)
            return ResponseFormat("json_schema", {"type": "object"} | fields if anything else fields, name)
        case {"type": "json_object"} if value.get("schema") is None:
            return ResponseFormat("json_schema", {"type": "object"}, name)
        case {"type": "json_schema", "json_schema": {"schema": dict(fields)}} | {
            "type": "json_schema", "schema": dict(fields),
        }:  # fmt: skip
            return ResponseFormat("json_schema", fields, name)
    raise bad_request(f"{name}: expected type text, json_object or json_schema with {schema}", name)


def thinking_off(effort: str | None, tokenizer: Tokenizer, name: str = "reasoning_effort") -> dict:
    """Return template variables. They disable thinking if `effort` is low and the template supports this.

    Args:
        name: the name of the parameter in the request, for errors.

    Raises:
        ApiError: the effort is unknown.
    """
    if effort is not None and effort not in EFFORTS:
        raise bad_request(f"{name} must be one of {', '.join(EFFORTS)}, got {shown(effort)}", name)
    return (
        {THINKING_VARIABLE: False}
        if effort in ("none", "minimal") and THINKING_VARIABLE in tokenizer.template_variables
        else {}
    )


def answer_constraint(
    structure: ResponseFormat | None, tools: Tools, tokenizer: Tokenizer, tag: str | None, open_objects: bool = False,
) -> dict:  # fmt: skip
    """Return the fields of SamplingParams that constrain an answer to a response format or to tool calls.

    Args:
        structure: the response format of the request.
        tools: the tools of the request.
        tag: the think tag with which a chat's prompt ends, or ""; None for a completion.
        open_objects: see EngineOptions.

    Raises:
        ApiError: a schema cannot be enforced.
        ParameterError: the response format is invalid.
    """
    if structure is None and not tools.enforced:
        return {}
    if tools.enforced:
        structure = None  # The answer consists of calls, and the response format applies to texts.
    supports_thinking = tag in (OPEN, "") and tokenizer.supports_thinking
    calls_too = tools.used and (structure is None or structure.field != "grammar")  # A grammar may contain calls.
    if structure is not None and not supports_thinking and not calls_too:
        return structure.params
    alternatives, rules = [], []
    if structure is not None:
        alternatives.append("answer")
        try:
            params, may_think = SamplingParams(**structure.params), supports_thinking and tag != OPEN
            rules += lark_rules(params, may_think, open_objects)
        except ParameterError as error:
            raise api_error(error, None, {structure.field: structure.parameter}) or error from None
    if calls_too:
        try:
            calls, call_rules = tools.grammar(tokenizer, open_objects)
        except ParameterError as error:
            raise api_error(error, None, {"json_schema": "tools"}) or error from None
        alternatives.append("calls")
        rules += [f"calls: {calls}", *call_rules]
    start = f"({' | '.join(alternatives)})"
    if supports_thinking:
        # The tag is in the lexeme of the thinking, which ends at the first suffix, also if an answer may contain both.
        opening = "" if tag == OPEN else OPEN
        rules += [f"thinking[suffix={json.dumps(CLOSE)}]: /{opening}(.|\\n)*/", "gap: /\\n*/"]
        start = f"thinking gap {start}" if tag == OPEN else f"(thinking gap)? {start}"
    return {"grammar": "\n".join([f"start: {start}", *rules])}


def parameter_names(structure: ResponseFormat | None, tools: Tools) -> dict[str, str]:
    """Map fields of SamplingParams to the request parameters that set them, for errors about `answer_constraint`."""
    if structure is None or tools.enforced:
        return {"grammar": "tools"}
    combined = tools.used and structure.field != "grammar"  # One grammar contains the response format and the calls.
    names = dict.fromkeys(STRUCTURES, structure.parameter)
    return names | ({"grammar": f"{structure.parameter} or tools"} if combined else {})


def lark_rules(params: SamplingParams, may_think: bool, open_objects: bool) -> list[str]:
    """Return Lark rules of an answer, the rule `answer` first.

    Args:
        may_think: whether a think tag at the beginning is not a part of the answer.
        open_objects: see EngineOptions.
    """
    assert params.structure is not None
    name, source = params.structure
    if name == "json_schema":
        return [f"answer: {json_rule(json.loads(source), open_objects)}"]
    if name == "choice":
        return ["answer: " + choices_grammar(json.loads(source)).removeprefix("start: ")]
    if name == "grammar":
        return [f"answer: %lark {{\n{source}\n}}"]
    escapes = {"/": r"\/", "\n": r"\n"}  # Characters that would end a Lark expression or its line.
    regex = "/" + re.sub(r"\\.|/|\n", lambda match: escapes.get(match[0], match[0]), source) + "/"
    return ["answer: ANSWER", f"ANSWER: {regex}" + (f" & ~/{OPEN}(.|\\n)*/" if may_think else "")]
