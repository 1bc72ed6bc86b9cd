"""Verifying drafts: rows for them, their K/V, what is drawn behind them, and how far they are accepted."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_util import CAPACITY, GENERATION, PDL, STEP, make_step
from util import CUDA, DEVICE, norm_weight, poisoned, random

from tridecode import layout as m
from tridecode.kernels.attention.attention_rows import AttentionRowsConfig
from tridecode.kernels.attention.write_kv import write_kv, write_kv_ref
from tridecode.kernels.sampling.accept import accept, accept_ref
from tridecode.kernels.sampling.greedy import greedy, greedy_ref
from tridecode.kernels.sampling.sample import sample, sample_ref
from tridecode.kernels.sampling.spread import spread, spread_ref
from tridecode.sampling import SamplingParams

VOCAB = 331
FIRST = 9  # POSITION of make_step


def verify(drawn, drafts, queries=4, trust=1, counts=True, logprobs=True, **state):
    """What both forms of accept leave of one row, of which the position's token and then each draft's was drawn."""
    found = []
    for run in (accept, accept_ref):
        step = make_step(random(queries, VOCAB), *[SamplingParams(temperature=0, seed=1, logprobs=0)] * queries)
        step.meta = step.meta[:1].contiguous()
        step.set(**dict(DRAFTS=len(drafts), TRUST=trust, LIMIT=CAPACITY + 1, ROOM=CAPACITY) | state)
        step.tokens[0, FIRST + 1 : FIRST + 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        step.sampler.lse.copy_(step.logits.logsumexp(1))
        before = step.counts.clone()
        lanes = torch.full((queries,), -5, dtype=torch.int32)
        lanes[: len(drawn)] = torch.tensor(drawn, dtype=torch.int32)[:queries]
        how = dict(pdl=PDL) if run is accept else {}
        rings = (step.sampler.lse, step.logprobs) if logprobs else ()
        counted = step.counts if counts else None
        run(lanes.to(DEVICE), step.meta, step.tokens, counted, step.out, step.logits, *rings, **how)
        if CUDA:
            torch.cuda.synchronize()
        found.append((step, step.counts - before))
    (kernel, counted), (ref, counted_ref) = found
    assert torch.equal(kernel.meta, ref.meta) and torch.equal(kernel.tokens, ref.tokens)
    assert torch.equal(kernel.out, ref.out) and torch.equal(counted, counted_ref)
    assert torch.allclose(kernel.logprobs, ref.logprobs, atol=1e-5, equal_nan=True)
    row = kernel.meta[0].tolist()
    entries = [m.entry_of(int(kernel.out[0, (STEP + i) % m.RING]), GENERATION, STEP + i) for i in range(queries)]
    tokens = [entry.token for entry in entries if entry]
    assert tokens == [entry.token for entry in entries[: len(tokens)]], "entries come in order"
    assert [entry.following for entry in entries if entry] == list(reversed(range(len(tokens))))
    assert row[m.STEP] == STEP + len(tokens)
    written = [token for token in tokens if token != m.NO_TOKEN]
    assert kernel.tokens[0, FIRST + 1 : FIRST + 1 + len(written)].tolist() == written
    if counts:
        assert counted.nonzero()[:, 1].tolist() == sorted(set(written)) and int(counted.sum()) == 2 * len(written)
    return tokens, row, entries[0]


@pytest.mark.parametrize("wrong", [0, 1, 2, 3])
def test_drafts_are_accepted_up_to_the_first_that_was_not_drawn(wrong):
    drafts, drawn = [11, 12, 13], [11, 12, 13, 14]
    if wrong < 3:
        drawn[wrong] = 99
    tokens, row, entry = verify(drawn, drafts)
    assert tokens == drawn[: wrong + 1]
    assert (row[m.POSITION], row[m.STATUS]) == (FIRST + wrong + 1, m.RUN)
    assert entry.drafted == 3 and row[m.TRUST] == entry.wanted == (3 if wrong == 3 else wrong)


def test_fewer_drafts_than_rows_and_none():
    assert verify([11, 12], [11])[0] == [11, 12]
    tokens, row, entry = verify([11], [], trust=5)
    assert tokens == [11] and row[m.TRUST] == 5 and (entry.drafted, entry.wanted) == (0, 0)


def test_trust_grows_with_every_success_and_is_lost_by_failures():
    grown = [verify([11] * (trust + 1), [11] * trust, queries=8, trust=trust)[1][m.TRUST] for trust in (1, 3, 7)]
    assert grown == [3, 7, 7]
    lost = [verify([12], [11] * trust, queries=8, trust=trust)[1][m.TRUST] for trust in (7, 3, 1)]
    assert lost == [3, 1, 0]
    assert verify([11] * 5 + [12], [11] * 7, queries=8, trust=7)[1][m.TRUST] == 5


@pytest.mark.parametrize("token, trust", [(11, 1), (12, 0)])
def test_a_row_alone_learns_from_a_draft_that_it_does_not_verify(token, trust):
    tokens, row, entry = verify([token], [11], queries=1, trust=0)
    assert tokens == [token] and row[m.POSITION] == FIRST + 1
    assert row[m.TRUST] == entry.wanted == trust and entry.drafted == 0


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("kind", ["stop", "limit", "room", "nan"])
def test_the_end_at_every_place(kind, place):
    drafts, drawn = [11, 12, 13], [11, 12, 13, 14]
    state, status = {}, {"stop": m.STOP, "limit": m.LIMIT_REACHED, "room": m.WAIT, "nan": m.NAN}[kind]
    if kind == "stop":
        state = dict(N_STOP=1, STOP_IDS=drawn[place])
    elif kind == "limit":
        state = dict(LIMIT=FIRST + 2 + place)
    elif kind == "room":
        state = dict(ROOM=FIRST + 1 + place)
    else:
        drawn[place] = m.NO_TOKEN
    tokens, row, _ = verify(drawn, drafts, **state)
    assert tokens == drawn[: place + 1] and row[m.STATUS] == status
    assert row[m.POSITION] == FIRST + place + (kind != "nan")


@pytest.mark.parametrize("given", [1, 2, 3])
def test_given_tokens_are_reported_whatever_was_drawn_and_teach_nothing(given):
    """A token behind them is drawn, if there is a row for it."""
    drafts = [60, 61, 62][:given]
    for queries in (2, 4):
        steps = []
        for run, how in ((accept, dict(pdl=PDL)), (accept_ref, {})):
            step = make_step(random(queries, VOCAB))
            step.meta = step.meta[:1].contiguous()
            step.set(N_KNOWN=FIRST + 1 + given, DRAFTS=given, TRUST=5, N_STOP=1, STOP_IDS=60)
            step.tokens[0, FIRST + 1 : FIRST + 1 + given] = torch.tensor(drafts, dtype=torch.int32)
            drawn = torch.full((queries,), 50, dtype=torch.int32, device=DEVICE)
            run(drawn, step.meta, step.tokens, step.counts, step.out, step.logits, **how)
            steps.append(step)
        kernel, ref = steps
        for name in ("meta", "tokens", "counts", "out"):
            assert torch.equal(getattr(kernel, name), getattr(ref, name)), name
        found = min(given + 1, queries)
        tokens = [kernel.entry(step=STEP + place)[1] for place in range(found)]
        assert tokens == [*drafts, 50][:found] and kernel.meta[0, m.TRUST] == 5
        assert kernel.state() == dict(STATUS=m.RUN, POSITION=FIRST + found, STEP=STEP + found)


def test_greedy_keeps_no_counts_and_without_logprobs_nothing_is_reported():
    assert verify([11, 12, 13], [11, 12], counts=False, logprobs=False)[0] == [11, 12, 13]


TOKENS = st.integers(1, 3)


@settings(max_examples=40, deadline=None)
@given(st.lists(TOKENS, max_size=7), st.lists(TOKENS, min_size=8, max_size=8), st.integers(0, 7), st.integers(1, 9))
def test_any_drafts(drafts, drawn, trust, left):
    queries = 8
    verify(drawn, drafts, queries, trust, LIMIT=FIRST + 1 + left, N_STOP=1, STOP_IDS=3)


# ---- rows


def test_a_row_for_the_token_and_each_draft():
    step = make_step(random(3, 16))
    step.meta[:, m.DRAFTS] = torch.tensor([0, 2, 7], dtype=torch.int32)
    step.meta[:, m.STATUS] = torch.tensor([m.RUN, m.RUN, m.STOP], dtype=torch.int32)
    outs = []
    for run in (spread, spread_ref):
        meta = torch.full((12, m.META_WIDTH), -9, dtype=torch.int32, device=DEVICE)
        samp = poisoned(12, m.SAMP_WIDTH)
        run(step.meta, step.samp, meta, samp)
        outs.append((meta, samp))
    (meta, samp), (meta_ref, samp_ref) = outs
    assert torch.equal(meta, meta_ref) and torch.equal(samp, samp_ref)
    assert [status == m.RUN for status in meta[:, m.STATUS].tolist()] == [True] + [False] * 3 + [True] * 3 + [False] * 5
    assert meta[:, m.POSITION].tolist() == [FIRST + query for query in range(4)] * 3
    assert torch.equal(samp[4:8], step.samp[1:2].expand(4, -1))


@pytest.mark.parametrize("norm", [True, False])
def test_k_and_v_of_every_row_that_runs(norm):
    heads, kv_heads, dim, page = 4, 2, 80, 16
    step = make_step(random(5, 16))
    step.meta[:, m.POSITION] = torch.tensor([14, 15, 16, 2**30, 30], dtype=torch.int32)  # of an idle row any
    step.meta[:, m.SLOT] = torch.tensor([1, 1, 1, 1, 0], dtype=torch.int32)
    step.meta[3, m.STATUS] = m.WAIT
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    angle = random(40, dim // 2)
    args = table, random(5, (heads + 2 * kv_heads) * dim), norm_weight(dim) if norm else None, angle.cos(), angle.sin()
    caches = []
    for run, how in ((write_kv, dict(config=AttentionRowsConfig(), pdl=PDL)), (write_kv_ref, {})):
        k, v = poisoned(4, kv_heads, page, dim), poisoned(4, kv_heads, page, dim)
        run(step.meta, *args, k, v, 1e-6, **how)
        caches.append((k, v))
    for kernel, ref in zip(*caches):
        assert torch.equal(kernel.isnan(), ref.isnan()) and torch.allclose(kernel, ref, atol=1e-5, equal_nan=True)
        written = (~kernel[..., 0].isnan()).any(1).nonzero().tolist()
        assert written == [[0, 14], [0, 15], [1, 14], [2, 0]]


# ---- draws

KINDS = {
    "plain": SamplingParams(temperature=0.9, top_k=40, seed=3),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=0.9),
    "greedy with penalties": SamplingParams(temperature=0, repetition_penalty=1.6, frequency_penalty=0.9),
}


def arguments(step):
    return [getattr(step, name) for name in ("logits", "meta", "samp", "tokens", "counts", "bias", "out", "sampler")]


@pytest.mark.parametrize("params", KINDS.values(), ids=KINDS)
def test_each_row_draws_as_if_the_drafts_before_it_had_been_drawn(params):
    """The rows of one pass, against passes of one row after the tokens before it were counted."""
    queries, drafts = 4, [200, 7, 200]
    logits = random(1, VOCAB).repeat(queries, 1)
    logits[:, [7, 200]] = logits.max() + 0.5
    for run, how in ((sample, dict(pdl=PDL)), (sample_ref, {})):
        rows = make_step(logits, *[params] * queries)
        rows.meta[:, m.SLOT] = 0
        rows.meta[:, m.POSITION] += torch.arange(queries, device=DEVICE)
        rows.tokens[0, FIRST + 1 : FIRST + 4] = torch.tensor(drafts, dtype=torch.int32)
        rows.counts.zero_()
        drawn = torch.full((queries,), -5, dtype=torch.int32, device=DEVICE)
        state = rows.copy()
        run(*arguments(rows), None, False, drawn, queries, **how)
        for name in ("meta", "tokens", "counts", "out"):
            assert torch.equal(getattr(rows, name), getattr(state, name)), f"{name}: the step does not end here"
        for query in range(queries):
            one = make_step(logits[:1], params)
            one.counts.zero_()
            for token in drafts[:query]:
                one.counts[0, token] += 2
            one.set(POSITION=FIRST + query, N_KNOWN=0)
            sample_ref(*arguments(one))
            assert int(drawn[query]) == int(one.tokens[0, FIRST + query + 1]), f"row {query}"


def test_greedy_draws_without_ending_the_step():
    logits = random(2, VOCAB)
    logits[1, 5] = float("nan")
    for run, how in ((greedy, dict(pdl=PDL)), (greedy_ref, {})):
        rows = make_step(logits)
        state, drawn = rows.copy(), torch.full((2,), -5, dtype=torch.int32, device=DEVICE)
        run(rows.logits, rows.meta, rows.tokens, rows.out, rows.sampler, False, drawn, **how)
        assert drawn.tolist() == [int(logits[0].argmax()), m.NO_TOKEN]
        assert torch.equal(rows.meta, state.meta) and torch.equal(rows.tokens, state.tokens)
