"""Adapters in peft's format: names, patterns, ranks and factors, and malformed adapters."""

import json
import re
import shutil
import struct

import pytest
import torch
from checkpoints import write_tiny
from lora import DENSE, merge, modules_of, random_matrices, write_lora
from safetensors.torch import load_file

from tridecode.checkpoint.adapters import adapter_rank, load_adapter
from tridecode.checkpoint.load import load_config
from tridecode.errors import CheckpointError, ParameterError

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("adapters") / "base", "qwen3")


@pytest.fixture(scope="module")
def modules(base):
    return modules_of(base)


def loaded(path, base, dtype=torch.float32):
    return load_adapter("one", path, load_config(base), dtype)


def changes(adapter, spec) -> dict[str, torch.Tensor]:
    """Return the change of each module's weight that an adapter makes, by module."""
    found = {}
    for (layer, name), (a, b) in adapter.linears.items():
        linear = next(each for each in spec.layers[layer].linears() if each.name == name)
        start = 0
        for part, own in zip(linear.parts, a, strict=True):
            found[f"model.layers.{layer}.{part.module}"] = b[start : start + part.rows] @ own
            start += part.rows
    return {module: change for module, change in found.items() if change.any()}


def expected(base, tmp_path, tensors, factor) -> dict[str, torch.Tensor]:
    merged = load_file(merge(base, tmp_path / "merged", tensors, factor) / "model.safetensors")
    before = load_file(base / "model.safetensors")
    differences = {name.removesuffix(".weight"): merged[name] - before[name] for name in before}
    return {module: change for module, change in differences.items() if change.any()}


def check(base, tmp_path, tensors, factor, **config):
    """Check that an adapter changes the weights of its modules as the merged checkpoint does."""
    adapter = loaded(write_lora(tmp_path / "adapter", tensors, **config), base)
    found, wanted = changes(adapter, load_config(base)), expected(base, tmp_path, tensors, factor)
    assert found.keys() == wanted.keys()
    for module, change in wanted.items():
        torch.testing.assert_close(found[module], change, rtol=1e-4, atol=1e-5)
    return adapter


def test_fused_linears_get_the_parts_of_an_adapter(base, modules, tmp_path):
    adapter = check(base, tmp_path, random_matrices(modules), 2.0)
    assert adapter.rank == 16 and {name for _, name in adapter.linears} == {"qkv", "o_proj", "gate_up", "down"}


def test_an_adapter_of_some_modules(base, modules, tmp_path):
    some = {name: shape for name, shape in modules.items() if name.endswith(("k_proj", "up_proj"))}
    adapter = check(base, tmp_path, random_matrices(some, rank=24), 2.0, rank=24)
    assert adapter.rank == 32 and {name for _, name in adapter.linears} == {"qkv", "gate_up"}


def test_rslora_divides_by_the_root_of_the_rank(base, modules, tmp_path):
    check(base, tmp_path, random_matrices(modules), 16 / 8**0.5, use_rslora=True)


def test_patterns_change_ranks_and_factors(base, modules, tmp_path):
    tensors = random_matrices(modules) | random_matrices({DOWN: modules[DOWN]}, rank=20)
    factors = dict.fromkeys(modules, 2.0) | {DOWN: 16 / 20, Q: 5 / 8}
    check(
        base, tmp_path, tensors, factors, rank_pattern={"layers.1.mlp.down_proj": 20},
        alpha_pattern={r"^model\.layers\.0\.self_attn\.q.*": 5.0},
    )  # fmt: skip


@pytest.mark.parametrize(
    "targets",
    ["all-linear", r".*\.(q|k|v|o|gate|up|down)_proj", list(DENSE), ["self_attn.q_proj", *(f"{x}_proj" for x in "kvo"),
     "gate_proj", "up_proj", "down_proj"], None],
)  # fmt: skip
def test_targets_are_names_or_an_expression(base, modules, tmp_path, targets):
    loaded(write_lora(tmp_path, random_matrices(modules), target_modules=targets), base)


@pytest.mark.parametrize("layers", [1, [1]])
@pytest.mark.parametrize("pattern", [None, "layers", ["h", "layers"]])
def test_some_layers(base, modules, tmp_path, layers, pattern):
    some = {name: shape for name, shape in modules.items() if ".layers.1." in name}
    path = write_lora(tmp_path, random_matrices(some), layers_to_transform=layers, layers_pattern=pattern)
    assert {layer for layer, _ in loaded(path, base).linears} == {1}


def test_excluded_modules(base, modules, tmp_path):
    some = {name: shape for name, shape in modules.items() if not name.endswith("o_proj")}
    path = write_lora(tmp_path, random_matrices(some), target_modules="all-linear", exclude_modules=["o_proj"])
    assert "o_proj" not in {name for _, name in loaded(path, base).linears}


