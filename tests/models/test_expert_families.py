"""Families with experts: config.json, both forms of their tensors, and settings that few checkpoints have."""

import pytest
import torch
from checkpoints import EXPERTS, FAMILIES, randomise, write_tiny, write_tokenizer
from models import DEVICE
from test_parity import transformers, transformers_logits
from util import assert_close

from tridecode import Engine
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.moe import MoE
from tridecode.checkpoint.config import parse_config
from tridecode.errors import CheckpointError

COMMON = dict(
    hidden_size=2048, num_hidden_layers=48, vocab_size=151936, rms_norm_eps=1e-6, torch_dtype="bfloat16",
    tie_word_embeddings=False, hidden_act="silu", attention_bias=False, mlp_only_layers=[], decoder_sparse_step=1,
)  # fmt: skip
QWEN3 = COMMON | dict(
    architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", head_dim=128, intermediate_size=6144,
    max_position_embeddings=40960, max_window_layers=48, moe_intermediate_size=768, norm_topk_prob=True,
    num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_key_value_heads=4, rope_theta=1000000.0,
    sliding_window=None, use_sliding_window=False,
)  # fmt: skip
QWEN2 = COMMON | dict(
    architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", intermediate_size=5632, num_hidden_layers=24,
    max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
    num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_key_value_heads=16, rope_theta=1000000.0,
    shared_expert_intermediate_size=5632, sliding_window=32768, use_sliding_window=False,
)  # fmt: skip
NEXT = COMMON | dict(
    architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", head_dim=256, intermediate_size=5120,
    full_attention_interval=4, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144, moe_intermediate_size=512,
    norm_topk_prob=True, num_attention_heads=16, num_experts=512, num_experts_per_tok=10, num_key_value_heads=2,
    partial_rotary_factor=0.25, rope_theta=10000000, shared_expert_intermediate_size=512,
)  # fmt: skip
VISION = dict(
    depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=192, patch_size=4,
    num_position_embeddings=16,
)  # fmt: skip
IDS = [(7 * i * i + 3) % 380 for i in range(70)]


def test_published_configs():
    spec = parse_config(QWEN3)
    assert {layer.ffn for layer in spec.layers} == {MoE(hidden=2048, experts=128, top_k=8, intermediate=768)}
    assert (spec.family, spec.num_layers, spec.layers[0].mixer.qk_norm) == ("qwen3_moe", 48, True)
    ffn = parse_config(QWEN2).layers[0].ffn
    assert (ffn.experts, ffn.top_k, ffn.intermediate, ffn.normalize, ffn.shared) == (60, 4, 1408, False, False)
    assert ffn.apart.intermediate == 5632 and parse_config(QWEN2).layers[0].mixer.bias
    spec = parse_config(NEXT)
    assert [isinstance(layer.mixer, GatedDelta) for layer in spec.layers] == [True, True, True, False] * 12
    delta, attention, ffn = spec.layers[0].mixer, spec.layers[3].mixer, spec.layers[0].ffn
    assert delta.grouped_qkvz and delta.grouped_ba
    assert attention.gate and attention.rope.columns(256) == 64 and spec.norm_offset == 1.0
    assert (ffn.experts, ffn.top_k, ffn.normalize, ffn.shared, ffn.apart) == (512, 10, True, True, None)
    assert {block.norm_offset for block in spec.blocks()} == {1.0}


def test_transformers_5_renames_the_number_of_experts():
    values = {key: value for key, value in QWEN3.items() if key != "num_experts"} | {"num_local_experts": 128}
    assert parse_config(values) == parse_config(QWEN3)


@pytest.mark.parametrize(
    "changes, dense",
    [
        ({}, []),
        ({"mlp_only_layers": [0, 5]}, [0, 5]),
        ({"decoder_sparse_step": 2}, [0, 2, 4]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [0, 1, 2, 3, 4]),
    ],
)
def test_layers_with_an_mlp(changes, dense):
    layers = parse_config(QWEN3 | {"num_hidden_layers": 6} | changes).layers
    assert [i for i, layer in enumerate(layers) if layer.ffn == MLP(hidden=2048, intermediate=6144)] == dense
    assert sum(isinstance(layer.ffn, MoE) for layer in layers) == 6 - len(dense)


