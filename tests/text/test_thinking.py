"""Tests of thinking: its separation from the answer, the template variable, and earlier turns of a chat."""

import json
import re
import shutil
from pathlib import Path

import pytest
import tokenizers
from chats import as_messages
from checkpoints import CHATML, write_tiny, write_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from tridecode import Engine
from tridecode.cli.chat.local import opens_thinking
from tridecode.errors import PromptError
from tridecode.results import OutputChunk
from tridecode.server.choice import Choice
from tridecode.server.constraints import ResponseFormat, answer_constraint
from tridecode.server.tools.parser import TEXT
from tridecode.server.tools.toolset import openai_tools
from tridecode.text.thinking import ANSWER, OPEN, THINKING, ThinkSplitter, strip_thinking
from tridecode.text.tokenizer import Tokenizer

FRAGMENTS = ["<think>", "</think>", "<", "/", "think", ">", "</", "<thi", " ", "\n", "\r", "a", "é", "</thinking>"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)


def pieces_of(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:])]


def split(pieces, starts_inside=False):
    splitter = ThinkSplitter(starts_inside)
    pairs = [pair for piece in pieces for pair in splitter.feed(piece)] + splitter.finish()
    assert all(text for _, text in pairs)
    assert [kind for kind, _ in pairs] == sorted((kind for kind, _ in pairs), reverse=True), (
        "an answer part precedes a thinking part"
    )
    sides = ("".join(text for kind, text in pairs if kind == side) for side in (THINKING, ANSWER))
    return *sides, splitter


def expected(text, starts_inside):
    """Return (thinking, answer) of the whole text, computed with a regular expression."""
    start = re.match(r"\s*<think>", text)
    if not start and not starts_inside:
        return "", text
    thinking, _, answer = text[start.end() if start else 0 :].partition("</think>")
    return thinking.strip(), answer.lstrip("\n")


