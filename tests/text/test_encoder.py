"""Tests of encoding by tokenizers whose time or memory may be unbounded, and of the search for control tokens."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from checkpoints import sentencepiece, write_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tridecode.checkpoint.hub import BUNDLED
from tridecode.errors import CheckpointError, PromptError
from tridecode.text import encoder
from tridecode.text.encoder import Encoder
from tridecode.text.token_set import TokenSet
from tridecode.text.tokenizer import Tokenizer

BACKTRACKS = {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False}
RUNAWAY = "a" * 60 + "b"
DOUBLES = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
CHAT = [{"role": "user", "content": RUNAWAY}]


@pytest.fixture
def changed(tmp_path):
    """A function that writes the tiny tokenizer with changed parts of tokenizer.json, and returns its directory."""

    def changed(**parts) -> Path:
        write_tokenizer(tmp_path)
        state = json.loads((tmp_path / "tokenizer.json").read_text()) | parts
        (tmp_path / "tokenizer.json").write_text(json.dumps(state))
        return tmp_path

    return changed


# ---- tokenizers that run in this process


def split(pattern: str) -> dict:
    return BACKTRACKS | {"pattern": {"Regex": pattern}}


QWEN = next(p for p in encoder.KNOWN_PATTERNS if r"\p{N}| ?" in p and "{Lu}" not in p)
HARMLESS = {
    "byte-level": {},
    "qwen": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split(QWEN)]}},
    "a replacement of equal length": {"normalizer": DOUBLES | {"content": "b"}},
    "NFC": {"normalizer": {"type": "NFC"}},
}
UNKNOWN = {
    "a regular expression": {"pre_tokenizer": BACKTRACKS},
    "a regular expression in a sequence": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BACKTRACKS]}},
    "a known expression with an addition": {"pre_tokenizer": split(QWEN + "|(a|aa)+$")},
    "a longer replacement": {"normalizer": DOUBLES},
    "an empty pattern": {"normalizer": DOUBLES | {"pattern": {"String": ""}}},
    "a replaced regular expression": {"normalizer": DOUBLES | {"pattern": {"Regex": "a|aa"}}},
    "many steps": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 99}},
}


def test_known_tokenizers_need_no_child_process(changed, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/python")  # The encoder cannot start a child process.
    for case, parts in HARMLESS.items():
        made = Encoder(tokenizers.Tokenizer.from_file(str(changed(**parts) / "tokenizer.json")), "x")
        assert made.harmless and made("hello"), case
    for known in (tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json")), *map(sentencepiece, (False, True))):
        assert Encoder(known, "x").harmless


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_tokenizers_run_in_child_process(case, changed):
    plain = tokenizers.Tokenizer.from_file(str(changed(**UNKNOWN[case]) / "tokenizer.json"))
    made = Encoder(plain, "x")
    assert not made.harmless
    if case != "an empty pattern":  # An empty pattern makes the tokenizer library panic.
        assert made("hello, é 你\0") == plain.encode("hello, é 你\0").ids


def test_child_process_adds_the_same_special_tokens(tmp_path, monkeypatch):
    write_tokenizer(tmp_path, add_bos=True)
    made = Encoder(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")), "x")
    local = [made(text, add_special_tokens=True) for text in ("", "hello")]
    monkeypatch.setattr(encoder, "MAX_LOCAL_CHARACTERS", -1)
    assert [made(text, add_special_tokens=True) for text in ("", "hello")] == local == [[0], [0, *made("hello")]]


def test_control_tokens_of_unknown_tokenizer_are_text(changed):
    tokenizer = Tokenizer.load(changed(pre_tokenizer=BACKTRACKS))
    ids = tokenizer.encode("a<|im_end|>b")
    assert not {0, 1, 2}.intersection(ids) and tokenizer.decode(ids) == "a<|im_end|>b"


RUNS = ("A", "a", "1", " ", "\n", "/", "'", "你", "\u0301", "\t\r", "' ", "!\n", "Aa", "'s")


@pytest.mark.parametrize("pattern", sorted(encoder.KNOWN_PATTERNS))
def test_known_expressions_do_not_backtrack(pattern):
    """With quadratic backtracking, 20,000 characters of one kind would reach the limit of retries and panic."""
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    for run in RUNS:
        for end in ("", "x", "!"):
            text = run * 20_000 + end
            assert "".join(piece for piece, _ in pieces.pre_tokenize_str(text)) == text


# ---- failures and limits


def test_panic_is_one_error(changed, capfd, monkeypatch):
    monkeypatch.setenv("RUST_BACKTRACE", "1")
    tokenizer = Tokenizer.load(changed(pre_tokenizer=BACKTRACKS))
    for _ in range(2):
        with pytest.raises(PromptError, match="tokenizer.json fails on this text .*retry-limit") as caught:
            tokenizer.encode_chat(CHAT)
        assert "\n" not in str(caught.value)
        assert tokenizer.encode("hello") == tokenizer.encode("hello"), "the next text was not encoded"
    assert capfd.readouterr() == ("", "")


def test_panic_of_known_tokenizer(capfd):
    """The common regular expression of the bundled tokenizer panics at millions of spaces."""
    tokenizer = Tokenizer.load(BUNDLED)
    with pytest.raises(PromptError, match="fails on this text .*retry-limit"):
        tokenizer.encode(" " * 11_000_000)
    assert capfd.readouterr() == ("", "") and tokenizer.encode("hello")


def test_text_that_doubles_repeatedly_is_stopped(changed, monkeypatch):
    monkeypatch.setattr(encoder, "MEMORY", 256 << 20)
    tokenizer = Tokenizer.load(changed(normalizer={"type": "Sequence", "normalizers": [DOUBLES] * 60}))
    with pytest.raises(PromptError, match="its process ended with code -6: .*GiB of memory; change the text"):
        tokenizer.encode("a")
    assert tokenizer.encode("hello") == tokenizer.encode("hello")


def test_slow_text_is_stopped(changed, monkeypatch):
    monkeypatch.setattr(encoder, "SECONDS", 1)
    tokenizer = Tokenizer.load(changed(pre_tokenizer=BACKTRACKS))
    with pytest.raises(PromptError, match="its process was stopped after 2 s"):
        # The regex backtracks on each word, nearly as often as its limit of retries allows.
        tokenizer.encode(("a" * 30 + "b") * 1000)


def test_interrupt_stops_encoding(changed, monkeypatch):
    monkeypatch.setattr(encoder, "SECONDS", 120)
    tokenizer = Tokenizer.load(changed(pre_tokenizer=BACKTRACKS))
    tokenizer.encode("hello")
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        timer.start()
        tokenizer.encode(("a" * 30 + "b") * 1000)
    assert time.monotonic() - began < 60, "the encoding was not stopped before its time limit"
    assert tokenizer.encode("hello")


def test_vocabulary_without_unknown_token(changed):
    vocab = {"hello": 0}
    path = changed(model={"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}, added_tokens=[])
    with pytest.raises(PromptError, match="tokenizer.json fails on this text .*UNK.*; change the text, or check the"):
        Tokenizer.load(path).encode("world")


def test_library_error_is_one_line(changed):
    """The error occurs in this process, because the tokenizer needs no child process."""
    model = json.loads((changed() / "tokenizer.json").read_text())["model"]
    del model["vocab"]["Ġ"]
    model |= {"unk_token": "[UNK]", "merges": []}
    made = Encoder(tokenizers.Tokenizer.from_file(str(changed(model=model) / "tokenizer.json")), "x")
    assert made.harmless
    with pytest.raises(PromptError, match="fails on this text .*; change the text, or check the tokenizer"):
        made("a b")


@pytest.mark.parametrize("charsmap", ["AAAA", "", "/////w=="], ids=["short", "empty", "long"])
def test_panic_during_load_is_one_error(charsmap, changed, capfd):
    path = changed(normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap})
    with pytest.raises(CheckpointError, match="tokenizer.json: not a tokenizer .*; download the file again"):
        Tokenizer.load(path)
    assert capfd.readouterr() == ("", "")


DECODERS = {
    "a longer replacement": {"type": "Sequence", "decoders": [DOUBLES] * 9},
    "an empty pattern": DOUBLES | {"pattern": {"String": ""}},
    "many steps": {"type": "Sequence", "decoders": [{"type": "Fuse"}] * 99},
    "a long replacement": DOUBLES | {"content": "x" * 10**6},
}


@pytest.mark.parametrize("case", DECODERS)
def test_unbounded_decoders_are_refused(case, changed):
    with pytest.raises(CheckpointError, match="supported") as caught:
        Tokenizer.load(changed(decoder=DECODERS[case]))
    assert len(str(caught.value)) < 600


def test_chat_continues_after_panic(piped, tmp_path):
    path = shutil.copytree(BUNDLED, tmp_path / "model")
    state = json.loads((path / "tokenizer.json").read_text()) | {"pre_tokenizer": BACKTRACKS}
    (path / "tokenizer.json").write_text(json.dumps(state))
    code, out, err = piped(f"{RUNAWAY}\nhello\n", "--model", path, "--max-tokens", "2")
    assert code == 1 and err.count("tridecode: error: ") == 1 and "retry-limit" in err and "Traceback" not in err
    assert out.strip(), "the second turn got no answer"


# ---- search for control tokens

MARKS = ["<|im_end|>", "<|im_", "<", "<<", "a", "ab", "abc", "b"]


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sets(st.sampled_from(MARKS)), st.lists(st.sampled_from([*MARKS, "x", "é", "end|>"])))
def test_token_set_matches_regular_expression(tokens, pieces):
    text, token_set = "".join(pieces), TokenSet(tokens)
    longest_first = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)"
    assert token_set.spans(text) == [match.span() for match in re.finditer(longest_first, text)]
    assert token_set.replace(text, str.upper) == re.sub(longest_first, lambda match: match[0].upper(), text)
    for i in range(len(text)):
        assert token_set.starts_at(text, i) == text.startswith(tuple(tokens), i)
        assert token_set.begins(text[i:]) == any(token.startswith(text[i:]) for token in tokens)


def test_many_control_tokens_and_long_text(changed):
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [token | {"id": 1000 + i, "content": f"<custom_token_{i}>"} for i in range(20_000)]
    tokenizer = Tokenizer.load(changed(added_tokens=added))
    text = "<" * 200_000 + "<custom_token_7>"
    began = time.monotonic()
    ids = tokenizer.encode_chat([{"role": "user", "content": text}])
    assert time.monotonic() - began < 10, "the search took 10 s or more"
    assert 1007 not in ids and text in tokenizer.decode(ids)


def test_very_long_control_token_is_refused(changed):
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    with pytest.raises(CheckpointError, match=r"the added token '<+\.\.\.<+' has 1,000,000 characters") as caught:
        Tokenizer.load(changed(added_tokens=[token | {"id": 1000, "content": "<" * 1_000_000}]))
    assert len(str(caught.value)) < 600
