"""Tool calls: parsing of partial text, definitions in chat templates, and enforcement."""

import json
import time
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import Running, events

from tridecode.results import OutputChunk
from tridecode.sampling import SamplingParams
from tridecode.server.choice import Choice
from tridecode.server.constraints import ResponseFormat, answer_constraint, thinking_off
from tridecode.server.errors import ApiError
from tridecode.server.tools.formats import FORMATS, TAGGED
from tridecode.server.tools.json_text import complete_object
from tridecode.server.tools.parser import (
    ARGUMENTS,
    NAME,
    TEXT,
    BareCallParser,
    MistralCallParser,
    TaggedCallParser,
    XmlCallParser,
)
from tridecode.server.tools.toolset import as_text, openai_tools, with_objects, with_short_ids
from tridecode.text.grammar import Grammars
from tridecode.text.thinking import CLOSE, OPEN

F, G = (NAME, "f"), (NAME, "g")
ONE = (ARGUMENTS, '{"a": 1}')
TYPES = {"f": {"properties": {"a": {"type": "integer"}, "on": {"type": "boolean"}, "s": {"type": "string"}}}}
# (parser, text, expected events, whether each call is valid)
CASES = {
    "two_in_tags": (
        TaggedCallParser,
        'Let me look.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}\\"{", "b": [1, {"c": 2}]}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
        [(TEXT, "Let me look."), F, (ARGUMENTS, '{"a": "x}\\"{", "b": [1, {"c": 2}]}'), G, (ARGUMENTS, "{}")],
        [True, True],
    ),
    "text_between_and_after": (
        TaggedCallParser,
        '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> and <tool_call>{"name": "g", "arguments": {}}'
        "</tool_call>\nDone.",
        [F, ONE, (TEXT, "and"), G, (ARGUMENTS, "{}"), (TEXT, "Done.")],
        [True, True],
    ),
    "arguments_first": (
        TaggedCallParser, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [F, ONE], [True],
    ),
    "arguments_as_text": (
        TaggedCallParser, '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', [F, ONE], [True],
    ),
    "no_arguments": (TaggedCallParser, '<tool_call>{"name": "f"}</tool_call>', [F, (ARGUMENTS, "{}")], [True]),
    "no_end_tag": (TaggedCallParser, '<tool_call>{"name": "f", "arguments": {"a": 1}}', [F, ONE], [True]),
    "text_after_tag": (TaggedCallParser, "a <tool_call> b", [(TEXT, "a <tool_call> b")], []),
    "no_name": (TaggedCallParser, '<tool_call>{"x": 3}</tool_call>', [(TEXT, '<tool_call>{"x": 3}</tool_call>')], []),
    "cut_before_the_name": (TaggedCallParser, ' <tool_call>{"na', [(TEXT, ' <tool_call>{"na')], []),
    "cut_in_the_arguments": (
        TaggedCallParser, '<tool_call>{"name": "f", "arguments": {"a": ', [F, (ARGUMENTS, '{"a": ')], [False],
    ),
    "broken_arguments": (
        TaggedCallParser, '<tool_call>{"name": "f", "arguments": {a}}</tool_call>', [F, (ARGUMENTS, "{a}")], [False],
    ),
    "invalid_number": (
        TaggedCallParser,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        [F, (ARGUMENTS, '{"a": NaN}')],
        [False],
    ),
    "white_space_after_invalid_call": (
        TaggedCallParser,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call> hello',
        [F, (ARGUMENTS, '{"a": NaN}'), (TEXT, " hello")],
        [False],
    ),
    "invalid_escape_in_name": (
        TaggedCallParser, NO_JSON := '<tool_call>{"name": "a\\x", "arguments": {}}</tool_call>', [(TEXT, NO_JSON)], [],
    ),
    "half_surrogate_pair_in_name": (
        TaggedCallParser, HALF := '<tool_call>{"name": "a\\ud800", "arguments": {}}</tool_call>', [(TEXT, HALF)], [],
    ),
    "half_surrogate_pair_in_name_after_arguments": (
        TaggedCallParser, ODD := '<tool_call>{"arguments": {}, "name": "\\ud800"}</tool_call>', [(TEXT, ODD)], [],
    ),
    "half_surrogate_pair_in_arguments_before_name": (
        TaggedCallParser,
        EARLY := '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "f"}</tool_call>',
        [(TEXT, EARLY)],
        [],
    ),
    "a_number_too_large_before_the_name": (
        TaggedCallParser,
        LARGE := '<tool_call>{"arguments": {"a": 1e999}, "name": "f"}</tool_call>',
        [(TEXT, LARGE)],
        [],
    ),
    "text_alone": (TaggedCallParser, " 1 < 2, <tool and <b>\n", [(TEXT, " 1 < 2, <tool and <b>\n")], []),
    "bare": (BareCallParser, '{"name": "f", "parameters": {"a": 1}}', [F, ONE], [True]),
    "bare_behind_a_tag": (
        BareCallParser,
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        [F, ONE, G, (ARGUMENTS, "{}")],
        [True, True],
    ),
    "an_object_that_is_no_call": (BareCallParser, '{"answer": 5}', [(TEXT, '{"answer": 5}')], []),
    "an_object_behind_text": (
        BareCallParser, 'So: {"name": "f", "parameters": {}}', [(TEXT, 'So: {"name": "f", "parameters": {}}')], [],
    ),
    "a_list": (
        MistralCallParser,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        [F, ONE, G, (ARGUMENTS, "{}")],
        [True, True],
    ),
    "names_and_arguments": (
        MistralCallParser,
        'Hm. [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc12[ARGS]{}',
        [(TEXT, "Hm."), F, ONE, G, (ARGUMENTS, "{}")],
        [True, True],
    ),
    "name_without_args_mark": (MistralCallParser, '[TOOL_CALLS]f{"a": 1}', [F, ONE], [True]),
    "mark_without_call": (MistralCallParser, "[TOOL_CALLS] no, wait!", [(TEXT, "[TOOL_CALLS] no, wait!")], []),
    "parameters": (
        XmlCallParser,
        "Now.\n<tool_call>\n<function=f>\n<parameter=a>\n5\n</parameter>\n<parameter=s>\n1 < 2\nnot 5\n</parameter>\n"
        "<parameter=on>True</parameter>\n</function>\n</tool_call>",
        [(TEXT, "Now."), F, (ARGUMENTS, '{"a": 5, "s": "1 < 2\\nnot 5", "on": true}')],
        [True],
    ),
    "no_parameters": (XmlCallParser, "<function=g>\n</function>", [G, (ARGUMENTS, "{}")], [True]),
    "cut_in_a_parameter": (XmlCallParser, "<tool_call>\n<function=f>\n<parameter=a>\n5", [F], [False]),
    "tag_without_function": (XmlCallParser, "<tool_call> nothing", [(TEXT, "<tool_call> nothing")], []),
}  # fmt: skip


