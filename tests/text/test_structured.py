"""Tests of structured output: formats, masks, other requests in the same pass, and refused grammars."""

import json
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import captures
import numpy as np
import pytest
from checkpoints import sentencepiece, write_tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from models import CUDA
from servers import GREEDY, Running, until

from tridecode import Engine, SamplingParams
from tridecode.errors import EngineClosed, GenerationError, ParameterError
from tridecode.server.loop import PREPARING
from tridecode.step.decode import KINDS as STEPS
from tridecode.step.dispatch import Dispatcher
from tridecode.step.graphs import DecodePasses
from tridecode.step.prompt_graphs import PromptPasses
from tridecode.text import grammar
from tridecode.text.grammar import Grammar, Grammars, Matcher, exact_schema
from tridecode.text.sandbox import Sandbox
from tridecode.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Tell me of a person."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMATS = {
    "json_schema": (PERSON, lambda text: set(json.loads(text)) == {"name", "age"}),
    "json_text": (json.dumps(PERSON), lambda text: 0 <= json.loads(text)["age"] <= 9),
    "regex": (r"[a-z]{3}-\d{2}", re.compile(r"[a-z]{3}-\d{2}").fullmatch),
    "choice": (('a "quoted" one', "bl\u00fce\n", "\\", "\u0001", "\x7f"), lambda text: text in FORMATS["choice"][0]),
    "grammar": ('start: "a" "b"+ "c"\n', re.compile("ab+c").fullmatch),
}
KINDS = {"greedy": dict(temperature=0), "sampled": dict(temperature=1.5, seed=4), "logprobs": dict(logprobs=2, seed=5)}


def params_with(name: str, **more) -> SamplingParams:
    """Return parameters with a format of FORMATS."""
    field = "json_schema" if name == "json_text" else name
    return SamplingParams(**{field: FORMATS[name][0], "max_tokens": 80} | more)


@pytest.fixture(scope="module")
def bundled():
    # On a GPU, a request gets the same text alone and in a batch only in batch-invariant mode.
    with Engine.load(slots=4, device="auto", batch_invariant=CUDA, speculate="off") as engine:
        yield engine


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_answer_has_requested_format(bundled, name, kind):
    result = bundled.generate(CHAT, params_with(name, **KINDS[kind]))
    assert result.finish_reason == "stop" and FORMATS[name][1](result.text), result
    assert {stat.kind for stat in bundled.graph_stats()} >= {("sample" if kind == "sampled" else kind) + "+mask"}


def test_models_with_experts_have_formats(tmp_path):
    """Concurrent requests, with and without formats, give the same texts as alone."""
    several = [
        params_with("json_schema", seed=1),
        SamplingParams(temperature=0, max_tokens=30),
        params_with("choice", seed=2),
        params_with("regex", temperature=0),
    ]
    with Engine.load(write_tiny(tmp_path, "qwen3-moe"), slots=4, batch_invariant=CUDA, speculate="off") as engine:
        alone = [engine.generate(CHAT, params).text for params in several]
        assert [result.text for result in engine.generate_many([CHAT] * len(several), several)] == alone
    for name, text in (("json_schema", alone[0]), ("choice", alone[2]), ("regex", alone[3])):
        assert FORMATS[name][1](text), text


def test_end_of_format_ends_answer_with_ignore_eos(bundled):
    result = bundled.generate(CHAT, params_with("regex", ignore_eos=True))
    assert result.finish_reason == "stop" and re.fullmatch(FORMATS["regex"][0], result.text)


def test_json_has_fixed_white_space(bundled):
    # Token 223 is a space. The bias makes it likely.
    result = bundled.generate(CHAT, params_with("json_schema", logit_bias={223: 50.0}, seed=1))
    value = json.loads(result.text)
    assert result.text == json.dumps(value, ensure_ascii=False)


def test_concurrent_requests_give_the_same_texts_as_alone(bundled):
    several = [
        params_with("json_schema", seed=1),
        SamplingParams(temperature=0, max_tokens=30),
        params_with("choice", seed=2),
        SamplingParams(seed=3, max_tokens=30),
        params_with("regex", seed=6),
        params_with("json_schema", temperature=0),
    ]
    expected = [bundled.generate(CHAT, params).text for params in several]
    assert [result.text for result in bundled.generate_many([CHAT] * len(several), several)] == expected


