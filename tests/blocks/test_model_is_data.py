"""A family and a kind of block that the package does not know run without a change to the package."""

from dataclasses import dataclass, replace

import checkpoints
import pytest
import torch
from block_check import attention_reference, check_block, mlp_reference
from checkpoints import write_tiny
from models import DEVICE
from test_parity import check_contract, transformers_logits
from util import assert_close

from tridecode import Engine
from tridecode.blocks.attention import Attention
from tridecode.blocks.block import Block, add_residual, project
from tridecode.blocks.mlp import MLP
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.kernels.add_norm import ADD_NORM
from tridecode.kernels.linear.project import Gated, Plain
from tridecode.kernels.silu_mul import SILU_MUL
from tridecode.models.dense import parse_dense
from tridecode.models.registry import FAMILIES

GRANITE = dict(
    architecture="Granite",
    intermediate_size=352,
    num_attention_heads=4,
    num_key_value_heads=2,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    embedding_multiplier=5.0,
    residual_multiplier=0.4,
    attention_multiplier=0.2,
    logits_scaling=3.0,
)


def parse_granite(read) -> ModelSpec:
    """Return a Llama with multipliers.

    The residual stream is divided by the multiplier of the embedding, so the embedding itself needs no factor.
    """
    spec = parse_dense(read, "granite")
    multiplier = read.number("embedding_multiplier", 1e-3, 1e3, default=1.0)
    common = dict(
        eps=spec.eps / multiplier**2,
        residual_scale=read.number("residual_multiplier", 1e-3, 1e3, default=1.0) / multiplier,
    )
    scale = read.number("attention_multiplier", 1e-6, 1e3, default=1.0)
    layers = [Layer(replace(each.mixer, scale=scale, **common), replace(each.ffn, **common)) for each in spec.layers]
    logits_scale = 1 / read.number("logits_scaling", 1e-3, 1e3, default=1.0)
    return replace(spec, layers=tuple(layers), eps=common["eps"], logits_scale=logits_scale)


@pytest.fixture
def granite(tmp_path, monkeypatch):
    monkeypatch.setitem(FAMILIES, "GraniteForCausalLM", parse_granite)
    monkeypatch.setitem(checkpoints.FAMILIES, "granite", GRANITE)
    return write_tiny(tmp_path, "granite")


def test_granite_agrees_with_transformers_in_fp32(granite):
    ids = [(5 * i) % 380 for i in range(70)]
    engine = Engine.load(granite, device=str(DEVICE), dtype="float32")
    [exact] = transformers_logits(granite, [ids], torch.float32)
    assert_close(engine.score(ids), exact, 1e-5)
    assert engine.config.family == "granite"


def test_granite_is_no_worse_than_transformers_bf16(granite):
    check_contract(granite)


@dataclass(frozen=True, kw_only=True)
class Parallel(Block):
    """A block of attention and an MLP that read the same norm. The sum of both is added to the residual stream."""

    attention: Attention
    mlp: MLP

    def inner(self):
        return self.attention, self.mlp

    def linears(self):
        return self.attention.linears() + self.mlp.linears()

    def weights(self):
        return self.attention.weights()

    def states(self):
        return self.attention.states()

    def decode(self, run, state, layer, residual):
        act, gated = state.buffers(self.mlp)["act"], Gated(residual.sumsq, residual.partials, self.eps)
        # This precedes o_proj, which overwrites normed.
        project(run, state, layer, "gate_up", residual.normed, act, gated)
        residual = self.attention.decode(run, state, layer, residual)
        return add_residual(run, state, layer, "down", act, residual)

    def prompt(self, run, state, layer, residual):
        own = state.buffers(self.mlp)
        project(run, state, layer, "gate_up", residual.normed, own["gate_up"], Plain())
        run("silu_mul", SILU_MUL, own["gate_up"], own["act"])
        pending = self.attention.prompt(run, state, layer, residual).pending
        norm = layer.weights["mixer_norm"]  # The test does not read the output of this norm.
        run("add", ADD_NORM, residual.hidden, pending, norm, residual.normed, self.eps)
        project(run, state, layer, "down", own["act"], state.delta, Plain())
        return residual._replace(pending=state.delta)


def test_parallel_block_agrees_with_its_reference():
    attention = Attention(hidden=96, heads=4, kv_heads=2, head_dim=64, qk_norm=True, rope=RopeConfig(theta=1e4))
    block = Parallel(hidden=96, attention=attention, mlp=MLP(hidden=96, intermediate=160))

    def reference(block, w, x):
        return attention_reference(block.attention, w, x) + mlp_reference(block.mlp, w, x)

    check_block(Layer(block), references={Parallel: reference})