def read(parser, parts) -> tuple[list, list[bool]]:
    """Return the events of a text in parts, with those of a kind joined, and for each call whether it is valid."""
    reader, events = parser(TYPES), []
    for part in (*parts, None):
        for kind, text in reader.finish() if part is None else reader.feed(part):
            if events and events[-1][0] == kind != NAME:
                events[-1] = kind, events[-1][1] + text
            else:
                events.append((kind, text))
    return events, [not call.broken for call in reader.calls]


@pytest.mark.parametrize("name", CASES)
def test_parsing_does_not_depend_on_cuts(name):
    parser, text, events, valid = CASES[name]
    assert read(parser, [text]) == (events, valid)
    for at in range(len(text) + 1):
        assert read(parser, [text[:at], text[at:]]) == (events, valid), (text[:at], text[at:])
    assert read(parser, text) == (events, valid)


def answer_text(parser, text) -> str:
    """Return the text of an answer that is not streamed."""
    tokenizer = SimpleNamespace(detokenizer=lambda before: None)
    choice = Choice(tokenizer, None, tools=SimpleNamespace(parser=lambda _: parser(TYPES), special_tokens=lambda _: {}))
    return choice.restore_malformed_calls(choice.add([OutputChunk(None, text, finish_reason="stop")])).text(TEXT)


