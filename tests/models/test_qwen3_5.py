"""Qwen3.5: config.json and tensors of its checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from checkpoints import write_tiny
from safetensors.torch import load_file, save_file

from tridecode import Engine
from tridecode.blocks.attention import Attention
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.checkpoint.config import parse_config
from tridecode.checkpoint.load import load_config, load_weights
from tridecode.errors import CheckpointError

TEXT = dict(
    hidden_size=2560, intermediate_size=9216, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4,
    vocab_size=248320, max_position_embeddings=262144, eos_token_id=248044, dtype="bfloat16",
    full_attention_interval=4, linear_num_key_heads=16, linear_num_value_heads=32, linear_key_head_dim=128,
    linear_value_head_dim=128, linear_conv_kernel_dim=4, attn_output_gate=True, mamba_ssm_dtype="float32",
    mtp_num_hidden_layers=1,
    rope_parameters=dict(
        rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25, mrope_section=[11, 11, 10],
        mrope_interleaved=True,
    ),
)  # fmt: skip
WHOLE = dict(
    architectures=["Qwen3_5ForConditionalGeneration"], model_type="qwen3_5", text_config=TEXT, vision_config={},
    tie_word_embeddings=True,
)  # fmt: skip


def parsed(**text):
    return parse_config(WHOLE | {"text_config": TEXT | text})


def test_config_of_a_checkpoint_with_a_vision_model():
    spec = parsed()
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == [*[GatedDelta] * 3, Attention] * 2
    assert (spec.prefix, spec.dtype, spec.stop_ids) == ("model.language_model.", "bfloat16", (248044,))
    assert spec.tie_word_embeddings and spec.norm_offset == 1.0
    attention, delta = spec.layers[3].mixer, spec.layers[0].mixer
    assert (attention.head_dim, attention.rope.columns(256), attention.rope.theta) == (256, 64, 1e7)
    assert attention.gate and attention.qk_norm
    assert [linear.n for linear in delta.linears()] == [12288, 2560] and not delta.sigmoid
    assert attention.linears()[0].n == 2 * 16 * 256 + 2 * 4 * 256


def test_config_keys_change_the_blocks():
    spec = parsed(
        output_gate_type="sigmoid", attn_output_gate=False, layer_types=["full_attention"] + ["linear_attention"] * 7
    )
    assert spec.layers[1].mixer.sigmoid and not spec.layers[0].mixer.gate
    assert isinstance(spec.layers[7].mixer, GatedDelta)


@pytest.mark.parametrize("key, value", [
    ("layer_types", ["full_attention"]), ("layer_types", ["linear_attention"] * 8), ("linear_num_value_heads", 24),
    ("linear_key_head_dim", 96), ("linear_value_head_dim", 256), ("mamba_ssm_dtype", "bfloat16"),
    ("output_gate_type", "tanh"), ("linear_conv_kernel_dim", 9), ("hidden_act", "gelu"), ("attention_bias", True),
])  # fmt: skip
def test_unsupported_values_are_refused_by_name(key, value):
    with pytest.raises(CheckpointError, match=f"text_config.{key}|{key}"):
        parsed(**{key: value})


@pytest.fixture(scope="module")
def text_only(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("text"), "qwen3.5")


@pytest.fixture
def with_vision(text_only, tmp_path):
    """The same checkpoint with the names of one that has a vision model, and a layer that predicts several tokens."""
    tensors = load_file(text_only / "model.safetensors")
    nested = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    nested |= {"model.visual.patch_embed.proj.weight": torch.ones(3, 2), "mtp.norm.weight": torch.ones(4)}
    save_file(nested, tmp_path / "model.safetensors")
    config = json.loads((text_only / "config.json").read_text())
    whole = WHOLE | {"text_config": config, "tie_word_embeddings": config["tie_word_embeddings"]}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((text_only / name).read_text())
    return tmp_path


def test_vision_model_is_skipped(text_only, with_vision, caplog):
    ids = list(range(3, 40))
    with Engine.load(text_only, device="cpu") as engine:
        expected = engine.score(ids)
    caplog.set_level("INFO", "tridecode")
    with Engine.load(with_vision, device="cpu") as engine:
        assert torch.equal(engine.score(ids), expected)
    [line] = [record.message for record in caplog.records if "not used" in record.message]
    assert "model.visual.*" in line and "mtp.*" in line


def test_norms_and_constants_keep_fp32(text_only):
    """Zero-centered norms are stored as 1 + weight; the norm of the output of a linear layer is not zero-centered."""
    spec, tensors = load_config(text_only), load_file(text_only / "model.safetensors")
    weights = load_weights(text_only, replace(spec, dtype="bfloat16"), "cpu", torch.bfloat16)
    delta, attention = weights.layers[0].weights, weights.layers[1].weights
    name = "model.layers.0.linear_attn."
    for own, stored in (("a_log", "A_log"), ("dt_bias", "dt_bias"), ("delta_norm", "norm.weight")):
        assert delta[own].dtype == torch.float32 and torch.equal(delta[own], tensors[name + stored])
    assert delta["conv"].dtype == delta["a"].dtype == torch.bfloat16
    for own, stored in (
        (delta["mixer_norm"], "layers.0.input_layernorm"), (delta["ffn_norm"], "layers.0.post_attention_layernorm"),
        (attention["q_norm"], "layers.1.self_attn.q_norm"), (weights.final_norm, "norm"),
    ):  # fmt: skip
        assert own.dtype == torch.float32 and torch.equal(own, 1 + tensors[f"model.{stored}.weight"])
