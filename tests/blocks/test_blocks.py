"""The blocks of the package against their references."""

import pytest
from block_check import REFERENCES, check_block

from tridecode.blocks.attention import Attention
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.shared_expert import SharedExpert
from tridecode.blocks.spec import Layer

COMMON = dict(hidden=96, rope=RopeConfig(theta=1e4))
ATTENTION = {
    "q and k norms": dict(heads=4, kv_heads=2, head_dim=64, qk_norm=True),
    "biases, group of 7": dict(heads=7, kv_heads=1, head_dim=64, bias=True, eps=1e-5),
    "a window, head size 80": dict(heads=3, kv_heads=3, head_dim=80, window=24),
    "a scale of its own": dict(heads=4, kv_heads=4, head_dim=32, scale=0.3),
    "a gate, a part of the columns rotated": dict(
        heads=4, kv_heads=2, head_dim=64, qk_norm=True, gate=True, rope=RopeConfig(1e4, partial=0.25)
    ),
    "llama3 rope": dict(heads=2, kv_heads=1, head_dim=64, rope=RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64)),
}


@pytest.mark.parametrize("settings", ATTENTION.values(), ids=ATTENTION)
def test_attention_agrees_with_its_reference(settings):
    check_block(Layer(Attention(**COMMON | settings)), references=REFERENCES)


def test_attention_and_mlp_agree_with_their_references():
    attention = Attention(**COMMON, heads=4, kv_heads=2, head_dim=64)
    check_block(Layer(attention, MLP(hidden=96, intermediate=160)), references=REFERENCES)


EXPERTS = {
    "weights with sum 1": dict(experts=6, top_k=2, intermediate=48),
    "a shared expert": dict(experts=6, top_k=2, intermediate=48, normalize=False, shared=True),
    "a wide shared expert": dict(
        experts=6, top_k=2, intermediate=48, normalize=False, apart=SharedExpert(hidden=96, intermediate=112)
    ),
    "one expert a row, odd numbers": dict(experts=13, top_k=1, intermediate=40, normalize=False),
    "every expert": dict(experts=4, top_k=4, intermediate=32),
}


@pytest.mark.parametrize("settings", EXPERTS.values(), ids=EXPERTS)
def test_experts_agree_with_their_reference(settings):
    attention = Attention(**COMMON, heads=4, kv_heads=2, head_dim=64)
    check_block(Layer(attention, MoE(hidden=96, **settings)), references=REFERENCES)


@pytest.mark.parametrize("last", ["experts", "mlp"])
def test_layers_with_and_without_experts_agree_with_their_references(last):
    attention, mlp = Attention(**COMMON, heads=4, kv_heads=2, head_dim=64), MLP(hidden=96, intermediate=160)
    experts = [MoE(hidden=96, experts=count, top_k=3, intermediate=48) for count in (6, 9)]
    layers = [Layer(attention, ffn) for ffn in (experts[0], mlp, experts[1])]
    check_block(*(layers if last == "experts" else reversed(layers[:2])), references=REFERENCES)


def test_gated_delta_and_experts_agree_with_their_references():
    experts = MoE(hidden=96, experts=6, top_k=2, intermediate=48, shared=True)
    delta = GatedDelta(hidden=96, key_heads=2, value_heads=4, key_dim=32, value_dim=16)
    attention = Attention(**COMMON, heads=4, kv_heads=2, head_dim=64, gate=True)
    check_block(
        Layer(delta, experts), Layer(delta, experts), Layer(attention, experts), references=REFERENCES,
        bf16_tolerance=6e-2,
    )  # fmt: skip


@pytest.mark.parametrize("sigmoid", [False, True], ids=["swish", "sigmoid"])
@pytest.mark.parametrize("last", ["attention", "delta"])
def test_gated_delta_agrees_with_its_reference(sigmoid, last):
    attention = Layer(Attention(**COMMON, heads=4, kv_heads=2, head_dim=64))
    sizes = dict(key_heads=2, value_heads=4, key_dim=32, value_dim=16)
    delta = Layer(GatedDelta(hidden=96, sigmoid=sigmoid, **sizes), MLP(hidden=96, intermediate=160))
    layers = (delta, delta, attention) if last == "attention" else (attention, delta, delta)
    check_block(*layers, references=REFERENCES, bf16_tolerance=6e-2)  # Gated norms of small heads amplify errors.
