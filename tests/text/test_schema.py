"""The meaning of a JSON schema as a response format, checked with texts that it allows and refuses."""

import json
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tridecode import Engine, SamplingParams
from tridecode.errors import ParameterError
from tridecode.server.constraints import ResponseFormat, answer_constraint
from tridecode.server.tools.toolset import openai_tools
from tridecode.text.grammar import Grammars
from tridecode.text.schema import is_plain

INTEGER, STRING = {"type": "integer"}, {"type": "string"}
A, B = ({"type": "object", "properties": {name: INTEGER}} for name in "ab")
DEFS = {"$defs": {"A": A, "B": B, "tree": {"properties": {"left": {"$ref": "#/$defs/tree"}, "v": INTEGER}}}}
OWN, BOTH, OTHER = '{"a": 1}', '{"a": 1, "b": 2}', '{"a": 1, "c": 2}'


@pytest.fixture(scope="module")
def engine():
    with Engine.load(device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def allows(engine):
    """Return a function: whether an answer with these sampling parameters may be a text, and end there."""

    @cache
    def grammar(fields: str, open_objects: bool):
        grammars = Grammars(engine.tokenizer, engine.config.vocab_size, engine.config.stop_ids, open_objects)
        return grammars.of(SamplingParams(**json.loads(fields)))

    def allows(text, open_objects=False, **fields):
        matcher, end = grammar(json.dumps(fields), open_objects).matcher(()), engine.config.stop_ids[0]
        for token in [*engine.tokenizer.encode_within(text), end]:
            if not matcher.allowed()[token // 32] >> token % 32 & 1:
                return False
            if token != end:
                matcher.accept(token)
        return True

    return allows


CLOSED = {
    "properties": A,
    "no_properties": {"type": "object", "properties": {}, "required": ["a"]},
    "required_only": {"properties": {}, "required": ["a"]},
    "pattern": {"type": "object", "patternProperties": {"^a": INTEGER}},
    "reference": DEFS | {"$ref": "#/$defs/A"},
    "reference_with_annotations": DEFS | {"$ref": "#/$defs/A", "description": "x", "type": "object"},
    "single_all_of": DEFS | {"allOf": [{"$ref": "#/$defs/A"}], "title": "x"},
    "alternatives": DEFS | {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
    "alternatives_with_required": A | {"anyOf": [{"required": ["a"]}, {"required": ["d"]}]},
    "unevaluated": A | {"unevaluatedProperties": False},
}
CLOSED_TOGETHER = {
    "all_of": {"allOf": [A, B]},
    "all_of_references": DEFS | {"allOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]},
    "reference_and_properties": DEFS | {"$ref": "#/$defs/A", "properties": {"b": INTEGER}},
    "base_and_properties": DEFS | {"allOf": [{"$ref": "#/$defs/A"}], "properties": {"b": INTEGER}},
    "alternatives_and_properties": A | {"anyOf": [B, {"properties": {"d": INTEGER}, "required": ["d"]}]},
    "alternatives_in_all_of": DEFS | {"allOf": [A, {"anyOf": [{"$ref": "#/$defs/B"}, {"required": ["b"]}]}]},
}
OPEN_ANYWAY = {
    "any_object": {"type": "object"},
    "true": A | {"additionalProperties": True},
    "schema": A | {"additionalProperties": INTEGER},
    "part_that_is_open": {"allOf": [A | {"additionalProperties": True}, B]},
}


@pytest.mark.parametrize("schema", CLOSED.values(), ids=CLOSED)
def test_object_has_only_named_properties(allows, schema):
    assert allows(OWN, json_schema=schema) and not allows('{"a": 1, "x": 2}', json_schema=schema)
    opened = allows('{"a": 1, "x": 2}', open_objects=True, json_schema=schema)
    assert opened == ("unevaluatedProperties" not in schema)


@pytest.mark.parametrize("schema", CLOSED_TOGETHER.values(), ids=CLOSED_TOGETHER)
def test_combined_object_has_the_properties_of_all_parts(allows, schema):
    assert allows(BOTH, json_schema=schema) and not allows('{"a": 1, "b": 2, "x": 3}', json_schema=schema)
    assert allows('{"a": 1, "b": 2, "x": 3}', open_objects=True, json_schema=schema)
    assert not allows('{"a": "s", "b": 2}', json_schema=schema)


@pytest.mark.parametrize("schema", OPEN_ANYWAY.values(), ids=OPEN_ANYWAY)
def test_object_that_sets_additional_properties_is_open(allows, schema):
    assert allows(OTHER, json_schema=schema)


def test_nested_objects_are_closed(allows):
    tree = DEFS | {"type": "array", "items": {"$ref": "#/$defs/tree"}}
    assert allows('[{"left": {"left": {"v": 1}, "v": 2}}]', json_schema=tree)
    assert not allows('[{"left": {"left": {"x": 1}}}]', json_schema=tree)


@pytest.mark.parametrize(
    "keywords",
    [
        {"format": "color"}, {"format": "idn-email"}, {"format": "regex"}, {"format": 5}, {"uniqueItems": False},
        {"contains": {}, "minContains": 0}, {"minContains": 2}, {"propertyNames": STRING}, {"not": False},
        {"dependentRequired": {}}, {"if": {}}, {"then": False}, {"unevaluatedProperties": True}, {"nullable": False},
        {"required": True}, {"minLength": None}, {"$schema": "x"}, {"x-order": {"not": {}}}, {"additionalItems": False},
        {"errorMessage": [1]}, {"discriminator": {"propertyName": "a"}}, {"unevaluatedItems": {}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_keyword_that_demands_nothing_is_ignored(allows, keywords):
    assert allows('"x"', json_schema=STRING | keywords)


@pytest.mark.parametrize("keywords", [
    {"uniqueItems": True}, {"not": {}}, {"contains": {}}, {"propertyNames": {"pattern": "a"}}, {"if": {}, "then": {}},
])  # fmt: skip
def test_keyword_with_a_demand_that_is_not_supported_is_refused(allows, keywords):
    with pytest.raises(ParameterError):
        allows('"x"', json_schema=keywords)


@pytest.mark.parametrize(
    "schema, right, wrong",
    [
        (INTEGER, ["0", "-12", "9" * 18], ["1" * 20, "-" + "1" * 20]),
        ({"type": "integer", "minimum": 3}, ["3", "9" * 18], ["2", "1" * 20]),
        ({"type": "number"}, ["0", "-1.5", "0.0000000001", "9" * 18], ["1" * 20, "0." + "1" * 11]),
        ({"type": ["number", "null"], "maximum": 5}, ["null", "-1.25", "5"], ["5.5", "-" + "1" * 20]),
        ({"type": "number", "multipleOf": 0.25}, ["1.25"], ["1.3"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "1"], ["0", "1.5"]),
        ({"type": "number", "enum": [1.5, 2]}, ["1.5", "2"], ["3"]),
    ],
    ids=json.dumps,
)
def test_numbers_have_bounded_digits(allows, schema, right, wrong):
    assert all(allows(text, json_schema=schema) for text in right)
    assert not any(allows(text, json_schema=schema) for text in wrong)


# ---- tools


def constraint(engine, parameters, choice, open_objects=False):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    five = None if choice == "required" else ResponseFormat("json_schema", {"const": 5}, "response_format")
    return answer_constraint(five, openai_tools(tools, choice, False), engine.tokenizer, "", open_objects)


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def test_arguments_of_calls_are_closed(engine, allows):
    for choice in ("required", "auto"):
        form = constraint(engine, A, choice)
        assert allows(call(OWN), **form) and not allows(call(OTHER), **form)
    assert allows(call(OTHER), **constraint(engine, A, "required", open_objects=True))


ODD = [
    {"uniqueItems": True}, {"not": {}}, {"type": "nonsense"}, {"type": None}, {"type": []}, {"required": "a"},
    {"properties": [1]}, {"properties": {"a": {"pattern": "(?=x)"}}}, {"properties": {"a": {"$ref": "#/nope"}}},
    {"$ref": "#"}, {"enum": []}, {"properties": {"a": {"enum": [{"x": 1}]}}}, {"properties": {"a": {"minimum": "x"}}},
    {"properties": {"a": {"type": "integer", "minimum": 9, "maximum": 1}}}, {"minProperties": 5, "maxProperties": 1},
    {"properties": {"a": {"type": "string", "const": 5}}}, {"properties": {"a": {"maxLength": -1}}},
    {"properties": {"a": {"allOf": [STRING, INTEGER]}}}, {"properties": {"a": {"oneOf": [{}, {}]}}},
    {"properties": {"a": {"$ref": "https://a.b/c"}}}, {"properties": {"a": {"enum": [2**60 + 1]}}},
    {"properties": {"a": False}, "required": ["a"]}, {"properties": {"a": {"multipleOf": 9999991}}},
]  # fmt: skip


@pytest.mark.parametrize("parameters", ODD, ids=json.dumps)
def test_odd_schema_of_a_tool_is_accepted_with_tool_choice_auto(engine, allows, parameters):
    form = constraint(engine, parameters, "auto")
    assert allows("5", **form) and allows(call("{}"), **form)


KEYWORDS = {
    "type": ["string", "integer", "object", ["null", "array"], "odd", None, 5],
    "properties": [{}, {"a": {"$ref": "#"}}, {"a": {"type": "string"}}, 5, {"a": False}, {"a": {"enum": [1, "x"]}}],
    "required": [[], ["a"], ["a", "b"], "a", [1]],
    "enum": [["a"], [1], [], [None], [[]]],
    "const": ["a", 5, None, 2**70],
    "anyOf": [[], [{"type": "string"}], [{"$ref": "#/$defs/x"}], [True], [False], 5],
    "$ref": ["#", "#/$defs/x", "#/nope", 5],
    "$defs": [{"x": {"type": "string"}}, {"x": {"$ref": "#/$defs/x"}}, 5],
    "items": [{}, True, False, {"type": "odd"}, [STRING]],
    "additionalProperties": [True, False, {"type": "null"}, 5],
    "minimum": [0, -5.5, 2**70, "x"],
    "maximum": [9, -9, None],
    "minLength": [0, 3, -1, 2000, 1.5],
    "maxLength": [0, 5, True],
    "minItems": [0, 2],
    "maxItems": [1, 10**9],
    "format": ["date", "odd", 5],
    "description": ["x", None],
}


@settings(max_examples=150, deadline=None)
@example({"enum": ["a"], "format": "date"})
@example({"type": "string", "maxLength": 0, "format": "date"})
@given(st.fixed_dictionaries({}, optional={key: st.sampled_from(values) for key, values in KEYWORDS.items()}))
def test_plain_schema_compiles(allows, schema):
    if is_plain(schema):
        allows("{}", json_schema=schema)