@pytest.mark.parametrize("values", [QWEN3, QWEN2, NEXT], ids=lambda values: values["model_type"])
def test_model_type_without_architecture(values):
    assert parse_config(values | {"architectures": None}) == parse_config(values)


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"num_experts": 0}, ["num_experts", "from 1 to 1024", "got 0"]),
        ({"num_experts": 10**12}, ["num_experts", "from 1 to 1024", "got 1000000000000"]),
        ({"num_experts": 512, "num_hidden_layers": 4096}, ["num_experts", "from 1 to 32", "got 512"]),
        ({"num_experts": None}, ["num_experts", "got null"]),
        ({"num_experts_per_tok": 129}, ["num_experts_per_tok", "at most the number of experts (128)", "got 129"]),
        ({"num_experts_per_tok": 0}, ["num_experts_per_tok", "got 0"]),
        ({"moe_intermediate_size": 2**40}, ["moe_intermediate_size", "from 1 to 1048576"]),
        ({"mlp_only_layers": "all"}, ["mlp_only_layers", "a list"]),
        ({"decoder_sparse_step": 0}, ["decoder_sparse_step", "got 0"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "true or false"]),
        (QWEN2 | {"shared_expert_intermediate_size": 0}, ["shared_expert_intermediate_size", "got 0"]),
        ({"architectures": ["GptOssForCausalLM"]}, ["architectures", "GptOssForCausalLM"]),
        ({"architectures": ["Gemma4ForConditionalGeneration"]}, ["architectures", "Gemma4ForConditionalGeneration"]),
        ({"architectures": ["MixtralForCausalLM"]}, ["architectures", "MixtralForCausalLM"]),
    ],
)
def test_invalid_values_are_refused_by_name(changes, words):
    with pytest.raises(CheckpointError) as caught:
        parse_config(QWEN3 | changes)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


WINDOWS = {
    "qwen3-moe": (dict(sliding_window=16, use_sliding_window=True), [16, 16, 16]),
    "qwen2-moe": (
        dict(sliding_window=16, use_sliding_window=True, max_window_layers=3, num_hidden_layers=4),
        [16, 0] * 2,
    ),
}


@pytest.mark.parametrize("family", WINDOWS)
def test_windows_agree_with_transformers(family, tmp_path):
    changes, windows = WINDOWS[family]
    check(
        write_tiny(tmp_path, family, **changes), lambda spec: [layer.mixer.window for layer in spec.layers] == windows
    )


@pytest.mark.parametrize("family", EXPERTS)
def test_stacked_tensors_agree_with_transformers(family, tmp_path):
    """Compare the form of checkpoints that transformers does not write by default: one tensor for all experts."""
    path = write_tiny(tmp_path, family, stacked=True)
    check(path, lambda spec: all(not isinstance(ffn, MoE) or ffn.stacked for ffn in (each.ffn for each in spec.layers)))


def check(path, expected):
    """Compare logits in fp32 with transformers, and the specification with `expected`."""
    with Engine.load(path, device=str(DEVICE), dtype="float32") as engine:
        assert expected(engine.config)
        logits = engine.score(IDS)
    assert_close(logits, transformers_logits(path, [IDS], torch.float32)[0], 2e-5)


def test_checkpoint_of_a_model_with_vision(tmp_path):
    settings = {key: value for key, value in FAMILIES["qwen3.5-moe"].items() if key not in ("architecture", "causal")}
    text = transformers.Qwen3_5MoeTextConfig(**settings, hidden_size=192, num_hidden_layers=2, vocab_size=389)
    config = transformers.Qwen3_5MoeConfig(text_config=text.to_dict(), vision_config=VISION)
    model = transformers.Qwen3_5MoeForConditionalGeneration(config).to(DEVICE).eval()
    randomise(model, seed=1)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with torch.no_grad():
        exact = model(torch.tensor([IDS], device=DEVICE)).logits[0]
    with Engine.load(tmp_path, device=str(DEVICE), dtype="float32") as engine:
        assert engine.config.prefix == "model.language_model." and engine.config.family == "qwen3_5_moe"
        assert_close(engine.score(IDS), exact, 2e-5)
