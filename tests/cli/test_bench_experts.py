"""Tests of the figures of bench for models with experts: bytes, distinct experts and prices of drafts."""

import json

import pytest
import torch
from benches import bench_on_tiny_engines
from block_check import spec_of
from models import DEVICE, EXPERTS, build_engine, tiny_config, tiny_engine

from tridecode.blocks.attention import Attention
from tridecode.blocks.moe import MoE
from tridecode.blocks.rope import RopeConfig
from tridecode.blocks.spec import Layer
from tridecode.checkpoint.hub import BUNDLED
from tridecode.checkpoint.load import random_weights
from tridecode.cli.bench import measure, prefill
from tridecode.cli.bench.passes import enqueue, rewind
from tridecode.cli.bench.speculate_texts import simulate, texts
from tridecode.cli.profile.experts import RouteRecorder, distinct
from tridecode.layout import NGRAM
from tridecode.step.dispatch import typical_costs
from tridecode.step.graphs import DecodePasses
from tridecode.step.run import launch, run_reference
from tridecode.text.tokenizer import Tokenizer

MLP, EXPERT = 3 * 96 * 160, 3 * 96 * 48  # Parameters of the MLP and of an expert.
OTHERS = 96 * (256 + 2 * 128) + 256 * 96 + 2 * 96 + 2 * 64  # Parameters of the attention and the norms of a layer.
GATES = 7 * 96  # Parameters of the router and of the gate of the shared expert.


def test_a_pass_reads_distinct_experts():
    """The first layer has six experts and a shared one. A row uses two of the six. The second layer has an MLP."""
    engine = tiny_engine(dtype=torch.bfloat16, experts=EXPERTS, tie_word_embeddings=False)
    fixed = 2 * OTHERS + MLP + GATES + 96 + 331 * 96
    for rows, used in ((1, 2), (2, 6 * (1 - (2 / 3) ** 2)), (7, 6 * (1 - (2 / 3) ** 7))):
        weights = 2 * (fixed + (1 + used) * EXPERT)
        kv = rows * 10 * 2 * 2 * 128 * 2
        assert measure.step_bytes(engine, [10] * rows, 1) == pytest.approx(weights + kv, abs=1)
        assert measure.experts_of(engine, rows) == pytest.approx(1 + used)
    assert measure.experts_of(tiny_engine(), 1) is None


def test_flops_count_the_experts_of_a_token():
    config = tiny_config(experts=EXPERTS, num_layers=1)
    qkv, rest, head = 96 * 512, 96 * 256 + 3 * EXPERT, 96 * 331
    assert prefill.prefill_flops(config, 1) == 2 * (qkv + rest + head) + 4 * 256
    # All tokens have K and V; only the last token runs through the rest of the last layer.
    assert prefill.prefill_flops(config, 3) == 2 * (3 * qkv + rest + head) + 3 * 4 * 256


def mixture(**build):
    """Return an engine of four layers of 32 experts. A row uses four experts."""
    attention = Attention(hidden=96, rope=RopeConfig(theta=1e4), heads=4, kv_heads=2, head_dim=64)
    spec = spec_of(*[Layer(attention, MoE(hidden=96, experts=32, top_k=4, intermediate=16))] * 4)
    return build_engine(spec, random_weights(spec, DEVICE, torch.float32), 256, graph="none", **build)


@pytest.mark.parametrize("requests, tokens", [(4, 1), (16, 1), (1, 4), (1, 8)])
def test_timed_passes_use_as_many_experts_as_uniform_routes(requests, tokens):
    """Rows of one request that had equal tokens would share their experts, and the pass would cost too little."""
    engine = mixture(slots=16, speculate="ngram" if tokens > 1 else "off")
    recorder = RouteRecorder(launch if engine.backend == "triton" else run_reference, 4)
    with measure.running(engine, DecodePasses(engine.model, recorder)):
        rewind(engine, 20, measure.GREEDY, requests, tokens * 6 if tokens > 1 else 0)
        for _ in range(4):
            enqueue(engine, measure.GREEDY, requests, tokens)
    engine.synchronize()
    counts = [distinct(ids) for each in recorder.passes for ids in each.ids]
    expected = engine.config.layers[0].ffn.linears()[0].experts_of(requests * tokens)
    assert len(counts) == 16 and all(len(each.places) == requests * tokens for each in recorder.passes)
    assert sum(counts) / len(counts) == pytest.approx(expected, rel=0.12)


def test_rows_of_bench_contain_experts_and_limits(capsys, monkeypatch):
    def make(args, capacity, *sizes, **more):
        engine = mixture(slots=sizes[0] if sizes else 1)
        engine.model.kv.fill()
        return engine

    bench = bench_on_tiny_engines(capsys, monkeypatch, "decode", "batch", "prefill", make=make)
    argv = ("--steps", "2", "--runs", "1", "--format", "json")
    (one,) = json.loads(bench("decode", "--context", "9", *argv)[1])
    assert one["experts"] == 4
    rows = json.loads(bench("batch", "--rows", "1,8", "--context", "9", *argv)[1])
    assert [row["experts"] for row in rows] == [4, pytest.approx(32 * (1 - 0.875**8), abs=0.06)]
    assert rows[1]["bytes_per_step"] > 1.8 * rows[0]["bytes_per_step"]
    (row,) = json.loads(bench("prefill", "--prompt-tokens", "40", "--runs", "1", "--format", "json")[1])
    engine = bench.made[-1]
    size = engine.model.weights.nbytes() - engine.model.weights.embed.nbytes
    assert 0.97 * size < row["weight_bytes"] < size, "a prompt of 40 tokens uses nearly all experts"
    # The measured limits are 1 GB/s and 1 TFLOP/s, so reading the weights takes longer than the products.
    reading, products = row["weight_bytes"] / 1e9, row["flops"] / 1e12
    percent = 100 * reading / (row["prefill_ms"] / 1e3)
    assert row["pct_limit"] == pytest.approx(percent, rel=0.02, abs=0.06)  # It is rounded to 0.1.
    assert reading > products and row["pct_limit"] >= row["pct_matmul"]


def test_drafts_are_priced_by_distinct_experts():
    """A pass of eight rows of a mixture costs several times as much as one row, so few drafts are worth verifying."""
    engine = mixture()
    costs, dense = engine.steps.costs_of("greedy", 1), typical_costs(1)
    share = (
        4 * 4 * 3 * 96 * 16 * 4 / measure.bytes_read(engine.config, engine.model.weights, 1)
    )  # share of four experts
    ratio = 32 * (1 - 0.875**8) / 4
    assert costs[1] == 1 and costs[8] == pytest.approx(dense[8] + share * (ratio - 1))
    assert tiny_engine().steps.costs_of("greedy", 1) == dense
    priced = {1: 1.0, 2: 1.68, 4: 2.73, 8: 4.47}  # Qwen3-30B-A3B.
    tokenizer, (*_, chat) = Tokenizer.load(BUNDLED), texts()
    before, sampled = tokenizer.encode(chat.before), tokenizer.encode(chat.sampled)[:1000]
    took = []
    for each in (priced, dense):
        passes = simulate(before, sampled, NGRAM, each)
        took.append(sum(count * priced[rows] for rows, count in passes.items()))
    assert took[0] < 1.01 * len(sampled), "drafts slow a text that does not repeat itself"
    assert took[1] > 1.05 * len(sampled), "the price of a model without experts would not slow the text"
