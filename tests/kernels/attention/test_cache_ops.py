"""Ops that write K and V to the cache or copy them from it, against the references."""

import pytest
import torch
from attention_util import chunk_table, clone, rope
from util import BF16_ROUNDING, DEVICE, Case, assert_close, covering, meta_rows, norm_weight, poisoned, random

from tridecode import layout
from tridecode.kernels.attention.arguments import Heads, KVLayer
from tridecode.kernels.attention.attention import AttentionConfig
from tridecode.kernels.attention.gather_kv import gather_kv, gather_kv_ref
from tridecode.kernels.attention.rope_write import rope_write, rope_write_ref
from tridecode.kernels.attention.write_kv import write_kv, write_kv_ref
from tridecode.layout import Chunk

ROUNDING = {torch.bfloat16: 5 * BF16_ROUNDING, torch.float16: 3e-4, torch.float32: 1e-5}
CASES = [
    Case("qwen3-4b", gpu=dict(rows=65, heads=32, kv=8, d=128), small=dict(rows=2, heads=4, kv=1, d=128)),
    Case("qwen2.5-0.5b", gpu=dict(rows=7, heads=14, kv=2, d=64), small=dict(rows=3, heads=7, kv=1, d=64)),
    Case("g3_d96", gpu=dict(rows=5, heads=24, kv=8, d=96), small=dict(rows=3, heads=3, kv=1, d=96)),
    Case("heads_of_80", gpu=dict(rows=3, heads=5, kv=5, d=80), small=dict(rows=3, heads=5, kv=5, d=80)),
]


def positions_of(pool, table):
    """Return the K/V of each slot: [slots, 2, kv_heads, positions, head_dim]."""
    return pool[table.long()].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)


@covering(2, case=CASES, dtype=ROUNDING.keys(), qk_norm=[False, True])
def test_rope_write_matches_reference(case, dtype, qk_norm):
    rows, heads, kv_heads, d = (case.sizes[name] for name in ("rows", "heads", "kv", "d"))
    page, slots = 4, 3
    pages = -(-(rows + 5) // page)
    order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    table, capacity = order.view(slots, pages).to(DEVICE), pages * page
    chunks = Chunk(2, 1, rows, 3), Chunk(0, 1 + rows, 2, 1)
    qkv = random(rows + 4, (heads + 2 * kv_heads) * d, dtype=dtype)
    norms = (norm_weight(d, dtype), norm_weight(d, dtype) * 2) if qk_norm else (None, None)
    results = []
    for op, kind in ((rope_write, dtype), (rope_write_ref, torch.float32)):
        q, pool = (
            poisoned(rows + 4, heads, d, dtype=kind),
            poisoned(slots * pages, 2, kv_heads, page, d, dtype=kind),
        )
        kv, sizes = KVLayer(table, *pool.unbind(1)), Heads(heads, kv_heads, d, d**-0.5, 0)
        op(chunk_table(*chunks), qkv, q, kv, rope(capacity, d, *norms), sizes)
        results.append((q, positions_of(pool, table)))
    (q, cached), (ref_q, ref_cached) = results
    written = torch.zeros(slots, capacity, dtype=torch.bool, device=DEVICE)
    for chunk in chunks:
        assert_close(q[chunk.rows], ref_q[chunk.rows], ROUNDING[dtype], "q")
        at = chunk.slot, slice(None), slice(None), slice(chunk.start, chunk.end)
        assert_close(cached[at], ref_cached[at], ROUNDING[dtype], "K and V")
        written[chunk.slot, chunk.start : chunk.end] = True
    assert q[0].isnan().all() and q[rows + 3 :].isnan().all(), "the kernel wrote a row outside all chunks"
    assert cached.permute(0, 3, 1, 2, 4)[~written].isnan().all(), "the kernel wrote wrong positions"


@covering(1, case=CASES, dtype=ROUNDING.keys(), positions=[1, 4, 11])
def test_gather_kv_copies_the_pages_of_a_slot(case, dtype, positions):
    kv_heads, d, page = case.sizes["kv"], case.sizes["d"], 4
    pool = random(5, 3, 2, kv_heads, page, d, dtype=dtype)
    table = torch.tensor([3, 0, 4], dtype=torch.int32, device=DEVICE)
    k, v = pool[:, 1].unbind(1)
    out, ref = (poisoned(2, kv_heads, 13, d, dtype=dtype) for _ in range(2))
    gather_kv(table, k, v, positions, *out)
    gather_kv_ref(table, k, v, positions, *ref)
    expected = pool[table.long(), 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :positions]
    for gathered in (out, ref):
        assert torch.equal(gathered[:, :, :positions], expected) and gathered[:, :, positions:].isnan().all()


@pytest.mark.parametrize("norm", [True, False])
def test_write_kv_writes_the_position_of_every_running_row(norm):
    heads, page = Heads(6, 2, 48, 48**-0.5, 0), 16
    meta = meta_rows(14, 15, 16, 500, 30)
    meta[:, layout.SLOT] = torch.tensor([0, 0, 0, 1, 1], dtype=torch.int32)
    meta[3, layout.STATUS] = layout.STOP  # The position of this row is beyond the page table.
    table = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32, device=DEVICE)
    qkv = random(5, (heads.query + 2 * heads.kv) * heads.dim)
    ours = KVLayer(table, *(poisoned(4, heads.kv, page, heads.dim) for _ in range(2)))
    theirs, tables = clone(ours), rope(32, heads.dim, norm_weight(heads.dim) if norm else None)
    write_kv(meta, qkv, ours, tables, heads, config=AttentionConfig())
    write_kv_ref(meta, qkv, theirs, tables, heads)
    for kernel, ref in zip(ours[1:], theirs[1:]):
        assert torch.equal(kernel.isnan(), ref.isnan()) and torch.allclose(kernel, ref, atol=1e-5, equal_nan=True)
        written = (~kernel[..., 0].isnan()).any(1).nonzero().tolist()
        assert written == [[0, 14], [0, 15], [1, 14], [2, 0]]