INVALID_CALL = '{"name": "f", "arguments": {"a": NaN}}'
MALFORMED = {
    "tagged": (
        TaggedCallParser,
        f"Well. \n<tool_call>{INVALID_CALL}</tool_call>\n<tool_call>{INVALID_CALL}</tool_call>\n",
    ),
    "list": (MistralCallParser, f"Well.\n[TOOL_CALLS] [{INVALID_CALL} , {INVALID_CALL} ]\n"),
    "name": (MistralCallParser, '\n[TOOL_CALLS]f{"a": NaN} [TOOL_CALLS]f{"a": NaN}'),
    "bare": (BareCallParser, f"\n{INVALID_CALL}; {INVALID_CALL};\n".replace("arguments", "parameters")),
    "xml": (XmlCallParser, "Well.\n<tool_call>\n<function=f>\n<parameter=a>"),
}


@pytest.mark.parametrize("parser, text", MALFORMED.values(), ids=MALFORMED)
def test_malformed_calls_become_original_text(parser, text):
    assert answer_text(parser, text) == text


@pytest.mark.parametrize("parser", [TaggedCallParser, BareCallParser, MistralCallParser, XmlCallParser])
@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from([
    "<tool_call>", "</tool_call>", '{"name": "f", ', '"arguments": ', '"parameters": ', "{}", "}", "{", '"', "\\", " ",
    "\n", "x", "[TOOL_CALLS]", "[", "]", ", ", "f", "[ARGS]", "<function=f>", "<parameter=a>", "</parameter>",
    "</function>", "<|python_tag|>", ";", "5", '{"a": NaN}',
]), max_size=14), st.randoms())  # fmt: skip
def test_random_text_is_preserved_for_any_cuts(parser, words, random):
    text = "".join(words)
    events, valid = read(parser, [text])
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(3))
    assert read(parser, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]) == (events, valid)
    if not any(valid):  # Without a valid call, the parser returns the text unchanged.
        assert answer_text(parser, text) == text


ARGUMENT_TYPES = {
    "maybe": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"5": 5, "null": None, "None": None, "x": "x"}),
    "list": ({"anyOf": [{"type": "array"}, {"type": "null"}]}, {"[1, 2]": [1, 2], "null": None}),
    "enum": ({"enum": [1, 2]}, {"1": 1}),
    "const": ({"const": True}, {"True": True}),
    "ref": ({"$ref": "#/$defs/Size"}, {"3": 3}),
    "circle": ({"$ref": "#/$defs/Circle"}, {"3": "3"}),
    "wide": ({"$ref": "#/$defs/Wide"}, {"3": 3}),
    "root": ({"$ref": "#"}, {'{"x": 3}': {"x": 3}}),
    "anchor": ({"$ref": "#Size"}, {"3": "3"}),
    "string_or_null": ({"type": ["string", "null"]}, {"5": "5", "true": "true", "null": None}),
    "number": ({"type": "number"}, {"1.5": 1.5, "NaN": "NaN", "1e999": "1e999"}),
    "nothing": ({}, {"5": "5"}),
    "no_schema": (True, {"5": "5"}),
}


@pytest.mark.parametrize("schema, values", ARGUMENT_TYPES.values(), ids=ARGUMENT_TYPES)
def test_xml_arguments_have_schema_types(schema, values):
    # The schema contains many circular references.
    wide = [*({"$ref": "#/$defs/Wide"} for _ in range(100)), {"$ref": "#/$defs/Size"}]
    defs = {"Size": {"type": "integer"}, "Circle": {"$ref": "#/$defs/Circle"}, "Wide": {"anyOf": wide}}
    for text, value in values.items():
        parser = XmlCallParser({"f": {"type": "object", "properties": {"x": schema}, "$defs": defs}})
        start = time.monotonic()
        parser.feed(f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>")
        assert time.monotonic() - start < 10
        assert json.loads(parser.calls[0].arguments) == {"x": value} and not parser.calls[0].broken
    for properties in ([], None, "x"):
        parser = XmlCallParser({"f": {"properties": properties}})
        parser.feed("<tool_call><function=f><parameter=x>5</parameter></function></tool_call>")
        assert parser.calls[0].arguments == '{"x": "5"}'


def test_arguments_stream_after_name():
    parser, events = TaggedCallParser({}), []
    for char in '<tool_call>{"name": "f", "arguments": {"path": "x"}}</tool_call>':
        events += parser.feed(char)
    assert events[0] == F and [text for kind, text in events[1:]] == list('{"path": "x"}')


# ---- requests

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip
PING = {"type": "function", "function": {"name": "ping"}}
CALL = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}


