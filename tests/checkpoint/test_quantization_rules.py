"""The rules of quantized checkpoints that leave modules unquantized or override the scheme of some."""

import json

import pytest
import torch
from quantized import change_config, write_quantized
from safetensors.torch import load_file, save_file

from tridecode.checkpoint.load import load_config, load_weights
from tridecode.checkpoint.quantization.methods import parse
from tridecode.checkpoint.quantization.patterns import Names, Pattern
from tridecode.engine import Engine
from tridecode.errors import CheckpointError
from tridecode.models.reader import ConfigReader

PREFIX = "model.language_model.layers."
# The rules of the official GPTQ checkpoint of Qwen3.5-27B, and those of a checkpoint that quantizes the large linears
# of gated delta nets too.
OFFICIAL = {
    "lm_head": {}, "model.language_model.embed_tokens": {}, "-:.*attn.*": {}, "-:.*shared_expert.*": {},
    "-:.*mtp.*": {}, "-:.*visual.*": {},
}  # fmt: skip
BY_PARAMETER = {f"-:.*linear_attn\\.{name}.*": {} for name in ("in_proj_a", "in_proj_b", "conv1d", "A_log", "norm")}


def scheme_of(module, **config):
    base = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    return parse(ConfigReader(base | config, "config.json", "quantization_config.")).scheme(module)


def test_first_dynamic_rule_that_matches_decides():
    dynamic = {
        "-:.*layers\\.1\\..*": {}, "+:.*down_proj$": {"bits": 8, "group_size": 32}, ".*layers\\.1\\..*": {"bits": 8},
        "layers": {"bits": 8}, ".*\\.mlp\\.": {"desc_act": True, "sym": False},
    }  # fmt: skip
    assert scheme_of(PREFIX + "1.mlp.down_proj", dynamic=dynamic) is None
    down = scheme_of(PREFIX + "11.mlp.down_proj", dynamic=dynamic)
    assert (down.bits, down.group, down.ordered) == (8, 32, False)
    up = scheme_of(PREFIX + "0.mlp.up_proj", dynamic=dynamic)
    assert (up.bits, up.group, up.ordered) == (4, 128, True)
    assert scheme_of(PREFIX + "0.self_attn.q_proj", dynamic=dynamic) == scheme_of(PREFIX + "0.self_attn.q_proj")
    assert scheme_of("lm_head", dynamic={"lm_head": {}}) is None


@pytest.mark.parametrize(
    "dynamic, words",
    [
        ({"+:.*": {"bits": 3}}, ["dynamic.+:.*.bits", "4 or 8", "3"]),
        ({".*": {"group_size": 48}}, ["dynamic..*.group_size", "32, 64, 128"]),
        ({".*": {"pack_dtype": "int8"}}, ["dynamic..*.pack_dtype", "group_size"]),
        ({".*": 4}, ["dynamic..*", "object"]),
        ({"-:(": {}}, ["dynamic", "regular expression", "'('"]),
        ({"-:(?<=a)b": {}}, ["dynamic", "regular expression", "(?<="]),
        (["-:.*"], ["dynamic", "object"]),
    ],
)
def test_invalid_dynamic_rules_are_refused(dynamic, words):
    with pytest.raises(CheckpointError) as caught:
        scheme_of("lm_head", dynamic=dynamic)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "(.*)*x",
        "((.*)*)*x",
        "(?:.|.)*x",
        ".?" * 60 + "." * 70,
        ".*" * 200 + "x",
        "(?:.*.*)*" * 50 + "x",
        "(?:m|m)" * 60,
    ],
)
def test_no_pattern_needs_exponential_time(pattern):
    assert not Pattern(pattern).match(PREFIX + "47.linear_attn.in_proj_qkv")


NAMES = frozenset(("lm_head", "model.layers.1.mlp.gate", "conv1d"))
MATCHES = {
    # module: the kinds of lists with which NAMES contain it
    "lm_head": {"whole", "end", "path", "inside"},
    "model.layers.1.mlp.gate": {"whole", "end", "path", "inside"},
    "model.layers.1.mlp.gate_proj": {"inside"},
    "language.model.layers.1.mlp.gate": {"end", "path", "inside"},
    "model.layers.1.mlp.gate.inner": {"path", "inside"},
    "model.layers.0.conv1d": {"end", "path", "inside"},
    "model.layers.11.mlp.gate": set(),
}


@pytest.mark.parametrize("kind", ["whole", "end", "path", "inside"])
def test_lists_of_names(kind):
    names = Names(NAMES, kind)
    expected = [module for module, kinds in MATCHES.items() if kind in kinds]
    assert [module for module in MATCHES if names.match(module)] == expected
    assert not Names(frozenset(), kind).match("lm_head")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SKIPPED = {
    # module: an entry that excludes it; one that does not
    "model.layers.1.mlp.gate": ("mlp.gate", "mlp.gat"),
    "model.layers.11.mlp.up_proj": (r"model\.layers\.\d+\.mlp", r"layers\.\d+\.mlp"),
    "model.layers.2.mlp.gate_proj": ("model.*proj|other", "model.*mlp.(gate|up)"),
    "model.layers.3.self_attn.q_proj": (".*q_proj", "re:.*q_proj"),
}


