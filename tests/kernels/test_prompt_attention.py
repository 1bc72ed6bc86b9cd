"""Attention of prompts: chunks of slots anywhere, through shuffled pages, against the reference in fp32."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from util import CUDA, DEVICE, Case, assert_close, cases, in_8_bits, poisoned, random

from tridecode import layout
from tridecode.kernels.fp8_kv import held
from tridecode.kernels.prompt_attention import prompt_attention, prompt_attention_ref, scratch_sizes
from tridecode.layout import Chunk
from tridecode.step.shapes import PromptAttentionShape

PAGE = 64 if CUDA else 16
SHAPE = PromptAttentionShape() if CUDA else PromptAttentionShape(block_m=16, stages=2, programs=24, least=1)
LONG = 40 if CUDA else 2  # pages of the longest slot
TOLERANCE = {torch.bfloat16: 6e-3, torch.float16: 1e-3, torch.float32: 1e-5}  # p is rounded before the second product
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32]
COUNTS, STARTS = (st.integers(1, 300), st.integers(0, 700)) if CUDA else (st.integers(1, 20), st.integers(0, 40))
SHAPES = [
    PromptAttentionShape(32, 4, 2, programs=7), PromptAttentionShape(32, 4, 2, programs=40, splits=3, least=2),
    *([PromptAttentionShape(128, 8, 3)] if CUDA else ()),
]  # fmt: skip
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


def check(heads, kv, d, chunks, window, dtype, shape=SHAPE, fp8=False):
    """Positions that no row may see hold numbers that would be seen in any sum, or NaN."""
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
    out, ref = poisoned(rows, heads * d, dtype=dtype), poisoned(rows, heads * d)
    partial, lse, counter = (poisoned(*size) for size in scratch_sizes(d, shape).values())
    counter = torch.zeros_like(counter, dtype=torch.int32)
    scratch = partial, lse, counter
    ours, exact = pool[:, 1].unbind(1), pool[:, 1].float().unbind(1)
    if fp8:
        _, *ours = in_8_bits(pool)
        exact = [held(cache, (slice(None),)) for cache in ours]
    prompt_attention(table, order, q, *ours, *scratch, out, window, d**-0.5, shape=shape)
    prompt_attention_ref(table, order, q.float(), *exact, *scratch, ref, window, d**-0.5)
    assert not counter.any(), "counters are zero between launches"
    for chunk in chunks:
        assert_close(out[chunk.rows], ref[chunk.rows], TOLERANCE[dtype], str(chunk))
    beyond = [*range(chunks[0].first), *range(chunks[-1].rows.stop, rows)]
    assert out[beyond].isnan().all(), "a row of no chunk was written"


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


def test_many_slots_share_a_pass():
    check(2, 1, 64, [(slot, 1 + slot % 3, slot % 5) for slot in range(layout.MAX_CHUNKS)], 0, DTYPES[0])