class TokenizerWithTemplate:
    """A tokenizer with another chat template."""

    def __init__(self, tokenizer, source: str, variables=("tools",), supports_thinking=False):
        self._tokenizer, self.template_source, self.supports_thinking = tokenizer, source, supports_thinking
        self.template_variables = frozenset(variables)

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)


@pytest.fixture(scope="module")
def bundled():
    from tridecode import Engine

    with Engine.load(device="cpu") as engine:
        yield engine


@pytest.mark.parametrize("family", FORMATS, ids=lambda family: family.name)
@pytest.mark.parametrize(
    "choice, parallel",
    [("required", True), ("required", False), ({"type": "function", "function": {"name": "get_weather"}}, True)],
)
def test_enforced_calls_use_the_models_format(bundled, family, choice, parallel):
    tokenizer = TokenizerWithTemplate(bundled.tokenizer, " ".join(family.template_words))
    tools = openai_tools([WEATHER], choice, parallel)
    form = answer_constraint(None, tools, tokenizer, "")
    result = bundled.generate("x", SamplingParams(temperature=0, max_tokens=150, **form))
    parser = tools.parser(tokenizer)
    events = parser.feed(result.text) + parser.finish()
    assert events[0] == (NAME, "get_weather") and not any(kind == TEXT for kind, _ in events), result.text
    assert set(json.loads(parser.calls[0].arguments)) == {"city", "days"}
    assert parallel or result.finish_reason == "stop" and len(parser.calls) == 1


def test_special_token_is_enforced_as_token(bundled):
    tools = openai_tools([PING], "required", False)
    tokenizer = TokenizerWithTemplate(bundled.tokenizer, "[TOOL_CALLS]")
    tokenizer.special_ids, tokenizer.token_bytes = frozenset([1]), lambda token: b"[TOOL_CALLS]"
    form = answer_constraint(None, tools, tokenizer, "")
    result = bundled.generate("x", SamplingParams(temperature=0, max_tokens=60, **form))
    assert result.token_ids[0] == 1 and result.text == ' [{"name": "ping", "arguments": {}}]'
    assert tools.special_tokens(tokenizer) == {1: "[TOOL_CALLS]"}