@settings(deadline=None, max_examples=500)
@example("  plain\n", [3], False)
@example("\n <think>\nhm\n</think>\n\nyes\n", [9], False)
@example("<think>hm</think>yes", [4], True)
@example("never ends </thi", [14], True)
@example("a</think>b</think>c", [], True)
@example("<think>a</think>\n    indented", [], False)
@given(TEXTS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_split_of_thinking_and_answer(text, cuts, starts_inside):
    assert split(pieces_of(text, cuts), starts_inside)[:2] == expected(text, starts_inside)
    assert split(text, starts_inside)[:2] == expected(text, starts_inside), (
        "the result differs if the text arrives one character at a time"
    )
    assert strip_thinking(text, starts_inside) == expected(text, starts_inside)[1]


def test_text_is_returned_as_soon_as_its_kind_is_certain():
    splitter = ThinkSplitter()
    assert splitter.feed("<thi") == [] and splitter.feed("nk>\n") == []
    assert splitter.thinking and not splitter.closed
    assert splitter.feed("one two ") == [(THINKING, "one two")]
    assert splitter.feed("three </") == [(THINKING, " three")]
    assert splitter.feed("b></think>") == [(THINKING, " </b>")]
    assert splitter.closed and not splitter.thinking
    assert splitter.feed("\n") == []
    assert splitter.feed("\nyes") == [(ANSWER, "yes")]
    assert splitter.feed("\n\n") == [(ANSWER, "\n\n")]
    assert splitter.finish() == []


def test_tokens_and_seconds_of_block():
    now = iter(range(10, 100, 10))
    splitter = ThinkSplitter(clock=lambda: next(now))
    for piece in ("<think>", "a", "", "b"):
        splitter.feed(piece)
    assert splitter.seconds == 10, "the time of an open block was not counted"
    splitter.feed("</think>\n\nyes")
    assert (splitter.tokens, splitter.seconds) == (5, 20)
    splitter.feed(" and no")
    splitter.feed("", tokens=0)
    splitter.finish()
    assert (splitter.tokens, splitter.seconds) == (5, 20)
    splitter = ThinkSplitter(starts_inside=True, clock=lambda: next(now))
    splitter.feed("a")
    splitter.finish()
    assert splitter.seconds == splitter.seconds == 10, "the clock continued after the end of the text"


@pytest.mark.parametrize("text, tokens", [("yes", 0), ("", 0), ("<thi", 0), ("<think>ab", 9), (" <think></think>", 16)])
def test_tokens_of_empty_or_open_block(text, tokens):
    splitter = split(text)[2]
    assert splitter.tokens == tokens and (splitter.seconds > 0) == (tokens > 0)


# A template of a thinking model. It omits the thinking of earlier turns. With enable_thinking=False it writes an
# empty block.
THINKING_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') if m.role == 'assistant' else m.content }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)
FEW = ("--max-tokens", 3, "--temperature", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = write_tiny(tmp_path_factory.mktemp("thinking") / "qwen3", "qwen3")
    write_tokenizer(path, chat_template=THINKING_TEMPLATE)
    return path


@pytest.fixture(scope="module")
def engine(checkpoint):
    return Engine.load(checkpoint, device="cpu")


def test_enable_thinking_reaches_template(engine):
    def text(**options):
        return engine.tokenizer.decode(engine.encode(as_messages("Hello"), **options), skip_special=False)

    assert engine.tokenizer.template_variables == {"enable_thinking"}
    assert text() == text(template_variables={"enable_thinking": True})
    without = {"enable_thinking": False}
    assert text(template_variables=without) == text() + "<think>\n\n</think>\n\n"
    params = engine.default_params(max_tokens=2)
    answered = engine.generate(as_messages("Hello"), params, template_variables=without)
    assert answered.usage.prompt_tokens == len(engine.encode(as_messages("Hello"), without))


@pytest.mark.parametrize("prompt", [as_messages("Hello"), "Hello", [1, 2]], ids=["chat", "text", "ids"])
def test_unknown_template_variable_is_refused(engine, prompt):
    with pytest.raises(PromptError, match="no variable 'thinking'; it reads "):
        engine.generate(prompt, template_variables={"thinking": False})


SPELLINGS = {
    # name: the added tokens of the tokenizer; other tags are written with several tokens
    "tags are tokens": ["<think>", "</think>"],
    "tags are characters": [],
    "tag and newline are a token": ["<think>\n"],
    "newlines are a token": ["<think>", "</think>", "\n\n"],
}
HEADER = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}[assistant] "
GENERATION = {
    # end of the template: the tag with which the prompt ends
    "<think>": "<think>",
    "<think>\n": "<think>",
    "<think>\n\n \t\n\n": "<think>",
    "<think>\n\n</think>\n\n": "</think>",
    "</think>": "</think>",
    "": "",
}


def literal(text: str) -> str:
    """Return a Jinja expression. A newline at the end of a template is dropped."""
    return f"{{{{ {json.dumps(text)} }}}}"


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_text_of_the_template_decides_whether_thinking_is_open(spelling, tmp_path):
    write_tokenizer(tmp_path)
    made = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    state = json.loads(made.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if "think" not in token["content"]]
    made = tokenizers.Tokenizer.from_str(json.dumps(state))
    made.add_tokens([AddedToken(text, normalized=False) for text in SPELLINGS[spelling]])
    for end, tag in GENERATION.items():
        tokenizer = Tokenizer(made, {}, HEADER + literal(end))
        for text in ("Hello", "a <think>", "<think>\n", "</think>"):
            prompt = tokenizer.prepare_chat([{"role": "user", "content": text}])
            assert (tokenizer.decode(prompt.ids), prompt.tag) == (f"[user] {text.strip()}\n[assistant] {end}", tag)
        assert tokenizer.supports_thinking == bool(end)
        assert opens_thinking(tokenizer) == (tag == OPEN)


@pytest.mark.parametrize("text", ["<think>", "a <think>\n", "</think>"])
def test_tag_of_a_user_does_not_open_thinking(text, tmp_path):
    write_tokenizer(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}")
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    for tokens in (state["added_tokens"], []):
        state["added_tokens"] = tokens
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(state)), {}, Tokenizer.load(tmp_path)._template)
        assert tokenizer.prepare_chat([{"role": "user", "content": text}]).tag == ""


