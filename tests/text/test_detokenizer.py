"""Tests of streaming detokenization."""

import random

import pytest
import tokenizers
from checkpoints import TOKENIZER_VOCAB_SIZE, sentencepiece
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from tridecode.sampling import SamplingParams
from tridecode.text.grammar import Grammars
from tridecode.text.tokenizer import Tokenizer

IM_START, IM_END, THINK = 1, 2, 382
quick = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def stream(tokenizer, ids, **options) -> list[str]:
    detokenizer = tokenizer.detokenizer(**options)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


def byte_ids(plain, data: bytes) -> list[int]:
    """Return one token id for each byte. A model may generate such tokens."""
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in alphabet]
    return [plain.token_to_id(chr(b) if b in alphabet else chr(256 + others.index(b))) for b in data]


BYTES = {
    # name: (bytes, text after each token and at the end)
    "complete": ("a你😀é".encode(), ["a", "", "", "你", "", "", "", "😀", "", "é", ""]),
    "cut at the end": (b"a\xe4\xbd", ["a", "", "", "\ufffd"]),
    "never UTF-8": (b"\xff\xff", ["\ufffd", "\ufffd", ""]),
    "followed by a letter": (b"\xe4\xbda", ["", "", "\ufffda", ""]),
    "stray continuation": (b"\x80a", ["\ufffd", "a", ""]),
    "surrogate": (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd", ""]),
}


@pytest.mark.parametrize("case", BYTES)
def test_bytes_are_shown_when_a_character_is_complete_or_invalid(case, tokenizer, plain):
    data, expected = BYTES[case]
    ids = byte_ids(plain, data)
    assert stream(tokenizer, ids) == expected
    assert "".join(expected) == plain.decode(ids) == tokenizer.decode(ids)


@quick
@given(st.lists(st.integers(0, TOKENIZER_VOCAB_SIZE - 1)))
def test_stream_equals_decode_of_all_ids(tokenizer, plain, ids):
    """Any ids, including incomplete characters, compared with the tokenizers library."""
    for skip in (True, False):
        whole = plain.decode(ids, skip_special_tokens=skip)
        assert "".join(stream(tokenizer, ids, skip_special=skip)) == tokenizer.decode(ids, skip) == whole


def test_unknown_ids_are_shown(tokenizer):
    """The tokenizers library omits ids of a model's padding, so an answer of such ids would seem empty."""
    ids = [TOKENIZER_VOCAB_SIZE, *tokenizer.encode("ab"), TOKENIZER_VOCAB_SIZE + 20, 10**9]
    assert tokenizer.decode(ids) == "".join(stream(tokenizer, ids)) == "\ufffdab\ufffd\ufffd"


@pytest.fixture(scope="module")
def by_bytes(tokenizer, plain) -> dict[bytes, int]:
    """Return a dict from the bytes of a token to its id."""
    return {tokenizer.token_bytes(token): token for token in range(3, plain.get_vocab_size())}


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@example(text="👩‍👩‍👧 hello", choices=[0])
@given(text=st.text(), choices=st.lists(st.integers(0, 5), min_size=1))
def test_any_segmentation_of_any_text(tokenizer, by_bytes, text, choices):
    """Tokens may divide the bytes of a text in any way, not only as the tokenizer does."""
    data, ids, shown = text.encode(), [], ""
    detokenizer = tokenizer.detokenizer()
    while data:
        fitting = [length for length in range(1, 8) if length <= len(data) and data[:length] in by_bytes]
        length = fitting[choices[len(ids) % len(choices)] % len(fitting)]
        ids.append(by_bytes[data[:length]])
        shown += detokenizer.push(ids[-1])
        data = data[length:]
        done = text.encode()[: len(text.encode()) - len(data)]
        assert shown == done.decode(errors="ignore"), (
            "a complete character was held back, or an incomplete one was shown"
        )
    assert detokenizer.flush() == "" and shown == text == tokenizer.decode(ids)


@quick
@given(st.text(alphabet="ab é你😀\u200d<>", max_size=30), st.integers(0, 60))
def test_stream_continues_prompt(tokenizer, text, cut):
    ids = tokenizer.encode(text)
    prompt, rest = ids[:cut], ids[cut:]
    shown = "".join(stream(tokenizer, rest, prompt_ids=prompt))
    assert tokenizer.decode(ids).endswith(shown)
    before = tokenizer.decode(prompt)
    assert before.rstrip("\ufffd") + shown == text


def test_special_tokens_have_no_text(tokenizer):
    ids = [IM_START, *tokenizer.encode("user"), IM_END, THINK]
    assert tokenizer.decode(ids) == "user<think>"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>user<|im_end|><think>"


def test_added_tokens_are_not_in_byte_alphabet(path):
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.add_tokens(["<é>"])
    assert Tokenizer(made, {}).decode([TOKENIZER_VOCAB_SIZE]) == "<é>"


def test_prompt_that_ends_with_many_special_tokens():
    made = sentencepiece()
    prompt, ids = [*made.encode("hello").ids, *[1] * 20], made.encode("wor").ids
    assert "".join(stream(Tokenizer(made, {}), ids, prompt_ids=prompt)) == " wor"


@pytest.mark.parametrize("metaspace", [False, True])
@pytest.mark.parametrize("text", ["hello wor", "  hello", "   hello", "é 你 hello", "hello  "])
def test_sentencepiece_stream(text, metaspace):
    made = sentencepiece(metaspace)
    tokenizer = Tokenizer(made, {})
    ids = made.encode(text).ids
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == made.decode(ids)
    after = "".join(stream(tokenizer, ids, prompt_ids=made.encode("hello").ids))
    assert after == made.decode(made.encode("hello").ids + ids).removeprefix("hello"), (
        "a space within the text was removed"
    )


# ---- decoders that contain ByteLevel, and decoders of another vocabulary

SENTENCEPIECE = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
LLAMA_GGUF = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
SEQUENCES = {
    "Llama from GGUF": LLAMA_GGUF,
    "the same with a prefix space": [*LLAMA_GGUF, decoders.Strip(" ", 1, 0)],
    "ByteLevel first": [decoders.ByteLevel(), decoders.Fuse()],
    "nested": [decoders.Sequence([decoders.Fuse()]), decoders.Sequence([decoders.ByteLevel()])],
}


def written(tmp_path, path, decoder) -> tokenizers.Tokenizer:
    """Return the byte-level tokenizer with another decoder, as transformers writes and the library reads it."""
    transformers = pytest.importorskip("transformers")
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.decoder = decoder
    transformers.PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(tmp_path)
    return tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("case", SEQUENCES)
def test_byte_level_in_a_sequence_decodes_as_the_library(case, path, tmp_path):
    library = written(tmp_path, path, decoders.Sequence(SEQUENCES[case]))
    ours, numbers = Tokenizer.load(tmp_path), random.Random(0)
    prompts = [ours.encode(text) for text in (" 17 + 25 é\n你", "a", "▁a Ġ")]
    for ids in [*prompts, *([numbers.randrange(TOKENIZER_VOCAB_SIZE) for _ in range(20)] for _ in range(50))]:
        assert "".join(stream(ours, ids, skip_special=False)) == library.decode(ids, skip_special_tokens=False)


OTHER_DECODERS = {
    "SentencePiece": decoders.Sequence(SENTENCEPIECE),
    "Metaspace": decoders.Metaspace(),
    "none": None,
}


@pytest.mark.parametrize("case", OTHER_DECODERS)
def test_byte_level_vocabulary_with_another_decoder(case, path, tmp_path, tokenizer):
    """Mistral's files of tekken v13 have a byte-level vocabulary and the decoder of SentencePiece."""
    written(tmp_path, path, OTHER_DECODERS[case])
    ours = Tokenizer.load(tmp_path)
    assert [*map(ours.token_bytes, range(TOKENIZER_VOCAB_SIZE))] == [
        *map(tokenizer.token_bytes, range(TOKENIZER_VOCAB_SIZE))
    ]
    text = " 17 + 25 is 42 é\n\t你"
    assert "".join(stream(ours, ours.encode(text))) == text
    assert ours.longest_token == tokenizer.longest_token


def test_byte_level_normalizer_decides_too():
    """The pre-tokenizer may be absent: a normalizer then writes the byte-level alphabet."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(models.BPE(alphabet, []))
    made.normalizer, made.decoder = normalizers.ByteLevel(), decoders.Sequence(SENTENCEPIECE)
    ours = Tokenizer(made, {})
    assert ours.decode(ours.encode("a é 你")) == "a é 你"


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), None], ids=["ByteLevel", "none"])
@pytest.mark.parametrize("metaspace", [False, True])
def test_sentencepiece_vocabulary_with_another_decoder(metaspace, decoder):
    made, right = sentencepiece(metaspace), Tokenizer(sentencepiece(metaspace), {})
    made.decoder = decoder
    ours = Tokenizer(made, {})
    vocabulary = range(made.get_vocab_size())
    assert [*map(ours.token_bytes, vocabulary)] == [*map(right.token_bytes, vocabulary)]


def test_grammar_follows_byte_level_vocabulary_with_another_decoder(path):
    made = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    made.decoder = decoders.Sequence(SENTENCEPIECE)
    ours = Tokenizer(made, {})
    matcher = Grammars(ours, TOKENIZER_VOCAB_SIZE, [IM_END]).of(SamplingParams(choice=["17 + 25 é"])).matcher([])
    for token in ours.encode("17 + 25 é"):
        assert matcher.allowed()[token // 32] >> token % 32 & 1, "the grammar forbids a token of the text"
        matcher.accept(token)