def matches(engine, form: dict, text: str) -> bool:
    """Return whether a constraint allows an answer that is `text`, and that ends there."""
    grammar = Grammars(engine.tokenizer, engine.config.vocab_size, engine.config.stop_ids).of(SamplingParams(**form))
    matcher = grammar.matcher(())
    for token in engine.tokenizer.encode_within(text):
        if not matcher.allowed()[token // 32] >> token % 32 & 1:
            return False
        matcher.accept(token)
    end = engine.config.stop_ids[0]
    return bool(matcher.allowed()[end // 32] >> end % 32 & 1)


LARK = '%llguidance {}\nstart: A "b" // }\nA: /[a{]+/\n'


@pytest.mark.parametrize("thinks", ["in the prompt", "with a tag", "not"])
@pytest.mark.parametrize("tools", [None, [PING]], ids=["", "with_tools"])
@pytest.mark.parametrize(
    "field, value, answer, others",
    [
        ("json_schema", {"enum": [5]}, "5", ["4", " 5"]),
        ("choice", ["yes", " no", "<th"], " no", ["no", "yes no"]),
        ("choice", ["yes", " no", "<th"], "<th", ["yes<th"]),
        ("regex", "[a-z]+", "abc", ["ABC", ""]),
        ("regex", "^[a-z]+$", "abc", ["ABC", ""]),
        ("regex", ".*", "<thin and so on", ["two\nlines"]),
        ("grammar", LARK, "a{b", ["ab{", ""]),
    ],
)
def test_response_format_binds_the_text_after_the_thinking(bundled, thinks, tools, field, value, answer, others):
    tokenizer = TokenizerWithTemplate(bundled.tokenizer, "</think>", (), supports_thinking=True)
    thinking = "" if thinks == "not" else ("<think>\n" if thinks == "with a tag" else "") + "hm, 5?\n</think>\n\n"
    tag = OPEN if thinks == "in the prompt" else ""
    structure = ResponseFormat(field, value, "p")
    form = answer_constraint(structure, openai_tools(tools, None, None), tokenizer, tag)
    assert matches(bundled, form, thinking + answer)
    assert not any(matches(bundled, form, thinking + other) for other in others)
    assert not thinking or not matches(bundled, form, thinking.partition("</think>")[0]), "it may end in the thinking"
    closed = answer_constraint(structure, openai_tools(None, None, None), tokenizer, CLOSE)
    assert closed == {field: value}


def test_low_effort_disables_thinking_if_template_supports_it(bundled):
    tokenizer = TokenizerWithTemplate(bundled.tokenizer, "", ("enable_thinking",))
    assert thinking_off("none", tokenizer) == {"enable_thinking": False} and thinking_off("low", tokenizer) == {}
    assert thinking_off("none", bundled.tokenizer) == {}


def test_answer_is_call_or_response_format(bundled):
    tools = openai_tools([PING], "auto", False)
    form = answer_constraint(
        ResponseFormat("json_schema", {"enum": ["yes"]}, "response_format"), tools, bundled.tokenizer, ""
    )
    texts = {bundled.generate("x", SamplingParams(temperature=2, seed=seed, **form)).text for seed in range(8)}
    assert texts == {'"yes"', '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'}


def test_template_without_tools_gets_system_turn(bundled):
    messages = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "Rain.", "tool_call_id": "call_0"}]  # fmt: skip
    tools = openai_tools([WEATHER], None, None)
    fitted, variables = tools.render(messages, bundled.tokenizer)
    assert variables == {} and [message["role"] for message in fitted] == ["system", "user", "assistant", "user"]
    assert "get_weather" in fitted[0]["content"]
    assert fitted[2]["content"] == '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
    assert fitted[3]["content"] == "<tool_response>\nRain.\n</tool_response>"
    system = [{"role": "system", "content": "Be brief."}, *messages]
    assert tools.render(system, bundled.tokenizer)[0][0]["content"].startswith("Be brief.\n\n# Tools")
    assert tools.render(messages, bundled.tokenizer)[0] == fitted and "tool_calls" in messages[1]


def test_template_with_tools_gets_definitions(bundled):
    messages = [{"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "content": "Rain.", "tool_call_id": "call_0"}]  # fmt: skip
    fitted, variables = openai_tools([WEATHER], None, None).render(
        messages, TokenizerWithTemplate(bundled.tokenizer, "<tool_call>")
    )
    assert variables == {"tools": [WEATHER]} and fitted[0]["tool_calls"][0]["function"]["arguments"] == {"city": "Bonn"}
    fitted, variables = openai_tools([WEATHER], "none", None).render(
        messages, TokenizerWithTemplate(bundled.tokenizer, "[TOOL_CALLS]")
    )
    short = fitted[1]["tool_call_id"]
    assert variables == {} and len(short) == 9 and short == fitted[0]["tool_calls"][0]["id"]


def test_invalid_arguments_are_sent_back_unchanged():
    call = CALL | {"function": {"name": "f", "arguments": "{broken"}}
    assert with_objects({"role": "assistant", "tool_calls": [call]})["tool_calls"] == [call]
    assert '"{broken"' in as_text({"role": "assistant", "content": "", "tool_calls": [call]})["content"]
    assert with_short_ids({"role": "tool", "tool_call_id": "abcdefgh1"})["tool_call_id"] == "abcdefgh1"


def allowed_tools(*tools) -> dict:
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": list(tools)}}


REFUSED = {
    "other_tool_type": ([{"type": "web_search"}], None, "tools[0]: expected"),
    "no_name": ([{"type": "function", "function": {}}], None, "tools[0]: expected a name"),
    "no_schema": ([{"type": "function", "function": {"name": "f", "parameters": []}}], None, "parameters must be"),
    "duplicate_name": ([PING, PING], None, 'tools: "ping" is defined twice'),
    "unknown_choice": ([PING], "sometimes", "tool_choice: expected auto, none"),
    "unknown_function": ([PING], {"type": "function", "function": {"name": "pong"}}, '"pong" is not one of the tools'),
    "allowed_tool_is_text": ([PING], allowed_tools("ping"), 'allowed_tools.tools[0]: expected {"type": "function"'),
    "allowed_function_without_name": ([PING], allowed_tools(PING, {"type": "function"}), "allowed_tools.tools[1]"),
    "allowed_tool_with_invalid_type": ([PING], allowed_tools({"type": ["function"]}), "allowed_tools.tools[0]"),
    "required_without_tools": ([], "required", "there are no tools"),
}  # fmt: skip


@pytest.mark.parametrize("tools, choice, message", REFUSED.values(), ids=REFUSED)
def test_invalid_tools_are_refused(tools, choice, message):
    with pytest.raises(ApiError, match="tool") as refused:
        openai_tools(tools, choice, None)
    assert message in refused.value.message and refused.value.status == 400


def test_cut_arguments_are_completed_as_clients_of_streams_do():
    jiter = pytest.importorskip("jiter")
    text = json.dumps({"a": 'x"}y', "b": [1, 2.5, {"c": True, "d": None}, []], "e": "é\\", "f": {"g": -12}})
    for end in range(1, len(text) + 1):
        assert complete_object(text[:end]) == jiter.from_json(text[:end].encode(), partial_mode=True), text[:end]
    assert complete_object("") == {} and complete_object("nonsense") == {}


def test_cut_call_is_the_same_block_streamed_or_not(bundled):
    """max_tokens ends these answers at all positions of a forced call."""
    schema = {"properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "string"}}}}
    schema |= {"type": "object", "required": ["city", "days"]}
    question = [{"role": "user", "content": "Weather in Paris for the next days?"}]
    function = {"type": "function", "function": {"name": "f", "parameters": schema}}
    chat = {"model": "bundled", "temperature": 0, "messages": question, "tools": [function], "tool_choice": "required"}
    responses = chat | {"input": question, "tools": [{"type": "function"} | function["function"]]}
    del responses["messages"]
    tools, forced = [{"name": "f", "input_schema": schema}], {"type": "tool", "name": "f"}
    messages = {"model": "bundled", "messages": question, "tools": tools, "tool_choice": forced}
    kinds = set()
    with Running(bundled) as running:
        anthropic = pytest.importorskip("anthropic").Anthropic(base_url=running.url, api_key="none", max_retries=0)
        for tokens in range(20, 60, 4):
            limit = {"max_tokens": tokens}
            whole = running.post("/v1/messages", messages | limit | {"temperature": 0}).json()
            with anthropic.messages.stream(**messages, **limit, extra_body={"temperature": 0}) as stream:
                streamed = stream.get_final_message()
            (one,), (other,) = whole["content"], streamed.content
            assert (one["type"], whole["stop_reason"]) == (other.type, streamed.stop_reason)
            assert one.get("input") == getattr(other, "input", None) and one.get("text") == getattr(other, "text", None)
            kinds.add((one["type"], whole["stop_reason"]))

            message = running.post("/v1/chat/completions", chat | limit).json()["choices"][0]["message"]
            with running.stream(chat | limit, "/v1/chat/completions") as got:
                deltas = [each["choices"][0]["delta"] for each in events(got.iter_lines()) if isinstance(each, dict)]
            arguments = [
                "".join(call["function"]["arguments"] for each in answer for call in each.get("tool_calls") or [])
                for answer in ([message], deltas)
            ]
            assert arguments[0] == arguments[1]
            assert (message["content"] or "") == "".join(delta.get("content") or "" for delta in deltas)

            limit = {"max_output_tokens": tokens}
            whole = running.client().responses.create(**responses, **limit)
            last = list(running.client().responses.create(**responses, **limit, stream=True))[-1].response
            outputs = [[(item.type, item.status) for item in response.output] for response in (whole, last)]
            assert outputs[0] == outputs[1]
    assert kinds == {("text", "max_tokens"), ("tool_use", "max_tokens")}


def test_detect_format(bundled):
    from tridecode.server.tools.formats import detect_format

    assert detect_format(bundled.tokenizer) is TAGGED
    for family in FORMATS:
        tokenizer = TokenizerWithTemplate(bundled.tokenizer, " ".join(family.template_words))
        assert detect_format(tokenizer) is family