def test_dtypes_are_converted(base, modules, tmp_path):
    path = write_lora(tmp_path, random_matrices(modules), dtype=torch.float16)
    assert {t.dtype for each in loaded(path, base, torch.bfloat16).linears.values() for t in each} == {torch.bfloat16}


def test_recurrent_blocks_have_adapters(tmp_path):
    base = write_tiny(tmp_path / "hybrid", "qwen3.5")
    modules = modules_of(base)
    adapter = check(base, tmp_path, random_matrices(modules), 2.0)
    assert {"in_proj", "out_proj"} <= {name for _, name in adapter.linears}


def test_layers_with_experts_have_adapters_of_their_attention(tmp_path):
    """`all-linear` means the linears outside the experts, and those of the second layer's MLP."""
    base = write_tiny(tmp_path / "mixture", "qwen3-moe")
    some = {name: shape for name, shape in modules_of(base).items() if ".experts." not in name}
    adapter = check(base, tmp_path, random_matrices(some), 2.0, target_modules="all-linear")
    assert {name for layer, name in adapter.linears if layer == 1} == {"qkv", "o_proj", "gate_up", "down"}
    assert {name for layer, name in adapter.linears if layer != 1} == {"qkv", "o_proj"}


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen2-moe-equal", "qwen2-moe"])
@pytest.mark.parametrize(
    "module", ["experts.3.gate_proj", "experts.0.down_proj", "gate", "shared_expert.up_proj", "shared_expert_gate"]
)
def test_adapters_of_experts_are_refused_by_name(tmp_path, family, module):
    base = write_tiny(tmp_path / "mixture", family)
    name = f"model.layers.0.mlp.{module}"
    shapes = load_file(base / "model.safetensors")
    if family == "qwen2-moe" and module == "shared_expert.up_proj":  # It has another width, so it is a linear.
        own = random_matrices({name: shapes[f"{name}.weight"].shape})
        adapter = loaded(write_lora(tmp_path / "adapter", own, target_modules=[name]), base)
        assert adapter.linears.keys() == {(0, "shared_gate_up")}
        return
    some = {name: (8, 192)} if f"{name}.weight" not in shapes else {name: shapes[f"{name}.weight"].shape}
    with pytest.raises(CheckpointError) as refused:
        loaded(write_lora(tmp_path / "adapter", random_matrices(some)), base)
    assert f"{name}' belongs to a mixture of experts" in str(refused.value) and "\n" not in str(refused.value)


def test_names_of_a_model_with_vision(base, modules, tmp_path):
    renamed = {name.replace("model.layers", "model.language_model.layers"): shape for name, shape in modules.items()}
    loaded(write_lora(tmp_path, random_matrices(renamed)), base)


def test_the_rank_is_known_without_the_tensors(tmp_path):
    assert adapter_rank(write_lora(tmp_path, None, rank=20, rank_pattern={"q_proj": 40})) == 48


# ---- malformed adapters


def config(**values):
    return lambda path, tensors: write_lora(path, tensors, **values)


def changed(change):
    """Return a writer of an adapter whose tensors `change` has changed."""

    def write(path, tensors):
        change(tensors)
        write_lora(path, tensors, target_modules="all-linear")

    return write


def renamed(old, new):
    def change(tensors):
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return changed(change)


A, B = f"base_model.model.{Q}.lora_A.weight", f"base_model.model.{Q}.lora_B.weight"


def set_to(name, make):
    return changed(lambda tensors: tensors.update({name: make(tensors.get(name))}))


def with_text(text):
    def write(path, tensors):
        write_lora(path, tensors)
        (path / "adapter_config.json").write_text(text)

    return write


def with_bytes(change):
    def write(path, tensors):
        write_lora(path, tensors)
        file = path / "adapter_model.safetensors"
        file.write_bytes(change(file.read_bytes()))

    return write


def without(name):
    def write(path, tensors):
        write_lora(path, tensors)
        (path / name).unlink()

    return write


def pickled(path, tensors):
    without("adapter_model.safetensors")(path, tensors)
    (path / "adapter_model.bin").write_bytes(b"PK")