def test_pass_without_formats_uses_no_mask(bundled):
    before = {(stat.kind, stat.count) for stat in bundled.graph_stats() if "+mask" in stat.kind}
    bundled.generate_many([CHAT] * 3, SamplingParams(temperature=0, max_tokens=9))
    assert before == {(stat.kind, stat.count) for stat in bundled.graph_stats() if "+mask" in stat.kind}


@pytest.fixture
def captured(monkeypatch):
    """An engine that captures its passes as graphs, or as recordings on a CPU.

    It computes in fp32, so that the number of rows in a pass does not change any token.
    """
    with Engine.load(slots=4, device="auto", dtype="float32", speculate="off") as engine:
        if not CUDA:
            captures.install(monkeypatch)
            dispatcher = Dispatcher("full", (1, 2, 4), (64, 256))
            engine.steps = DecodePasses(engine.model, captures.run, dispatcher)
            engine.prompts = PromptPasses(engine.model, engine.steps, captures.run)
        yield engine


def test_passes_with_masks_are_captured_at_load(captured):
    """Passes with masks also run requests without a format, and do not change their texts."""
    at_load, free = captured.steps.captures, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    captured.generate_many([CHAT] * 4, free)
    several = [free, params_with("json_schema", temperature=0), free, params_with("choice", temperature=0)]
    expected = [captured.generate(CHAT, params).text for params in several]
    assert FORMATS["json_schema"][1](expected[1]) and expected[3] in FORMATS["choice"][0]
    for _ in range(2):
        assert [result.text for result in captured.generate_many([CHAT] * 4, several)] == expected
    assert captured.steps.captures == at_load == 2 * 3 * len(STEPS)
    assert {stat.mode for stat in captured.graph_stats() if stat.kind == "greedy+mask"} == {"full"}


@pytest.mark.parametrize("lookahead", [0, 1])
def test_row_that_waits_for_its_mask_does_not_delay_others(bundled, monkeypatch, lookahead):
    release, allowed = Event(), Matcher.allowed

    def slow(self):
        if len(masks) > 2:
            release.wait(30)
        masks.append(allowed(self))
        return masks[-1]

    masks = []
    monkeypatch.setattr(Matcher, "allowed", slow)
    monkeypatch.setattr(bundled.scheduler, "lookahead", lookahead)
    waiting = bundled.submit(CHAT, params_with("json_schema", seed=1))
    others = [bundled.submit(CHAT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)) for _ in range(2)]
    assert [other.result().usage.completion_tokens for other in others] == [30, 30]
    assert waiting.finish_reason is None and waiting.completion_tokens <= 4
    bundled.scheduler.assert_consistent()
    release.set()
    monkeypatch.undo()
    assert waiting.result().text == bundled.generate(CHAT, params_with("json_schema", seed=1)).text


@pytest.mark.parametrize("max_tokens", [3, 5, 7])
@pytest.mark.parametrize("long_prompt", [False, True])
def test_late_mask_of_last_token_is_awaited(bundled, monkeypatch, max_tokens, long_prompt):
    """The next pass contains either a row of another request or its prompt."""
    params = SamplingParams(regex="[a-z 0-9]{40}", temperature=0, max_tokens=max_tokens)
    alone = bundled.generate(CHAT, params)
    monkeypatch.setattr(bundled.scheduler, "lookahead", 1)
    waiting = bundled.submit(CHAT, params)
    rows = bundled.scheduler.queue.rows
    for _ in range(1000):
        bundled.step()
        if rows and rows[0].position == rows[0].end - 1 and rows[0].in_flight:
            break
    other = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    second = bundled.submit([7, 8, 9, 10, 11, 12] if long_prompt else [7], other, reuse_prefix=False)
    result = waiting.result()
    assert (result.text, result.finish_reason) == (alone.text, "length") and second.result().error is None
    bundled.scheduler.assert_consistent()


