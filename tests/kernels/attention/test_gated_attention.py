"""Attention whose output has a gate, and whose rotary embedding covers a part of a head, in all kernels."""

import pytest
import torch
from attention_util import TOLERANCE, check, chunk_table, clone, layer, rows_config
from check import check_op
from test_attention_queries import check_queries, several
from util import BF16_ROUNDING, assert_close, poisoned

from tridecode.kernels.attention.attention import AttentionConfig, attention
from tridecode.kernels.attention.attention_rows import attention_rows
from tridecode.kernels.attention.gate_heads import GATE_HEADS
from tridecode.kernels.attention.rope_write import rope_write, rope_write_ref
from tridecode.kernels.attention.write_kv import write_kv, write_kv_ref
from tridecode.layout import Chunk

GATED = dict(gate=True, qk_norm=True, dtype=torch.bfloat16)
HEADS = pytest.mark.parametrize(
    "sizes",
    [
        dict(group=4, head_dim=64, rotary=16),
        dict(group=8, head_dim=256, rotary=64),
        dict(group=3, head_dim=80, rotary=40),
    ],
    ids=["d64", "d256", "d80"],
)
CONFIG = AttentionConfig(block_t=32, splits=4)


@HEADS
@pytest.mark.parametrize("positions", [(0,), (31,), (200, 5)])
def test_attention_matches_reference(sizes, positions):
    args = layer(positions, **GATED | sizes)
    check(attention_rows, clone(args), rows_config(CONFIG, programs=3), TOLERANCE[torch.bfloat16])
    check(attention, args, CONFIG, TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize("splits", [1, 4])
def test_several_queries_match_reference(splits):
    args = several((70, 0, 15, 200), (1, 4, 0, 3), 4, kv_heads=2, gate=True, rotary=16)
    check_queries(args, 4, splits=splits)


@HEADS
def test_writes_of_keys_match_reference(sizes):
    args = layer((70, 3), **GATED | sizes)
    ref = clone(args)
    write_kv(args.meta, args.qkv, args.kv, args.rope, args.heads, config=CONFIG)
    write_kv_ref(ref.meta, ref.qkv, ref.kv, ref.rope, ref.heads)
    for ours, theirs in zip(args.kv[1:], ref.kv[1:]):
        assert_close(ours.nan_to_num(0.0), theirs.nan_to_num(0.0), BF16_ROUNDING)


@HEADS
def test_rotated_rows_of_prompts_match_reference(sizes):
    args = layer((70, 3), **GATED | sizes)
    chunks, results = chunk_table(Chunk(0, 0, 2, 7)), []
    for op in (rope_write, rope_write_ref):
        own, q = clone(args), poisoned(2, args.heads.query, args.heads.dim, dtype=torch.bfloat16)
        op(chunks, own.qkv.bfloat16(), q, own.kv, own.rope, own.heads)
        results.append((q, own.kv.k.nan_to_num(0.0), own.kv.v.nan_to_num(0.0)))
    for ours, theirs in zip(*results):
        assert_close(ours, theirs, 5 * BF16_ROUNDING)


@HEADS
def test_gates_of_prompts_match_reference(sizes):
    args = layer((1, 2, 3, 4), **GATED | sizes)
    out = torch.randn(args.out.shape, generator=torch.Generator().manual_seed(2)).to(args.out)
    arguments = chunk_table(Chunk(0, 1, 2, 7)), args.qkv.bfloat16(), out, args.heads
    check_op(GATE_HEADS, arguments, tolerance=2 * BF16_ROUNDING, outputs=(), accumulates=("out",))
