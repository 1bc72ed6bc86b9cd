"""Quantized checkpoints of each method, written by hand and by other programs, loaded dequantized and packed."""

import json
import re

import pytest
import torch
from checkpoints import write_tiny
from quantized import WIDTHS, change_config, write_quantized
from safetensors.torch import load_file, save_file

from tridecode.checkpoint.load import load_config, load_weights
from tridecode.engine import Engine
from tridecode.errors import CheckpointError
from tridecode.kernels.linear.weight import LoadedLinear

CHECKPOINTS = {
    "awq": ("awq", {}),
    "awq_without_zeros": ("awq", dict(zeros=False, group=32)),
    "gptq": ("gptq", {}),
    "gptq_8_bits": ("gptq", dict(bits=8, group=32)),
    "gptq_desc_act": ("gptq", dict(ordered=True)),
    "gptq_v2_a_row": ("gptq", dict(version=2, group=-1)),
    "packed_int4": ("pack-quantized", {}),
    "packed_int4_zeros": ("pack-quantized", dict(zeros=True, group=32)),
    "packed_int8": ("pack-quantized", dict(bits=8)),
    "packed_int8_zeros_a_row": ("pack-quantized", dict(bits=8, zeros=True, group=-1)),
    "packed_actorder": ("pack-quantized", dict(ordered=True)),
    "float_tensor": ("float-quantized", dict(shared="tensor")),
    "float_channel": ("float-quantized", dict(shared="channel")),
    "float_block": ("float-quantized", dict(shared="block")),
    "fp8_blocks": ("fp8", {}),
    "fp8_blocks_but_some": ("fp8", dict(skip=("lm_head", "layers.1.mlp.down_proj", "layers.0.self_attn"))),
}
ROWS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "o_proj": ("self_attn.o_proj",)}
ROWS |= {"gate_up": ("mlp.gate_proj", "mlp.up_proj"), "down": ("mlp.down_proj",)}


def compare(weights, truth: dict[str, torch.Tensor], tolerance=0.0) -> int:
    """Compare each quantized linear with the weight that its file represents. Return the number of packed tensors."""
    packed = 0
    for i, layer in enumerate(weights.layers):
        for name, parts in ROWS.items():
            names = [f"model.layers.{i}.{part}" for part in parts]
            if names[0] in truth:
                linear = layer.linears[name]
                expected = torch.cat([truth[part] for part in names])
                torch.testing.assert_close(linear.matrix(), expected, rtol=tolerance, atol=0, msg=f"{i} {name}")
                packed += linear.packed is not None
    return packed


@pytest.mark.parametrize("packs", [False, True], ids=["dequantized", "packed"])
@pytest.mark.parametrize("case", CHECKPOINTS)
def test_dequantized_weights_match_the_file(case, packs, tmp_path):
    method, how = CHECKPOINTS[case]
    truth = write_quantized(tmp_path, method, **how)
    seen = []
    weights = load_weights(
        tmp_path, load_config(tmp_path), "cpu", torch.float32, lambda *at: seen.append(at), packs=packs
    )
    packed = compare(weights, truth)
    assert packed == (sum(name.endswith(("q_proj", "o_proj", "gate_proj", "down_proj")) for name in truth) * packs)
    assert seen[-1][0] == seen[-1][1] and weights.lm_head.number_type == "dense"


@pytest.mark.parametrize("nested", [True, False])
def test_gptq_quantizes_only_the_listed_modules(nested, tmp_path):
    truth = write_quantized(tmp_path, "gptq", skip=("lm_head", "mlp", "o_proj"))
    listed = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
    values = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    values.pop("modules_to_not_convert", None)
    change_config(
        tmp_path, quantization_config=values | {"modules_in_block_to_quantize": [listed] if nested else listed}
    )
    weights = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32, packs=True)
    assert len(truth) == 6 and compare(weights, truth) == 2
    layer = weights.layers[0]
    assert {name for name in ROWS if layer.linears[name].packed is not None} == {"qkv"}


def test_engine_matches_the_dequantized_checkpoint(tmp_path):
    truth = write_quantized(tmp_path / "few", "awq")
    write_tiny(tmp_path / "all", "qwen3", **WIDTHS)
    tensors = load_file(tmp_path / "all" / "model.safetensors")
    tensors |= {f"{name}.weight": weight.contiguous() for name, weight in truth.items()}
    save_file(tensors, tmp_path / "all" / "model.safetensors", metadata={"format": "pt"})
    ids = [3, 40, 5, 106, 7]
    few, every = (Engine.load(tmp_path / name, device="cpu").score(ids) for name in ("few", "all"))
    assert torch.equal(few, every)


