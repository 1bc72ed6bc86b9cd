"""GGUF files that are malformed: one clear line each, and no allocation above the size of the file."""

import struct
import tracemalloc

import pytest

from tridecode.checkpoint.config import read_config
from tridecode.checkpoint.gguf.tensors import gguf_tensors
from tridecode.errors import CheckpointError
from tridecode.models.gguf import TYPES, part_names, read_gguf, shortest
from tridecode.text.tokenizer import Tokenizer

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
FORMS = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


def text(value) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def array(kind, items) -> bytes:
    """The value of an array, with its type."""
    data = b"".join(text(item) if kind == STRING else struct.pack("<" + FORMS[kind], item) for item in items)
    return struct.pack("<IIQ", ARRAY, kind, len(items)) + data


def value(item) -> bytes:
    """A value with its type. bytes are taken as they are."""
    if isinstance(item, bytes):
        return item
    if isinstance(item, bool):
        return struct.pack("<IB", BOOL, item)
    if isinstance(item, int):
        return struct.pack("<II", U32, item)
    return struct.pack("<If", F32, item) if isinstance(item, float) else struct.pack("<I", STRING) + text(item)


def entry(name, shape=(32, 4), kind=0, offset=0) -> bytes:
    """The entry of a tensor. The first size is the contiguous one."""
    head = text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape)
    return head + struct.pack("<IQ", kind, offset)


TOKENS = ["<a>", "<b>", "x", "y", "xy"]
KEYS = {
    "general.architecture": "llama",
    "llama.block_count": 1,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 32,
    "llama.attention.head_count": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": array(STRING, TOKENS),
    "tokenizer.ggml.token_type": array(I32, [3, 3, 1, 1, 1]),
    "tokenizer.ggml.merges": array(STRING, ["x y"]),
    "tokenizer.ggml.eos_token_id": 1,
}
EMBED = entry("token_embd.weight", (32, 5))
GOOD = [EMBED, entry("blk.0.attn_norm.weight", (32,), offset=640)]


def build(keys=None, tensors=GOOD, *, magic=b"GGUF", version=3, counts=None, data=4096, raw_keys=b"", pad=32) -> bytes:
    """A file. `keys` replace those of KEYS; None removes one."""
    pairs = {name: item for name, item in (KEYS | (keys or {})).items() if item is not None}
    body = b"".join(text(name) + value(item) for name, item in pairs.items()) + raw_keys
    tensor_count, key_count = counts or (len(tensors), len(pairs) + bool(raw_keys))
    head = magic + struct.pack("<IQQ", version, tensor_count, key_count) + body + b"".join(tensors)
    return head + b"\0" * (-len(head) % pad) + b"\0" * data


def scalar(kind, item) -> bytes:
    return struct.pack("<I" + FORMS[kind], kind, item)


