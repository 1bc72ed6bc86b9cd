"""Attention of prompts: chunks of slots anywhere, through shuffled pages, against the reference in fp32."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from util import CUDA, DEVICE, Case, assert_close, cases, in_8_bits, poisoned, random

from tridecode import layout
from tridecode.kernels.attention import prompt_attention_hopper
from tridecode.kernels.attention.expand_kv import expand_kv
from tridecode.kernels.attention.fp8_kv import held
from tridecode.kernels.attention.prompt_attention import (
    PromptAttentionConfig,
    prompt_attention,
    prompt_attention_ref,
    scratch_sizes,
)
from tridecode.layout import Chunk
from tridecode.tuning.choose import prompt_attention_shape

PAGE = 64 if CUDA else 16
SHAPE = PromptAttentionConfig() if CUDA else PromptAttentionConfig(block_m=16, stages=2, programs=24, least=1)
LONG = 40 if CUDA else 2  # pages of the longest slot
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # p is rounded before the second product
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32]
COUNTS, STARTS = (st.integers(1, 300), st.integers(0, 700)) if CUDA else (st.integers(1, 20), st.integers(0, 40))
SHAPES = [
    PromptAttentionConfig(32, 4, 2, programs=7), PromptAttentionConfig(32, 4, 2, programs=40, splits=3, least=2),
    *([PromptAttentionConfig(128, 8, 3)] if CUDA else ()),
]  # fmt: skip
TOGETHER = {
    "last": replace(SHAPE, heads=16),
    "apart": replace(SHAPE, heads=16, apart=True, dependent=True),
    "many": replace(SHAPE, heads=2, apart=True, splits=13, least=1, programs=300),
    **({"wide": PromptAttentionConfig(128, 8, 5, 132, heads=16, apart=True, dependent=True)} if CUDA else {}),
}
CASES = cases(
    Case("qwen3-4b_g4_d128", gpu=dict(heads=32, kv=8, d=128), small=dict(heads=4, kv=1, d=128)),
    Case("llama_g4_d64", gpu=dict(heads=32, kv=8, d=64), small=dict(heads=4, kv=2, d=64)),
    Case("qwen2.5_g7_d64", gpu=dict(heads=14, kv=2, d=64), small=dict(heads=7, kv=1, d=64)),
    Case("g3_d96", gpu=dict(heads=24, kv=8, d=96), small=dict(heads=3, kv=1, d=96)),
    Case("heads_of_80", gpu=dict(heads=5, kv=5, d=80), small=dict(heads=2, kv=2, d=80)),
    Case("d256", gpu=dict(heads=8, kv=1, d=256), small=dict(heads=2, kv=1, d=256)),
)


def layouts(chunks):
    """(slot, count, start) -> chunks whose rows follow each other after `first` rows of others."""
    first, found = 3, []
    for slot, count, start in chunks:
        found.append(Chunk(slot, first, count, start))
        first += count
    return found, first + 2  # rows of the pass, padding included


def arguments(heads, kv, d, chunks, window, dtype, shape, fp8=False):
    """The chunks, and what prompt_attention takes. Positions that no row may see hold numbers that would be seen in any
    sum, or NaN."""
    chunks, rows = layouts(chunks)
    slots = 1 + max(chunk.slot for chunk in chunks)
    pages = -(-max(chunk.end for chunk in chunks) // PAGE)
    order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(1)).view(slots, pages)
    pool = random(slots * pages, 2, 2, kv, PAGE, d, seed=3, dtype=dtype)
    pool[:, 0] = float("nan")  # another layer
    for slot in range(slots):
        end = max((chunk.end for chunk in chunks if chunk.slot == slot), default=0)
        for place in range(end // PAGE, pages):
            pool[order[slot, place], :, :, :, max(end - place * PAGE, 0) :] = float("nan")
    table = torch.zeros(layout.MAX_CHUNKS, layout.CHUNK_WIDTH, dtype=torch.int32, device=DEVICE)
    table[: len(chunks)] = torch.tensor(chunks, dtype=torch.int32)
    order, q = order.int().to(DEVICE), random(rows, heads, d, dtype=dtype, seed=5)
    partial, lse, counter = (poisoned(*size) for size in scratch_sizes(d, shape).values())
    scratch, out = (partial, lse, torch.zeros_like(counter, dtype=torch.int32)), poisoned(rows, heads * d, dtype=dtype)
    caches = in_8_bits(pool)[1:] if fp8 else pool[:, 1].unbind(1)
    return chunks, (table, order, q, *caches, *scratch, out, window, d**-0.5)


def check(heads, kv, d, chunks, window, dtype, shape=SHAPE, fp8=False):
    chunks, args = arguments(heads, kv, d, chunks, window, dtype, shape, fp8)
    prompt_attention(*args, config=shape)
    table, order, q, *caches, partial, lse, counter, out, window, scale = args
    exact, ref = [held(cache, (slice(None),)).float() for cache in caches], poisoned(*out.shape)
    prompt_attention_ref(table, order, q.float(), *exact, partial, lse, counter, ref, window, scale)
    assert not counter.any(), "counters are zero between launches"
    for chunk in chunks:
        assert_close(out[chunk.rows], ref[chunk.rows], TOLERANCE[dtype], str(chunk))
    beyond = [*range(chunks[0].first), *range(chunks[-1].rows.stop, len(out))]
    assert out[beyond].isnan().all(), "a row of no chunk was written"
    return out


@CASES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [0, 5, 24 if not CUDA else 700])
def test_chunks_match_the_reference(case, dtype, window):
    check(**case.sizes, chunks=[(0, LONG * PAGE - 3, 0), (2, 1, 0), (1, 7, PAGE + 3)], window=window, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60 if CUDA else 12, deadline=None)
@given(lengths=st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=5), window=st.sampled_from([0, 0, 1, 17]))
def test_any_layout_of_rows(dtype, lengths, window):
    chunks = [(slot, count, start) for slot, (count, start) in enumerate(lengths)]
    check(4, 2, 64, chunks, window, dtype)


@CASES
@pytest.mark.parametrize("window", [0, 5])
def test_kv_in_8_bits(case, window):
    chunks = [(0, LONG * PAGE - 3, 0), (2, 1, 0), (1, 7, PAGE + 3)]
    check(**case.sizes, chunks=chunks, window=window, dtype=DTYPES[0], fp8=True)


@pytest.mark.parametrize("shape", SHAPES)
def test_other_launch_shapes(shape):
    check(4, 1, 128, [(0, 2 * PAGE + 5, 9)], 0, DTYPES[0], shape)


@pytest.mark.parametrize("shape", TOGETHER.values(), ids=TOGETHER)
@pytest.mark.parametrize("window", [0, 5, 24 if not CUDA else 700])
@pytest.mark.parametrize("heads, kv, d", [(8, 2, 64), (6, 2, 64), (3, 1, 96), (32, 2, 128) if CUDA else (16, 1, 32)])
def test_heads_that_share_a_block(heads, kv, d, window, shape):
    """Of 4, 3 and 16 a K/V head, of which 4, 1 and 16 share one: in chunks of odd sizes behind what is cached."""
    check(heads, kv, d, [(0, 7, LONG * PAGE + 3), (2, 1, 0), (1, PAGE + 3, 2 * PAGE)], window, DTYPES[0], shape)


@pytest.mark.parametrize("shape", TOGETHER.values(), ids=TOGETHER)
@settings(max_examples=60 if CUDA else 8, deadline=None)
@given(lengths=st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=5), window=st.sampled_from([0, 0, 1, 17]))
def test_any_layout_of_heads_that_share_a_block(shape, lengths, window):
    check(4, 1, 64, [(slot, count, start) for slot, (count, start) in enumerate(lengths)], window, DTYPES[0], shape)


@pytest.mark.parametrize("shape", TOGETHER.values(), ids=TOGETHER)
def test_a_block_of_shared_kv_in_8_bits(shape):
    check(4, 1, 64, [(0, 7, LONG * PAGE + 3), (2, 1, 0)], 0, DTYPES[0], shape, fp8=True)


@pytest.mark.parametrize("shape", TOGETHER.values(), ids=TOGETHER)
def test_rows_do_not_depend_on_their_neighbours(shape):
    """What stands in another chunk of the pass, in its pages or in rows of no chunk, NaN too, changes no bit."""
    chunks, args = arguments(4, 1, 64, [(0, 5, LONG * PAGE), (1, 9, PAGE + 1)], 0, DTYPES[0], shape)
    table, order, q, keys, values, *rest = args
    prompt_attention(*args, config=shape)
    mine = rest[3][chunks[0].rows].clone()
    other = [*range(chunks[0].first), *range(chunks[0].rows.stop, len(q))]
    q[other] = float("nan")
    keys[order[1].long()] = values[order[1].long()] = float("nan")
    prompt_attention(*args, config=shape)
    assert torch.equal(rest[3][chunks[0].rows], mine)
    assert rest[3][chunks[1].rows].isnan().all()


@pytest.mark.parametrize("apart", [False, True])
def test_a_row_among_padding_is_split_and_added_up(apart):
    """In a pass of so many rows that for all of them nothing would be split."""
    shape = replace(SHAPE, heads=4, apart=apart)
    rows = shape.block_m * shape.programs // 8 + 1
    _, (table, order, q, *rest) = arguments(4, 1, 32, [(0, 1, LONG * PAGE)], 0, DTYPES[0], shape)
    q, keys, values, *scratch, out, window, scale = q.new_zeros(rows, 4, 32).copy_(q[:1]), *rest
    out, ref = poisoned(rows, 128, dtype=q.dtype), poisoned(rows, 128)
    table[0, layout.CHUNK_FIRST] = 0
    prompt_attention(table, order, q, keys, values, *scratch, out, window, scale, config=shape)
    prompt_attention_ref(table, order, q.float(), keys.float(), values.float(), *scratch, ref, window, scale)
    assert_close(out[:1], ref[:1], TOLERANCE[q.dtype])
    assert out[1:].isnan().all()


def test_many_slots_share_a_pass():
    for shape in (SHAPE, TOGETHER["apart"]):
        check(2, 1, 64, [(slot, 1 + slot % 3, slot % 5) for slot in range(layout.MAX_CHUNKS)], 0, DTYPES[0], shape)


@pytest.mark.parametrize("d", [64, 128])
def test_kv_in_8_bits_expanded_in_front(d):
    """As prompts on Hopper have it."""
    chunks = [(0, LONG * PAGE - 3, 0), (2, 1, 0), (1, 7, PAGE + 3)]
    shape = replace(SHAPE, hopper=3 if CUDA and torch.cuda.get_device_capability() == (9, 0) else 0)
    chunks, (table, order, q, k, v, *rest) = arguments(8, 2, d, chunks, 0, DTYPES[0], shape, fp8=True)
    keys, values = poisoned(len(k), 2, 2, PAGE, d, dtype=q.dtype).unbind(1)
    expand_kv(table, order, k, v, keys, values)
    prompt_attention(table, order, q, keys, values, *rest, config=shape)
    exact, out, ref = [held(cache, (slice(None),)).float() for cache in (k, v)], rest[3], poisoned(*rest[3].shape)
    prompt_attention_ref(table, order, q.float(), *exact, *rest[:3], ref, *rest[4:])
    for chunk in chunks:
        assert_close(out[chunk.rows], ref[chunk.rows], TOLERANCE[DTYPES[0]], str(chunk))


# Attention of many rows on Hopper.
hopper_only = pytest.mark.skipif(
    not CUDA or torch.cuda.get_device_capability() != (9, 0),
    reason="Gluon has no interpreter, and this kernel is for GPUs of compute capability 9.0",
)
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
    """How many programs each launch of the Hopper kernel had."""
    programs, launch = [], prompt_attention_hopper.launch

    def noted(*args):
        programs.append(args[-1])
        launch(*args)

    monkeypatch.setattr(prompt_attention_hopper, "launch", noted)
    return programs


@hopper_only
@pytest.mark.parametrize("programs", [1, 3])
@pytest.mark.parametrize("chunks", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("heads, kv, d", [(8, 8, 64), (8, 2, 128), (8, 1, 128), (16, 4, 64)])
def test_hopper_matches_the_reference(heads, kv, d, chunks, programs, launched):
    check(heads, kv, d, chunks, 0, torch.bfloat16, PromptAttentionConfig(hopper=programs))
    assert launched == [programs]


@hopper_only
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(COUNTS, STARTS), min_size=1, max_size=5),
    d=st.sampled_from([64, 128]),
    programs=st.integers(1, 4),
)
def test_hopper_with_any_layout_of_rows(lengths, d, programs):
    chunks = [(slot, count, start) for slot, (count, start) in enumerate(lengths)]
    check(8, 2, d, chunks, 0, torch.bfloat16, PromptAttentionConfig(hopper=programs))


@hopper_only
@pytest.mark.parametrize("d", [64, 128])
def test_hopper_gives_the_same_bits_again_and_captured(d, launched):
    """By as many programs as there are multiprocessors, and with lengths that the capture has not seen."""
    shape = prompt_attention_shape(90, torch.cuda.get_device_properties(DEVICE).multi_processor_count, False)
    sizes = 32, 8, d
    _, args = arguments(*sizes, [(1, 1100, 0), (0, 300, 1000)], 0, torch.bfloat16, shape)
    table, out = args[0], args[-3]
    wanted, kept, graph = [], table.clone(), torch.cuda.CUDAGraph()
    later = kept.clone()
    later[1, layout.CHUNK_COUNT], later[1, layout.CHUNK_START] = 77, 5
    for chunks in (kept, later):
        table.copy_(chunks)
        prompt_attention(*args, config=shape)
        wanted.append(out.clone())
        out.fill_(float("nan"))
    with torch.cuda.graph(graph):
        prompt_attention(*args, config=shape)
    for chunks, expected in zip((kept, later), wanted):
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
def test_hopper_ends_with_scores_beyond_all_bounds(factor):
    """Its warps wait for each other: no number may keep one from coming by. The next launch is as it ever was."""
    shape = PromptAttentionConfig(hopper=1)
    _, args = arguments(8, 2, 128, [(0, 300, 500)], 0, torch.bfloat16, shape)
    args[2].mul_(factor)
    prompt_attention(*args, config=shape)
    torch.cuda.synchronize()
    check(8, 2, 128, LAYOUTS["several"], 0, torch.bfloat16, shape)


FITS = dict(rows=1100, heads=32, d=128, page=64, dtype=torch.bfloat16, window=0)


@pytest.mark.parametrize(
    "other, fits",
    [
        ({}, True), (dict(d=64), True), (dict(rows=1024), False), (dict(rows=1025), True), (dict(heads=29), False),
        (dict(d=96), False), (dict(page=16), False), (dict(dtype=torch.float16), False), (dict(window=700), False),
        (dict(held=torch.uint8), False),
    ],
)  # fmt: skip
def test_what_is_left_to_hopper(other, fits):
    """132 multiprocessors: 264 blocks of 128 rows and a head."""
    of = FITS | other
    q = torch.empty(of["rows"], of["heads"], of["d"], dtype=of["dtype"], device="meta")
    k = torch.empty(20, 4, of["page"], of["d"], dtype=of.get("held", of["dtype"]), device="meta")
    assert prompt_attention_hopper.fits(q, k, of["window"], 132) == fits


def test_hopper_is_for_one_capability_and_never_batch_invariant():
    chosen = [prompt_attention_shape(*facts).hopper for facts in ((90, 114, False), (90, 114, True), (100, 148, False))]
    assert chosen == [114, 0, 0]


def test_batch_invariant_passes_split_nothing_and_take_a_head_at_a_time():
    assert prompt_attention_shape(90, 132, True) == PromptAttentionConfig(splits=1)
    assert prompt_attention_shape(90, 132, True, fp8_kv=True) == PromptAttentionConfig(splits=1, stages=4)
    assert prompt_attention_shape(90, 132, False).heads > 1
