"""Structured output: what comes out is of the form that was asked for, and neighbours hear nothing of it."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import captures
import pytest
from checkpoints import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CUDA
from servers import GREEDY, Running, until

from tridecode import Engine, SamplingParams
from tridecode.errors import GenerationError, ParameterError
from tridecode.server.loop import PREPARING
from tridecode.step.decode import KINDS as STEPS
from tridecode.step.dispatch import Dispatcher
from tridecode.step.graphs import DecodePasses
from tridecode.step.prompt_graphs import PromptPasses
from tridecode.text.grammar import Grammar, Grammars, Matcher, exact
from tridecode.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Tell me of a person."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": (PERSON, lambda text: set(json.loads(text)) == {"name", "age"}),
    "json_text": (json.dumps(PERSON), lambda text: 0 <= json.loads(text)["age"] <= 9),
    "regex": (r"[a-z]{3}-\d{2}", re.compile(r"[a-z]{3}-\d{2}").fullmatch),
    "choice": (('a "quoted" one', "bl\u00fce\n", "\\", "\u0001", "\x7f"), lambda text: text in FORMS["choice"][0]),
    "grammar": ('start: "a" "b"+ "c"\n', re.compile("ab+c").fullmatch),
}
KINDS = {"greedy": dict(temperature=0), "sampled": dict(temperature=1.5, seed=4), "logprobs": dict(logprobs=2, seed=5)}


def form(name: str, **more) -> SamplingParams:
    field = "json_schema" if name == "json_text" else name
    return SamplingParams(**{field: FORMS[name][0], "max_tokens": 80} | more)


@pytest.fixture(scope="module")
def bundled():
    # On a GPU texts are those of running alone in this mode only.
    with Engine.load(slots=4, device="auto", batch_invariant=CUDA, speculate="off") as engine:
        yield engine


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_has_the_form_that_was_asked_for(bundled, name, kind):
    result = bundled.generate(CHAT, form(name, **KINDS[kind]))
    assert result.finish_reason == "stop" and FORMS[name][1](result.text), result
    assert {stat.kind for stat in bundled.graph_stats()} >= {("sample" if kind == "sampled" else kind) + "+mask"}


def test_the_end_of_a_form_ends_the_answer_even_where_the_models_own_end_does_not(bundled):
    result = bundled.generate(CHAT, form("regex", ignore_eos=True))
    assert result.finish_reason == "stop" and re.fullmatch(FORMS["regex"][0], result.text)


def test_json_has_no_free_white_space(bundled):
    result = bundled.generate(CHAT, form("json_schema", logit_bias={223: 50.0}, seed=1))  # a space
    found = json.loads(result.text)
    assert result.text == json.dumps(found, ensure_ascii=False)


def test_neighbours_with_and_without_forms_have_the_texts_of_running_alone(bundled):
    several = [
        form("json_schema", seed=1),
        SamplingParams(temperature=0, max_tokens=30),
        form("choice", seed=2),
        SamplingParams(seed=3, max_tokens=30),
        form("regex", seed=6),
        form("json_schema", temperature=0),
    ]
    expected = [bundled.generate(CHAT, params).text for params in several]
    assert [result.text for result in bundled.generate_many([CHAT] * len(several), several)] == expected


def test_a_pass_without_forms_is_what_it_was(bundled):
    before = {(stat.kind, stat.count) for stat in bundled.graph_stats() if "+mask" in stat.kind}
    bundled.generate_many([CHAT] * 3, SamplingParams(temperature=0, max_tokens=9))
    assert before == {(stat.kind, stat.count) for stat in bundled.graph_stats() if "+mask" in stat.kind}


@pytest.fixture
def captured(monkeypatch):
    """An engine whose passes are graphs, or on a CPU what stands for them; in fp32, where rows have no influence."""
    with Engine.load(slots=4, device="auto", dtype="float32", speculate="off") as engine:
        if not CUDA:
            captures.install(monkeypatch)
            dispatcher = Dispatcher("full", (1, 2, 4), (64, 256))
            engine.steps = DecodePasses(engine.model, captures.run, dispatcher)
            engine.prompts = PromptPasses(engine.model, engine.steps, captures.run)
        yield engine


def test_passes_with_masks_are_captured_at_load(captured):
    """Such passes also run other requests, and do not change their texts."""
    at_load, free = captured.steps.captures, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    captured.generate_many([CHAT] * 4, free)
    several = [free, form("json_schema", temperature=0), free, form("choice", temperature=0)]
    expected = [captured.generate(CHAT, params).text for params in several]
    assert FORMS["json_schema"][1](expected[1]) and expected[3] in FORMS["choice"][0]
    for _ in range(2):
        assert [result.text for result in captured.generate_many([CHAT] * 4, several)] == expected
    assert captured.steps.captures == at_load == 2 * 3 * len(STEPS)
    assert {stat.mode for stat in captured.graph_stats() if stat.kind == "greedy+mask"} == {"full"}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_row_that_waits_for_its_mask_holds_nobody_up(bundled, monkeypatch, ahead):
    release, allowed = Event(), Matcher.allowed

    def slow(self):
        if len(masks) > 2:
            release.wait(30)
        masks.append(allowed(self))
        return masks[-1]

    masks = []
    monkeypatch.setattr(Matcher, "allowed", slow)
    monkeypatch.setattr(bundled.scheduler, "_ahead", ahead)
    waiting = bundled.submit(CHAT, form("json_schema", seed=1))
    others = [bundled.submit(CHAT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for _ in range(2)]
    assert [other.result().usage.completion_tokens for other in others] == [30, 30]
    assert waiting.finish_reason is None and waiting.completion_tokens <= 4
    bundled.scheduler.assert_consistent()
    release.set()
    monkeypatch.undo()
    assert waiting.result().text == bundled.generate(CHAT, form("json_schema", seed=1)).text


@pytest.mark.parametrize("most", [3, 5, 7])
@pytest.mark.parametrize("reads", [False, True])
def test_a_mask_that_is_late_for_the_last_token_is_waited_for(bundled, monkeypatch, most, reads):
    """Whatever pass comes meanwhile, of others' rows or of another one's prompt."""
    params = SamplingParams(regex="[a-z 0-9]{40}", temperature=0, max_tokens=most)
    alone = bundled.generate(CHAT, params)
    monkeypatch.setattr(bundled.scheduler, "_ahead", 1)
    held = bundled.submit(CHAT, params)
    rows = bundled.scheduler.queue.rows
    for _ in range(1000):
        bundled.step()
        if rows and rows[0].position == rows[0].end - 1 and rows[0].in_flight:
            break
    other = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    beside = bundled.submit([7, 8, 9, 10, 11, 12] if reads else [7], other, reuse_prefix=False)
    result = held.result()
    assert (result.text, result.finish_reason) == (alone.text, "length") and beside.result().error is None
    bundled.scheduler.assert_consistent()


def test_a_grammar_that_is_prepared_slowly_holds_nobody_up(bundled, monkeypatch):
    release, matcher = Event(), Grammar.matcher
    params = form("json_schema", seed=1)
    expected = bundled.generate(CHAT, params).text
    monkeypatch.setattr(Grammar, "matcher", lambda *args: (release.wait(30), matcher(*args))[1])
    waiting = bundled.submit(CHAT, params)
    other = bundled.submit(CHAT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert other.result().usage.completion_tokens == 30 and waiting.completion_tokens == 0
    release.set()
    assert waiting.result().text == expected


def test_a_request_that_is_cancelled_leaves_no_mask_to_the_next_one(bundled, monkeypatch):
    allowed = Matcher.allowed
    monkeypatch.setattr(Matcher, "allowed", lambda self: (time.sleep(0.05), allowed(self))[1])
    expected = None
    for _ in range(4):
        first = bundled.submit(CHAT, form("regex", seed=1))
        bundled.step()
        first.cancel()
        text = bundled.generate(CHAT, form("choice", seed=1)).text
        expected = expected or text
        assert text == expected and text in FORMS["choice"][0]


def test_a_preempted_request_goes_on_in_its_form():
    with Engine.load(slots=3, device="cpu", max_seq_len=256, kv_tokens=256) as engine:
        alone = [engine.generate(CHAT, form("json_schema", seed=i, max_tokens=150)) for i in range(3)]
        several = [form("json_schema", seed=i, max_tokens=150) for i in range(3)]
        found = engine.generate_many([CHAT] * 3, several)
        assert [result.text for result in found] == [result.text for result in alone]


class Panic(BaseException):
    """As extensions in Rust raise it."""


@pytest.mark.parametrize("method", ["allowed", "accept"])
@pytest.mark.parametrize("error", [GenerationError, MemoryError, Panic])
def test_a_grammar_that_fails_later_ends_its_own_request(bundled, monkeypatch, error, method):
    def fails(*args):
        raise error("too much of it")

    params = form("json_schema", seed=1)
    bundled.generate(CHAT, params)
    monkeypatch.setattr(Matcher, method, fails)
    failing, other = bundled.submit(CHAT, params), bundled.submit(CHAT, SamplingParams(max_tokens=20, temperature=0))
    assert "too much of it" in failing.result().error and other.result().finish_reason in ("stop", "length")
    bundled.scheduler.assert_consistent()


RECURSES = '{"default": {"const": -9223372036854775808}, "$ref": "#/default"}'
REFUSED = {
    # name: (form, code of the error)
    "an_unknown_type": (dict(json_schema={"type": "nonsense"}), "type"),
    "what_is_not_implemented": (dict(json_schema={"not": {}}), "type"),
    "alternatives_that_overlap": (dict(json_schema={"oneOf": [{"type": "string"}, {"const": "a"}]}), "type"),
    "a_reference_to_nothing": (dict(json_schema={"$ref": "#/nope"}), "type"),
    "what_nothing_satisfies": (dict(json_schema={"type": "integer", "minimum": 5, "maximum": 2}), "type"),
    "integers_beyond_floating_point": (dict(json_schema={"enum": [2**53 + 1]}), "range"),
    "neighbours_of_64_bits": (dict(json_schema={"const": 2**63}), "range"),
    "an_integer_that_recurses_for_ever": (dict(json_schema={"const": [-(2**63)]}), "range"),
    "the_same_in_lark": (dict(grammar=f"start: %json {RECURSES}"), "type"),
    "a_bound_of_integers_below_64_bits": (dict(json_schema={"maximum": -1e299}), "range"),
    "a_bound_beyond_floating_point": (dict(json_schema={"minimum": 10**310}), "range"),
    "a_length_beyond_64_bits": (dict(json_schema={"maxLength": 10**30}), "range"),
    "lists_too_deep": (dict(json_schema='{"anyOf": [' * 440 + "{}" + "]}" * 440), "range"),
    "no_number": (dict(json_schema='{"const": NaN}'), "type"),
    "no_finite_number": (dict(json_schema={"const": float("-inf")}), "type"),
    "a_number_too_large_to_be_finite": (dict(json_schema='{"const": 1e999}'), "type"),
    "no_schema": (dict(json_schema=[1]), "type"),
    "no_json": (dict(json_schema="{"), "type"),
    "a_schema_too_deep": (dict(json_schema="[" * 100_000), "type"),
    "a_schema_too_long": (dict(json_schema={"enum": ["x" * 300_000]}), "range"),
    "a_broken_regex": (dict(regex="("), "type"),
    "look_ahead": (dict(regex="(?=a)b"), "type"),
    "broken_lark": (dict(grammar="nonsense"), "type"),
    "no_choices": (dict(choice=[]), "type"),
    "a_choice_of_nothing": (dict(choice=["a", ""]), "type"),
    "two_forms": (dict(choice=["a"], regex="a"), "conflict"),
    "a_number": (dict(regex=5), "type"),
    "a_regex_of_bytes": (dict(regex="a\udcff"), "type"),
    "a_choice_of_half_a_pair": (dict(choice=["\ud800"]), "type"),
    "half_a_pair_in_a_schema": (dict(json_schema={"enum": ["\ud800"]}), "type"),
    "half_a_pair_escaped": (dict(json_schema='{"enum": ["\\ud800"]}'), "type"),
}


@pytest.mark.parametrize("form, code", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(bundled, form, code):
    started = time.monotonic()
    with pytest.raises(ParameterError) as refused:
        bundled.submit(CHAT, SamplingParams(**form))
    assert (refused.value.argument, refused.value.code) == (next(iter(form)), code)
    assert "\n" not in str(refused.value) and time.monotonic() - started < 5


@pytest.mark.parametrize(
    "schema, words",
    [({"type": "nonsense"}, "^json_schema: Invalid type: nonsense$"), ({"oneOf": [{}, {"const": 1}]}, "use anyOf$")],
)
def test_the_library_gives_the_reason(bundled, schema, words):
    with pytest.raises(ParameterError, match=words):
        bundled.submit(CHAT, SamplingParams(json_schema=schema))


def test_bounds_beyond_floating_point_are_drawn_in():
    bounds = {"maximum": 2**63 - 1, "minimum": -(2**63) - 1}
    found = exact(bounds | {"properties": {"enum": {"exclusiveMaximum": 2**53 + 1}}})
    assert (found["maximum"], found["minimum"]) == (2**63 - 1024, 1024 - 2**63)
    assert found["properties"]["enum"] == {"exclusiveMaximum": 2**53}
    assert exact({"maximum": 10**310, "minimum": -1e300}) == {"maximum": 2**63 - 1024, "minimum": 1024 - 2**63}


@pytest.mark.parametrize("most", [2**64, 10**310, 1e300])
def test_numbers_that_hold_nothing_may_be_of_any_size(bundled, most):
    schema = {"type": "integer", "minimum": -(2**63), "maximum": most, "default": 10**400, "examples": [2**64]}
    int(bundled.generate(CHAT, SamplingParams(json_schema=schema, seed=1, max_tokens=40)).text)


def test_whatever_compiling_raises_is_an_error_of_the_parameter(bundled, monkeypatch):
    def panics(*args):
        raise type("Panic", (BaseException,), {})("index out of bounds")

    monkeypatch.setattr(Grammars, "compiled", panics)
    with pytest.raises(ParameterError, match="Panic: index out of bounds") as refused:
        bundled.submit(CHAT, SamplingParams(regex="panic"))
    assert (refused.value.argument, refused.value.code) == ("regex", "type")


DEEP = """
import json
from tridecode import Engine, SamplingParams

