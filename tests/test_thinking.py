"""Thinking told apart from the answer, however the text is cut into pieces."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tridecode.commands.thinking import ANSWER, THINKING, ThinkSplitter, strip_thinking

FRAGMENTS = ["<think>", "</think>", "<", "/", "think", ">", "</", "<thi", " ", "\n", "\r", "a", "é", "</thinking>"]
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=4), max_size=12).map("".join)


def pieces_of(text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in zip(edges, edges[1:])]


def told_apart(pieces, opened=False):
    splitter = ThinkSplitter(opened)
    pairs = [pair for piece in pieces for pair in splitter.feed(piece)] + splitter.finish()
    assert all(text for _, text in pairs)
    assert [kind for kind, _ in pairs] == sorted((kind for kind, _ in pairs), reverse=True), "thinking comes first"
    sides = ("".join(text for kind, text in pairs if kind == side) for side in (THINKING, ANSWER))
    return *sides, splitter


def expected(text, opened):
    """The same from the whole text, by a regular expression."""
    start = re.match(r"\s*<think>", text)
    if not start and not opened:
        return "", text
    thinking, _, answer = text[start.end() if start else 0 :].partition("</think>")
    return thinking.strip(), answer.lstrip("\n")


@settings(deadline=None, max_examples=500)
@given(TEXTS, st.lists(st.integers(0, 100), max_size=8), st.booleans())
def test_any_split_gives_the_same(text, cuts, opened):
    assert told_apart(pieces_of(text, cuts), opened)[:2] == expected(text, opened)
    assert told_apart(text, opened)[:2] == expected(text, opened), "one character at a time"


@pytest.mark.parametrize("text, opened, thinking, answer", [
    ("", False, "", ""),
    ("plain", False, "", "plain"),
    ("  plain\n", False, "", "  plain\n"),
    ("<think>\nhm\n</think>\n\nyes\n", False, "hm", "yes\n"),
    ("\n <think>hm</think>yes", False, "hm", "yes"),
    ("<think>\n\n</think>\n\nyes", False, "", "yes"),
    ("hm</think>yes", True, "hm", "yes"),
    ("<think>hm</think>yes", True, "hm", "yes"),
    ("<think>never ends", False, "never ends", ""),
    ("never ends </thi", True, "never ends </thi", ""),
    ("yes <think>no</think>", False, "", "yes <think>no</think>"),
    ("a</think>b</think>c", True, "a", "b</think>c"),
    ("hm</think>yes", False, "", "hm</think>yes"),
    ("<thi", False, "", "<thi"),
    ("<thin>x", False, "", "<thin>x"),
    ("<think>a</think>\n    indented", False, "a", "    indented"),
])
def test_cases(text, opened, thinking, answer):
    assert told_apart([text], opened)[:2] == (thinking, answer)
    assert strip_thinking(text, opened) == answer


def test_text_comes_as_soon_as_it_is_certain():
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


def test_tokens_and_seconds_are_those_of_the_block():
    now = iter(range(10, 100, 10))
    splitter = ThinkSplitter(clock=lambda: next(now))
    for piece in ("<think>", "a", "", "b"):
        splitter.feed(piece)
    assert splitter.seconds == 10, "from the first piece, while it goes on"
    splitter.feed("</think>\n\nyes")
    assert (splitter.tokens, splitter.seconds) == (5, 20)
    splitter.feed(" and no")
    splitter.feed("", tokens=0)
    splitter.finish()
    assert (splitter.tokens, splitter.seconds) == (5, 20)


@pytest.mark.parametrize("text, tokens", [("yes", 0), ("", 0), ("<thi", 0), ("<think>ab", 9), (" <think></think>", 16)])
def test_tokens_of_other_texts(text, tokens):
    splitter = told_apart(text)[2]
    assert splitter.tokens == tokens and (splitter.seconds > 0) == (tokens > 0)


def test_a_block_that_never_ends_stops_its_clock():
    now = iter(range(10, 100, 10))
    splitter = ThinkSplitter(opened=True, clock=lambda: next(now))
    splitter.feed("a")
    splitter.finish()
    assert splitter.seconds == splitter.seconds == 10