HUGE = 2**62
MALFORMED = {
    # name: (content, words of the message)
    "empty": (b"", "truncated"),
    "magic only": (b"GGUF", "truncated: the version"),
    "other magic": (build(magic=b"GGML"), "is not a GGUF file"),
    "version 1": (build(version=1), "has version 1; versions 2 and 3"),
    "version 4": (build(version=4), "has version 4"),
    "big-endian": (build(version=0x03000000), "big-endian"),
    "cut in the counts": (build()[:20], "truncated: the number of keys"),
    "cut in a key": (build()[: build().index(b"layer_norm_rms")], "truncated: the name of key 6"),
    "cut in a value": (build()[: build().index(b"gpt-2") + 2], "truncated: 'tokenizer.ggml.pre'"),
    "cut in the tokens": (build()[: build().index(b"<b>")], "truncated: 'tokenizer.ggml.tokens'"),
    "cut in the tensors": (build()[: build().index(b"token_embd") + 20], "truncated: tensor 'token_embd.weight'"),
    "cut in the data": (build(data=100), "truncated: tensor 'token_embd.weight' ends at byte"),
    "huge count of tensors": (build(counts=(HUGE, 13)), "cannot hold"),
    "huge count of keys": (build(counts=(2, HUGE)), "cannot hold"),
    "more tensors than entries": (build(counts=(900, 13), data=20000), "tensor"),
    "huge key": (build(raw_keys=struct.pack("<Q", HUGE)), "at most 65,535 are allowed"),
    "huge string": (build(raw_keys=text("a") + struct.pack("<IQ", STRING, HUGE)), "truncated: 'a'"),
    "huge array of numbers": (build(raw_keys=text("a") + struct.pack("<IIQ", ARRAY, F64, HUGE)), "at most 16,777,216"),
    "large array of numbers": (build(raw_keys=text("a") + struct.pack("<IIQ", ARRAY, F64, 2**24)), "truncated: 'a'"),
    "huge array of strings": (build(raw_keys=text("a") + struct.pack("<IIQ", ARRAY, STRING, HUGE)), "elements"),
    "large array of strings": (build(raw_keys=text("a") + struct.pack("<IIQ", ARRAY, STRING, 2**24)), "truncated"),
    "huge string in an array": (
        build({"tokenizer.ggml.tokens": struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)}), "truncated",
    ),
    "array of arrays": (build({"a": struct.pack("<IIQ", ARRAY, ARRAY, 1)}), "'a' is an array of arrays"),
    "unknown type of a value": (build({"a": struct.pack("<I", 13)}), "'a' has the unknown type 13"),
    "unknown type of elements": (build({"a": struct.pack("<IIQ", ARRAY, 99, 1)}), "elements of the unknown type 99"),
    "flag of 2": (build({"a": scalar(BOOL, 2)}), "'a' must be 0 or 1, got 2"),
    "key twice": (build(raw_keys=text("llama.block_count") + value(1)), "the key 'llama.block_count' occurs twice"),
    "key not UTF-8": (build(raw_keys=text(b"\xff\xfe") + value(1)), "the name of key 13 is not UTF-8"),
    "value not UTF-8": (build({"general.name": struct.pack("<I", STRING) + text(b"\xc3")}), "'general.name' is not"),
    "alignment of 0": (build({"general.alignment": 0}), "general.alignment must be a power of two"),
    "alignment of 24": (build({"general.alignment": 24}), "general.alignment must be a power of two"),
    "huge alignment": (build({"general.alignment": 2**31}), "general.alignment must be a power of two"),
    "alignment as text": (build({"general.alignment": "32"}), "general.alignment must be a power of two"),
    "long name of a tensor": (build(tensors=[entry("a" * 65)]), "at most 64 are allowed"),
    "name of a tensor not UTF-8": (build(tensors=[entry(b"\xff")]), "the name of tensor 0 is not UTF-8"),
    "tensor twice": (build(tensors=[EMBED, EMBED]), "tensor 'token_embd.weight' occurs twice"),
    "no dimensions": (build(tensors=[entry("a", ())]), "0 dimensions"),
    "five dimensions": (build(tensors=[entry("a", (1,) * 5)]), "5 dimensions"),
    "dimension of 0": (build(tensors=[entry("a", (0, 4))]), "cannot have the shape [4, 0]"),
    "huge dimensions": (build(tensors=[entry("a", (HUGE, HUGE))]), "cannot have the shape"),
    "product above 64 bits": (build(tensors=[entry("a", (2**30, 2**30, 2**30, 2**30))]), "truncated: tensor 'a'"),
    "unknown type of a tensor": (build(tensors=[entry("a", kind=77)]), "tensor 'a' has the unknown type 77"),
    "removed type of a tensor": (build(tensors=[entry("a", kind=4)]), "tensor 'a' has the unknown type 4"),
    "part of a block": (build(tensors=[entry("a", (48, 4), kind=2)]), "'a', Q4_0, cannot have the shape [4, 48]"),
    "offset not aligned": (build(tensors=[entry("a", offset=8)]), "begins at 8, which is not a multiple of 32"),
    "offset past the end": (build(tensors=[entry("a", offset=2**20)]), "truncated: tensor 'a'"),
    "huge offset": (build(tensors=[entry("a", offset=2**63)]), "truncated: tensor 'a'"),
    "overlap": (build(tensors=[EMBED, entry("a", offset=608)]), "tensors 'token_embd.weight' and 'a' overlap"),
    "same place": (build(tensors=[EMBED, entry("a")]), "overlap"),
    # Metadata of models
    "no architecture": (build({"general.architecture": None}), "general.architecture must be one of llama"),
    "unknown architecture": (build({"general.architecture": "gemma3"}), "got 'gemma3': other architectures"),
    "a projector": (build({"general.type": "mmproj"}), "holds 'mmproj' (general.type), not a model"),
    "no embedding": (build(tensors=[]), "tensor token_embd.weight is missing"),
    "no block count": (build({"llama.block_count": None}), "llama.block_count must be an integer"),
    "block count as text": (build({"llama.block_count": "1"}), "llama.block_count must be an integer"),
    "block count as an array": (build({"llama.block_count": array(I32, [1])}), "llama.block_count must be an integer"),
    "huge block count": (build({"llama.block_count": 2**31}), "llama.block_count must be an integer from 1 to 4096"),
    "heads of 0": (build({"llama.attention.head_count": 0}), "llama.attention.head_count must be"),
    "epsilon not a number": (
        build({"llama.attention.layer_norm_rms_epsilon": scalar(F32, float("nan"))}), "layer_norm_rms_epsilon must be",
    ),
    "infinite theta": (build({"llama.rope.freq_base": scalar(F32, float("inf"))}), "rope.freq_base must be a number"),
    "experts": (build({"llama.expert_count": 8}), "a mixture of experts"),
    "window as text": (build({"llama.attention.sliding_window": "8"}), "attention.sliding_window must be an integer"),
    "unknown scaling": (build({"llama.rope.scaling.type": "longrope"}), "rope.scaling.type must be one of"),
    "scaling and factors": (
        build({"llama.rope.scaling.type": "yarn"}, [*GOOD, entry("rope_freqs.weight", (8,), offset=768)]),
        "scaling.type must be 'none' in a file with tensor rope_freqs.weight, got \"yarn\"",
    ),
    "values of another size": (build({"llama.attention.value_length": 8}), "value_length must be equal"),
    "partial rotation": (
        build({"llama.rope.dimension_count": 16, "llama.attention.key_length": 32}), "dimension_count must be equal",
    ),
    # Tokenizers
    "no tokens": (build({"tokenizer.ggml.tokens": None}), "tokenizer.ggml.tokens is missing"),
    "tokens not UTF-8": (build({"tokenizer.ggml.tokens": array(STRING, [b"\xff"] * 5)}), "strings in UTF-8"),
    "tokens as numbers": (build({"tokenizer.ggml.tokens": array(I32, range(5))}), "tokens must be an array of strings"),
    "tokens twice": (build({"tokenizer.ggml.tokens": array(STRING, "xxabc")}), "tokens 0 and 1 are both 'x'"),
    "types of other tokens": (build({"tokenizer.ggml.token_type": array(I32, [1])}), "token_type must have 5 elements"),
    "types as strings": (build({"tokenizer.ggml.token_type": array(STRING, TOKENS)}), "must be an array of numbers"),
    "merge of unknown tokens": (build({"tokenizer.ggml.merges": array(STRING, ["q z"])}), "its tokenizer is malformed"),
    "merge of one token": (build({"tokenizer.ggml.merges": array(STRING, ["xy"])}), "merges must hold pairs of tokens"),
    "unknown tokenizer": (build({"tokenizer.ggml.model": "rwkv"}), "tokenizer.ggml.model must be one of gpt2, llama"),
    "unknown pre-tokenizer": (build({"tokenizer.ggml.pre": "mine"}), "tokenizer.ggml.pre must be one of"),
    "no scores": (build({"tokenizer.ggml.model": "llama"}), "tokenizer.ggml.scores must have 5 elements, got 0"),
    "eos outside": (build({"tokenizer.ggml.eos_token_id": 5}), "eos_token_id must be"),
    "template as a number": (build({"tokenizer.chat_template": 1}), "tokenizer.chat_template must be a string"),
    "template bomb": (build({"tokenizer.chat_template": "a" * 2**21}), "at most 1,048,576 are supported"),
}  # fmt: skip


