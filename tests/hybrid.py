"""A tiny model with recurrent layers and attention, and prompts for it."""

import torch
from block_check import VOCAB, spec_of, weights_of
from models import build_engine

from tridecode import SamplingParams
from tridecode.blocks.attention import Attention
from tridecode.blocks.gated_delta import GatedDelta
from tridecode.blocks.mlp import MLP
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.spec import Layer

MLP_BLOCK = MLP(hidden=96, intermediate=160)
ATTENTION = Attention(
    hidden=96, heads=2, kv_heads=1, head_dim=64, qk_norm=True, gate=True, rope=RopeConfig(1e4, partial=0.25)
)
DELTA = GatedDelta(hidden=96, key_heads=2, value_heads=4, key_dim=16, value_dim=32)
SPEC = spec_of(Layer(DELTA, MLP_BLOCK), Layer(ATTENTION, MLP_BLOCK), Layer(DELTA, MLP_BLOCK), Layer(ATTENTION))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
REPEATING = 12.0  # with an embedding this large, the next token depends mostly on the last one, so texts repeat


def prompt_of(seed: int, count: int) -> list[int]:
    return [(7 * i + seed) % VOCAB for i in range(count)]


def hybrid_weights(embedding: float = 1.0, dtype: torch.dtype = torch.float32):
    weights = weights_of(SPEC, dtype, seed=3)
    weights.embed.mul_(embedding)
    return weights


def hybrid_engine(weights, capacity=256, *args, **options):
    engine = build_engine(SPEC, weights, capacity, *args, **options)
    engine.threads = 1  # a tiny model's operations are shorter than a wait for another thread
    return engine
