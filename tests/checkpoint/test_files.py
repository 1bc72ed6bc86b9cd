"""Checkpoints with irregular, huge or malformed files: each is refused quickly, in one short line."""

import json
import os
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from checkpoints import write_tiny
from util import covering

from tridecode.checkpoint.hub import INDEX, shard_map
from tridecode.checkpoint.load import load_config, load_weights
from tridecode.errors import CheckpointError
from tridecode.models.reader import read_json
from tridecode.text.tokenizer import Tokenizer

SHORT = 600  # Maximum length in characters of a message that contains a path of this test.


def load(path: Path) -> None:
    """All files of a checkpoint, as an engine reads them."""
    config = load_config(path)
    Tokenizer.load(path)
    load_weights(path, config, "cpu", torch.float32)


def refusal(action, *args) -> str:
    with pytest.raises(CheckpointError) as caught:
        action(*args)
    message = str(caught.value)
    assert "\n" not in message and len(message) < SHORT, message[:2000]
    return message


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("files"), "llama", num_hidden_layers=1)


@pytest.fixture
def copy(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "copy"))


# ---- irregular and huge files

FILES = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
         "chat_template.jinja", "model.safetensors"}  # fmt: skip
ODD = {
    "directory": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@covering(1, name=sorted(FILES), kind=ODD.keys())
def test_irregular_file_is_refused(name, kind, copy):
    (copy / name).unlink(missing_ok=True)
    ODD[kind](copy / name)
    message = refusal(load, copy)
    assert message.startswith(f"{copy / name}: ") and ("not a regular file" in message or "No such file" in message)


@pytest.mark.parametrize("name", sorted(FILES - {"model.safetensors"}))
def test_huge_file_is_refused_unread(name, copy):
    with open(copy / name, "ab") as file:
        file.truncate(5 << 30)  # The file is sparse, so it needs no disk space.
    message = refusal(load, copy)
    assert message.startswith(f"{copy / name}: larger than ") and "5,368,709,120 bytes" in message


def test_template_in_tokenizer_config_is_limited(copy):
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "x" * (2 << 20)}))
    assert "chat_template has 2,097,152 characters" in refusal(Tokenizer.load, copy)


def test_template_names_may_be_anything(copy):
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    templates = [{"name": ["x"], "template": "A"}, {"template": "B"}]
    (copy / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": templates}))
    assert Tokenizer.load(copy).has_template


# ---- JSON

BROKEN_FILES = {
    "duplicate key": ('{"a": {"hidden_size": 1, "b": 2, "hidden_size": 3}}', "'hidden_size' occurs twice"),
    "truncated": ('{"hidden_size": 1', "not valid JSON"),
    "a list": ("[1]", "expected a JSON object, got list"),
    "no text": (b"\xff\xfe\x00", "not valid JSON"),
    "nested without end": ("[" * 100_000, "not valid JSON"),
}


@pytest.mark.parametrize("case", BROKEN_FILES)
def test_broken_file(case, tmp_path):
    content, words = BROKEN_FILES[case]
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(CheckpointError) as caught:
        read_json(file)
    assert str(file) in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


def test_read_json_of_a_good_file(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [1]}')
    assert read_json(tmp_path / "config.json") == {"a": [1]}


MANY = {f"key_{i}": i for i in range(100_000)}


def test_duplicate_among_many_keys(tmp_path):
    """The duplicate is found in one pass: counting each name would take minutes."""
    (tmp_path / "config.json").write_text(json.dumps(MANY)[:-1] + ', "key_99999": 1}')
    began = time.monotonic()
    assert "'key_99999' occurs twice" in refusal(read_json, tmp_path / "config.json")
    assert time.monotonic() - began < 30


def test_duplicate_among_many_tensors(copy):
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    write_header(copy, json.dumps(dict.fromkeys(MANY, entry))[:-1] + f', "key_99999": {json.dumps(entry)}}}')
    began = time.monotonic()
    assert "'key_99999' twice" in refusal(load, copy)
    assert time.monotonic() - began < 30


def write_header(path: Path, header: str) -> None:
    data = header.encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(data)) + data)


# ---- long names: a message shows their beginning

LONG = "n" * 1_000_000


def entry(**changes) -> dict:
    return {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes


HEADERS = {
    "tensor": json.dumps({LONG: entry()}),
    "quantized tensor": json.dumps({LONG + ".qweight": entry()}),
    "tensor twice": f'{{"{LONG}": 1, "{LONG}": 1}}',
    "malformed entry": json.dumps({LONG: 1}),
    "truncated": json.dumps({LONG: entry(data_offsets=[0, 2**40])}),
    "offset": json.dumps({LONG: entry(data_offsets=[0, 10**4000])}),
    "shape": json.dumps({LONG: entry(shape=[10**4000] * 2000)}),
    "dimensions": json.dumps({LONG: entry(shape=[2] * 2_000_000)}),
    "dtype": json.dumps({"model.norm.weight": entry(dtype=LONG)}),
}


@pytest.mark.parametrize("case", HEADERS)
def test_long_names_in_a_header(case, copy):
    write_header(copy, HEADERS[case])
    assert str(copy) in refusal(load, copy)


def test_a_tensor_of_a_long_dtype(copy):
    file = copy / "model.safetensors"
    data = file.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header["model.norm.weight"]["dtype"] = LONG
    write_header(copy, json.dumps(header))
    with open(file, "ab") as opened:
        opened.write(data[8 + length :])
    message = refusal(load, copy)
    assert "model.norm.weight" in message and "nnn...nnn" in message


@pytest.mark.parametrize("names", [{LONG: "x.bin"}, {"x": LONG + ".safetensors"}, {LONG: 1}, {"x": [LONG]}])
def test_long_names_in_an_index(names, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    assert INDEX in refusal(shard_map, tmp_path / INDEX)


KEYS = {
    "config.json": ["eos_token_id", "rope_scaling", "architectures", "dtype"],
    "generation_config.json": ["temperature", "top_k", "eos_token_id"],
}


@covering(
    2, place=[(name, key) for name, keys in KEYS.items() for key in keys],
    value={"str": LONG, "list": [LONG], "dict": {LONG: {LONG: 1}}, "int": 10**4000},
)  # fmt: skip
def test_long_values(place, value, copy):
    name, key = place
    values = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(values | {key: value}))
    try:
        load_config(copy)  # load_config ignores this key, because it belongs to another file.
    except CheckpointError as error:
        assert len(str(error)) < SHORT and str(copy / name) in str(error)


def test_duplicate_long_key(tmp_path):
    (tmp_path / "config.json").write_text(f'{{"{LONG}": 1, "{LONG}": 1}}')
    assert "occurs twice" in refusal(read_json, tmp_path / "config.json")


# ---- weights that change while they are read


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_file_truncated_during_the_load(dtype, copy):
    """Files are not mapped, because a missing page of a mapped file would end the process with a signal."""
    config, file = load_config(copy), copy / "model.safetensors"

    def cut(done, total):
        os.truncate(file, 8192)

    message = refusal(load_weights, copy, config, "cpu", dtype, cut)
    assert message.startswith(f"{file}: became shorter while it was read")
