"""Attention of several new positions of each request together, against the reference, which takes them in order."""

import pytest
import torch
from test_attention import TOLERANCE, buffers, check_form
from util import CUDA, Case, cases, meta_rows, poisoned, random

from tridecode import layout
from tridecode.kernels.attention.attention_queries import QueriesConfig, attention_queries
from tridecode.tuning.shapes import MAX_SPLITS

CASES = cases(
    Case("qwen3-4b_g4_d128", dict(kv_heads=8, group=4, head_dim=128), dict(kv_heads=2, group=4, head_dim=128)),
    Case("llama_g4_d64", dict(kv_heads=8, group=4, head_dim=64), dict(kv_heads=1, group=4, head_dim=64)),
    Case("qwen2_g7_d64", dict(kv_heads=2, group=7, head_dim=64), dict(kv_heads=1, group=7, head_dim=64)),
    Case("g5_d80", dict(kv_heads=4, group=5, head_dim=80), dict(kv_heads=1, group=5, head_dim=80)),
    Case("mha_g1_d128", dict(kv_heads=32, group=1, head_dim=128), dict(kv_heads=2, group=1, head_dim=128)),
)


def several(
    positions, counts, queries, dtype=torch.bfloat16, kv_heads=1, group=4, head_dim=64, page=64, pages=4, **more
):
    """Requests at `positions`, of each of which `counts` of `queries` rows run; what the others have is poison."""
    args = buffers(positions, kv_heads, group, head_dim, page, pages, dtype, True) | more
    rows, heads = len(positions) * queries, kv_heads * group
    meta = meta_rows(*(position + query for position in positions for query in range(queries)))
    meta[:, layout.SLOT] //= queries
    qkv = random(rows, (heads + 2 * kv_heads) * head_dim, seed=4)
    for request, count in enumerate(counts):
        meta[request * queries + count : (request + 1) * queries, layout.STATUS] = layout.WAIT
        qkv[request * queries + count : (request + 1) * queries] = float("nan")
    own = dict(meta=meta, qkv=qkv, partial=poisoned(rows, heads, MAX_SPLITS, head_dim))
    own["out"] = poisoned(rows, heads * head_dim, dtype=args["out"].dtype)
    own["lse"] = poisoned(rows, heads, MAX_SPLITS, 2)
    own["counter"] = args["counter"].new_zeros(rows, kv_heads)
    return args | own


def check(args, queries, dtype=torch.bfloat16, **shape):
    runs = args["meta"][:, layout.STATUS] == layout.RUN
    args["out"][~runs] = 0  # of nobody
    how = dict(block_t=32, splits=4, num_warps=4, least=1) | shape
    check_form(attention_queries, args, QueriesConfig(queries, **how), TOLERANCE[dtype])


@CASES
@pytest.mark.parametrize("position", [0, 1, 31, 33, 100, 240] if not CUDA else [0, 1, 63, 64, 500, 1023, 4000])
def test_every_new_position_sees_those_before_it(case, position):
    page, pages = (64, 4) if not CUDA else (64, 64)
    check(several((position,), (4,), 4, **case.sizes, page=page, pages=pages), 4)


@pytest.mark.parametrize("queries", [2, 4, 8])
def test_requests_of_any_length_and_number_of_drafts(queries):
    positions, counts = (70, 0, 15, 200), (1, queries, 0, queries - 1)
    check(several(positions, counts, queries, kv_heads=2), queries)


@pytest.mark.parametrize("position", [12, 14, 15, 16])
def test_new_positions_on_two_pages(position):
    check(several((position,), (8,), 8, page=16, pages=3), 8, block_t=16)


@pytest.mark.parametrize("window", [3, 24, 40])
def test_a_window_ends_for_each_position_elsewhere(window):
    check(several((2, 30, 95), (8, 8, 5), 8, window=window), 8)


def test_fp32():
    check(several((37,), (4,), 4, dtype=torch.float32), 4, dtype=torch.float32)


@pytest.mark.parametrize("position", [0, 63, 64, 500, 1000, 4000] if CUDA else [3, 100, 240])
@pytest.mark.parametrize("queries, group", [(2, 4), (2, 7), (8, 4), (8, 1)])
def test_programs_that_add_up_together(queries, group, position):
    """Launched twice, as the counters are theirs only once all have left."""
    sizes = dict(kv_heads=8, group=group, head_dim=128) if CUDA else dict(kv_heads=1, group=group, head_dim=64)
    args = several((position,), (queries - 1,), queries, **sizes, pages=64 if CUDA else 4)
    shape = dict(splits=16, num_warps=8, together=True)
    for _ in range(2):
        check(args, queries, **shape)


LENGTHS = [(70, 0, 15, 200), (250, 250, 250), (1, 250, 1, 1, 1, 1, 1, 1), (0, 0, 0, 0)]


@pytest.mark.parametrize("positions", [*LENGTHS, (4000, 63, 1, 700), (1000,) * 8] if CUDA else LENGTHS)
@pytest.mark.parametrize("few, turns", [(1, 2), (2, 4), (2, 64)])
def test_a_long_request_has_more_splits_than_its_share(positions, few, turns):
    """Launched twice, as before."""
    counts = [(1, 4, 0, 3)[request % 4] for request in range(len(positions))]
    sizes = dict(kv_heads=8, head_dim=128) if CUDA else dict(kv_heads=1)
    args = several(positions, counts, 4, **sizes, pages=64 if CUDA else 4)
    for _ in range(2):
        check(args, 4, splits=8, num_warps=8, few=few, turns=turns, ahead=2, together=few == 2)


@pytest.mark.parametrize("splits, few", [(8, 8), (8, 2)])
def test_a_request_has_the_same_bits_beside_any_others(splits, few):
    """Alone its splits add up together, beside a long one the last of them does."""
    shape = QueriesConfig(4, splits=splits, few=few, turns=3, least=1, together=True)
    outs = []
    for position, count in ((20, 4), (250, 1), (0, 0)):
        args = several((60, position), (3, count), 4, **(dict(kv_heads=8, head_dim=128) if CUDA else {}))
        attention_queries(**args, config=shape)
        outs.append(args["out"][:3].clone())
    assert not outs[0].isnan().any() and all(torch.equal(out, outs[0]) for out in outs)


def test_nobody_runs():
    args = several((70, 3), (0, 0), 4)
    shape = QueriesConfig(queries=4, splits=8, least=1, together=True)
    attention_queries(**args, config=shape)
    assert args["out"].isnan().all() and not args["counter"].any()
