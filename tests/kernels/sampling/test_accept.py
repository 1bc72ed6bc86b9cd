"""Verification of drafts: their rows, the K/V and the sampled token of each row, and the end of the pass."""

import pytest
import torch
from check import check_op
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_util import CAPACITY, GENERATION, STEP, check, make_state, run_ref
from sampling_util import POSITION as FIRST
from util import DEVICE, poisoned, random

from tridecode import layout as m
from tridecode.kernels.sampling.expand_drafts import EXPAND_DRAFTS
from tridecode.sampling import SamplingParams

VOCAB = 331


def verifying(sampled, drafts, queries, **fields):
    """The state of one request with `queries` rows; `sampled` are the tokens of the first rows."""
    state = make_state(random(queries, VOCAB))
    state.meta = state.meta[:1]
    state.set(DRAFTS=len(drafts), **fields)
    state.tokens[0, FIRST + 1 : FIRST + 1 + len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
    state.sampler.lse.copy_(state.logits.logsumexp(1))
    state.sampled = torch.full((queries,), -5, dtype=torch.int32, device=DEVICE)
    state.sampled[: len(sampled)] = torch.tensor(sampled, dtype=torch.int32)[:queries]
    return state


def verify(sampled, drafts, queries=4, trust=1, counts=True, logprobs=True, **fields):
    """Check accept for one request; return the reported tokens, the request's meta and its first entry of the ring."""
    before = verifying(
        sampled, drafts, queries, **dict(DRAFT_LIMIT=trust, LIMIT=CAPACITY + 1, ALLOCATED=CAPACITY) | fields
    )
    after, _ = check("accept", before, with_logprobs=logprobs, **{} if counts else {"counts": None})
    entries = [m.entry_of(int(after.out[0, (STEP + i) % m.RING]), GENERATION, STEP + i) for i in range(queries)]
    tokens = [entry.token for entry in entries if entry]
    assert tokens == [entry.token for entry in entries[: len(tokens)]], (
        "the tokens of the output ring are in a wrong order"
    )
    assert [entry.following for entry in entries if entry] == list(reversed(range(len(tokens))))
    row = after.meta[0].tolist()
    assert row[m.STEP] == STEP + len(tokens)
    written = [token for token in tokens if token != m.NO_TOKEN]
    assert after.tokens[0, FIRST + 1 : FIRST + 1 + len(written)].tolist() == written
    if counts:
        counted = after.counts - before.counts
        assert counted.nonzero()[:, 1].tolist() == sorted(set(written)) and int(counted.sum()) == 2 * len(written)
    if logprobs:
        for i, token in enumerate(written):
            expected = float(before.logits[i].double().log_softmax(0)[token])
            assert float(after.logprobs[0, (STEP + i) % m.RING, 0]) == pytest.approx(expected, abs=1e-5)
    return tokens, row, entries[0]


@pytest.mark.parametrize("wrong", [0, 1, 2, None])
def test_drafts_are_accepted_up_to_the_first_wrong_one(wrong):
    drafts, sampled = [11, 12, 13], [11, 12, 13, 14]
    if wrong is not None:
        sampled[wrong] = 99
    accepted = 3 if wrong is None else wrong
    tokens, row, entry = verify(sampled, drafts)
    assert tokens == sampled[: accepted + 1]
    assert (row[m.POSITION], row[m.STATUS]) == (FIRST + accepted + 1, m.RUN)
    assert entry.drafted == 3 and row[m.DRAFT_LIMIT] == entry.requested_drafts == accepted


def test_request_may_have_fewer_drafts_than_rows():
    assert verify([11, 12], [11])[0] == [11, 12]
    tokens, row, entry = verify([11], [], trust=5)
    assert tokens == [11] and row[m.DRAFT_LIMIT] == 5 and (entry.drafted, entry.requested_drafts) == (0, 0)


def test_trust_grows_with_success_and_shrinks_with_failure():
    grown = [verify([11] * (trust + 1), [11] * trust, queries=8, trust=trust)[1][m.DRAFT_LIMIT] for trust in (1, 3, 7)]
    assert grown == [3, 7, 7]
    lost = [verify([12], [11] * trust, queries=8, trust=trust)[1][m.DRAFT_LIMIT] for trust in (7, 3, 1)]
    assert lost == [3, 1, 0]
    assert verify([11] * 5 + [12], [11] * 7, queries=8, trust=7)[1][m.DRAFT_LIMIT] == 5


@pytest.mark.parametrize("token, trust", [(11, 1), (12, 0)])
def test_single_row_updates_trust_by_a_draft_that_it_does_not_verify(token, trust):
    tokens, row, entry = verify([token], [11], queries=1, trust=0)
    assert tokens == [token] and row[m.POSITION] == FIRST + 1
    assert row[m.DRAFT_LIMIT] == entry.requested_drafts == trust and entry.drafted == 0


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("kind", ["stop", "limit", "room", "nan"])
def test_generation_ends_at_any_draft(kind, place):
    sampled = [11, 12, 13, 14]
    fields, status = {
        "stop": (dict(N_STOP=1, STOP_IDS=sampled[place]), m.STOP),
        "limit": (dict(LIMIT=FIRST + 2 + place), m.LIMIT_REACHED),
        "room": (dict(ALLOCATED=FIRST + 1 + place), m.WAIT),
        "nan": (dict(), m.NAN),
    }[kind]
    if kind == "nan":
        sampled[place] = m.NO_TOKEN
    tokens, row, _ = verify(sampled, [11, 12, 13], **fields)
    assert tokens == sampled[: place + 1] and row[m.STATUS] == status
    assert row[m.POSITION] == FIRST + place + (kind != "nan")


@pytest.mark.parametrize("queries", [2, 4])
@pytest.mark.parametrize("known", [1, 2, 3])
def test_known_tokens_are_reported_and_keep_the_trust(known, queries):
    """The token after them is sampled if it has a row."""
    drafts = [60, 61, 62][:known]
    fields = dict(N_KNOWN=FIRST + 1 + known, DRAFT_LIMIT=5, N_STOP=1, STOP_IDS=60)
    after, _ = check("accept", verifying([50] * queries, drafts, queries, **fields))
    reported = min(known + 1, queries)
    tokens = [after.entry(step=STEP + place)[1] for place in range(reported)]
    assert tokens == [*drafts, 50][:reported] and after.meta[0, m.DRAFT_LIMIT] == 5
    assert after.progress() == dict(STATUS=m.RUN, POSITION=FIRST + reported, STEP=STEP + reported)


def test_accept_works_without_counts_and_logprobs():
    assert verify([11, 12, 13], [11, 12], counts=False, logprobs=False)[0] == [11, 12, 13]


TOKENS = st.integers(1, 3)


@settings(max_examples=40, deadline=None)
@given(st.lists(TOKENS, max_size=7), st.lists(TOKENS, min_size=8, max_size=8), st.integers(0, 7), st.integers(1, 9))
def test_accept_matches_reference(drafts, sampled, trust, left):
    verify(sampled, drafts, 8, trust, LIMIT=FIRST + 1 + left, N_STOP=1, STOP_IDS=3)


# ---- rows


def test_spread_makes_a_row_for_the_token_and_for_each_draft():
    state = make_state(random(3, 16))
    state.meta[:, m.DRAFTS] = torch.tensor([0, 2, 7], dtype=torch.int32)
    state.meta[:, m.STATUS] = torch.tensor([m.RUN, m.RUN, m.STOP], dtype=torch.int32)
    meta = torch.zeros(12, m.META_WIDTH, dtype=torch.int32, device=DEVICE)
    args = state.meta, state.samp, meta, poisoned(12, m.SAMP_WIDTH)
    launched, _ = check_op(EXPAND_DRAFTS, args, outputs=("meta_out", "samp_out"), idle=False)
    meta, samp = launched["meta_out"], launched["samp_out"]
    assert [status == m.RUN for status in meta[:, m.STATUS].tolist()] == [True] + [False] * 3 + [True] * 3 + [False] * 5
    assert meta[:, m.POSITION].tolist() == [FIRST + query for query in range(4)] * 3
    assert torch.equal(samp[4:8], state.samp[1:2].expand(4, -1))


# ---- sampled tokens of the rows

PARAMS = {
    "plain": SamplingParams(temperature=0.9, top_k=40, seed=3),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=0.9),
    "greedy_with_penalties": SamplingParams(temperature=0, repetition_penalty=1.6, frequency_penalty=0.9),
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_each_row_samples_as_if_the_drafts_before_it_were_counted(params):
    """The rows of one pass sample the same tokens as passes of one row each in which earlier drafts are counted."""
    queries, drafts = 4, [200, 7, 200]
    logits = random(1, VOCAB).repeat(queries, 1)
    logits[:, [7, 200]] = logits.max() + 0.5
    rows = make_state(logits, *[params] * queries)
    rows.meta[:, m.SLOT] = 0
    rows.meta[:, m.POSITION] += torch.arange(queries, device=DEVICE)
    rows.tokens[0, FIRST + 1 : FIRST + 4] = torch.tensor(drafts, dtype=torch.int32)
    rows.counts.zero_()
    rows.sampled = torch.full((queries,), -5, dtype=torch.int32, device=DEVICE)
    after, _ = check("sample", rows, queries=queries)
    for query in range(queries):
        one = make_state(logits[:1], params)
        one.counts.zero_()
        for token in drafts[:query]:
            one.counts[0, token] += 2
        expected = run_ref("sample", one.set(POSITION=FIRST + query, N_KNOWN=0)).tokens[0, FIRST + query + 1]
        assert int(after.sampled[query]) == int(expected), f"row {query}"


def test_greedy_takes_a_token_without_ending_the_pass():
    logits = random(2, VOCAB)
    logits[1, 5] = float("nan")
    state = make_state(logits)
    state.sampled = torch.full((2,), -5, dtype=torch.int32, device=DEVICE)
    for after in check("greedy", state):
        assert after.sampled.tolist() == [int(logits[0].argmax()), m.NO_TOKEN]
