"""Checkpoints: every tensor of each family is loaded correctly, and invalid files are refused before loading."""

import json
import math
import shutil
import struct
from pathlib import Path

import pytest
import torch
from checkpoints import DENSE, EXPERTS, FAMILIES, write_tiny
from safetensors.torch import load_file, save_file

from tridecode.checkpoint import load as checkpoint
from tridecode.checkpoint.config import parse_config
from tridecode.checkpoint.load import load_config, load_weights, random_weights
from tridecode.checkpoint.slices import parameter_count, weight_bytes
from tridecode.errors import CheckpointError, DeviceError


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Checkpoint directories by (family, shards), written once. Tests must not change them."""
    made = {}

    def get(family: str, shards: int = 1) -> Path:
        if (family, shards) not in made:
            made[family, shards] = write_tiny(tmp_path_factory.mktemp(family), family, shards=shards)
        return made[family, shards]

    return get


@pytest.fixture
def copy_of(written, tmp_path):
    def get(family: str, shards: int = 1) -> Path:
        return Path(shutil.copytree(written(family, shards), tmp_path / "checkpoint"))

    return get


def file_tensors(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("family", DENSE)
def test_every_tensor_is_loaded_to_its_place(family, shards, written):
    path = written(family, shards)
    assert (path / "model.safetensors.index.json").exists() == (shards > 1)
    config = load_config(path)
    weights = load_weights(path, config, "cpu", torch.float32)
    source = file_tensors(path)

    def take(name: str) -> torch.Tensor:
        return source.pop(name)

    torch.testing.assert_close(weights.embed, take("model.embed_tokens.weight"), rtol=0, atol=0)
    torch.testing.assert_close(weights.final_norm, take("model.norm.weight"), rtol=0, atol=0)
    if config.tie_word_embeddings:
        assert weights.lm_head.weight.data_ptr() == weights.embed.data_ptr()
    else:
        torch.testing.assert_close(weights.lm_head.weight, take("lm_head.weight"), rtol=0, atol=0)
    assert len(weights.layers) == config.num_layers == 2
    for i, layer in enumerate(weights.layers):
        mixer = config.layers[i].mixer
        name = f"model.layers.{i}."
        expected = {
            "mixer_norm": take(name + "input_layernorm.weight"),
            "ffn_norm": take(name + "post_attention_layernorm.weight"),
            "qkv": torch.cat([take(f"{name}self_attn.{p}_proj.weight") for p in "qkv"]),
            "o_proj": take(name + "self_attn.o_proj.weight"),
            "gate_up": torch.cat([take(f"{name}mlp.{p}_proj.weight") for p in ("gate", "up")]),
            "down": take(name + "mlp.down_proj.weight"),
            "q_norm": take(name + "self_attn.q_norm.weight") if mixer.qk_norm else None,
            "k_norm": take(name + "self_attn.k_norm.weight") if mixer.qk_norm else None,
        }
        found = {**layer.weights, **layer.linears}
        assert found.keys() == {field for field, value in expected.items() if value is not None}
        for field, value in expected.items():
            got = found.get(field)
            got = getattr(got, "weight", got)
            if value is None:
                assert got is None, field
            else:
                torch.testing.assert_close(got, value, rtol=0, atol=0, msg=field)
        if mixer.bias:
            bias = torch.cat([take(f"{name}self_attn.{p}_proj.bias") for p in "qkv"])
            torch.testing.assert_close(layer.linears["qkv"].bias, bias, rtol=0, atol=0)
        else:
            assert layer.linears["qkv"].bias is None
    assert not source, "some tensors were not compared"


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("stored", DTYPES)
def test_dtype(stored, tmp_path):
    """The dtype is read from the files if config.json does not contain it."""
    path = write_tiny(tmp_path, "qwen3-tied", dtype=stored)
    config = load_config(path)
    values = json.loads((path / "config.json").read_text())
    del values["dtype"]
    (path / "config.json").write_text(json.dumps(values))
    assert config.dtype == load_config(path).dtype == str(stored).removeprefix("torch.")
    for dtype in DTYPES:
        weights = load_weights(path, config, "cpu", dtype)
        assert {tensor.dtype for tensor in weights.tensors().values()} == {dtype}
        expected = load_file(path / "model.safetensors")["model.layers.1.self_attn.v_proj.weight"].to(dtype)
        assert torch.equal(weights.layers[1].linears["qkv"].weight[-config.pages.width :], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_from_config_alone(family, written):
    path = written(family)
    config = load_config(path)
    assert parameter_count(config) == sum(tensor.numel() for tensor in file_tensors(path).values())
    assert weight_bytes(config, torch.bfloat16) == 2 * parameter_count(config) or family not in DENSE
    assert weight_bytes(config, torch.float32) == load_weights(path, config, "cpu", torch.float32).nbytes()


def test_progress_counts_the_bytes_of_the_files(written):
    path = written("llama", 3)
    calls = []
    load_weights(path, load_config(path), "cpu", torch.bfloat16, lambda done, total: calls.append((done, total)))
    size = sum(tensor.nbytes for tensor in file_tensors(path).values())
    done = [d for d, _ in calls]
    assert done == sorted(set(done)) and done[-1] == size
    assert {total for _, total in calls} == {size}


def test_tensors_are_copied_in_small_pieces(written, monkeypatch):
    path = written("qwen2")
    config = load_config(path)
    moved = []
    original = torch.Tensor.to

    def to(self, *args, **kwargs):
        moved.append(self.nbytes)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    weights = load_weights(path, config, "cpu", torch.bfloat16)
    assert moved and max(moved) <= 0.05 * weights.nbytes()


def test_harmless_extra_tensors_are_ignored(copy_of):
    path = copy_of("qwen3")
    edit(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}))
    load_weights(path, load_config(path), "cpu", torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights(family, written):
    config = load_config(written(family))
    weights = random_weights(config, "cpu", torch.bfloat16, seed=3)
    loaded = load_weights(written(family), config, "cpu", torch.bfloat16)
    assert {n: t.shape for n, t in weights.tensors().items()} == {n: t.shape for n, t in loaded.tensors().items()}
    again = random_weights(config, "cpu", torch.bfloat16, seed=3).tensors()
    other = random_weights(config, "cpu", torch.bfloat16, seed=4).tensors()
    for name, tensor in weights.tensors().items():
        value = tensor.float()
        assert torch.equal(tensor, again[name]) and not torch.equal(tensor, other[name])
        assert torch.isfinite(value).all()
        if name == "embed" and family in EXPERTS and not config.tie_word_embeddings:
            assert 0.9 < value.std() < 1.1  # Tokens choose different experts.
        elif value.ndim == 2:
            assert 0.2 < value.std() * math.sqrt(value.shape[1]) < 1.3
        elif "norm" in name:
            assert abs(value.mean() - 1) < 0.1


# ---- invalid files; each case changes a valid checkpoint


def edit(path: Path, change, file: str = "model.safetensors") -> None:
    """Rewrite one safetensors file with `change(tensors)` applied."""
    tensors = load_file(path / file)
    change(tensors)
    save_file(tensors, path / file)


def edit_header(path: Path, change, file: str = "model.safetensors") -> None:
    """Rewrite the header of a safetensors file as text: change(str) -> str."""
    data = (path / file).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length].decode()).encode()
    (path / file).write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def edit_index(path: Path, change) -> None:
    file = path / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index["weight_map"])
    file.write_text(json.dumps(index))


def first_shard(path: Path) -> str:
    (file,) = path.glob(f"{SHARD}*.safetensors")
    return file.name


def cut(path: Path, keep) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: keep(len(data))])


DOWN = "model.layers.1.mlp.down_proj.weight"
SHARD = "model-00001-of-"  # The first shard holds the embedding.


def entry(name, change):
    """A header edit of one tensor's entry."""

    def edited(text: str) -> str:
        header = json.loads(text)
        change(header[name])
        return json.dumps(header)

    return lambda path: edit_header(path, edited)