def test_a_quantized_lm_head(tmp_path):
    truth = write_quantized(tmp_path, "float-quantized", skip=())
    weights = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32, packs=True)
    assert weights.lm_head.number_type == "e4m3" and torch.equal(weights.lm_head.matrix(), truth["lm_head"])
    assert not weights.tied and {"lm_head.weight", "lm_head.scale"} <= set(weights.tensors())


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group", "group_zeros", "int8"])
def test_files_of_compressed_tensors(strategy, tmp_path):
    """The compressed-tensors library compresses and decompresses the weights; the engine reads the same values."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    format_name = "float-quantized" if strategy in ("tensor", "channel") else "pack-quantized"
    values = dict(num_bits=8, type="float", strategy=strategy)
    if format_name == "pack-quantized":
        bits = 8 if strategy == "int8" else 4
        values = dict(num_bits=bits, type="int", strategy="group", group_size=32, symmetric="zeros" not in strategy)
    args = QuantizationArgs(**values)
    compressor = BaseCompressor.get_value_from_registry(format_name)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    columns = args.group_size
    write_tiny(tmp_path, "qwen3", **WIDTHS)
    tensors, truth = load_file(tmp_path / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        n, k = weight.shape
        parts = weight.view(1, 1, -1) if strategy == "tensor" else weight.view(n, -1, columns or k)
        peak = parts.abs().amax(-1)
        scale = peak / (2 ** (args.num_bits - 1) if columns else 448)
        state = {"weight": weight, "weight_scale": scale.view(1) if strategy == "tensor" else scale}
        if not args.symmetric:
            state["weight_zero_point"] = torch.randint(-3, 4, peak.shape, dtype=torch.int8)
        found = compressor.compress(state, scheme)
        truth[module] = compressor.decompress(found, scheme)["weight"].float()
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in found.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    group = {"targets": ["Linear"], "weights": args.model_dump(mode="json"), "format": format_name}
    as_messages = {"quant_method": "compressed-tensors", "format": format_name, "ignore": ["lm_head"]}
    change_config(tmp_path, quantization_config=as_messages | {"config_groups": {"group_0": group}})
    for packs in (False, True):
        weights = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32, packs=packs)
        assert compare(weights, truth, tolerance=1e-6) == 8 * packs


def refused(path, words, monkeypatch):
    # The loader must raise the error before it allocates memory.
    monkeypatch.setattr("tridecode.checkpoint.load._allocate", None)
    with pytest.raises(CheckpointError) as caught:
        load_weights(path, load_config(path), "cpu", torch.float32)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


CONFIGS = {
    "unknown_method": ("awq", {"quant_method": "bitsandbytes"}, ["quant_method", "compressed-tensors", "bitsandbytes"]),
    "bits_of_gptq": ("gptq", {"bits": 3}, ["bits", "4 or 8", "3"]),
    "bits_of_awq": ("awq", {"bits": 8}, ["bits", "4", "8"]),
    "version_of_awq": ("awq", {"version": "gemv"}, ["version", "gemm", "gemv"]),
    "group_size": ("gptq", {"group_size": 48}, ["group_size", "32, 64, 128", "48"]),
    "group_that_does_not_divide": ("awq", {"group_size": 128}, ["groups of 128", "192", "q_proj"]),
    "modules_of_gptq": ("gptq", {"modules_in_block_to_quantize": [[5]]}, ["modules_in_block_to_quantize", "names"]),
    "blocks_of_fp8": ("fp8", {"weight_block_size": [64, 64]}, ["weight_block_size", "[128, 128]"]),
    "expression_of_fp8": ("fp8", {"ignored_layers": ["*.gate"]}, ["ignored_layers", "regular expression", "*.gate"]),
    "format": ("pack-quantized", {"format": "nvfp4-pack-quantized"}, ["format", "pack-quantized", "nvfp4"]),
    "no_regular_expression": ("pack-quantized", {"ignore": ["re:("]}, ["ignore", "regular expression"]),
    "no_groups": ("pack-quantized", {"config_groups": {}}, ["config_groups", "at least one group"]),
    "transforms": ("pack-quantized", {"transform_config": {"config_groups": {}}}, ["transform_config", "empty"]),
    "packed_bits": ("pack-quantized", {"num_bits": 3}, ["config_groups.group_0.weights.num_bits", "4 or 8", "3"]),
    "packed_type": ("pack-quantized", {"type": "float"}, ["num_bits", "int"]),
    "packed_strategy": ("pack-quantized", {"strategy": "tensor_group"}, ["strategy", "group"]),
    "packed_group": ("pack-quantized", {"group_size": 48}, ["group_size", "32, 64 or 128"]),
    "no_object": ("awq", None, ["quantization_config", "object"]),
    "other_method_in_the_file": ("awq", {"quant_method": "gptq"}, ["q_proj.g_idx", "missing", "gptq"]),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_invalid_quantization_config_is_refused(case, tmp_path, monkeypatch):
    method, changes, words = CONFIGS[case]
    write_quantized(tmp_path, method)
    values = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    changed = values["config_groups"]["group_0"]["weights"] if case.startswith("packed_") else values
    changed.update(changes or {})
    change_config(tmp_path, quantization_config="awq" if changes is None else values)
    refused(tmp_path, words, monkeypatch)


def test_exact_names_and_expressions_come_before_the_class(tmp_path):
    write_quantized(tmp_path, "pack-quantized")
    values = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    weights = values["config_groups"]["group_0"]["weights"]
    values["config_groups"] |= {
        "group_1": {"targets": ["re:.*down_proj$"], "weights": weights | {"num_bits": 8}},
        "group_2": {"targets": ["model.layers.1.mlp.down_proj"], "weights": weights | {"group_size": 32}},
    }
    change_config(tmp_path, quantization_config=values)
    rules = load_config(tmp_path).checkpoint_quantization
    found = [rules.scheme(f"model.layers.{name}_proj") for name in ("0.mlp.up", "0.mlp.down", "1.mlp.down")]
    assert [(scheme.bits, scheme.group) for scheme in found] == [(4, 64), (8, 64), (4, 32)]


@pytest.mark.parametrize("method", ["pack-quantized", "fp8"])
def test_scales_of_kv_are_not_used(method, tmp_path):
    truth = write_quantized(tmp_path, method)
    names = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale")]
    change_tensors(tmp_path, lambda tensors: tensors.update({name: torch.ones(1) for name in names}))
    weights = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32)
    compare(weights, truth)


def change_tensors(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


NAME = "model.layers.1.mlp.down_proj"


def narrower(tensors):
    tensors[f"{NAME}.qweight"] = tensors[f"{NAME}.qweight"][:, :-1].contiguous()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_biases_of_zeros_are_not_used(dtype, tmp_path):
    """AutoGPTQ writes a bias for each linear."""
    truth = write_quantized(tmp_path, "gptq")
    biases = {f"{name}.bias": torch.zeros(len(weight), dtype=dtype) for name, weight in truth.items()}
    change_tensors(tmp_path, lambda tensors: tensors.update(biases))
    weights = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32)
    compare(weights, truth)
    assert all(linear.bias is None for layer in weights.layers for linear in layer.linears.values())


def bias(value):
    """Return a change that adds a bias."""
    return lambda tensors: tensors.update({f"{NAME}.bias": value})


FILES = {
    "bias": ("gptq", bias(torch.eye(192)[-1]), [f"{NAME}.bias", "does not belong"]),
    "bias_of_a_wrong_size": ("gptq", bias(torch.zeros(191)), [f"{NAME}.bias", "does not belong"]),
    "bias_of_a_wrong_dtype": ("gptq", bias(torch.zeros(192, dtype=torch.int32)), [f"{NAME}.bias", "does not belong"]),
    "missing_scales": ("float-quantized", lambda t: t.pop(f"{NAME}.weight_scale"), [f"{NAME}.weight_scale", "missing"]),
    "wrong_number_of_words": ("awq", narrower, [f"{NAME}.qweight", "[320, 24]", "[320, 23]"]),
    "wrong_dtype": (
        "fp8",
        lambda t: t.update({f"{NAME}.weight": t[f"{NAME}.weight"].float()}),
        [f"{NAME}.weight", "F8_E4M3", "F32"],
    ),
    "extra": ("awq", lambda t: t.update({f"{NAME}.g_idx": torch.zeros(320)}), [f"{NAME}.g_idx", "does not belong"]),
}


@pytest.mark.parametrize("case", FILES)
def test_invalid_quantized_file_is_refused(case, tmp_path, monkeypatch):
    method, change, words = FILES[case]
    write_quantized(tmp_path, method)
    change_tensors(tmp_path, change)
    refused(tmp_path, words, monkeypatch)


def test_groups_of_uneven_size_are_refused(tmp_path):
    write_quantized(tmp_path, "gptq", ordered=True)
    change_tensors(tmp_path, lambda tensors: tensors[f"{NAME}.g_idx"][:70].zero_())
    with pytest.raises(CheckpointError, match=re.escape(NAME) + ".*must have 64 columns"):
        load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32)


def test_linear_with_different_column_orders_is_refused(tmp_path):
    write_quantized(tmp_path, "gptq", ordered=True)
    change_tensors(tmp_path, lambda t: t.update({k: v.flip(0) for k, v in t.items() if k.endswith("k_proj.g_idx")}))
    config = load_config(tmp_path)
    with pytest.raises(CheckpointError, match="q_proj has columns in another order"):
        load_weights(tmp_path, config, "cpu", torch.float32, packs=True)
    load_weights(tmp_path, config, "cpu", torch.float32)


def test_a_linear_names_its_number_type(tmp_path):
    write_quantized(tmp_path, "pack-quantized")
    weights = load_weights(tmp_path, load_config(tmp_path), "cpu", torch.float32, packs=True)
    linear = weights.layers[0].linears["down"]
    assert "number_type=int4" in repr(linear) and linear.in_features == 320 and linear.out_features == 192
    assert {each.number_type for each in weights.linears()} == {"int4", "dense"}
    # Each of the 192 rows has three tiles of 128 columns of four bits, and five scales of two bytes.
    assert linear.nbytes == 192 * (3 * 64 + 2 * 5)
    assert LoadedLinear(torch.zeros(3, 5)).number_type == "dense"
