"""Formats of tool calls by family: detection from the chat template, parsing, and grammars that enforce calls."""

import json
from dataclasses import dataclass

from ...text.grammar import JSON_LAYOUT, exact_schema
from ...text.schema import is_plain
from ...text.tokenizer import Tokenizer
from .parser import BareCallParser, CallParser, MistralCallParser, TaggedCallParser, XmlCallParser


@dataclass(frozen=True)
class Function:
    """A tool of a client; `parameters` is the JSON schema of its arguments, an object."""

    name: str
    description: str | None
    parameters: dict

    def definition(self) -> dict:
        """Return the definition in the form of chat templates."""
        function = {"name": self.name, "description": self.description or "", "parameters": self.parameters}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class Format:
    """A format of tool calls.

    Args:
        name: identifier. In the format "tagged", each call has a prefix and a suffix.
        parser: class that parses the calls.
        template_words: words that a chat template of this format contains.
        call: text of an enforced call, with the placeholders NAME and ARGUMENTS.
        prefix: text before each enforced call in the format "tagged", in other formats before the first call.
        suffix: text after each enforced call in the format "tagged", in other formats after the last call.
        separator: text between two calls.
        special: special tokens in calls, which decoded text omits.
    """

    name: str
    parser: type[CallParser]
    template_words: tuple[str, ...]
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'
    prefix: str = ""
    suffix: str = ""
    separator: str = "\n"
    special: tuple[str, ...] = ()


OBJECT = {"type": "object"}  # The type of all arguments, also if their schema has no type.
TAGS = ("<tool_call>", "</tool_call>")
TAGGED = Format("tagged", TaggedCallParser, TAGS[:1], prefix="<tool_call>\n", suffix="\n</tool_call>", special=TAGS)
FORMATS = (  # The first format whose words are in the template applies.
    Format("xml", XmlCallParser, ("<function=",), special=TAGS),
    Format("mistral", MistralCallParser, ("[TOOL_CALLS]",), prefix="[TOOL_CALLS] [", suffix="]", separator=", ",
           special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    TAGGED,
    Format("bare", BareCallParser, ('"parameters"', "ipython"), '{"name": NAME, "parameters": ARGUMENTS}',
           separator="; ", special=("<|python_tag|>",)),
)  # fmt: skip


def detect_format(tokenizer: Tokenizer) -> Format:
    """Return the format of the model's template; TAGGED (see `system_turn`) if it does not support tools."""
    source = tokenizer.template_source
    if "tools" not in tokenizer.template_variables:
        return TAGGED
    return next((each for each in FORMATS if all(word in source for word in each.template_words)), TAGGED)


def special_tokens(tokenizer: Tokenizer, format: Format) -> dict[int, str]:
    """Return token id -> text of the special tokens in a format's calls, which decoded text omits."""
    names = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.special_ids}
    return {token: name for token, name in names.items() if name in format.special}


def system_turn(functions: tuple[Function, ...]) -> str:
    """Return the system turn that describes tools to a model whose template does not support them."""
    lines = "\n".join(json.dumps(function.definition(), ensure_ascii=False) for function in functions)
    return (
        "# Tools\n\nYou may call functions to assist with the user's request. Their signatures, as JSON:\n<tools>\n"
        f"{lines}\n</tools>\n\nFor each call write a JSON object with the function's name and its arguments between "
        '<tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def call_grammar(
    format: Format, functions: tuple[Function, ...], parallel: bool, special: dict[int, str], enforced: bool = True,
    open_objects: bool = False,
) -> tuple[str, list[str]]:  # fmt: skip
    """Return (Lark expression, its rules) of an answer that calls one of the functions.

    Args:
        enforced: whether a schema that cannot be compiled is an error. If not, the schemas of other functions than
            plain ones are ignored.
        open_objects: see EngineOptions.
    """
    marks = {text: f"<[{token}]>" for token, text in special.items()}
    rules, names = [], []
    for i, function in enumerate(functions):
        parts = lark_text(
            format.call, {"NAME": json.dumps(json.dumps(function.name)), "ARGUMENTS": f"arguments{i}"}, {}
        )
        schema = function.parameters if enforced or is_plain(function.parameters) else {}
        rules += [f"call{i}: {parts}", f"arguments{i}: {json_rule(schema | OBJECT, open_objects)}"]
        names.append(f"call{i}")
    prefix, suffix = lark_text(format.prefix, {}, marks), lark_text(format.suffix, {}, marks)
    any_call = f"({' | '.join(names)})"
    if format.name == "tagged":
        one = f"{prefix} {any_call} {suffix}"
        more = f"{lark_text(format.separator, {}, marks)} {one}"
        return f"{one}" + (f" ({more})*" if parallel else ""), rules
    more = f" ({lark_text(format.separator, {}, marks)} {any_call})*" if parallel else ""
    return f"{prefix} {any_call}{more} {suffix}".strip(), rules


def json_rule(schema: dict, open_objects: bool) -> str:
    """Return a Lark rule that matches the JSON texts that a schema allows."""
    return "%json " + json.dumps({**exact_schema(schema, open_objects), "x-guidance": JSON_LAYOUT})


def lark_text(text: str, names: dict[str, str], marks: dict[str, str]) -> str:
    """Return a text as a Lark expression, with `names` and `marks` in it replaced by their expressions."""
    for word, expression in (names | marks).items():
        before, match, after = text.partition(word)
        if match:
            left, right = lark_text(before, names, marks), lark_text(after, names, marks)
            return " ".join(part for part in (left, expression, right) if part)
    return json.dumps(text, ensure_ascii=False) if text else ""