def test_slow_matcher_does_not_delay_others(bundled, monkeypatch):
    release, matcher = Event(), Grammar.matcher
    params = params_with("json_schema", seed=1)
    expected = bundled.generate(CHAT, params).text
    monkeypatch.setattr(Grammar, "matcher", lambda *args: (release.wait(30), matcher(*args))[1])
    waiting = bundled.submit(CHAT, params)
    other = bundled.submit(CHAT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    assert other.result().usage.completion_tokens == 30 and waiting.completion_tokens == 0
    release.set()
    assert waiting.result().text == expected


def test_two_slow_matchers_do_not_delay_the_masks_of_others(bundled, monkeypatch):
    release, begun, matcher = Event(), [], Grammar.matcher

    def slow(*args):
        if len(begun) < 2:
            begun.append(args)
            release.wait(30)
        return matcher(*args)

    params = params_with("regex", seed=1)
    expected = bundled.generate(CHAT, params).text
    monkeypatch.setattr(Grammar, "matcher", slow)
    waiting = [bundled.submit(CHAT, params) for _ in range(2)]
    while len(begun) < 2:
        bundled.step()
    other = bundled.submit(CHAT, params)
    assert other.result().text == expected and not any(request.completion_tokens for request in waiting)
    release.set()
    assert [request.result().text for request in waiting] == [expected] * 2


def test_mask_of_cancelled_request_does_not_affect_next_request(bundled, monkeypatch):
    allowed = Matcher.allowed
    monkeypatch.setattr(Matcher, "allowed", lambda self: (time.sleep(0.05), allowed(self))[1])
    expected = None
    for _ in range(4):
        first = bundled.submit(CHAT, params_with("regex", seed=1))
        bundled.step()
        first.cancel()
        text = bundled.generate(CHAT, params_with("choice", seed=1)).text
        expected = expected or text
        assert text == expected and text in FORMATS["choice"][0]


def test_preempted_request_keeps_its_format():
    with Engine.load(slots=3, device="cpu", max_seq_len=256, kv_tokens=256) as engine:
        alone = [engine.generate(CHAT, params_with("json_schema", seed=i, max_tokens=150)) for i in range(3)]
        several = [params_with("json_schema", seed=i, max_tokens=150) for i in range(3)]
        results = engine.generate_many([CHAT] * 3, several)
        assert [result.text for result in results] == [result.text for result in alone]


class Panic(BaseException):
    """An exception that is not an Exception, like a panic of an extension in Rust."""


@pytest.mark.parametrize("method", ["allowed", "accept"])
@pytest.mark.parametrize("error", [GenerationError, MemoryError, Panic])
def test_failed_matcher_ends_only_its_request(bundled, monkeypatch, error, method):
    def fails(*args):
        raise error("too many states")

    params = params_with("json_schema", seed=1)
    bundled.generate(CHAT, params)
    monkeypatch.setattr(Matcher, method, fails)
    failing, other = bundled.submit(CHAT, params), bundled.submit(CHAT, SamplingParams(max_tokens=20, temperature=0))
    assert "too many states" in failing.result().error and other.result().finish_reason in ("stop", "length")
    bundled.scheduler.assert_consistent()


RECURSES = '{"default": {"const": -9223372036854775808}, "$ref": "#/default"}'
REFUSED = {
    # name: (response format, code of the error)
    "unknown_type": (dict(json_schema={"type": "nonsense"}), "type"),
    "unsupported_keyword": (dict(json_schema={"not": {}}), "type"),
    "overlapping_alternatives": (dict(json_schema={"oneOf": [{"type": "string"}, {"const": "a"}]}), "type"),
    "missing_reference": (dict(json_schema={"$ref": "#/nope"}), "type"),
    "unsatisfiable": (dict(json_schema={"type": "integer", "minimum": 5, "maximum": 2}), "type"),
    "integer_of_54_bits": (dict(json_schema={"enum": [2**53 + 1]}), "range"),
    "constant_of_64_bits": (dict(json_schema={"const": 2**63}), "range"),
    "integer_that_causes_recursion": (dict(json_schema={"const": [-(2**63)]}), "range"),
    "such_integer_in_lark": (dict(grammar=f"start: %json {RECURSES}"), "type"),
    "maximum_below_64_bits": (dict(json_schema={"maximum": -1e299}), "range"),
    "minimum_above_doubles": (dict(json_schema={"minimum": 10**310}), "range"),
    "length_above_64_bits": (dict(json_schema={"maxLength": 10**30}), "range"),
    "deep_nesting": (dict(json_schema='{"anyOf": [' * 100 + "{}" + "]}" * 100), "range"),
    "deep_constant": (dict(json_schema='{"const": ' + "[" * 200 + "]" * 200 + "}"), "range"),
    "nan": (dict(json_schema='{"const": NaN}'), "type"),
    "infinity": (dict(json_schema={"const": float("-inf")}), "type"),
    "number_read_as_infinity": (dict(json_schema='{"const": 1e999}'), "type"),
    "schema_is_a_list": (dict(json_schema=[1]), "type"),
    "invalid_json": (dict(json_schema="{"), "type"),
    "very_deep_nesting": (dict(json_schema="[" * 100_000), "type"),
    "long_schema": (dict(json_schema={"enum": ["x" * 300_000]}), "range"),
    "invalid_regex": (dict(regex="("), "type"),
    "look_ahead": (dict(regex="(?=a)b"), "type"),
    "invalid_lark": (dict(grammar="nonsense"), "type"),
    "no_choices": (dict(choice=[]), "type"),
    "empty_choice": (dict(choice=["a", ""]), "type"),
    "two_formats": (dict(choice=["a"], regex="a"), "conflict"),
    "regex_is_a_number": (dict(regex=5), "type"),
    "surrogate_in_regex": (dict(regex="a\udcff"), "type"),
    "surrogate_in_choice": (dict(choice=["\ud800"]), "type"),
    "surrogate_in_schema": (dict(json_schema={"enum": ["\ud800"]}), "type"),
    "escaped_surrogate_in_schema": (dict(json_schema='{"enum": ["\\ud800"]}'), "type"),
}


@pytest.mark.parametrize("fields, code", REFUSED.values(), ids=REFUSED)
def test_unsupported_format_is_refused(bundled, fields, code):
    started = time.monotonic()
    with pytest.raises(ParameterError) as refused:
        bundled.submit(CHAT, SamplingParams(**fields))
    assert (refused.value.argument, refused.value.code) == (next(iter(fields)), code)
    assert "\n" not in str(refused.value) and time.monotonic() - started < 15


ERRORS = {
    "schema": (dict(json_schema={"type": "nonsense"}), "^json_schema: Invalid type: nonsense$"),
    "alternatives": (dict(json_schema={"oneOf": [{}, {"const": 1}]}), "use anyOf$"),
    "panic": (
        dict(grammar="start: p::0x1\np::_: p::incr(_) p::incr(_) | p::decr(_)"),
        "^grammar: panic: assertion failed: .{1,60}$",
    ),
    "limit of a mask": (dict(regex="((a{100}){100}){100}"), "^regex: lexer error: too many expressions constructed$"),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_error_of_llguidance_is_shown(bundled, case):
    fields, words = ERRORS[case]
    with pytest.raises(ParameterError, match=words):
        bundled.submit(CHAT, SamplingParams(**fields))


def test_unrepresentable_bounds_are_tightened():
    bounds = {"maximum": 2**63 - 1, "minimum": -(2**63) - 1}
    schema = exact_schema(bounds | {"properties": {"enum": {"exclusiveMaximum": 2**53 + 1}}})
    assert (schema["maximum"], schema["minimum"]) == (2**63 - 1024, 1024 - 2**63)
    assert schema["properties"]["enum"] == {"exclusiveMaximum": 2**53}
    assert exact_schema({"maximum": 10**310, "minimum": -1e300}) == {"maximum": 2**63 - 1024, "minimum": 1024 - 2**63}


@pytest.mark.parametrize("maximum", [2**64, 10**310, 1e300])
def test_bounds_and_annotations_may_be_large(bundled, maximum):
    schema = {"type": "integer", "minimum": -(2**63), "maximum": maximum, "default": 10**400, "examples": [2**64]}
    int(bundled.generate(CHAT, SamplingParams(json_schema=schema, seed=1, max_tokens=40)).text)


def test_panic_of_compilation_is_a_parameter_error(bundled, monkeypatch):
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
formats = [
    dict(grammar=chain(8_000, "a", '"x"')),
    dict(grammar=chain(8_000, "A", '"x"')),
    dict(json_schema={"$ref": "#/$defs/a0", "$defs": defs}),
]
with Engine.load(slots=1, device="cpu") as engine:
    for fields in formats:
        print(engine.generate("x", SamplingParams(max_tokens=9, temperature=0, **fields)).text)
"""


def test_deep_grammars_are_compiled():
    """They run in another process, because a stack overflow would end it."""
    done = subprocess.run([sys.executable, "-c", DEEP], capture_output=True, text=True, timeout=60)
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("x", "x") and third.startswith('{"x": {"x')


@pytest.fixture
def slow(monkeypatch):
    """An Event. Grammars whose source begins with "slow" are not ready before it is set.

    Its attribute `sources` lists the sources whose compilation has started.
    """
    made, ready = Grammars.compiled, Event()
    ready.sources = []

    def compiled(self, name, source):
        ready.sources.append(source)
        if source.startswith("slow"):
            assert ready.wait(30)
        return made(self, name, source)

    monkeypatch.setattr(Grammars, "compiled", compiled)
    yield ready
    ready.set()


@pytest.fixture
def grammars(bundled):
    return Grammars(bundled.tokenizer, bundled.config.vocab_size, bundled.config.stop_ids)


def test_slow_grammar_is_compiled_once_and_does_not_delay_others(grammars, slow):
    with ThreadPoolExecutor(3) as pool:
        same = [pool.submit(grammars.of, SamplingParams(regex="slow once")) for _ in range(3)]
        until(lambda: slow.sources)
        assert grammars.of(SamplingParams(regex="quick"))
        slow.set()
        assert len({id(each.result()) for each in same}) == 1
    assert slow.sources == ["slow once", "quick"]


ENDLESS = "start: p::0x0\np::_: p::incr(_)\n"
COSTLY = {
    # name: (response format, limit that it exceeds)
    "time": (dict(grammar=ENDLESS), dict(SECONDS=1.0)),
    "memory": (dict(json_schema={"type": "integer", "multipleOf": 9999991}), dict(MEMORY=16 << 20)),
    "memory in Lark": (dict(grammar='start: %json {"type": "integer", "multipleOf": 9999991}'), dict(MEMORY=16 << 20)),
}  # fmt: skip


@pytest.mark.parametrize("case", COSTLY)
def test_costly_grammar_is_refused_and_remembered(bundled, monkeypatch, case):
    fields, limits = COSTLY[case]
    for name, value in limits.items():
        monkeypatch.setattr(grammar, name, value)
    grammars = Grammars(bundled.tokenizer, bundled.config.vocab_size, bundled.config.stop_ids)
    grammars.start()
    grammars.wait()
    (pid,) = grammars._sandbox.pids
    with pytest.raises(ParameterError, match="simplify it") as refused:
        grammars.of(SamplingParams(**fields))
    assert (refused.value.argument, refused.value.code) == (next(iter(fields)), "range")
    assert not Path(f"/proc/{pid}").exists(), "the child process still runs"
    with monkeypatch.context() as patch:
        patch.setattr(Sandbox, "call", None)  # The second refusal needs no child process.
        with pytest.raises(ParameterError, match="simplify it"):
            grammars.of(SamplingParams(**fields))
    assert grammars.of(SamplingParams(regex="a"))
    (refusal,) = [one.exception() for one in grammars._grammars.values() if one.exception()]
    refusal.until = 0.0
    monkeypatch.setattr(Sandbox, "call", lambda *args: ("compiled again", 0))
    with pytest.raises(ParameterError, match="compiled again"):
        grammars.of(SamplingParams(**fields))
    grammars.close()


def test_server_refuses_costly_grammar(bundled, monkeypatch):
    monkeypatch.setattr(grammar, "CPU_SECONDS", 1)
    with Running(bundled) as server:
        answer = server.post("/v1/chat/completions", GREEDY | {"structured_outputs": {"grammar": ENDLESS}})
    assert answer.status_code == 400 and "simplify it" in answer.json()["error"]["message"]


def test_failed_start_of_child_is_not_remembered(grammars, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/python")
        with pytest.raises(ParameterError, match="no process can be started"):
            grammars.of(SamplingParams(regex="a"))
    assert grammars.of(SamplingParams(regex="a"))


def test_close_ends_compilations(grammars):
    with ThreadPoolExecutor(grammar.MAX_CHILDREN + 1) as pool:
        sources = [ENDLESS + "\n" * i for i in range(grammar.MAX_CHILDREN + 1)]  # The last waits for a child process.
        calls = [pool.submit(grammars.of, SamplingParams(grammar=source)) for source in sources]
        until(lambda: len(grammars._sandbox.pids) == grammar.MAX_CHILDREN)
        pids = grammars._sandbox.pids
        grammars.close()
        for call in calls:
            with pytest.raises(EngineClosed):
                call.result(5)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    with pytest.raises(EngineClosed):
        grammars.of(SamplingParams(regex="a"))


def test_large_grammars_leave_the_cache(grammars, monkeypatch):
    large = [SamplingParams(json_schema={"type": "integer", "multipleOf": 9973 + i}) for i in range(3)]
    (size,) = {grammars.of(one).size >> 20 for one in large[:1]}
    monkeypatch.setattr(grammar, "CACHE_BYTES", (2 * size + 1) << 20)
    for one in large:
        grammars.of(one)
    assert size and [key for key in grammars._grammars] == [one.structure for one in large[1:]]


def test_special_tokens_and_ids_in_grammars(bundled):
    """The trial compilation knows the special tokens, but not the other tokens."""
    end = bundled.config.stop_ids[0]
    name = bundled.tokenizer.token_bytes(end).decode()
    for source in (f"start: /a+/ {name}", f"start: <[{bundled.tokenizer.encode('a')[0]}]>"):
        assert bundled.generate("x", SamplingParams(grammar=source, max_tokens=20)).text.startswith("a")
    with pytest.raises(ParameterError, match="grammar:"):
        bundled.submit("x", SamplingParams(grammar="start: <|no_such_token|>"))


def test_text_that_a_lossy_tokenizer_changes_is_forced():
    """A grammar that forces such a text does not use the tokenizer's ids."""
    tokenizer = Tokenizer(sentencepiece(), {})
    grammars = Grammars(tokenizer, tokenizer.vocab_size, (2,))
    matcher = grammars.of(SamplingParams(choice=("  hello  world",))).matcher(())
    text = b""
    while not text.endswith(b"world"):
        allowed = np.unpackbits(matcher.allowed().view(np.uint8), bitorder="little").nonzero()[0]
        text += tokenizer.token_bytes(int(allowed[0]))
        matcher.accept(int(allowed[0]))
    assert text == b"  hello  world"


def test_start_builds_vocabulary(grammars, monkeypatch):
    grammars.start()
    grammars.wait()
    monkeypatch.setattr(Tokenizer, "token_bytes", None)  # The vocabulary must not be read again.
    assert grammars.of(SamplingParams(regex="a"))


def test_model_without_end_token_has_no_grammars():
    grammars = Grammars(Tokenizer(sentencepiece(), {}), 100, ())
    grammars.start()
    grammars.wait()
    for _ in range(2):
        with pytest.raises(ParameterError, match="token that ends a text"):
            grammars.of(SamplingParams(regex="a"))


def test_requests_that_wait_for_grammars_do_not_delay_others(bundled, slow):
    regex = {"structured_outputs": {"regex": "quick [a-z]"}}
    with Running(bundled) as server, ThreadPoolExecutor(PREPARING) as pool:
        delayed = [{"structured_outputs": {"regex": f"slow {i}"}} for i in range(PREPARING)]
        several = [pool.submit(server.post, "/v1/chat/completions", GREEDY | one) for one in delayed]
        until(lambda: len(slow.sources) == PREPARING)
        for body in ({"max_tokens": 3}, regex):
            assert server.post("/v1/chat/completions", GREEDY | body).status_code == 200
        assert not any(each.done() for each in several)
        slow.set()
        texts = [each.result().json()["choices"][0]["message"]["content"] for each in several]
    assert texts == [f"slow {i}" for i in range(PREPARING)]


def test_format_without_tokenizer_is_refused():
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
def test_answer_validates_against_any_schema(bundled, schema, seed):
    result = bundled.generate(CHAT, SamplingParams(json_schema=schema, temperature=2.0, seed=seed, max_tokens=400))
    assert result.finish_reason == "stop", result
    pytest.importorskip("jsonschema").validate(json.loads(result.text), schema)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=8), min_size=1, max_size=4), st.integers(0, 2**32))
def test_answer_is_one_of_any_choices(bundled, choices, seed):
    choices = [choice.encode("utf-8", "replace").decode() for choice in choices]
    result = bundled.generate("x", SamplingParams(choice=choices, temperature=2.0, seed=seed, max_tokens=50))
    assert result.text in choices and result.finish_reason == "stop"


def test_generate_reads_schema_from_file(tmp_path, capsys):
    from tridecode import cli as commands

    (tmp_path / "person.json").write_text(json.dumps(PERSON))
    options = ["--prompt", "A person", "--json-schema", str(tmp_path / "person.json"), "--quiet", "--seed", "1"]
    assert commands.main(["generate", *options]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"name", "age"}
    (tmp_path / "person.json").write_text('{"type": "nonsense"}')
    assert commands.main(["generate", *options]) == 1
    assert "Invalid type: nonsense" in capsys.readouterr().err