def chain(n, name, last):
    return f"start: {name}0\\n" + "".join(f"{name}{i}: {name}{i + 1}\\n" for i in range(n)) + f"{name}{n}: {last}"

def reference(i):
    return {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}, "required": ["x"]}

defs = {f"a{i}": reference(i) for i in range(2000)} | {"a2000": {"type": "null"}}
forms = [
    dict(grammar=chain(8_000, "a", '"x"')),
    dict(grammar=chain(8_000, "A", '"x"')),
    dict(json_schema={"$ref": "#/$defs/a0", "$defs": defs}),
]
with Engine.load(slots=1, device="cpu") as engine:
    for form in forms:
        print(engine.generate("x", SamplingParams(max_tokens=9, temperature=0, **form)).text)
"""


def test_grammars_may_be_as_deep_as_their_length_allows():
    """In a process of its own, which would end."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60)
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("x", "x") and third.startswith('{"x": {"x')


@pytest.fixture
def slow(monkeypatch):
    """Grammars of slow.* that are ready when it is set. The sources that are compiled: slow.begun."""
    made, ready = Grammars.compiled, Event()
    ready.begun = []

    def compiled(self, name, source):
        ready.begun.append(source)
        if source.startswith("slow"):
            assert ready.wait(30)
        return made(self, name, source)

    monkeypatch.setattr(Grammars, "compiled", compiled)
    yield ready
    ready.set()


