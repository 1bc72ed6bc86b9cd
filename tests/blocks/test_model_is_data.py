"""A family and a kind of block that the package does not know run without a change to the package."""

from dataclasses import dataclass, replace

import checkpoints
import pytest
import torch
from checkpoints import write_tiny
from models import CUDA, DEVICE
from test_parity import check_contract, transformers_logits
from torch.nn.functional import scaled_dot_product_attention, silu

from tridecode import Engine, SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.blocks.block import Block, add_residual, project
from tridecode.blocks.mlp import MLP
from tridecode.blocks.rope import RopeConfig, rope_tables
from tridecode.blocks.spec import Layer, ModelSpec
from tridecode.checkpoint.load import random_weights
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
    """Return a Llama with multipliers. A stream divided by the embedding's multiplier needs none on the embedding."""
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
    exact = transformers_logits(granite, ids, torch.float32)
    error = (engine.score(ids).double() - exact.double()).norm() / exact.double().norm()
    assert error < 1e-5
    assert engine.config.family == "granite"


def test_granite_is_no_worse_than_transformers_bf16(granite):
    check_contract(granite)


@dataclass(frozen=True, kw_only=True)
class Parallel(Block):
    """Attention and an MLP that read one norm; the residual stream gets the sum of both."""

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
        project(run, state, layer, "gate_up", residual.normed, act, gated)  # first: o_proj overwrites normed
        residual = self.attention.decode(run, state, layer, residual)
        return add_residual(run, state, layer, "down", act, residual)

    def prompt(self, run, state, layer, residual):
        own = state.buffers(self.mlp)
        project(run, state, layer, "gate_up", residual.normed, own["gate_up"], Plain())
        run("silu_mul", SILU_MUL, own["gate_up"], own["act"])
        pending = self.attention.prompt(run, state, layer, residual).pending
        norm = layer.weights["mixer_norm"]  # the rows that it normalizes are not read
        run("add", ADD_NORM, residual.hidden, pending, norm, residual.normed, self.eps)
        project(run, state, layer, "down", own["act"], state.delta, Plain())
        return residual._replace(pending=state.delta)


def parallel_spec() -> ModelSpec:
    attention = Attention(hidden=96, heads=4, kv_heads=2, head_dim=64, qk_norm=True, rope=RopeConfig(theta=1e4))
    block = Parallel(hidden=96, attention=attention, mlp=MLP(hidden=96, intermediate=160))
    return ModelSpec("parallel", 96, 331, 512, layers=(Layer(block),) * 3)


def rms_norm(x, weight, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def reference_logits(spec, weights, ids):
    """Compute logits [tokens, vocab] in fp32, all positions at once."""
    h = weights.embed.float()[torch.tensor(ids, device=weights.device)]
    tokens = len(ids)
    for layer, loaded in zip(spec.layers, weights.layers):
        attention = layer.mixer.attention
        w = {name: value.matrix() if hasattr(value, "matrix") else value.float() for name, value in loaded.items()}
        x = rms_norm(h, w["mixer_norm"])
        q, k, v = (x @ w["qkv"].T).view(tokens, -1, attention.head_dim).split([4, 2, 2], 1)
        cos, sin = (t[:, None] for t in rope_tables(attention.rope, attention.head_dim, tokens, weights.device))
        rotated = []
        for part, norm in ((q, w["q_norm"]), (k, w["k_norm"])):
            a, b = rms_norm(part, norm).chunk(2, -1)
            rotated.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1))
        q, k, v = (part.transpose(0, 1) for part in (*rotated, v))
        k, v = (part.repeat_interleave(2, 0) for part in (k, v))
        attended = scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        gate, up = (x @ w["gate_up"].T).chunk(2, -1)
        h = h + attended.transpose(0, 1).flatten(1) @ w["o_proj"].T + (silu(gate) * up) @ w["down"].T
    return rms_norm(h, weights.final_norm.float()) @ weights.lm_head.matrix().T


def test_a_parallel_block_agrees_with_its_reference():
    spec, dtype = parallel_spec(), torch.bfloat16 if CUDA else torch.float32
    weights = random_weights(spec, DEVICE, dtype)
    engine = Engine.build(spec, weights, None, 256, "triton" if CUDA else "torch")
    ids = [(7 * i) % 331 for i in range(90)]
    exact = reference_logits(spec, weights, ids)
    tolerance = 2e-2 if CUDA else 1e-5
    decoded = engine.score(ids)  # by decode passes
    assert (decoded - exact).norm() / exact.norm() < tolerance
    answer = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=1), reuse_prefix=False)
    read = engine.model.workspace.logits[0]  # by a prompt pass, whose last layer runs whole
    assert (read - exact[-1]).norm() / exact[-1].norm() < tolerance
    assert answer.usage.reused_tokens == 0


def test_decode_passes_continue_what_a_prompt_pass_of_parallel_blocks_read():
    spec = parallel_spec()
    weights = random_weights(spec, DEVICE, torch.float32)
    engine = Engine.build(spec, weights, None, 256, "triton" if CUDA else "torch")
    ids = [(7 * i) % 331 for i in range(90)]
    tokens = engine.generate(ids, SamplingParams(temperature=0.0, max_tokens=6)).token_ids
    for token in tokens:
        assert token == reference_logits(spec, weights, ids)[-1].argmax()
        ids.append(token)
