"""Tokenizers of GGUF files: the same token ids as other implementations of the same tokenizer."""

import random
import re
from pathlib import Path

import pytest
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers, trainers

from tridecode.text.tokenizer import Tokenizer

gguf = pytest.importorskip("gguf")
ROOT = Path(__file__).parents[2]
RANGES = (
    (0x20, 0x7F), (0xA0, 0x250), (0x370, 0x400), (0x400, 0x500), (0x590, 0x5FF), (0x600, 0x6FF), (0x900, 0x97F),
    (0xE00, 0xE7F), (0x1100, 0x11FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0x1F300, 0x1F6FF),
    (0, 0x20), (0x2000, 0x2070), (0x300, 0x36F), (0x660, 0x66A), (0x1D400, 0x1D7FF),
)  # fmt: skip
ENDS = ("", " ", "  ", "\n", "\t", "'s ", "'LL ", " 12345 ", "\u200d", "\r\n\r\n", " …", "e\u0301")


def mixed_lines(count: int) -> list[str]:
    """Lines of text, code, scripts, emoji and control characters, without names of special tokens such as <s>."""
    rng = random.Random(0)
    files = [*(ROOT / "docs").glob("*.md"), *(ROOT / "tridecode").rglob("*.py")]
    lines = [line for file in sorted(files) for line in file.read_text().splitlines()]
    lines = [line for line in lines if line.strip() and not re.search(r"<\S+>", line)]
    chosen = rng.sample(lines, count // 2)
    while len(chosen) < count:
        line = ""
        for _ in range(rng.randint(1, 6)):
            low, high = rng.choice(RANGES)
            line += "".join(chr(rng.randrange(low, high)) for _ in range(rng.randint(1, 8))) + rng.choice(ENDS)
        chosen.append(line)
    return chosen


@pytest.fixture(scope="module")
def lines():
    return mixed_lines(2000)


def trained(lines, pre_tokenizer=None, alphabet=(), special=()):
    """Train a small BPE model; return its vocabulary by id and its merges."""
    import json

    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1500, special_tokens=[*special], initial_alphabet=sorted(alphabet), show_progress=False
    )
    library.train_from_iterator(lines, trainer)
    model = json.loads(library.to_str())["model"]
    return sorted(model["vocab"], key=model["vocab"].get), [tuple(pair) for pair in model["merges"]]


@pytest.fixture(scope="module")
def byte_level(lines):
    return trained(lines, None, pre_tokenizers.ByteLevel.alphabet(), ("<|endoftext|>", "<|im_end|>"))