BROKEN = {
    # name: (change, words that the message contains)
    "missing tensor": (lambda p: edit(p, lambda t: t.pop(DOWN)), [DOWN, "missing"]),
    "many missing": (lambda p: edit(p, lambda t: [t.pop(n) for n in list(t)[:4]]), ["missing (and 3 more)"]),
    "missing head": (lambda p: edit(p, lambda t: t.pop("lm_head.weight")), ["lm_head.weight", "tie_word_embeddings"]),
    "extra bias": (
        lambda p: edit(p, lambda t: t.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(240)})),
        ["model.layers.0.self_attn.o_proj.bias", "does not belong", "llama"],
    ),
    "extra layer": (
        lambda p: edit(p, lambda t: t.update({"model.layers.2.mlp.down_proj.weight": t[DOWN].clone()})),
        ["model.layers.2.mlp.down_proj.weight", "2 layers"],
    ),
    "misshapen": (
        lambda p: edit(p, lambda t: t.update({DOWN: t[DOWN].T.contiguous()})),
        [DOWN, "must have shape [240, 432]", "not [432, 240]"],
    ),
    "integers": (lambda p: edit(p, lambda t: t.update({DOWN: t[DOWN].to(torch.int8)})), [DOWN, "I8", "BF16"]),
    "double precision": (lambda p: edit(p, lambda t: t.update({DOWN: t[DOWN].double()})), [DOWN, "F64"]),
    "float8": (lambda p: edit(p, lambda t: t.update({DOWN: t[DOWN].to(torch.float8_e4m3fn)})), [DOWN, "F8_E4M3"]),
    "gptq": (
        lambda p: edit(p, lambda t: t.update({"model.layers.0.mlp.up_proj.qweight": torch.ones(1, dtype=torch.int32)})),
        ["qweight", "quantized"],
    ),
    "truncated in the data": (lambda p: cut(p, lambda n: n - 1), ["truncated", "ends at byte"]),
    "truncated in the header": (lambda p: cut(p, lambda n: 100), ["truncated", "100 bytes"]),
    "empty": (lambda p: cut(p, lambda n: 0), ["truncated", "0 bytes"]),
    "header not JSON": (lambda p: edit_header(p, lambda s: "{" * len(s)), ["header is not valid JSON"]),
    "header a list": (lambda p: edit_header(p, lambda s: "[]"), ["not a JSON object"]),
    "name twice in the header": (
        lambda p: edit_header(p, lambda s: s.rstrip()[:-1] + "," + json.dumps({DOWN: json.loads(s)[DOWN]})[1:]),
        [DOWN, "twice"],
    ),
    "size that does not fit its shape": (entry(DOWN, lambda e: e["shape"].append(2)), [DOWN, "does not take"]),
    "entry without a shape": (entry(DOWN, lambda e: e.pop("shape")), [DOWN, "malformed"]),
    "negative offset": (entry(DOWN, lambda e: e.update(data_offsets=[-4, 0])), [DOWN, "malformed"]),
    "offset beyond the file": (entry(DOWN, lambda e: e.update(data_offsets=[0, 2**62])), [DOWN, "truncated"]),
    "tensors that overlap": (
        entry("model.norm.weight", lambda e: e.update(data_offsets=[0, 240 * 4])),
        ["cannot be read"],
    ),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), ["no model.safetensors", "whole checkpoint"]),
    "pickled weights": (
        lambda p: (p / "model.safetensors").rename(p / "pytorch_model.bin"),
        ["no model.safetensors", "save_pretrained"],
    ),
}