def test_server_and_grammar_start_inside_thinking_that_the_template_opens(checkpoint, tmp_path):
    """The tag takes seven tokens here, more than the four that end the prompt."""
    path = Path(shutil.copytree(checkpoint, tmp_path / "copy"))
    write_tokenizer(path, CHATML + literal("<think>\n\n\n"))
    state = json.loads((path / "tokenizer.json").read_text())
    state["added_tokens"] = [token for token in state["added_tokens"] if "think" not in token["content"]]
    (path / "tokenizer.json").write_text(json.dumps(state))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML + literal("<think>\n\n\n")}))
    with Engine.load(path, device="cpu") as engine:
        prompt = engine.prepare([{"role": "user", "content": "Hi"}])
    assert OPEN not in engine.tokenizer.decode(prompt.ids[-4:]), "the tag is not longer than four tokens"
    assert prompt.tag == OPEN
    delta = Choice(engine.tokenizer, prompt.tag).add([OutputChunk(5, "hm</think>yes"), OutputChunk(None, "", "stop")])
    assert (delta.text(THINKING), delta.text(TEXT)) == ("hm", "yes")
    five = ResponseFormat("json_schema", {"enum": [5]}, "response_format")
    form = answer_constraint(five, openai_tools(None, None, None), engine.tokenizer, prompt.tag)
    assert form["grammar"].startswith("start: thinking gap")


def test_earlier_thinking_is_omitted_and_prefix_reused(engine):
    few = engine.default_params(temperature=0, max_tokens=2)
    first = engine.generate(as_messages("Hello"), few, reuse_prefix=False)
    later = as_messages("Hello", "<think>\nquick brown fox\n</think>\n\n", "again")
    assert "quick" not in engine.tokenizer.decode(engine.encode(later))
    later[1]["content"] += "Hello"
    assert engine.generate(later, few).usage.reused_tokens == first.usage.prompt_tokens


def test_think_command_in_chat(piped, checkpoint, engine):
    def prompt_tokens(err):
        return [int(tokens) for tokens in re.findall(r"of (\d+) reused", err)]

    on, off = (len(engine.encode(as_messages("Hello"), {"enable_thinking": think})) for think in (True, False))
    code, _, err = piped("Hello\n/undo\n/think on\nHello\n", "--model", checkpoint, *FEW, "--think", "off")
    assert code == 0 and "thinking is on" in err and prompt_tokens(err) == [off, on]
    code, _, err = piped("/think\n/think off\n/think maybe\nHello\n", "--model", checkpoint, *FEW, "--think", "hide")
    assert "thinking is hide\nthinking is off\n" in err and "not 'maybe'" in err and prompt_tokens(err) == [off]


def test_think_command_without_template_variable(piped, checkpoint, tmp_path):
    path = tmp_path / "chatml"
    path.mkdir()
    for file in checkpoint.iterdir():
        (path / file.name).symlink_to(file)
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    write_tokenizer(path, chat_template=CHATML)
    code, _, err = piped("/help\n/think\n", "--model", path, "--think", "off")
    assert code == 0 and err.endswith("the chat template of this model does not support thinking\n")
    assert "switched off" not in err and "/think" not in err, (
        "/help lists /think although the template does not support it"
    )
    (path / "tokenizer.json").unlink()
    (path / "tokenizer_config.json").unlink()
    write_tokenizer(path, chat_template=CHATML + "{# </think> #}")
    code, _, err = piped("/think\n", "--model", path, "--think", "off")
    assert code == 0 and "thinking cannot be switched off: the chat template has no variable enable_thinking" in err
    assert err.endswith("thinking is on\n")
    code, _, err = piped("/think off\n", "--model", path, "--raw")
    assert code == 0 and "with --raw there is no chat template" in err


def test_interrupted_thinking_is_closed_in_conversation(session):
    chat = session(["<think>\nhm", KeyboardInterrupt()], (["<think>ha"], "length"), ["Yes"], interactive=True)
    for line in ("one", "two", "three"):
        chat.handle(line)
    ended = "<think>\nhm\n</think>\n\n", "<think>ha\n</think>\n\n"
    assert [answer for _, answer in chat.conversation.turns] == [*ended, "Yes"]
    assert chat.conversation.markdown().count("think") == 0
