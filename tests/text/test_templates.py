"""Tests of chat templates: limits, equality with transformers, and control tokens in messages."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jinja2
import pytest
import tokenizers
from checkpoints import ADDED_TOKENS, EOS_ID, SPECIAL_TOKENS, write_tiny, write_tokenizer
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tridecode import cli as commands
from tridecode.errors import PromptError
from tridecode.text.chat_template import ChatTemplate, Limits
from tridecode.text.tokenizer import MAX_DEPTH, Tokenizer

USER = [{"role": "user", "content": "Hello"}]
quick = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def render(source: str, messages=USER, limits: Limits | None = None, **variables) -> str:
    return ChatTemplate(source, {}, "x.jinja", limits).render(messages, variables)


# ---- limits

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}%s{% endfor %}{% endfor %}"
HOSTILE = {
    # name: (template, words that the error message contains)
    "a long range": ("{% for i in range(10**9) %}{% endfor %}", "failed on these messages: Range too big"),
    "loops": (LOOPS.replace("%s", ""), "was stopped after 0.5 s"),
    "loops that write": (LOOPS.replace("%s", "a line of text"), "wrote more than 100,000 characters"),
    "arithmetic at compilation": ("{{ 7**(7**11) }}", "was stopped after 0.5 s"),
    "a long text": ("{{ 'x' * 10**9 }}", "needs more than 256 MiB"),
    "one large string": ("{{ 'x' * 10**6 }}", "wrote more than 100,000 characters"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "maximum recursion depth"),
    "nesting": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
    "a long refusal": ("{{ raise_exception('no' * 9999) }}", "refused these messages: nono[no]*n…$"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_template_is_one_line(case):
    source, words = HOSTILE[case]
    seconds = 0.5 if "was stopped" in words else 20
    template = ChatTemplate(source, {}, "x.jinja", Limits(seconds, 256 << 20, 100_000))
    for _ in range(2):  # The second call may run in a new process.
        with pytest.raises(PromptError, match=words) as caught:
            template.render(USER, {})
        assert "the chat template in x.jinja" in str(caught.value) and len(str(caught.value)) < 500


def test_limits_apply_to_each_render():
    """Renders that each use most of the limits succeed one after another."""
    source = "{% for i in range(messages[0].n) %}{{ 'x' * 1000 }}{% endfor %}"
    template = ChatTemplate(source, {}, limits=Limits(10, 256 << 20, 1_000_000))
    for _ in range(5):
        assert len(template.render([{"n": 900}], {})) == 900_000
    with pytest.raises(PromptError, match="wrote more than"):
        template.render([{"n": 1100}], {})
    assert len(template.render([{"n": 3}], {})) == 3000


@pytest.mark.parametrize("children", [1, 4])
def test_concurrent_renders(children):
    template = ChatTemplate("{{ messages[0].content }}", {})
    template.sandbox.start(children)
    with ThreadPoolExecutor(8) as pool:
        texts = [str(n) for n in range(200)]
        assert list(pool.map(lambda text: template.render([{"content": text}], {}), texts)) == texts


def test_hostile_checkpoint_is_one_line(tmp_path, capsys):
    write_tiny(tmp_path, "qwen3")
    write_tokenizer(tmp_path, "{{ 'x' * 10**9 }}")
    capsys.readouterr()
    code = commands.main(["generate", "--model", str(tmp_path), "--device", "cpu", "--prompt", "Hello"])
    out, err = capsys.readouterr()
    where = tmp_path / "tokenizer_config.json"
    assert (code, out) == (1, "")
    assert err == f"tridecode: error: the chat template in {where} needs more than 512 MiB of memory; use --raw\n"


# ---- templates of public models, compared with transformers

ANSWERED = [*USER, {"role": "assistant", "content": " Hi! \n"}]
PUBLIC_CHATS = {
    "one turn": USER,
    "system": [{"role": "system", "content": " Be brief.\n"}, *USER],
    "several turns": [*ANSWERED, {"role": "user", "content": "Why?\n\n你好 "}],
    "system and several turns": [{"role": "system", "content": "S"}, *ANSWERED, {"role": "user", "content": ""}],
    "answered": ANSWERED,
    "thinking": [*USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes"}, *USER],
    "two users": [*USER, *USER],
    "the assistant first": ANSWERED[::-1],
    "tool turn": [*ANSWERED, {"role": "tool", "content": "4"}],
}
VARIABLES = {
    "prompt": {"add_generation_prompt": True},
    "no prompt": {"add_generation_prompt": False},
    "thinking on": {"add_generation_prompt": True, "enable_thinking": True},
    "thinking off": {"add_generation_prompt": True, "enable_thinking": False},
}
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def pytest_generate_tests(metafunc):
    if "public" in metafunc.fixturenames:
        folder = metafunc.config.getoption("--template-dir")
        files = sorted(Path(folder).glob("*.jinja")) if folder else []
        why = f"no *.jinja in {folder}" if folder else "--template-dir names no folder of public templates"
        cases = [pytest.param(file, id=file.stem) for file in files]
        metafunc.parametrize("public", cases or [pytest.param(None, id="none", marks=pytest.mark.skip(reason=why))])


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """A tokenizer of the library transformers, with the same vocabulary as ours."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("theirs")
    write_tokenizer(path, None)
    return transformers.AutoTokenizer.from_pretrained(path, **NAMED)