def load(path) -> None:
    read_config(path)
    gguf_tensors(path)
    Tokenizer.load(path)


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_file(name, tmp_path):
    content, words = MALFORMED[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load(path)
    message = str(caught.value)
    assert words in message and str(path) in message and "\n" not in message


def test_good_file(tmp_path):
    path = tmp_path / "model.gguf"
    for version in (2, 3):
        path.write_bytes(build(version=version))
        assert Tokenizer.load(path).encode("xyx") == [4, 2]
        assert read_config(path)[0].num_layers == 1


@pytest.mark.parametrize("window", [None, 0, 16])
def test_sliding_window_of_a_mistral_model(window, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(build({"llama.attention.sliding_window": window}))
    (layer,) = read_config(path)[0].layers
    assert layer.blocks[0].window == (window or 0)


def test_huge_counts_allocate_nothing(tmp_path):
    path = tmp_path / "model.gguf"
    names = [name for name in MALFORMED if "huge" in name or "large" in name or "product" in name]
    for name in names:
        path.write_bytes(MALFORMED[name][0])
        tracemalloc.start()
        with pytest.raises(CheckpointError):
            read_config(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20, name


@pytest.mark.parametrize("cut", range(0, 400, 7))
def test_every_cut_is_an_error(cut, tmp_path):
    content = build(data=768)
    path = tmp_path / "model.gguf"
    path.write_bytes(content[: len(content) - 8 - cut * (len(content) - 8) // 400])
    with pytest.raises(CheckpointError):
        load(path)


def test_template_that_loops(tmp_path):
    """A template is rendered in a child process with limits."""
    from tridecode.errors import PromptError

    path = tmp_path / "model.gguf"
    path.write_bytes(build({"tokenizer.chat_template": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}"}))
    with pytest.raises(PromptError, match=r"model\.gguf"):
        Tokenizer.load(path).encode_chat([{"role": "user", "content": "x"}])


# ---- split files


def parts(folder, *changes, names=None):
    """Write a model in two parts; `changes` replace keys of each part."""
    own = [
        {"split.no": scalar(U16, i), "split.count": scalar(U16, 2), "split.tensors.count": scalar(I32, 2)}
        for i in range(2)
    ]
    tensors = [EMBED], [entry("blk.0.attn_norm.weight", (32,))]
    written = []
    for i in range(2):
        path = folder / (names[i] if names else f"m-0000{i + 1}-of-00002.gguf")
        keys = own[i] | (changes[i] if i < len(changes) else {})
        base = {} if i == 0 else dict.fromkeys(KEYS)
        path.write_bytes(build(base | keys, tensors[i]))
        written.append(path)
    return written


def test_split_files(tmp_path):
    first, second = parts(tmp_path)
    assert part_names(second) == [first, second]
    for path in (first, second):
        gguf = read_gguf(path)
        assert {name: tensor.file for name, tensor in gguf.tensors.items()} == {
            "token_embd.weight": first,
            "blk.0.attn_norm.weight": second,
        }
        assert gguf.path == first and gguf.values["llama.block_count"] == 1


SPLITS = {
    "wrong number": (({}, {"split.no": scalar(U16, 0)}), "must be part 2 of 2 by its name"),
    "wrong count": (({}, {"split.count": scalar(U16, 3)}), "must be part 2 of 2 by its name"),
    "no number": (({"split.no": None},), "must be part 1 of 2"),
    "other total": (({"split.tensors.count": scalar(I32, 3)},), "the parts hold 2 tensors, not 3"),
}


@pytest.mark.parametrize("name", SPLITS)
def test_malformed_split(name, tmp_path):
    changes, words = SPLITS[name]
    first, _ = parts(tmp_path, *changes)
    with pytest.raises(CheckpointError, match=words):
        read_gguf(first)


def test_missing_part(tmp_path):
    first, second = parts(tmp_path)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"m-00002-of-00002\.gguf, another part of the model, is not next to it"):
        read_gguf(first)


def test_renamed_part(tmp_path):
    first, _ = parts(tmp_path, names=["a.gguf", "b.gguf"])
    with pytest.raises(CheckpointError, match="one of 2 parts"):
        read_gguf(first)


def test_tensor_in_both_parts(tmp_path):
    first, second = parts(tmp_path)
    keys = {"split.no": scalar(U16, 1), "split.count": scalar(U16, 2)}
    second.write_bytes(build(dict.fromkeys(KEYS) | keys, [EMBED]))
    with pytest.raises(CheckpointError, match="is also in another part"):
        read_gguf(first)


def test_changed_file_is_read_again(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(build())
    assert read_gguf(path).values["llama.block_count"] == 1
    path.write_bytes(build({"llama.block_count": 2, "x": 1}))
    assert read_gguf(path).values["llama.block_count"] == 2


@pytest.mark.parametrize("number", [1e-5, 1e6, 0.1, 500000.0, 1.1920929e-07, 0.0, -2.5])
def test_shortest_number(number):
    (stored,) = struct.unpack("<f", struct.pack("<f", number))
    assert shortest(stored) == number


def test_types_match_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    sizes = {kind.value: (kind.name, *size) for kind, size in gguf.GGML_QUANT_SIZES.items()}
    assert {number: tuple(kind) for number, kind in TYPES.items()} == sizes