@pytest.fixture
def grammars(bundled):
    return Grammars(bundled.tokenizer, bundled.config.vocab_size, bundled.config.stop_ids)


def test_a_slow_grammar_is_compiled_once_and_others_beside_it(grammars, slow):
    with ThreadPoolExecutor(3) as pool:
        same = [pool.submit(grammars.of, SamplingParams(regex="slow once")) for _ in range(3)]
        until(lambda: slow.begun)
        assert grammars.of(SamplingParams(regex="quick"))
        slow.set()
        assert len({id(each.result()) for each in same}) == 1
    assert slow.begun == ["slow once", "quick"]


def test_the_vocabulary_is_built_before_the_first_grammar(grammars, monkeypatch):
    grammars.start()
    grammars.wait()
    monkeypatch.setattr(Tokenizer, "token_bytes", None)  # the vocabulary is not read again
    assert grammars.of(SamplingParams(regex="a"))


def test_a_model_whose_texts_do_not_end_has_no_grammars():
    grammars = Grammars(Tokenizer(sentencepiece(), {}), 100, ())
    grammars.start()
    grammars.wait()
    for _ in range(2):
        with pytest.raises(ParameterError, match="no token that ends a text"):
            grammars.of(SamplingParams(regex="a"))


def test_requests_that_wait_for_a_grammar_keep_none_of_a_server_waiting(bundled, slow):
    regex = {"structured_outputs": {"regex": "quick [a-z]"}}
    with Running(bundled) as server, ThreadPoolExecutor(PREPARING) as pool:
        held = [{"structured_outputs": {"regex": f"slow {i}"}} for i in range(PREPARING)]
        several = [pool.submit(server.post, "/v1/chat/completions", GREEDY | one) for one in held]
        until(lambda: len(slow.begun) == PREPARING)
        for beside in ({"max_tokens": 3}, regex):
            assert server.post("/v1/chat/completions", GREEDY | beside).status_code == 200
        assert not any(each.done() for each in several)
        slow.set()
        texts = [each.result().json()["choices"][0]["message"]["content"] for each in several]
    assert texts == [f"slow {i}" for i in range(PREPARING)]