def write(path, model, tokens, types, **more):
    """Write a file that holds only a tokenizer."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Tokenizer.load(path)


def write_byte_level(path, byte_level, pre, **more):
    tokens, merges = byte_level
    types = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2)
    joined = [" ".join(pair) for pair in merges]
    return write(path, "gpt2", tokens, types, tokenizer_pre=pre, token_merges=joined, **more)


def assert_equal_ids(tokenizer, encode, lines):
    """Compare the token ids of lines, and decode them again."""
    for line in lines:
        ids = tokenizer.encode(line)
        assert ids == encode(line), (line, ids)


@pytest.mark.parametrize("pre, name", [("qwen2", "Qwen2Tokenizer"), ("qwen35", "Qwen3_5Tokenizer")])
def test_qwen_matches_transformers(pre, name, byte_level, lines, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokens, merges = byte_level
    vocab = {text: token for token, text in enumerate(tokens)}
    other = getattr(transformers, name)(vocab=vocab, merges=merges)
    own = write_byte_level(tmp_path / "t.gguf", byte_level, pre)
    assert_equal_ids(own, lambda line: other.encode(line, add_special_tokens=False), lines)


def test_gpt2_and_digits(byte_level, lines, tmp_path):
    tokens, merges = byte_level
    other = Library(models.BPE({text: token for token, text in enumerate(tokens)}, merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for pre, step in {
        "gpt-2": level,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level]),
    }.items():
        other.pre_tokenizer = step
        own = write_byte_level(tmp_path / "t.gguf", byte_level, pre)
        assert_equal_ids(own, lambda line: other.encode(line).ids, lines)
        assert all(own.decode(own.encode(line)) == line for line in lines)


def test_whole_words_and_bos(byte_level, tmp_path):
    tokens, _ = byte_level
    own = write_byte_level(tmp_path / "t.gguf", byte_level, "llama-bpe", bos_token_id=0)
    assert own.encode("x")[0] == 0 and own.bos_id == 0
    without = write_byte_level(tmp_path / "u.gguf", byte_level, "llama-bpe", bos_token_id=0, add_bos_token=False)
    assert own.encode(" x")[1:] == without.encode(" x")
    word = max((text for text in tokens if text.isascii() and text.isalpha()), key=len)
    assert without.encode(word) == [tokens.index(word)]
    assert write_byte_level(tmp_path / "v.gguf", byte_level, "gpt-2", bos_token_id=0).encode("x")[0] != 0


def test_control_tokens_in_text(byte_level, tmp_path):
    own = write_byte_level(tmp_path / "t.gguf", byte_level, "gpt-2")
    assert own.encode("<|im_end|>", allow_special=True) == [1] and 1 not in own.encode("<|im_end|>")
    assert own.special_ids == {0, 1}


# ---- SentencePiece


@pytest.fixture(scope="module")
def pieces(lines):
    """Tokens, scores and types of a SentencePiece vocabulary."""
    marked = ["▁" + line.replace(" ", "▁") for line in lines if line.isascii()]
    trained_tokens, _ = trained(marked, pre_tokenizers.Metaspace(), "▁abcdefghijklmnopqrstuvwxyz")
    trained_tokens = [text for text in trained_tokens if "\n" not in text]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<start>", *trained_tokens]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, USER_DEFINED, *[NORMAL] * len(trained_tokens)]
    # The scores have another order than the ids, as in files whose tokens are sorted.
    scores = [0.0] * 260 + [-float(7 * i % 1511) for i in range(len(trained_tokens))]
    return tokens, scores, types


def sentencepiece(text: str, pieces, prefix: bool) -> list[int]:
    """Encode as SentencePiece does: join the neighbors whose joined token has the highest score."""
    tokens, scores, types = pieces
    ids = {token: i for i, token in enumerate(tokens) if types[i] == NORMAL}
    symbols = list((("▁" if prefix else "") + text).replace(" ", "▁"))
    while True:
        pairs = [(scores[ids[a + b]], -i) for i, (a, b) in enumerate(zip(symbols, symbols[1:])) if a + b in ids]
        if not pairs:
            break
        place = -max(pairs)[1]
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()]
    return found


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix, pieces, lines, tmp_path):
    tokens, scores, types = pieces
    own = write(
        tmp_path / "t.gguf", "llama", tokens, types, token_scores=scores, add_space_prefix=prefix, bos_token_id=1
    )
    for line in lines[::5]:
        if line and not line.startswith(" ") and "▁" not in line:
            ids = own.encode(line)
            assert ids[0] == 1 and ids[1:] == sentencepiece(line, pieces, prefix), line
            assert own.decode(ids) == line
    assert own.encode("<start>", allow_special=True)[1:] == [259]
    assert own.special_ids == {0, 1, 2}


def test_sentencepiece_matches_transformers(pieces, lines, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokens, scores, types = pieces
    own = write(tmp_path / "t.gguf", "llama", tokens, types, token_scores=scores, add_bos_token=False)
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [
        (-scores[i], token[:at], token[at:])
        for i, token in enumerate(tokens)
        if types[i] == NORMAL
        for at in range(1, len(token))
        if token[:at] in vocab and token[at:] in vocab
    ]
    merges = [pair[1:] for pair in sorted(merges, key=lambda merge: merge[0])]
    other = transformers.LlamaTokenizer(vocab=vocab, merges=merges)
    other.backend_tokenizer.decoder = decoders.Sequence([])
    some = [line for line in lines if line.strip()]
    assert_equal_ids(own, lambda line: other.encode(line, add_special_tokens=False), some)