# Kind of fault -> (writer of the adapter, a word of the message).
MALFORMED = {
    "no_config": (without("adapter_config.json"), "adapter_config.json"),
    "no_tensors": (without("adapter_model.safetensors"), "adapter_model.safetensors"),
    "pickled_tensors": (pickled, "safe_serialization"),
    "config_is_no_json": (with_text("{"), "JSON"),
    "config_is_a_list": (with_text("[]"), "object"),
    "duplicate_key": (with_text('{"r": 8, "r": 9}'), "twice"),
    "another_kind": (config(peft_type="PREFIX_TUNING"), "peft_type"),
    "rank_0": (config(r=0), "r must"),
    "rank_too_large": (config(r=257), "256"),
    "rank_is_text": (config(r="8"), "r must"),
    "alpha_is_infinite": (with_text('{"r": 8, "lora_alpha": 1e999}'), "lora_alpha"),
    "dora": (config(use_dora=True), "DoRA"),
    "whole_modules": (config(modules_to_save=["lm_head"]), "modules_to_save"),
    "trained_biases": (config(bias="lora_only"), "bias"),
    "biases_of_adapters": (config(lora_bias=True), "lora_bias"),
    "transposed": (config(fan_in_fan_out=True), "fan_in_fan_out"),
    "unknown_variant": (config(use_new_variant=True), "use_new_variant"),
    "changes_the_base": (config(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
    "experts": (config(target_parameters=["experts.gate_up_proj"]), "target_parameters"),
    "targets_are_numbers": (config(target_modules=[1, 2]), "target_modules"),
    "targets_are_no_expression": (config(target_modules="(q_proj"), "regular expression"),
    "targets_take_years": (config(target_modules=r"((\w+)*\.)*!"), "to match"),
    "layer_beyond_the_model": (config(layers_to_transform=[7]), "layers_to_transform"),
    "pattern_of_text": (config(rank_pattern={"q_proj": "8"}), "rank_pattern"),
    "pattern_is_a_list": (config(rank_pattern=["q_proj"]), "rank_pattern"),
    "truncated": (with_bytes(lambda data: data[:-10]), "truncated"),
    "no_safetensors": (with_bytes(lambda data: b"x" * 100), "safetensors"),
    "header_too_long": (with_bytes(lambda data: struct.pack("<Q", 1 << 60) + data[8:]), "header"),
    "empty_file": (with_bytes(lambda data: b""), "safetensors"),
    "a_web_page": (with_bytes(lambda data: b"<!doctype html>" + data), "web page"),
    "unknown_module": (renamed("self_attn.q_proj", "self_attn.r_proj"), "r_proj"),
    "head": (renamed(f"{Q}.", "lm_head."), "lm_head"),
    "layer_7": (renamed("layers.1.", "layers.7."), "layers.7"),
    "unknown_name": (renamed("lora_A.weight", "lora_A.default.weight"), "lora_A.default"),
    "magnitude": (set_to(f"base_model.model.{Q}.lora_magnitude_vector", lambda _: torch.ones(8)), "magnitude"),
    "a_is_missing": (changed(lambda tensors: tensors.pop(A)), "lacks"),
    "module_is_missing": (changed(lambda tensors: [tensors.pop(name) for name in (A, B)]), "lacks"),
    "module_is_not_selected": (config(target_modules=["k_proj"]), "select"),
    "wrong_rank": (set_to(A, lambda a: a[:4]), "shape"),
    "wrong_columns": (set_to(A, lambda a: a[:, 1:]), "shape"),
    "wrong_rows": (set_to(B, lambda b: b[1:]), "shape"),
    "three_dimensions": (set_to(A, lambda a: a[None]), "shape"),
    "not_finite": (set_to(B, lambda b: b * float("nan")), "NaN"),
    "twice": (set_to(A.replace("model.layers", "layers"), lambda _: torch.ones(8, 192)), "same"),
}  # fmt: skip


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_adapters_are_refused_in_one_line(base, modules, tmp_path, fault, monkeypatch):
    write, word = MALFORMED[fault]
    monkeypatch.setattr("tridecode.checkpoint.peft._SECONDS", 1.0)
    write(tmp_path / "adapter", random_matrices(modules))
    with pytest.raises(CheckpointError) as error:
        loaded(tmp_path / "adapter", base)
    message = str(error.value)
    assert "\n" not in message and word in message and len(message) < 400 + len(str(tmp_path)), message


def test_integers_are_refused(base, modules, tmp_path):
    path = write_lora(tmp_path, random_matrices(modules), dtype=torch.int32)
    with pytest.raises(CheckpointError, match="I32"):
        loaded(path, base)


@pytest.mark.parametrize("path", ["", "no/such/directory/here", "nowhere", 5, "~nobody-has-this-name/a", "a" * 300])
def test_a_path_that_does_not_exist(base, path):
    with pytest.raises((CheckpointError, ParameterError)):
        loaded(path, base)


def test_a_file_is_refused(base, modules, tmp_path):
    path = write_lora(tmp_path, random_matrices(modules))
    with pytest.raises(CheckpointError, match=re.escape("is a file")):
        loaded(path / "adapter_config.json", base)


def test_a_smaller_model_refuses_the_adapter(base, modules, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    values = json.loads((base / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values | {"num_key_value_heads": 4}))
    path = write_lora(tmp_path / "adapter", random_matrices(modules))
    with pytest.raises(CheckpointError, match="shape"):
        loaded(path, other)
