"""Passes of a model with quantized experts: kernels against references."""

from dataclasses import replace

import pytest
import torch
from block_check import spec_of
from models import CUDA, DEVICE, build_engine, interpreter_configs
from util import assert_close

from tridecode import SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.spec import Layer
from tridecode.blocks.weights import Weights
from tridecode.checkpoint.load import random_weights
from tridecode.checkpoint.quantization.quantize import rules
from tridecode.kernels.linear.weight import LoadedLinear
from tridecode.layout import packed
from tridecode.serve.request import scoring

ATTENTION = Attention(hidden=128, heads=2, kv_heads=1, head_dim=64, rope=RopeConfig(1e4))
LAYER = Layer(ATTENTION, MoE(hidden=128, experts=4, top_k=2, intermediate=64, shared=True))
IDS = [(7 * i) % 331 for i in range(6)]


def quantized_weights(scheme: str) -> tuple:
    """Return a model and its weights. Without a GPU, only the experts are packed."""
    spec = spec_of(LAYER, LAYER, load_quantization=rules(scheme, "keep"))
    dtype = torch.bfloat16 if CUDA else torch.float32
    weights = random_weights(spec, DEVICE, dtype, packs=True)
    assert all(layer.linears["experts_gate_up"].packed for layer in weights.layers)
    return spec, weights if CUDA else replace(weights, layers=tuple(map(with_dense_attention, weights.layers)))


def with_dense_attention(layer):
    linears = {
        name: linear if name.startswith("experts") else LoadedLinear(linear.matrix())
        for name, linear in layer.linears.items()
    }
    return layer._replace(linears=linears)


def engines(spec, weights: Weights, **options):
    configs = None if CUDA else interpreter_configs(spec, weights)
    kernels = build_engine(spec, weights, 64, "triton", "none", configs, **options)
    return kernels, build_engine(spec, weights, 64, "torch", "none", **options)


@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8"])
def test_passes_agree_with_their_references(scheme):
    spec, weights = quantized_weights(scheme)
    kernels, references = engines(spec, weights, slots=4)
    tolerance = 2e-2 if CUDA else 1e-4
    assert_close(kernels.score(IDS), references.score(IDS), tolerance, "decode passes of one row")
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    for engine in (kernels, references):
        engine.generate(IDS, greedy, reuse_prefix=False)
    found, expected = (engine.model.workspace.logits[0] for engine in (kernels, references))
    assert_close(found, expected, tolerance, "a prompt pass")
    texts = [IDS[i:] + IDS[:i] for i in range(4)]
    found, expected = (scores_of_rows(engine, texts) for engine in (kernels, references))
    assert_close(found, expected, tolerance, "decode passes of several rows")


def scores_of_rows(engine, texts) -> torch.Tensor:
    """Score all texts in the same decode passes. Tokens do not depend on logits, whose errors could change a choice."""
    shape = (len(IDS), engine.config.vocab_size)
    requests = [scoring(packed(ids), 0.0, logits=torch.empty(shape, device=DEVICE)) for ids in texts]
    for request in [engine._driver.submit(request) for request in requests]:
        assert request.result().error is None
    rows = [stat.rows for stat in engine.graph_stats() if stat.kind != "prompt"]
    assert max(rows) == len(texts), "the texts were scored in several passes"
    return torch.cat([request.logits for request in requests])