def test_an_engine_without_a_tokenizer_says_so():
    from models import tiny_engine

    with pytest.raises(ParameterError) as refused:
        tiny_engine().submit([1, 2], SamplingParams(json_schema={}))
    assert (refused.value.argument, refused.value.code) == ("json_schema", "conflict")


NAMES = st.sampled_from(["a", "b", "name", "\u00e9t\u00e9", 'quo"te', "two words"])
SIMPLE = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.integers(-9, 9).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 10}),
    st.integers(0, 5).map(lambda low: {"type": "string", "minLength": low, "maxLength": low + 3}),
    st.sampled_from(["[a-c]{2}", "x|yz", r"\d\d-\d\d"]).map(lambda p: {"type": "string", "pattern": f"^({p})$"}),
    st.lists(st.one_of(st.text(max_size=4), st.integers(-(2**53), 2**53), st.booleans()), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
    st.sampled_from(["date", "uuid", "ipv4"]).map(lambda name: {"type": "string", "format": name}),
)


def larger(inner):
    objects = st.dictionaries(NAMES, inner, max_size=3).flatmap(
        lambda fields: st.sets(st.sampled_from(sorted(fields) or ["a"])).map(
            lambda needed: {
                "type": "object",
                "properties": fields,
                "additionalProperties": False,
                "required": sorted(needed & fields.keys()),
            }
        )
    )
    arrays = st.tuples(inner, st.integers(0, 2)).map(
        lambda made: {"type": "array", "items": made[0], "minItems": made[1], "maxItems": made[1] + 1}
    )
    return st.one_of(objects, arrays, st.lists(inner, min_size=1, max_size=2).map(lambda several: {"anyOf": several}))


