"""Attention of several new positions of each request, against a reference that computes one position after another."""

import pytest
import torch
from attention_util import MAX_SPLITS, TOLERANCE, check, layer
from util import CUDA, Case, covering, meta_rows, poisoned, random

from tridecode import layout
from tridecode.kernels.attention.arguments import Scratch
from tridecode.kernels.attention.attention_queries import QueriesConfig, attention_queries

CASES = [
    Case("qwen3-4b_g4_d128", dict(kv_heads=8, group=4, head_dim=128), dict(kv_heads=2, group=4, head_dim=128)),
    Case("llama_g4_d64", dict(kv_heads=8, group=4, head_dim=64), dict(kv_heads=1, group=4, head_dim=64)),
    Case("qwen2_g7_d64", dict(kv_heads=2, group=7, head_dim=64), dict(kv_heads=1, group=7, head_dim=64)),
    Case("g5_d80", dict(kv_heads=4, group=5, head_dim=80), dict(kv_heads=1, group=5, head_dim=80)),
    Case("mha_g1_d128", dict(kv_heads=32, group=1, head_dim=128), dict(kv_heads=2, group=1, head_dim=128)),
]


def several(positions, counts, queries, group=4, dtype=torch.bfloat16, **sizes):
    """Return the arguments for `queries` rows of a request at each position.

    The first `counts` rows of a request run. The inputs of the others are NaN.
    """
    args = layer(positions, group=group, dtype=dtype, qk_norm=True, **sizes)
    rows, heads = len(positions) * queries, args.heads
    meta = meta_rows(*(position + query for position in positions for query in range(queries)))
    meta[:, layout.SLOT] //= queries
    qkv = random(rows, args.qkv.shape[1], seed=4)
    for request, count in enumerate(counts):
        idle = slice(request * queries + count, (request + 1) * queries)
        meta[idle, layout.STATUS] = layout.WAIT
        qkv[idle] = float("nan")
    scratch = Scratch(
        poisoned(rows, heads.query, MAX_SPLITS, heads.dim),
        poisoned(rows, heads.query, MAX_SPLITS, 2),
        args.scratch.counter.new_zeros(rows, heads.kv),
    )
    out = poisoned(rows, heads.query * heads.dim, dtype=args.out.dtype)
    return args._replace(meta=meta, qkv=qkv, out=out, scratch=scratch)


def check_queries(args, queries, dtype=torch.bfloat16, **config):
    """Check attention_queries; rows that do not run must not be written."""
    args.out[args.meta[:, layout.STATUS] != layout.RUN] = 0  # The test does not compare idle rows.
    config = dict(block_t=32, splits=4, num_warps=4, least=1) | config
    check(attention_queries, args, QueriesConfig(queries, **config), TOLERANCE[dtype])


@covering(2, case=CASES, position=[0, 31, 240] if not CUDA else [0, 63, 4000])
def test_new_position_attends_to_earlier_ones(case, position):
    check_queries(several((position,), (4,), 4, **case.sizes, pages=4 if not CUDA else 64), 4)


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_requests_of_any_length_and_number_of_drafts(queries):
    positions, counts = (70, 0, 15, 200), (1, queries, 0, queries - 1)
    check_queries(several(positions, counts, queries, kv_heads=2), queries)


@pytest.mark.parametrize("position", [12, 14, 15, 16])
def test_new_positions_on_two_pages(position):
    check_queries(several((position,), (8,), 8, page=16, pages=3), 8, block_t=16)


@pytest.mark.parametrize("window", [3, 24, 40])
def test_each_position_has_its_own_window(window):
    check_queries(several((2, 30, 95), (8, 8, 5), 8, window=window), 8)


def test_fp32():
    check_queries(several((37,), (4,), 4, dtype=torch.float32), 4, dtype=torch.float32)


@covering(2, position=[0, 64, 4000] if CUDA else [3, 240], sizes=[(2, 4), (2, 7), (8, 4), (8, 1)])
def test_programs_that_combine_together(position, sizes):
    """Launch twice, because the last program of the first launch must reset the counters."""
    queries, group = sizes
    sizes = dict(kv_heads=8, head_dim=128, pages=64) if CUDA else {}
    args = several((position,), (queries - 1,), queries, group=group, **sizes)
    for _ in range(2):
        check_queries(args, queries, splits=16, num_warps=8, together=True)


LENGTHS = [(70, 0, 15, 200), (250, 250, 250), (1, 250, 1, 1, 1, 1, 1, 1), (0, 0, 0, 0)]


@covering(
    1, positions=[*LENGTHS, (4000, 63, 1, 700), (1000,) * 8] if CUDA else LENGTHS, config=[(1, 2), (2, 4), (2, 64)]
)
def test_a_long_request_has_more_splits_than_its_share(positions, config):
    """Launch twice, because the last program of the first launch must reset the counters."""
    short, iterations = config
    counts = [(1, 4, 0, 3)[request % 4] for request in range(len(positions))]
    args = several(positions, counts, 4, **(dict(kv_heads=8, head_dim=128, pages=64) if CUDA else {}))
    options = dict(short_splits=short, short_iterations=iterations, together=short == 2)
    for _ in range(2):
        check_queries(args, 4, splits=8, num_warps=8, ahead=2, **options)


@pytest.mark.parametrize("splits, short", [(8, 8), (8, 2)])
def test_a_request_has_the_same_bits_with_any_other_requests(splits, short):
    """Without a long request, its splits combine together. With one, the last split combines them."""
    config = QueriesConfig(4, splits=splits, short_splits=short, short_iterations=3, least=1, together=True)
    outs = []
    for position, count in ((20, 4), (250, 1), (0, 0)):
        args = several((60, position), (3, count), 4, **(dict(kv_heads=8, head_dim=128) if CUDA else {}))
        attention_queries(*args, config=config)
        outs.append(args.out[:3].clone())
    assert not outs[0].isnan().any() and all(torch.equal(out, outs[0]) for out in outs)


def test_idle_rows_write_no_output():
    args = several((70, 3), (0, 0), 4)
    attention_queries(*args, config=QueriesConfig(queries=4, splits=8, least=1, together=True))
    assert args.out.isnan().all() and not args.scratch.counter.any()
