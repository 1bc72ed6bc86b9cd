"""Bounds on the size of texts: a text that cannot fit in a context is rejected early, and no other text is."""

import json
import random
import unicodedata

import pytest
import tokenizers
from checkpoints import write_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from tridecode.checkpoint.hub import BUNDLED
from tridecode.errors import TooLong
from tridecode.text.token_sizes import min_token_count
from tridecode.text.tokenizer import Tokenizer

SPLIT = {"type": "Split", "pattern": {"String": " "}, "invert": False}


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """Return a function that loads the tiny tokenizer with changed values in its tokenizer.json."""

    def changed(**values):
        path = tmp_path_factory.mktemp("sizes")
        write_tokenizer(path)
        file = path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return Tokenizer.load(path)

    return changed


@pytest.fixture(scope="module")
def composing(changed):
    return changed(normalizer={"type": "NFC"})


def test_long_text_is_refused_before_tokenization(tokenizer, monkeypatch):
    text = "a" * 100_000
    assert len(tokenizer.encode(text)) > 512 > tokenizer.longest_token
    monkeypatch.setattr(tokenizer, "_tokenizer", None)
    with pytest.raises(TooLong, match="tokens or more, the context holds 512$") as refused:
        tokenizer.encode(text, context=512)
    assert 512 < refused.value.tokens <= len(text)
    with pytest.raises(TooLong):
        tokenizer.encode_chat([{"role": "user", "content": text}], 512)


@given(st.text(max_size=400))
def test_texts_that_fit_are_accepted(tokenizer, composing, text):
    for each in (tokenizer, composing):
        assert min_token_count(text, each.longest_token) <= len(each.encode(text))


@pytest.mark.parametrize("seed", range(3))
def test_the_longest_tokens_in_a_row_fit(seed):
    bundled, draw = Tokenizer.load(BUNDLED), random.Random(seed)
    lengths = {token: bundled._token_bytes.size(token) for token in range(bundled.vocab_size)}
    most = [token for token, size in lengths.items() if size > bundled.longest_token - 3]
    text = bundled.decode(draw.choices(most, k=300))
    assert min_token_count(text, bundled.longest_token) <= len(bundled.encode(text))
    assert bundled.longest_token == max(lengths.values())


def test_text_that_the_normalizer_shortens_fits(composing):
    syllables = unicodedata.normalize("NFD", "각" * 3000)
    assert len(syllables.encode()) == 3 * len("각".encode()) * 3000
    assert min_token_count(syllables, composing.longest_token) == min_token_count("각" * 3000, composing.longest_token)


@pytest.mark.parametrize(
    "values, bounded",
    [
        ({"normalizer": None}, True),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, True),
        ({"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}}, False),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": ""}}, False),
        ({"pre_tokenizer": SPLIT | {"behavior": "Removed"}}, False),
        ({"pre_tokenizer": SPLIT | {"behavior": "Isolated"}}, True),
        ({"pre_tokenizer": {"type": "Whitespace"}}, False),
    ],
)
def test_tokenizers_that_drop_characters_have_no_bound(changed, values, bounded):
    tokenizer = changed(**values)
    assert (tokenizer.longest_token < 1000) is bounded
    assert bounded or tokenizer.encode(" " * 50_000 + "a", context=50_001)


def test_tokenizer_with_a_stripping_token_has_no_bound(path):
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.add_tokens([tokenizers.AddedToken("<mask>", lstrip=True)])
    assert Tokenizer(made, {}).longest_token == float("inf")