@settings(max_examples=60, deadline=None)
@given(st.recursive(SIMPLE, larger, max_leaves=5), st.integers(0, 2**32))
def test_whatever_the_schema_the_answer_validates(bundled, schema, seed):
    result = bundled.generate(CHAT, SamplingParams(json_schema=schema, temperature=2.0, seed=seed, max_tokens=400))
    assert result.finish_reason == "stop", result
    pytest.importorskip("jsonschema").validate(json.loads(result.text), schema)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4), st.integers(0, 2**32))
def test_whatever_the_choices_one_of_them_is_the_answer(bundled, choices, seed):
    choices = [choice.encode("utf-8", "replace").decode() for choice in choices]
    result = bundled.generate("x", SamplingParams(choice=choices, temperature=2.0, seed=seed, max_tokens=50))
    assert result.text in choices and result.finish_reason == "stop"


def test_generate_takes_a_schema_from_a_file(tmp_path, capsys):
    from tridecode import cli as commands

    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    options = ["--prompt", "A person", "--json-schema", str(tmp_path / "person.json"), "--quiet", "--seed", "1"]
    assert commands.main(["generate", *options]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"name", "age"}
    (tmp_path / "person.json").write_text('{"type": "nonsense"}')
    assert commands.main(["generate", *options]) == 1
    assert "Invalid type: nonsense" in capsys.readouterr().err