BROKEN_SHARDED = {
    "shard missing": (lambda p: (p / first_shard(p)).unlink(), [SHARD, "not in"]),
    "shard outside": (lambda p: edit_index(p, lambda m: m.update({DOWN: "../model.safetensors"})), [DOWN, "'../model"]),
    "shard absolute": (lambda p: edit_index(p, lambda m: m.update({DOWN: "/tmp/x.safetensors"})), [DOWN, "'/tmp/x."]),
    "shard in a directory": (lambda p: edit_index(p, lambda m: m.update({DOWN: "a/x.safetensors"})), [DOWN, "next to"]),
    "shard of Windows": (lambda p: edit_index(p, lambda m: m.update({DOWN: "..\\x.safetensors"})), [DOWN, "next to"]),
    "shard no string": (lambda p: edit_index(p, lambda m: m.update({DOWN: None})), [DOWN, "None"]),
    "shard pickled": (lambda p: edit_index(p, lambda m: m.update({DOWN: "x.bin"})), [DOWN, "x.bin"]),
    "empty index": (lambda p: edit_index(p, lambda m: m.clear()), ["weight_map"]),
    "tensor in two shards": (
        lambda p: edit(p, lambda t: t.update({"model.norm.weight": torch.ones(240)}), first_shard(p)),
        ["model.norm.weight", "also in", SHARD],
    ),
    "tensor not where the index says": (
        lambda p: edit_index(p, lambda m: m.update({"model.norm.weight": first_shard(p)})),
        ["model.norm.weight", SHARD, "missing"],
    ),
    "tensor nowhere": (
        lambda p: edit_index(p, lambda m: m.update({"model.more": first_shard(p)})),
        ["model.more", SHARD, "missing"],
    ),
}


def check_refused(path: Path, change, words, monkeypatch) -> None:
    config = load_config(path)
    change(path)
    monkeypatch.setattr(checkpoint, "_allocate", lambda *_: pytest.fail("memory was allocated before the check"))
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, config, "cpu", torch.float32)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("case", BROKEN)
def test_broken(case, copy_of, monkeypatch):
    check_refused(copy_of("llama"), *BROKEN[case], monkeypatch)


@pytest.mark.parametrize("case", BROKEN_SHARDED)
def test_broken_shards(case, copy_of, monkeypatch):
    check_refused(copy_of("llama", 3), *BROKEN_SHARDED[case], monkeypatch)


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_file_that_cannot_be_mapped(error, written, monkeypatch):
    def fail(*_, **__):
        raise error("Cannot allocate memory (os error 12)")

    monkeypatch.setattr(checkpoint, "safe_open", fail)
    words = ["model.safetensors", "cannot be mapped into memory", "os error 12", "ulimit"]
    check_refused(written("llama"), lambda _: None, words, monkeypatch)


def test_no_config(tmp_path):
    with pytest.raises(CheckpointError, match="no config.json; give the directory"):
        load_config(tmp_path)


def test_config_errors_name_the_file(copy_of):
    path = copy_of("llama")
    values = json.loads((path / "config.json").read_text()) | {"hidden_act": "gelu"}
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=f"^{path / 'config.json'}: hidden_act"):
        load_config(path)


def test_weights_larger_than_any_memory_raise_device_error():
    """A valid config.json can have sizes that no machine can store; the error gives the number of GiB."""
    config = parse_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 2**20,
            "intermediate_size": 2**20,
            "num_hidden_layers": 4096,
            "num_attention_heads": 4096,
            "head_dim": 256,
            "max_position_embeddings": 4096,
            "vocab_size": 2**20 - 2,
        }
    )
    with pytest.raises(DeviceError, match=r"cpu: the weights need \d{8,}\.\d+ GiB in bfloat16"):
        random_weights(config, "cpu", torch.bfloat16)
