"""Attention of prompts: chunks at any position of their slots, on shuffled pages, against the reference in fp32."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from attention_util import ALL, chunk_table
from hypothesis import given, settings
from hypothesis import strategies as st
from util import CUDA, DEVICE, HOPPER, Case, assert_close, covering, hopper_only, in_8_bits, poisoned, random

from tridecode import layout
from tridecode.kernels.attention import prompt_attention_hopper
from tridecode.kernels.attention.arguments import Heads, KVLayer, Scratch
from tridecode.kernels.attention.expand_kv import expand_kv
from tridecode.kernels.attention.fp8_kv import load_cells
from tridecode.kernels.attention.prompt_attention import (
    PromptAttentionConfig,
    prompt_attention,
    prompt_attention_ref,
    scratch_sizes,
)
from tridecode.kernels.attention.torch_attention import block_attention, torch_attention
from tridecode.kernels.device import GPUS
from tridecode.layout import Chunk
from tridecode.tuning.attention import prompt_attention_config

PAGE = 64 if CUDA else 16
CONFIG = PromptAttentionConfig(programs=264)
if not CUDA:
    CONFIG = PromptAttentionConfig(block_m=16, stages=2, programs=24, least=1)
LONG = 40 if CUDA else 2  # Number of pages of the longest slot.
# The kernel rounds the probabilities before the product with V.
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32]
COUNTS, STARTS = (st.integers(1, 300), st.integers(0, 700)) if CUDA else (st.integers(1, 20), st.integers(0, 40))
CONFIGS = [
    PromptAttentionConfig(32, 4, 2, programs=7), PromptAttentionConfig(32, 4, 2, programs=40, splits=3, least=2),
    *([PromptAttentionConfig(128, 8, 3, programs=264)] if CUDA else ()),
]  # fmt: skip
WIDE = PromptAttentionConfig(128, 8, 5, programs=132, heads=16, separate_combine=True, dependent=True)
TOGETHER = {
    "last": replace(CONFIG, heads=16),
    "separate_combine": replace(CONFIG, heads=16, separate_combine=True, dependent=True),
    "many": replace(CONFIG, heads=2, separate_combine=True, splits=13, least=1, programs=300 if CUDA else 60),
    **({"wide": WIDE} if CUDA else {}),
}
CASES = [
    Case("qwen3-4b_g4_d128", gpu=dict(heads=32, kv=8, d=128), small=dict(heads=4, kv=1, d=128)),
    Case("llama_g4_d64", gpu=dict(heads=32, kv=8, d=64), small=dict(heads=4, kv=2, d=64)),
    Case("qwen2.5_g7_d64", gpu=dict(heads=14, kv=2, d=64), small=dict(heads=7, kv=1, d=64)),
    Case("g3_d96", gpu=dict(heads=24, kv=8, d=96), small=dict(heads=3, kv=1, d=96)),
    Case("heads_of_80", gpu=dict(heads=5, kv=5, d=80), small=dict(heads=2, kv=2, d=80)),
    Case("d256", gpu=dict(heads=8, kv=1, d=256), small=dict(heads=2, kv=1, d=256)),
]
CHUNKS = [(0, LONG * PAGE - 3, 0), (2, 1, 0), (1, 7, PAGE + 3)]


class Args(NamedTuple):
    chunks: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    kv: KVLayer
    scratch: Scratch
    heads: Heads


def arguments(heads, kv, d, chunks, window, dtype, config, fp8=False) -> tuple[list[Chunk], Args]:
    """Return chunks whose rows follow one another, from (slot, count, start), and the arguments of prompt_attention.

    The pass has three rows before the chunks and two after them. Positions that no row may see are NaN.
    """
    first, rows = 3, []
    for slot, count, start in chunks:
        rows.append(Chunk(slot, first, count, start))
        first += count
    slots = 1 + max(chunk.slot for chunk in rows)
    pages = -(-max(chunk.end for chunk in rows) // PAGE)
    table = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(1)).view(slots, pages)
    pool = random(slots * pages, 2, 2, kv, PAGE, d, seed=3, dtype=dtype)
    pool[:, 0] = float("nan")  # The kernel must not read the other layer.
    for slot in range(slots):
        end = max((chunk.end for chunk in rows if chunk.slot == slot), default=0)
        for index in range(end // PAGE, pages):
            pool[table[slot, index], :, :, :, max(end - index * PAGE, 0) :] = float("nan")
    partial, lse, counter = (poisoned(*size) for size in scratch_sizes(d, config).values())
    caches = in_8_bits(pool)[1:] if fp8 else pool[:, 1].unbind(1)
    return rows, Args(
        chunk_table(*rows),
        random(first + 2, heads, d, dtype=dtype, seed=5),
        poisoned(first + 2, heads * d, dtype=dtype),
        KVLayer(table.int().to(DEVICE), *caches),
        Scratch(partial, lse, torch.zeros_like(counter, dtype=torch.int32)),
        Heads(heads, kv, d, d**-0.5, window),
    )


def reference(args: Args) -> torch.Tensor:
    """Return the output of the reference in fp32."""
    exact = args.kv._replace(k=load_cells(args.kv.k, ALL).float(), v=load_cells(args.kv.v, ALL).float())
    args = args._replace(q=args.q.float(), out=poisoned(*args.out.shape), kv=exact)
    prompt_attention_ref(*args)
    return args.out


def check(heads, kv, d, chunks, window, dtype, config=CONFIG, fp8=False):
    chunks, args = arguments(heads, kv, d, chunks, window, dtype, config, fp8)
    prompt_attention(*args, config=config)
    check_rows(chunks, args)
    return args.out


def check_rows(chunks, args):
    ref = reference(args)
    assert not args.scratch.counter.any(), "a counter is not zero after the launch"
    for chunk in chunks:
        assert_close(args.out[chunk.rows], ref[chunk.rows], TOLERANCE[args.q.dtype], str(chunk))
    beyond = [*range(chunks[0].first), *range(chunks[-1].rows.stop, len(args.out))]
    assert args.out[beyond].isnan().all(), "the kernel wrote a row outside all chunks"


@covering(2, case=CASES, dtype=DTYPES, window=[0, 5, 24 if not CUDA else 700])
def test_chunks_match_the_reference(case, dtype, window):
    check(**case.sizes, chunks=CHUNKS, window=window, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60 if CUDA else 12, deadline=None)
@given(lengths=st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=5), window=st.sampled_from([0, 0, 1, 17]))
def test_any_layout_of_rows(dtype, lengths, window):
    chunks = [(slot, count, start) for slot, (count, start) in enumerate(lengths)]
    check(4, 2, 64, chunks, window, dtype)


@covering(1, case=CASES, window=[0, 5])
def test_fp8_kv(case, window):
    check(**case.sizes, chunks=CHUNKS, window=window, dtype=DTYPES[0], fp8=True)


@pytest.mark.parametrize("fp8", [False, True])
def test_heads_of_256(fp8):
    """The config that passes use. On a GPU a program needs most of the shared memory of a multiprocessor."""
    config = prompt_attention_config(GPUS["h100"], False, fp8, 256)
    if not CUDA:
        config = replace(config, block_m=16, programs=24, least=1)
    check(4, 1, 256, [(0, 7, PAGE + 3), (1, 2 * PAGE + 1, 0)], 0, DTYPES[0], config, fp8=fp8)


@pytest.mark.parametrize("config", CONFIGS)
def test_other_launch_configs(config):
    check(4, 1, 128, [(0, 2 * PAGE + 5, 9)], 0, DTYPES[0], config)


@covering(
    2, config=TOGETHER, window=[0, 5, 24 if not CUDA else 700],
    sizes=[(8, 2, 64), (6, 2, 64), (3, 1, 96), (32, 2, 128) if CUDA else (16, 1, 32)],
)  # fmt: skip
def test_heads_that_share_a_block(config, window, sizes):
    """In groups of 4, 3 and 16 heads, 4, 1 and 16 heads share a block.

    Chunks have odd sizes, and some follow cached positions.
    """
    check(*sizes, [(0, 7, LONG * PAGE + 3), (2, 1, 0), (1, PAGE + 3, 2 * PAGE)], window, DTYPES[0], config)


@pytest.mark.parametrize("config", TOGETHER.values(), ids=TOGETHER)
@settings(max_examples=60 if CUDA else 8, deadline=None)
@given(lengths=st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=5), window=st.sampled_from([0, 0, 1, 17]))
def test_any_layout_of_heads_that_share_a_block(config, lengths, window):
    check(4, 1, 64, [(slot, count, start) for slot, (count, start) in enumerate(lengths)], window, DTYPES[0], config)


@pytest.mark.parametrize("config", TOGETHER.values(), ids=TOGETHER)
def test_a_block_of_shared_fp8_kv(config):
    check(4, 1, 64, [(0, 7, LONG * PAGE + 3), (2, 1, 0)], 0, DTYPES[0], config, fp8=True)


@pytest.mark.parametrize("config", TOGETHER.values(), ids=TOGETHER)
def test_rows_do_not_depend_on_other_chunks(config):
    """NaN in another chunk of the pass, in its pages, or in rows outside all chunks, changes no bit."""
    chunks, args = arguments(4, 1, 64, [(0, 5, LONG * PAGE), (1, 9, PAGE + 1)], 0, DTYPES[0], config)
    prompt_attention(*args, config=config)
    before = args.out[chunks[0].rows].clone()
    args.q[[*range(chunks[0].first), *range(chunks[0].rows.stop, len(args.q))]] = float("nan")
    pages = args.kv.table[1].long()
    args.kv.k[pages] = args.kv.v[pages] = float("nan")
    prompt_attention(*args, config=config)
    assert torch.equal(args.out[chunks[0].rows], before)
    assert args.out[chunks[1].rows].isnan().all()


@pytest.mark.parametrize("separate_combine", [False, True])
def test_a_row_among_padding_is_split_and_combined(separate_combine):
    """A pass with this number of rows would not be split, but most rows are padding."""
    config = replace(CONFIG, heads=4, separate_combine=separate_combine)
    rows = config.block_m * config.programs // 8 + 1
    _, args = arguments(4, 1, 32, [(0, 1, LONG * PAGE)], 0, DTYPES[0], config)
    args.chunks[0, layout.CHUNK_FIRST] = 0
    q, out = args.q.new_zeros(rows, 4, 32).copy_(args.q[:1]), poisoned(rows, 128, dtype=args.q.dtype)
    args = args._replace(q=q, out=out)
    prompt_attention(*args, config=config)
    assert_close(out[:1], reference(args)[:1], TOLERANCE[q.dtype])
    assert out[1:].isnan().all()


def test_many_slots_share_a_pass():
    for config in (CONFIG, TOGETHER["separate_combine"]):
        check(2, 1, 64, [(slot, 1 + slot % 3, slot % 5) for slot in range(layout.MAX_CHUNKS)], 0, DTYPES[0], config)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_expanded_fp8_kv(d):
    """K and V in 8 bits are expanded before attention reads them, as in prompt passes on Hopper."""
    config = replace(CONFIG, hopper=3 if HOPPER else 0)
    chunks, args = arguments(8, 2, d, CHUNKS, 0, DTYPES[0], config, fp8=True)
    keys, values = poisoned(len(args.kv.k), 2, 2, PAGE, d, dtype=args.q.dtype).unbind(1)
    expand_kv(args.chunks, args.kv, keys, values)
    prompt_attention(*args._replace(kv=args.kv._replace(k=keys, v=values)), config=config)
    check_rows(chunks, args)


@covering(2, window=[0, 5], fp8=[False, True], form=["flash", "blocks"])
def test_attention_by_torch(form, window, fp8):
    chunks, args = arguments(4, 2, 64, [(1, PAGE + 3, 0), (0, 7, PAGE)], window, DTYPES[0], CONFIG, fp8)
    if form == "blocks":
        args = args._replace(q=torch.cat((args.q, args.q.new_zeros(PAGE, 4, 64))))  # Fill the last page.
        block_attention(*args)
    else:
        torch_attention(form, chunks).launch(*args)
    check_rows(chunks, args)


# Attention of many rows on Hopper.
LAYOUTS = {
    "one": [(0, 700, 0)],
    "later": [(0, 512, 300)],
    "one row": [(0, 1, 700)],
    "whole tiles": [(0, 256, 128)],
    "a row more": [(0, 257, 127)],
    "several": [(2, 200, 0), (0, 70, 300), (1, 129, 511), (3, 1, 64)],
    "64 slots": [(slot, 1 + 5 * slot % 37, 67 * slot % 400) for slot in range(layout.MAX_CHUNKS)],
}


@pytest.fixture
def launched(monkeypatch):
    """List of the number of programs of each launch of the Hopper kernel."""
    programs, launch = [], prompt_attention_hopper.launch

    def noted(*args):
        programs.append(args[-1])
        launch(*args)

    monkeypatch.setattr(prompt_attention_hopper, "launch", noted)
    return programs


@hopper_only
@covering(2, programs=[1, 3], chunks=LAYOUTS, sizes=[(8, 8, 64), (8, 2, 128), (8, 1, 128), (16, 4, 64), (8, 2, 256)])
def test_hopper_matches_the_reference(programs, chunks, sizes, launched):
    check(*sizes, chunks, 0, torch.bfloat16, replace(CONFIG, hopper=programs))
    assert launched == [programs]


@hopper_only
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=5),
    d=st.sampled_from([64, 128, 256]),
    programs=st.integers(1, 4),
)
def test_hopper_with_any_layout_of_rows(lengths, d, programs):
    chunks = [(slot, count, start) for slot, (count, start) in enumerate(lengths)]
    check(8, 2, d, chunks, 0, torch.bfloat16, replace(CONFIG, hopper=programs))


@hopper_only
@pytest.mark.parametrize("d", [64, 128, 256])
def test_hopper_computes_the_same_bits_when_captured(d, launched):
    """There is a program for each multiprocessor. The replay has other lengths than the capture."""
    config = replace(
        TOGETHER["separate_combine"], hopper=torch.cuda.get_device_properties(DEVICE).multi_processor_count
    )
    _, args = arguments(32, 8, d, [(1, 1100, 0), (0, 300, 1000)], 0, torch.bfloat16, config)
    table, out = args.chunks, args.out
    expected_outs, first, graph = [], table.clone(), torch.cuda.CUDAGraph()
    later = first.clone()
    later[1, layout.CHUNK_COUNT], later[1, layout.CHUNK_START] = 77, 5
    for chunks in (first, later):
        table.copy_(chunks)
        prompt_attention(*args, config=config)
        expected_outs.append(out.clone())
        out.fill_(float("nan"))
    with torch.cuda.graph(graph):
        prompt_attention(*args, config=config)
    for chunks, expected in zip((first, later), expected_outs):
        for _ in range(2):
            out.fill_(float("nan"))
            table.copy_(chunks)
            graph.replay()
            rows = ~expected.isnan().any(1)
            assert 1100 < rows.sum() <= 1400
            assert torch.equal(out[rows], expected[rows]) and out[~rows].isnan().all()
    assert len(launched) == 3


@hopper_only
@pytest.mark.parametrize("factor", [1e4, 1e30, float("inf")])
def test_hopper_ends_with_infinite_scores(factor):
    """The warps wait for each other, so every warp must arrive at the barrier even with infinite scores.

    The next launch must give correct results.
    """
    config = replace(CONFIG, hopper=1)
    _, args = arguments(8, 2, 128, [(0, 300, 500)], 0, torch.bfloat16, config)
    args.q.mul_(factor)
    prompt_attention(*args, config=config)
    torch.cuda.synchronize()
    check(8, 2, 128, LAYOUTS["several"], 0, torch.bfloat16, config)


FITS = dict(rows=1100, heads=32, d=128, page=64, dtype=torch.bfloat16, window=0)


@pytest.mark.parametrize(
    "other, fits",
    [
        ({}, True), (dict(d=64), True), (dict(rows=1024), False), (dict(rows=1025), True), (dict(heads=29), False),
        (dict(d=96), False), (dict(page=16), False), (dict(dtype=torch.float16), False), (dict(window=700), False),
        (dict(held=torch.uint8), False), (dict(d=256, heads=16), True), (dict(d=256, heads=14), False),
    ],
)  # fmt: skip
def test_launches_that_fit_hopper(other, fits):
    """With 132 multiprocessors, at least 264 items are needed, or 132 with heads of 256. An item is 128 rows."""
    of = FITS | other
    q = torch.empty(of["rows"], of["heads"], of["d"], dtype=of["dtype"], device="meta")
    k = torch.empty(20, 4, of["page"], of["d"], dtype=of.get("held", of["dtype"]), device="meta")
    assert prompt_attention_hopper.fits(q, k, of["window"], 132) == fits
