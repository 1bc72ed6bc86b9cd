"""The ops of a prompt pass other than linears and attention, against their references."""

import pytest
import torch
from check import check_op
from models import FAMILIES, tiny_engine
from util import BF16_ROUNDING, DEVICE, Case, assert_close, covering, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.add_norm import ADD_NORM
from tridecode.kernels.embed_rows import EMBED_ROWS
from tridecode.kernels.silu_mul import SILU_MUL
from tridecode.kernels.take_rows import TAKE_ROWS
from tridecode.layout import Chunk
from tridecode.step.prompt import read, write_chunks
from tridecode.step.run import launch, run_reference

EPS = 1e-6
ROUNDING = {torch.bfloat16: 2 * BF16_ROUNDING, torch.float16: 3e-4, torch.float32: 1e-5}
CASES = [
    Case(
        "qwen3-4b", gpu=dict(rows=65, n=2560, heads=32, kv=8, d=128), small=dict(rows=2, n=1100, heads=4, kv=1, d=128)
    ),
    Case("qwen2.5-0.5b", gpu=dict(rows=7, n=896, heads=14, kv=2, d=64), small=dict(rows=3, n=112, heads=7, kv=1, d=64)),
    Case("g3_d96", gpu=dict(rows=5, n=1152, heads=24, kv=8, d=96), small=dict(rows=3, n=36, heads=3, kv=1, d=96)),
    Case("heads_of_80", gpu=dict(rows=3, n=1000, heads=5, kv=5, d=80), small=dict(rows=3, n=100, heads=5, kv=5, d=80)),
]


@covering(2, case=CASES, dtype=ROUNDING.keys(), first=[True, False])
def test_add_norm_matches_reference(case, dtype, first):
    rows, n = case.sizes["rows"], case.sizes["n"]
    delta = None if first else random(rows, n, dtype=dtype, seed=1)
    args = random(rows, n), delta, norm_weight(n, dtype), poisoned(rows, n, dtype=dtype), EPS
    check_op(ADD_NORM, args, tolerance={"hidden": 1e-6, "out": ROUNDING[dtype]}, accumulates=("hidden",))


def table_of(*chunks: Chunk) -> torch.Tensor:
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32)
    table[: len(chunks)] = torch.tensor(chunks)
    return table.to(DEVICE)


@covering(2, case=CASES, dtype=ROUNDING.keys(), decoding=[0, 3])
def test_embed_rows_matches_reference(case, dtype, decoding):
    n = case.sizes["n"]
    embed, tokens = random(50, n, dtype=dtype), torch.arange(3 * 20, dtype=torch.int32, device=DEVICE).view(3, 20) % 50
    chunks, meta = table_of(Chunk(2, 3, 2, 5), Chunk(0, 5, 1, 0)), meta_rows(7, 3, 19)
    meta[1, layout.STATUS] = layout.STOP
    launched, _ = check_op(EMBED_ROWS, (chunks, meta, tokens, embed, poisoned(8, n), decoding), idle=False)
    expected = {3: tokens[2, 5], 4: tokens[2, 6], 5: tokens[0, 0]}
    expected |= {0: tokens[0, 7], 2: tokens[2, 19]} if decoding else {}
    for row, out in enumerate(launched["out"]):
        assert torch.equal(out, embed[expected[row]].float() if row in expected else torch.zeros_like(out))


@covering(1, case=CASES, dtype=ROUNDING.keys())
def test_take_rows_copies_the_source_rows(case, dtype):
    n = case.sizes["n"]
    hidden, qkv, meta = random(9, n), random(9, 2 * n + 3, dtype=dtype), meta_rows(4, 4, 4, 4)
    meta[:, layout.SOURCE] = torch.tensor([layout.OWN_ROW, 8, 5, layout.OWN_ROW], dtype=torch.int32)
    meta[2, layout.STATUS] = layout.LIMIT_REACHED
    args = meta, hidden, qkv, poisoned(4, n), poisoned(4, 2 * n + 3)
    launched, _ = check_op(TAKE_ROWS, args, accumulates=("meta",))
    for row, source in ((0, 0), (1, 8), (3, 3)):
        assert torch.equal(launched["hidden_out"][row], hidden[source])
        assert torch.equal(launched["qkv_out"][row], qkv[source].float())
    assert launched["meta"][:, layout.SOURCE].tolist() == [layout.OWN_ROW, layout.OWN_ROW, 5, layout.OWN_ROW]


@covering(1, case=CASES, dtype=ROUNDING.keys())
def test_silu_mul_matches_reference(case, dtype):
    rows, n = case.sizes["rows"], case.sizes["n"]
    args = random(rows, 2 * n, dtype=dtype, scale=3.0), poisoned(rows, n, dtype=dtype)
    check_op(SILU_MUL, args, tolerance=ROUNDING[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_pass_matches_references(family):
    model = tiny_engine("triton", "none", dtype=torch.float32, capacity=128, **FAMILIES[family]).model
    model.kv.page_table.copy_(model.kv.page_table.flip(1))
    for layer in model.weights.layers:
        for name, weight in layer.weights.items():
            if name.endswith("norm"):
                weight.copy_(random(*weight.shape) * 0.2 + 1)
    model.workspace.tokens[0, :70] = torch.arange(70, device=DEVICE, dtype=torch.int32) % 9 * 30
    caches = []
    for run in (launch, run_reference):
        model.kv.pool.fill_(float("nan"))
        # Later parts attend to earlier ones through the cache. The positions span two pages.
        for start, end in ((0, 4), (4, 66), (66, 70)):
            with torch.inference_mode():
                write_chunks(model, [Chunk(0, 0, end - start, start)])
                read(run, model, end - start)
        caches.append(model.kv.gather(0, 128))
    for made, expected in zip(*caches):  # The pairs are the caches of one layer.
        assert_close(made[..., :70, :], expected[..., :70, :], 1e-4 if DEVICE == "cuda" else 1e-5)
        assert made[..., 70:, :].isnan().all()
