"""What lies between the matmuls of prefill, against torch in fp32."""

import pytest
import torch
from models import FAMILIES, tiny_engine
from util import BF16_ROUNDING, DEVICE, Case, assert_close, cases, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.add_norm import add_norm, add_norm_ref
from tridecode.kernels.embed_rows import embed_rows, embed_rows_ref
from tridecode.kernels.silu_mul import silu_mul, silu_mul_ref
from tridecode.kernels.take_rows import take_rows, take_rows_ref
from tridecode.layout import Chunk
from tridecode.step.prompt import read, write_chunks
from tridecode.step.run import launch, refer

EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
ROUNDING = {torch.bfloat16: BF16_ROUNDING, torch.float16: 3e-4, torch.float32: 1e-5}
CASES = cases(
    Case(
        "qwen3-4b", gpu=dict(rows=65, n=2560, heads=32, kv=8, d=128), small=dict(rows=2, n=1100, heads=4, kv=1, d=128)
    ),
    Case("qwen2.5-0.5b", gpu=dict(rows=7, n=896, heads=14, kv=2, d=64), small=dict(rows=3, n=112, heads=7, kv=1, d=64)),
    Case("g3_d96", gpu=dict(rows=5, n=1152, heads=24, kv=8, d=96), small=dict(rows=3, n=36, heads=3, kv=1, d=96)),
    Case("heads_of_80", gpu=dict(rows=3, n=1000, heads=5, kv=5, d=80), small=dict(rows=3, n=100, heads=5, kv=5, d=80)),
)


@CASES
@DTYPES
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_add_norm_matches_reference(case, dtype, first):
    rows, n = case.sizes["rows"], case.sizes["n"]
    hidden = random(rows, n)
    delta = None if first else random(rows, n, dtype=dtype, seed=1)
    norm, ref_hidden = norm_weight(n, dtype), hidden.clone()
    out, ref = poisoned(rows, n, dtype=dtype), poisoned(rows, n)
    add_norm(hidden, delta, norm, out, EPS)
    add_norm_ref(ref_hidden, delta, norm, ref, EPS)
    assert_close(hidden, ref_hidden, 1e-6, "hidden")
    assert_close(out, ref, 5 * BF16_ROUNDING if dtype == torch.bfloat16 else ROUNDING[dtype])


def table_of(*chunks: Chunk) -> torch.Tensor:
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32)
    table[: len(chunks)] = torch.tensor(chunks)
    return table.to(DEVICE)


@CASES
@DTYPES
def test_embed_rows_matches_reference(case, dtype):
    n = case.sizes["n"]
    embed, tokens = random(50, n, dtype=dtype), torch.arange(3 * 20, dtype=torch.int32, device=DEVICE).view(3, 20) % 50
    chunks, meta = table_of(Chunk(2, 3, 2, 5), Chunk(0, 5, 1, 0)), meta_rows(7, 3, 19)
    meta[1, layout.STATUS] = layout.STOP
    for decoding in (0, 3):
        found = []
        for op in (embed_rows, embed_rows_ref):
            out = poisoned(8, n)
            op(chunks, meta, tokens, embed, out, decoding)
            found.append(out)
        assert torch.equal(*found)
        wanted = {3: tokens[2, 5], 4: tokens[2, 6], 5: tokens[0, 0]}
        wanted |= {0: tokens[0, 7], 2: tokens[2, 19]} if decoding else {}
        for row in range(8):
            assert torch.equal(found[0][row], embed[wanted[row]].float() if row in wanted else torch.zeros_like(out[0]))


@CASES
@DTYPES
def test_take_rows_copies_what_rows_continue(case, dtype):
    n = case.sizes["n"]
    hidden, qkv, meta = random(9, n), random(9, 2 * n + 3, dtype=dtype), meta_rows(4, 4, 4, 4)
    meta[:, layout.SOURCE] = torch.tensor([layout.OWN, 8, 5, layout.OWN], dtype=torch.int32)
    meta[2, layout.STATUS] = layout.LIMIT_REACHED
    for op in (take_rows, take_rows_ref):
        own, out, qkv_out = meta.clone(), poisoned(4, n), poisoned(4, 2 * n + 3)
        op(own, hidden, qkv, out, qkv_out)
        for row, source in ((0, 0), (1, 8), (3, 3)):
            assert torch.equal(out[row], hidden[source]) and torch.equal(qkv_out[row], qkv[source].float())
        assert out[2].isnan().all() and qkv_out[2].isnan().all()
        assert own[:, layout.SOURCE].tolist() == [layout.OWN, layout.OWN, 5, layout.OWN]


@CASES
@DTYPES
def test_silu_mul_matches_reference(case, dtype):
    rows, n = case.sizes["rows"], case.sizes["n"]
    x = random(rows, 2 * n, dtype=dtype, scale=3.0)
    out, ref = poisoned(rows, n, dtype=dtype), poisoned(rows, n)
    silu_mul(x, out)
    silu_mul_ref(x, ref)
    assert_close(out, ref, 5 * BF16_ROUNDING if dtype == torch.bfloat16 else ROUNDING[dtype])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_pass_with_the_kernels_leaves_what_it_leaves_with_their_references(family):
    model = tiny_engine("triton", "none", dtype=torch.float32, capacity=128, **FAMILIES[family]).model
    model.kv.page_table.copy_(model.kv.page_table.flip(1))
    for layer in model.weights.layers:
        for weight in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm):
            if weight is not None:
                weight.copy_(random(*weight.shape) * 0.2 + 1)
    model.workspace.tokens[0, :70] = torch.arange(70, device=DEVICE, dtype=torch.int32) % 9 * 30
    caches = []
    for run in (launch, refer):
        model.kv.pool.fill_(float("nan"))
        for start, end in ((0, 4), (4, 66), (66, 70)):  # later parts see the first in the cache, on two pages
            with torch.inference_mode():
                write_chunks(model, [Chunk(0, 0, end - start, start)])
                read(run, model, end - start)
        caches.append(model.kv.held(0, 128))
    for made, expected in zip(*caches):  # a layer's
        assert_close(made[..., :70, :], expected[..., :70, :], 1e-4 if DEVICE == "cuda" else 1e-5)
        assert made[..., 70:, :].isnan().all()
