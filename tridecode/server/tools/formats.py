"""The ways in which families write calls: how their templates give them away, how they are read, and how enforced."""

import json
from dataclasses import dataclass

from ...text.grammar import LAYOUT, exact
from ...text.tokenizer import Tokenizer
from .parser import BareCalls, Machine, MistralCalls, TaggedCalls, XmlCalls


@dataclass(frozen=True)
class Function:
    """A tool of a client. parameters: a JSON schema, of an object."""

    name: str
    description: str | None
    parameters: dict

    def definition(self) -> dict:
        """As chat templates expect it."""
        told = {"name": self.name, "description": self.description or "", "parameters": self.parameters}
        return {"type": "function", "function": told}


@dataclass(frozen=True)
class Format:
    """tell: a word of a template whose model writes so. opens, closes: the text around an enforced call, `name` and
    `arguments` standing for what they are; between: that between two. special: tokens that no text shows, but that the
    calls begin with."""

    name: str
    machine: type[Machine]
    tell: tuple[str, ...]
    call: str = '{"name": NAME, "arguments": ARGUMENTS}'
    opens: str = ""
    closes: str = ""
    between: str = "\n"
    special: tuple[str, ...] = ()


OBJECT = {"type": "object"}  # as all arguments are, though a schema may not say so
TAGS = ("<tool_call>", "</tool_call>")
TAGGED = Format("tagged", TaggedCalls, TAGS[:1], opens="<tool_call>\n", closes="\n</tool_call>", special=TAGS)
FORMATS = (  # the first whose words a template has
    Format("xml", XmlCalls, ("<function=",), special=TAGS),
    Format("mistral", MistralCalls, ("[TOOL_CALLS]",), opens="[TOOL_CALLS] [", closes="]", between=", ",
           special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    TAGGED,
    Format("bare", BareCalls, ('"parameters"', "ipython"), '{"name": NAME, "parameters": ARGUMENTS}', between="; ",
           special=("<|python_tag|>",)),
)  # fmt: skip


def format_of(tokenizer: Tokenizer) -> Format:
    """What the model's template gives away; of one that knows no tools the tagged format, which it is told of."""
    source = tokenizer.template_source
    if "tools" not in tokenizer.template_variables:
        return TAGGED
    return next((known for known in FORMATS if all(word in source for word in known.tell)), TAGGED)


def special_texts(tokenizer: Tokenizer, known: Format) -> dict[int, str]:
    """Tokens that a format's calls begin with and that texts do not show, and what they stand for."""
    names = {token: tokenizer.token_bytes(token).decode(errors="replace") for token in tokenizer.special_ids}
    return {token: name for token, name in names.items() if name in known.special}


def system_turn(functions: tuple[Function, ...]) -> str:
    """What a model is told of its tools whose template does not do that."""
    lines = "\n".join(json.dumps(function.definition(), ensure_ascii=False) for function in functions)
    return (
        "# Tools\n\nYou may call functions to assist with the user's request. Their signatures, as JSON:\n<tools>\n"
        f"{lines}\n</tools>\n\nFor each call write a JSON object with the function's name and its arguments between "
        '<tool_call> tags:\n<tool_call>\n{"name": <function-name>, "arguments": <arguments-object>}\n</tool_call>'
    )


def call_grammar(
    known: Format, functions: tuple[Function, ...], parallel: bool, special: dict[int, str]
) -> tuple[str, list[str]]:
    """What an answer must be that calls one of the functions, as a Lark expression and the rules that it needs."""
    marks = {text: f"<[{token}]>" for token, text in special.items()}
    rules, names = [], []
    for i, function in enumerate(functions):
        parts = quoted(known.call, {"NAME": json.dumps(json.dumps(function.name)), "ARGUMENTS": f"arguments{i}"}, {})
        rules += [f"call{i}: {parts}", f"arguments{i}: {json_rule(function.parameters | OBJECT)}"]
        names.append(f"call{i}")
    opens, closes = quoted(known.opens, {}, marks), quoted(known.closes, {}, marks)
    any_call = f"({' | '.join(names)})"
    if known.name == "tagged":
        one = f"{opens} {any_call} {closes}"
        more = f"{quoted(known.between, {}, marks)} {one}"
        return f"{one}" + (f" ({more})*" if parallel else ""), rules
    more = f" ({quoted(known.between, {}, marks)} {any_call})*" if parallel else ""
    return f"{opens} {any_call}{more} {closes}".strip(), rules


def json_rule(schema: dict) -> str:
    return "%json " + json.dumps({**exact(schema), "x-guidance": LAYOUT})


def quoted(text: str, names: dict[str, str], marks: dict[str, str]) -> str:
    """A text as a Lark expression, with some words in it replaced by others."""
    for word, expression in (names | marks).items():
        before, found, after = text.partition(word)
        if found:
            left, right = quoted(before, names, marks), quoted(after, names, marks)
            return " ".join(part for part in (left, expression, right) if part)
    return json.dumps(text, ensure_ascii=False) if text else ""