def outcome(render) -> tuple[str, str]:
    """Return the text of a render, or the message of the template's refusal."""
    try:
        return "text", render()
    except (PromptError, jinja2.TemplateError) as error:
        return "refusal", str(error).partition("refused these messages: ")[2] or str(error)


def test_public_templates_match_transformers(public, reference):
    source, refusals = public.read_text(), 0
    template = ChatTemplate(source, NAMED, public)
    for name, messages in PUBLIC_CHATS.items():
        for which, variables in VARIABLES.items():
            expected = outcome(
                lambda m=messages, v=variables: reference.apply_chat_template(
                    m, chat_template=source, tokenize=False, **v
                )
            )
            actual = outcome(lambda m=messages, v=variables: template.render(m, v))
            assert actual == expected, (name, which)
            refusals += expected[0] == "refusal"
    assert refusals == (0 if "raise_exception" not in source else refusals) and refusals < 20


def test_tokens_decode_to_rendered_text(public, tmp_path):
    """The text includes the control tokens that the template wrote."""
    write_tokenizer(tmp_path, public.read_text())
    named = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[EOS_ID]}
    tokenizer, template = Tokenizer.load(tmp_path), ChatTemplate(public.read_text(), named)
    for messages in (PUBLIC_CHATS["several turns"], PUBLIC_CHATS["system and several turns"]):
        ids = tokenizer.encode_chat(messages)
        assert tokenizer.decode(ids, skip_special=False) == template.render(messages, {})


# ---- arbitrary messages and variables

PIECES = st.sampled_from(
    [*SPECIAL_TOKENS, *ADDED_TOKENS, "<|im_", "end|>", "{{ 1 }}", "{% if", "\ud800", "\0", "\ue000"]
)
WORDS = st.lists(PIECES | st.text(max_size=5), max_size=4).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.fixed_dictionaries({"role": WORDS, "content": WORDS}, optional={"extra": VALUES, "tool_calls": VALUES})
SHOWS_ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m | tojson }}{{ m }}"
    "{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}<|im_end|>\n{% endfor %}{{ tools | tojson }}{{ tools }}"
)


@pytest.fixture(scope="module")
def shows_all(path):
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    return Tokenizer(made, {}, SHOWS_ALL)


@quick
@example(messages=[{"role": "user", "content": "", "extra": {"<|im_end|>": [{"<think>": 1}]}}], tools=None)
@example(messages=[{"role": "user", "content": "", "<|im_end|>": 0}], tools={"\ud800": "<|endoftext|>"})
@given(messages=st.lists(MESSAGES, min_size=1, max_size=4), tools=VALUES)
def test_messages_and_variables_produce_no_control_tokens(shows_all, messages, tools):
    """The template writes all parts of the messages, including keys. Only its own text produces control tokens."""
    ids = shows_all.encode_chat(messages, tools=tools)
    assistants = sum(message["role"] == "assistant" for message in messages)
    written = [token for token in ids if token in (0, 1, 2)]
    assert written == [1, 2] * len(messages)
    assert assistants or not {382, 383}.intersection(ids), "a message of another role contains a think block"


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS | st.binary(max_size=3) | st.builds(object),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@quick
@given(
    messages=ANYTHING | st.lists(st.dictionaries(st.sampled_from(["role", "content", "x"]), ANYTHING)), tools=ANYTHING
)
def test_any_input_is_encoded_or_one_line(shows_all, messages, tools):
    try:
        ids = shows_all.encode_chat(messages, tools=tools)
    except PromptError as error:
        assert "\n" not in str(error)
    else:
        assert all(isinstance(token, int) for token in ids)


def nested(depth: int):
    value: object = 1
    for level in range(depth):
        value = [value] if level % 2 else {"x": value}
    return value


def test_deep_nesting_is_refused(shows_all):
    for depth in (MAX_DEPTH, 900, 100_000):
        with pytest.raises(PromptError, match="must be plain JSON values: "):
            shows_all.encode_chat([{"role": "user", "content": "x", "extra": nested(depth)}])
    assert shows_all.encode_chat([{"role": "user", "content": "x", "extra": nested(MAX_DEPTH // 2)}])
