"""Masks of allowed tokens: rows with a mask, rows without one, and a row whose mask is late."""

import pytest
import torch
from sampling_util import GENERATION, POSITION, STEP, UNTOUCHED, assert_same, check, make_state, run
from util import Case, covering, random

from tridecode import SamplingParams
from tridecode import layout as m

CASES = [
    Case("qwen3", gpu=dict(rows=3, vocab=151936), small=dict(rows=3, vocab=3000)),
    Case("odd", gpu=dict(rows=2, vocab=32003), small=dict(rows=2, vocab=4097)),
    Case("less_than_a_word", gpu=dict(rows=2, vocab=7), small=dict(rows=2, vocab=7)),
]
KINDS = pytest.mark.parametrize("kind", ["greedy", "sample"])
STAMP = m.mask_stamp(GENERATION, POSITION)
PARAMS = {
    "greedy": SamplingParams(temperature=0),
    "sample": SamplingParams(temperature=1.5, top_k=50, top_p=0.99, repetition_penalty=0.01, frequency_penalty=-2.0),
}


def masked_state(rows, vocab, allowed, params, stamp=STAMP, first=0):
    """A state in which the masks of the rows from `first` on allow the tokens `allowed`."""
    state = make_state(random(rows, vocab, scale=4), *[params] * rows)
    bits = torch.zeros(32 * m.mask_words(vocab), dtype=torch.int64)
    bits[list(allowed)] = 1
    words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
    state.mask[:] = torch.where(words >= 2**31, words - 2**32, words).int()
    state.stamp[first:] = stamp
    state.meta[first:, m.FLAGS] |= m.FLAG_MASK
    return state


@covering(2, case=CASES, kind=PARAMS.keys())
def test_masked_rows_take_allowed_tokens(case, kind):
    rows, vocab = case.sizes.values()
    allowed = {0, vocab - 1, vocab // 2}
    before = masked_state(rows, vocab, allowed, PARAMS[kind], first=1)
    unmasked = run(kind, before.copy())
    after, _ = check(kind, before, masked=True)
    assert torch.equal(after.tokens[0], unmasked.tokens[0])
    for row in range(1, rows):
        assert after.entry(row)[1] in allowed and after.tokens[row, POSITION + 1] == after.entry(row)[1]


@covering(1, kind=PARAMS.keys(), token=[0, 31, 32, 1023, 1024, 2999])
def test_single_allowed_token_wins_over_bias_and_top_k(kind, token):
    params = SamplingParams(temperature=1.0, logit_bias={token: -1e30, 5: 1e30}, top_k=3)
    before = masked_state(1, 3000, [token], PARAMS["greedy"] if kind == "greedy" else params)
    for after in check(kind, before, masked=True):
        assert after.entry() == (STEP, token)


STAMPS = {
    "previous_position": m.mask_stamp(GENERATION, POSITION - 1),
    "another_request": m.mask_stamp(GENERATION - 1, POSITION),
    "none": 0,
}


@KINDS
@pytest.mark.parametrize("stamp", STAMPS.values(), ids=STAMPS)
def test_row_with_a_late_mask_repeats_its_pass(kind, stamp):
    before = masked_state(2, 3000, [7], PARAMS[kind], stamp, first=1)
    states = check(kind, before, masked=True)
    for after in states:
        assert after.progress(0) == dict(STATUS=m.RUN, POSITION=POSITION + 1, STEP=STEP + 1)
        assert after.progress(1) == dict(STATUS=m.RUN, POSITION=POSITION, STEP=STEP + 1)
        assert after.entry(1) == (STEP, m.LATE_TOKEN) and after.tokens[1, POSITION + 1] == UNTOUCHED
        assert torch.equal(after.counts[1].cpu(), before.counts[1].cpu())
    repeated = states[0]
    repeated.stamp[1] = STAMP
    repeated.meta[0, m.STATUS] = m.STOP
    for again in check(kind, repeated, masked=True):
        assert again.progress(1) == dict(STATUS=m.RUN, POSITION=POSITION + 1, STEP=STEP + 2)
        assert again.entry(1, STEP + 1) == (STEP + 1, 7) and again.tokens[1, POSITION + 1] == 7


@pytest.mark.filterwarnings("ignore:overflow")  # In the interpreter, numpy gives this warning.
@KINDS
def test_allowed_non_finite_logit_ends_the_generation(kind):
    before = masked_state(1, 3000, [7, 1500], PARAMS[kind])
    before.logits[0, 1500] = float("nan")
    for after in check(kind, before, masked=True):
        assert after.progress() == dict(STATUS=m.NAN, POSITION=POSITION, STEP=STEP + 1)


@pytest.mark.parametrize("fields", [dict(N_KNOWN=POSITION + 2), dict(FLAGS=0)], ids=["known_token", "no_mask"])
def test_mask_leaves_rows_that_need_none(fields):
    before = masked_state(1, 3000, [7], PARAMS["sample"]).set(**fields)
    for after in check("mask", before):
        assert_same(after, before, "logits", "meta")
