"""What lies between the matmuls of prefill, against torch in fp32."""

import pytest
import torch
from models import FAMILIES, tiny_engine
from util import BF16_ROUNDING, DEVICE, Case, assert_close, cases, norm_weight, poisoned, random

from tridecode.kernels.add_norm import add_norm, add_norm_ref
from tridecode.kernels.gather_kv import gather_kv, gather_kv_ref
from tridecode.kernels.rope_write import rope_write, rope_write_ref
from tridecode.kernels.silu_mul import silu_mul, silu_mul_ref
from tridecode.step.prefill import prompt_pass
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


@CASES
@DTYPES
@pytest.mark.parametrize("qk_norm", [False, True], ids=["no_norm", "norm"])
def test_rope_write_matches_reference(case, dtype, qk_norm):
    rows, heads, kv, d = (case.sizes[name] for name in ("rows", "heads", "kv", "d"))
    start, capacity, page = 3, rows + 5, 4
    pages = -(-capacity // page)
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(DEVICE)
    qkv = random(rows, (heads + 2 * kv) * d, dtype=dtype)
    q_norm, k_norm = (norm_weight(d, dtype), norm_weight(d, dtype) * 2) if qk_norm else (None, None)
    angle = random(capacity, d // 2, seed=2)
    cos, sin = angle.cos()[start : start + rows], angle.sin()[start : start + rows]
    found = []
    for op, kind in ((rope_write, dtype), (rope_write_ref, torch.float32)):
        q, keys, values = poisoned(rows, heads, d, dtype=kind), *poisoned(2, kv, capacity, d, dtype=kind)
        pool = poisoned(pages, 2, kv, page, d, dtype=kind)
        op(table, qkv, q_norm, k_norm, cos, sin, start, q, *pool.unbind(1), keys, values, EPS)
        paged = pool[table.long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :capacity]
        assert torch.equal(paged.nan_to_num(7.0), torch.stack([keys, values]).nan_to_num(7.0)), "pages differ"
        found.append((q, keys, values))
    out, ref = found
    tolerance = 5 * BF16_ROUNDING if dtype == torch.bfloat16 else ROUNDING[dtype]
    assert_close(out[0], ref[0], tolerance, "q")
    for name, made, expected in (("k", out[1], ref[1]), ("v", out[2], ref[2])):
        assert_close(made[:, start : start + rows], expected[:, start : start + rows], tolerance, name)
        assert made[:, :start].isnan().all() and made[:, start + rows :].isnan().all(), (
            f"{name}: other positions written"
        )


@CASES
@DTYPES
@pytest.mark.parametrize("positions", [1, 4, 11])
def test_gather_kv_brings_a_slots_pages_together(case, dtype, positions):
    kv, d, page = case.sizes["kv"], case.sizes["d"], 4
    pool = random(5, 3, 2, kv, page, d, dtype=dtype)
    table = torch.tensor([3, 0, 4], dtype=torch.int32, device=DEVICE)
    k, v = pool[:, 1].unbind(1)
    out, ref = poisoned(2, kv, 13, d, dtype=dtype), poisoned(2, kv, 13, d, dtype=dtype)
    gather_kv(table, k, v, positions, *out)
    gather_kv_ref(table, k, v, positions, *ref)
    expected = pool[table.long(), 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :positions]
    for gathered in (out, ref):
        assert torch.equal(gathered[:, :, :positions], expected) and gathered[:, :, positions:].isnan().all()


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
                prompt_pass(run, model, start, end)
        caches.append(model.kv.held(0, 128))
    for made, expected in zip(*caches):  # a layer's
        assert_close(made[..., :70, :], expected[..., :70, :], 1e-4 if DEVICE == "cuda" else 1e-5)
        assert made[..., 70:, :].isnan().all()