@pytest.mark.parametrize("key", ["modules_to_not_convert", "ignored_layers"])
@pytest.mark.parametrize("module", SKIPPED)
def test_names_and_expressions_exclude_modules_from_fp8(key, module):
    """The entries mean the same in transformers."""
    for entry, excluded in zip(SKIPPED[module], (True, False), strict=True):
        rules = parse(ConfigReader(FP8 | {key: [entry]}, "config.json", "quantization_config."))
        assert (rules.scheme(module) is None) == excluded
    pytest.importorskip("transformers", "5.21")  # Earlier versions also match parts of the names of modules.
    from transformers.quantizers.quantizers_utils import should_convert_module

    assert [should_convert_module(module, [entry]) for entry in SKIPPED[module]] == [False, True]


@pytest.mark.parametrize("pattern", ["(a{1000}){1000}", "[", "(?=a)", r"(a)\1", "\\", "(?:.{1000})" * 500])
def test_invalid_and_large_patterns_are_refused(pattern):
    with pytest.raises(ValueError, match="."):
        Pattern(pattern)


def nest(path):
    """Rename the tensors and keys of a text-only checkpoint as in one with a vision model."""
    tensors = load_file(path / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    tensors |= {"model.visual.blocks.0.attn.qkv.weight": torch.ones(3, 2), "mtp.fc.weight": torch.ones(4)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((path / "config.json").read_text())
    rules = values.pop("quantization_config")
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": values}
    whole |= {"quantization_config": rules, "tie_word_embeddings": values["tie_word_embeddings"]}
    (path / "config.json").write_text(json.dumps(whole))


GATES = ("in_proj_a", "in_proj_b")
PUBLISHED = {
    # case: method, options, words of the modules that are not quantized, changes of quantization_config
    "gptq_without_attention": ("gptq", {}, ("lm_head", "attn"), {"dynamic": OFFICIAL}),
    "gptq_by_parameter": ("gptq", {}, ("lm_head", *GATES), {"dynamic": BY_PARAMETER}),
    "gptq_without_a_rule": ("gptq", dict(group=32), ("lm_head", *GATES), {}),
    "awq": ("awq", {}, ("lm_head", *GATES), {"modules_to_not_convert": ["in_proj_a", "in_proj_b", "visual", "mtp"]}),
    "awq_without_attention": ("awq", {}, ("lm_head", "attn"), {"modules_to_not_convert": ["linear_attn", "self_attn"]}),
    "fp8_blocks": (
        "fp8", {}, ("lm_head", *GATES),
        {"modules_to_not_convert": ["lm_head", "model.language_model.embed_tokens", "model.visual"]
         + [f"{PREFIX}{i}.linear_attn.{name}" for i in (0, 2) for name in (*GATES, "conv1d")]},
    ),
    "fp8_ignored_layers": (
        "fp8", {}, ("lm_head", "attn"),
        {"modules_to_not_convert": None, "ignored_layers": ["lm_head", "visual", r"model\..*\.(linear|self)_attn"]},
    ),
    "compressed_tensors": (
        "pack-quantized", {}, ("lm_head", *GATES),
        {"ignore": ["lm_head", "re:.*visual.*", "re:^mtp.*", r"re:.*linear_attn\.in_proj_[ab]$"]},
    ),
    "compressed_tensors_names": (
        "float-quantized", {}, ("lm_head", "linear_attn"),
        {"ignore": ["lm_head", *(f"{PREFIX}{i}.linear_attn.{name}" for i in (0, 2) for name in (
            *GATES, "in_proj_qkv", "in_proj_z", "out_proj"))]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", PUBLISHED)
def test_hybrid_checkpoints_as_published(case, tmp_path):
    """The logits equal the logits of the same checkpoint with dequantized weights."""
    method, options, skip, changes = PUBLISHED[case]
    sizes = dict(intermediate_size=320, linear_key_head_dim=32, linear_value_head_dim=32, linear_num_value_heads=4)
    truth = write_quantized(tmp_path, method, skip, "qwen3.5", sizes, **options)
    assert any(name.endswith("mlp.down_proj") for name in truth) and not any(name.endswith(GATES) for name in truth)
    values = json.loads((tmp_path / "config.json").read_text())
    change_config(tmp_path, quantization_config=values["quantization_config"] | changes)
    nest(tmp_path)
    config = load_config(tmp_path)
    packed = load_weights(tmp_path, config, "cpu", torch.float32, packs=True)
    kinds = {name: linear.number_type != "dense" for layer in packed.layers for name, linear in layer.linears.items()}
    attention = any("self_attn" in name for name in truth)
    delta = any("linear_attn" in name for name in truth)
    assert kinds == {
        "in_proj": delta, "out_proj": delta, "qkv": attention, "o_proj": attention, "gate_up": True, "down": True,
    }  # fmt: skip
    ids = [3, 40, 5, 106, 7]
    with Engine.load(tmp_path, device="cpu") as engine:
        scores = engine.score(ids)
    tensors = load_file(tmp_path / "model.safetensors")
    modules = {name.replace("model.", "model.language_model.", 1): weight for name, weight in truth.items()}
    kept = {name: t for name, t in tensors.items() if name.rpartition(".")[0] not in modules}
    kept |= {f"{name}.weight": weight.contiguous() for name, weight in modules.items()}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    change_config(tmp_path, quantization_config=None)
    with Engine.load(tmp_path, device="cpu") as engine:
        assert torch.equal(engine.score(ids), scores)
